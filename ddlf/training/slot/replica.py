"""The role of a worker in a training run: a model that the master calls by a few verbs. Runs in the executor.

Keras is imported, built and trained on the worker's one compute thread, while the event loop still receives weights and
indices. ``parts`` has the state that a slot keeps between its rounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ddlf.algorithms.reading_order import Portion
from ddlf.algorithms.weights import Weights
from ddlf.data.array_cache import ArrayCache
from ddlf.data.parts import place_of, samples_of
from ddlf.data.remote_folder import RemoteFolder
from ddlf.errors import AppError
from ddlf.training.context import App
from ddlf.training.roles.build import fresh_names, ready_model
from ddlf.training.roles.evaluation import beside, counts
from ddlf.training.roles.metrics import scalars
from ddlf.training.roles.precision import gain_of_bfloat16, set_precision
from ddlf.training.slot.app import call, chosen, load_data, run_train
from ddlf.training.slot.feed import Samples, TrainingSamples, in_order
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.part import SlotPart, SlotRound
from ddlf.training.slot.parts import PARTS
from ddlf.training.slot.peer_files import PIECE_BYTES, PeerFiles
from ddlf.training.slot.task import MOST_FILES, KeptStates, Reply, SlotState, Task
from ddlf.training.slot.transfer import read_weights, travelling
from ddlf.worker.methods import concurrent, offered

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

log = logging.getLogger(__name__)

MOVED_EVERY_S = 0.5
"""How often a worker tells how far its round is."""


class Replica:
    """One worker's copy of an app and its model.

    Args:
        worker: Worker that it is on.
        app: App as it came from the master, without data and model.

    Attributes:
        stopping: Set when training is to end at the next batch.
        slots: The states that the rounds of slots left here.
    """

    PARTS: ClassVar[Sequence[type[SlotPart]]] = PARTS
    """The parts of a slot's state."""

    def __init__(self, worker: Worker, app: App) -> None:
        app.worker, app.replica = worker, self
        self.app = app
        self._worker = worker
        self.stopping = False
        self._found: dict[str, str] = {}
        self._samples: Samples = TrainingSamples(app, {}, ArrayCache(), lambda: self.stopping)
        self._task: Task
        self._fed: list[Any] = []  # of each epoch of this round what it was given
        self._told = 0.0  # when it was told how far this round is
        self.slots = KeptStates()
        self._model: TrainableModel
        self._parts: list[SlotPart] = []

    # -- verbs --------------------------------------------------------------------------------------------------------

    async def load(self, wanted: dict[str, str] | None = None) -> dict[str, Any] | None:
        """Give the app its data, then build its model, in the order of the master: ``create_model`` may use the data.

        Args:
            wanted: As ``load_data`` takes it; None when the master does not know it yet.

        Returns:
            What there is now; None when this worker holds data of earlier runs and has to know first which is wanted.
        """
        compute, held = self._worker.compute, self._worker.datasets
        self._worker.tell(what="importing")
        await compute(self.begin)
        if wanted is None and held:
            return None
        self._worker.tell(what="loading")
        data: dict[str, Any] = await compute(self.load_data, wanted or {}, held)
        if data["here"] is not None and (place := place_of(self.app, "train")) is not None:
            place.beside(RemoteFolder(str(place), store=PeerFiles(place, self._worker, asyncio.get_running_loop())))
        self._worker.tell(what="building")
        model: dict[str, Any] = await compute(self.build)
        return data | model

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """Carry one slot through one round: a ``Task`` becomes a ``Reply``, both as they travel."""
        reply: Reply = await self._computed(self.carry, Task.from_message(task))
        return {**(told := reply.to_message()), "update": travelling(told["update"])}

    async def measure(self, task: dict[str, Any]) -> Weights:
        """Moving statistics over the samples of a ``Task``, which comes as it travels, with its weights."""
        found: Weights = await self._computed(self.statistics, Task.from_message(task))
        return found

    async def _computed(self, work: Callable[[Task], Any], task: Task) -> Any:
        """Do it on the compute thread; when this is cancelled, it ends at the next batch."""
        gone: list[bool] = []
        computing = asyncio.ensure_future(self._worker.compute(lambda: None if gone else work(task)))
        try:
            return await asyncio.shield(computing)
        except asyncio.CancelledError:
            gone.append(True)  # the thread may not have begun it
            self._stop()
            await asyncio.wait([computing])
            raise

    @concurrent
    async def give(self, slot: int, number: int, groups: tuple[str, ...]) -> SlotState:
        """Groups of what a round of a slot left here, from 0; also while another slot is trained.

        Raises:
            AppMissing: It is not here, or not any more.
        """
        left = self.slots.left(slot, number)
        return {name: left[name] for name in groups if name in left}

    @concurrent
    async def counts(
        self, there: dict[str, Any], part: str, batch_size: int, begin: int, end: int, content: dict[str, str]
    ) -> dict[str, Any] | None:
        """See ``evaluation.counts``; ``there`` are the weights, or says which of those that are here.

        None if the data here is other data.
        """
        if not self._has(content):
            return None
        if (weights := await self._weights_of(there)) is None:
            return {"why": ""}
        found: dict[str, Any] = await beside(
            self._worker, self.app, partial(counts, self.app, weights, part, batch_size, begin, end)
        )
        return found

    def _has(self, content: dict[str, str]) -> bool:
        """Whether the data here is that with these fingerprints, by name of the attribute."""
        return bool(content) and all(self._found.get(name) == one for name, one in content.items())

    async def _weights_of(self, there: dict[str, Any]) -> Weights | None:
        """The weights that are to be evaluated; None where not all of them can be had."""
        return list(there["weights"])

    @offered
    async def file(self, name: str, begin: int, nbytes: int) -> Any:
        """Some bytes of a partition file that is on a disk of this machine, as an array; None if it is not."""
        place = place_of(self.app, "train")
        return None if place is None else await asyncio.to_thread(place.piece, name, begin, min(nbytes, PIECE_BYTES))

    @concurrent
    async def stop(self) -> None:
        """STOP: end local training at the next batch."""
        self._stop()

    async def close(self) -> None:
        """See ``Role``."""
        self._stop()

    def _stop(self) -> None:
        self.stopping = True
        self._samples.end()

    # -- what they do on the compute thread -------------------------------------------------------------------------

    def begin(self) -> None:
        """Import Keras and set what has to be set before anything is made with it."""
        set_precision(self.app.precision)

    def build(self) -> dict[str, Any]:
        """Create the model and say what it is."""
        with fresh_names():
            call(self.app.create_model)
        ready_model(self.app)
        self.use(model := KerasModel(self.app))
        return {
            **model.facts(),
            "text": getattr(getattr(self.app.model, "notation", None), "digest", ""),
            "gain": gain_of_bfloat16() if self.app.precision == "auto" and self.app.worker.id == 1 else 0.0,
        }

    def use(self, model: TrainableModel, samples: Samples | None = None) -> None:
        """Train a model from now on.

        Args:
            model: The model.
            samples: Its training samples; None for those of the app.
        """
        self._model = model
        self._parts = [part(self.app, model) for part in self.PARTS]
        self._samples = samples or self._samples

    def load_data(self, wanted: dict[str, str], held: ArrayCache) -> dict[str, Any]:
        """Give the app its data: see ``app.load_data``."""
        self._found, facts = load_data(self.app, wanted, held)
        self._samples = TrainingSamples(self.app, self._found, held, lambda: self.stopping)
        return facts

    def carry(self, task: Task) -> Reply:
        """Carry one slot through one round.

        Args:
            task: With its weights as they came.

        Returns:
            The reply, with the update as it is to travel.

        Raises:
            AppMissing: The slot's last round did not leave its state here.
        """
        begin = time.perf_counter()
        round = self._begin_round(task)
        update, metrics = self._trained(round)
        left = self._end_round(round, update)
        wait_data_s, files = self._samples.told()
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
            state={name: left[name] for name in task.back},
            entries=self._model.entries(task),
        )

    def _begin_round(self, task: Task) -> SlotRound:
        """Begin a slot's round: each part receives the arrays that it left in the slot's round before."""
        self.stopping, self._task, self._fed = False, task, []
        self._told = time.monotonic()
        round, state = SlotRound(task, self._model), self.slots.begin(task)
        for part in self._parts:
            round.begun = part.begin(round, round.begun, state.get(part.name))
        return round

    def _trained(self, round: SlotRound) -> tuple[Weights, dict[str, float]]:
        """Train; returns the update and its metrics."""
        task, begun = round.task, round.begun
        if self._model.exchanges_gradients:
            return self._model.gradient(self._samples.batch(task), begun)
        if not round.trains:
            return [np.zeros_like(w) for w in begun], {}
        self.app.indices = task.indices
        return run_train(self.app, begun, task.epochs, task.batch_size)

    def _end_round(self, round: SlotRound, update: Weights) -> SlotState:
        """End a slot's round; returns the arrays that each part leaves for the next one."""
        round.stopped, state = self.stopping, SlotState()
        for part in reversed(self._parts):
            update, left = part.end(round, update)
            state[part.name] = left or []
        self.slots.leave(round.task, state)
        return state

    def statistics(self, task: Task) -> Weights:
        """Compute the moving statistics of a task's weights over its samples: see ``roles/statistics.py``."""
        self.stopping = False
        batches = (batch for batch in self._samples.batches(task) if not self.stopping)
        return self._model.statistics(task, read_weights(task.weights, None, self._model.like), batches)

    def _otherwise_fed(self, task: Task) -> np.ndarray[Any, Any] | int | None:
        """Which samples ``fit`` was given in this round, once for each epoch; None if it was the partition in each, or
        ``fit`` did not run."""
        as_given = len(self._fed) == task.epochs and all(indices is task.indices for indices in self._fed)
        if as_given or not self._fed:
            return None
        if isinstance(task.indices, Portion):
            return len(self._fed)
        return np.concatenate([np.asarray(indices, np.int64).reshape(-1) for indices in self._fed])

    # -- what the default ``IApp.train`` is made of -----------------------------------------------------------------

    def fit(self, epochs: int, batch_size: int, callbacks: Iterable[Any] = ()) -> dict[str, float]:
        """Run ``Model.fit`` over this round's partition, with the weights of its samples or classes if there are any.

        The first local epoch goes through it in the order that came, each later one in an own order made from the
        task's seed. Epochs are counted over the whole run, so that a ``LearningRateScheduler`` does what it would do in
        one ``fit``.

        Returns:
            Keras's metrics of the last epoch.
        """
        indices = self.app.indices
        if indices is not self._task.indices:
            if isinstance(self._task.indices, Portion):
                raise AppError(
                    "train has set self.indices, but train_data is read in the order that every slot's part has",
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
            if (now := time.monotonic()) - self._told >= MOVED_EVERY_S:
                self._told = now
                self._tell(epoch, min((batch + 1) * batch_size, len(indices)), logs)
            return self.stopping

        feed.set_order(indices)  # Keras looks at the data before the first epoch begins
        numbers, begun = range(first, first + epochs), self._fit_begins()
        model, data = self._model, feed.dataset
        return self._samples.during(lambda: model.fit(data, numbers, callbacks, begin_epoch, end_batch, begun))

    def _fit_begins(self) -> Callable[[], None]:
        """Prepare a call of ``fit``. The returned function is called after ``on_train_begin`` of all callbacks."""
        begun = [then for part in self._parts if (then := part.fit_begins()) is not None]

        def all_begun() -> None:
            for then in begun:
                then()

        return all_begun

    def _tell(self, epoch: int, samples: int, logs: Any) -> None:
        """Tell the master how far this round is.

        Args:
            epoch: Number of the local epoch, from 0.
            samples: How many of it are done.
            logs: Keras's metrics so far.
        """
        done = sum(map(len, self._fed[:-1])) + samples
        total = max(done, self._task.epochs * len(self._task.indices))
        loss = scalars(logs or {}).get("loss")
        self._worker.tell(what="training", done=done, total=total, epoch=epoch + 1, loss=loss)

    def order(self, indices: Any, epoch: int) -> Any:
        """The order of one local epoch, the same whichever worker carries the slot."""
        if epoch == 0:
            return indices
        task = self._task
        return in_order(indices, (task.seed, task.round, task.slot, epoch))

    @property
    def round(self) -> int:
        """Which round this is, from 1."""
        return self._task.round + 1
