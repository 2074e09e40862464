"""Helpers of the tests with real engines: an app, its run as a command, and the processes of workers on this machine."""

import asyncio
import base64
import contextlib
import hashlib
import subprocess
import sys

import psutil

from ddlf.errors import ConnectError, WorkerLost
from tests.patience import PATIENCE_S

APP = """
import numpy as np
import ddlf


class Small(ddlf.IApp):
    batch_size = 32
    master_epochs = 2
    seed = 3
    slots = 4
    threads = 1

    async def load_dataset(self):
        numbers = np.random.default_rng(0)
        self.x_train = numbers.normal(size=(512, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self):
        import keras

        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.3)]
        self.model = keras.Sequential([*layers, keras.layers.Dense(2, "softmax")])
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
"""


def started(folder, *options):
    """Start ``ddlf run`` of the app in a folder."""
    (folder / "app.py").write_text(APP)
    return subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", "run", "app.py", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights_after(folder, *options):
    """Run the app, and return the hash of its weights."""
    process = started(folder, *options, "--save", "model.safetensors")
    output, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, output
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def number(self):
    """Return the number of a worker, on it."""
    return self.id


async def numbers(cluster, expected):
    """Wait until these workers answer."""
    while True:
        with contextlib.suppress(WorkerLost, ConnectError):
            for worker in cluster.workers:
                if not worker.connected:
                    await worker.reconnect()
            if await cluster.run_method(number) == expected:
                return


async def left(cluster, index):
    """Wait until the launcher knows how the worker at a place ended, and return the reason."""
    while (end := await cluster._launcher.left(index)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return end


def processes(*words, mark=None):
    """Return the processes of this machine that have all these words in their arguments, by place or process id.

    Args:
        words: The words.
        mark: A value of the environment variable MARK, which only the wanted processes have.
    """
    matching = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            arguments = process.cmdline()
            is_one = all(word in " ".join(arguments) for word in words)
            if is_one and (mark is None or process.environ().get("MARK") == mark):
                is_at = arguments.index("--place") + 1 if "--place" in arguments else None
                matching[int(arguments[is_at]) if is_at else process.pid] = process
    return matching


def workers_of(cluster):
    """Return the processes of a cluster's workers, by place."""
    return processes("ddlf.cli.worker", f":{cluster._launcher.gate.port} ")


async def replaced(cluster, before):
    """Kill a worker's process, wait until another worker runs at its place, and return the new process."""
    place = int(before.cmdline()[before.cmdline().index("--place") + 1])
    before.kill()
    while (new := workers_of(cluster).get(place)) in (None, before):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return new


def is_alive(process):
    """Return whether a process runs. A zombie, which waits for its parent to read its exit code, does not run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def until_ended(process):
    """Wait until a process has ended."""
    while is_alive(process):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def assert_hidden(secret, folders=()):
    """Fail if a token is in the arguments or the environment of a process, or in a file of these folders."""
    forms = {secret, base64.b64encode(secret)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join([*process.cmdline(), *process.environ().values()]).encode()
            assert not any(form in words for form in forms), process
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not any(form in data for form in forms), path
