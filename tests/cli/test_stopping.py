"""Tests of Ctrl-C and SIGTERM during training: the saved weights, and the messages."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.errors import ConfigError
from ddlf.worker.grace import SAME_SIGNAL_S, grace_s
from tests import warm
from tests.patience import PATIENCE_S
from tests.processes import command

# An app with rounds that need no Keras. Round 2 waits for the file "go", and round 3 does not end in a test.
APP = """
import asyncio
import pathlib
import ddlf
from ddlf.events.record import RoundRecord

class A(ddlf.IApp):
    async def load_dataset(self): pass
    async def create_model(self): pass

    async def train_model(self):
        print("preparing", flush=True)
        if pathlib.Path("slow").exists():
            await asyncio.sleep(60)
        self.run_context.stop = False
        try:
            for number in (1, 2, 3):
                print("in round", number, flush=True)
                if number == 2:
                    while not pathlib.Path("go").exists():
                        await asyncio.sleep(0.02)
                if number == 3 and not pathlib.Path("short").exists():
                    await asyncio.sleep(60)
                self.history.append(RoundRecord(
                    round=number, rounds=3, version=number, epochs=1, samples=1, seconds=1, compute_s=1, transfer_s=0, merge_s=0,
                    bytes_out=0, bytes_back=0,
                ))
                if pathlib.Path("fail").exists():
                    raise ddlf.DDLFError("all workers are lost")
                if self.run_context.stop:
                    return
        finally:
            self.run_context.stop = None

    async def save_model(self, path):
        if pathlib.Path("full").exists() and not (pathlib.Path("room").exists() and pathlib.Path(path).is_absolute()):
            raise OSError("no space left")
        if pathlib.Path("saving").exists():
            print("saving", flush=True)
            while not pathlib.Path("saved").exists():
                await asyncio.sleep(0.02)
        pathlib.Path(path).write_text(str(len(self.history)))

    async def evaluate_model(self):
        print("evaluating", flush=True)
        if pathlib.Path("wrong").exists():
            raise ValueError("no test labels")
        return {}

    x_test = 1
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    """Start one worker for all tests of this file, and yield the options that name it. It needs no Keras either."""
    state = tmp_path_factory.mktemp("state")
    arguments = ["-m", "ddlf.cli.worker", "--port", "0", "--host", "127.0.0.1", "--state-dir", state]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        port = next(match[1] for line in process.stdout if (match := re.search(r"ready on 127.0.0.1:(\d+)", line)))
        yield ["--hosts", f"127.0.0.1:{port}"]
        process.terminate()


@pytest.fixture
def train(tmp_path, where):
    """Return a function that starts training and returns the process, with text streams."""
    (tmp_path / "app.py").write_text(APP)

    def begin(*arguments, until="in round 2"):
        process = warm.begin("ddlf.cli.main", "run", "app.py", *where, *arguments, cwd=tmp_path)
        while process.stdout.readline() != f"{until}\n":
            assert process.poll() is None, process.stderr.read()
        return process

    return begin


def line(process):
    """Return the next line of the process's errors that is not empty."""
    return process.stderr.readline().strip() or process.stderr.readline().strip()


def test_first_interrupt_ends_after_round_and_saves(train, tmp_path, descendants):
    process = train("--save", "m.keras")
    process.send_signal(signal.SIGINT)
    expected = "stopping  after this round; then the model is saved in m.keras. Press Ctrl-C again to stop at once;"
    assert line(process) == f"{expected} m.keras then has the previous round"
    (tmp_path / "go").touch()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors) == ("evaluating\n", "stopped   after round 2 of 3\n")
    assert process.returncode == 130
    assert (tmp_path / "m.keras").read_text() == "2"
    assert descendants() == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "stopping  after this round. Press Ctrl-C again to stop at once; the run then keeps nothing, since"),
        (
            ("--checkpoint", "runs"),
            "stopping  after this round. Press Ctrl-C again to stop at once; runs then has the previous round",
        ),
        pytest.param(
            ("--mode", "async"),
            "stopping  after this update. Press Ctrl-C again to stop at once; the run then keeps nothing, since",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_second_interrupt_stops_at_once_as_announced(train, tmp_path, arguments, sentence):
    process = train(*arguments)
    process.send_signal(signal.SIGINT)
    assert line(process).startswith(sentence)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    message = (
        "kept      round 1 of 3: everything is in runs; to continue, run the same command with --resume auto\n"
        * ("runs" in arguments)
    )
    assert (output, errors, process.returncode) == ("", f"{message}\nstopped\n", 130)


def test_second_interrupt_saves_last_complete_round(train, tmp_path):
    process = train("--save", "m.keras")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        line(process)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("", 130)
    assert (tmp_path / "m.keras").read_text() == "1"


def test_interrupt_before_first_round_stops_at_once(train, tmp_path):
    (tmp_path / "slow").touch()
    process = train("--save", "m.keras", until="preparing")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (errors, process.returncode) == ("\nstopped\n", 130)
    assert not (tmp_path / "m.keras").exists()


def test_sigterm_keeps_the_last_complete_round_if_the_next_one_takes_too_long(
    train, tmp_path, descendants, monkeypatch
):
    monkeypatch.setenv("DDLF_GRACE", "0.125")
    process = train("--save", "m.keras")
    process.terminate()
    assert line(process) == "stopping  by SIGTERM: after this round, or in 0.1 s with the last complete one"
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("", 143)
    assert errors == "kept      round 1 of 3: the model is in m.keras\n\nstopped   by SIGTERM\n"
    assert (tmp_path / "m.keras").read_text() == "1"
    assert descendants() == []


def test_sigterm_ends_after_the_round_without_an_evaluation_if_there_is_time(train, tmp_path, descendants, monkeypatch):
    monkeypatch.setenv("DDLF_GRACE", "1000")
    process = train("--save", "m.keras")
    process.terminate()
    assert line(process).startswith("stopping  by SIGTERM: after this round")
    (tmp_path / "go").touch()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("", 143)
    left_out = "the test data is not evaluated, because SIGTERM asks for a quick end\n"
    assert errors == f"{left_out}stopped   after round 2 of 3\n\nstopped   by SIGTERM\n"
    assert (tmp_path / "m.keras").read_text() == "2"
    assert descendants() == []


def test_grace_that_is_not_a_number_is_refused(monkeypatch):
    for wrong in ("soon", "-1", "inf"):
        monkeypatch.setenv("DDLF_GRACE", wrong)
        with pytest.raises(ConfigError, match=f"DDLF_GRACE must be a number of seconds, got '{wrong}'"):
            grace_s()


def test_second_sigterm_ends_at_once_even_during_a_save(train, tmp_path):
    for name in ("go", "short", "saving"):
        (tmp_path / name).touch()
    process = train("--save", "m.keras", until="saving")
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2 * SAME_SIGNAL_S)
    for _ in range(PATIENCE_S):  # a busy machine may handle the first signal so late that the second counts as the same
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2 * SAME_SIGNAL_S)
            break
    assert process.returncode == -signal.SIGTERM
    process.stdout.close()
    process.stderr.close()


@pytest.fixture
def run(tmp_path, where):
    """Return a function that trains to the end, with the given files present."""
    (tmp_path / "app.py").write_text(APP)

    def end(*present):
        for name in ("go", *present):
            (tmp_path / name).touch()
        return command("ddlf.cli.main", "run", "app.py", *where, "-q", "--save", "m.keras", cwd=tmp_path)

    return end


def test_failed_run_keeps_model_of_complete_rounds(run, tmp_path):
    ended = run("fail")
    message = "kept      round 1 of 3: the model is in m.keras\n"
    assert (ended.returncode, ended.stderr) == (1, f"{message}error  all workers are lost\n")
    assert (tmp_path / "m.keras").read_text() == "1"


def test_failed_save_does_not_hide_error_of_run(run):
    ended = run("fail", "full")
    assert ended.stderr == "the model could not be saved in m.keras: no space left\nerror  all workers are lost\n"


def test_model_that_cannot_be_saved_is_saved_for_a_while_elsewhere(run, tmp_path):
    ended = run("short", "full", "room")
    sentence, path, advice = re.fullmatch(r"(.* left); it is in (\S*) (.*)\n", ended.stderr).groups()
    assert sentence == "the model could not be saved in m.keras: no space left"
    assert advice == "instead: move it, because that folder is temporary"
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (7, "preparing")
    assert Path(path).read_text() == "3"


def test_complete_training_without_its_model_fails(run, own_folders):
    folders = set((own_folders / "tmp").iterdir())
    ended = run("short", "full")
    assert ended.stderr == "the model could not be saved in m.keras: no space left\n"
    assert ended.returncode == 7
    assert set((own_folders / "tmp").iterdir()) == folders


def test_failed_evaluation_leaves_saved_model(run, tmp_path):
    ended = run("short", "wrong")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "evaluating")
    assert (tmp_path / "m.keras").read_text() == "3"
    message = "the training is complete and its model is in m.keras; only the evaluation failed:\nTraceback"
    assert ended.stderr.startswith(message)
    assert "ValueError: no test labels" in ended.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_save_lets_it_finish(train, tmp_path, number, code):
    for name in ("go", "short", "saving"):
        (tmp_path / name).touch()
    process = train("--save", "m.keras", until="saving")
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    (tmp_path / "saved").touch()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, process.returncode) == ("", code)
    assert errors.startswith("\nstopped")
    assert (tmp_path / "m.keras").read_text() == "3"


IMPORTS = """
import time
from ddlf.training import roles
from ddlf.cli.stopping import leave_an_import, run_until_signal

async def run(stop):
    roles.importlib.import_module = lambda name: print("imports", flush=True) or time.sleep(1000)
    await roles.have_keras()

try:
    code = run_until_signal(run)
except KeyboardInterrupt:
    code = 130
leave_an_import(code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_does_not_wait_for_endless_import(number, code):
    process = subprocess.Popen([sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"imports\n"
    process.send_signal(number)
    try:
        assert process.wait(PATIENCE_S) == code
    finally:
        process.kill()
        process.stdout.close()


AFTERWARDS = """
import os, signal
from ddlf.cli.stopping import run_until_signal

async def run(stop):
    return 0

run_until_signal(run)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_after_the_run_ends_the_process_without_a_traceback():
    ended = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, "")


NOTICED = """
import os, signal, sys
from ddlf.cli.stopping import run_until_signal
from ddlf.errors import ClusterTooSmall

async def run(stop):
    stop.gently = lambda: True
    stop.requeue = lambda: print("again")
    stop.is_complete = len(sys.argv) > 1
    os.kill(os.getpid(), signal.SIGTERM)
    if not stop.is_complete:
        raise ClusterTooSmall("all workers are lost")
    return 0

sys.exit(run_until_signal(run))
"""


def test_loss_of_all_workers_after_a_notice_counts_as_an_end_by_the_notice():
    ended = subprocess.run([sys.executable, "-c", NOTICED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (143, "again\n")
    assert ended.stderr.endswith("all workers are lost\n\nstopped   by SIGTERM\n")


def test_run_that_completes_despite_a_notice_is_not_started_again():
    command = [sys.executable, "-c", NOTICED, "complete"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (0, "")
