"""The policy of a run's training data: all nodes have the same data, or each worker has its own.

Runs on master and workers. ``data_of`` returns the policy of an app. ``run_context.data`` has the policy of the run. It
answers three questions for all other code: the number of samples, the worker that may train a slot, and the facts that
identify the data.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.algorithms.partition import Indices, shuffled
from ddlf.algorithms.partitioners import Owners
from ddlf.data import app_data
from ddlf.data.datasets import not_finite
from ddlf.data.trees import leaves, tree_map
from ddlf.errors import AppError, CheckpointMismatch, ConfigError, DatasetError, DatasetMismatch
from ddlf.rpc.iworker import awaited
from ddlf.rpc.tokens import automatic_token
from ddlf.training.context import App
from ddlf.training.progress import FileLedger, SampleLedger, Span
from ddlf.training.samples import labels
from ddlf.training.samples.partitions import Partitions, owners_of, partitions_of
from ddlf.training.samples.shares import Share, ShareLedger
from ddlf.training.slot.task import Reply
from ddlf.training.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDescription:
    """A worker's description of its training data for the master.

    Args:
        fingerprint: Fingerprint of the data.
        samples: Number of samples.
        shape: Shape of the first input array.
        dtype: Type of the first input array.
        evaluated: With private data, the number of samples of each other part, such as ``"val"``.
        rows: With private data, the arrays of a batch without rows, for their shapes and types.
    """

    fingerprint: str
    samples: int
    shape: Sequence[int]
    dtype: str
    evaluated: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[Any] = ()


Opened = Mapping[int, DataDescription]
"""The data of each opened worker, by its number."""

LIKE_ROWS = 2
"""Rows of the made-up samples. With them the master builds the metrics of its model."""
OWN_TEST = "load_test_dataset"
"""The method of an app with private data that loads test data on the master."""


class CommonData:
    """All nodes have the same training data, so any worker can train any slot.

    Attributes:
        samples: n, the number of samples that slots share.
        homes: The only worker of each slot, by slot; None if any worker can train any slot.
        content: The fingerprint of the training data that all nodes have; "" if they have none in common.
        hides_metrics: Whether workers report no metrics, because updates have noise or masks and metrics have neither.
    """

    homes: dict[int, int] | None = None
    hides_metrics = False

    def __init__(self) -> None:
        self.samples = 0
        self.content = ""

    # -- on a worker --------------------------------------------------------------------------------------------------

    def describe(self, app: App, fingerprints: dict[str, str]) -> DataDescription:
        """Describe a worker's data to the master, which compares machines.

        Args:
            app: The app, with its data.
            fingerprints: The fingerprint of each attribute with data.
        """
        return DataDescription(fingerprint=app_data.content(fingerprints), **app_data.rows_of(app))

    def check_model(self, app: App) -> None:
        """Compare a worker's data with its model, which is built.

        Raises:
            DatasetError: They do not fit together.
        """

    def fed(self, epochs: Sequence[Any]) -> Any:
        """Return the facts for the master about the samples that ``fit`` received in a round, if they differ from the task.

        Args:
            epochs: The numbers of the samples in each local epoch.
        """
        return np.concatenate([np.asarray(indices, np.int64).reshape(-1) for indices in epochs])

    # -- on the master ------------------------------------------------------------------------------------------------

    async def load(self, app: App) -> None:
        """Load the data of the master."""
        await awaited(app.load_dataset())

    def is_loaded(self, app: App) -> bool:
        """Return whether the master has its data already."""
        return hasattr(app, "x_train") or hasattr(app, "train_data")

    def compare(self, master_content: str, opened: Opened) -> None:
        """Compare the data of all workers that are ready, before training begins.

        Args:
            master_content: The fingerprint of the master's training data; "" if it has none.
            opened: The data of each worker.

        Raises:
            DatasetMismatch: The data of two nodes do not fit together. The run ends before its training.
        """
        _check_equal(master_content, opened)
        first = next(iter(opened.values()))
        self.samples, self.content = first.samples, first.fingerprint

    def accept(self, worker: int, description: DataDescription) -> None:
        """Compare the data of a worker that has joined or come back while the run trains.

        Raises:
            DatasetMismatch: It has other data, so it cannot take part.
        """
        _check_equal(self.content, {worker: description})

    def shape(self, opened: Opened) -> tuple[int, ...]:
        """Return the shape of a sample in the first input array of the training data."""
        return tuple(next(iter(opened.values())).shape[1:])

    def has_data(self, app: App, part: str) -> bool:
        """Return whether a run can evaluate a part of the data: ``"val"`` or ``"test"``."""
        return app_data.has_data(app, part)

    def is_elsewhere(self, app: App, part: str) -> bool:
        """Return whether workers have a part of the data, and the master does not."""
        return self.has_data(app, part) and not app_data.has_data(app, part)

    @property
    def evaluated_in(self) -> str:
        """The method of an app that loads the validation and test data that a run evaluates."""
        return OWN_TEST if self.hides_metrics else "load_dataset"

    def example_samples(self, app: App) -> tuple[Any, ...] | None:
        """Return made-up samples with the shapes and types of the training data; None if the master has real ones."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return facts about the data that must be the same when a training continues."""
        return {"samples": self.samples, "data": self.content}

    def slots(self, usual: int) -> int:
        """Return K, the number of slots of a new run, from the number that its settings and workers give."""
        return usual

    def ledger(self, files: Any) -> Any:
        """Return the ledger of a new run."""
        return SampleLedger(self.samples) if files is None else FileLedger(self.samples)

    def continue_with(self, ledger: Any) -> None:
        """Continue a training with the data that its ledger has counted."""

    def owners(self, app: App, spec: RunSpec, slots: int) -> Owners | None:
        """Return the slot of each sample in the whole run; None if each round divides the samples again."""
        return owners_of(app, spec.data.partition, self.samples, slots, spec.seed)

    def partitions(self, seed: int, owners: Owners | None, files: Any, shuffle: str) -> Partitions:
        """Return the object that chooses each slot's samples in a round. ``partitions_of`` describes the arguments."""
        return partitions_of(self.samples, seed, owners, files, shuffle)

    def numbers(self) -> int | None:
        """Return below which number the samples are that a worker reports; None if it only reports how many."""
        return self.samples

    def count(self, ledger: Any, reply: Reply, *skipped: Sequence[int]) -> None:
        """Count the samples of a reply, whose update was merged, in the ledger."""
        ledger.add(reply.task.indices, reply.task.epochs, reply.fed, *skipped)

    def leave_out(self, ledger: Any, slot: int, number: int) -> None:
        """Note in the ledger that a round, numbered from 0, was merged without a slot."""


class PrivateData(CommonData):
    """Each worker has its own training data, which only its own slot trains on.

    The master knows how many samples a worker has, and their shapes and types. It also knows a fingerprint that the
    worker has made with a random key, which stays there. So the master recognises a worker that comes back with the
    same data, and nobody can guess data and compare.

    Args:
        hides_metrics: Whether updates have noise or masks. Then workers evaluate nothing, too.

    Attributes:
        homes: The worker of each slot, by slot, without slots whose worker has not come yet.
    """

    homes: dict[int, int]

    def __init__(self, *, hides_metrics: bool = False) -> None:
        super().__init__()
        self.hides_metrics = hides_metrics
        self.homes = {}
        self._shares: list[Share] = []  # of each slot
        self._evaluated: dict[str, dict[int, int]] = {}  # part -> worker -> samples that it evaluates
        self._rows: Any = None  # arrays of no rows, with the shapes and types of all workers
        self._opened: dict[int, Share] = {}

    # -- on a worker --------------------------------------------------------------------------------------------------

    def describe(self, app: App, fingerprints: dict[str, str]) -> DataDescription:
        if app_data.data_set_of(app, "train") is not None:
            raise DatasetError(
                "private=True is for arrays, and load_dataset has set train_data",
                hint="set self.x_train and self.y_train, for instance self.x_train = self.train_data['x']",
            )
        for name in app_data.NAMES:
            if getattr(app, name, None) is not None and (bad := not_finite(getattr(app, name))):
                raise DatasetError(
                    f"{bad} of {name} are NaN or infinite, which would ruin the model of all workers",
                    hint="repair or leave out these samples in load_dataset",
                )
        evaluation_samples = {
            part: app_data.samples_of(app, part) for part in ("val", "test") if app_data.has_data(app, part)
        }
        rows = tree_map(lambda array: np.zeros((0, *array.shape[1:]), array.dtype), app_data.batches(app, "train"))
        return DataDescription(
            fingerprint=_keyed(app_data.content(fingerprints)),
            evaluated=evaluation_samples,
            rows=list(rows),
            **app_data.rows_of(app),
        )

    def check_model(self, app: App) -> None:
        for part in ("train", "val", "test"):
            if sentence := labels.beyond_outputs(app, part):  # the error of a framework could list labels
                raise DatasetError(sentence, hint="number the classes in load_dataset from 0, on all workers alike")
        for part in ("val", "test"):  # the other workers have trained a round when they are evaluated
            if app_data.has_data(app, part) and not _accepts(app.model, x := getattr(app, f"x_{part}")):
                shapes = ", ".join(str(array.shape[1:]) for _, array in leaves(x, ""))
                raise DatasetError(
                    f"the model does not take the samples of x_{part}, whose shape is {shapes}",
                    hint="let load_dataset give them the form of x_train",
                )

    def fed(self, epochs: Sequence[Any]) -> Any:
        return sum(map(len, epochs))  # which samples a user's train chooses may tell about their labels

    # -- on the master ------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> Sequence[Share]:
        """The data of each slot, by slot."""
        return self._shares

    async def load(self, app: App) -> None:
        await awaited(app.load_test_dataset())
        self.is_loaded(app)
        app_data.check_part(app, "val")  # the test data is checked later, when there is a model

    def is_loaded(self, app: App) -> bool:
        for name in ("x_train", "train_data"):
            if getattr(app, name, None) is not None:
                raise AppError(
                    f"private=True, but the master has {name}",
                    hint=f"set it in load_dataset, which only workers call; {OWN_TEST} may set x_test and y_test here",
                )
        return app_data.has_data(app, "test") or app_data.has_data(app, "val")

    def compare(self, master_content: str, opened: Opened) -> None:
        if len(opened) < 2:
            raise DatasetMismatch(
                f"private=True with {len(opened)} worker: the new weights would show what that worker alone has learned",
                hint="train with two or more workers, each with its own data",
            )
        kinds = {worker: _kind(description.rows) for worker, description in opened.items()}
        if len(set(kinds.values())) > 1:
            table = "\n".join(f"  worker {worker}: {kind}" for worker, kind in kinds.items())
            raise DatasetMismatch(
                f"the samples of the workers differ in their shapes or types, so training was not started:\n{table}\n",
                hint="let load_dataset make samples of one form on every worker; labels of all classes need one width",
            )
        self._rows = next(iter(opened.values())).rows
        self._opened = {worker: _share(description) for worker, description in opened.items()}
        for worker, description in opened.items():
            self._note_parts(worker, description)
        self._take(list(self._opened.values()), dict(enumerate(self._opened)))

    def accept(self, worker: int, description: DataDescription) -> None:
        share = _share(description)
        slots = [slot for slot, slot_share in enumerate(self._shares) if slot_share.name == share.name]
        own_slots = [slot for slot in slots if self.homes.get(slot) == worker] or slots[:1]
        if not own_slots:
            slot = next((slot for slot, home in self.homes.items() if home == worker), None)
            before = "" if slot is None else f" than before, when it had {self._shares[slot].samples:,} samples"
            raise DatasetMismatch(
                f"worker {worker} has other private data{before}: this run has no slot for its {share.samples:,} samples",
                hint="start a new training to include it; a worker that loses its key also counts as another one",
            )
        self.homes[own_slots[0]] = worker
        self._note_parts(worker, description)

    def _note_parts(self, worker: int, description: DataDescription) -> None:
        for part, samples in () if self.hides_metrics else description.evaluated.items():
            self._evaluated.setdefault(part, {})[worker] = samples

    def _take(self, shares: Sequence[Share], homes: dict[int, int]) -> None:
        self._shares = list(shares)
        self.homes.clear()
        self.homes.update(homes)
        self.samples = sum(share.samples for share in shares)

    def evaluates(self, part: str) -> Mapping[int, int]:
        """Return how many samples of a part, such as ``"val"``, each worker has, by worker."""
        return self._evaluated.get(part, {})

    def has_data(self, app: App, part: str) -> bool:
        return super().has_data(app, part) or bool(self.evaluates(part))

    def example_samples(self, app: App) -> tuple[Any, ...] | None:
        if self._rows is None:
            return None
        return tuple(tree_map(lambda array: np.zeros((LIKE_ROWS, *array.shape[1:]), array.dtype), tuple(self._rows)))

    def facts(self) -> dict[str, Any]:
        return {"data": "private"}  # the ledger has the keyed fingerprint of each worker's data

    def slots(self, usual: int) -> int:
        return len(self._shares)

    def ledger(self, files: Any) -> Any:
        return ShareLedger(self._shares)

    def continue_with(self, ledger: Any) -> None:
        if not isinstance(ledger, ShareLedger):
            raise CheckpointMismatch("the training before had no private data", hint="start again in another folder")
        unmatched, homes = dict(self._opened), dict[int, int]()
        for slot, share in enumerate(ledger.shares):
            worker = next((worker for worker, opened in unmatched.items() if opened.name == share.name), None)
            if worker is not None:
                homes[slot] = worker
                del unmatched[worker]
        if unmatched:
            raise CheckpointMismatch(
                f"worker {next(iter(unmatched))} has other private data than each worker of the training before",
                hint="give it the data that it had, or start again in another folder",
            )
        self._take(ledger.shares, homes)

    def owners(self, app: App, spec: RunSpec, slots: int) -> Owners | None:
        return np.repeat(np.arange(slots), [share.samples for share in self._shares])

    def partitions(self, seed: int, owners: Owners | None, files: Any, shuffle: str) -> Partitions:
        return OwnPartitions([share.samples for share in self._shares], seed)

    def numbers(self) -> int | None:
        return None

    def count(self, ledger: Any, reply: Reply, *skipped: Sequence[int]) -> None:
        epochs = reply.task.epochs
        fed = len(reply.task.indices) * epochs if reply.fed is None else reply.fed
        ledger.add(reply.slot, epochs, fed)

    def leave_out(self, ledger: Any, slot: int, number: int) -> None:
        ledger.leave_out(slot, number)


class OwnPartitions:
    """Orders the samples of each slot in each round, if each worker has its own samples, numbered from 0.

    Args:
        sizes: The samples of each slot.
        seed: Seed of the orders.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes, self._seed = sizes, seed

    async def order(self, number: int) -> None:
        """Do nothing: each slot has its own order."""

    async def of_round(
        self, span: Span, slots: int, speeds: Sequence[float | None] = (), batch_size: int = 1
    ) -> list[Indices]:
        """Return all samples of each slot, in the order of a round. ``Partitions.of_round`` describes the arguments."""
        return [shuffled(samples, self._seed, span.order) for samples in self._sizes]


def data_of(app: App) -> CommonData:
    """Return the policy of an app's data, by its setting ``private``."""
    if not getattr(app, "private", False):
        return CommonData()
    hides = getattr(app, "noise_multiplier", None) is not None or getattr(app, "secure_aggregation", False)
    return PrivateData(hides_metrics=bool(hides))


def check_common(app: App, purpose: str) -> None:
    """Raise an error for an app with private data, before code that needs common data.

    Args:
        app: The user's ``IApp``.
        purpose: The use that the code has for common data, as a sentence.

    Raises:
        ConfigError: The app's data is private.
    """
    if data_of(app).homes is not None:
        raise ConfigError(
            f"private=True: {purpose}", hint="set private=False in a copy of the app with data for everybody"
        )


def _accepts(model: Any, x: Any) -> bool:
    """Return whether a model computes outputs for the first sample of ``x``."""
    try:
        model(tree_map(lambda array: array[:1], x), training=False)
    except Exception:  # each framework has its own; its text could have values
        return False
    return True


def _keyed(fingerprint: str) -> str:
    """Return a fingerprint under this user's random key, which never leaves this machine."""
    return hmac.new(automatic_token("data key").all[0], fingerprint.encode(), "sha256").hexdigest()[:32]


def _share(description: DataDescription) -> Share:
    return Share(name=description.fingerprint, samples=description.samples)


def _kind(rows: Sequence[Any]) -> str:
    """Return the shapes and types of the arrays of a sample, as text."""
    named = [named_array for letter, tree in zip("xyw", rows, strict=False) for named_array in leaves(tree, letter)]
    return ", ".join(f"{name} {array.shape[1:]} {array.dtype}" for name, array in named)


def _check_equal(master_content: str, opened: Opened) -> None:
    contents = {description.fingerprint for description in opened.values()} | (
        {master_content} if master_content else set()
    )
    if len(contents) == 1:
        return
    rows = [("master", master_content, "", "", "")] if master_content else []
    rows += [
        (f"worker {n}", data.fingerprint, f"{data.samples:,}", str(tuple(data.shape)), data.dtype)
        for n, data in opened.items()
    ]
    table = "\n".join(
        f"  {node:<10} {content:<17} {n:>9} {shape:<18} {dtype}" for node, content, n, shape, dtype in rows
    )
    raise DatasetMismatch(
        f"the training data differs between nodes, so training was not started:\n  {'node':<10} {'content':<17} "
        f"{'samples':>9} {'shape':<18} dtype\n{table}\n",
        hint="give every node the same files, and load them without shuffling by chance",
    )
