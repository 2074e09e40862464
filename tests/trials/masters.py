"""The master of a run on partition files is killed at random moments inside epochs, and started again.

    python -m tests.trials.masters [--kills 20] [--seed 0]

Partition files are on a web server of this process, which counts what is fetched; the cache and the checkpoints are on the disk. Master,
checkpoints and reading are the real thing, in a process that is killed (``kill -9``); its workers are made up, and compare each sample that they
read with its id. After each kill the run is resumed. It must end with the weights and optimizers of an undisturbed run and an exact ledger, do again
at most one interval between checkpoints for each kill, and fetch no partition file again. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.place import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import sizes_of, split

SAMPLES, FILES, SLOTS, EPOCHS, ROUNDS = 420, 7, 3, 4, 4
TASK_S = 0.02
"""Each task takes that long, so that most kills are inside of one."""

CHILD = """
import asyncio, hashlib, json, sys, time
import numpy as np
from ddlf.data.data_set import DataSet
from ddlf.data.stream import Stream
from ddlf.testing import FakeCluster, FakeRun, FakeWorker

url, folder, log, facts = sys.argv[1], sys.argv[2], open(sys.argv[3], "a", buffering=1), json.loads(sys.argv[4])
data = DataSet(url)
run = FakeRun(FakeCluster(facts["slots"]), slots=facts["slots"], files=tuple(data.manifest.sizes.tolist()), train_data=data,
              master_epochs=facts["epochs"], round_samples=facts["round"], checkpoint=folder, resume="auto")
for worker in run.cluster.workers:
    def train(task, worker=worker):
        log.write(f"begun {task.round}\\n")
        read = [chunk["y"] for chunk in Stream(data.at(task.indices.version), task.indices, 16, 10**7)]
        assert np.array_equal(np.concatenate(read), task.indices.ids(data.manifest.sizes))
        time.sleep(facts["task_s"])
        return FakeWorker.train(worker, task)
    worker.train = train
run.on_round = lambda record: log.write(f"over {record.round - 1}\\n") and None
asyncio.run(run.train_model())
total = hashlib.sha256()
for array in [*run.model.get_weights(), *(array for state in run.optimizers for array in state)]:
    total.update(array.tobytes())
print(json.dumps([total.hexdigest(), run.ledger.is_exact(facts["epochs"])]))
"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """A web server of a folder, and how often each file was fetched whole."""
    counts: Counter[str] = Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            counts[self.path] += 1
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", counts
        finally:
            server.shutdown()


class Runs:
    """Runs of one training, each in a process.

    Args:
        folder: Where all of it is.
        url: Of the partition files.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url

    def start(self, name: str) -> subprocess.Popen[str]:
        """Begin a training, or go on with it."""
        facts = {"slots": SLOTS, "epochs": EPOCHS, "round": -(-SAMPLES // ROUNDS), "task_s": TASK_S}
        arguments = [self._url, str(self.folder / name), str(self.log(name)), json.dumps(facts)]
        environment = {**os.environ, "DDLF_CACHE": str(self.folder / "cache")}
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )

    def log(self, name: str) -> Path:
        """What it has written of its rounds."""
        return self.folder / f"{name}.log"

    def lines(self, name: str) -> list[str]:
        """The whole ones of them."""
        path = self.log(name)
        return path.read_text().splitlines() if path.exists() else []

    def ended(self, process: subprocess.Popen[str]) -> list[Any]:
        """What a run that was not killed has come to."""
        out, _ = process.communicate()
        assert process.returncode == 0, "it failed"
        return list(json.loads(out))


def trial(kills: int, seed: int) -> dict[str, Any]:
    """Kill a master so often, at moments of this seed; what came of it."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(
            folder / "a.npz", x=np.arange(SAMPLES * 50, dtype=np.float32).reshape(SAMPLES, 50), y=np.arange(SAMPLES)
        )
        made = split(
            open_source(folder / "a.npz"), Folder(folder / "place"), sizes_of(SAMPLES, 1, files=FILES), shuffle=False
        )
        with served(folder / "place") as (url, counts):
            runs = Runs(folder, url)
            wanted = runs.ended(runs.start("whole"))
            fetched = Counter({file.name: counts[f"/{file.name}"] for file in made.files})
            tasks, killed, most = SLOTS * ROUNDS * EPOCHS, 0, 0
            while killed < kills:
                before = len(runs.lines("killed"))
                process, left = runs.start("killed"), tasks
                wait_for = before + chance.randrange(1, max(2, left // (kills + 1)))
                while process.poll() is None and len(runs.lines("killed")) < wait_for:
                    time.sleep(0.002)
                time.sleep(chance.random() * TASK_S)
                over = process.poll() is not None
                process.kill()
                process.communicate()
                if over:
                    break  # it has ended before
                killed += 1
            found = runs.ended(runs.start("killed"))
            again = {file.name: counts[f"/{file.name}"] for file in made.files}
        done = -1
        for line in runs.lines("killed"):
            what, number = line.split()
            if what == "over":
                done = max(done, int(number))
            else:
                most = max(most, done + 1 - int(number))
    return {
        "kills": killed,
        "same_bits": found == wanted,
        "exact": wanted[1] and found[1],
        "rounds_again": most,
        "fetched": sorted(set(fetched.values())),
        "fetched_again": sum(again.values()) - sum(fetched.values()),
        "sha256": hashlib.sha256(str(wanted).encode()).hexdigest()[:12],
    }


def is_well(result: dict[str, Any]) -> bool:
    """Whether it is what was promised."""
    return bool(result["same_bits"] and result["exact"] and result["rounds_again"] <= 1 and not result["fetched_again"])


def main() -> int:
    """Do it and print it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = trial(options.kills, options.seed)
    print(json.dumps(result, indent=1))
    return 0 if is_well(result) else 1


if __name__ == "__main__":
    sys.exit(main())
