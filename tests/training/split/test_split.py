"""Tests of models in parts on real workers."""

import numpy as np
import pytest

import ddlf.data
from ddlf import Cluster
from ddlf.algorithms.partition import shuffled
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.errors import BadUpdate, ClusterTooSmall
from ddlf.events import Committed, PartTrained, SlotStarted, Warned
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.slot.variables import is_made
from tests.training.models import Blobs, app, blobs, distance, equal
from tests.training.split.together import trained_plain
from tests.training.test_failures import kill_executor
from tests.training.test_resume import Interrupted, stop_after

pytestmark = pytest.mark.asyncio(loop_scope="session")


def clipped():
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            layers.Dropout(0.3),
            layers.Dense(4, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


class Cut(Blobs):
    """Trains on 203 samples in batches of 32, so the last batch of an epoch has 11."""

    split = "stages:2"
    micro_batches = 4
    batch_size = 32

    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = blobs(40, seed=2)

    async def create_model(self):
        self.model = clipped()


def lowering():
    """Return a callback that halves the learning rate after two epochs without a better loss."""
    import keras

    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0, min_lr=0.0)


class InFiles(Cut):
    folder = ""

    async def load_dataset(self):
        await super().load_dataset()
        del self.x_test, self.y_test
        self.test_data = ddlf.data.open(self.folder)


class WithNaN(Cut):
    async def load_dataset(self):
        x, y = blobs(self.samples)
        self.x_train, self.y_train = np.where(np.arange(len(x))[:, None] == 7, np.float32("nan"), x), y


@pytest.mark.slow
async def test_two_workers_take_the_steps_of_one_process(two_workers, tmp_path):
    trained = app(two_workers, Cut)
    await trained.train_model()
    x, y = blobs(203)
    batches, seeds = [], []
    for epoch in range(2):
        order = shuffled(203, 0, epoch)
        for number, begin in enumerate(range(0, 203, 32)):
            rows = order[begin : begin + 32]
            batches.append((x[rows], y[rows]))
            seeds.append((0, epoch, 0, number))
    weights, metrics = trained_plain(clipped, batches, 4, first=0, seeds=seeds, epoch=7)
    assert distance(trained.model.get_weights(), weights) < 1e-6
    last_metrics = trained.history[-1].metrics
    assert {name: last_metrics[name] for name in metrics} == pytest.approx(metrics, rel=1e-6)
    assert last_metrics["val_loss"] > 0
    assert trained.ledger.is_exact(2)
    await trained.save_model(tmp_path / "whole.keras")
    import keras

    plain = keras.models.load_model(tmp_path / "whole.keras", compile=False)
    assert np.array_equal(plain.predict(x, verbose=0), trained.model.predict(x, verbose=0))


class Loaded(Cut):
    """Sets its weights, and records whether the master's model has values, without reading them."""

    evaluate_every = 1

    async def create_model(self):
        self.model = clipped()
        self.model.set_weights([np.full(w.shape, 0.01, w.dtype) for w in self.model.get_weights()])

    def on_round(self, record):
        self.were_built.append(any(map(is_made, vars(self)["model"].weights)))


@pytest.mark.slow
async def test_the_master_has_no_weights_before_the_end_and_parts_evaluate_like_one_process(two_workers):
    trained, warnings = app(two_workers, Loaded, were_built=[]), []
    trained.subscribe(lambda event: warnings.append(event.why) if isinstance(event, Warned) else None)
    await trained.train_model()
    assert trained.were_built == [False, True]
    assert [reason for reason in warnings if "reads or changes weights" in reason] == warnings
    assert len(warnings) == 1
    short = app(two_workers, Loaded, were_built=[], master_epochs=1, split="within:2")
    await short.train_model()
    for by_parts, by_master in zip(of_evaluations(trained), of_evaluations(short), strict=False):
        assert by_parts == pytest.approx(by_master, rel=1e-5)


def of_evaluations(trained):
    return [
        {**record.test, **{name: value for name, value in record.metrics.items() if "val_" in name}}
        for record in trained.history
    ]


@pytest.mark.slow
async def test_losses_and_a_resume_with_another_cut_change_no_bit(two_workers, tmp_path):
    options = dict(master_epochs=6, worker_epochs=2, micro_batches=2, batch_size=64)
    undisturbed = app(two_workers, Cut, **options)
    await undisturbed.train_model()
    lost = app(two_workers, Cut, checkpoint=tmp_path, **options)
    faults = {SlotStarted: kill_executor(two_workers, 1), Committed: kill_executor(two_workers, 2)}
    lost.subscribe(lambda event: faults.pop(type(event), lambda: None)())
    with pytest.raises(Interrupted):
        await stop_after(lost, 2).train_model()
    assert not faults
    resumed = app(two_workers, Cut, checkpoint=tmp_path, resume="auto", **{**options, "split": "layers:dense_1"})
    await resumed.train_model()
    assert equal(resumed.model.get_weights(), undisturbed.model.get_weights())
    assert equal(resumed.optimizers[0], undisturbed.optimizers[0])
    assert resumed.ledger.is_exact(6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "losses"),
    [
        ({"split": "stages:2", "master_epochs": 6}, {3: (1, 2), 5: (1, 2)}),
        ({"split": "within:2", "micro_batches": 1, "master_epochs": 4}, {1: (2,), 3: (1, 2)}),
    ],
    ids=["slices", "shares"],
)
async def test_the_run_returns_to_its_checkpoint_only_if_a_part_and_its_copy_are_lost(
    two_workers, tmp_path, cut, losses
):
    """``losses`` contains the workers that are killed after a round. After the loss of one worker, the run continues from copies."""
    options = dict(batch_size=64, checkpoint_every=2) | cut
    rounds = options["master_epochs"]
    undisturbed, disturbed = (
        app(two_workers, Cut, **{**options, "callbacks": [lowering()], "checkpoint": tmp_path / name})
        for name in ("whole", "lost")
    )
    await undisturbed.train_model()
    pending, warnings = dict(losses), []

    def kill(event):
        if isinstance(event, Committed):
            for worker in pending.pop(event.record.round, ()):
                kill_executor(two_workers, worker)()
        if isinstance(event, Warned) and "were lost after round" in event.why:
            warnings.append(event.why)

    disturbed.subscribe(kill)
    await disturbed.train_model()
    assert not pending
    assert [reason.rpartition(" ")[2] for reason in warnings] == [str(n - 1) for n in losses if len(losses[n]) == 2]
    assert equal(disturbed.model.get_weights(), undisturbed.model.get_weights())
    assert equal(disturbed.optimizers[0], undisturbed.optimizers[0])
    assert [record.round for record in disturbed.history] == [*range(1, rounds + 1)]
    assert [record.metrics["learning_rate"] for record in disturbed.history] == [
        record.metrics["learning_rate"] for record in undisturbed.history
    ]
    assert [record.metrics["loss"] for record in disturbed.history] == [
        record.metrics["loss"] for record in undisturbed.history
    ]
    assert disturbed.ledger.is_exact(rounds)


@pytest.mark.slow
async def test_without_a_checkpoint_the_loss_of_a_part_and_its_copy_ends_the_run(two_workers):
    lost = app(two_workers, Cut, master_epochs=4, batch_size=64)

    def kill(event):
        if isinstance(event, Committed) and event.record.round == 2:
            kill_executor(two_workers, 1)()
            kill_executor(two_workers, 2)()

    lost.subscribe(kill)
    with pytest.raises(
        ClusterTooSmall, match=r"part \d of the model and its copy are lost, and the run has no checkpoint"
    ):
        await lost.train_model()


@pytest.mark.slow
async def test_parts_evaluate_data_in_files_as_the_master_does(two_workers, tmp_path):
    x, y = blobs(900, seed=3)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    split(open_source(tmp_path / "data.npz"), Folder(tmp_path / "data"), [300, 400, 200], shuffle=False)
    histories, warnings = [], []
    for options in ({"split": "stages:2"}, {"split": None, "micro_batches": None}):
        trained = app(two_workers, InFiles, folder=str(tmp_path / "data"), evaluate_every=1, **options)
        trained.subscribe(lambda event: warnings.append(event.why) if isinstance(event, Warned) else None)
        await trained.train_model()
        metrics = trained.model.evaluate(x, y, batch_size=512, verbose=0, return_dict=True)
        assert trained.history[-1].test == pytest.approx(metrics, rel=1e-6)
        histories.append(trained.history)
    assert not [reason for reason in warnings if "the master evaluates" in reason]


@pytest.mark.slow
async def test_nan_names_the_layer(two_workers):
    trained = app(two_workers, WithNaN)
    with pytest.raises(BadUpdate, match=r"the outputs of the layer '.*' contain NaN in micro-batch"):
        await trained.train_model()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "changes"),
    [
        ({"split": "within:2"}, {"split": "stages:2"}),
        ({"split": "stages:2"}, {"split": "within:2"}),
        ({"split": "stages:1", "slots": 2}, {}),
    ],
    ids=["shares", "slices", "slots"],
)
async def test_a_checkpoint_has_the_whole_model_however_it_is_cut(two_workers, tmp_path, monkeypatch, first, changes):
    writers, add = [], Slices.add

    def added(slices, destination, file):
        writers.append(file.by)
        add(slices, destination, file)

    monkeypatch.setattr(Slices, "add", added)
    options = dict(master_epochs=3, micro_batches=1, batch_size=64) | first
    uninterrupted = app(two_workers, Cut, **options)
    await uninterrupted.train_model()
    with pytest.raises(Interrupted):
        await stop_after(app(two_workers, Cut, checkpoint=tmp_path, **options), 1).train_model()
    assert writers
    assert 0 not in writers  # the master writes no slice
    resumed = app(two_workers, Cut, checkpoint=tmp_path, resume="auto", **{**options, **changes})
    await resumed.train_model()
    assert distance(resumed.model.get_weights(), uninterrupted.model.get_weights()) < 1e-6
    assert distance(resumed.optimizers[0], uninterrupted.optimizers[0]) < 1e-6
    assert resumed.ledger.is_exact(3)


class Looking(Cut):
    """Asks each worker for its connections after the first round."""

    async def on_round(self, record):
        if record.round == 1:
            role = self.run_context.name, "replica"
            self.connections = {
                worker.id: set(await worker.call(role, "connections")) for worker in self.cluster.workers
            }


@pytest.mark.slow
async def test_groups_have_the_planned_connections_only(one_template):
    """Two slots have two stages each. Stages of a slot exchange activations, and equal stages exchange gradients."""
    async with Cluster.local(4) as cluster:
        trained, parts = app(cluster, Looking, slots=2, master_epochs=2), {}
        trained.subscribe(
            lambda event: parts.update({event.slot: event.worker}) if type(event) is PartTrained else None
        )
        await trained.train_model()
    first, second, third, fourth = (parts[slot] for slot in (1, 2, 3, 4))
    assert trained.connections == {
        first: {second, third},
        second: {first, fourth},
        third: {first, fourth},
        fourth: {second, third},
    }
    assert trained.ledger.is_exact(2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, "warmup:0.3,cosine"])
async def test_two_slots_equal_two_slots_of_the_gradient_exchange(two_workers, schedule):
    """Each epoch is one step, so both exchanges have the same samples in it."""
    options = dict(samples=50, batch_size=32, master_epochs=6, optimizer="adam", schedule=schedule)
    split = app(two_workers, Blobs, split="stages:1", slots=2, micro_batches=4, **options)
    await split.train_model()
    usual = app(two_workers, Blobs, exchange="gradient", slots=2, **options)
    await usual.train_model()
    assert distance(split.model.get_weights(), usual.model.get_weights()) < 1e-6
    assert split.history[-1].metrics["loss"] == pytest.approx(usual.history[-1].metrics["loss"], rel=1e-5)
    assert split.ledger.is_exact(6)
