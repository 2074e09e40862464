"""The series of undisturbed runs, losses, notices and ends. Each function of a series returns a ``Report``."""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.trials.engines.rig import CALLS, DDLF, LOOK_S, QUIET, Rig, Run, Victim, terminate

SLOTS, SAMPLES = 4, 512
BEGIN_S = 600.0
"""Longest time in seconds until a run trains."""
BACK_S = 400.0
"""Longest time in seconds until the worker of a place is back. A longer wait counts as a failure."""
MARGIN_S = 3.0
"""Seconds that DDLF may add to the engine's own time and to the start of a worker."""
END_S = 35.0
"""Longest time in seconds until all processes, files and jobs of a run are gone."""
TRAINED_S = 3.0
"""Longest time in seconds that a run trains before its end."""
LONG_S = 3600.0


@dataclass
class Report:
    """The result of a series.

    Args:
        done: Number of losses, notices, ends or comparisons.
        good: Number of losses, notices, ends or comparisons without a problem.
        problems: The problems, as sentences.
        figures: Facts for the line of the series, by name.
        seconds: The measured times.
    """

    done: int = 0
    good: int = 0
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Return the figures as a line of text."""
        facts = {"good": f"{self.good} of {self.done}", **self.figures}
        if self.seconds:
            facts |= {"median": f"{statistics.median(self.seconds):.1f} s", "longest": f"{max(self.seconds):.1f} s"}
        return ", ".join(f"{name} {value}" for name, value in facts.items())


Say = Callable[[str], None]


def began(run: Run, workers: int) -> float:
    """Wait until a run trains with all its workers. Return the longest start of a worker in seconds, from the start of its
    process until it has app, data and model.
    """
    run.wait_for("Committed", within_s=BEGIN_S)
    longest = 0.0
    for place in range(workers):
        ready = run.wait_for("WorkerReady", "WorkerJoined", within_s=BEGIN_S, worker=place + 1)
        with contextlib.suppress(psutil.Error):
            if daemon := run.daemons().get(place):
                longest = max(longest, ready["at"] - daemon.create_time())
    return longest


def wrong_rounds(run: Run) -> list[str]:
    """Return the problems of the rounds of a run: each round must be committed once, in order."""
    rounds = [event["record"]["round"] for event in run.of("Committed")]
    if rounds == list(range(1, len(rounds) + 1)):
        return []
    again = [number for number, count in Counter(rounds).items() if count > 1]
    return [f"rounds were committed again: {again}" if again else f"rounds are missing between 1 and {rounds[-1]}"]


def check_result(rig: Rig, run: Run, name: str, compares: bool = True) -> list[str]:
    """End a run. If ``compares``, train the same number of rounds with ``--local 2``. Return the problems and differences."""
    try:
        result = run.result(within_s=BEGIN_S)
    except (TimeoutError, ChildProcessError) as error:
        return [f"{name}: the run did not end well: {error}"]
    if rig.app is CALLS:
        return []
    problems = wrong_rounds(run)
    if not result["exact"]:
        problems.append("a sample was not trained on once an epoch")
    if not compares:
        return [f"{name}: {problem}" for problem in problems]
    options = ["--local", "2", "-p", "pace=0", "--master-epochs", str(result["rounds"])]
    local = Run(rig, run.folder.parent / f"{name}-local", command=[*DDLF, *options, *QUIET])
    try:
        expected = local.wait_for("Result", within_s=LONG_S)
        local.process.wait(BEGIN_S)
    except (TimeoutError, ChildProcessError) as error:
        local.kill()
        return [*problems, f"{name}: the run with --local 2 did not end well: {error}"]
    if expected["rounds"] != result["rounds"]:
        problems.append(f"{result['rounds']} rounds, and {expected['rounds']} with --local 2")
    elif expected["sha"] != result["sha"]:
        problems.append(
            f"other bits after {result['rounds']} rounds: {result['sha'][:16]}, and {expected['sha'][:16]} with --local 2"
        )
    return [f"{name}: {problem}" for problem in problems]


def same(rig: Rig, folder: Path, rounds: int, say: Say, compares: bool = True) -> Report:
    """Train without disturbance. If ``compares``, compare the bits with ``--local 2``."""
    report = Report(done=1)
    run = Run(rig, folder / "same", ["--master-epochs", str(rounds)])
    try:
        report.figures["start of a worker"] = f"{began(run, rig.places):.1f} s"
        result = run.wait_for("Result", within_s=LONG_S)
        report.figures["SHA-256"] = result["sha"][:16]
        report.problems += check_result(rig, run, "same", compares)
        report.problems += [f"same: left: {words}" for words in _left_after(rig, run)[0]]
    except (TimeoutError, ChildProcessError) as error:
        report.problems.append(f"same: {error}")
    finally:
        _finish(rig, run)
    report.good = int(not report.problems)
    return report


def _left_after(rig: Rig, run: Run, ends_master: bool = True) -> tuple[list[str], float]:
    """Wait until no process, file or job of a run remains. Return the remains after ``END_S``, and the waited seconds."""
    start = time.monotonic()
    while True:
        remains = rig.left(run)
        if not ends_master:  # the files and the guard of a running master remain
            remains = [
                words for words in remains if "ddlf.worker" in words or "ddlf.cli.worker" in words or "job " in words
            ]
        elif not run.has_ended():
            remains.append("the command")
        seconds = time.monotonic() - start
        if not remains or seconds > END_S:
            return remains, seconds
        time.sleep(5 * LOOK_S)


def _finish(rig: Rig, run: Run) -> None:
    """End all processes of a run, also after an error."""
    if not run.has_ended():
        run.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            run.process.wait(END_S)
    rig.clean(run)
    with contextlib.suppress(psutil.Error):
        run.process.kill()
        run.process.wait(END_S)


def losses(rig: Rig, folder: Path, count: int, chance: random.Random, say: Say) -> Report:
    """Cause ``count`` losses at random moments of one run."""
    return disturbed(rig, folder, {"losses": count}, chance, say)


def notices(rig: Rig, folder: Path, count: int, chance: random.Random, say: Say) -> Report:
    """Warn workers ``count`` times at random moments of one run."""
    return disturbed(rig, folder, {"notices": count}, chance, say)


def disturbed(rig: Rig, folder: Path, counts: Mapping[str, int], chance: random.Random, say: Say) -> Report:
    """Disturb one run by the given numbers of ``losses`` and ``notices``, and compare its bits."""
    report, name = Report(), "-".join(counts)
    if "losses" in counts and not rig.victims():
        report.problems.append(f"losses: the rig {rig.name} loses nothing")
        return report
    run = Run(rig, folder / name)
    try:
        start_s = began(run, rig.places)
        if "losses" in counts:
            _losses(rig, run, counts["losses"], chance, say, report, start_s)
        if "notices" in counts:
            _notices(rig, run, counts["notices"], chance, say, report)
        report.problems += check_result(rig, run, name)
    except (TimeoutError, ChildProcessError) as error:
        report.problems.append(f"{name}: {error}")
    finally:
        _finish(rig, run)
    if "notices" in counts:
        late = sum(1 for _ in run.of("SlotBackedUp"))
        report.figures |= {"backups of late slots": late, "rounds again": len(wrong_rounds(run))}
    return report


def _losses(rig: Rig, run: Run, count: int, chance: random.Random, say: Say, report: Report, start_s: float) -> None:
    report.figures["start of a worker"] = f"{start_s:.1f} s"
    # The light app does not notice an executor that is lost between two calls: the next call starts in a new one.
    kinds = [item for item in rig.victims().items() if rig.app is not CALLS or item[0] != "executor"]
    order = [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(order)
    for number, (kind, victim) in enumerate(order, 1):
        time.sleep(chance.uniform(0, 2))
        place = chance.choice([place for place in range(rig.places) if place not in victim.spares])
        try:
            problems, seconds = _lose(run, victim, place, start_s)
        finally:
            if victim.mend is not None:
                victim.mend()
        report.done += 1
        report.good += not problems
        report.seconds += seconds
        report.problems += [f"loss {number} ({kind} of place {place}): {problem}" for problem in problems]
        took = ", ".join(f"{duration:.1f} s" for duration in seconds)
        say(f"loss {number}: {kind} of place {place}, back after {took}" + "".join(f"; {p}" for p in problems))


def _lose(run: Run, victim: Victim, place: int, start_s: float) -> tuple[list[str], list[float]]:
    """Cause one loss, and wait until all places work again. Return the problems, and the seconds until each place worked."""
    since, at = len(run.look()), time.time()
    hit = victim.lose(run, place)
    problems, seconds = [], []
    for worker in sorted({hit_place + 1 for hit_place in (hit or [place])}):
        try:
            event = run.wait_for("WorkerLost", "WorkerLeaving", since=since, within_s=BACK_S, worker=worker)
            position = run.events.index(event) + 1
            back = run.wait_for("WorkerReturned", since=position, within_s=BACK_S, worker=worker)
        except TimeoutError as error:
            problems.append(str(error))
            continue
        took = back["at"] - at
        seconds.append(took)
        knows = run.rig.app is not CALLS or not victim.is_notice  # the light app gets no notices
        if knows and event["event"] == ("WorkerLost" if victim.is_notice else "WorkerLeaving"):
            problems.append(f"worker {worker}: the event is {event['event']} ({event['why']})")
        if knows and not re.search(victim.says, event["why"]):
            problems.append(f"worker {worker}: the reason is {event['why']!r}, which does not match {victim.says!r}")
        if not re.search(victim.prints, run.text):
            problems.append(f"the master has not printed {victim.prints!r}")
        limit = victim.own_s + start_s + MARGIN_S
        if took > limit:
            parts = f"{victim.own_s:g} s of the engine, {start_s:.1f} s for the start of a worker, and {MARGIN_S:g} s"
            problems.append(f"worker {worker} was back after {took:.1f} s, more than {parts}")
        # Another loss of the same worker would mean that two workers compete for its place.
        after = run.events.index(back) + 1
        with contextlib.suppress(TimeoutError):
            lost = run.wait_for("WorkerLost", since=after, within_s=1.0, worker=worker)
            problems.append(f"worker {worker} was lost again: {lost['why']}")
            run.wait_for("WorkerReturned", since=run.events.index(lost), within_s=BACK_S, worker=worker)
    return problems, seconds


def _notices(rig: Rig, run: Run, count: int, chance: random.Random, say: Say, report: Report) -> None:
    twice = 0
    for number in range(1, count + 1):
        time.sleep(chance.uniform(0, 1))
        place = chance.randrange(rig.places)
        since, at = len(run.look()), time.time()
        rig.notice(run, place)
        problems = []
        try:
            first = run.wait_for("WorkerLeaving", "WorkerLost", since=since, within_s=BACK_S, worker=place + 1)
            if first["event"] == "WorkerLost":
                problems.append(f"it was lost without a notice: {first['why']}")
            elif first["slot"] is not None:
                problems.append(f"slot {first['slot']} fits into {first['seconds']:.1f} s and was given away")
            else:
                left = run.wait_for("WorkerLeft", "WorkerLost", since=since, within_s=BACK_S, worker=place + 1)
                if left["event"] == "WorkerLost":
                    problems.append(f"it did not hand its work back: {left['why']}")
            back = run.wait_for("WorkerReturned", since=since, within_s=BACK_S, worker=place + 1)
            report.seconds.append(back["at"] - at)
        except TimeoutError as error:
            problems.append(str(error))
        again = slots_again(run, since)
        twice += again * SAMPLES // SLOTS
        if again:
            problems.append(f"{again} slots began again")
        report.done += 1
        report.good += not problems
        report.problems += [f"notice {number} (place {place}): {problem}" for problem in problems]
        say(f"notice {number}: place {place}" + "".join(f"; {problem}" for problem in problems))
    report.figures["samples twice"] = twice


def slots_again(run: Run, since: int) -> int:
    """Return the number of second starts of slots, beginning at a position in the events. Two kinds do not count, because no
    notice causes them: the backup of a late slot on a slow machine, and a slot that a loss before that position has restarted.
    """
    first = next((event["round"] for event in run.of("SlotStarted", since=since)), 0)
    starts = Counter((event["round"], event["slot"]) for event in run.of("SlotStarted"))
    starts.subtract((event["round"], event["slot"]) for event in run.of("SlotBackedUp"))
    starts.subtract((event["round"], event["slot"]) for event in run.events[:since] if event["event"] == "WorkerLost")
    return sum(number - 1 for (round_, _), number in starts.items() if round_ >= first - 1 and number > 1)


def ends(rig: Rig, folder: Path, count: int, chance: random.Random, say: Say) -> Report:
    """End ``count`` runs at random moments of start and training, and check that no process, file or job remains."""
    report = Report()
    first = Run(rig, folder / "end-0")
    try:
        began(first, rig.places)
        run_s = time.time() - first.began + TRAINED_S
        problems = [f"the first run ended badly: {error}" for error in _ended_well(first)]
        report.problems += problems + [f"left of the first run: {words}" for words in _left_after(rig, first)[0]]
    except (TimeoutError, ChildProcessError) as error:
        report.problems.append(f"ends: {error}")
        return report
    finally:
        _finish(rig, first)
    report.figures["moments within"] = f"{run_s:.1f} s"
    kinds = list(rig.ends().items())
    order = [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(order)
    for number, (kind, end) in enumerate(order, 1):
        moment = chance.uniform(0, run_s)
        run = Run(rig, folder / f"end-{number}")
        with contextlib.suppress(psutil.TimeoutExpired):
            run.process.wait(moment)
        end.act(run)
        remains, seconds = _left_after(rig, run, end.ends_master)
        if not end.ends_master and not remains:
            terminate(run.master() or run.process)
            remains, _ = _left_after(rig, run)
        problems = [f"left: {words}" for words in remains]
        _finish(rig, run)
        report.done += 1
        report.good += not problems
        report.seconds.append(seconds)
        report.problems += [f"end {number} ({kind} at {moment:.1f} s): {problem}" for problem in problems]
        say(
            f"end {number}: {kind} at {moment:.1f} s, clean after {seconds:.1f} s" + "".join(f"; {p}" for p in problems)
        )
    return report


def _ended_well(run: Run) -> list[str]:
    try:
        run.result(within_s=BEGIN_S)
    except (TimeoutError, ChildProcessError) as error:
        return [str(error)]
    return []
