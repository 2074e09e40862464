"""Run the short form of the trial that sends Ctrl-C at random moments."""

import random
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.trials import interrupts
from tests.trials.interrupts import ROOT, interrupted, undisturbed

APP = ROOT / "apps" / "pi.py"
OPTIONS = ["--local", "2"]


def test_an_interrupt_at_any_moment_ends_the_run_and_leaves_nothing(monkeypatch):
    run_s = undisturbed(APP, OPTIONS)
    monkeypatch.setattr(interrupts, "LIMIT_S", PATIENCE_S)
    monkeypatch.setattr(interrupts, "IGNORED_S", max(interrupts.IGNORED_S, run_s / 2))
    chance = random.Random(1)
    for again_s in (None, None, None, None, 0.0, 0.1):
        outcome = interrupted(APP, OPTIONS, chance.uniform(0, run_s), again_s)
        assert outcome.problems == []


@pytest.fixture(scope="module")
def run_s(tmp_path_factory):
    """Return the seconds of a command that does nothing, on this machine."""
    app = tmp_path_factory.mktemp("app") / "nothing.py"
    app.write_text("async def main(cluster): pass\n")
    return undisturbed(app, ["--local", "1"])


LEFT = {
    "open('left.txt', 'w')": "left.txt",
    "import tempfile; tempfile.mkdtemp(prefix='ddlf-kept-')": "/tmp/ddlf-kept-",
    "open(f'/dev/shm/ddlf-left-{__import__(\"os\").getpid()}', 'w')": "left: /dev/shm/ddlf-left-",
    "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)": "is left: sleep 300",
}
"""Lines of an app that leave something, and the problems that the check must find. One run has all of them."""


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ("\n".join(LEFT), [*LEFT.values()]),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", ["continued for"]),
        ("import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(7))", ["ended with 7"]),
    ],
    ids=["leaves", "continues", "other code"],
)
def test_the_check_finds_problems(tmp_path: Path, monkeypatch, run_s, lines, problems):
    monkeypatch.setattr("tests.trials.interrupts.LIMIT_S", 6 * run_s + 5)
    app = tmp_path / "bad.py"
    # The interrupt comes while the app sleeps: after the lines, and before the end.
    app.write_text(f"import time\n{lines}\ntime.sleep({4 * run_s + 4})\nasync def main(cluster): pass\n")
    outcome = interrupted(app, ["--local", "1"], 2 * run_s + 2)
    for path in Path("/dev/shm").glob("ddlf-left-*"):
        path.unlink()
    reported = "; ".join(outcome.problems)
    assert [problem for problem in problems if problem not in reported] == [], reported
