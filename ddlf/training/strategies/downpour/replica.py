"""A worker in Downpour SGD: it carries the replicas of a slot, which share one model. Runs in the executor.

The replicas take turns in one ``fit``, some batches each. The order is drawn at random from the seed. Between two steps
a callback switches the model to another replica, hands over pushes, and takes fetched weights.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.push_rules import Cadence, is_finite, turns
from ddlf.algorithms.reading_order import Portion, Turned
from ddlf.algorithms.weights import Fault, Weights
from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.exchanges.replica import HoldingReplica
from ddlf.training.roles import REPLICA, SERVERS
from ddlf.training.slot.build import ModelReport
from ddlf.training.slot.keras_model import SMALL, KerasModel
from ddlf.training.slot.optimizers import RunPosition, Steps, chain, innermost
from ddlf.training.slot.parts import parts_named
from ddlf.training.slot.replica import MOVED_EVERY_S, run_train
from ddlf.training.slot.task import MOST_FILES, Reply, Task
from ddlf.training.slot.transfer import transfer
from ddlf.training.strategies.downpour.client import ModelReplica, ReplicaEntry, record, replicas_of
from ddlf.training.strategies.downpour.server import Servers
from ddlf.training.strategies.downpour.settings import DownpourSettings
from ddlf.worker.peers import Unreached, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker


Work = Callable[[], Coroutine[Any, Any, Any]]


class Stopped(Exception):
    """Error: the run ends while a replica waits for a server, so training must stop."""


@dataclass(slots=True)
class _SavedState:
    """The saved state of a replica while the model trains another replica: its weights, and its unpushed gradients."""

    weights: Row | None
    rest: Row
    unpushed: Row | None


class Turns:
    """The replicas of one slot in one round, which use the model in turn.

    Args:
        model: Keras model.
        stepper: The optimizer that replaces the compiled one of the model.
        task: The round to train, with the slot and its samples.
        batches: Number of batches in the round.
        replicas: Replicas of the slot.
        at_once: Number of steps in one call of the model's compiled training step.
        wait: Runs a coroutine on the event loop and waits for it.
        is_stopping: Returns whether training is to stop.
        stops: Whether a push with NaN or infinite values stops training. Otherwise the push is left out.

    Attributes:
        fault: Reason why the round's result is unusable; None if it is usable.
        refused: Number of pushes left out because of NaN or infinite values.
    """

    def __init__(
        self,
        model: Any,
        stepper: Stepper,
        task: Task,
        batches: int,
        replicas: list[ModelReplica],
        at_once: int,
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
        is_stopping: Callable[[], bool],
        stops: bool,
    ) -> None:
        self._model, self._stepper = model, stepper
        self._task, self._batches = task, batches
        self._replicas, self._at_once = replicas, at_once
        self._wait, self._is_stopping, self._stops = wait, is_stopping, stops
        self._order, self._chosen = planned(task, replicas, batches)
        self._entry = ReplicaEntry.from_message(task.weights)
        self._alone = self._entry.alone * replicas[0].cadence.n_push
        self._begun = task.round * max(batches // len(replicas), 1)
        self.fault: Fault | None = None
        self.refused = 0
        self._saved: dict[int, _SavedState] = {}
        self._base: dict[int, Row] = {}  # index of the replica -> untrained values at the last push or take
        self._step = 0
        self._due: list[Work] = []  # coroutines to run on the event loop before the next wait
        self._error: BaseException | None = None
        self._left_out: list[int] = []

    @property
    def now(self) -> int:
        """The number, from 0, of the replica that trains now. After the last step, it is the replica that made it."""
        return self._replicas[self._order[min(self._step, len(self._order) - 1)]].id

    def begin(self) -> list[Any]:
        """Begin the round. Return the weights that the first replica starts with."""
        self._stepper.begin(self._begun)
        self._stepper.begin_at(self._task.position, len(self._order))
        if self._order:
            self._become(self._order[0])
        weights: list[Any] = self._model.get_weights()
        return weights

    def samples(self, indices: Any, batch_size: int) -> Any:
        """Return the samples that the replicas train on, in the order of all their steps."""
        if isinstance(indices, Portion):
            ends = np.cumsum([replica.steps for replica in self._replicas]).tolist()
            pieces = [
                indices[(end - replica.left) * batch_size : end * batch_size]
                for end, replica in zip(ends, self._replicas, strict=True)
            ]
            return (
                pieces[0]
                if len(pieces) == 1
                else Turned(pieces=tuple(pieces), order=tuple(self._order), batch=batch_size)
            )
        parts = [indices[batch * batch_size : (batch + 1) * batch_size] for batch in self._chosen]
        return np.concatenate(parts) if parts else indices[:0]

    def callback(self) -> Any:
        """Return the Keras callback that does the work between two steps of ``fit``.

        It pushes gradients to the servers, takes fetched weights, and switches the model to the next replica.
        """
        import keras

        rounds = self

        class Between(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if not rounds.stepped(lambda: self.model):  # with JAX, reading self.model copies JAX's state into it
                    self.model.stop_training = True

        return Between()

    def stepped(self, model: Any) -> bool:
        """Push, fetch and switch replicas, where this is due after a step. Return whether training continues."""
        if self._is_stopping() or self._error is not None:
            return False
        try:
            self._after(model)
        except BaseException as error:  # raise this error after fit: during fit, the model is incomplete with JAX
            self._error = error
            return False
        return self.fault is None

    def finish(self) -> None:
        """Wait until all pushes of the round are safe in backups.

        Raises:
            AppError: The model's optimizer has not made all steps.
        """
        if self._error is not None:
            raise self._error
        if self._is_stopping() or self.fault is not None:
            return
        if (steps := self._stepper.steps - self._begun) != len(self._order):
            raise AppError(
                f"the model's optimizer has made {steps} of {len(self._order)} steps, and Downpour needs the gradients of each batch",
                hint="train with replica.fit(1, batch_size); your own train_step must end with one self.optimizer.apply_gradients(...)",
            )

        async def all_pushed() -> None:
            for replica in self._replicas:
                await replica.pushed()

        self._done(all_pushed)

    def fed(self) -> np.ndarray[Any, Any] | list[list[int]] | None:
        """Return the samples that were trained on, as indices or ranges of the slot's portion; None for all."""
        if not self._left_out:
            return None
        left_out = set(self._left_out)
        size, indices = self._task.batch_size, self._task.indices
        batches = [batch for batch in range(self._batches) if batch not in left_out]
        if isinstance(indices, Portion):
            return [[batch * size, min((batch + 1) * size, len(indices))] for batch in batches]
        parts = [indices[batch * size : (batch + 1) * size] for batch in batches]
        return np.concatenate(parts).astype(np.int64) if parts else None

    # -- between two steps --------------------------------------------------------------------------------------------

    def _after(self, model: Any) -> None:
        index = self._order[self._step]
        replica = self._replicas[index]
        count = min(self._at_once, len(self._order) - self._step)
        self._step += count
        replica.done += count
        cadence = replica.cadence
        if cadence.pushes(replica.done - 1, replica.left):
            model()
            self._push(replica, index)
        if self._step == len(self._order):
            return
        following = self._order[self._step]
        if following != index:
            model()
            if self._step == self._alone:
                self._due.append(replica.pushed)  # the other replicas begin with the results of the first one
            self._leave(index)
            self._become(following)
        elif replica.done < replica.left and cadence.takes(replica.done):
            model()
            self._take(replica, index)
        if self._due:
            self._done(_nothing)

    def _push(self, replica: ModelReplica, index: int) -> None:
        """Push the gradients since a replica's last push to the servers, unless they contain NaN or infinite values."""
        stepper = self._stepper
        gradient, rest = stepper.unpushed(), stepper.rest()
        stepper.take_up(None)
        change = np.float32(1 / self._entry.all) * (self._base[index] - rest)
        if not (is_finite(gradient) and is_finite(change)):
            self._leave_out(replica, index)
            return
        self._base[index] = rest
        self._due.append(lambda: replica.push(gradient, change))

    def _leave_out(self, replica: ModelReplica, index: int) -> None:
        """Handle a push with NaN or infinite values: end the run, or drop the push and fetch the servers' values."""
        number = replica.first + (replica.done - 1) // replica.cadence.n_push
        if self._stops:
            reason = f"push {number + 1} of replica {replica.id + 1} has NaN or infinite values"
            self.fault = Fault(reason, hint="lower the learning rate of the model, or that of push_rule")
            return
        self.refused += 1
        before = sum(other.steps for other in self._replicas[:index])
        steps = range(number * replica.cadence.n_push, replica.first * replica.cadence.n_push + replica.done)
        self._left_out += [before + step for step in steps]

        async def skip() -> None:
            replica.skip()

        self._due.append(skip)
        self._stepper.set(*self._fetched(replica, index, None))

    def _take(self, replica: ModelReplica, index: int) -> None:
        unpushed = None if replica.done % replica.cadence.n_push == 0 else self._stepper.unpushed()
        own_change = self._base[index] - self._stepper.rest()
        weights, rest = self._fetched(replica, index, unpushed)
        self._stepper.set(weights, rest - own_change)

    def _fetched(self, replica: ModelReplica, index: int, unpushed: Row | None) -> tuple[Row, Row]:
        rate = self._stepper.rate
        weights, rest = self._done(lambda: replica.take(unpushed, rate))
        self._base[index] = rest
        return weights, rest

    def _done(self, last: Work) -> Any:
        """Run all coroutines that are due and a last one, and return its result.

        Waiting once for all of them costs fewer thread switches.
        """
        due, self._due = self._due, []

        async def all_of_them() -> Any:
            for work in due:
                await work()
            return await last()

        return self._wait(all_of_them())

    def _leave(self, index: int) -> None:
        """Save a replica's state before the model switches to another replica."""
        replica, stepper = self._replicas[index], self._stepper
        if replica.done == replica.left:
            return
        all_pushed = replica.done % replica.cadence.n_push == 0
        takes = replica.cadence.takes(replica.done)
        self._saved[index] = _SavedState(
            None if takes else stepper.weights(), stepper.rest(), None if all_pushed else stepper.unpushed()
        )
        if not all_pushed:
            stepper.take_up(None)

    def _become(self, index: int) -> None:
        """Switch the model to a replica: load its weights and its unpushed gradients."""
        replica, stepper, saved = self._replicas[index], self._stepper, self._saved.pop(index, None)
        unpushed = None if saved is None else saved.unpushed
        if replica.cadence.takes(replica.done):
            own_change = 0 if saved is None else self._base[index] - saved.rest
            weights, rest = self._fetched(replica, index, unpushed)
            stepper.set(weights, rest - own_change)
        elif saved is not None:
            stepper.set(saved.weights, saved.rest)
        if unpushed is not None:
            stepper.take_up(unpushed)


async def _nothing() -> None:
    """Do nothing. ``Turns._done`` needs a last coroutine, even if the caller only waits for coroutines that are due."""


def planned(task: Task, replicas: list[ModelReplica], batches: int) -> tuple[list[int], list[int]]:
    """Return the replica and the batch of each step in a slot's round.

    A turn ends where a fetch is taken or a push is sent.

    Args:
        task: The round to train, with the slot and its samples.
        replicas: Replicas of the slot.
        batches: Number of batches in the round.

    Returns:
        For each step the index of the replica in ``replicas``; and for each step the number of the batch.
    """
    chance = np.random.Generator(np.random.PCG64([task.seed, task.round, task.slot, len(replicas)]))
    n_push = replicas[0].cadence.n_push
    length = math.gcd(replicas[0].cadence.n_fetch, n_push)
    alone = ReplicaEntry.from_message(task.weights).alone * n_push
    order = turns([replica.left for replica in replicas], length, chance, alone=alone)
    ends = np.cumsum([replica.steps for replica in replicas])
    following = [int(end) - replica.left for end, replica in zip(ends, replicas, strict=True)]
    chosen = []
    for index in order:
        chosen.append(following[index])
        following[index] += 1
    assert following[-1] == batches
    return order, chosen


def shares(batches: int, replicas: int) -> list[int]:
    """Return how many of a round's batches each replica trains on. The numbers differ by at most one."""
    return [len(part) for part in np.array_split(np.arange(batches), replicas)]


LOOK_S = 0.2
"""Seconds between two checks whether to stop, while the compute thread waits for servers."""
T = TypeVar("T")


def wait(
    coroutine: Coroutine[Any, Any, T],
    loop: asyncio.AbstractEventLoop,
    must_stop: Callable[[], bool],
    stopped: type[Exception],
) -> T:
    """Run a coroutine on an event loop, wait for it on the thread that trains, and return its result.

    Args:
        coroutine: The coroutine.
        loop: The event loop, which runs on another thread.
        must_stop: Returns whether training must stop.
        stopped: The exception to raise then.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while True:
        try:
            return future.result(LOOK_S)
        except TimeoutError:
            if future.done():
                raise
            if must_stop():
                future.cancel()
                raise stopped from None


class DownpourReplica(HoldingReplica):
    """One worker's copy of an app and its model in Downpour, with the servers and replicas on this worker.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run. Other workers find their replicas by it.
    """

    PARTS = parts_named(DownpourSettings.slot_parts)
    ONE_CARD: ClassVar[str] = "mode='downpour'"

    _model: KerasModel

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        rows = lambda: self._stepper.rows  # noqa: E731 - the stepper comes with the model
        ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self._servers = Servers(worker.id, run, worker.roles, ask, rows, worker.on_shard)
        worker.roles.play(run, SERVERS, self._servers, of=REPLICA)
        self._stepper: Stepper
        self._cadence: Cadence
        self._turns: Turns | None = None  # turns of the current round
        self._loop: asyncio.AbstractEventLoop

    @property
    def turn(self) -> int:
        """The number, from 0, of the replica that trains now. Keras callbacks read it during ``fit``."""
        assert self._turns is not None
        return self._turns.now

    # -- verbs --------------------------------------------------------------------------------------------------------

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Train a slot for one round, like ``Replica.train``."""
        self._loop = asyncio.get_running_loop()
        return await super().train(task)

    async def _weights_of(self, source: dict[str, Any]) -> Weights | None:
        if "moment" not in source:
            return await super()._weights_of(source)
        return await self._servers.marked(source["moment"], source["others"])

    async def close(self) -> None:
        """Close the servers on this worker, then do what ``Replica.close`` does."""
        self._worker.on_shard(None)
        await self._servers.close()
        await super().close()

    # -- on the compute thread ----------------------------------------------------------------------------------------

    def build(self) -> ModelReport:
        """Build the model, like ``Replica.build``, and replace its optimizer by a ``Stepper``."""
        report = super().build()
        self._stepper = Stepper(self.app.model)
        self._model.stepped_by_another()
        self._cadence = Cadence(n_fetch=self.app.n_fetch, n_push=self.app.n_push)
        return report

    def carry(self, task: Task) -> Reply:
        """Train the replicas of a slot for one round, and return the reply for the master."""
        begin = time.perf_counter()
        round = self._begin_round(task)
        self.app.indices, self._turns = task.indices, None
        metrics: dict[str, float] = {}
        unreached: Unreached | None = None
        replicas: list[ModelReplica] = []
        try:
            replicas += self._replicas_of(task)
            turns = self._turns = self._turns_of(task, replicas)
            _, metrics = run_train(self.app, turns.begin(), task.epochs, task.batch_size)
            turns.finish()
        except Stopped:
            self.stopping = True
        except Unreached as error:
            unreached = error
        finally:
            for replica in replicas:
                self._loop.call_soon_threadsafe(replica.end)
        fault = None if self._turns is None else self._turns.fault
        states = self._end_round(round, [])
        wait_data_s, files = self._samples.take_stats()
        return Reply(
            task=task,
            update=None if fault is None else asdict(fault),
            codec_error=0.0,
            samples=len(task.indices),
            fed=None if self._turns is None else self._turns.fed(),
            metrics=metrics,
            counted=self._model.counted(metrics),
            compute_s=time.perf_counter() - begin,
            wait_data_s=wait_data_s,
            files=files[:MOST_FILES],
            stopped=self.stopping and fault is None,
            state={name: states[name] for name in task.back},
            pushed=record(replicas, refused=0 if self._turns is None else self._turns.refused, unreached=unreached),
        )

    def _replicas_of(self, task: Task) -> list[ModelReplica]:
        steps = shares(batches_of(task), len(ReplicaEntry.from_message(task.weights).replicas))
        replicas: list[ModelReplica] = self._wait(replicas_of(self._servers.owners, task, steps, self._cadence))
        return replicas

    def _turns_of(self, task: Task, replicas: list[ModelReplica]) -> Turns:
        steps_between = math.gcd(self._cadence.n_fetch, self._cadence.n_push)
        return Turns(
            self.app.model,
            self._stepper,
            task,
            batches_of(task),
            replicas,
            self._model.steps_at_once(steps_between if len(replicas) == 1 else 1),
            self._wait,
            lambda: self.stopping,
            self.app.update_policy == "stop",
        )

    def fit(self, epochs: int, batch_size: int, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """Train the slot, like ``Replica.fit``, with batches in the order of the replicas' turns.

        Raises:
            AppError: A user's ``train`` has changed the samples, or has trained twice.
        """
        task, turns = self._task, self._turns
        assert turns is not None  # ``carry`` sets them before it calls train
        if self.app.indices is not task.indices or (epochs, batch_size) != (1, task.batch_size) or self._fed:
            raise AppError(
                f"{type(self.app).__name__}.train must call replica.fit(1, batch_size) exactly once in Downpour, with the given samples",
                hint="leave out train, or train in mode 'async'",
            )
        order = turns.samples(task.indices, batch_size)
        if not len(order):
            return {}
        feed, first = self._samples.feed(batch_size), task.first_epoch
        feed.set_order(order)

        def begin_epoch(epoch: int) -> None:
            self._fed.append(order)

        def end_batch(epoch: int, batch: int, logs: Any) -> bool:
            if (now := time.monotonic()) - self._reported_at >= MOVED_EVERY_S:
                self._reported_at = now
                self._tell(epoch, min((batch + 1) * batch_size, len(order)), logs)
            return self.stopping

        numbers, begun = range(first, first + 1), self._fit_begins()
        model, data, telling = self._model, feed.dataset, [*callbacks, turns.callback()]
        return self._samples.run_fit(lambda: model.fit(data, numbers, telling, begin_epoch, end_batch, begun))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, wait for it on the thread that trains, and return its result.

        Raises:
            Stopped: Training must stop before the coroutine has ended.
        """
        return wait(coroutine, self._loop, lambda: self.stopping, Stopped)


def batches_of(task: Task) -> int:
    """Return the number of batches that a slot trains on in a round."""
    return math.ceil(len(task.indices) / task.batch_size)


class Stepper:
    """A worker's model with a replaced optimizer, which sums the gradients and takes plain SGD steps.

    It receives each gradient inside the compiled step of ``fit`` or of a user's ``train_step``. Clipping, weight decay,
    the learning rate and its schedule come from the compiled optimizer, and act before a gradient is added. The
    compiled optimizer's other state has no effect: the servers' push rule decides how a gradient moves the weights.

    Args:
        model: Built and compiled model.

    Attributes:
        rows: Layout of its weights as rows.

    Raises:
        AppError: The model has no optimizer.
        ConfigError: The optimizer has a feature that Downpour does not support.
    """

    def __init__(self, model: Any) -> None:
        check_optimizer(model.optimizer)
        trained = {id(weight) for weight in model.trainable_weights}
        rows = Rows.of(model.get_weights(), [id(weight) in trained for weight in model.weights])
        optimizer = self.replacement_of(innermost(model.optimizer))
        model.optimizer = _wrapped_like(model.optimizer, optimizer)
        model.optimizer.build(model.trainable_variables)
        self._begin_with(model, rows, optimizer, model.trainable_variables)

    @staticmethod
    def replacement_of(compiled: Any) -> Any:
        """Return the optimizer that replaces a compiled one."""
        return _summing_optimizer(compiled)

    def _begin_with(self, model: Any, rows: Rows, optimizer: Any, trained: Sequence[Any]) -> None:
        """Set the attributes.

        Args:
            model: The model, with its optimizer.
            rows: Layout of the weights.
            optimizer: The result of ``replacement_of`` in the model's optimizer.
            trained: The variables of this optimizer.
        """
        import keras

        self.rows, self._optimizer = rows, optimizer
        self._position = RunPosition.of(model.optimizer)
        model.train_function = None  # the step may have been compiled for the other optimizer
        unpushed_of = {id(w): unpushed for w, unpushed in zip(trained, self._optimizer.unpushed, strict=True)}
        variables = [model.weights[i] for i in self.rows.trained]
        self._trained = _Variables(variables)
        self._rest = _Variables([model.weights[i] for i in self.rows.rest])
        self._unpushed = _Variables([unpushed_of[id(weight)] for weight in variables])
        self._zeros: list[Any] = []
        # free the memory, because the model may be large
        if self.rows.sizes[0] <= SMALL and keras.backend.backend() == "tensorflow":
            self._zeros = [keras.ops.convert_to_tensor(array) for array in self._zero()]

    def begin(self, steps: int) -> None:
        """Begin a round: set the sum of the gradients to zero, and set the number of earlier steps."""
        self._optimizer.iterations.assign(steps)
        self.take_up(None)

    def begin_at(self, steps: Steps | None, left: int) -> None:
        """Set the schedules of the run, such as that of the learning rate, to the beginning of a round.

        Args:
            steps: Steps of the round; None if unknown.
            left: Number of the remaining steps. It is smaller than ``steps`` if a lost worker has made some of them.
        """
        if self._position is not None and steps is not None:
            self._position.set(steps._replace(before=max(steps.after - left, steps.before)))

    @property
    def steps(self) -> int:
        """The number of steps that the model has made so far."""
        return int(np.asarray(self._optimizer.iterations))

    @property
    def rate(self) -> float:
        """The current learning rate of the compiled optimizer."""
        return float(np.asarray(self._optimizer.learning_rate))

    def unpushed(self) -> Row:
        """Return the sum of the gradients that were not pushed yet."""
        return self._unpushed.row()

    def take_up(self, unpushed: Row | None) -> None:
        """Set the sum of the gradients that were not pushed yet, when the model switches to a replica.

        None means zero.
        """
        if unpushed is None:
            self._unpushed.set(self._zeros or self._zero())
        else:
            self._unpushed.set(self.rows.arrays(unpushed, self.rows.trained))

    def _zero(self) -> list[Any]:
        return self.rows.arrays(np.zeros(self.rows.sizes[0], np.float32), self.rows.trained)

    def weights(self) -> Row:
        """Return the values of the trained weights as one row."""
        return self._trained.row()

    def rest(self) -> Row:
        """Return the untrained float values, such as moving statistics, as one row."""
        return self._rest.row()

    def set(self, weights: Row | None, rest: Row) -> None:
        """Set the trained values, unless they are None, and the untrained values of the model."""
        if weights is not None:
            self._trained.set(self.rows.arrays(weights, self.rows.trained))
        self._rest.set(self.rows.arrays(rest, self.rows.rest))


class _Variables:
    """Model variables that are read and written as one row, that is, one flat array.

    In a small model Keras's accessors take several times as long as a step. So with TensorFlow this class calls the
    operations below them.

    Args:
        variables: Keras variables of floats.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        import keras

        self._variables = variables
        self._read, self._write = transfer().read, transfer().write
        if keras.backend.backend() == "tensorflow":
            self._variables = [variable.value for variable in variables]
            self._read, self._write = _values_in_tensorflow, _assign_in_tensorflow

    def row(self) -> Row:
        """Return the values of all variables, one after another, as one flat array."""
        parts = [np.asarray(value, np.float32).reshape(-1) for value in self._read(self._variables)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def set(self, arrays: Sequence[Any]) -> None:
        """Set the variables to some values, given in the variables' shapes and types."""
        self._write(self._variables, arrays)


def _values_in_tensorflow(variables: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    return [tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy() for variable in variables]


def _assign_in_tensorflow(variables: Sequence[Any], values: Sequence[Any]) -> None:
    import tensorflow as tf

    for variable, value in zip(variables, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.convert_to_tensor(value))


AROUND = {
    "RollingClip": (
        "it uses the norms of earlier gradients, but the replicas of a worker share one optimizer",
        "clip='agc', global_clipnorm of the optimizer, or update_policy='reject', which leaves out pushes with NaN or infinite values",
    ),
    "Multipliers": (
        "the rule of the shards decides how far a gradient moves each weight",
        "freeze layers by layer.trainable = False, or train in mode 'sync' or 'async'",
    ),
    "Unfreezing": (
        "the rule of the shards decides how far a gradient moves each weight",
        "freeze layers by layer.trainable = False, or train in mode 'sync' or 'async'",
    ),
    "": ("replicas take plain steps, and the rule of the shards decides", "train in mode 'sync' or 'async'"),
}
"""Wrapping optimizers that Downpour refuses: the reason, and the hint."""


def _wrapped_like(optimizer: Any, inner: Any) -> Any:
    """Return an inner optimizer in the same wrappers, such as loss scaling, as a compiled optimizer has."""
    for wrapper in reversed([*chain(optimizer)][:-1]):
        inner = type(wrapper)(inner, **wrapper.options())
    return inner


def check_optimizer(optimizer: Any) -> None:
    """Raise an error for an optimizer that Downpour's replicas cannot replace by plain SGD steps.

    Raises:
        AppError: The model has no optimizer.
        ConfigError: The optimizer has a feature that Downpour does not support.
    """
    if optimizer is None:
        raise AppError("mode='downpour' needs the gradients that an optimizer is given, but the model has none")
    inner = innermost(optimizer)
    scales = any(type(wrapper).__name__ == "LossScaleOptimizer" for wrapper in chain(optimizer))
    for wrapper in chain(optimizer):
        if wrapper is not inner and (name := type(wrapper).__name__) not in ("AGC", "LossScaleOptimizer"):
            reason, hint = AROUND.get(name, AROUND[""])
            raise ConfigError(
                f"mode='downpour' does not support {name}, an optimizer around another one: {reason}", hint=hint
            )
    optimizer = inner
    unfit = {
        "a scaled loss": scales or getattr(optimizer, "loss_scale_factor", None),
        "averages of the weights (use_ema)": getattr(optimizer, "use_ema", False),
        "gradient_accumulation_steps": getattr(optimizer, "gradient_accumulation_steps", None),
        "several optimizers": getattr(optimizer, "optimizers", None),
    }
    for feature, value in unfit.items():
        if value:
            raise ConfigError(
                f"mode='downpour' does not support {feature}: replicas take plain steps, and the rule of the shards decides",
                hint="compile the model without it, or train in mode 'sync' or 'async'",
            )


def _summing_optimizer(compiled: Any) -> Any:
    """Return the optimizer that replaces a model's compiled one: it sums gradients and takes plain SGD steps."""
    import keras

    decay = compiled.weight_decay

    class Stepping(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Sequence[Any]) -> None:
            if not self.built:
                super().build(variables)
                self.unpushed = self.add_optimizer_variables(variables, "unpushed")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            unpushed, rate = (
                self.unpushed[self._get_variable_index(variable)],
                keras.ops.cast(learning_rate, variable.dtype),
            )
            if decay and compiled._use_weight_decay(variable):
                more = keras.ops.multiply(keras.ops.convert_to_tensor(variable), decay)
                self.assign_add(unpushed, more)
                self.assign_sub(variable, keras.ops.multiply(more, rate))
            self.assign_add(unpushed, gradient)  # an embedding's gradient has only the used rows
            self.assign_sub(variable, keras.ops.multiply(gradient, rate))

    rate = compiled._learning_rate
    return Stepping(
        learning_rate=float(np.asarray(rate)) if hasattr(rate, "assign") else rate,
        clipnorm=compiled.clipnorm,
        clipvalue=compiled.clipvalue,
        global_clipnorm=compiled.global_clipnorm,
        name="downpour",
    )
