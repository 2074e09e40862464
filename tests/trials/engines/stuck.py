"""The series of runs that an engine cannot start now, or never. Each run prints the engine's reason, and ends."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from tests.trials.engines.rig import DDLF, LOOK_S, Rig, Run, wait_for
from tests.trials.engines.series import BEGIN_S, Report, _finish, began

TIMEOUT_S = 12
TIMEOUT = f"start_timeout={TIMEOUT_S}"
"""A key of the launchers of these runs."""
SAY_S = 5.0
"""Longest time in seconds until a run prints the reason."""
ANSWER_S = 3.0
"""Additional seconds for the engine's own answer."""
END_S = 15.0
"""Seconds that the end of a run may take."""
NO_WORKER = 3
"""Exit code of a run that gets no worker."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A run that does not get its workers.

    Args:
        options: The options of ``ddlf run`` that choose the engine.
        says: Regular expression for the engine's own words.
        before: The options of another run, which first takes the resources that this run needs.
        ends_with: Regular expression for the final error, if it differs from ``says``.
    """

    options: Sequence[str]
    says: str
    before: Sequence[str] = ()
    ends_with: str = ""


@runtime_checkable
class HasStuck(Protocol):
    """A rig with runs that do not get their workers."""

    def stuck(self) -> dict[str, Stuck]:
        """Return these runs, by name."""


def stuck(rig: Rig, folder: Path, say: Callable[[str], None]) -> Report:
    """Start each run that does not get its workers. Check the engine's words in its output, and the exit code."""
    report = Report()
    if not isinstance(rig, HasStuck):
        report.problems.append("stuck: this engine has no such runs")
        return report
    for number, (kind, case) in enumerate(rig.stuck().items(), 1):
        with contextlib.ExitStack() as after:
            if case.before:
                other = Run(rig, folder / f"before-{number}", command=[*DDLF, *case.before])
                after.callback(_finish, rig, other)
                began(other, 1)
            problems, said_s, ended_s = _try(rig, case, folder / f"stuck-{number}")
        report.done += 1
        report.good += not problems
        report.seconds += [said_s] if said_s is not None else []
        report.problems += [f"{kind}: {problem}" for problem in problems]
        when = "nothing said" if said_s is None else f"said after {said_s:.1f} s"
        say(f"{kind}: {when}, ended after {ended_s:.1f} s" + "".join(f"; {problem}" for problem in problems))
    return report


def _try(rig: Rig, case: Stuck, folder: Path) -> tuple[list[str], float | None, float]:
    """Start one run. Return the problems, the seconds until the engine's words, and the seconds until its end. Both times
    begin with the first line of the run.
    """
    run = Run(rig, folder, command=[*DDLF, *case.options])
    wait_for(lambda: run.text or None, BEGIN_S)
    start, said_s = time.monotonic(), None
    end = start + TIMEOUT_S + ANSWER_S + END_S
    while not run.has_ended() and time.monotonic() < end:
        if said_s is None and re.search(case.says, run.text):
            said_s = time.monotonic() - start
        time.sleep(LOOK_S)
    ended_s = time.monotonic() - start
    if said_s is None and re.search(case.says, run.text):
        said_s = ended_s
    problems = []
    if not run.has_ended():
        problems.append(f"it has not ended after {ended_s:.0f} s")
    elif (code := run.process.wait()) != NO_WORKER:
        problems.append(f"exit code {code}")
    last = run.text.rpartition("\nerror ")[2]
    if said_s is None:
        problems.append(f"it has not said {case.says!r}:\n{run.text[-2000:]}")
    elif not re.search(case.ends_with or case.says, last):
        problems.append(f"its error does not say {case.ends_with or case.says!r}: {last[-500:]}")
    if said_s is not None and said_s > SAY_S + ANSWER_S:
        problems.append(f"it said so only after {said_s:.1f} s")
    with contextlib.suppress(psutil.Error):
        _finish(rig, run)
    return problems, said_s, ended_s
