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
from dataclasses import asdict, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ddlf.algorithms.weights import Fault, fault
from ddlf.data.stream import StreamClosed
from ddlf.errors import AppMissing, BadUpdate, ConfigError, LeaseError
from ddlf.events import Warned
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import is_seen, write_if_seen
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import NOTHING_COUNTED, counted_names, read_state, scalars
from ddlf.training.evaluation.model import batches_of, end_reading
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.inbox import Inbox, Key, Stopped
from ddlf.training.exchanges.split.part import KINDS, ModelPart
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.stage import Stage, expected
from ddlf.training.exchanges.split.state_file import State, StateFiles, fetched, in_slice, optimizer_name, weight_name
from ddlf.training.exchanges.split.variables import name_all, unmade
from ddlf.training.exchanges.split.whole_weights import needs, united
from ddlf.training.roles import REPLICA
from ddlf.training.slot.build import describe_optimizer, describe_weights, fresh_names, ready_model
from ddlf.training.slot.distribution import check_one_card
from ddlf.training.slot.keras_model import reseed
from ddlf.training.slot.optimizers import RunPosition, write_rates
from ddlf.training.slot.parts import SlotPart
from ddlf.training.slot.replica import MOVED_EVERY_S, Replica, call
from ddlf.training.slot.task import Task
from ddlf.training.slot.variables import alone, free, is_finite, is_made, make, put, value_of
from ddlf.worker.activity import HeldPart
from ddlf.worker.calls import concurrent, offered
from ddlf.worker.peers import Unreached, caller, calls_of

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

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
        self._at: int | None = None  # the version of the weights that the part has
        self._kept = StateFiles()
        self._seed: int | None = None  # of the first weights that the model's initializers make; None if some were made
        self._known: Mapping[str, Any] = {}  # the optimizer that ``create_model`` has loaded, by path
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
        why = "create_model reads or changes weights"
        try:
            with unmade():
                await super().build_on_master(app, seed, create)
            if all(not is_made(one) and alone(one) for one in app.model.weights):
                return
            if not any(map(is_made, app.model.weights)):
                why = "an initializer of create_model is not one of Keras's with its own seed"
        except Exception:  # the next attempt raises the app's own errors
            vars(app).pop("model", None)
        await super().build_on_master(app, seed, create)
        weights = app.model.weights
        state = State([(weight_name(i), np.dtype(one.dtype).name, tuple(one.shape)) for i, one in enumerate(weights)])
        for place, value in enumerate(weights):
            state.put(weight_name(place), value_of(value))
        app.run_context.first = list(state.views().values())
        free(weights)
        app.run_context.emit(
            Warned(about="model", why=f"{why}, so each machine makes the whole model once before it keeps its part")
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

    async def step(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train a part of the model for one round.

        Args:
            order: ``task``: the message of a ``Task``, without weights. ``part``: the number of the part. ``ends``,
                ``within``, ``by_rows``, ``replicas``, ``micro_batches`` and ``batch_size``: how the model is cut. ``counts``: the number of
                samples of each replica's task. ``workers``: the worker of each part. ``attempt``: the number
                of the attempt. ``backend``: the backend of Keras. ``version``: the version of the weights. ``copy``:
                the worker that keeps a copy of the state after the round; None for no copy. ``state``: None if this
                worker has the state of the part. Else one of these: ``seed``: the seed of the first weights. ``from``:
                another worker that has the state. ``arrays``: the state. ``slices``: for each name in the state, its
                name in the slices that this worker has received.

        Returns:
            Facts about the round. Or ``peer`` and ``why``, if a worker was not reached; or ``fault`` and ``hint``, if a
            tensor has NaN; or ``unfit``, if the weights have; or ``stopped``.
        """
        found: dict[str, Any] = await self._with_state(order, self.train_part)
        if order["copy"] is None or "digest" not in found:
            return found
        try:
            await self._ask(order["copy"], REPLICA, "copy", order["part"], order["version"] + 1, self._me)
        except (AppMissing, LeaseError) as error:
            return {"peer": order["copy"], "why": error.message}
        except Unreached as error:
            return {"peer": error.worker, "why": error.why}
        return found

    async def evaluate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Evaluate a part of the model, together with the other parts.

        Args:
            order: The order of ``step`` without ``task`` and ``copy``; and ``data``: ``"val"`` or ``"test"``. ``size``: samples
                in a batch. ``samples``: their number. ``content``: the fingerprints that the data must have.

        Returns:
            ``metrics`` and ``losses``; or ``other``, if the data here is different; or the failures of ``step``.
        """
        return await self._with_state(order, self.evaluate_part)

    @offered
    async def layout(self, part: int, version: int) -> list[list[Any]]:
        """Return the names, types and shapes of the state of a part."""
        return [[name, kind, list(shape)] for name, kind, shape in self._kept.of(part, version).layout]

    @offered
    async def piece(self, part: int, version: int, begin: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return some bytes of the state of a part."""
        return await asyncio.to_thread(self._kept.of(part, version).read, begin, nbytes)

    @offered
    async def copy(self, part: int, version: int, worker: int) -> None:
        """Keep a copy of the state of a part, fetched from the worker that has trained it."""
        self._kept.drop_before(version - 1)
        if (part, version) not in self._kept:
            self._kept.put(part, version, await fetched(partial(self._ask, worker, REPLICA), part, version))
        self._show(version)

    @concurrent
    async def write(
        self, part: int, version: int, place: dict[str, Any], names: dict[str, str], where: Sequence[Any]
    ) -> dict[str, Any]:
        """Write arrays of a part into a checkpoint. Arrays that are cut are written whole.

        Args:
            part, version: The state.
            place: Where to write, as in ``write_if_seen``.
            names: The name in the slice of each array to write.
            where: The parts whose shares make these arrays whole, each with the workers that have its state.

        Returns:
            The answer of ``write_if_seen``.
        """
        if not is_seen(place):
            return write_if_seen(place, {})
        states, fetching = {part: self._kept.of(part, version)}, StateFiles()
        try:
            for number, workers in where:
                if (number, version) in self._kept:
                    states[number] = self._kept.of(number, version)
                    continue
                ask, shares = partial(self._ask, workers[0], REPLICA), needs(self._plan, [*names])
                states[number] = await fetched(ask, number, version, shares[number])
                fetching.put(number, version, states[number])
            return await asyncio.to_thread(
                lambda: write_if_seen(place, in_slice(united(self._plan, part, states, [*names]).views(), names))
            )
        except (AppMissing, LeaseError) as error:
            return {"why": error.message, "seen": True}
        except Unreached as error:
            return {"why": f"worker {error.worker} was not reached: {error.why}", "seen": True}
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
        self._kept.close()
        self._worker.on_part(None)

    def _show(self, version: int) -> None:
        """Tell which part this worker has, and how many copies of others."""
        number, of, nbytes, mine = 0, 0, 0, set[int]()
        if (part := self._part) is not None:
            me, of = self._plan.parts[part.number], len(self._plan.parts)
            number, mine = part.number + 1, {part.number}
            nbytes = self._plan.bytes_of_weights(me) + self._plan.bytes_of_optimizer(me)
        self._worker.on_part(HeldPart(number, of, nbytes, version, len(self._kept.parts - mine), self._run))

    async def _with_state(
        self, order: dict[str, Any], work: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Fetch the state that an order needs, and carry the order out on the compute thread."""
        which, state = (order["part"], order["version"]), order["state"]
        self._kept.drop_before(order["version"])
        if state is not None and "from" in state and which not in self._kept:
            try:
                self._kept.put(*which, await fetched(partial(self._ask, state["from"], REPLICA), *which))
            except Unreached as error:
                return {"peer": error.worker, "why": error.why}
            except (AppMissing, LeaseError) as error:
                return {"peer": state["from"], "why": error.message}
        found: dict[str, Any] = await self._on_thread(lambda: work(order))
        return found

    # -- methods for the compute thread -------------------------------------------------------------------------------

    def build(self, seed: int | None = None) -> dict[str, Any]:
        """Build the app's model without memory for its weights, and return facts about it, which the master compares.

        Args:
            seed: Seed of the first weights; None for the app's.
        """
        import keras

        app = self.app
        self._seed = app.seed if seed is None else seed
        try:
            with unmade():
                self._create(self._seed)
        except Exception:  # create_model needs the values of weights, or has an error, which the next line raises
            self._create(self._seed)
        model, self._known = app.model, {}
        if any(map(is_made, model.weights)) and model.optimizer is not None and model.optimizer.built:
            name_all(model.optimizer)
            self._known = {one.path: value_of(one) for one in model.optimizer.variables}
            model.optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self._part, self._at = None, None
        return {
            "weights": describe_weights(model),
            "optimizer": describe_optimizer(model.optimizer),
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "text": getattr(getattr(model, "notation", None), "digest", ""),
            "arithmetic": asdict(self._arithmetic),
            "gain": 0.0,  # split computes in float32
        }

    def _create(self, seed: int) -> None:
        import keras

        vars(self.app).pop("model", None)
        keras.utils.set_random_seed(seed)
        with fresh_names():
            call(self.app.create_model)
            ready_model(self.app)
        check_one_card(self.app.model, "split")

    def train_part(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train a part of the model for one round. ``step`` describes the argument and the result."""
        begin = time.perf_counter()
        check_backend(order["backend"])
        task = self._task = Task.from_message(order["task"])
        self._fed, self._told = [], time.monotonic()
        part = self._become(order)
        self._at = None
        self._show(order["version"])
        metrics, failure = self._caught(lambda: self._samples.during(lambda: self._rounds(part, task, order)))
        if failure:
            return failure
        if (wrong := self._keep(part, order["version"] + 1)) is not None:
            return {"unfit": asdict(wrong)}
        self._at = order["version"] + 1
        self._show(self._at)
        wait_data_s, _ = self._samples.told()
        return {
            **self._results(part, metrics),
            "digest": task.digest(),
            "compute_s": time.perf_counter() - begin,
            "idle_s": self._stage.idle_s,
            "wait_data_s": wait_data_s,
        }

    def evaluate_part(self, order: dict[str, Any]) -> dict[str, Any]:
        """Evaluate a part of the model. ``evaluate`` describes the argument and the result."""
        check_backend(order["backend"])
        part = self._become(order)
        if part.replica:
            return {"metrics": {}, "losses": 0.0}  # the first replica evaluates
        if part.reads and not self._has(order["content"]):
            return {"other": f"worker {self._me} has other data there"}
        try:
            data = batches_of(self.app, order["data"], order["size"]) if part.reads else repeat(())
        except ConfigError as error:  # this machine has less memory for data than the master
            return {"other": f"worker {self._me}: {error.message}"}

        def work() -> dict[str, float]:
            self._stage = stage = self._begin(part, order)
            part.begin_epoch()
            size, samples = order["size"], order["samples"]
            for begin in range(0, samples, size):
                if self.stopping:
                    raise Stopped
                end, batch = min(begin + size, samples), next(data)
                if not begin:
                    part.prepare(batch)
                stage.evaluate(batch, end - begin, last=end == samples)
            return scalars(self.app.model.get_metrics_result()) if part.is_last else {}

        metrics, failure = self._caught(work)
        end_reading(self.app)
        return failure or {"metrics": metrics, "losses": part.losses}

    def _caught(self, work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], dict[str, Any]]:
        """Do some work of the group. Return its metrics; and why it has failed, as ``step`` returns it."""
        self.stopping = False
        try:
            found = work()
            if self.stopping:  # the samples have ended early
                raise Stopped
            while self._unanswered:
                self._unanswered.popleft().result()
            return found, {}
        except (Stopped, StreamClosed):
            return {}, {"stopped": True}
        except Unreached as error:
            return {}, {"peer": error.worker, "why": error.why}
        except BadUpdate as error:
            return {}, {"fault": error.message, "hint": error.hint}
        finally:
            self._unanswered.clear()

    def _begin(self, part: ModelPart, order: dict[str, Any]) -> Stage:
        """Begin an attempt of the group."""
        self._workers, self._attempt = order["workers"], order["attempt"]
        self._inbox.begin(self._attempt, expected(self._plan, part.number), self._workers)
        return Stage(self._plan, part, self._inbox, self._send, self._clip)

    def _become(self, order: dict[str, Any]) -> ModelPart:
        """Make this worker's part, unless it has it already, and set its weights and optimizer.

        Raises:
            AppMissing: The worker should have the part's state, but does not.
        """
        number, version, state = order["part"], order["version"], order["state"]
        if state is None and self._part is not None and (self._part.number, self._at) == (number, version):
            return self._part
        self._at = None
        if state is not None and "seed" in state:
            if self._part is not None or self._seed != state["seed"]:
                self._rebuild(state["seed"])
            part = self._made(number, order, partial(self._first, number))
            self._optimizer_is(self._known)
            return part
        read = self._reader(number, version, state)
        paths = self._plan.optimizer.paths if self._part is not None else ()
        if self._part is not None and (self._part.number != number or read(optimizer_name(0)) is None):
            self._rebuild(self._seed)
        weights = self.app.model.weights
        whole = state is not None and "slices" in state  # slices have whole arrays

        def shape(place: int) -> tuple[int, ...]:
            return self._plan.program.shapes[place] if whole else self._plan.shape(number, place)

        def mine(place: int | None, value: Any) -> Any:
            return self._plan.piece(number, place, value) if whole else value

        def fill(place: int) -> None:
            if (value := read(weight_name(place))) is None:
                raise AppMissing(f"weight {place + 1} is not in the state of part {number + 1}")
            value = mine(place, value.reshape(shape(place)))
            if tuple(weights[place].shape) != value.shape:  # create_model has made the whole weight
                free([weights[place]])
            put(weights[place], value)

        part = self._made(number, order, fill)
        paths = self._plan.optimizer.paths
        self._optimizer_is(
            {
                path: mine(self._plan.optimizer.of[i], value)
                for i, path in enumerate(paths)
                if (value := read(optimizer_name(i))) is not None
            }
            or self._known
        )
        return part

    def _first(self, number: int, place: int) -> None:
        """Give a weight its first value. A part with a share of it has the whole weight only for this moment."""
        variable = self.app.model.weights[place]
        make(variable)
        if place in self._plan.program.pieces:
            share = self._plan.piece(number, place, value_of(variable))
            free([variable])
            put(variable, share)

    def _reader(self, number: int, version: int, state: Mapping[str, Any] | None) -> Callable[[str], Any]:
        """Return the function that returns an array of a part's state by its name; None if the state does not have it."""
        if state is None or "from" in state:
            kept = self._kept.of(number, version)
            return lambda name: kept.get(name) if name in kept else None
        if "arrays" in state:
            return dict(state["arrays"]).get
        slices = {name: array for arrays in self.taken().values() for name, array in arrays.items()}
        return {name: slices[stored] for name, stored in state["slices"].items()}.get

    def _rebuild(self, seed: int | None) -> None:
        free(self.app.model.weights)
        self.build(seed)

    def _made(self, number: int, order: dict[str, Any], fill: Callable[[int], None]) -> ModelPart:
        """Return the part with its weights, which ``fill`` sets by their numbers. All other weights have no memory."""
        import keras

        model = self.app.model
        if self._part is None:
            self._plan = Plan.at(
                Graph.of(model),
                order["ends"],
                order["batch_size"],
                order["micro_batches"],
                order["within"],
                order["replicas"],
                order["by_rows"],
            )
        mine = self._plan.parts[number].all_weights
        for place in mine:
            fill(place)
        free(one for place, one in enumerate(model.weights) if place not in {*mine})
        if self._part is None:
            self._part = KINDS[keras.backend.backend()](self._plan, number)
            model.optimizer.build(self._part.trained)
            name_all(model.optimizer)
            self._clip, model.optimizer.global_clipnorm = model.optimizer.global_clipnorm, None
            self._position = RunPosition.of(model.optimizer)
        return self._part

    def _optimizer_is(self, known: Mapping[str, Any]) -> None:
        """Set the variables of the optimizer by their paths, if they are known."""
        for variable in self.app.model.optimizer.variables if known else ():
            variable.assign(known[variable.path])

    def _keep(self, part: ModelPart, version: int) -> Fault | None:
        """Keep the state of the part in a file. Return why the weights cannot be used, if they cannot."""
        model, paths = self.app.model, self._plan.optimizer.paths
        found = [(weight_name(place), model.weights[place]) for place in self._plan.parts[part.number].all_weights]
        found += [(optimizer_name(paths.index(one.path)), one) for one in model.optimizer.variables]
        state = State([(name, np.dtype(one.dtype).name, tuple(one.shape)) for name, one in found])
        for name, variable in found:
            value = value_of(variable)
            if name.startswith("weight") and not is_finite(value):
                return fault([value], 1, [value], [variable.path])
            state.put(name, value)
        self._kept.put(part.number, version, state)
        return None

    def _rounds(self, part: ModelPart, task: Task, order: dict[str, Any]) -> dict[str, float]:
        """Train the local epochs of a round. Return the metrics of the last one, if this part has the loss."""
        model, size = self.app.model, task.batch_size
        reseed(model, (task.seed, task.round, task.slot, part.number))
        if self._position is not None and (steps := task.place) is not None:
            self._position.set(steps, task.epochs * -(-len(task.indices) // size))
        part.begin_round()
        stage = self._stage = self._begin(part, order)
        begun = False
        samples: Sequence[int] = order["counts"]
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
                mine, *_ = counts = [min(size, max(0, one - begin)) for one in (len(indices), *samples)]
                batch = next(batches) if mine else ()
                if mine and not begun:
                    part.prepare(batch)
                    begun = True
                end = begin + mine
                seed = (task.seed, task.round, epoch, number, *([task.slot] * (task.slot > 0)))
                stage.train(batch, mine, seed, sum(counts[1:]))
                if mine:
                    self._tell_moved(part, task.first_epoch + epoch, end)
        return scalars(model.get_metrics_result()) if part.is_last else {}

    def _tell_moved(self, part: ModelPart, epoch: int, done: int) -> None:
        """Tell the master now and then how many samples of an epoch are done, if this part has the loss."""
        if part.is_last and (now := time.monotonic()) - self._told >= MOVED_EVERY_S:
            self._told = now
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

    def _results(self, part: ModelPart, metrics: dict[str, float]) -> dict[str, Any]:
        """Return the metrics of a round."""
        model = self.app.model
        names = counted_names(model, metrics) if metrics else []
        return {
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
