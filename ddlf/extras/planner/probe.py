"""Measures short rounds of an app on its workers. Runs on the master.

Each measurement is a real training of the app that ends after some rounds: same data, model, optimizer, codec and
workers. Hooks and callbacks of the user do not run, no folder is written, and workers forget it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ddlf.app import IApp
from ddlf.errors import ConfigError
from ddlf.events import Committed, Event, ModelBuilt, TrainingBegan, UpdateArrived
from ddlf.extras.planner.choice import Length
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.extras.planner.speeds import UNLIKE
from ddlf.training.context import SILENT, App
from ddlf.training.registry import spec_of

FIRST_ROUNDS = 2
"""Rounds of each slot that do not count: the first ones compile."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 200
"""Rounds of each slot that count."""
MEASURE_S = 1.5
"""Seconds of rounds that count, with enough of them."""
FEW_ROUNDS, FEW_S = 2, 2.0
"""Rounds of each slot that are enough if they take so many seconds."""
LONG_ROUND_S = 0.6
"""Seconds of the steps of a long round. A short one has two steps."""
SHORT_STEPS = 2
FIRST_STEPS, SECOND_STEPS = 4, 20
"""Steps of the first round of all workers, and of a round that shows about how long a step takes."""
MOST_MORE = 3
"""How often rounds of one slot are measured again if they do not show what a step takes, with a budget that allows it."""
LONGER = 2.0
"""Lengths of rounds that differ by this factor or less say nearly the same."""
MOST_OTHER = 20.0
"""A step takes at least so small a part of its share of a round of ``SECOND_STEPS``: differences of rounds are noisy."""


def do_nothing(*arguments: Any) -> None:
    """Replaces a hook of the user."""


@dataclass(slots=True)
class Rounds:
    """Hears the rounds of one measurement or run, and ends a measurement when there are enough.

    Args:
        setting: The setting.
        stop: Ends the measurement.
        clock: Returns seconds.

    Attributes:
        seconds: Seconds of each round that counts.
        computing: Seconds of local training of the slowest slot in each of them.
        sent: Bytes of these rounds, together.
        busy: Seconds of each round from sending weights to computing the new ones.
        is_usual: Whether no slot was computed twice.
        paces: For each worker, the seconds of a sample in each round that counts.
    """

    setting: Setting
    stop: Callable[[], Any] = do_nothing
    clock: Callable[[], float] = time.perf_counter
    seconds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    sent: int = 0
    busy: list[float] = field(default_factory=list)
    is_usual: bool = True
    paces: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _slots: list[int | None] = field(default_factory=list)
    _ended: dict[int | None, float] = field(default_factory=dict)
    _heard: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    _updates: list[tuple[float, UpdateArrived]] = field(default_factory=list)  # with the time

    def hear(self, event: Event) -> None:
        """Receive an event of the run.

        A round ends with its last update. ``Committed`` may come later, together with that of the next round, because it
        waits for the evaluation of its weights.
        """
        if isinstance(event, UpdateArrived):
            self._updates.append((self.clock(), event))
        if not isinstance(event, Committed):
            return
        record, slot = event.record, event.record.slot
        of_slot = [item for item in self._updates if slot in (None, item[1].slot)]
        self._updates = [item for item in self._updates if item not in of_slot or item[1].round > record.round]
        updates = [update for _, update in of_slot if update.round == record.round]
        now = max((at for at, update in of_slot if update.round == record.round), default=self.clock())
        before, self._ended[slot] = self._ended.get(slot), now
        self._heard[slot] += 1
        share = self.setting.samples / (self.setting.slots if slot is not None else 1)
        missing = abs(record.samples * record.epochs - share)
        if before is None or self._heard[slot] <= FIRST_ROUNDS or missing >= self.setting.batch:
            return  # the last round of an epoch may be shorter
        self.seconds.append(now - before)
        for update in updates:
            self.paces[update.worker].append(update.compute_s / max(update.samples * update.epochs, 1))
        self._slots.append(slot)
        self.computing.append(record.compute_s)
        self.busy.append(record.seconds)
        self.is_usual = self.is_usual and not record.recomputed
        self.sent += record.bytes_out + record.bytes_back
        if self._are_enough():
            self.stop()

    def _are_enough(self) -> bool:
        """Return whether each slot has enough rounds. Without common rounds, a slow slot has fewer than the others."""
        counts = Counter(self._slots)
        slots = 1 if None in counts else self.setting.slots
        least = min(counts.values()) if len(counts) == slots else 0
        measured_s = sum(self.seconds) / slots
        return (
            (least >= LEAST_ROUNDS and measured_s >= MEASURE_S)
            or (least >= FEW_ROUNDS and measured_s >= FEW_S)
            or len(self.seconds) / slots >= MOST_ROUNDS
        )

    def result(self) -> Measured | None:
        """Return the measured rounds; None if no round counts."""
        if not self.seconds:
            return None
        slots = self._counted()
        counted = [index for index, slot in enumerate(self._slots) if slot in slots]
        return Measured(
            setting=self.setting,
            seconds=tuple(self.seconds[index] for index in counted),
            computing=tuple(self.computing[index] for index in counted),
            sent=self.sent / len(self.seconds),
            paces=tuple((number, median(paces)) for number, paces in sorted(self.paces.items())),
        )

    def _counted(self) -> set[int | None]:
        """Return the slots whose rounds count: without common rounds, the slowest one if speeds differ."""
        medians = {
            slot: median(
                seconds for seconds, seconds_slot in zip(self.seconds, self._slots, strict=True) if seconds_slot == slot
            )
            for slot in set(self._slots)
        }
        slowest = max(medians, key=medians.__getitem__)
        return {slowest} if medians[slowest] >= UNLIKE * min(medians.values()) else set(medians)


class Probe:
    """Measures rounds of one app.

    Args:
        app: The app, connected to its workers. It must not be used for anything else.

    Attributes:
        samples: n, the number of training samples; 0 before the first measurement.
        batch_parts: Into how many parts the cards of a worker divide each batch.
        threads: The threads of a worker in each measurement, by its number of slots.
    """

    def __init__(self, app: IApp) -> None:
        self.app = app
        self.samples, self.batch_parts = 0, 1
        self.threads: dict[int, int] = {}
        self._setting: Setting | None = None
        for name, value in QUIET.items():
            setattr(app, name, value)

    async def rounds(self, setting: Setting, most_s: float | None = None) -> Measured | None:
        """Train some rounds with a setting. Return their seconds; None if no round counts.

        Args:
            setting: The setting.
            most_s: The training is cancelled after so many seconds, and its rounds until then count.
        """
        app, way = self.app, setting.way
        app.mode, app.exchange, app.codec = way.mode, way.exchange, way.codec
        app.slots, app.batch_size = setting.slots, setting.batch
        app.worker_steps = None if way.is_one_step else round(setting.steps)
        app.master_epochs = self._epochs(setting)
        self._setting = setting
        measured_rounds = Rounds(setting, app.stop_training)
        unsubscribers = [app.subscribe(self._hear), app.subscribe(measured_rounds.hear)]
        limit = asyncio.timeout(most_s)
        try:
            async with limit:
                await app.train_model(fresh=True)
        except TimeoutError:
            if not limit.expired():  # a worker that does not answer, for example
                raise
        finally:
            for unsubscribe in unsubscribers:
                unsubscribe()
        return measured_rounds.result()

    def _epochs(self, setting: Setting) -> int:
        """Return a number of epochs with enough rounds."""
        needed = (FIRST_ROUNDS + MOST_ROUNDS) * setting.samples
        return max(1, -(-int(needed) // self.samples)) if self.samples else MOST_ROUNDS

    def _hear(self, event: Event) -> None:
        if isinstance(event, ModelBuilt):
            self.app.callbacks = []  # create_model may have set some
            self.batch_parts = event.batch_parts
        if isinstance(event, TrainingBegan):
            self.samples = event.samples
            self.threads[event.slots] = self.app.run_context.threads or 0
        if isinstance(event, Committed) and self._setting is not None and is_longer(self._setting, self.samples):
            self.app.stop_training()  # no round will count


def is_longer(setting: Setting, samples: int) -> bool:
    """Return whether an epoch with so many samples is clearly shorter than a round of a setting."""
    return setting.samples - samples >= setting.batch


QUIET: dict[str, Any] = {
    "on_round": do_nothing,
    "on_event": do_nothing,
    "is_convergent": do_nothing,
    "verbose": False,
    "ui": "none",
    "planned": False,
    "out": None,
    "checkpoint": None,
    "resume": None,
    "dashboard": None,
    "callbacks": [],
    "worker_callbacks": [],
    SILENT: True,
    "round_samples": None,
    "worker_epochs": 1,
    "converge": "never",
    "evaluate_every": 0,
}
"""Replaces hooks of the user, and settings without influence on the time of a round or with effects that outlive it."""


def is_probed(app: App) -> bool:
    """Return whether an app is trained only to measure its rounds."""
    return vars(app).get("on_round") is do_nothing


def own_ways(app: IApp) -> list[Way]:
    """Return how an app's updates travel: one way, or two between which ``exchange="auto"`` chooses.

    Raises:
        ConfigError: The planner knows no model of this strategy or exchange.
    """
    spec = spec_of(app)
    name = spec.exchange.name
    ways = [
        Way(spec.train.name, exchange, str(app.codec))
        for exchange in (("star", "sharded") if name == "auto" else (name,))
    ]
    if spec.train.name not in ("sync", "async") or name not in ("star", "sharded", "gradient", "auto"):
        setting = f"mode={spec.train.name!r}" if spec.train.name not in ("sync", "async") else f"exchange={name!r}"
        raise ConfigError(
            f"the planner has no model of time for {setting}",
            hint="plan with --mode sync or async, and --exchange auto, star, sharded or gradient",
        )
    return ways


@dataclass(slots=True)
class Budget:
    """The time of all measurements, with the start of Keras on the workers. It begins now.

    Args:
        seconds: The time.
        clock: Returns seconds.
        most: The time that necessary measurements may take, which say what a step takes; by default the same. It is more
            if the user has not chosen the time, because machines may be slow or busy.
    """

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    most: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began, self.most = self.clock(), max(self.most, self.seconds)

    @property
    def spent(self) -> float:
        """The seconds since the beginning."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """The seconds until the end, at least 0."""
        return max(self.seconds - self.spent, 0.0)

    @property
    def advice(self) -> str:
        """What to do if the time was not enough."""
        return f"plan with more time: --budget {2 * self.most:g}s, in a program plan({2 * self.most:g})"

    def has_room(self, needed: float) -> bool:
        """Return whether so many seconds are left."""
        return self.spent + needed <= self.seconds

    def may_exceed(self, needed: float) -> bool:
        """Return whether a necessary measurement of so many seconds may end after the time."""
        return self.most > self.seconds and self.spent + needed <= self.most

    @property
    def left_at_most(self) -> float:
        """The seconds that a necessary measurement may take, at least 0."""
        return max(self.most - self.spent, 0.0)


async def explore(
    probe: Probe,
    ways: Sequence[Way],
    batches: Sequence[int],
    max_slots: int,
    budget: Budget,
    say: Callable[[str], None],
    length: Callable[[int], Length],
) -> list[Measured]:
    """Measure rounds of all workers and of one slot, short and long ones, and in all ways.

    The settings that matter most come first: what a step takes on one worker, then rounds of all workers in each way. They
    are as long as the app's own rounds, if those are not very long. If time remains, another batch size and other lengths are
    measured, and all once more, so that a slow moment of the machines counts less. No measurement lasts longer than the
    budget, apart from necessary ones with a budget that allows it.

    Args:
        probe: Measures.
        ways: How updates may travel; first the app's own way.
        batches: The batch sizes to compare; first the app's.
        max_slots: The largest number of slots.
        budget: The time.
        say: Shows a line of progress.
        length: Returns how long a round of the app is, with so many samples.

    Raises:
        ConfigError: No round of the app's own setting was measured.
    """
    first = Setting(way=ways[0], slots=max_slots, batch=batches[0], steps=1 if ways[0].is_one_step else FIRST_STEPS)
    measured_settings, took = dict[Setting, Measured](), dict[Setting, float]()
    necessary, refused = {first}, set[Way]()

    def exceeds() -> None:
        say(
            f"the usual {budget.seconds:g} s are not enough on these machines now: necessary measurements may take up to "
            f"{budget.most:g} s"
        )

    async def rounds(setting: Setting) -> Measured | None:
        if setting not in necessary or budget.most == budget.seconds:
            return await probe.rounds(setting, budget.left)
        warning = asyncio.get_running_loop().call_later(budget.left, exceeds) if budget.left else None
        try:
            return await probe.rounds(setting, budget.left_at_most)
        finally:
            if warning is not None:
                warning.cancel()

    async def measure(setting: Setting) -> None:
        if setting.way in refused:
            return
        begin = budget.clock()
        try:
            measured = await rounds(setting)
        except ConfigError as error:
            if setting.way == ways[0]:
                raise
            refused.add(setting.way)  # create_model may have set something that it cannot have
            say(f"{setting.way} is left out: {error}")
            return
        if setting != first:  # the first one imports Keras on the workers, and loads the data
            took[setting] = budget.clock() - begin
        if measured is None:
            return
        if (before := measured_settings.get(setting)) is not None:
            merged = before.seconds + measured.seconds, before.computing + measured.computing
            paces = measured.paces or before.paces
            measured = replace(measured, seconds=merged[0], computing=merged[1], paces=paces)
        measured_settings[setting] = measured
        say(
            f"{setting.slots} slot{'s' * (setting.slots != 1)}, {setting.way}, {setting.way.codec}, batch {setting.batch}, "
            f"{setting.steps:g} step{'s' * (setting.steps != 1)}: {measured.median * 1e3:.1f} ms a round"
        )

    async def measure_all(settings: Sequence[Setting]) -> None:
        for setting in settings:
            seconds = took[min(took, key=setting.difference)] if took else 0.0
            if budget.has_room(seconds) or (setting in necessary and budget.may_exceed(seconds)):
                await measure(setting)

    await measure(first)
    if first not in measured_settings and probe.samples and is_longer(first, probe.samples):
        shorter = next(_setting(first.way, max_slots, first.batch, FIRST_STEPS, probe.samples), None)
        if shorter is not None:
            first = shorter
            necessary.add(first)
            await measure(first)
    if first not in measured_settings and budget.left_at_most == 0.0:
        when = "did not train" if probe.samples else "were not ready to train"
        raise ConfigError(
            f"the workers {when} for {FIRST_ROUNDS + 1} rounds in {budget.most:g} s, in which they also import Keras and "
            "load the data",
            hint=budget.advice,
        )
    if first not in measured_settings:
        raise ConfigError(
            f"no whole round of {first.samples:,.0f} samples was trained: the data has {probe.samples:,}",
            hint="plan with a smaller batch size, or more data",
        )
    timed = list(_timed(ways, max_slots, batches[0], probe.samples))
    necessary.update(timed)
    await measure_all([setting for setting in timed if setting not in measured_settings])
    step = step_of(
        [measured_settings[setting] for setting in timed if setting in measured_settings] or [measured_settings[first]]
    )
    settings = dict.fromkeys(_settings(ways, batches, max_slots, step, length(probe.samples)))
    remaining = [setting for setting in settings if setting not in measured_settings]
    await measure_all(remaining)
    await measure_all([setting for setting in remaining if setting in measured_settings])
    if budget.most > budget.seconds and not knows_step(
        measured_settings, batches[0]
    ):  # the noise is larger than the steps
        of_one_slot = [setting for setting in measured_settings if setting.slots == 1]
        necessary.update(of_one_slot)
        for _ in range(MOST_MORE):
            await measure_all(of_one_slot)
            if knows_step(measured_settings, batches[0]):
                break
    return list(measured_settings.values())


def knows_step(measured: Mapping[Setting, Measured], batch: int) -> bool:
    """Return whether measured rounds determine the seconds of a step."""
    return bool(measured) and TimeModel(list(measured.values())).knows_step(batch)


def check_samples(batch: int, slots: int, samples: int) -> None:
    """Refuse data without a batch for each slot, or with only one batch. Two lengths of rounds show what a step takes.

    Raises:
        ConfigError: There are fewer samples.
    """
    if samples < (needed := max(slots, 2) * batch):
        batches = f"a batch of {batch:,} for each of the {slots} workers" if slots > 1 else f"two batches of {batch:,}"
        raise ConfigError(
            f"a plan trains {batches}, which are {needed:,} samples, and the data has {samples:,}",
            hint="plan with a smaller batch size, fewer workers or more data",
        )


def step_of(rounds: Sequence[Measured]) -> float:
    """Return about how long a step takes, from rounds of one or two lengths.

    A round of few steps takes mostly for other things than its steps. So only the difference of two rounds shows how many
    steps a long round must have.
    """
    short, long = rounds[0], rounds[-1]
    mean_step = long.median / long.setting.steps
    if short.setting.steps == long.setting.steps:
        return mean_step
    return max((long.median - short.median) / (long.setting.steps - short.setting.steps), mean_step / MOST_OTHER)


def _many_steps(ways: Sequence[Way]) -> Way:
    """Return the first way whose rounds can have several steps; the first one if there is none.

    Rounds of one step do not show how long it takes.
    """
    return next((way for way in ways if not way.is_one_step), ways[0])


def _timed(ways: Sequence[Way], max_slots: int, batch: int, samples: int) -> Iterator[Setting]:
    """Yield two settings of one slot, whose rounds differ only in their steps."""
    way, second = _many_steps(ways), min(SECOND_STEPS, samples // batch)
    yield from _setting(way, 1, batch, min(FIRST_STEPS if max_slots == 1 else SHORT_STEPS, second / 2), samples)
    yield from _setting(way, 1, batch, second, samples)


def _setting(way: Way, slots: int, batch: int, steps: float, samples: int) -> Iterator[Setting]:
    """Yield a setting, in which a round has at most the steps of an epoch; none if an epoch has no whole step."""
    longest = 1 if way.is_one_step else samples // (slots * batch)
    if longest >= 1:
        yield Setting(way=way, slots=slots, batch=batch, steps=max(1, min(round(steps), longest)))


def _settings(
    ways: Sequence[Way], batches: Sequence[int], max_slots: int, step: float, length: Length
) -> Iterator[Setting]:
    """Yield the settings to measure. The most important ones come first."""

    def setting(way: Way, slots: int, batch: int, steps: float) -> Iterator[Setting]:
        return _setting(way, slots, batch, steps, length.samples)

    own_way, batch, timed = ways[0], batches[0], _many_steps(ways)
    long = max(4.0 * SHORT_STEPS, LONG_ROUND_S / step)
    app_steps = min(length.steps_of(timed, max_slots, batch), long)
    # With another number of slots, workers on one machine may need other threads, and then restart. So all rounds of one
    # slot come together, and before rounds of all workers: nothing can be compared without the time of a step.
    if long > LONGER * SECOND_STEPS:
        yield from setting(timed, 1, batch, long)
    for other in batches[1:]:
        yield from setting(timed, 1, other, long * batch / other)
    # Each way is measured with all workers, because a prediction from one slot lacks the cost of the others. Rounds of one
    # step are short, so they come first.
    for way in ways[1:]:
        if way.is_one_step:
            yield from setting(way, max_slots, batch, 1)
    # The first measurement of all says as much.
    was_measured = FIRST_STEPS / LONGER <= app_steps <= FIRST_STEPS * LONGER
    if not was_measured:
        yield from setting(own_way, max_slots, batch, app_steps)
    for other in batches[1:]:
        yield from setting(own_way, max_slots, other, long * batch / other)
    for way in ways[1:]:
        yield from setting(way, max_slots, batch, app_steps)
    yield from setting(own_way, max_slots, batch, app_steps)
    if long > LONGER * app_steps:
        yield from setting(own_way, max_slots, batch, long)
    # Further settings make constants more certain. They hardly change the choice.
    for way in ways[1:]:
        yield from setting(way, max_slots, batch, SHORT_STEPS if app_steps >= 4 * SHORT_STEPS else long)
    for way in ways[1:]:
        if way.is_one_step:
            yield from setting(way, 1, batch, 1)
    if len(batches) == 1:
        for slots in (1, max_slots):
            yield from setting(timed if slots == 1 else own_way, slots, 2 * batch, long / 2)
    if max_slots > 3:
        yield from setting(own_way, max_slots // 2, batch, long)
        yield from setting(own_way, max_slots // 2, batch, SHORT_STEPS)
