"""A worker in L-BFGS training: it computes the loss and the gradient of portions of the samples. Runs in the executor.

A replica fetches the weights of a pass once from all shards. It adds the gradients of the portions that count, and
pushes the sum to the shards. Gradients are added as integers, so the bits of the sums do not depend on the worker that computes a portion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.lbfgs import Array, FixedPoint
from ddlf.algorithms.weights import Weights, is_float
from ddlf.errors import AppError, AppMissing, ConfigError
from ddlf.training.context import App
from ddlf.training.exchanges.replica import HoldingReplica
from ddlf.training.roles import REPLICA
from ddlf.training.slot.build import ModelReport, first_rows
from ddlf.training.slot.distribution import parts_of_batch
from ddlf.training.slot.feed import Samples
from ddlf.training.slot.gradients import GradientModel, check_mean_losses
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.optimizers import chain, keeps_averages
from ddlf.training.slot.parts import SlotPart
from ddlf.training.slot.task import Task
from ddlf.training.strategies.lbfgs.portions import Computed
from ddlf.training.strategies.lbfgs.shards import SHARDS, NotReached, Shards, call_shards
from ddlf.worker.calls import concurrent
from ddlf.worker.peers import Unreached, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


@dataclass(slots=True, kw_only=True)
class Pass:
    """One pass over all samples on one worker, with its own weights.

    Args:
        number: Number of the pass.
        owners: Number of the worker that owns each shard.
        parts: Begin and end of each shard.
        samples: n, the number of all samples.
        format: Number format of the sums.
        weights: All weights of the model, once they are fetched.
        sums: For each portion that was computed and may still count, its gradient as integers; None if a value is too
            large, so that the whole pass will not count.
        total: Sum of the gradients that count and were not pushed.
        counted: The portions in this sum.
    """

    number: int
    owners: Sequence[int]
    parts: Sequence[tuple[int, int]]
    samples: int
    format: FixedPoint
    weights: asyncio.Future[Weights]
    sums: dict[int, Array | None] = field(default_factory=dict)
    total: Array | None = None
    counted: list[int] = field(default_factory=list)

    def note(self, counts: Sequence[int], dropped: Sequence[int]) -> None:
        """Add the gradients of portions that count to the sum, once, and forget the gradients of dropped ones."""
        for portion in counts:
            if portion not in self.sums:
                continue  # an earlier call has named it, too
            gradient = self.sums.pop(portion)
            if self.total is None:
                self.total = np.zeros(self.parts[-1][1], np.int64)
            if gradient is not None:
                self.total += gradient
            self.counted.append(portion)
        for portion in dropped:
            self.sums.pop(portion, None)


class LbfgsReplica(HoldingReplica):
    """One worker's copy of an app and its model in L-BFGS training, with the shards on this worker.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run. Other workers find the shards by it.
    """

    PARTS: ClassVar[Sequence[type[SlotPart]]] = ()
    MODEL: ClassVar[type[KerasModel]] = GradientModel
    ONE_CARD: ClassVar[str] = "mode='lbfgs'"
    MIXED: ClassVar[bool] = False  # it rounds gradients too coarsely for a line search

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        self._ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self._shards = Shards(worker.id, run, self._ask, lambda: self._rows, worker.on_shard)
        worker.roles.play(run, SHARDS, self._shards, of=REPLICA)
        self._rows: Rows
        self._untrained: list[Any] = []
        self._pass: Pass | None = None

    # -- verbs --------------------------------------------------------------------------------------------------------

    @concurrent
    async def prepare(self, untrained: list[Any]) -> None:
        """Receive the weights that are not trained; None for each trained weight."""
        self._untrained = untrained

    @concurrent
    async def enter(
        self, number: int, owners: list[int], parts: list[list[int]], samples: int, step: float, format: list[int]
    ) -> None:
        """Begin a pass, and begin to fetch its weights.

        Args:
            number, owners, parts, samples: The arguments of ``Pass`` with these names.
            step: The step along the direction.
            format: The arguments of ``FixedPoint``.
        """
        if self._pass is not None:
            if self._pass.number == number:
                return
            self._pass.weights.cancel()
        fetching = asyncio.ensure_future(self._fetched("trial", owners, self._untrained, number, step, format))
        fetching.add_done_callback(_looked_at)
        self._pass = Pass(
            number=number,
            owners=owners,
            parts=[(begin, end) for begin, end in parts],
            samples=samples,
            format=FixedPoint(*format),
            weights=fetching,
        )

    @concurrent
    async def portions(
        self, pass_number: int, counts: list[int], dropped: list[int], requests: list[list[int]]
    ) -> list[Any] | NotReached:
        """Compute the loss and the gradient of some portions, one after another.

        Args:
            pass_number: Number of the pass.
            counts: Earlier portions of this worker that count and were not pushed.
            dropped: Earlier portions of this worker that do not count, because another worker was faster.
            requests: For each portion its number, its first sample, and the index after its last sample.

        Returns:
            The message of ``Computed`` for each portion, unless the worker of a shard cannot be reached.
        """
        now, cancelled = self._in(pass_number), list[bool]()
        now.note(counts, dropped)
        try:
            weights = await asyncio.shield(now.weights)
        except Unreached as error:
            return NotReached.of(error)

        def compute(number: int, begin: int, end: int) -> Computed | None:
            return None if cancelled else self._computed_portion(now, weights, number, begin, end)

        try:
            results: list[Computed] = [await self._worker.compute(partial(compute, *request)) for request in requests]
        finally:
            cancelled.append(True)  # a cancelled call does not begin to compute
        return [result.to_message() for result in results]

    @concurrent
    async def push(self, pass_number: int, counts: list[int], dropped: list[int]) -> list[int] | NotReached:
        """Push the sum of the portions that count to all shards. The arguments are as for ``portions``.

        Returns:
            The numbers of the pushed portions, unless the worker of a shard cannot be reached.
        """
        now = self._in(pass_number)
        now.note(counts, dropped)
        total, portions = now.total, now.counted
        now.total, now.counted = None, []
        if total is not None:
            adding = [
                call_shards(self._ask, owner, "add", shard, now.number, portions, total[slice(*part)])
                for shard, (owner, part) in enumerate(zip(now.owners, now.parts, strict=True))
            ]
            try:
                await asyncio.gather(*adding)
            except Unreached as error:
                return NotReached.of(error)
        return portions

    async def close(self) -> None:
        """Free the shards on this worker, then do what ``Replica.close`` does."""
        await self._shards.close()
        await super().close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _in(self, pass_number: int) -> Pass:
        if self._pass is None or self._pass.number != pass_number:
            raise AppMissing(f"this worker is not in pass {pass_number}")
        return self._pass

    async def _fetched(self, verb: str, owners: Sequence[int], untrained: Sequence[Any], *arguments: Any) -> Weights:
        asking = (call_shards(self._ask, owner, verb, shard, *arguments) for shard, owner in enumerate(owners))
        row = np.concatenate(await asyncio.gather(*asking))
        return self._rows.weights(row, np.zeros(0, row.dtype), untrained)

    async def _weights_of(self, source: dict[str, Any]) -> Weights | None:
        if "version" not in source:
            return await super()._weights_of(source)
        try:
            return await self._fetched("current", source["owners"], source["others"], source["version"])
        except Unreached:
            return None

    # -- on the compute thread ----------------------------------------------------------------------------------------

    def build(self) -> ModelReport:
        """Build the model, like ``Replica.build``.

        Raises:
            AppError: The app has its own ``train``, which is local training.
        """
        if type(self.app).train.__module__ != "ddlf.app":
            raise AppError(
                f"{type(self.app).__name__}.train is local training: with mode='lbfgs' there is none",
                hint="leave out train, or train in mode 'sync'; an own compute_loss or train_step of the model can stay",
            )
        return super().build()

    def use(self, model: TrainableModel, samples: Samples | None = None) -> None:
        """Use a model for all following passes. Its trained weights form one vector."""
        super().use(model, samples)
        rows = Rows.of(model.like, [not is_fixed for is_fixed in model.lossless])
        self._rows = Rows(rows.like, rows.trained, [])

    def _computed_portion(self, now: Pass, weights: Weights, number: int, begin: int, end: int) -> Computed:
        _check_division(self.app.model, end - begin)
        clock, indices = time.perf_counter(), np.arange(begin, end)
        task = Task(
            slot=0,
            round=0,
            slots=1,
            first_epoch=0,
            epochs=1,
            batch_size=end - begin,
            seed=0,
            indices=indices,
            weights=None,
            version=0,
        )
        assert self._model.gradient is not None
        update, metrics = self._model.gradient(self._samples.batch(task), weights)
        share = (end - begin) / now.samples
        trained = set(self._rows.trained)
        parts = [np.asarray(update[index], np.float64).reshape(-1) * share for index in self._rows.trained]
        gradient = np.concatenate(parts)
        peak = float(np.abs(gradient).max(initial=0.0))
        now.sums[number] = now.format.of(gradient) if peak <= now.format.limit else None  # also for NaN
        names = self.app.model.weights
        moved = [
            names[index].path
            for index, change in enumerate(update)
            if index not in trained and is_float(change) and np.any(change)
        ]
        counted = self._model.counted(metrics)
        return Computed(metrics, counted, peak, time.perf_counter() - clock, moved[0] if moved else "")


def _looked_at(fetching: asyncio.Future[Any]) -> None:
    """Mark the error of a fetch as retrieved: if the pass ends before, nobody awaits it."""
    if not fetching.cancelled():
        fetching.exception()


def _check_division(model: Any, samples: int) -> None:
    """Refuse a portion of some samples that several cards cannot divide equally.

    Raises:
        AppError: They cannot.
    """
    if samples % (cards := parts_of_batch(model)):
        raise AppError(
            f"a portion of {samples} samples cannot be divided among {cards} cards",
            hint=f"let {2 * cards} divide each portion, because DDLF also computes its halves: choose the number of samples, portion and slots",
        )


def check_loss(app: App) -> None:
    """Raise an error for an app whose loss is not a mean over samples.

    Raises:
        ConfigError: The loss is scaled, its reduction is not the mean over samples, or the optimizer averages weights.
    """
    model = app.model
    for optimizer in chain(model.optimizer):
        if (
            type(optimizer).__name__ == "LossScaleOptimizer"
            or getattr(optimizer, "loss_scale_factor", None) is not None
        ):
            raise ConfigError(
                "mode='lbfgs' does not support a scaled loss",
                hint="compile the model without LossScaleOptimizer and loss_scale_factor",
            )
    if keeps_averages(model):
        raise ConfigError(
            "mode='lbfgs' does not support averages of the weights (use_ema): the compiled optimizer does not step",
            hint="compile the model without use_ema, or train in mode 'sync'",
        )
    check_mean_losses(model, "mode='lbfgs'", first_rows(app, "train"))
