"""The role of a worker in a training run: a model that the master calls with a few verbs. Runs in the executor.

Keras is imported, built and trained on the worker's single compute thread. Meanwhile the event loop still receives
weights and indices. ``parts`` defines the state that a slot keeps between its rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights, is_float
from ddlf.data.app_data import NAMES, check_data, contents, data_set_of, samples_of, take_made
from ddlf.data.array_cache import ArrayCache, unchanging
from ddlf.data.remote_folder import RemoteFolder
from ddlf.data.trees import tree_map
from ddlf.errors import AppError
from ddlf.rpc.iworker import awaited, drop_error
from ddlf.training.context import SILENT, App
from ddlf.training.evaluation.metrics import Evaluation, counted_names, read_counts, scalars
from ddlf.training.evaluation.model import NotCounted, counts, evaluate, evaluate_between_trainings
from ddlf.training.samples.policy import CommonData, DataDescription, data_of
from ddlf.training.slot.arithmetic import Arithmetic, set_arithmetic
from ddlf.training.slot.build import (
    ModelReport,
    NumberFormat,
    fresh_names,
    gain_of_bfloat16,
    has_large_products,
    ready_model,
    set_precision,
)
from ddlf.training.slot.card_errors import explained, largest_that_fits
from ddlf.training.slot.distribution import (
    check_balance,
    check_division,
    check_one_card,
    forget_distribution,
    own_distribution,
    parts_of_batch,
    separate_strategies,
)
from ddlf.training.slot.feed import Samples, TrainingSamples, reordered
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.model_memory import BUILT, free_gradients_with_graphs
from ddlf.training.slot.parts import PARTS, SlotPart, SlotRound, as_sent, read_weights
from ddlf.training.slot.peer_files import PIECE_BYTES, PeerFiles
from ddlf.training.slot.task import MOST_FILES, KeptStates, MetricCounts, Reply, SlotState, Task
from ddlf.worker.assignment import prepare_framework
from ddlf.worker.calls import concurrent, offered
from ddlf.worker.machine import SwapMeter

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


log = logging.getLogger(__name__)

MOVED_EVERY_S = 0.5
"""Seconds between two progress reports of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """A worker's report about the data that it has loaded.

    Args:
        description: The training data, for comparison.
        files: For each partition file, as one bit, whether it is on the worker's disks; None if all are.
        loaded: Whether ``load_dataset`` was called; False if the worker had the data in memory.
        seconds: Seconds that it took.
    """

    description: DataDescription
    files: bytes | None
    loaded: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a worker that has loaded the data and built the model."""

    data: LoadedData
    model: ModelReport


class Replica:
    """One worker's copy of an app and its model, which the master calls to train slots.

    A slot is a share of the training with its own samples and state, which any worker can train in a round.

    Args:
        worker: The worker that runs it.
        app: The app as the master sent it, without data and model.

    Attributes:
        stopping: Whether training must end at the next batch.
        slots: The slot states that rounds left on this worker.
    """

    PARTS: ClassVar[Sequence[type[SlotPart]]] = PARTS
    """The parts of a slot's state."""
    MODEL: ClassVar[type[KerasModel]] = KerasModel
    """Trains the app's model."""
    SAMPLES: ClassVar[type[TrainingSamples]] = TrainingSamples
    """Supplies the app's training samples."""
    MIXED: ClassVar[bool] = True
    """Whether the model may compute in mixed precision."""
    ONE_CARD: ClassVar[str] = ""
    """The setting that makes a step use one card only; empty if ``fit`` makes the steps."""

    def __init__(self, worker: Worker, app: App, run: str = "") -> None:
        app.worker, app.replica = worker, self
        self.app = app
        self._data = data_of(app)
        self._worker = worker
        self.stopping = False
        self._fingerprints: dict[str, str] = {}
        self._samples: Samples = self.SAMPLES(app, {}, ArrayCache(), lambda: self.stopping)
        self._task: Task
        self._batch = 0  # samples in a batch of this round
        self._fitted = 0  # samples in the largest batch that this role has trained on
        self._fed: list[Any] = []  # the samples of each epoch of this round
        self._swap = SwapMeter()
        self._arithmetic = Arithmetic()
        self._reported_at = 0.0  # time of the last progress report
        self.slots = KeptStates()
        self._model: TrainableModel
        self._parts: list[SlotPart] = []  # the parts that this round needs
        self._all_parts: list[SlotPart] = []
        self._needed: dict[tuple[frozenset[str], tuple[str, ...], str], list[SlotPart]] = {}

    @classmethod
    async def build_on_master(cls, app: App, seed: int, create: Callable[[], Awaitable[None]]) -> None:
        """Build the app's model on the master, from ``create_model``.

        Args:
            app: The user's ``IApp``.
            seed: Seed of the first weights.
            create: Calls ``create_model``.
        """
        import keras

        keras.utils.set_random_seed(seed)
        separate_strategies()
        free_gradients_with_graphs()
        BUILT.free()
        with own_distribution():  # it would divide the model of the next app in this process, too
            with fresh_names():
                await create()
            ready_model(app)
        BUILT.add(app.model)

    # -- verbs --------------------------------------------------------------------------------------------------------

    async def load(
        self, fingerprints: dict[str, str] | None = None, format: Sequence[str] | None = None
    ) -> LoadReport | None:
        """Load the app's data, then build its model.

        The master does this in the same order, because ``create_model`` may use the data.

        Args:
            fingerprints: The fingerprints for ``load_data``; None if the master does not know them yet.
            format: The ``NumberFormat`` of the master before it builds its model; None for Keras's default.

        Returns:
            The report about data and model; None if this worker holds data of earlier runs and must know the fingerprints
            first.
        """
        compute, array_cache = self._worker.compute, self._worker.datasets
        self._worker.tell(what="importing")
        await compute(partial(self.begin, format))
        if fingerprints is None and array_cache:
            return None
        self._worker.tell(what="loading")
        data: LoadedData = await compute(self.load_data, fingerprints or {}, array_cache)
        if data.files is not None and (data_set := data_set_of(self.app, "train")) is not None:
            data_set.add_fallback(
                RemoteFolder(str(data_set), store=PeerFiles(data_set, self._worker, asyncio.get_running_loop()))
            )
        self._worker.tell(what="building")
        model: ModelReport = await compute(self.build)
        return LoadReport(data, model)

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Train one slot for one round. Receives a ``Task`` and returns a ``Reply``, both as messages."""
        reply: Reply = await self._on_thread(partial(self.carry, Task.from_message(task)))
        return {**(message := reply.to_message()), "update": as_sent(message["update"])}

    async def measure(self, task: dict[str, Any]) -> Weights:
        """Return batch normalization's moving statistics over the samples of a ``Task``, a message with weights."""
        statistics: Weights = await self._on_thread(partial(self.statistics, Task.from_message(task)))
        return statistics

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        """Run a function on the thread that trains, and return its result.

        If the call is cancelled, the work ends at the next batch.
        """
        cancelled: list[bool] = []

        def explaining() -> Any:
            with explained(self.app, lambda: self._batch, self._largest_batch):
                return None if cancelled else work()

        computing = asyncio.ensure_future(self._worker.compute(explaining))
        try:
            return await asyncio.shield(computing)
        except asyncio.CancelledError:
            cancelled.append(True)  # in case the thread has not started the work
            self._stop()
            computing.add_done_callback(drop_error)
            await asyncio.wait([computing])
            raise

    def _largest_batch(self) -> int:
        """Return the largest batch that fitted into the memory, after one did not; 0 if none did."""
        return self._fitted or largest_that_fits(self.app, self.app.model, self._batch)

    @concurrent
    async def give(self, slot: int, number: int, groups: tuple[str, ...]) -> SlotState:
        """Return groups of a slot's state after a round, from 0, to the master or a worker.

        This works even while another slot trains.

        Raises:
            AppMissing: This worker does not have the state, or has dropped it.
        """
        state = self.slots.state_after(slot, number)
        return {name: state[name] for name in groups if name in state}

    @concurrent
    async def counts(
        self, source: dict[str, Any], part: str, batch_size: int, begin: int, end: int, content: dict[str, str]
    ) -> MetricCounts | NotCounted | None:
        """Evaluate the model on a range of samples. Return sums and counts, so that the master can compute the metrics.

        Args:
            source: The weights, or a reference to weights on this worker.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
            begin: The first sample.
            end: The index after the last sample.
            content: The fingerprints that the data here must have.

        Returns:
            The counts, as ``counts`` returns them; None if the data here is different.
        """
        if not self._has(content):
            return None
        if (weights := await self._weights_of(source)) is None:
            return NotCounted()
        counted: MetricCounts | NotCounted = await evaluate_between_trainings(
            self._worker, self.app, partial(counts, self.app, weights, part, batch_size, begin, end)
        )
        return counted

    @concurrent
    async def own_counts(self, source: dict[str, Any], part: str, batch_size: int) -> Evaluation:
        """Evaluate weights on all samples that this worker has of a part of the data.

        Args:
            source: The weights.
            part: ``"test"`` or ``"val"``.
            batch_size: Samples in a batch.
        """
        weights = await self._weights_of(source)

        def evaluation() -> Evaluation:
            metrics = evaluate(self.app, weights, part, batch_size)
            counted = read_counts(self.app.model, counted_names(self.app.model, metrics))
            return Evaluation(metrics, samples_of(self.app, part), counted)

        reply: Evaluation = await evaluate_between_trainings(self._worker, self.app, evaluation)
        return reply

    def _has(self, content: dict[str, str]) -> bool:
        """Return whether the data on this worker have these fingerprints, by the names of the attributes."""
        return bool(content) and all(
            self._fingerprints.get(name) == fingerprint for name, fingerprint in content.items()
        )

    async def _weights_of(self, source: dict[str, Any]) -> Weights | None:
        """Return the weights to evaluate; None if some are on other workers and unavailable."""
        return list(source["weights"])

    @offered
    async def file(self, name: str, begin: int, nbytes: int) -> Any:
        """Return some bytes of a partition file on this machine's disks, as an array; None if the file is missing."""
        data_set = data_set_of(self.app, "train")
        return (
            None if data_set is None else await asyncio.to_thread(data_set.piece, name, begin, min(nbytes, PIECE_BYTES))
        )

    @concurrent
    async def stop(self) -> None:
        """End local training at the next batch, because the user stops the run."""
        self._stop()

    async def close(self) -> None:
        """End local training at the next batch, since the run is over."""
        self._stop()

    def _stop(self) -> None:
        self.stopping = True
        self._samples.end()

    # -- methods for the compute thread -----------------------------------------------------------------------------

    def begin(self, format: Sequence[str] | None = None) -> None:
        """Import Keras, and set the number format for layers before any layer is made."""
        set_precision(self.app.precision, None if format is None else NumberFormat(*format))
        forget_distribution()
        separate_strategies()
        free_gradients_with_graphs()
        prepare_framework()
        self._arithmetic = set_arithmetic(self.app)

    def build(self) -> ModelReport:
        """Create the app's model, and report it to the master, which compares machines."""
        with fresh_names():
            call(self.app.create_model)
        if getattr(self.app, SILENT, False):
            self.app.worker_callbacks = []  # create_model may have set some
        ready_model(self.app)
        if self.app.worker_steps is None:  # otherwise parts are whole batches
            check_balance(self.app.model, self.app.balance)
        if self.ONE_CARD:
            check_one_card(self.app.model, self.ONE_CARD)
        self._data.check_model(self.app)
        self.use(model := self.MODEL(self.app))
        return ModelReport.of(
            self.app.model,
            model.optimizer,
            self._arithmetic,
            batch_parts=parts_of_batch(self.app.model),
            gain=gain_of_bfloat16() if self._may_gain() else 0.0,
        )

    def _may_gain(self) -> bool:
        """Return whether this worker says what bfloat16 gains. One is enough, only float32 can become mixed, and only large
        products gain.
        """
        import keras

        is_open = self.app.precision == "auto" and keras.config.floatx() == "float32"
        return self.MIXED and is_open and self.app.worker.id == 1 and has_large_products(self.app.model)

    def use(self, model: TrainableModel, samples: Samples | None = None) -> None:
        """Use a model for all following rounds.

        Args:
            model: The model.
            samples: Its training samples; None for the app's.
        """
        self._model = model
        self._all_parts, self._needed = [part(self.app, model) for part in self.PARTS], {}
        self._samples = samples or self._samples

    def load_data(self, expected: dict[str, str], array_cache: ArrayCache) -> LoadedData:
        """Load the app's data with ``app.load_data``, and report them to the master, which compares machines."""
        self._fingerprints, loaded = load_data(self.app, self._data, expected, array_cache)
        self._samples = self.SAMPLES(self.app, self._fingerprints, array_cache, lambda: self.stopping)
        return loaded

    def carry(self, task: Task) -> Reply:
        """Train one slot for one round, from the task to the reply.

        Args:
            task: The task, with encoded weights.

        Returns:
            The reply, with the encoded update.

        Raises:
            AppMissing: This worker does not have the state of the slot's last round.
        """
        begin = time.perf_counter()
        round = self._begin_round(task)
        update, metrics = self._trained(round)
        overflow = self._model.overflow(task) or ()
        states = self._end_round(round, update)
        self._fitted = max(self._fitted, min(task.batch_size, len(task.indices)))
        wait_data_s, files = self._samples.take_stats()
        skipped = self._samples.skipped
        return Reply(
            task=task,
            update=round.encoded,
            codec_error=round.codec_error,
            samples=len(task.indices) - sum(samples for _, samples in skipped),
            fed=self._otherwise_fed(task),
            metrics=metrics,
            counted=self._model.counted(metrics),
            compute_s=time.perf_counter() - begin,
            wait_data_s=wait_data_s,
            files=files[:MOST_FILES],
            skipped=skipped,
            stopped=self.stopping,
            state={name: states[name] for name in task.back},
            entries=self._model.entries(task),
            overflow=overflow,
            swapped=self._swap.swapped_bytes(),
        )

    def _begin_round(self, task: Task) -> SlotRound:
        """Begin a slot's round: give each part of the slot's state the arrays that it left in the round before."""
        self.stopping, self._task, self._fed = False, task, []
        self._reported_at, self._batch = time.monotonic(), task.batch_size
        round, state = SlotRound(task, self._model), self.slots.begin(task)
        key = frozenset(state), task.keep, task.local
        if key not in self._needed:
            self._needed[key] = [part for part in self._all_parts if part.is_needed(task, state)]
        self._parts = self._needed[key]
        for part in self._parts:
            round.begun = part.begin(round, round.begun, state.get(part.name))
        return round

    def _trained(self, round: SlotRound) -> tuple[Weights, dict[str, float]]:
        """Train the round's samples, and return the update and its metrics."""
        task, begun = round.task, round.begun
        if self._model.gradient is not None:
            return self._model.gradient(self._samples.batch(task), begun)
        if not round.trains:
            return [np.zeros_like(w) for w in begun], {}
        self.app.indices = task.indices
        return run_train(self.app, begun, task.epochs, task.batch_size)

    def _end_round(self, round: SlotRound, update: Weights) -> SlotState:
        """End a slot's round, and return the arrays that each part of the slot's state leaves for the next round."""
        round.stopped, state = self.stopping, SlotState({name: [] for name in round.task.keep})
        for part in reversed(self._parts):
            update, arrays = part.end(round, update)
            state[part.name] = arrays or []
        self.slots.store(round.task, state)
        return state

    def statistics(self, task: Task) -> Weights:
        """Return the moving statistics of batch normalization for a task's weights over its samples.

        ``slot/batchnorm.py`` describes the method.
        """
        self.stopping = False
        batches = (batch for batch in self._samples.batches(task) if not self.stopping)
        return self._model.statistics(task, read_weights(task.weights, None, self._model.like), batches)

    def _otherwise_fed(self, task: Task) -> Any:
        """Return the samples that ``fit`` received in this round, if they are not the task's samples.

        A user's ``train`` may choose others. None if they were the task's samples in each epoch, or if ``fit`` did not
        run.
        """
        as_given = len(self._fed) == task.epochs and all(indices is task.indices for indices in self._fed)
        if as_given or not self._fed:
            return None
        if isinstance(task.indices, Portion):
            return len(self._fed)
        return self._data.fed(self._fed)

    # -- used by the default ``IApp.train`` -------------------------------------------------------------------------

    def fit(self, epochs: int, batch_size: int, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """Run ``Model.fit`` over this round's partition, with sample weights or class weights if the app has them.

        The first local epoch uses the received order. Each later one uses its own order, made from the task's seed.
        Epochs are counted over the whole run, so that a ``LearningRateScheduler`` works as in a single ``fit``.

        Returns:
            Keras's metrics of the last epoch.
        """
        indices = self.app.indices
        if indices is not self._task.indices:
            if isinstance(self._task.indices, Portion):
                raise AppError(
                    "train has set self.indices, but train_data is read in the order of the slot's part",
                    hint="leave self.indices as it is, or train on arrays: self.x_train = self.train_data['x']",
                )
            indices = self.app.indices = chosen(indices, samples_of(self.app, "train"))
        feed, first = self._samples.feed(batch_size), self._task.first_epoch

        def begin_epoch(epoch: int) -> None:
            for part in self._parts:
                part.epoch_begins()
            self._fed.append(indices)
            feed.set_order(self.order(indices, epoch - first))

        def end_batch(epoch: int, batch: int, logs: Any) -> bool:
            if (now := time.monotonic()) - self._reported_at >= MOVED_EVERY_S:
                self._reported_at = now
                self._tell(epoch, min((batch + 1) * batch_size, len(indices)), logs)
            return self.stopping

        feed.set_order(indices)  # Keras reads from the data before the first epoch begins
        skipped = sum(samples for _, samples in self._samples.skipped)
        check_division(self.app.model, len(indices) - skipped, batch_size)
        numbers, begun = range(first, first + epochs), self._fit_begins()
        model, data = self._model, feed.dataset
        return self._samples.run_fit(lambda: model.fit(data, numbers, callbacks, begin_epoch, end_batch, begun))

    def _fit_begins(self) -> Callable[[], None]:
        """Let each part of the slot's state prepare a call of ``fit``.

        The returned function is called after ``on_train_begin`` of all callbacks.
        """
        begun = [then for part in self._parts if (then := part.fit_begins()) is not None]

        def begin_all() -> None:
            for then in begun:
                then()

        return begin_all

    def _tell(self, epoch: int, samples: int, logs: Any) -> None:
        """Report the progress of this round to the master.

        Args:
            epoch: The local epoch, from 0.
            samples: Number of its samples that are done.
            logs: Keras's metrics so far.
        """
        done = sum(map(len, self._fed[:-1])) + samples
        total = max(done, self._task.epochs * len(self._task.indices))
        loss = scalars(logs or {}).get("loss")
        self._worker.tell(what="training", done=done, total=total, epoch=epoch + 1, loss=loss)

    def order(self, indices: Any, epoch: int) -> Any:
        """Return the order of the samples in one local epoch, which is the same on every worker."""
        if epoch == 0:
            return indices
        task = self._task
        return reordered(indices, (task.seed, task.round, task.slot, epoch))

    @property
    def round(self) -> int:
        """The number of this round, from 1."""
        return self._task.round + 1


def call(function: Any, *args: Any) -> Any:
    """Call a method of the user's app, plain or async, on this thread, and return its result.

    Raises:
        AppError: The method called ``sys.exit``.
    """
    # a user may replace the method by any callable
    with no_exit(getattr(function, "__name__", type(function).__name__)):
        result = function(*args)
        return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result


@contextlib.contextmanager
def no_exit(method: str) -> Iterator[None]:
    """Turn ``sys.exit`` in a method of the user's app into an error: it would end a run or a worker silently."""
    try:
        yield
    except SystemExit as error:
        raise AppError(
            f"{method} called sys.exit({'' if error.code is None else repr(error.code)})",
            hint="raise an error that says what is wrong; to end training, use self.stop_training()",
        ) from None


def run_train(app: App, weights: Weights, epochs: int, batch_size: int) -> tuple[Weights, dict[str, float]]:
    """Call the app's ``train``, and check its result.

    Returns:
        The update and the metrics.

    Raises:
        AppError: The result has the wrong type or shape.
    """
    outcome = call(app.train, weights, epochs, batch_size)
    with_metrics = isinstance(outcome, tuple) and len(outcome) == 2 and not isinstance(outcome[1], np.ndarray)
    update, metrics = outcome if with_metrics else (outcome, {})
    try:
        if not isinstance(update, list | tuple):
            raise TypeError
        arrays = [np.asarray(array) for array in update]
    except (TypeError, ValueError):
        raise AppError(
            f"train returned a {type(outcome).__name__}" + (f" with a {type(update).__name__} first" * with_metrics),
            hint="return the update, weights before minus weights after, as a list of arrays; or (update, metrics)",
        ) from None
    numbers = scalars(metrics)
    for index, weight in enumerate(weights if len(arrays) == len(weights) else ()):
        if arrays[index].shape != weight.shape:
            raise AppError(
                f"{type(app).__name__}.train returned an array of shape {arrays[index].shape} for weight {index + 1} of shape {weight.shape}",
                hint="return weights before minus weights after, in the order of model.weights",
            )
    if len(arrays) != len(weights):
        raise AppError(
            f"{type(app).__name__}.train returned {len(arrays)} arrays for {len(weights)} weights",
            hint="return weights before minus weights after, one array for each of model.weights",
        )
    # NumPy often computes in float64. The update gets the type of the weight, which cannot hold more digits anyway.
    pairs = zip(arrays, weights, strict=True)
    return [a.astype(w.dtype) if is_float(a) and is_float(w) else a for a, w in pairs], numbers


def chosen(indices: Any, samples: int) -> np.ndarray[Any, Any]:
    """Return the sample indices that the user's ``train`` has set as ``self.indices``, after checking them.

    Args:
        indices: The value of ``self.indices``.
        samples: The number of samples in the data set.

    Returns:
        Indices of samples, shape (m,), of an integer type.

    Raises:
        AppError: The value is not a list of valid sample indices.
    """
    array = np.asarray(indices)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise AppError(
            f"self.indices must be numbers of samples, got {array.dtype} of shape {array.shape}",
            hint="choose from the indices in self.indices at the beginning of train",
        )
    if array.min() < 0 or array.max() >= samples:
        outside = array.max() if array.max() >= samples else array.min()
        raise AppError(
            f"self.indices has sample {outside}, but there are {samples:,} samples, counted from 0",
            hint="choose from the indices in self.indices at the beginning of train",
        )
    return array


def load_data(
    app: App, data: CommonData, expected: dict[str, str], array_cache: ArrayCache
) -> tuple[dict[str, str], LoadedData]:
    """Load the app's data with its ``load_dataset``. Arrays that several runs have in common are in memory once.

    Args:
        app: The app as the master sent it.
        data: The policy that describes the data to the master.
        expected: The fingerprint of each array, if ``load_dataset`` sets only arrays. If the worker holds all of them,
            ``load_dataset`` is not called.
        array_cache: The arrays that the worker holds; receives new ones.

    Returns:
        The fingerprint of each array and of each data set at a place; and the report about the training data.
    """
    begin = time.perf_counter()
    fingerprints = expected
    is_cached = bool(expected) and all(content in array_cache for content in expected.values())
    if not is_cached:
        array_cache.make_room()
        call(app.load_dataset)
        take_made(app)
        check_data(app)
        fingerprints = contents(app)
    arrays = {name: fingerprint for name, fingerprint in fingerprints.items() if name in NAMES}
    for name, fingerprint in arrays.items():
        if fingerprint not in array_cache:
            array_cache[fingerprint] = tree_map(unchanging, getattr(app, name))
        setattr(app, name, array_cache[fingerprint])
    array_cache.use(arrays.values())
    return fingerprints, LoadedData(
        description=data.describe(app, fingerprints),
        files=_files_here(app),
        loaded=not is_cached,
        seconds=time.perf_counter() - begin,
    )


def _files_here(app: App) -> bytes | None:
    """Return for each file of the training data, as one bit, whether it is on a local disk. None if all are."""
    data_set = data_set_of(app, "train")
    on_disk = () if data_set is None else data_set.availability()
    return None if all(on_disk) else np.packbits(np.array(on_disk, np.bool_)).tobytes()
