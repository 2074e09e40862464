"""Run the short form of the trial of engines with the rig ``command``, which needs no engine, and test the checks."""

import json
import random
import subprocess
import sys
import time

import pytest

from tests.engines.__main__ import run as run_tests
from tests.engines.needs import NEEDS, Needs
from tests.patience import PATIENCE_S
from tests.trials.engines import series, stuck, ways
from tests.trials.engines.command import CommandRig
from tests.trials.engines.rig import CALLS, RIGS, ROOT, End, Rig, Run, Victim

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)


def silent(text):
    pass


@pytest.fixture
def rig(tmp_path):
    (tmp_path / "engine").mkdir()
    rig = CommandRig(tmp_path / "engine")
    rig.places = 2
    with rig:
        yield rig


@pytest.fixture
def run(rig, tmp_path):
    """Return a run without workers. Tests write its events."""
    run = Run(rig, tmp_path / "run", command=["sleep", "1000"])
    yield run
    run.process.kill()
    run.process.wait()


def write(run, *events):
    with (run.folder / "events.jsonl").open("a") as file:
        for event, facts in events:
            file.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")


@pytest.mark.slow
def test_losses_notices_and_ends_change_no_bit_and_leave_nothing(rig, tmp_path, monkeypatch):
    for limit in ("MARGIN_S", "END_S"):
        monkeypatch.setattr(series, limit, float(PATIENCE_S))
    report = series.disturbed(rig, tmp_path, {"losses": 1, "notices": 1}, random.Random(1), silent)
    assert report.problems == []
    rig.app = CALLS  # the remains of an end do not depend on the training
    ends = series.ends(rig, tmp_path, 2, random.Random(1), silent)
    assert ends.problems == []
    assert report.done == report.good == ends.done == ends.good == 2


@pytest.mark.slow
def test_run_that_never_gets_workers_says_why_and_ends(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(stuck, "SAY_S", float(PATIENCE_S))
    report = stuck.stuck(rig, tmp_path, silent)
    assert report.problems == []
    assert report.good == 2


def test_stuck_run_without_a_reason_is_found(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "text", property(lambda self: "begun\nerror  the cat has it\n"))
    monkeypatch.setattr(stuck, "DDLF", ["false"])
    case = stuck.Stuck([], "no such queue")
    problems, said_s, _ = stuck._try(rig, case, tmp_path / "run")
    assert said_s is None
    assert problems[0] == "exit code 1"
    assert problems[1].startswith("it has not said 'no such queue'")


def test_each_rig_has_a_unique_name():
    assert len(set(RIGS.values())) == len(RIGS)


@pytest.mark.parametrize(
    ("rounds", "problem"), [([1, 2, 3], None), ([1, 2, 2], "committed again: [2]"), ([1, 3], "missing")]
)
def test_repeated_and_missing_rounds_are_found(run, rounds, problem):
    write(run, *(("Committed", {"record": {"round": number}}) for number in rounds))
    problems = series.wrong_rounds(run)
    assert problems == [] if problem is None else problem in problems[0]


def test_repeated_slots_are_found(run):
    starts = [(1, 1), (1, 2), (1, 1), (2, 1), (2, 2)]
    write(run, *(("SlotStarted", {"round": round_, "slot": slot, "worker": 1}) for round_, slot in starts))
    assert series.slots_again(run, 0) == 1
    write(run, ("SlotBackedUp", {"round": 1, "slot": 1, "worker": 2}))
    assert series.slots_again(run, 0) == 0, "a backup of a late slot counted as a second start"


def test_slot_that_a_loss_before_the_notice_has_restarted_is_no_repeated_slot(run):
    """A lost executor can be back in the same round, in which the notice comes."""
    start = ("SlotStarted", {"round": 9, "slot": 3, "worker": 2})
    write(run, start, ("WorkerLost", {"round": 9, "slot": 3, "worker": 2}), start)
    notice = len(run.look())
    write(run, ("SlotStarted", {"round": 10, "slot": 3, "worker": 2}))
    assert series.slots_again(run, notice) == 0
    write(run, start)
    assert series.slots_again(run, notice) == 1


@pytest.mark.parametrize(
    ("reason", "own_s", "problem"),
    [
        ("its command was ended by SIGKILL", 1000, None),
        ("the connection was lost", 1000, "the reason is 'the connection was lost'"),
        ("its command was ended by SIGKILL", -1000, "worker 2 was back after"),
    ],
)
def test_loss_without_the_reason_of_the_engine_and_a_late_return_are_found(run, reason, own_s, problem):
    def lose(run, place):
        write(run, ("WorkerLost", {"worker": 2, "why": reason}), ("WorkerReturned", {"worker": 2}))

    problems, seconds = series._lose(run, Victim(lose, "SIGKILL", own_s), 1, 0.0)
    assert len(seconds) == 1
    assert problems == [] if problem is None else problem in problems[0]


class Leaving(Rig):
    """A rig whose runs leave a process and a file with a token."""

    name = "leaving"

    def launcher(self, run):
        return []

    def victims(self):
        return {}

    def ends(self):
        return {"end": End(lambda run: run.kill())}


def test_remaining_process_and_token_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "END_S", 0.5)
    (tmp_path / "engine").mkdir()
    program = "import subprocess; subprocess.Popen(['sleep', '999'], start_new_session=True)"
    with Leaving(tmp_path / "engine") as rig:
        run = Run(rig, tmp_path / "run", command=[sys.executable, "-c", program])
        (run.folder / ".ddlf-token-1").touch()
        run.process.wait(PATIENCE_S)
        remains, _ = series._left_after(rig, run)
        assert [words.split(": ")[-1] for words in remains] == ["sleep 999", "token file .ddlf-token-1"]
        rig.clean(run)
        (run.folder / ".ddlf-token-1").unlink()
        assert series._left_after(rig, run)[0] == []


def test_unknown_engine_is_refused():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.trials.engines", "nothing"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "invalid choice: 'nothing'" in ended.stderr


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (Needs("x", "apt-get install x", ("no-such-program",)), "no-such-program is not installed: apt-get install x"),
        (
            Needs("x", "pip install x", modules=("no_such_module",)),
            "has no module no_such_module: pip install x; or name a Python that has it: DDLF_X_PYTHON=/path/to/python",
        ),
    ],
)
def test_missing_engine_fails_and_says_how_to_install_it(needs, sentence):
    result = run_tests(needs, [])
    assert result.startswith("missing: x: ")
    assert result.endswith(sentence)


def test_python_of_an_engine_can_be_named(monkeypatch):
    monkeypatch.setenv("DDLF_X_PYTHON", "/no/such/python")
    needs = Needs("x", "", modules=("sys",))
    assert needs.missing() == "x: DDLF_X_PYTHON=/no/such/python does not start: No such file or directory"
    monkeypatch.setenv("DDLF_X_PYTHON", sys.executable)
    assert needs.missing() == ""


def test_each_engine_with_tests_is_known():
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests/engines").glob("test_*.py")}
    assert tested == NEEDS.keys()


def test_way_with_other_bits_or_with_a_missing_engine_is_counted(monkeypatch, capsys):
    outcomes = {"local": ("a", ""), "ssh": ("a", ""), "ray": ("b", ""), "spark": ("", "spark: java is not installed")}
    monkeypatch.setattr(ways, "train", lambda way, rounds, places: outcomes[way])
    assert ways.main(list(outcomes)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == ["exact, the same"] * 2 + [
        "other bits",
        outcomes["spark"][1],
    ]
