"""The series with a loss of the engine itself during a run. The training continues, or it ends soon because the workers end
with the engine. The master reports the loss.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from tests.trials.engines.rig import Rig, Run
from tests.trials.engines.series import BACK_S, Report, _finish, _left_after, began, check_result

ROUNDS = 20
"""Smallest number of rounds that the run trains after the loss."""
ENDS_S = 120.0
"""Seconds within which a run must end if its workers end with the engine."""


@runtime_checkable
class HasHead(Protocol):
    """A rig whose engine has a head, such as a scheduler or an API server.

    Attributes:
        gone_says: Regular expression for the master's message about the lost head.
        gone_ends: Whether the workers end with the head, so that the run ends, too.
        gone_s: Seconds until the engine's processes on its nodes have also ended.
    """

    gone_says: str
    gone_ends: bool
    gone_s: float

    def lose_engine(self, run: Run) -> None:
        """Kill the head."""


def lose_head(rig: Rig, folder: Path, say: Callable[[str], None]) -> Report:
    """Kill the head of an engine during a run, and check that the run continues or ends."""
    report = Report(done=1)
    if not isinstance(rig, HasHead):
        report.problems.append("gone: this engine has no head")
        return report
    run = Run(rig, folder / "gone")
    try:
        began(run, rig.places)
        since = len(run.look())
        printed = len(run.text)
        rig.lose_engine(run)
        say("the engine's head is gone")
        if rig.gone_ends:
            began_at = time.monotonic()
            with contextlib.suppress(psutil.TimeoutExpired):
                run.process.wait(ENDS_S)
            report.figures["ended with"] = run.process.poll()
            report.seconds.append(time.monotonic() - began_at)
            if not run.process.poll():
                report.problems.append(f"gone: the run has not ended with an error within {ENDS_S:g} s")
        else:
            trained, began_at = 0, time.monotonic()
            while trained < ROUNDS or time.monotonic() - began_at < rig.gone_s:
                done = run.wait_for("Committed", since=since, within_s=BACK_S)
                trained, since = trained + 1, run.events.index(done) + 1
            report.figures |= {"rounds": trained, "workers lost": len(list(run.of("WorkerLost")))}
            report.problems += check_result(rig, run, "gone")
            report.problems += [f"gone: left: {words}" for words in _left_after(rig, run)[0]]
        if not re.search(rig.gone_says, run.text[printed:]):
            report.problems.append(f"gone: the master did not report it:\n{run.text[printed:][-2000:]}")
    except (TimeoutError, ChildProcessError) as error:
        report.problems.append(f"gone: {error}")
    finally:
        with contextlib.suppress(OSError):
            say("it said: " + run.text[-1500:])
        _finish(rig, run)
    report.good = int(not report.problems)
    return report
