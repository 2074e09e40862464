"""Ctrl-C at random moments, the short form."""

import random
from pathlib import Path

import pytest

from benchmarks.reliability.interrupts import ROOT, interrupted, undisturbed

APP = ROOT / "apps" / "pi.py"
OPTIONS = ["--local", "2"]


def test_an_interrupt_at_any_moment_ends_the_run_and_leaves_nothing():
    whole = undisturbed(APP, OPTIONS)
    chance = random.Random(1)
    for again_s in (None, None, None, None, 0.0, 0.1):
        outcome = interrupted(APP, OPTIONS, chance.uniform(0, whole), again_s)
        assert outcome.problems == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("open('left.txt', 'w')", "left.txt"),
        ("import tempfile; tempfile.mkdtemp(prefix='ddlf-')", "/tmp/ddlf-"),
        ("open(f'/dev/shm/ddlf-left-{__import__(\"os\").getpid()}', 'w')", "left: /dev/shm/ddlf-left-"),
        ("import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True)", "is left: sleep 30"),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", "went on"),
        ("import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(7))", "ended with 7"),
    ],
)
def test_the_check_finds_what_is_wrong(tmp_path: Path, monkeypatch, line, problem):
    monkeypatch.setattr("benchmarks.reliability.interrupts.LIMIT_S", 7)
    app = tmp_path / "bad.py"
    app.write_text(f"import time\n{line}\ntime.sleep(3)\nasync def main(cluster): pass\n")
    outcome = interrupted(app, ["--local", "1"], 2.0)
    for path in Path("/dev/shm").glob("ddlf-left-*"):
        path.unlink()
    assert problem in "; ".join(outcome.problems)
