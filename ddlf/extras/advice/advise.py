"""Collects the facts of an app, checks the rules, and locates findings in the user's code. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddlf.data.app_data import check_data
from ddlf.data.trees import leaves
from ddlf.errors import AppError, BadUpdate, ConfigError, DatasetError
from ddlf.events import Advised
from ddlf.extras import measured_rounds
from ddlf.extras.advice.arrays import near_duplicates, related
from ddlf.extras.advice.batch import find_train_mistake, not_finite_advice, observe_batch, seconds_of_a_step
from ddlf.extras.advice.changes import edits_of
from ddlf.extras.advice.collect import build, copy_of_app, facts_of, load, read_into_arrays, sources_of
from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.limits import doing
from ddlf.extras.advice.processes import observe_second_process, pickled_app, wrong_labels
from ddlf.extras.advice.report import AdviserReport
from ddlf.extras.advice.rule import LEVELS, Advice, Edit, Level, check_rules, find_rule
from ddlf.extras.advice.rules import RULES
from ddlf.extras.advice.rules.run import watched
from ddlf.extras.advice.source import Ignore, UserSources, text_of
from ddlf.training.context import App
from ddlf.training.evaluation.master import check_test
from ddlf.training.registry import spec_of
from ddlf.training.roles import have_keras

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster

log = logging.getLogger(__name__)

CHOICES: tuple[Level, ...] = ("quick", "batch", "cluster")
"""Levels to choose from."""
MOST_IN_A_RUN = 3
"""Maximum number of findings that a run reports at its beginning."""
REPORTED_BY_RUNS = frozenset({"D01", "T09"})
"""Rules whose findings a run always reports."""
CHECKED_BY_RUNS = frozenset({"C06", "C07"})
"""Rules of level cluster that a run also checks. They are cheap, and a run knows its number of slots."""
REMOVED = frozenset({"C15"})
"""Ids of former rules. A comment that ignores one is reported as unused."""


async def advise(
    app: App, level: Level = "batch", *, workers: int | None = None, cluster: Cluster | None = None
) -> AdviserReport:
    """Find likely mistakes in an app.

    Args:
        app: The user's ``IApp``. The adviser loads data and builds the model on a copy, so that the app does not
            change.
        level: ``"quick"``, ``"batch"`` or ``"cluster"``. Each includes the previous ones.
        workers: Number of planned workers, if the app has no cluster yet.
        cluster: The cluster that runs five trainings to find wrong labels at level ``"cluster"``. By default it is the
            app's cluster. Without a cluster, this check is skipped.

    Raises:
        AppError: The app lacks a necessary part, or its test cannot be evaluated.
        ConfigError: A setting is invalid.
    """
    if level not in CHOICES:
        raise ConfigError(f"there is no level {level!r} of advice", hint=f"there are: {', '.join(CHOICES)}")
    app = copy_of_app(app)
    app.verbose = False
    await app.run_context.check_written()
    spec_of(app)
    if level != "quick":  # the adviser trains its own copy of the model
        vars(app).pop("model", None)
    sources = sources_of(app)
    ignores = known_ignores(sources)
    observations: dict[str, Any] = {}
    pickled = pickled_app(app, observations) if level == "cluster" else None
    with doing("load_dataset"):
        await load(app)
    try:
        check_data(app)
    except (AppError, DatasetError):
        if (report := _explanation(app, workers, sources, ignores)) is None:
            raise
        return report
    await have_keras()
    with doing("create_model"):
        await build(app)
    sources.text = text_of(app)  # only now does the text have the line numbers of the layers
    try:
        check_test(app)
    except AppError:
        if (report := _explanation(app, workers, sources, ignores)) is None:
            raise
        return report
    if pickled is not None:
        observations |= await observe_second_process(app, pickled)
    is_converted = level != "quick" and read_into_arrays(app)
    observations |= {"taken": True} if is_converted else {}
    facts = facts_of(app, workers=workers, observations=observations)
    if level != "quick":
        observations["near"] = near_duplicates(getattr(app, "x_train", None), getattr(app, "x_test", None))
        observations["related"] = _related(app, facts)
        if "train" in facts.custom:  # do this before other trials replace the optimizer
            observations["own_train"] = find_train_mistake(app)
        observations |= observe_batch(app, facts)
        if level == "cluster":
            observations["step_s"] = seconds_of_a_step(app, app.batch_size)
    skipped: tuple[str, ...] = ()
    cluster = cluster or app.cluster
    # this works because workers load the samples in the same order
    if pickled is not None and "data" not in observations and cluster is not None:
        doubts = await wrong_labels(cluster, pickled, facts)
        skipped = doubts.pop("skipped", ())
        observations |= doubts
    observations |= _planned(app, cluster, facts)
    report = check_facts(replace(facts, observations=observations), sources, ignores, LEVELS[: LEVELS.index(level) + 1])
    if is_converted:  # the changes are for arrays, but this app has none
        report = replace(report, advice=tuple(replace(advice, edits=()) for advice in report.advice))
    return replace(report, skipped=skipped)


def _planned(app: App, cluster: Any, facts: AppFacts) -> dict[str, Any]:
    """Return the measured seconds of a step and of an exchange through the master, and where they are from, if there
    are measurements of the app on these workers."""
    measured = measured_rounds(app, cluster)
    exchange_s = None if measured is None else measured.exchange_s("sync", "star", "float32", facts.slots)
    return (
        {}
        if measured is None or exchange_s is None
        else {"planned": (measured.step_s(app.batch_size), exchange_s, measured.origin)}
    )


def _explanation(
    app: App, workers: int | None, sources: UserSources, ignores: Iterable[Ignore]
) -> AdviserReport | None:
    """Check an app that cannot run with the rules of level ``"quick"``. Return their report, or None if no finding
    explains why the app cannot run."""
    report = check_facts(facts_of(app, workers=workers), sources, ignores, ("quick",))
    return report if any(advice.severity == "E" for advice in report.advice) else None


def _related(app: App, facts: AppFacts) -> dict[str, Any]:
    """Return how well the training samples predict their labels. If several outputs have a Keras loss, return the
    result of the output with the worst prediction."""
    tokens = {layer.input_shape for layer in facts.layers if layer.kind == "Embedding"}
    if any(head.loss in ("", "own") for head in facts.heads) or facts.custom & {"step", "train"}:
        return {}
    train_array = facts.array("x_train")
    labels = {part: dict(leaves(getattr(app, f"y_{part}", None), f"y_{part}")) for part in ("train", "test")}
    data = {"x_train": getattr(app, "x_train", None), "x_test": getattr(app, "x_test", None)}
    results = []
    for head in facts.heads:
        targets = {
            f"y_{part}": arrays.get(head.target.replace("_train", f"_{part}")) for part, arrays in labels.items()
        }
        if result := related(
            data | targets, are_tokens=train_array is not None and train_array.is_whole and train_array.sample in tokens
        ):
            results.append(result | {"of": head.target})
    return min(results, key=lambda result: result["train"][0], default={})


def known_ignores(sources: UserSources) -> list[Ignore]:
    """Return the comments in the user's files that tell the adviser to ignore findings.

    Raises:
        ConfigError: A comment names no rule, or an unknown one.
    """
    ignores = sources.ignores()
    for ignore in ignores:
        if not ignore.id:
            raise ConfigError(
                f"{ignore.position}: the comment names no rule, so it ignores nothing",
                hint="name the rule in brackets: # ddlf: ignore[L02] reason",
            )
        if ignore.id.upper() not in REMOVED:
            find_rule(RULES, ignore.id, str(ignore.position))
    return ignores


def check_facts(
    facts: AppFacts,
    sources: UserSources,
    ignores: Iterable[Ignore],
    levels: Iterable[str],
    more_ids: Collection[str] = (),
) -> AdviserReport:
    """Check the rules of these levels, and the rules whose ids are in ``more_ids``. Drop the findings that the user's
    comments ignore."""
    wanted_levels = set(levels)
    rules = [rule for rule in RULES if rule.level in wanted_levels or rule.id in more_ids]
    findings, failed = check_rules(rules, facts)
    used: set[Ignore] = set()
    reported: list[Advice] = []
    for advice in findings:
        position = sources.position(advice.finding.subject, facts)
        located = replace(advice, position=position)
        matching = [ignore for ignore in ignores if ignore.matches(located)]
        used.update(matching)
        if not matching:
            reported.append(replace(located, edits=tuple(_edits(located, sources, facts))))
    ids = {rule.id for rule in rules} | REMOVED
    unused = tuple(ignore for ignore in ignores if ignore not in used and ignore.id.upper() in ids)
    return AdviserReport(tuple(reported), tuple(failed), len(findings) - len(reported), unused)


def _edits(advice: Advice, sources: UserSources, facts: AppFacts) -> Iterable[Edit]:
    """Return the edits of the user's Python files that fix a finding. A model text has another syntax, so it gets none."""
    in_text = sources.text is not None and advice.position is not None and advice.position.path == sources.text.path
    return () if in_text else edits_of(advice.finding.changes, sources, facts)


async def watch_run(app: App) -> AbstractContextManager[None]:
    """Check an app before its run, when it has data and model.

    Returns:
        A context manager that watches the run, and adds the likely cause to an error.

    Raises:
        AppError: ``advice="strict"``, and the app cannot learn.
    """
    findings, cause = await check_before_run(app)

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        for advised in findings:
            app.run_context.emit(advised)
        with watched(app), explained_errors(app, cause):
            yield

    return watching()


async def check_before_run(app: App) -> tuple[list[Advised], str]:
    """Return the findings to report when a run starts, and the likely cause to add if the run fails.

    Raises:
        AppError: ``advice="strict"``, and the app cannot learn.
    """
    if app.advice == "off":
        return [], ""
    try:
        report = await asyncio.to_thread(_quick_report, app)
    except Exception:  # a defect of the adviser must not end a run
        log.exception("no advice could be given")
        return [], ""
    for failed in report.failed:
        log.warning("the rule %s failed: %s", failed.rule.id, failed.error)
    errors = [advice for advice in report.advice if advice.severity == "E"]
    cause = f"{errors[0]}; {errors[0].fix}" if errors else ""
    if app.advice == "strict" and errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise AppError(f"advice is 'strict', and this app cannot learn: {errors[0]}{more}", hint=errors[0].fix)
    shown = [advice for advice in report.advice if advice.severity != "I" and advice.rule.id not in REPORTED_BY_RUNS]
    events = [_advised(advice) for advice in shown[:MOST_IN_A_RUN]]
    if len(shown) > MOST_IN_A_RUN:
        events[-1] = replace(events[-1], more=len(shown) - MOST_IN_A_RUN)
    return events, cause


def _advised(advice: Advice) -> Advised:
    return Advised(
        rule=advice.rule.id,
        severity=advice.severity,
        what=advice.finding.message,
        fix=advice.fix,
        place="" if advice.position is None else str(advice.position),
    )


def _quick_report(app: App) -> AdviserReport:
    sources = sources_of(app)
    facts = facts_of(app)
    return check_facts(facts, sources, sources.ignores(), ("quick",), CHECKED_BY_RUNS if facts.slots > 1 else ())


@contextlib.contextmanager
def explained_errors(app: App, cause: str) -> Iterator[None]:
    """Add the likely cause and the first non-finite step to an error that ends the training.

    Args:
        app: The user's ``IApp``. At the time of the error, its model has the last finite weights.
        cause: The likely cause that ``check_before_run`` returned.
    """
    try:
        yield
    except BadUpdate as error:
        if cause:
            error.add_note(f"likely cause: {cause}")
        if error.count and app.advice != "off" and (advised := not_finite_advice(app)) is not None:
            app.run_context.emit(advised)
            error.add_note(f"{advised.place + ': ' * bool(advised.place)}{advised.what}")
        raise
