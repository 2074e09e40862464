"""``ddlf plan``: probe the workers, fit the model of time, and compare settings. Runs on the master."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ddlf.app import IApp
from ddlf.data.app_data import samples_of, take_made
from ddlf.errors import ConfigError, DDLFError
from ddlf.events.record import size
from ddlf.extras.planner.choice import WORTH, Length, Wish, can_balance, choices, epoch_of_fit
from ddlf.extras.planner.fingerprints import data_of, files_of
from ddlf.extras.planner.measurement_files import Measurements, read, write
from ddlf.extras.planner.memory import MemoryModel
from ddlf.extras.planner.memory_probe import LEAST_S, NEEDED_PART, PART, Memory, memory_of, with_master
from ddlf.extras.planner.model import Link, Measured, Setting, TimeModel, Way
from ddlf.extras.planner.probe import Budget, Probe, check_samples, explore, own_ways
from ddlf.extras.planner.result import Plan
from ddlf.extras.planner.units import budget_of
from ddlf.rpc.iworker import awaited
from ddlf.training.context import App, travels
from ddlf.training.samples.policy import check_common
from ddlf.training.start import check

BUDGET_S = 60.0
MOST_S = 4 * BUDGET_S
"""The most seconds of necessary measurements, if the user has not chosen the time of a plan."""
CODECS = ("int8",)
"""Codecs that are measured beside the app's own."""


async def plan(
    app: IApp,
    budget_s: float | str | None = None,
    batches: Sequence[int] = (),
    say: Callable[[str], None] | None = None,
    *,
    again: bool = False,
    wish: Wish | None = None,
    link: Link | None = None,
) -> Plan:
    """Measure short rounds of an app on its workers, and predict how long training takes.

    The measurements are kept, and a second plan of the same app on the same workers uses them.

    Args:
        app: The app, with its settings. It is connected to its cluster, and a copy of it is trained.
        budget_s: Time for all measurements, with the start of Keras on the workers: seconds, or a text such as ``"2m"``. None
            is ``BUDGET_S``, or up to ``MOST_S`` if the machines are so slow or busy that too little is known until then.
        batches: Further batch sizes to compare. The learning rate may have to change with the batch size.
        say: Shows a line of progress; by default the app's ``say``.
        again: Whether to measure even if there are kept measurements.
        wish: The goal of the best choice; by default the fastest one.
        link: A link to assume, instead of the measured one.

    Raises:
        ConfigError: A setting cannot be planned, the budget is not above 0, or too little could be measured.
    """
    most = MOST_S if budget_s is None else 0.0
    budget_s = BUDGET_S if budget_s is None else budget_of(budget_s)
    check_common(app, "a plan compares numbers of slots, and each worker is one slot")
    await app.connect()
    assert app.cluster is not None
    if app.slots is not None and app.slots > app.cluster.N:
        raise ConfigError(
            f"slots={app.slots} take turns on {app.cluster.N} worker{'s' * (app.cluster.N != 1)}, and the planner has no model "
            "of time for that",
            hint="plan with at most one slot for each worker",
        )
    say, wish = say or app.say, wish or Wish()
    app_ways = possible_ways(app, own_ways(app))
    compared_batches = list(dict.fromkeys([app.batch_size, *batches]))
    ways = possible_ways(app, ways_of(app_ways))
    measurements = None if again else await _kept_measurements(app, say)
    is_kept = measurements is not None and measurements.answers(ways, compared_batches, budget_s, len(app_ways))
    budget = Budget(budget_s, most=most)
    if not is_kept:
        samples = await _samples(app)
        _check_batches(compared_batches, samples)
        check_samples(app.batch_size, app.cluster.N, samples)
    if measurements is not None and is_kept:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(measurements.when))
        say(f"{len(measurements.measured)} settings were measured on {when}; --again measures them again")
    else:
        measurements = await _measured(app, ways, compared_batches, budget, say, wish)
    measurements = await _with_memory(app, measurements, compared_batches, app_ways[0].exchange, wish, budget, say)
    return plan_from(app, app_ways, measurements, compared_batches, budget.spent, wish, link)


def ways_of(app_ways: Sequence[Way]) -> list[Way]:
    """Return the ways to compare: first the app's own."""
    first = app_ways[0]
    codecs = [replace(first, codec=codec) for codec in CODECS if first.exchange == "star"]
    further = [Way("async", "star", first.codec), Way("sync", "gradient", "float32")]
    return list(dict.fromkeys([*app_ways, *codecs, *further]))


def possible_ways(app: IApp, ways: Sequence[Way]) -> list[Way]:
    """Return the first way, and each other way in which the app can be trained.

    For example, an app with its own ``train`` cannot use ``exchange="gradient"``.
    """
    trained = Probe(copy_of_app(app)).app
    trained.slots, trained.worker_steps = None, None

    def can(way: Way) -> bool:
        trained.mode, trained.exchange, trained.codec = way.mode, way.exchange, way.codec
        with suppress(DDLFError):
            check(trained, way.mode)
            return True
        return False

    return [ways[0], *filter(can, ways[1:])]


def can_follow_speeds(app: IApp, batch_parts: int) -> bool:
    """Return whether an app can be trained with parts that follow the speed of workers.

    Args:
        app: The app.
        batch_parts: Into how many parts the cards of a worker divide each batch. Several cards cannot divide parts of any size.
    """
    if batch_parts > 1 and app.worker_steps is None:
        return False
    trained = Probe(copy_of_app(app)).app
    trained.slots, trained.mode, trained.exchange, trained.balance = None, "sync", "star", "speed"
    with suppress(DDLFError):
        check(trained, "sync")
        return True
    return False


async def _kept_measurements(app: IApp, say: Callable[[str], None]) -> Measurements | None:
    """Return the kept measurements of an app, if its data are still the same; None without any.

    The data are loaded on this machine, to compare them.
    """
    if (measurements := read(app)) is None:
        return None
    if measurements.fits(await _loaded(app)):
        return measurements
    say("the data has changed since the measurements, so they are made again")
    return None


async def _loaded(app: IApp) -> IApp:
    """Return a copy of an app with its data, which this machine loads."""
    loaded = Probe(copy_of_app(app)).app
    await awaited(loaded.load_dataset())
    await asyncio.to_thread(take_made, loaded)
    return loaded


async def _samples(app: IApp) -> int:
    """Return the number of an app's training samples, whose data this machine loads."""
    return samples_of(await _loaded(app), "train")


def _check_batches(batches: Sequence[int], samples: int) -> None:
    """Refuse batches that are larger than the data.

    Raises:
        ConfigError: One is.
    """
    if (largest := max(batches)) > samples:
        raise ConfigError(
            f"a batch of {largest} samples is more than the {samples} samples of the data",
            hint="plan with a smaller batch size",
        )


async def _measured(
    app: IApp, ways: Sequence[Way], batches: Sequence[int], budget: Budget, say: Callable[[str], None], wish: Wish
) -> Measurements:
    """Measure rounds of an app, and keep them.

    Raises:
        ConfigError: Too little could be measured.
    """
    assert app.cluster is not None
    probe, workers = Probe(copy_of_app(app)), app.cluster.N
    memory = Memory()
    if budget.seconds >= LEAST_S or wish.needs_memory:
        seconds = (NEEDED_PART if wish.needs_memory else PART) * budget.seconds
        memory = await _memory(app, batches, ways[0].exchange, wish, seconds, budget, say)
    try:
        measured = await explore(probe, ways, batches, workers, budget, say, partial(length_of, app))
    except ConnectionError as error:  # a worker was lost
        error.add_note("the rounds measured until then are not kept: plan again when all workers are there")
        raise
    if app.balance == "speed":
        measured = [_as_balanced(rounds) for rounds in measured]
    if workers > 1 and all(rounds.setting.slots > 1 for rounds in measured):
        raise ConfigError(
            f"no training with one slot could be measured in {budget.most:g} s",
            hint=budget.advice,
        )
    _check_knows_step(TimeModel(measured), batches[0], budget.most)
    measurements = Measurements(
        measured=tuple(measured),
        samples=probe.samples,
        budget_s=budget.seconds,
        batch_parts=probe.batch_parts,
        data=data_of(probe.app),
        files=files_of(app),
        memory=None if memory.peaks is None else with_master(memory.peaks),
        largest=memory.largest,
    )
    write(app, measurements)
    return measurements


def _check_knows_step(model: TimeModel, batch: int, budget_s: float) -> None:
    """Refuse measurements that do not determine the time of a step, so that nothing can be compared with ``fit``.

    Raises:
        ConfigError: They do not.
    """
    if not model.knows_step(batch):
        raise ConfigError(
            f"the measured rounds do not show how long a step with {batch} samples takes on one worker",
            hint=f"use idle machines, more data or more time: ddlf plan APP --again --budget {2 * budget_s:g}s",
        )


def _as_balanced(measured: Measured) -> Measured:
    """Return rounds of an app whose parts follow the speed of workers."""
    setting = measured.setting
    return replace(measured, setting=replace(setting, balanced=can_balance(setting.way, setting.slots)))


async def _with_memory(
    app: IApp,
    measurements: Measurements,
    batches: Sequence[int],
    exchange: str,
    wish: Wish,
    budget: Budget,
    say: Callable[[str], None],
) -> Measurements:
    """Return kept measurements with the memory of a worker and the largest batch, if the choice depends on them.

    This process has not trained, so the memory of a master stays as it was.

    Raises:
        ConfigError: They could not be measured.
    """
    if not wish.needs_memory or (measurements.memory is not None and wish.is_answered(measurements.largest)):
        return measurements
    memory = await _memory(app, batches, exchange, wish, budget.left, budget, say)
    assert memory.peaks is not None
    before = 0 if measurements.memory is None else measurements.memory.master
    measurements = replace(measurements, memory=replace(memory.peaks, master=before), largest=memory.largest)
    write(app, measurements)
    return measurements


async def _memory(
    app: IApp,
    batches: Sequence[int],
    exchange: str,
    wish: Wish,
    seconds: float,
    budget: Budget,
    say: Callable[[str], None],
) -> Memory:
    """Measure the memory of a worker, and the largest batch for a wish.

    Args:
        app: The app. A copy of it is trained.
        batches: Batch sizes to begin with.
        exchange: How updates travel.
        wish: The goal of the best choice.
        seconds: The most seconds that it may take.
        budget: The time of all measurements.
        say: Shows a line of progress.

    Raises:
        ConfigError: The choice depends on the memory, which could not be measured.
    """
    memory = await memory_of(
        copy_of_app(app), batches, exchange, seconds, limit=wish.max_memory, is_goal=wish.goal == "memory"
    )
    if memory.peaks is None and wish.needs_memory:
        raise ConfigError(
            f"the memory of a worker could not be measured in {seconds:g} s: {memory.problem}",
            hint=f"{budget.advice}; or plan without --max-memory and --goal memory",
        )
    say(_memory_line(memory, batches[0]))
    return memory


def _memory_line(memory: Memory, batch: int) -> str:
    """Return a line about measured memory."""
    if memory.peaks is None:
        return f"the memory of a worker could not be measured: {memory.problem}"
    count = MemoryModel(memory.peaks).predict(batch).count
    batches = ", ".join(str(peak.batch) for peak in memory.peaks.batches)
    return f"a worker needs {size(round(count))} with batch {batch}, measured with batches {batches}"


def plan_from(
    app: IApp,
    app_ways: Sequence[Way],
    measurements: Measurements,
    batches: Sequence[int],
    spent_s: float = 0.0,
    wish: Wish | None = None,
    link: Link | None = None,
) -> Plan:
    """Return a plan from measurements.

    Args:
        app: The app, connected to its cluster.
        app_ways: How its updates travel; two ways for ``exchange="auto"``, which takes the faster one.
        measurements: The measurements.
        batches: Batch sizes to compare; first the app's own.
        spent_s: Seconds of the measurements.
        wish: The goal of the best choice.
        link: A link to assume.

    Raises:
        ConfigError: A batch is larger than the data.
    """
    assert app.cluster is not None
    batch, workers = batches[0], app.cluster.N
    slots_now = min(app.slots or workers, workers)
    model, wish = TimeModel(measurements.measured, link), replace(wish or Wish(), epochs=app.master_epochs)
    _check_knows_step(model, batch, measurements.budget_s)
    memory = None if measurements.memory is None else MemoryModel(measurements.memory)
    if not {*app_ways} & {*model.ways}:
        raise ConfigError(
            f"the bytes of {app_ways[0]} between workers were not measured, so another link has no prediction",
            hint="plan without --bandwidth and --latency, or with --exchange star",
        )
    length = length_of(app, measurements.samples)
    is_balanced = app.balance == "speed"
    balance = (False, True) if model.slowness and can_follow_speeds(app, measurements.batch_parts) else (is_balanced,)
    compared = choices(model, length, batches, range(1, workers + 1), model.ways, memory, balance)
    _check_batches(batches, measurements.samples)
    now = next(
        choice
        for choice in compared
        if any(_is_setting(choice.setting, way, slots_now, batch, is_balanced) for way in app_ways)
    )
    best = wish.best([choice for choice in compared if choice.setting.batch == batch])
    other_best = None
    if model.slowness:
        ordered = model.in_other_order()
        other_best = wish.best(choices(ordered, length, [batch], range(1, workers + 1), model.ways, memory, balance))
        other_best = other_best if best.epoch.seconds >= WORTH * other_best.epoch.seconds else None
    return Plan(
        hosts={number: worker.executor.host for number, worker in enumerate(app.cluster.workers, 1)},
        in_other_order=other_best,
        measured=measurements.measured,
        spent_s=spent_s,
        workers=workers,
        samples=measurements.samples,
        now=now,
        best=best,
        fit=epoch_of_fit(model, batch, measurements.samples, now.setting.way),
        choices=tuple(compared),
        step_s=model.step(batch),
        exchange_s=model.exchange(now.setting.way, slots_now),
        model=model,
        wish=wish,
        memory=memory,
        largest=measurements.largest if wish.needs_memory else None,
    )


def length_of(app: App, samples: int) -> Length:
    """Return how long a round of an app is, with so many samples."""
    return Length(samples=samples, epochs=app.worker_epochs, steps=app.worker_steps, most=app.round_samples)


def copy_of_app(app: IApp) -> IApp:
    """Return an app with the same settings and cluster, without data and model."""
    other = type(app)(app.cluster)
    vars(other).update(travels(app))
    return other


def _is_setting(setting: Setting, way: Way, slots: int, batch: int, balanced: bool) -> bool:
    wanted_setting = (way, slots, batch, balanced and can_balance(way, slots))
    return (setting.way, setting.slots, setting.batch, setting.balanced) == wanted_setting
