"""Watching a run: after each record the rules of class R are asked, and each thing is said once. A sink; runs on the master."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ddlf.errors import BadUpdate
from ddlf.events import Advised, Committed, Event
from ddlf.extras.advice.advise import of_run
from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.of_runs import RUNS
from ddlf.extras.advice.rule import look

log = logging.getLogger(__name__)
MOST_RECORDS = 1_000
"""Of a run that are looked at, the last ones."""


async def watch_run(app: Any) -> AbstractContextManager[None]:
    """Look at an app before a run, and return what watches the run.

    Raises:
        AppError: ``advice="strict"``, and something is wrong without which nothing can be learnt.
    """
    findings, cause = await of_run(app)
    return _watching(app, findings, cause)


@contextlib.contextmanager
def _watching(app: Any, findings: Iterable[Advised], cause: str) -> Iterator[None]:
    for advised in findings:
        app.run_context.emit(advised)
    with watched(app), blamed(app, cause):
        yield


@contextlib.contextmanager
def blamed(app: Any, cause: str) -> Iterator[None]:
    """Say with the error by which training stops what is likely to be its cause, and of a NaN where it begins.

    Args:
        app: The user's ``IApp``, whose model has the last weights that could be used when the error comes.
        cause: As of ``of_run``.
    """
    try:
        yield
    except BadUpdate as error:
        if cause:
            error.add_note(f"likely cause: {cause}")
        if error.count and app.advice != "off":
            from ddlf.extras.advice.not_finite import told

            if (advised := told(app)) is not None:
                app.run_context.emit(advised)
                error.add_note(f"{advised.place + ': ' * bool(advised.place)}{advised.what}")
        raise


@contextlib.contextmanager
def watched(app: Any) -> Iterator[None]:
    """Say what the records of an app's run say, as long as this is open."""
    if app.advice == "off":
        yield
        return
    records: list[Any] = []
    left = list(RUNS)

    def hear(event: Event) -> None:
        if not isinstance(event, Committed) or not left:
            return
        records.append(event.record)
        del records[:-MOST_RECORDS]
        findings, failed = look(left, Facts(seen={"records": records}))
        for one in failed:
            log.warning("the rule %s failed: %s", one.rule.id, one.why)
        said = {one.rule.id for one in findings} | {one.rule.id for one in failed}
        left[:] = [rule for rule in left if rule.id not in said]
        for finding in findings:
            app.run_context.emit(
                Advised(rule=finding.rule.id, severity=finding.severity, what=finding.found.what, fix=finding.fix)
            )

    take_off = app.subscribe(hear)
    try:
        yield
    finally:
        take_off()
