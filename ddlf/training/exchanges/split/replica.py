"""A worker that has one part of a model. Runs in the executor.

The event loop receives arrays of other parts into the inbox, and sends arrays of this part. Meanwhile the compute
thread makes the passes of this part in the order of ``ddlf.algorithms.pipeline``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ddlf.algorithms.weights import Fault, fault
from ddlf.data.stream import StreamClosed
from ddlf.errors import AppMissing, BadUpdate, ConfigError, LeaseError
from ddlf.events import Warned
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import Destination, NotWritten, SliceFile, is_seen, not_seen, write_if_seen
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import counted_names, read_counts, scalars
from ddlf.training.evaluation.model import batches_of, end_reading
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.inbox import Inbox, Key, Stopped
from ddlf.training.exchanges.split.orders import (
    BadTensor,
    Evaluated,
    EvaluatedPart,
    Interrupted,
    PartEvaluation,
    PartOrder,
    PartRefused,
    PartSource,
    PartStopped,
    PartTask,
    PartUnreached,
    Trained,
    TrainedPart,
    UnusableWeights,
)
from ddlf.training.exchanges.split.part import KINDS, ModelPart
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.stage import Stage, expected
from ddlf.training.exchanges.split.state_file import State, StateFiles, fetched, in_slice, optimizer_name, weight_name
from ddlf.training.exchanges.split.variables import name_all, unmade
from ddlf.training.exchanges.split.whole_weights import needs, united
from ddlf.training.roles import REPLICA
from ddlf.training.slot.build import ModelReport, describe_optimizer, fresh_names, ready_model
from ddlf.training.slot.distribution import check_one_card
from ddlf.training.slot.keras_model import reseed
from ddlf.training.slot.optimizers import RunPosition, state_of, write_rates
from ddlf.training.slot.parts import SlotPart
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.replica import MOVED_EVERY_S, Replica, call
from ddlf.training.slot.task import NOTHING_COUNTED, Task
from ddlf.training.slot.variables import free, is_finite, is_independent, is_made, make, set_value, value_of
from ddlf.worker.activity import HeldPart
from ddlf.worker.calls import concurrent, offered
from ddlf.worker.peers import Unreached, caller, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

Result = TypeVar("Result")

UNANSWERED = 8
"""Maximum number of sent tensors that the other worker has not confirmed. It confirms them while it computes."""


class SplitReplica(Replica, Restored):
    """One worker's part of an app's model. The whole model exists without memory.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run.
    """

    PARTS: ClassVar[Sequence[type[SlotPart]]] = ()

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        Replica.__init__(self, worker, app, run)
        Restored.__init__(self)
        self._me, self._run = worker.id, run
        self._loop = asyncio.get_running_loop()
        self._ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self._inbox = Inbox()
        self._part: ModelPart | None = None
        self._plan: Plan
        self._position: Any = None
        self._version: int | None = None  # the version of the weights that the part has
        self._state_files = StateFiles()
        self._seed: int | None = None  # of the first weights that the model's initializers make; None if some were made
        self._loaded_optimizer: Mapping[str, Any] = {}  # the optimizer that ``create_model`` has loaded, by path
        self._unanswered: deque[Future[Any]] = deque()
        self._attempt = 0
        self._clip: float | None = None  # global_clipnorm of the compiled optimizer
        self._workers: Sequence[int] = ()
        self._stage: Stage

    @classmethod
    async def build_on_master(cls, app: App, seed: int, create: Callable[[], Awaitable[None]]) -> None:
        """Build the app's model on the master without memory for its weights.

        If ``create_model`` needs the values of weights, the model is made whole, and its weights go into a file.
        """
        reason = "create_model reads or changes weights"
        try:
            with unmade():
                await super().build_on_master(app, seed, create)
            if all(not is_made(weight) and is_independent(weight) for weight in app.model.weights):
                return
            if not any(map(is_made, app.model.weights)):
                reason = "an initializer of create_model is not one of Keras's with its own seed"
        except Exception:  # the next attempt raises the app's own errors
            vars(app).pop("model", None)
        await super().build_on_master(app, seed, create)
        weights = app.model.weights
        state = State(
            [(weight_name(i), np.dtype(weight.dtype).name, tuple(weight.shape)) for i, weight in enumerate(weights)]
        )
        for index, variable in enumerate(weights):
            state.put(weight_name(index), value_of(variable))
        app.run_context.first = list(state.views().values())
        free(weights)
        app.run_context.emit(
            Warned(about="model", why=f"{reason}, so each machine makes the whole model once before it keeps its part")
        )

    # -- verbs --------------------------------------------------------------------------------------------------------

    @offered
    async def receive(self, attempt: int, key: Sequence[Any], value: Any) -> None:
        """Receive a tensor from another part. The worker that calls must have that part in the attempt.

        Args:
            attempt: Number of the attempt at the round.
            key: The fields of a ``Key``.
            value: The tensor as an array.
        """
        self._inbox.put(attempt, Key.read(key), value, caller())

    async def step(self, order: dict[str, Any], task: dict[str, Any]) -> Trained:
        """Train a part of the model for one round.

        Args:
            order: The message of a ``PartOrder``.
            task: The message of a ``PartTask``.
        """
        part_order, part_task = PartOrder.from_message(order), PartTask.from_message(task)
        result: Trained | PartUnreached = await self._with_state(part_order, partial(self.train_part, part_task))
        if part_order.copy is None or not isinstance(result, TrainedPart):
            return result
        try:
            await self._ask(part_order.copy, REPLICA, "copy", part_order.part, part_order.version + 1, self._me)
        except (AppMissing, LeaseError) as error:
            return PartUnreached(part_order.copy, error.message)
        except Unreached as error:
            return PartUnreached(error.worker, error.reason)
        return result

    async def evaluate(self, order: dict[str, Any], evaluation: dict[str, Any]) -> Evaluated:
        """Evaluate a part of the model, together with the other parts.

        Args:
            order: The message of a ``PartOrder``.
            evaluation: The message of a ``PartEvaluation``.
        """
        part_evaluation = PartEvaluation.from_message(evaluation)
        return await self._with_state(PartOrder.from_message(order), partial(self.evaluate_part, part_evaluation))

    @offered
    async def layout(self, part: int, version: int) -> list[list[Any]]:
        """Return the names, types and shapes of the state of a part."""
        return [[name, kind, list(shape)] for name, kind, shape in self._state_files.of(part, version).layout]

    @offered
    async def piece(self, part: int, version: int, begin: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return some bytes of the state of a part."""
        return await asyncio.to_thread(self._state_files.of(part, version).read, begin, nbytes)

    @offered
    async def copy(self, part: int, version: int, worker: int) -> None:
        """Keep a copy of the state of a part, fetched from the worker that has trained it."""
        self._state_files.drop_before(version - 1)
        if (part, version) not in self._state_files:
            self._state_files.put(part, version, await fetched(partial(self._ask, worker, REPLICA), part, version))
        self._show(version)

    @concurrent
    async def write(
        self,
        part: int,
        version: int,
        destination: Destination,
        names: dict[str, str],
        share_holders: Sequence[tuple[int, Sequence[int]]],
    ) -> SliceFile | NotWritten:
        """Write arrays of a part into a checkpoint. Arrays that are cut are written whole.

        Args:
            part, version: The state.
            destination: Where to write.
            names: The name in the slice of each array to write.
            share_holders: The parts whose shares make these arrays whole, each with the workers that have its state.
        """
        if not is_seen(destination.folder, destination.session):
            return not_seen(destination, self._me)
        states, fetching = {part: self._state_files.of(part, version)}, StateFiles()
        try:
            for number, workers in share_holders:
                if (number, version) in self._state_files:
                    states[number] = self._state_files.of(number, version)
                    continue
                ask, shares = partial(self._ask, workers[0], REPLICA), needs(self._plan, [*names])
                states[number] = await fetched(ask, number, version, shares[number])
                fetching.put(number, version, states[number])

            def write_united() -> SliceFile | NotWritten:
                arrays = in_slice(united(self._plan, part, states, [*names]).views(), names)
                return write_if_seen(destination, arrays, self._me)

            return await asyncio.to_thread(write_united)
        except (AppMissing, LeaseError) as error:
            return NotWritten(by=self._me, reason=error.message, visible=True)
        except Unreached as error:
            reason = f"worker {error.worker} was not reached: {error.reason}"
            return NotWritten(by=self._me, reason=reason, visible=True)
        finally:
            fetching.close()

    @offered
    async def connections(self) -> list[int]:
        """Return the numbers of the connected workers."""
        peers = self._worker.peers
        return [number for number in peers if peers[number].connected]

    def _stop(self) -> None:
        super()._stop()
        self._inbox.stop()
        end_reading(self.app)

    async def close(self) -> None:
        """End local training at the next batch, since the run is over, and free the states of parts."""
        await super().close()
        self._state_files.close()
        self._worker.on_part(None)

    def _show(self, version: int) -> None:
        """Tell which part this worker has, and how many copies of others."""
        number, of, nbytes, own_parts = 0, 0, 0, set[int]()
        if (part := self._part) is not None:
            model_part, of = self._plan.parts[part.number], len(self._plan.parts)
            number, own_parts = part.number + 1, {part.number}
            nbytes = self._plan.bytes_of_weights(model_part) + self._plan.bytes_of_optimizer(model_part)
        self._worker.on_part(HeldPart(number, of, nbytes, version, len(self._state_files.parts - own_parts), self._run))

    async def _with_state(self, order: PartOrder, work: Callable[[PartOrder], Result]) -> Result | PartUnreached:
        """Fetch the state that an order needs, and carry the order out on the compute thread."""
        key, source = (order.part, order.version), order.source
        self._state_files.drop_before(order.version)
        if source is not None and source.worker is not None and key not in self._state_files:
            try:
                self._state_files.put(*key, await fetched(partial(self._ask, source.worker, REPLICA), *key))
            except Unreached as error:
                return PartUnreached(error.worker, error.reason)
            except (AppMissing, LeaseError) as error:
                return PartUnreached(source.worker, error.message)
        result: Result = await self._on_thread(lambda: work(order))
        return result

    # -- methods for the compute thread -------------------------------------------------------------------------------

    def build(self, seed: int | None = None) -> ModelReport:
        """Build the app's model without memory for its weights, and report it to the master, which compares machines.

        Args:
            seed: Seed of the first weights; None for the app's.
        """
        app = self.app
        self._seed = app.seed if seed is None else seed
        try:
            with unmade():
                self._create(self._seed)
        except Exception:  # create_model needs the values of weights, or has an error, which the next line raises
            self._create(self._seed)
        model, self._loaded_optimizer = app.model, {}
        if any(map(is_made, model.weights)) and model.optimizer is not None and model.optimizer.built:
            name_all(model.optimizer)
            self._loaded_optimizer = {variable.path: value_of(variable) for variable in model.optimizer.variables}
            model.optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self._part, self._version = None, None
        # Each part computes on one card, and in float32.
        return ModelReport.of(model, describe_optimizer(model.optimizer), self._arithmetic)

    def _create(self, seed: int) -> None:
        import keras

        vars(self.app).pop("model", None)
        keras.utils.set_random_seed(seed)
        with fresh_names():
            call(self.app.create_model)
            ready_model(self.app)
        check_one_card(self.app.model, "split")

    def train_part(self, part_task: PartTask, order: PartOrder) -> Trained:
        """Train a part of the model for one round."""
        begin = time.perf_counter()
        check_backend(order.backend)
        task = self._task = part_task.task
        self._fed, self._reported_at = [], time.monotonic()
        part = self._become(order)
        self._version = None
        self._show(order.version)
        metrics = self._caught(lambda: self._samples.run_fit(lambda: self._rounds(part, part_task, order)))
        if not isinstance(metrics, dict):
            return metrics
        if (problem := self._keep(part, order.version + 1)) is not None:
            return UnusableWeights(problem)
        self._version = order.version + 1
        self._show(self._version)
        wait_data_s, _ = self._samples.take_stats()
        model = self.app.model
        return TrainedPart(
            metrics=metrics,
            losses=part.losses,
            counted=read_counts(model, counted_names(model, metrics)) if metrics else NOTHING_COUNTED,
            digest=task.digest(),
            compute_s=time.perf_counter() - begin,
            idle_s=self._stage.idle_s,
            wait_data_s=wait_data_s,
            pushed=self._pushed(),
        )

    def evaluate_part(self, evaluation: PartEvaluation, order: PartOrder) -> Evaluated:
        """Evaluate a part of the model."""
        check_backend(order.backend)
        part = self._become(order)
        if part.replica:
            return EvaluatedPart(metrics={}, losses=0.0)  # the first replica evaluates
        if part.reads and not self._has(evaluation.content):
            return PartRefused(f"worker {self._me} has other data there")
        size, samples = evaluation.batch_size, evaluation.samples
        try:
            data = batches_of(self.app, evaluation.data, size) if part.reads else repeat(())
        except ConfigError as error:  # this machine has less memory for data than the master
            return PartRefused(f"worker {self._me}: {error.message}")

        def work() -> dict[str, float]:
            self._stage = stage = self._begin(part, order)
            part.begin_epoch()
            for begin in range(0, samples, size):
                if self.stopping:
                    raise Stopped
                end, batch = min(begin + size, samples), next(data)
                if not begin:
                    part.prepare(batch)
                stage.evaluate(batch, end - begin, last=end == samples)
            return scalars(self.app.model.get_metrics_result()) if part.is_last else {}

        metrics = self._caught(work)
        end_reading(self.app)
        return EvaluatedPart(metrics=metrics, losses=part.losses) if isinstance(metrics, dict) else metrics

    def _caught(self, work: Callable[[], dict[str, float]]) -> dict[str, float] | Interrupted:
        """Do some work of the group. Return its metrics, or why it has failed."""
        self.stopping = False
        try:
            metrics = work()
            if self.stopping:  # the samples have ended early
                raise Stopped
            while self._unanswered:
                self._unanswered.popleft().result()
            return metrics
        except (Stopped, StreamClosed):
            return PartStopped()
        except Unreached as error:
            return PartUnreached(error.worker, error.reason)
        except BadUpdate as error:
            return BadTensor(error.message, error.hint)
        finally:
            self._unanswered.clear()

    def _begin(self, part: ModelPart, order: PartOrder) -> Stage:
        """Begin an attempt of the group."""
        self._workers, self._attempt = order.workers, order.attempt
        self._inbox.begin(self._attempt, expected(self._plan, part.number), self._workers)
        return Stage(self._plan, part, self._inbox, self._send, self._clip)

    def _become(self, order: PartOrder) -> ModelPart:
        """Make this worker's part, unless it has it already, and set its weights and optimizer.

        Raises:
            AppMissing: The worker should have the part's state, but does not.
        """
        number, version, source = order.part, order.version, order.source
        if source is None and self._part is not None and (self._part.number, self._version) == (number, version):
            return self._part
        self._version = None
        if source is not None and source.seed is not None:
            if self._part is not None or self._seed != source.seed:
                self._rebuild(source.seed)
            part = self._make_part(number, order, partial(self._first, number))
            self._set_optimizer(self._loaded_optimizer)
            return part
        read = self._reader(number, version, source)
        paths = self._plan.optimizer.paths if self._part is not None else ()
        if self._part is not None and (self._part.number != number or read(optimizer_name(0)) is None):
            self._rebuild(self._seed)
        weights = self.app.model.weights
        whole = source is not None and source.slices is not None  # slices have whole arrays

        def shape(index: int) -> tuple[int, ...]:
            return self._plan.program.shapes[index] if whole else self._plan.shape(number, index)

        def share_of(index: int | None, value: Any) -> Any:
            return self._plan.piece(number, index, value) if whole else value

        def fill(index: int) -> None:
            if (value := read(weight_name(index))) is None:
                raise AppMissing(f"weight {index + 1} is not in the state of part {number + 1}")
            value = share_of(index, value.reshape(shape(index)))
            if tuple(weights[index].shape) != value.shape:  # create_model has made the whole weight
                free([weights[index]])
            set_value(weights[index], value)

        part = self._make_part(number, order, fill)
        paths = self._plan.optimizer.paths
        self._set_optimizer(
            {
                path: share_of(self._plan.optimizer.weight_of[i], value)
                for i, path in enumerate(paths)
                if (value := read(optimizer_name(i))) is not None
            }
            or self._loaded_optimizer
        )
        return part

    def _first(self, number: int, index: int) -> None:
        """Give a weight its first value. A part with a share of it has the whole weight only for this moment."""
        variable = self.app.model.weights[index]
        make(variable)
        if index in self._plan.program.pieces:
            share = self._plan.piece(number, index, value_of(variable))
            free([variable])
            set_value(variable, share)

    def _reader(self, number: int, version: int, source: PartSource | None) -> Callable[[str], Any]:
        """Return the function that returns an array of a part's state by its name; None if the state does not have it."""
        if source is not None and source.arrays is not None:
            return dict(source.arrays).get
        if source is None or source.slices is None:
            state_file = self._state_files.of(number, version)
            return lambda name: state_file.get(name) if name in state_file else None
        slices = {name: array for arrays in self.take_restored().values() for name, array in arrays.items()}
        return {name: slices[stored] for name, stored in source.slices.items()}.get

    def _rebuild(self, seed: int | None) -> None:
        free(self.app.model.weights)
        self.build(seed)

    def _make_part(self, number: int, order: PartOrder, fill: Callable[[int], None]) -> ModelPart:
        """Return the part with its weights, which ``fill`` sets by their numbers. All other weights have no memory."""
        import keras

        model = self.app.model
        if self._part is None:
            self._plan = Plan.of_arguments(Graph.of(model), order.plan)
        indices = self._plan.parts[number].all_weights
        for index in indices:
            fill(index)
        free(weight for index, weight in enumerate(model.weights) if index not in {*indices})
        if self._part is None:
            self._part = KINDS[keras.backend.backend()](self._plan, number)
            model.optimizer.build(self._part.trained)
            name_all(model.optimizer)
            self._clip, model.optimizer.global_clipnorm = model.optimizer.global_clipnorm, None
            self._position = RunPosition.of(model.optimizer)
        return self._part

    def _set_optimizer(self, values: Mapping[str, Any]) -> None:
        """Set the variables of the optimizer by their paths, if they are known."""
        for variable in state_of(self.app.model) if values else ():
            variable.assign(values[variable.path])

    def _keep(self, part: ModelPart, version: int) -> Fault | None:
        """Keep the state of the part in a file. Return why the weights cannot be used, if they cannot."""
        model, paths = self.app.model, self._plan.optimizer.paths
        variables = [(weight_name(i), model.weights[i]) for i in self._plan.parts[part.number].all_weights]
        variables += [(optimizer_name(paths.index(v.path)), v) for v in state_of(model)]
        state = State([(name, np.dtype(v.dtype).name, tuple(v.shape)) for name, v in variables])
        for name, variable in variables:
            value = value_of(variable)
            if name.startswith("weight") and not is_finite(value):
                return fault([value], 1, [value], [variable.path])
            state.put(name, value)
        self._state_files.put(part.number, version, state)
        return None

    def _rounds(self, part: ModelPart, part_task: PartTask, order: PartOrder) -> dict[str, float]:
        """Train the local epochs of a round. Return the metrics of the last one, if this part has the loss."""
        task, samples = part_task.task, part_task.samples
        model, size = self.app.model, task.batch_size
        reseed(model, (task.seed, task.round, task.slot, part.number))
        if self._position is not None and (steps := task.position) is not None:
            self._position.set(steps, task.epochs * -(-len(task.indices) // size))
        part.begin_round()
        stage = self._stage = self._begin(part, order)
        begun = False
        for epoch in range(task.epochs):
            if task.rates:
                write_rates(model, task.rates[min(epoch, len(task.rates) - 1)])
            part.begin_epoch()
            indices = self.order(task.indices, epoch)
            self._fed.append(indices)
            batches = self._batches(part, replace(task, indices=indices))
            for number, begin in enumerate(range(0, max(samples), size)):
                if self.stopping:
                    raise Stopped
                own_count, *_ = counts = [min(size, max(0, total - begin)) for total in (len(indices), *samples)]
                batch = next(batches) if own_count else ()
                if own_count and not begun:
                    part.prepare(batch)
                    begun = True
                end = begin + own_count
                seed = (task.seed, task.round, epoch, number, *([task.slot] * (task.slot > 0)))
                stage.train(batch, own_count, seed, sum(counts[1:]))
                if own_count:
                    self._tell_moved(part, task.first_epoch + epoch, end)
        return scalars(model.get_metrics_result()) if part.is_last else {}

    def _tell_moved(self, part: ModelPart, epoch: int, done: int) -> None:
        """Tell the master now and then how many samples of an epoch are done, if this part has the loss."""
        if part.is_last and (now := time.monotonic()) - self._reported_at >= MOVED_EVERY_S:
            self._reported_at = now
            self._tell(epoch, done, self.app.model.get_metrics_result())

    def _batches(self, part: ModelPart, task: Task) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of an epoch, as ``fit`` takes them; empty tuples if the part reads no data."""
        if part.reads:
            yield from (batch for batch, _ in self._samples.batches(task))
        while True:
            yield ()

    def _send(self, receiver: int, key: Key, value: Any) -> None:
        """Begin to send a tensor to another part, and wait only if that worker has not confirmed many others."""
        array = np.asarray(value)

        async def sending() -> None:
            worker = self._workers[receiver]
            try:
                await self._ask(worker, REPLICA, "receive", self._attempt, list(key), array)
            except (AppMissing, LeaseError) as error:  # the master has introduced the workers again without it
                raise Unreached(worker, error.message) from error

        self._unanswered.append(asyncio.run_coroutine_threadsafe(sending(), self._loop))
        while len(self._unanswered) > UNANSWERED or (self._unanswered and self._unanswered[0].done()):
            self._unanswered.popleft().result()

    def _pushed(self) -> RoundPushes | None:
        """Return the pushes and fetches of a round, if servers have the weights."""
        return None


def check_backend(master_backend: str) -> None:
    """Raise an error if this worker computes with another backend than the master, or with one that is not supported.

    Raises:
        ConfigError: The backend cannot be used.
    """
    import keras

    own_backend = keras.backend.backend()
    if own_backend != master_backend:
        raise ConfigError(
            f"this worker computes with {own_backend}, and the master with {master_backend}: the parts of a model need the same backend",
            hint=f"start it with KERAS_BACKEND={master_backend}",
        )
    if own_backend not in KINDS:
        raise ConfigError(
            f"split does not support Keras on {own_backend}", hint="use KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax"
        )
