"""``ddlf scout``: run the trials of a search on the workers. Runs on the master."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from ddlf.algorithms.partition import shuffled
from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights
from ddlf.app import IApp
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data.app_data import NAMES, data_set_of, has_data, samples_of
from ddlf.data.trees import leaves
from ddlf.errors import AppError, ConfigError, DatasetError
from ddlf.extras import hooks
from ddlf.extras.scout.comparisons import SEEDS, Comparison, Setting, compare
from ddlf.extras.scout.curve import comparable
from ddlf.extras.scout.halving import STARTS, Curve, Rung, Trial, grid, measure_neighbours, rungs, search, steps_of
from ddlf.extras.scout.trials import TrialReplica, highest_rate, optimizers_of
from ddlf.extras.scout.verdict import Verdict, doubt, judged
from ddlf.monitor.runs.summary import source_of
from ddlf.rpc.iworker import awaited
from ddlf.training.context import App, travels
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.opening import crew_of
from ddlf.training.exchanges.carrier import StarWeights
from ddlf.training.roles import REPLICA
from ddlf.training.samples.files import settled
from ddlf.training.samples.policy import check_common
from ddlf.training.slot.task import Task
from ddlf.training.spec import RunSpec
from ddlf.training.start import check

Answer = TypeVar("Answer")

LOW, HIGH = 1e-5, 10.0
"""The bounds of the search. Beyond them no usual optimizer learns."""
LEAST_STEPS = 3_000
"""Steps of all trials together, at least."""
SHARE = 0.15
"""Steps of all trials together, as a share of the run."""
LONG_S = 90.0
"""A search that takes more than its share of the run says how long it takes, if that is longer than this."""
HELD_OUT, MOST_HELD_OUT = 0.2, 2_000
"""The share of the training samples that is held out without validation data, and the most samples of it."""
MOST_HALVINGS = 4
"""How often half and double of the rate are measured. One of them may become the new rate."""
MORE_STARTS = 3
"""Starts that replace broken ones."""
ROWS = 4_096
"""Samples that are checked at once."""
ORDER = 7_919
"""The first of the orders of samples. Runs use the orders from 0."""
JSON_NAMES = {"own_rate": "own", "setting": "what", "present": "kept", "variants": "others", "tolerance": "near"}
"""The names of fields in the JSON of ``ddlf scout --json``, where they differ. Programs read these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scouted:
    """The result of a search.

    Args:
        verdict: The learning rate, and how much it matters.
        curve: The losses of all rates.
        starts: The seeds of the starts.
        broken: The seeds that were left out, each with the reason.
        judged_by: The samples that the losses are from.
        is_scaled: Whether the rate is the highest one of a schedule or of several optimizers, which are scaled.
        trials: The number of trials, without the evaluations of untrained models.
        steps: The steps of all trials together.
        seconds: The time of all trials.
        also: The answers about other settings.
        bounds: The user's bounds of the answer. A bound that was not given is 0 or infinite.
        doubt: Why the trials do not decide, so that the user's rate should stay; "" if they do.
    """

    verdict: Verdict
    curve: Curve
    starts: tuple[int, ...]
    broken: tuple[tuple[int, str], ...]
    judged_by: str
    is_scaled: bool
    trials: int
    steps: int
    seconds: float
    also: tuple[Comparison, ...] = ()
    bounds: tuple[float, float] = (0.0, math.inf)
    doubt: str = ""

    @property
    def keeps(self) -> bool:
        """Whether the user's rate should stay."""
        return self.verdict.keeps or bool(self.doubt)

    def to_data(self) -> dict[str, Any]:
        """Return the result for JSON. A loss that is not finite is null.

        The field ``loss`` of a point can be compared with that of others. Its ``losses`` has one loss for each start.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {JSON_NAMES.get(name, name): plain(item) for name, item in value.items()}
            if isinstance(value, list | tuple):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        data = asdict(self)
        losses = comparable(self.curve, self.verdict.best)
        for point in data["curve"]["points"]:
            point["loss"] = losses[point["rate"]]
        result: dict[str, Any] = plain(data)
        return result


def do_nothing(*arguments: Any) -> None:
    """Replaces a hook of the user."""


QUIET: dict[str, Any] = {
    "on_round": do_nothing,
    "on_event": do_nothing,
    "is_convergent": do_nothing,
    "verbose": False,
    "ui": "none",
    "out": None,
    "checkpoint": None,
    "resume": None,
    "dashboard": None,
    "callbacks": [],
    "worker_callbacks": [],
    "planned": False,
    "scout": False,
    "advice": "off",
}
"""Replaces hooks of the user, and settings with effects that outlive a trial."""


async def scout(
    app: IApp,
    *,
    low: float | None = None,
    high: float | None = None,
    steps: int | None = None,
    also: Sequence[Setting] = (),
    say: Callable[[str], None] | None = None,
    check_own: Callable[[float], None] = do_nothing,
) -> Scouted:
    """Search a learning rate for an app with short trials on its workers.

    Args:
        app: The app, with its settings, connected to its cluster. A copy of it is trained.
        low: The lowest rate to try and to answer; None for ``LOW``, where the search begins.
        high: The highest one; None for ``HIGH``.
        steps: Steps of the trials of the rates, together; None for a share of the run.
        also: Other settings to compare, at the chosen rate.
        say: Shows a line of progress; by default the app's ``say``.
        check_own: Receives the user's rate before the first trial, and may refuse it.

    Raises:
        ConfigError: The app or a setting has no rate to search, or none lowers the loss.
        AppError: The loss of the untrained model is not finite.
    """
    rates = grid(low or LOW, high or HIGH)
    bounds = (0.0 if low is None else min(low, rates[0]), math.inf if high is None else max(high, rates[-1]))
    check_common(app, "trials compare rates on the same samples")
    tried = copy_of_app(app)
    await tried.run_context.check_written()
    spec = check(tried, tried.mode, fresh=True)
    _check_trains(spec)
    async with crew_of(tried, spec.seed, replica=TrialReplica, fresh=True) as (crew, samples):
        tried.callbacks = []  # create_model may have set some
        trials = Trials(tried, settled(tried, spec), crew, samples, say or app.say)
        check_own(trials.own_rate)
        await trials.prepare(SEEDS if "seed" in also else STARTS)
        return await trials.run_search(rates, steps, also, bounds)


def _check_trains(spec: RunSpec) -> None:
    """Refuse a run without local training of the whole model.

    Raises:
        ConfigError: A worker does not train alone in such a run.
    """
    mode, exchange = spec.train.name, spec.exchange
    if mode not in ("sync", "async") or exchange.spans_workers:
        setting = f"mode={mode!r}" if mode not in ("sync", "async") else f"exchange={exchange.name!r}"
        raise ConfigError(
            f"a trial trains the whole model on one worker with its own optimizer, but with {setting} no worker trains alone",
            hint="search with --mode sync --exchange star, and try the rate in a short run",
        )


def copy_of_app(app: IApp) -> IApp:
    """Return an app with the same settings and cluster, without data, model, hooks and callbacks."""
    other = type(app)(app.cluster)
    vars(other).update(travels(app))
    for name, value in QUIET.items():
        setattr(other, name, value)
    return other


class Trials:
    """Runs trials of one app on a crew.

    Args:
        app: The app, with data and model. It must not be used for anything else.
        spec: The settings.
        crew: The workers.
        samples: n, the number of training samples.
        say: Shows a line of progress.

    Attributes:
        starts: The seeds of the starts.
        broken: The seeds that were left out, each with the reason.
        run_steps: Steps of the whole run.
        own_rate: The user's rate; of a schedule or several optimizers, the highest one.
        is_scaled: Whether it is such a highest one.
    """

    def __init__(self, app: App, spec: RunSpec, crew: Crew, samples: int, say: Callable[[str], None]) -> None:
        self._app, self._spec, self._crew, self._say = app, spec, crew, say
        self._slots = spec.slots_on(app.cluster.places) if spec.exchange.one_step else 1
        self._batch = spec.data.batch_size * self._slots  # slots of a common step make it together
        self._has_val = has_data(app, "val")
        self._files = data_set_of(app, "train") is not None
        self._held_out_count = 0 if self._has_val else max(1, min(MOST_HELD_OUT, round(HELD_OUT * samples)))
        self._samples = samples - self._held_out_count
        if self._samples < 1:
            raise ConfigError("one training sample is too few: a part is held out to compare rates")
        self._sample_count = samples
        self._weights: list[Weights] = []
        self._sent: list[StarWeights] = []
        self._sent_tasks = self._count = self._steps = 0
        self._long = 0  # steps of a search that takes more than its share of the run, until the first rung has ended
        self.starts: list[int] = []
        self.broken: list[tuple[int, str]] = []
        self.run_steps = spec.epochs * math.ceil(samples / self._batch)
        self.own_rate = highest_rate(app.model, self.run_steps)
        self.is_scaled = is_scaled(app.model)  # before the check of a start replaces the optimizer

    # -- starts -------------------------------------------------------------------------------------------------------

    async def prepare(self, starts: int) -> None:
        """Make the first weights of each start. A broken start is left out.

        Args:
            starts: The number of starts.

        Raises:
            AppError: All starts are broken.
        """
        checks = [make_check(self._app) for make_check in hooks("start_check")]
        for seed in range(self._spec.seed, self._spec.seed + starts + MORE_STARTS):
            weights = await self._first_weights(seed)
            if reason := next(filter(None, (why_broken(weights) for why_broken in checks)), ""):
                self.broken.append((seed, reason))
                self._say(f"seed {seed} is left out: {reason}")
                continue
            self.starts.append(seed)
            self._weights.append(weights)
            self._sent.append(StarWeights("float32", [True] * len(self._weights[-1])))
            if len(self.starts) == starts:
                return
        if not self.starts:
            raise AppError(
                f"each of {len(self.broken)} starts is broken, such as that of seed {self.broken[0][0]}: {self.broken[0][1]}",
                hint=f"look for the cause first: {advise(source_of(self._app))}",
            )

    async def _first_weights(self, seed: int) -> Weights:
        """Return the first weights of a seed. A check of a start changes the app's model, which has the first seed."""
        if seed == self._spec.seed:
            first: Weights = self._app.model.get_weights()
            return first
        other = object.__new__(type(self._app))
        vars(other).update(vars(self._app))
        await TrialReplica.build_on_master(other, seed, lambda: awaited(other.create_model()))
        weights: Weights = other.model.get_weights()
        return weights

    # -- trials -------------------------------------------------------------------------------------------------------

    async def run_search(
        self,
        rates: Sequence[float],
        steps: int | None,
        compared_settings: Sequence[Setting] = (),
        bounds: tuple[float, float] = (0.0, math.inf),
    ) -> Scouted:
        """Search these rates, and return the result.

        Args:
            rates: The rates of the first rung.
            steps: Steps of the trials of the rates, together; None for a share of the run.
            compared_settings: Other settings to compare.
            bounds: The answer lies between them. The user's rate is also tried if it does not.

        Raises:
            ConfigError: No rate lowers the loss.
            AppError: The loss of the untrained model is not finite.
        """
        begin = time.perf_counter()
        share = round(SHARE * self.run_steps)
        allowed = max(LEAST_STEPS, share) if steps is None else steps
        ladder = rungs(allowed, len(rates) + 1, self.run_steps)
        ladder = [Rung(steps=rung.steps, starts=min(rung.starts, len(self.starts))) for rung in ladder]
        if steps is None and (planned := steps_of(ladder, len(rates) + 1)) > share:
            self._long = planned
        own_rate = float(f"{self.own_rate:.6g}")
        curve = await self._driven(search(rates, own_rate, ladder, *bounds))
        if any(math.isinf(point.loss) for point in curve.points):
            check_data(self._app)
        check_learns(curve, bounds, source_of(self._app))
        verdict = judged(curve.restricted_to(*bounds), own_rate)
        for _ in range(MOST_HALVINGS):
            curve = await self._driven(measure_neighbours(curve, verdict.rate, ladder[-1], *bounds))
            before, verdict = verdict, judged(curve.restricted_to(*bounds), own_rate)
            if verdict.rate == before.rate:
                break
        answers = [
            await self._driven(
                compare(setting, curve, verdict.rate, ladder[-1], self._spec.data.batch_size, self.starts)
            )
            for setting in compared_settings
        ]
        return Scouted(
            verdict=verdict,
            curve=curve,
            starts=tuple(self.starts),
            broken=tuple(self.broken),
            judged_by="validation data" if self._has_val else f"{self._held_out_count:,} training samples, held out",
            is_scaled=self.is_scaled,
            trials=self._count,
            steps=self._steps,
            seconds=time.perf_counter() - begin,
            also=tuple(answers),
            bounds=bounds,
            doubt=doubt(
                curve.restricted_to(*bounds),
                samples_of(self._app, "val") if self._has_val else self._held_out_count,
                self.run_steps,
            ),
        )

    async def _driven(self, search: Generator[Sequence[Trial], Sequence[float], Answer]) -> Answer:
        """Run the trials that a search asks for, until it ends, and return its answer."""
        try:
            trials = next(search)
            while True:
                losses = await self.losses(trials)
                if not trials[0].steps and not all(map(math.isfinite, losses)):
                    check_data(self._app)
                    raise AppError(
                        f"the loss of the untrained model is {losses[0]:g}, so no learning rate helps",
                        hint=f"look for the cause first: {advise(source_of(self._app))}",
                    )
                trials = search.send(losses)
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    async def losses(self, trials: Sequence[Trial]) -> list[float]:
        """Run trials on all workers, and return their losses in the same order."""
        self._crew.begin_round()
        first, self._sent_tasks = self._sent_tasks, self._sent_tasks + len(trials)
        self._count += sum(trial.steps > 0 for trial in trials)
        self._steps += sum(trial.steps for trial in trials)
        if trials[0].steps:
            self._say(line_of(trials))
        begin = time.perf_counter()
        carried = [
            self._crew.carry(first + index, 0, partial(self._send, trial), is_round=False)
            for index, trial in enumerate(trials)
        ]
        losses = list(await asyncio.gather(*carried))
        if self._long and self._steps:  # after the first rung
            seconds, self._long = self._long * (time.perf_counter() - begin) / self._steps, 0
            if seconds > LONG_S:
                self._say(f"about {seconds / 60:.0f} min in all; ddlf scout --steps N takes fewer steps, and less time")
        return losses

    async def _send(self, trial: Trial, worker: ProxyWorker, holds: bool) -> float:
        """Run a trial on a worker, and return its loss."""
        weights = self._weights[trial.start]
        task = Task(
            slot=0,
            round=0,
            slots=1,
            first_epoch=0,
            epochs=1,
            batch_size=self._batch_of(trial),
            seed=self.starts[trial.start],
            indices=self._order(trial),
            weights=self._sent[trial.start].encode(0, weights, 0),
            version=0,
            state={},
            steps=(0, trial.steps, trial.steps, trial.steps) if trial.steps else (),
        )
        factor, warm = (trial.rate / self.own_rate, round(trial.warmup * trial.steps)) if trial.steps else (1.0, 0)
        reply = await worker.call(
            (self._app.run_context.name, REPLICA), "trial", task.to_message(), factor, warm, self._held_out
        )
        return float(reply["loss"])

    def _batch_of(self, trial: Trial) -> int:
        return trial.batch * self._slots or self._batch

    @cached_property
    def _held_out(self) -> Any:
        """The samples that are held out, as a message; None if the app has validation data."""
        if not self._held_out_count:
            return None
        indices = self._ordered_samples[self._samples :]
        return indices.to_message() if self._files else np.sort(indices)

    @cached_property
    def _ordered_samples(self) -> Any:
        """All training samples in an order. Its last samples are held out."""
        if not self._files:
            return shuffled(self._sample_count, self._spec.seed, ORDER)
        shuffle = str(self._spec.data.shuffle)
        return Portion(shuffle=shuffle, seed=self._spec.seed, epoch=0, slots=1, start=0, stop=self._sample_count)

    def _order(self, trial: Trial) -> Any:
        """Return the samples of a trial in their order. Trials of one start begin with the same ones."""
        indices, count = self._ordered_samples[: self._samples], trial.steps * self._batch_of(trial)
        if self._files:
            return indices[:count]  # at most one pass
        seed, passes = self.starts[trial.start], math.ceil(count / self._samples)
        orders = [indices[shuffled(self._samples, seed, ORDER + 1 + number)] for number in range(passes)]
        return np.concatenate([indices[:0], *orders])[:count]


def check_data(app: App) -> None:
    """Refuse training and validation data with values that are not finite. Data in files are not read.

    Raises:
        DatasetError: An array has such values.
    """
    for name in NAMES:
        data = None if name.endswith("_test") else getattr(app, name, None)
        for _, array in () if data is None else leaves(data):
            bad_blocks = [
                number for number in range(0, len(array), ROWS) if not is_finite(array[number : number + ROWS])
            ]
            if bad_blocks:
                first = next(number for number in range(bad_blocks[0], len(array)) if not is_finite(array[number]))
                raise DatasetError(
                    f"{name} has NaN or an infinite value, first in sample {first}, so no learning rate helps",
                    hint="repair or leave out such samples in load_dataset",
                )


def is_finite(array: Any) -> bool:
    """Return whether an array has only finite values. Texts and other objects have no others."""
    values = np.asarray(array)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def check_learns(curve: Curve, bounds: tuple[float, float] = (0.0, math.inf), file: str = "") -> None:
    """Raise an error if no rate has learnt anything.

    Args:
        curve: The losses of all rates.
        bounds: Only rates between them count.
        file: The file of the app, for the hint; empty if it has none.

    Raises:
        ConfigError: Each trial diverged, or none has a smaller loss than the untrained model.
    """
    first, points = max(curve.first), curve.restricted_to(*bounds).points
    if any(point.loss < first for point in points):
        return
    low, high, diverged = points[0].rate, points[-1].rate, sum(math.isinf(point.loss) for point in points)
    how = "diverged with each" if diverged == len(points) else f"diverged with {diverged} of {len(points)}"
    how += "".join(f". Yours, {point.rate:g}, lowers it" for point in curve.points if point.loss < first)
    raise ConfigError(
        f"no learning rate from {low:g} to {high:g} lowers the loss of the untrained model, {first:.3g}; training {how}",
        hint=f"search other rates with --from and --to, and look for the cause: {advise(file)}",
    )


def advise(file: str) -> str:
    """Return the command that looks for mistakes in an app."""
    return f"ddlf advise {file}".rstrip()


def line_of(trials: Sequence[Trial]) -> str:
    """Return a line about trials that begin."""

    def counted(count: int, noun: str) -> str:
        return f"{count} {noun}{'s' * (count != 1)}"

    starts = counted(len({trial.start for trial in trials}), "start")
    compared = len({(trial.batch, trial.warmup, trial.rate) for trial in trials})
    values = "batch sizes" if trials[0].batch else "warm-ups" if trials[0].warmup else ""
    trials_text = f"{values} with rates: {counted(compared, 'pair')}" if values else counted(compared, "rate")
    least, most = min(trial.steps for trial in trials), max(trial.steps for trial in trials)
    steps = f"{least} to {most} steps" if least < most else counted(most, "step")
    return f"{trials_text}, {starts}, {steps} each"


def is_scaled(model: Any) -> bool:
    """Return whether a search scales the rates of a model: a schedule, or the rates of several optimizers."""
    optimizers = list(optimizers_of(model.optimizer))
    return len(optimizers) > 1 or not all(hasattr(optimizer._learning_rate, "assign") for optimizer in optimizers)
