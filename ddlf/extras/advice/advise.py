"""Asking for advice: facts are collected once, rules asked, and what they find is put in its place in the user's code. Runs on the master."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddlf.data.trees import leaves
from ddlf.errors import AppError, ConfigError, DatasetError
from ddlf.events import Advised
from ddlf.extras.advice.again import packed, seen_again
from ddlf.extras.advice.batch import seconds_of_a_step, seen_in_a_batch
from ddlf.extras.advice.changes import Edit, edits_of
from ddlf.extras.advice.collect import build, facts_of, load, sources_of, take_in, twin
from ddlf.extras.advice.doubt import doubted
from ddlf.extras.advice.facts import Facts
from ddlf.extras.advice.in_text import text_of
from ddlf.extras.advice.limits import doing
from ddlf.extras.advice.near import near
from ddlf.extras.advice.own_train import trained_by_own
from ddlf.extras.advice.related import related
from ddlf.extras.advice.report import Advice, Report
from ddlf.extras.advice.rule import LEVELS, Finding, Level, look, named
from ddlf.extras.advice.rules import RULES
from ddlf.extras.advice.source import Ignore, Place, Sources
from ddlf.training.registry import spec_of
from ddlf.training.roles import have_keras

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster

DEVICES = ("list_physical_devices", "is_gpu_available")
"""What code calls that asks which devices there are."""
log = logging.getLogger(__name__)

ASKED: tuple[Level, ...] = ("quick", "batch", "cluster")
"""Levels that can be asked for."""
MOST_TOLD = 3
"""Findings of which a run tells by itself."""
TOLD_BY_RUNS = frozenset({"D01", "T09"})
"""What a run says in any case."""
SEEN_BY_RUNS = frozenset({"C06", "C07"})
"""Rules of several machines that a run asks as well, for it knows how many slots it has, and nothing has to be done for them."""


async def advise(
    app: Any, level: Level = "batch", *, workers: int | None = None, cluster: Cluster | None = None
) -> Report:
    """Say what is likely to be wrong with an app.

    Args:
        app: The user's ``IApp``; it is left as it is. What it has not loaded and made yet is loaded and made for this.
        level: ``"quick"``, ``"batch"`` or ``"cluster"``; each does what those before it do.
        workers: How many there will be, if the app has no cluster yet.
        cluster: Who looks for wrong labels at level ``"cluster"``, which takes five trainings; by default the app's, and nobody if it has none.

    Raises:
        AppError: The app lacks something without which there is nothing to look at, or its test cannot be evaluated.
        ConfigError: A setting cannot be used.
    """
    from ddlf.data.parts import check_data
    from ddlf.training.roles.evaluable import check_test

    if level not in ASKED:
        raise ConfigError(f"there is no level {level!r} of advice", hint=f"there are: {', '.join(ASKED)}")
    app = twin(app)
    app.verbose = False
    await app.run_context.check_written()
    spec_of(app)
    if level != "quick":  # steps are made on a model of its own
        vars(app).pop("model", None)
    sources = sources_of(app)
    ignores = known_ignores(sources)
    seen: dict[str, Any] = {}
    pickled = packed(app, seen) if level == "cluster" else None
    with doing("load_dataset"):
        await load(app)
    try:
        check_data(app)
    except (AppError, DatasetError):
        if (answer := _errors(app, workers, sources, ignores)) is None:
            raise
        return answer
    await have_keras()
    with doing("create_model"):
        await build(app)
    sources.text = text_of(app)  # with the places of the layers that were made
    try:
        check_test(app)
    except AppError:
        if (answer := _errors(app, workers, sources, ignores)) is None:
            raise
        return answer
    if pickled is not None:
        seen |= await seen_again(app, pickled, sources.calls(DEVICES))
    taken = level != "quick" and take_in(app)
    seen |= {"taken": True} if taken else {}
    facts = facts_of(app, workers=workers, seen=seen)
    if level != "quick":
        alike = near(getattr(app, "x_train", None), getattr(app, "x_test", None))
        told = _related(app, facts)
        if "train" in facts.own:  # with the optimizer that is the app's: what follows puts others in its place
            seen["own_train"] = trained_by_own(app)
        seen |= {"near": alike, "related": told, **seen_in_a_batch(app, facts)}
        if level == "cluster":
            seen["step_s"] = seconds_of_a_step(app, app.batch_size)
        facts = replace(facts, seen=seen)
    levels = LEVELS[: LEVELS.index(level) + 1]
    left: tuple[str, ...] = ()
    differs = "data" in seen  # then what number a label has on a worker says nothing of it here
    if pickled is not None and not differs and (cluster := cluster or app.cluster) is not None:
        doubts = await doubted(cluster, pickled, facts)
        left = doubts.pop("left", ())
        facts = replace(facts, seen={**facts.seen, **doubts})
    answer = replace(answered(facts, sources, ignores, levels), left=left)
    return replace(answer, advice=tuple(replace(one, edits=()) for one in answer.advice)) if taken else answer


def _related(app: Any, facts: Facts) -> dict[str, Any]:
    """Whether labels have to do with their samples, where Keras's own losses compare them: of several outputs those that have least."""
    tokens = {one.before for one in facts.layers if one.kind == "Embedding"}
    if any(head.loss in ("", "own") for head in facts.heads) or facts.own & {"step", "train"}:
        return {}
    x = facts.array("x_train")
    labels = {part: dict(leaves(getattr(app, f"y_{part}", None), f"y_{part}")) for part in ("train", "test")}
    data = {"x_train": getattr(app, "x_train", None), "x_test": getattr(app, "x_test", None)}
    found = []
    for head in facts.heads:
        own = {f"y_{part}": arrays.get(head.target.replace("_train", f"_{part}")) for part, arrays in labels.items()}
        if told := related(data | own, are_tokens=x is not None and x.whole and x.sample in tokens):
            found.append(told | {"of": head.target})
    return min(found, key=lambda told: told["train"][0], default={})


def _errors(app: Any, workers: int | None, sources: Sources, ignores: Iterable[Ignore]) -> Report | None:
    """What the quick level says of an app that cannot run; None if nothing of it says why."""
    answer = answered(facts_of(app, workers=workers), sources, ignores, ("quick",))
    return answer if any(one.finding.severity == "E" for one in answer.advice) else None


def known_ignores(sources: Sources) -> list[Ignore]:
    """The user's comments by which findings are not wanted.

    Raises:
        ConfigError: One names no rule, or one that there is not.
    """
    found = sources.ignores()
    for one in found:
        if not one.id:
            raise ConfigError(
                f"{one.place.path}:{one.place.line}: the comment names no rule, so it ignores nothing",
                hint="write what is meant in brackets: # ddlf: ignore[L02] reason",
            )
        named(RULES, one.id, f"{one.place.path}:{one.place.line}")
    return found


def answered(
    facts: Facts, sources: Sources, ignores: Iterable[Ignore], levels: Iterable[str], more: Collection[str] = ()
) -> Report:
    """Ask the rules of some levels, and some more by their ids, and leave out what is not wanted."""
    wanted = set(levels)
    asked = [rule for rule in RULES if rule.level in wanted or rule.id in more]
    findings, failed = look(asked, facts)
    used: set[Ignore] = set()
    advice: list[Advice] = []
    for finding in findings:
        place = sources.place(finding.found.at, facts)
        unwanted = [one for one in ignores if _is_for(one, finding, place)]
        used.update(unwanted)
        if not unwanted:
            advice.append(Advice(finding, place, tuple(_edits(finding, place, sources, facts))))
    ids = {rule.id for rule in asked}
    unneeded = tuple(one for one in ignores if one not in used and one.id.upper() in ids)
    return Report(tuple(advice), tuple(failed), len(findings) - len(advice), unneeded)


def _edits(finding: Finding, place: Place | None, sources: Sources, facts: Facts) -> Iterable[Edit]:
    """What would mend it; nothing where a text says it, which has other words."""
    in_text = sources.text is not None and place is not None and place.path == sources.text.path
    return () if in_text else edits_of(finding.found.changes, sources, facts)


def _is_for(ignore: Ignore, finding: Finding, place: Place | None) -> bool:
    if ignore.id.upper() != finding.rule.id:
        return False
    return ignore.lines is None or (
        place is not None and place.path == ignore.place.path and place.line in ignore.lines
    )


async def of_run(app: Any) -> tuple[list[Advised], str]:
    """What a run says of an app that has data and model, before it begins; and what is to blame if it comes to nothing.

    Raises:
        AppError: ``advice="strict"``, and something is wrong without which nothing can be learnt.
    """
    if app.advice == "off":
        return [], ""
    try:
        answer = await asyncio.to_thread(_quickly, app)
    except Exception:  # of the adviser's own making: no run ends with it
        log.exception("no advice could be given")
        return [], ""
    for one in answer.failed:
        log.warning("the rule %s failed: %s", one.rule.id, one.why)
    wrong = [one for one in answer.advice if one.finding.severity == "E"]
    cause = f"{wrong[0]}; {wrong[0].finding.fix}" if wrong else ""
    if app.advice == "strict" and wrong:
        rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise AppError(
            f"advice is 'strict', and training would come to nothing: {wrong[0]}{rest}", hint=wrong[0].finding.fix
        )
    said = [one for one in answer.advice if one.finding.severity != "I" and one.finding.rule.id not in TOLD_BY_RUNS]
    return [
        _told(one, len(said) - MOST_TOLD if number == MOST_TOLD - 1 else 0)
        for number, one in enumerate(said[:MOST_TOLD])
    ], cause


def _told(one: Advice, more: int) -> Advised:
    place = "" if one.place is None else f"{one.place.path}:{one.place.line}"
    finding = one.finding
    return Advised(
        rule=finding.rule.id,
        severity=finding.severity,
        what=finding.found.what,
        fix=finding.fix,
        place=place,
        more=more,
    )


def _quickly(app: Any) -> Report:
    sources = sources_of(app)
    facts = facts_of(app)
    return answered(facts, sources, sources.ignores(), ("quick",), SEEN_BY_RUNS if facts.slots > 1 else ())
