"""Tests of the guard, a shell that removes the files of a run after its master has ended."""

import signal
import subprocess
import sys
import time

import pytest

from ddlf.cluster.launch.guard import Guard
from tests.patience import PATIENCE_S

MASTER = """
import sys, time
from pathlib import Path
from ddlf.cluster.launch.guard import Guard
guard = Guard(Path(sys.argv[1]))
print("begun", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_file_is_removed_when_the_master_is_killed(number, tmp_path):
    file = tmp_path / "a token"
    file.touch()
    command = [sys.executable, "-c", MASTER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as master:
        assert master.stdout.readline() == b"begun\n"
        assert file.exists()
        master.send_signal(number)
        end = time.monotonic() + PATIENCE_S
        while file.exists():
            assert time.monotonic() < end
            time.sleep(0.01)


def test_file_is_removed_at_the_end(tmp_path):
    file = tmp_path / "token"
    file.touch()
    guard = Guard(file, tmp_path / "missing")
    assert file.exists()
    guard.close()
    guard.close()
    assert not file.exists()
