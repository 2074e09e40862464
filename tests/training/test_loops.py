"""Tests of training loops with workers in this process: weights of every type, settings, hooks, joining workers, the ledger."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

import ddlf.data
from ddlf import Cluster
from ddlf.algorithms.outer import Nesterov
from ddlf.errors import AppError, CheckpointMismatch, RemoteError
from ddlf.events import Warned
from ddlf.testing import FakeRun, in_process_cluster
from ddlf.training.checkpoints.resume import check_settings
from ddlf.training.evaluation.master import compute
from ddlf.training.slot.build import may_count
from tests.patience import PATIENCE_S
from tests.training.models import WIDE, Blobs, Quick, app, compiled, distance, equal, with_model
from tests.training.test_failures import start_here  # noqa: F401  the same fixture

pytestmark = pytest.mark.asyncio(loop_scope="session")

both_modes = pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster():
    async with in_process_cluster(2) as workers:
        yield workers


# -- weights of every type ---------------------------------------------------------------------------------------------


@both_modes
async def test_weights_of_bfloat16_are_trained(cluster, mode):
    def build(app):
        import keras

        layers = [keras.layers.Dense(units, name, dtype="bfloat16") for units, name in ((16, "tanh"), (4, "softmax"))]
        return compiled(keras.Sequential([keras.Input((8,)), *layers]), optimizer=keras.optimizers.SGD(0.5))

    trained = with_model(build)(cluster.options(workers=[1]))
    await trained.prepare()
    before = trained.model.get_weights()
    records = await getattr(trained, f"train_{mode}")(master_epochs=3)
    assert all(array.dtype == "bfloat16" for array in before)
    assert not any(equal([a], [b]) for a, b in zip(before, trained.model.get_weights(), strict=True))
    assert records[-1].loss < records[0].loss


@pytest.mark.slow
@both_modes
async def test_schedule_of_keras_continues_with_fresh_optimizers(cluster, mode):
    """SGD keeps only its number of steps, so the weights are equal, unless the schedule restarts in each round."""

    def build(app):
        import keras

        halved = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=3, decay_rate=0.5, staircase=True)
        return compiled(optimizer=keras.optimizers.SGD(halved))

    trained = []
    for state in ("kept", "fresh"):
        run = app(cluster.options(workers=[1]), with_model(build), slots=1, optimizer_state=state)
        await getattr(run, f"train_{mode}")(master_epochs=4)
        trained.append(run.model.get_weights())
    assert equal(*trained)


@pytest.mark.slow
async def test_run_with_two_optimizer_wrappers_is_resumed_in_its_process(cluster, tmp_path):
    def app():
        blobs = Blobs(cluster.options(workers=[1]))
        blobs.clip, blobs.multipliers, blobs.checkpoint, blobs.resume = "rolling", "freeze:0.5", tmp_path, "auto"
        return blobs

    await app().train_sync(master_epochs=1)
    resumed = app()
    await resumed.train_sync(master_epochs=2)
    assert [record.round for record in resumed.history] == [1, 2]


@pytest.mark.slow
async def test_resume_names_the_parquet_files_that_changed(cluster, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()

    def write(name, seed):
        rng = np.random.default_rng(seed)
        columns = {
            "x": list(rng.standard_normal((64, 8), "float32")),
            "y": list(np.eye(4, dtype="float32")[rng.integers(4, size=64)]),
        }
        pq.write_table(pa.table(columns), folder / name, row_group_size=16)

    class App(Blobs):
        async def load_dataset(self):
            self.train_data = ddlf.data.open(folder)

    def new_app():
        app = App(cluster.options(workers=[1]))
        app.checkpoint, app.resume = tmp_path / "checkpoints", "auto"
        return app

    for number, name in enumerate(["a.parquet", "b.parquet"]):
        write(name, number)
    await new_app().train_sync(master_epochs=1)
    content = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(content)
    app, events = new_app(), []
    app.subscribe(events.append)
    await app.train_sync(master_epochs=1)  # the run has no rounds left, and warns nevertheless
    [warned] = [event.why for event in events if isinstance(event, Warned) and event.about == "data"]
    assert warned == "a.parquet may have other values than before the run stopped: the time of writing is another"
    write("b.parquet", 2)
    write("c.parquet", 3)
    with pytest.raises(CheckpointMismatch, match=r"data: b\.parquet was written to since\n  data: c\.parquet is new$"):
        await new_app().train_sync(master_epochs=2)


async def test_numbered_names_in_older_checkpoints_make_no_difference():
    older = {"optimizer inner_optimizer": "{'config': {'name': 'rolling_clip_3', 'rate': 0.1}}"}
    now = {"optimizer inner_optimizer": "{'config': {'name': 'rolling_clip', 'rate': 0.1}}"}
    check_settings(older, now, "in the checkpoint", "")
    now["optimizer inner_optimizer"] = now["optimizer inner_optimizer"].replace("0.1", "0.2")
    with pytest.raises(CheckpointMismatch, match="inner_optimizer"):
        check_settings(older, now, "in the checkpoint", "")


def mask_layer(trainable_mask=False, kind="bool"):
    """Return a layer that multiplies by a mask. The mask is a weight with another type than float."""
    import keras

    class Masked(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mask = self.add_weight(
                shape=(8,), dtype=kind, initializer="ones", trainable=trainable_mask, name="mask", autocast=False
            )

        def call(self, x):
            return x * keras.ops.cast(self.mask, x.dtype)

    return Masked()


def with_mask(**options):
    def build(app):
        import keras

        layers = [keras.Input((8,)), mask_layer(**options), keras.layers.Dense(4, "softmax")]
        return compiled(keras.Sequential(layers), optimizer=keras.optimizers.SGD(0.05))

    return with_model(build)


@both_modes
async def test_boolean_weights_stay_unchanged_and_floats_train(cluster, mode):
    trained = with_mask()(cluster.options(workers=[1]))
    records = await getattr(trained, f"train_{mode}")(master_epochs=2)
    assert records[-1].loss < records[0].loss
    assert np.all(trained.model.layers[0].mask.numpy())


async def test_run_warns_of_integer_weights_that_each_round_resets():
    kinds = {"steps": "int32", "mask": "bool", "mean": "float32"}
    run = FakeRun(start={name: np.zeros(3, kind) for name, kind in kinds.items()}, frozen=frozenset(["steps", "mask"]))
    received = []
    run.subscribe(received.append)
    await run.train_model()
    (warned,) = [event.why for event in received if isinstance(event, Warned)]
    assert warned.startswith("the weight 'steps' is of type int32: counts of layers in it are lost after each round")


async def test_run_warns_of_a_model_with_its_own_optimizers_by_name():
    run, received = FakeRun(), []
    run.subscribe(received.append)
    run.model.optimizer.apply_gradients = None
    run.model.first_optimizer, run.model.second_optimizer = run.model.optimizer, [SimpleNamespace(apply_gradients=None)]
    await run.train_model()
    (warned,) = [event.why for event in received if isinstance(event, Warned)]
    assert warned.startswith("the model has another optimizer in second_optimizer: its state")


async def test_run_does_not_warn_of_counters_that_keras_changes_before_training():
    import keras

    inner = keras.Sequential([keras.Input((8,)), keras.layers.Normalization(), mask_layer(kind="int32")])
    model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(4)])
    assert [weight.name for weight in model.non_trainable_weights if "int" in weight.dtype] == ["count", "mask"]
    assert [weight.name for weight in may_count(model)] == ["mask"]


async def test_a_trainable_weight_of_another_type_than_float_is_refused_by_name(cluster):
    with pytest.raises(AppError, match=r"'masked_?\d*/mask' is of type int32 and trainable, but only floats"):
        await with_mask(trainable_mask=True, kind="int32")(cluster).train_sync()


# -- settings that both modes use or refuse ------------------------------------------------------------------------------


async def test_each_asynchronous_update_moves_the_velocity_by_its_share(cluster):
    updates = []

    class Recorder:
        def init(self, weights):
            return Nesterov().init(weights)

        def update(self, state, weights, merged, trainable):
            after = Nesterov(learning_rate=0.5, momentum=0.8).update(state, weights, merged, trainable)
            updates.append((weights, merged, after[1]))
            return after

    trained = app(cluster, Quick, mode="async", outer=Recorder())
    await trained.train_model()
    assert len(updates) == 4
    velocity = [0 * array for array in updates[0][0]]
    for before, share, after in updates:
        velocity = [np.float32(0.8 * v + g) for v, g in zip(velocity, share, strict=True)]
        expected = [w - 0.5 * (g + 0.8 * v) for w, g, v in zip(before, share, velocity, strict=True)]
        assert distance(after, expected) < 1e-6
    assert equal(updates[-1][2], trained.model.get_weights())


async def test_evaluation_without_test_data_is_refused_before_training(cluster):
    class App(Blobs):
        evaluate_every = 1

        async def load_dataset(self):
            await super().load_dataset()
            del self.y_test

    trained = App(cluster)
    trained.on_event = lambda event: pytest.fail("training has begun")
    with pytest.raises(AppError, match="evaluate_every=1, but there is no y_test"):
        await trained.train_sync()


# -- hooks see their round -----------------------------------------------------------------------------------------------


@both_modes
async def test_hooks_see_the_model_history_and_ledger_of_their_round(cluster, mode, tmp_path):
    import keras

    hooks = []

    async def on_round(record):
        assert trained.history[-1] is record
        loss = (await trained.evaluate_model())["loss"]
        await trained.save_model(tmp_path / f"{record.version}.keras")
        hooks.append((record.version, loss, trained.model.get_weights()))

    async def is_convergent(record):
        assert equal(trained.model.get_weights(), hooks[-1][2])
        assert trained.ledger.counts.max() > 0
        assert any(state is not None for state in trained.optimizers)
        return record.version == 4

    trained = app(cluster, Quick, mode=mode, master_epochs=6)
    trained.on_round, trained.is_convergent = on_round, is_convergent
    records = await trained.train_model()
    assert [version for version, *_ in hooks] == [record.version for record in records]
    assert len(hooks) == 4 if mode == "sync" else len(hooks) in (4, 5)  # one more update may have been on its way
    losses = [loss for _, loss, _ in hooks]
    assert losses == sorted(losses, reverse=True)
    for version, _, weights in hooks:
        assert equal(keras.models.load_model(tmp_path / f"{version}.keras").get_weights(), weights)
    assert equal(trained.model.get_weights(), hooks[-1][2])
    if mode == "sync":
        assert trained.ledger.is_exact(4)


@pytest.mark.slow
async def test_a_run_that_does_not_read_its_model_does_not_fill_it(cluster):
    trained = app(cluster, Quick)
    await trained.prepare()
    usual, calls = trained.model.set_weights, []
    trained.model.set_weights = lambda weights: (calls.append(weights), usual(weights))
    await trained.train_sync(5)
    assert len(calls) == 1  # the model is filled at the end
    assert trained.model.set_weights is not usual
    assert equal(trained.model.get_weights(), calls[0])


@pytest.mark.slow
@both_modes
async def test_each_record_has_the_test_of_its_own_weights(cluster, mode):
    tests = {}

    async def on_round(record):
        if record.test:
            tests[record.version] = record.test, await trained.evaluate_model()

    trained = app(cluster, Quick, mode=mode, evaluate_every=2, master_epochs=3)
    trained.on_round = on_round
    await trained.train_model()
    expected = {"sync": [2, 3], "async": [2, 4, 6]}[mode]
    assert [record.version for record in trained.history if record.test] == list(tests) == expected
    for test, evaluated in tests.values():
        assert test == pytest.approx(evaluated)
    assert trained.history[-1].test == pytest.approx(await trained.evaluate_model())


@pytest.mark.slow
async def test_convergence_by_test_ends_with_the_tested_weights(cluster):
    trained = app(cluster, Quick, evaluate_every=1, master_epochs=50)
    trained.is_convergent = lambda record: record.version == 2 and record.test["loss"] > 0
    records = await trained.train_sync()
    assert len(records) == len(trained.history) == 2
    assert trained.ledger.is_exact(2)
    assert records[-1].test == pytest.approx(await trained.evaluate_model())
    assert records.to_keras()["test_loss"][-1] == records[-1].test["loss"]


@both_modes
async def test_error_in_a_hook_ends_the_run_and_keeps_its_rounds(cluster, mode):
    async def on_round(record):
        if record.version == 2:
            raise LookupError("no such thing")

    trained = app(cluster, Quick, mode=mode, master_epochs=50, evaluate_every=2)
    trained.on_round = on_round
    with pytest.raises(LookupError, match="no such thing"):
        await trained.train_model()
    assert 2 <= len(trained.history) <= 4
    assert trained.history[1].test
    trained.on_round = lambda record: None
    assert len(await trained.train_sync(1)) >= 1


async def test_cancelled_evaluation_ends_after_a_batch():
    begun, stop_requested = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert stop_requested.wait(PATIENCE_S)

    computing = asyncio.ensure_future(compute(work, stop=stop_requested.set))
    await asyncio.to_thread(begun.wait)
    computing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await computing
    assert stop_requested.is_set()


# -- more workers than slots ---------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Ends a run."""


@both_modes
async def test_joining_worker_gets_a_slot_and_the_ledger_stays_exact(
    token_file,
    start_here,  # noqa: F811
    tmp_path,
    mode,
):
    first, second, joined = start_here(), start_here(), asyncio.Event()
    options = dict(app_class=Quick, mode=mode, master_epochs=7, checkpoint=tmp_path, checkpoint_keep=99)
    async with Cluster(["127.0.0.1"], [first.port], token_file=token_file) as cluster:
        trained, events = app(cluster, **options), []

        async def on_round(record):
            if record.version == 1:
                await cluster.add("127.0.0.1", second.port)
            elif record.version == 2:
                await joined.wait()
            elif record.version == 7:
                raise Interrupted

        def on_event(event):
            events.append(event)
            if event.kind == "joined":
                joined.set()

        trained.on_round, trained.on_event = on_round, on_event
        with pytest.raises(Interrupted):
            await trained.train_model()
        (grown,) = [event for event in events if event.kind == "slots"]
        assert grown.text == f"2 from round {grown.round} on: one per worker"
        assert len(trained.optimizers) == 2
        for record in trained.history:
            assert record.slots == (2 if record.round >= grown.round else 1)
            assert len(record.workers) == (1 if mode == "async" else record.slots)
        assert {worker for record in trained.history for worker in record.workers} == {1, 2}
        resumed = app(cluster, **options, resume="auto")
        records = await resumed.train_model()
        assert resumed.ledger.is_exact(7)
        slot_rounds = sorted((record.round, record.slot) for record in resumed.history)
        late = range(grown.round, 8)
        if mode == "async":
            assert slot_rounds == sorted([(n, 1) for n in range(1, 8)] + [(n, 2) for n in late])
        else:
            assert [record.slots for record in resumed.history] == [1] * (grown.round - 1) + [2] * len(late)
        assert all(record.slots == 2 for record in records[-2:])


@pytest.mark.slow
async def test_run_resumed_on_more_workers_uses_them_unless_slots_are_set(cluster, tmp_path, capsys):
    one_worker = app(cluster.options(workers=[1]), Quick, checkpoint=tmp_path, checkpoint_keep=99)
    await one_worker.train_sync(2)
    for slots in (1, None):
        resumed = app(cluster, Quick, slots=slots, resume=tmp_path, checkpoint=None, verbose=True)
        records = await resumed.train_sync(3 if slots else 5)
        assert [record.slots for record in resumed.history] == ([1, 1, 1] if slots else [1, 1, 1, 2, 2])
        assert resumed.ledger.is_exact(len(resumed.history))
        assert ("slots     1 on 2 workers, 1 spare" in capsys.readouterr().out) == (slots == 1)
    assert records[-1].workers == (1, 2)


# -- what the ledger counts ----------------------------------------------------------------------------------------------


class Fewer(Blobs):
    """Trains on every second sample of its part, or on a missing sample."""

    choose = "half"

    def train(self, weights, worker_epochs, batch_size):
        self.indices = self.indices[::2] if self.choose == "half" else np.append(self.indices, 1000)
        return super().train(weights, worker_epochs, batch_size)


@both_modes
async def test_the_ledger_counts_what_an_own_train_gave_to_fit(cluster, mode):
    trained = Fewer(cluster.options(workers=[1]))
    trained.mode, trained.slots = mode, 2
    await trained.train_model()
    assert trained.ledger.counts.sum() == 2 * (51 + 51)  # of 102 and 101 samples, twice
    assert not trained.ledger.is_exact(2)


async def test_training_on_a_missing_sample_is_reported(cluster):
    trained = Fewer(cluster)
    trained.choose = "outside"
    with pytest.raises(RemoteError, match=r"self.indices has sample 1000, but there are 203 samples, counted from 0"):
        await trained.train_sync()


async def test_an_epoch_that_a_callback_left_out_is_not_counted(cluster):
    class Stopping(Blobs):
        worker_epochs = 3
        master_epochs = 3

        async def create_model(self):
            import keras

            await super().create_model()
            self.worker_callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.stop(epoch))]

        def stop(self, epoch):
            self.model.stop_training = epoch == 1

    trained = Stopping(cluster.options(workers=[1]))
    await trained.train_sync()
    assert trained.ledger.is_exact(2)


# -- from worker to worker ---------------------------------------------------------------------------------------------


class Validated(Quick):
    """An app with validation data."""

    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = self.x_test[:40], self.y_test[:40]


async def test_sharded_model_has_the_bits_of_the_star(cluster):
    weights = []
    for exchange in ("star", "sharded"):
        trained = app(cluster, Quick, exchange=exchange, slots=3, master_epochs=3, outer="nesterov", width=WIDE)
        await trained.train_sync()
        weights.append([*trained.model.get_weights(), *trained.run_context.progress.state["outer"]])
    assert equal(*weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "optimizer_state": "averaged", "weights_codec": "float16", "outer": "nesterov"},
        {"local_rule": "scaffold", "norm": True, "batchnorm": "recalibrated", "codec": "int8"},
        {"optimizer": "adam", "outer": "streaming:fragments=2"},
    ],
    ids=["averaged", "scaffold", "streaming"],
)
async def test_sharded_keras_slot_states_have_the_bits_of_the_star(cluster, settings):
    states = []
    for exchange in ("star", "sharded"):
        trained = app(cluster, Blobs, exchange=exchange, slots=3, master_epochs=3, width=WIDE, **settings)
        await trained.train_sync()
        optimizers = [array for state in trained.run_context.progress.optimizers for array in state]
        states.append([*trained.model.get_weights(), *trained.run_context.progress.state["outer"], *optimizers])
    assert equal(*states)


@pytest.mark.slow
async def test_sharded_run_ends_with_the_optimizer_averages_of_the_star(cluster):
    """The optimizers of slots are on the workers until the end of the run."""

    def build(app):
        import keras

        return compiled(optimizer=keras.optimizers.SGD(0.05, use_ema=True))

    weights = []
    for exchange in ("star", "sharded"):
        trained = app(cluster, with_model(build), exchange=exchange, slots=2, master_epochs=2)
        await trained.train_sync()
        weights.append(trained.model.get_weights())
        assert not equal(weights[-1], trained.run_context.progress.weights)
    assert equal(*weights)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
async def test_sharded_run_evaluates_on_a_worker_to_the_same_metrics(cluster, monkeypatch, codec):
    on_master = []
    monkeypatch.setattr(
        "ddlf.training.evaluation.master.compute",
        lambda *args, **more: on_master.append(args[1]) or compute(*args, **more),
    )
    metrics_of_runs, counts_on_master = [], []
    for exchange in ("star", "sharded"):
        options = {"exchange": exchange, "weights_codec": codec, "width": WIDE}
        trained = app(cluster, Validated, slots=2, master_epochs=3, evaluate_every=1, **options)
        await trained.train_sync()
        metrics_of_runs.append([(record.metrics, record.test) for record in trained.history])
        counts_on_master.append(len(on_master))
        on_master.clear()
    assert metrics_of_runs[1] == metrics_of_runs[0]
    assert all("val_loss" in metrics and test for metrics, test in metrics_of_runs[1])
    assert counts_on_master == [6, 2], "the last round's weights are on the master anyway"


@pytest.mark.slow
async def test_test_data_of_the_master_counts_if_a_worker_has_other_test_data(cluster):
    class Others(Quick):
        async def load_dataset(self):
            await super().load_dataset()
            if getattr(self, "worker", None) is not None:
                self.y_test = self.y_test[::-1].copy()

    tests = []
    for kind, exchange in ((Quick, "star"), (Others, "sharded")):
        trained = app(cluster, kind, exchange=exchange, slots=2, master_epochs=2, evaluate_every=1)
        await trained.train_sync()
        tests.append([record.test for record in trained.history])
    assert tests[1] == tests[0]
