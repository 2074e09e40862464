"""A worker that has one part of a model. Runs in the executor.

The event loop receives arrays of other parts into the inbox, and sends arrays of this part. Meanwhile the compute
thread makes the passes of this part in the order of ``ddlf.algorithms.pipeline``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ddlf.errors import AppMissing, BadUpdate, ConfigError, LeaseError
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import NOTHING_COUNTED, counted_names, read_state, scalars
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.inbox import Inbox, Key, Stopped
from ddlf.training.exchanges.split.part import KINDS, ModelPart
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.stage import Stage, expected
from ddlf.training.exchanges.split.variables import free, put, unmade
from ddlf.training.roles import REPLICA
from ddlf.training.slot.build import describe_optimizer, describe_weights, fresh_names, gain_of_bfloat16, ready_model
from ddlf.training.slot.keras_model import reseed
from ddlf.training.slot.optimizers import RunPosition, write_rates
from ddlf.training.slot.parts import SlotPart
from ddlf.training.slot.replica import MOVED_EVERY_S, Replica, call
from ddlf.training.slot.task import Task
from ddlf.worker.calls import offered
from ddlf.worker.peers import Unreached, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

UNANSWERED = 8
"""Maximum number of sent tensors that the other worker has not confirmed. It confirms them while it computes."""


class SplitReplica(Replica):
    """One worker's part of an app's model. The whole model exists without memory.

    Args:
        worker: The replica's worker.
        app: App that the master sent.
        run: Name of the run.
    """

    PARTS: ClassVar[Sequence[type[SlotPart]]] = ()

    def __init__(self, worker: Worker, app: App, run: str) -> None:
        super().__init__(worker, app, run)
        self._loop = asyncio.get_running_loop()
        self._ask = calls_of(worker.id, worker.peers, worker.roles.call, run)
        self._inbox = Inbox()
        self._part: ModelPart | None = None
        self._plan: Plan
        self._position: Any = None
        self._at: int | None = None  # the version of the weights that the part has
        self._unanswered: deque[Future[Any]] = deque()
        self._attempt = 0
        self._clip: float | None = None  # global_clipnorm of the compiled optimizer
        self._workers: Sequence[int] = ()
        self._stage: Stage

    # -- verbs --------------------------------------------------------------------------------------------------------

    @offered
    async def receive(self, attempt: int, key: Sequence[Any], value: Any) -> None:
        """Receive a tensor from another part.

        Args:
            attempt: Number of the attempt at the round.
            key: The fields of a ``Key``.
            value: The tensor as an array.
        """
        self._inbox.put(attempt, Key(*key), value)

    async def step(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train a part of the model for one round.

        Args:
            order: ``task``: the message of a ``Task``, without weights. ``part``: the number of the part. ``ends`` and
                ``micro_batches``: how the model is cut. ``workers``: the worker of each part. ``attempt``: the number
                of the attempt. ``backend``: the backend of Keras. ``version``: the version of the weights. ``state``:
                None if the worker has the part's weights; else its ``weights``, and its ``optimizer``, the variables
                of the optimizer by path.

        Returns:
            The result of ``train_part``.
        """
        found: dict[str, Any] = await self._computed(lambda _: self.train_part(order), Task.from_message(order["task"]))
        return found

    def _stop(self) -> None:
        super()._stop()
        self._inbox.stop()

    # -- methods for the compute thread -------------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        """Build the app's model without memory for its weights, and return facts about it, which the master compares."""
        import keras

        app = self.app
        with fresh_names(), unmade():
            call(app.create_model)
            ready_model(app)
        self._part, self._at = None, None
        return {
            "weights": describe_weights(app.model),
            "optimizer": describe_optimizer(app.model.optimizer),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "text": getattr(getattr(app.model, "notation", None), "digest", ""),
            "gain": gain_of_bfloat16() if app.precision == "auto" and app.worker.id == 1 else 0.0,
        }

    def train_part(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train a part of the model for one round. ``step`` describes the argument.

        Returns:
            ``weights`` and ``optimizer`` after the round, and facts about the round. Or ``peer`` and ``why``, if a
            worker was not reached; or ``fault`` and ``hint``, if a tensor has NaN; or ``stopped``.
        """
        begin = time.perf_counter()
        check_backend(order["backend"])
        task = self._task = Task.from_message(order["task"])
        self.stopping, self._fed, self._told = False, [], time.monotonic()
        self._workers, self._attempt = order["workers"], order["attempt"]
        part = self._become(order)
        self._at = None
        try:
            found = self._samples.during(lambda: self._rounds(part, task))
            self._all_answered()
        except Stopped:
            return {"stopped": True}
        except Unreached as error:
            return {"peer": error.worker, "why": error.why}
        except BadUpdate as error:
            return {"fault": error.message, "hint": error.hint}
        finally:
            self._unanswered.clear()
        self._at = order["version"] + 1
        wait_data_s, _ = self._samples.told()
        return {
            **self._results(part, found),
            "digest": task.digest(),
            "compute_s": time.perf_counter() - begin,
            "idle_s": self._stage.idle_s,
            "wait_data_s": wait_data_s,
        }

    def _become(self, order: dict[str, Any]) -> ModelPart:
        """Make this worker's part, unless it has it already, and set its weights and optimizer.

        Raises:
            AppMissing: The worker should have the part's weights, but does not.
        """
        import keras

        number, state, part = order["part"], order["state"], self._part
        if state is None:
            if part is None or (part.number, self._at) != (number, order["version"]):
                raise AppMissing("this worker does not have the weights of its part")
            return part
        known = state["optimizer"]
        if part is not None and (part.number != number or known is None):
            free(self.app.model.weights)
            self.build()
            part = None
        model = self.app.model
        if part is None:
            self._plan = Plan.at(Graph.of(model), order["ends"], self._task.batch_size, order["micro_batches"])
        for place, value in zip(self._plan.parts[number].all_weights, state["weights"], strict=True):
            put(model.weights[place], value)
        if part is None:
            part = self._part = KINDS[keras.backend.backend()](self._plan, number)
            model.optimizer.build(part.trained)
            self._clip, model.optimizer.global_clipnorm = model.optimizer.global_clipnorm, None
            self._position = RunPosition.of(model.optimizer)
        for variable in model.optimizer.variables if known is not None else ():
            variable.assign(known[variable.path])
        return part

    def _rounds(self, part: ModelPart, task: Task) -> dict[str, float]:
        """Train the local epochs of a round. Return the metrics of the last one, if this part has the loss."""
        model, size = self.app.model, task.batch_size
        reseed(model, (task.seed, task.round, task.slot, part.number))
        if self._position is not None and (steps := task.place) is not None:
            self._position.set(steps, task.epochs * -(-len(task.indices) // size))
        part.begin_round()
        self._inbox.begin(self._attempt, expected(self._plan, part.number))
        stage = self._stage = Stage(self._plan, part, self._inbox, self._send, self._clip)
        begun = False
        for epoch in range(task.epochs):
            if task.rates:
                write_rates(model, task.rates[min(epoch, len(task.rates) - 1)])
            part.begin_epoch()
            indices = self.order(task.indices, epoch)
            self._fed.append(indices)
            batches = self._batches(part, replace(task, indices=indices))
            for number, begin in enumerate(range(0, len(indices), size)):
                if self.stopping:
                    raise Stopped
                batch = next(batches)
                if not begun:
                    part.prepare(batch)
                    begun = True
                end = min(begin + size, len(indices))
                stage.train(batch, end - begin, (task.seed, task.round, epoch, number))
                if part.is_last and (now := time.monotonic()) - self._told >= MOVED_EVERY_S:
                    self._told = now
                    self._tell(task.first_epoch + epoch, end, model.get_metrics_result())
        return scalars(model.get_metrics_result()) if part.is_last else {}

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

    def _all_answered(self) -> None:
        while self._unanswered:
            self._unanswered.popleft().result()

    def _results(self, part: ModelPart, metrics: dict[str, float]) -> dict[str, Any]:
        """Return the part's state after a round, and its metrics."""
        import keras

        model = self.app.model
        names = counted_names(model, metrics) if metrics else []
        return {
            "weights": part.read(),
            "optimizer": {one.path: keras.ops.convert_to_numpy(one) for one in model.optimizer.variables},
            "metrics": metrics,
            "counted": read_state(model, names) if metrics else NOTHING_COUNTED,
            "losses": part.losses,
        }


def check_backend(wanted: str) -> None:
    """Raise an error if this worker computes with another backend than the master, or with one that is not supported.

    Raises:
        ConfigError: The backend cannot be used.
    """
    import keras

    mine = keras.backend.backend()
    if mine != wanted:
        raise ConfigError(
            f"this worker computes with {mine}, and the master with {wanted}: the parts of a model need the same backend",
            hint=f"start it with KERAS_BACKEND={wanted}",
        )
    if mine not in KINDS:
        raise ConfigError(
            f"split does not support Keras on {mine}", hint="use KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax"
        )
