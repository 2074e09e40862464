"""Whether an app with one slot does what plain Keras does: same data, order and seeds. Runs on the master, which trains beside its one worker.

Both sides begin with the same weights, a fresh optimizer and the same seeds, and train on the first samples of the first round's order: the worker by
the app's ``train``, this side by ``Model.fit`` on arrays. Their updates are compared. Where they differ, the first batch at which they do is looked
for by halves, both sides beginning anew each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.partition import shuffled
from ddlf.algorithms.reading_order import Portion, Samples
from ddlf.algorithms.weights import Weights, difference, is_float
from ddlf.data.parts import batches as data_of
from ddlf.data.parts import content, contents, has_own_train, place_of, rows
from ddlf.data.stream import Stream, usual_memory
from ddlf.data.trees import tree_map
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.crew import Crew
from ddlf.training.early import check_app, check_backend
from ddlf.training.exchange import Exchange, WeightsOut
from ddlf.training.opening import crew_of
from ddlf.training.refusals import check_spec
from ddlf.training.roles import have_keras
from ddlf.training.roles.build import describe_weights
from ddlf.training.roles.describe import describe_optimizer
from ddlf.training.roles.optimizer_state import no_final_averages
from ddlf.training.roles.precision import set_precision
from ddlf.training.roles.randomness import keeps_a_seed
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.task import Reply, Task
from ddlf.training.spec import RunSpec, spec_of
from ddlf.training.states import SlotStates

Update = Callable[[int], Awaitable[Weights]]
"""Trains anew on so many batches, and returns the update."""
ROUNDING = 1e-4
"""Share of a tensor's largest change by which two changes may differ and still be the same sums in another order."""
NOTHING = 1e-7
"""A change that is no more than a float32 of about 1 can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """Where two trainings first differ.

    Args:
        batch: Number of the batch, from 1.
        tensor: Path of the first weight that differs.
        place: Indices of the number that differs most, of those of this weight.
        expected: What it is with plain Keras, after this batch.
        found: What it is with the app.
        tensors: How many weights differ.
        most: The largest difference of all numbers.
        cause: What is likely to be why.
    """

    batch: int
    tensor: str
    place: tuple[int, ...]
    expected: float
    found: float
    tensors: int
    most: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What came of a comparison.

    Args:
        batches: How many batches both have trained on.
        batch_size: Samples in each; the last may have fewer.
        same_bits: Whether all weights are the same bits; if not, and nothing differs, they are equal to rounding.
        most: The largest difference of all numbers.
        differs: Where they first differ; None if they do not.
    """

    batches: int
    batch_size: int
    same_bits: bool
    most: float
    differs: Differs | None = None


def _first(order: Samples, samples: int) -> Samples:
    return order[:samples] if not isinstance(order, Portion) else replace(order, end=min(samples, len(order)))


async def compare(app: App, batches: int) -> Compared:
    """Train an app with one slot, and plain Keras beside it.

    Args:
        app: The user's ``IApp``, with a cluster of one worker.
        batches: How many batches to train on; fewer if there are fewer.

    Raises:
        ConfigError: A setting cannot be used.
        AppError: The app lacks something.
        RemoteError: The app raised on the worker.
    """
    # As in a run, but for what is of several slots, and of folders: one slot trains here, and nothing is written.
    await app.run_context.check_written()
    check_app(app)
    spec = spec_of(app)
    check_spec(spec)
    check_backend()
    if spec.exchange.one_step:
        raise ConfigError(
            "local training is compared, and with exchange='gradient' there is none",
            hint="compare with exchange='star' (-p exchange=star), which has the same model, data and seeds",
        )
    await have_keras()
    set_precision(app.precision)
    with ThreadPoolExecutor(1) as thread:  # what Keras keeps by thread stays the same
        async with crew_of(app, spec.seed, backups=False) as (crew, samples):
            both = Both(app, crew, samples, spec, thread)
            last = min(batches, -(-samples // spec.data.batch_size))
            return await both.compared(last)


class Both:
    """One app on both sides.

    Args:
        app: The app, with data and model.
        crew: Its one worker.
        samples: n.
        spec: What the run is told.
        thread: Where plain Keras trains.
    """

    def __init__(self, app: App, crew: Crew, samples: int, spec: RunSpec, thread: ThreadPoolExecutor):
        self._app = app
        self._crew = crew
        self._thread = thread
        self._start: Weights = app.model.get_weights()
        self._names = [row[0] for row in describe_weights(app.model)]
        self._size, self._seed, self._epochs = (spec.data.batch_size, spec.seed, spec.epochs)
        self._order: Samples = shuffled(samples, self._seed, 0)
        if place_of(app, "train") is not None:  # files as they lie
            self._order = Portion(shuffle="none", seed=self._seed, epoch=0, slots=1, start=0, stop=samples)
        self._model = KerasModel(app)
        codec = CODEC.read("float32")
        states = SlotStates(app.run_context.name, crew, [{}], {})
        weights_out = WeightsOut("float32", [True] * len(self._start))
        self._exchange = Exchange(app.run_context.name, samples, codec.name, weights_out, states)
        self._last: Reply | None = None

    async def compared(self, batches: int) -> Compared:
        """Compare what comes of so many batches, and look for the first that differs."""
        expected, found = await self.plain(batches), await self.carried(batches)
        compared = Compared(
            batches=batches,
            batch_size=self._size,
            same_bits=all(one.tobytes() == other.tobytes() for one, other in zip(expected, found, strict=True)),
            most=max(map(_most, expected, found), default=0.0),
        )
        if not differing(expected, found):
            return compared
        batch = await first_batch(self.plain, self.carried, batches)
        expected, found = await self.plain(batch), await self.carried(batch)
        if not (places := differing(expected, found)):  # it was other numbers the second time
            places, batch = [0], batches
        first = places[0]
        apart = np.nan_to_num(np.abs(expected[first] - found[first]), nan=np.inf)
        place = tuple(int(number) for number in np.unravel_index(int(np.argmax(apart)), apart.shape))
        differs = Differs(
            batch=batch,
            tensor=self._names[first],
            place=place,
            expected=float(self._start[first][place] - expected[first][place]),
            found=float(self._start[first][place] - found[first][place]),
            tensors=len(places),
            most=max(map(_most, expected, found)),
            cause=await self._cause(batch, expected, found),
        )
        return replace(compared, differs=differs)

    async def plain(self, batches: int) -> Weights:
        """The update of plain Keras after so many batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._fit, self._task(batches))

    async def carried(self, batches: int) -> Weights:
        """The update of the app on its worker after so many batches."""
        task = self._task(batches)
        self._last = await self._crew.carry(0, 0, partial(self._exchange.send, lambda: task))
        update: Weights = self._last.update
        return update

    def _task(self, batches: int) -> Task:
        return Task(
            slot=0,
            round=0,
            slots=1,
            first_epoch=0,
            epochs=1,
            batch_size=self._size,
            seed=self._seed,
            indices=_first(self._order, batches * self._size),
            weights=self._start,
            version=0,
            steps=(0, batches, self._epochs * -(-len(self._order) // self._size), self._epochs),
        )

    def _fit(self, task: Task) -> Weights:
        model = self._app.model
        model.set_weights(self._start)
        self._model.begin(task, None)
        data = self._data_of(task.indices)
        given = dict(zip(("x", "y", "sample_weight"), data, strict=False))
        callbacks = list(self._app.worker_callbacks)
        with no_final_averages(model):  # on the worker a round is not the end of training, either
            model.fit(**given, batch_size=task.batch_size, shuffle=False, verbose=0, callbacks=callbacks)
        return difference(self._start, model.get_weights())

    def _data_of(self, indices: Samples) -> tuple[Any, ...]:
        """Samples as arrays."""
        if not isinstance(indices, Portion):
            return tuple(tree_map(lambda array: array[indices], data_of(self._app, "train")))
        place = place_of(self._app, "train")
        assert place is not None
        chunks = list(Stream(place, indices, self._size, usual_memory()))
        return rows(self._app, "train", {name: np.concatenate([chunk[name] for chunk in chunks]) for name in place})

    async def _cause(self, batch: int, expected: Weights, found: Weights) -> str:
        """What is likely to be why they differ."""
        app, name = self._app, type(self._app).__name__
        if differing(expected, await self.plain(batch)):
            return (
                "plain Keras does not repeat itself here: something in the model draws numbers or counts without a seed of Keras's, "
                "or the backend sums in any order (tf.config.experimental.enable_op_determinism() ends that)"
            )
        if differing(found, await self.carried(batch)):
            return f"{name} does not repeat itself on the worker: it keeps something from before, or draws numbers without a seed of its own"
        mine, theirs = describe_optimizer(app.model.optimizer), app.run_context.optimizer
        if other := [fact for fact in {**mine, **theirs} if mine.get(fact) != theirs.get(fact)]:
            fact = other[0]
            return (
                f"create_model makes another optimizer on the worker ({fact}: {theirs.get(fact)!r}) than here ({mine.get(fact)!r}): "
                "it uses something that is not the same there, such as a global that was changed"
            )
        if content(contents(app)) != app.run_context.content:
            return "create_model changes the training data after it was loaded: do that in load_dataset"
        assert self._last is not None
        if self._last.fed is not None:
            return (
                f"{name}.train trains on other samples than self.indices had, or in more epochs than it was asked for"
            )
        if has_own_train(app):
            return f"{name}.train is your own, and does something else than fit"
        if keeps_a_seed(app.model):
            return "a layer or the loss draws from tf.random, whose seed is compiled in: use keras.random with a seed generator"
        return (
            "both began with the same weights, samples and seeds: create_model or a layer uses something that is not the same in both "
            "processes, such as a global that was changed, a file, or the environment"
        )


def differing(expected: Weights, found: Weights) -> list[int]:
    """Places of the tensors in which two updates differ by more than rounding."""
    return [place for place, (one, other) in enumerate(zip(expected, found, strict=True)) if not _is_near(one, other)]


async def first_batch(expected: Update, found: Update, last: int) -> int:
    """The first number of batches after which two trainings differ, by halves.

    Args:
        expected: Trains anew on so many batches; returns the update.
        found: The other one.
        last: A number of batches after which they differ. Once they do they go on to.
    """
    alike = 0
    while last - alike > 1:
        middle = (alike + last) // 2
        if differing(await expected(middle), await found(middle)):
            last = middle
        else:
            alike = middle
    return last


def _is_near(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if not is_float(one):
        return np.array_equal(one, other)
    wide = np.asarray(one, np.float64), np.asarray(other, np.float64)
    largest = np.max(np.abs(wide[0]), initial=0.0, where=np.isfinite(wide[0]))
    return np.allclose(*wide, rtol=0.0, atol=ROUNDING * largest + NOTHING, equal_nan=True)


def _most(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest difference of two arrays; infinite where only one is a number."""
    if not one.size:
        return 0.0
    same = (one == other) | ((one != one) & (other != other))
    apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return float(np.max(np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf))))
