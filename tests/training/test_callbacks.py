"""Tests of Keras's callbacks on the master: they decide like in ``fit``.

The model has one weight, which moves from 0 to 1. Its validation loss is smallest on the way.
"""

import asyncio
import csv
import time

import numpy as np
import pytest

import ddlf
from ddlf.errors import AppError
from tests.training.models import equal

pytestmark = pytest.mark.asyncio(loop_scope="session")

RATE = 0.08


@pytest.fixture
def one_worker(two_workers):
    return two_workers.options(workers=[1])


def slower(epoch, rate):
    return rate * 0.99


def one_weight(optimizer=None):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(RATE) if optimizer is None else optimizer, "mse")
    return model


def data():
    inputs = np.ones((24, 1), "float32")
    return inputs, inputs, inputs[:6], inputs[:6] * 0.5


def the_eight(folder, **early):
    import keras

    library = keras.callbacks
    return [
        library.EarlyStopping(patience=3, restore_best_weights=True, **early),
        library.ModelCheckpoint(folder / "epoch-{epoch}.keras", save_best_only=True),
        library.ReduceLROnPlateau(patience=1, factor=0.5),
        library.LearningRateScheduler(slower),
        library.CSVLogger(folder / "log.csv"),
        library.TensorBoard(folder / "board"),
        library.TerminateOnNaN(),
    ]


class OneWeight(ddlf.IApp):
    """Trains the one weight with callbacks that a test gives."""

    verbose = False
    master_epochs = 30
    batch_size = 24
    slots = 1

    def __init__(self, cluster, make=list, **settings):
        super().__init__(cluster)
        self.make = make
        vars(self).update(settings)

    async def load_dataset(self):
        self.x_train, self.y_train, self.x_val, self.y_val = data()

    async def create_model(self):
        self.model = one_weight()
        self.callbacks = self.make()


def on_master(make):
    """Return a function that makes callbacks on the master only, because they use the folder of the test."""
    import os

    master_process = os.getpid()
    return lambda: make() if os.getpid() == master_process else []


def rows(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def same_rows(actual_rows, expected_rows):
    assert [row.keys() for row in actual_rows] == [row.keys() for row in expected_rows]
    for row, expected_row in zip(actual_rows, expected_rows, strict=True):
        assert [float(row[name]) for name in row] == pytest.approx(
            [float(expected_row[name]) for name in row], abs=1e-6
        )


def scalars_of(folder):
    """Return the steps and values of each tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    points = {}
    for file in sorted(folder.rglob("events*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tensor_util.make_ndarray(value.tensor))
                    points.setdefault((file.parent.name, value.tag), []).append((event.step, number))
    return points


@pytest.mark.slow
async def test_callbacks_on_the_master_decide_as_in_fit_at_the_same_epochs(one_worker, tmp_path):
    import keras

    (tmp_path / "fit").mkdir()
    (tmp_path / "here").mkdir()
    x, y, x_val, y_val = data()
    model, callbacks = one_weight(), the_eight(tmp_path / "fit")
    callbacks.append(keras.callbacks.BackupAndRestore(tmp_path / "fit" / "backup"))
    history = model.fit(x, y, batch_size=24, epochs=30, validation_data=(x_val, y_val), callbacks=callbacks, verbose=0)

    def make():
        return [*the_eight(tmp_path / "here"), keras.callbacks.BackupAndRestore(tmp_path / "here" / "backup")]

    app = OneWeight(one_worker, on_master(make))
    records = await app.train_sync()
    assert 5 < len(records) == len(history.epoch) < 20
    assert app.run_context.progress.converged
    for name, values in history.history.items():
        assert records.history[name] == pytest.approx(values, abs=1e-6)
    assert equal(app.model.get_weights(), app.run_context.progress.weights)
    assert app.model.get_weights()[0] == pytest.approx(model.get_weights()[0], abs=1e-6)
    assert min(records.history["val_loss"]) == pytest.approx((app.model.get_weights()[0].item() - 0.5) ** 2, abs=1e-6)
    assert app.callbacks[0].stopped_epoch == callbacks[0].stopped_epoch
    same_rows(rows(tmp_path / "here" / "log.csv"), rows(tmp_path / "fit" / "log.csv"))
    files = sorted(file.name for file in (tmp_path / "here").glob("*.keras"))
    assert files == sorted(file.name for file in (tmp_path / "fit").glob("*.keras"))
    of_ddlf, of_fit = (keras.models.load_model(tmp_path / side / files[-1]) for side in ("here", "fit"))
    assert of_ddlf.optimizer.variables[0] == of_fit.optimizer.variables[0]  # the number of steps
    assert float(of_ddlf.optimizer.learning_rate) == pytest.approx(float(of_fit.optimizer.learning_rate), abs=1e-7)
    assert not (tmp_path / "here" / "backup").exists()
    shown, expected = scalars_of(tmp_path / "here" / "board"), scalars_of(tmp_path / "fit" / "board")
    assert shown.keys() == expected.keys()
    for tag, points in expected.items():
        assert np.array(shown[tag]) == pytest.approx(np.array(points), abs=1e-6)


@pytest.mark.slow
async def test_callbacks_continue_from_a_checkpoint_like_an_uninterrupted_run(one_worker, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    settings = {"checkpoint": tmp_path / "whole" / "checkpoints"}
    uninterrupted = OneWeight(one_worker, on_master(lambda: the_eight(tmp_path / "whole")), **settings)
    await uninterrupted.train_sync()

    class Stops(OneWeight):
        def on_round(self, record):
            if record.round in self.at:
                self.stop_training()

    for at in ([4], []):
        settings = {"checkpoint": tmp_path / "parts" / "checkpoints", "resume": "auto", "at": at}
        app = Stops(one_worker, on_master(lambda: the_eight(tmp_path / "parts")), **settings)
        await app.train_sync()
    assert len(app.history) == len(uninterrupted.history)
    assert equal(app.model.get_weights(), uninterrupted.model.get_weights())
    assert app.history.history == uninterrupted.history.history
    assert rows(tmp_path / "parts" / "log.csv") == rows(tmp_path / "whole" / "log.csv")
    stopped, undisturbed = app.callbacks[0], uninterrupted.callbacks[0]
    assert (stopped.best, stopped.wait, stopped.best_epoch) == (
        undisturbed.best,
        undisturbed.wait,
        undisturbed.best_epoch,
    )
    resumed = OneWeight(one_worker, on_master(lambda: the_eight(tmp_path / "parts")), **settings)
    assert await resumed.train_sync() == []  # the run has converged
    assert equal(resumed.model.get_weights(), uninterrupted.model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_two_slots_stop_and_slow_down_by_their_merged_metrics(two_workers, mode, tmp_path):
    import keras

    app = OneWeight(
        two_workers, on_master(lambda: the_eight(tmp_path, start_from_epoch=2)), slots=2, batch_size=4, mode=mode
    )
    await app.train_model()
    records = app.history if mode == "sync" else app.history[1::2]
    logs = [record.metrics for record in records]
    assert 5 < len(logs) < 25
    single, early, slow = one_weight(), *the_eight(tmp_path, start_from_epoch=2)[0:3:2]
    for callback in (early, slow):
        callback.set_model(single)
        callback.on_train_begin()
    rate = np.float32(RATE)
    for epoch, log in enumerate(logs):
        rate = np.float32(float(rate) * 0.99)
        assert not single.stop_training
        single.optimizer.learning_rate = rate
        early.on_epoch_end(epoch, dict(log))
        slow.on_epoch_end(epoch, dict(log))
        rate = np.float32(single.optimizer.learning_rate.numpy())
        assert log["learning_rate"] == float(rate)
    assert single.stop_training
    assert isinstance(app.model.optimizer, keras.optimizers.SGD)
    assert float(app.model.optimizer.learning_rate) == float(rate)


@pytest.mark.slow
async def test_an_interrupted_run_continues_from_the_backup(one_worker, tmp_path):
    import keras

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 4:
                raise ArithmeticError("here it breaks")

    def backed_up():
        return [
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True),
        ]

    uninterrupted = OneWeight(one_worker, master_epochs=7)
    await uninterrupted.train_sync()
    app = OneWeight(one_worker, on_master(lambda: [*backed_up(), Breaks()]), master_epochs=7)
    with pytest.raises(ArithmeticError, match="here it breaks"):
        await app.train_sync()
    app.callbacks[1].csv_file.close()
    app = OneWeight(one_worker, on_master(backed_up), master_epochs=7)
    records = await app.train_sync()
    assert [record.round for record in records] == [5, 6, 7]
    assert equal(app.model.get_weights(), uninterrupted.model.get_weights())
    assert [row["epoch"] for row in rows(tmp_path / "log.csv")] == [str(epoch) for epoch in range(7)]
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
async def test_a_loss_that_is_not_a_number_ends_the_run_where_fit_ends(one_worker):
    import keras

    class Explodes(OneWeight):
        async def create_model(self):
            await super().create_model()
            self.model.compile(keras.optimizers.SGD(1e18), "mse")

    x, y, _, _ = data()
    model = one_weight(keras.optimizers.SGD(1e18))
    history = model.fit(x, y, batch_size=24, epochs=30, callbacks=[keras.callbacks.TerminateOnNaN()], verbose=0)
    app = Explodes(one_worker, on_master(lambda: [keras.callbacks.TerminateOnNaN()]))
    await app.train_sync()
    assert 1 < len(history.epoch) < 10
    assert len(history.epoch) - 1 <= len(app.history) <= len(history.epoch)  # an update with NaN is not merged
    assert app.run_context.progress.converged
    assert all(np.isfinite(array).all() for array in app.model.get_weights())


@pytest.mark.slow
async def test_each_epoch_of_a_longer_round_has_its_own_learning_rate(one_worker):
    import keras

    rates, ended = [], []

    def halved(epoch, rate):
        return RATE * 0.5**epoch

    class Sees(OneWeight):
        worker_epochs, master_epochs = 2, 5

        def on_round(self, record):
            rates.append((record.epochs, record.metrics["learning_rate"]))

    def make():
        on_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch))
        return [keras.callbacks.LearningRateScheduler(halved), on_end]

    x, y, _, _ = data()
    model = one_weight()
    model.fit(x, y, batch_size=24, epochs=5, callbacks=[keras.callbacks.LearningRateScheduler(halved)], verbose=0)
    app = Sees(one_worker, on_master(make))
    await app.train_sync()
    assert app.model.get_weights()[0] == pytest.approx(model.get_weights()[0], abs=1e-6)
    assert rates == [(2, pytest.approx(RATE / 2)), (2, pytest.approx(RATE / 8)), (1, pytest.approx(RATE / 16))]
    assert ended == [1, 3, 4]


@pytest.mark.slow
async def test_callbacks_that_cannot_run_on_the_master_are_refused(one_worker, tmp_path):
    import keras

    library = keras.callbacks

    class Counts(library.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    refused = {
        "Counts in callbacks looks at batches, which are on the workers only; put it into worker_callbacks": Counts(),
        "LambdaCallback in callbacks looks at batches": library.LambdaCallback(on_train_batch_end=print),
        "ModelCheckpoint in callbacks looks at batches, .*; give it save_freq='epoch'": library.ModelCheckpoint(
            "m.keras", save_freq=5
        ),
        "TensorBoard in callbacks looks at batches, .*; give it update_freq='epoch'": library.TensorBoard(
            tmp_path, update_freq=1
        ),
        "SwapEMAWeights has no averages to swap on the master": library.SwapEMAWeights(),
        "callbacks has a str, which is not a Keras callback": "EarlyStopping",
        "BackupAndRestore and checkpoints both define where a run continues": library.BackupAndRestore(
            tmp_path / "backup"
        ),
    }
    app = OneWeight(one_worker, checkpoint=tmp_path / "checkpoints", master_epochs=1)
    await app.prepare()
    for sentence, callback in refused.items():
        app.callbacks = [callback]
        with pytest.raises(AppError, match=sentence):
            await app.train_sync()
    app.checkpoint, app.callbacks, app.local_rule = None, [library.BackupAndRestore(tmp_path / "backup")], "scaffold"
    with pytest.raises(
        AppError, match="stores weights and optimizer only, but with local_rule='scaffold' each slot keeps"
    ):
        await app.train_sync()
    app.local_rule = "plain"
    for callback in (library.ReduceLROnPlateau(), library.LearningRateScheduler(slower)):
        app.callbacks = [callback]
        app.model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), "mse")
        with pytest.raises(AppError, match="sets the optimizer's learning rate, which follows a schedule"):
            await app.train_sync()
        app.model.compile(None, "mse")
        with pytest.raises(
            AppError, match=r"sets the optimizer's learning rate, but the model .* without an optimizer"
        ):
            await app.train_sync()
    assert app.history == []


@pytest.mark.slow
async def test_run_warns_of_a_callback_that_monitors_a_missing_metric(one_worker, capsys):
    import keras

    class NoValidation(OneWeight):
        verbose, master_epochs = True, 1

        async def load_dataset(self):
            self.x_train, self.y_train, _, _ = data()

    with pytest.warns(UserWarning, match="Early stopping conditioned on metric `val_loss`"):
        await NoValidation(one_worker, on_master(lambda: [keras.callbacks.EarlyStopping()])).train_sync()
    assert "callback  WARNING EarlyStopping looks at val_loss, but there is no x_val" in capsys.readouterr().out


@pytest.mark.slow
async def test_a_callback_that_raises_ends_the_run_and_a_long_one_is_stopped(one_worker):
    import keras

    def fails(epoch, logs):
        raise ArithmeticError("in my callback")

    app = OneWeight(one_worker, on_master(lambda: [keras.callbacks.LambdaCallback(on_epoch_end=fails)]))
    with pytest.raises(ArithmeticError, match="in my callback"):
        await app.train_sync()
    assert len(app.history) == 1  # the round was merged before
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits(epoch, logs):
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.2)

    app = OneWeight(one_worker)
    await app.prepare()
    app.callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=waits)]
    training = asyncio.ensure_future(app.train_sync())
    await asyncio.wait([training, waiting := asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    app.callbacks = []
    assert len(await app.train_sync(1)) == 1


@pytest.mark.slow
async def test_learning_rate_applies_to_the_masters_steps_with_gradients(two_workers):
    import keras

    def halved(epoch, rate):
        return RATE * 0.5**epoch

    x, y, _, _ = data()
    model = one_weight(keras.optimizers.SGD(RATE, momentum=0.5))
    callbacks = [keras.callbacks.LearningRateScheduler(halved), keras.callbacks.EarlyStopping("loss", baseline=0.5)]
    history = model.fit(x, y, batch_size=12, epochs=6, shuffle=False, callbacks=callbacks, verbose=0)

    class Stepping(OneWeight):
        exchange, slots, batch_size, master_epochs = "gradient", 2, 6, 6

        async def create_model(self):
            self.model = one_weight(keras.optimizers.SGD(RATE, momentum=0.5))
            self.callbacks = self.make()

    def make():
        return [keras.callbacks.LearningRateScheduler(halved), keras.callbacks.EarlyStopping("loss", baseline=0.5)]

    app = Stepping(two_workers, on_master(make))
    await app.train_sync()
    assert len(app.history) == 2 * len(history.epoch)
    assert app.model.get_weights()[0] == pytest.approx(model.get_weights()[0], abs=1e-6)
