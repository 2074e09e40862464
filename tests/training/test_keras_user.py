"""Tests of features that users know from ``fit``: an app has them on workers, too."""

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.events import Advised
from tests.training.models import Blobs, app, blobs, compiled, equal, small_model, with_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def one_worker(two_workers):
    return two_workers.options(workers=[1])


@pytest.mark.slow
async def test_attributes_of_load_dataset_belong_to_this_app(one_worker, capsys):
    class Scaled(Blobs):
        verbose = True
        samples = 50
        scale = 0.0

        async def load_dataset(self):
            await super().load_dataset()
            self.used = self.scale * 2

        def train(self, weights, worker_epochs, batch_size):
            return [array * 0 for array in weights], {"loss": self.used, "rows": float(len(self.x_train))}

    for scale in (1.0, 100.0):
        scaled = Scaled(one_worker)
        scaled.scale = scale
        (record,) = await scaled.train_sync(1)
        assert record.metrics == {"loss": 2 * scale, "rows": 50.0}


@pytest.mark.slow
async def test_validation_data_is_evaluated_with_the_weights_of_each_round(one_worker):
    class Validated(Blobs):
        samples = 60

        async def load_dataset(self):
            await super().load_dataset()
            self.x_val, self.y_val = blobs(30, seed=2)
            self.w_val = np.linspace(0, 1, 30)

    validated = Validated(one_worker)
    records = await validated.train_sync(2)
    assert list(records[0].metrics) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    expected = validated.model.evaluate(
        validated.x_val, validated.y_val, sample_weight=validated.w_val, batch_size=16, verbose=0
    )
    assert records[1].metrics["val_loss"] == pytest.approx(expected[0], abs=1e-6)
    assert records[0].metrics["val_loss"] > records[1].metrics["val_loss"]
    by_update = await Validated(one_worker).train_async(2)
    assert [record.metrics["val_loss"] for record in by_update] == pytest.approx(
        [record.metrics["val_loss"] for record in records], abs=1e-6
    )


@pytest.mark.slow
async def test_metrics_of_several_slots_are_those_over_all_of_their_samples(two_workers):
    import keras

    class Weighted(Blobs):
        slots = 2
        samples = 61

        async def load_dataset(self):
            await super().load_dataset()
            self.w_train = np.linspace(0, 5, 61) ** 2

        async def create_model(self):
            import keras

            self.model = small_model()
            self.model.compile(
                keras.optimizers.SGD(0.0),
                "categorical_crossentropy",
                metrics=[keras.metrics.AUC(), keras.metrics.F1Score()],
                weighted_metrics=["accuracy"],
            )

    weighted = Weighted(two_workers)
    keras.metrics.AUC()  # then Keras names the next one in this process auc_1
    await weighted.load_dataset()
    await weighted.create_model()
    (record,) = await weighted.train_sync(1)
    expected = weighted.model.evaluate(
        weighted.x_train, weighted.y_train, sample_weight=weighted.w_train, verbose=0, return_dict=True
    )
    f1 = expected.pop(next(name for name in expected if name.startswith("f1_score")))
    expected["auc"] = expected.pop(next(name for name in expected if name.startswith("auc_")))
    assert record.metrics == pytest.approx({**expected, **{f"f1_score_{i}": f1[i] for i in range(4)}}, abs=1e-6)


async def test_run_warns_of_callbacks_with_another_meaning_on_a_worker(one_worker, capsys):
    class Stops(Blobs):
        verbose = True
        samples = 20

        async def create_model(self):
            import keras

            await super().create_model()
            self.worker_callbacks = [keras.callbacks.EarlyStopping("val_loss"), keras.callbacks.TerminateOnNaN()]

    await Stops(one_worker).train_sync(1)
    warned = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert warned == [
        "callback  WARNING EarlyStopping sees one worker's part only; put it into callbacks, which run on the master"
    ]


async def test_run_suggests_the_setting_for_a_name_of_another_library(one_worker, capsys):
    class Named(Blobs):
        verbose = True
        samples = 20

        async def load_dataset(self):
            await super().load_dataset()
            self.sample_weight = np.ones(20)

    await Named(one_worker).train_sync(1)
    assert "self.sample_weight has no effect by that name; did you mean self.w_train?" in capsys.readouterr().out


@pytest.mark.slow
async def test_averages_of_the_optimizer_need_a_kept_optimizer_state(one_worker):
    def build(app):
        import keras

        return compiled(optimizer=keras.optimizers.Adam(use_ema=True))

    averaged = app(one_worker, with_model(build), samples=20)
    await averaged.train_sync(2)
    plain, variables = averaged.model.get_weights(), averaged.model.optimizer.variables
    assert equal(plain[:1], [next(v.numpy() for v in variables if "average" in v.path)])
    averaged.optimizer_state = "fresh"
    with pytest.raises(ConfigError, match="optimizer_state is 'fresh', but the optimizer keeps averages"):
        await averaged.train_sync(1)


async def test_own_layers_load_with_the_weights_of_a_file(one_worker, tmp_path):
    import keras

    class Own(Blobs):
        async def create_model(self):
            class Twice(keras.layers.Layer):
                def call(self, x):
                    return 2 * x

            self.model = keras.Sequential([keras.Input((8,)), Twice(), keras.layers.Dense(self.width)])
            self.model.compile("sgd", "mse")

    saved, loaded, unloaded = Own(), Own(), Own()
    await saved.create_model()
    await saved.save_model(tmp_path / "own.keras")
    await loaded.load_model(tmp_path / "own.keras")
    assert equal(saved.model.get_weights(), loaded.model.get_weights())
    unloaded.width = 3
    await unloaded.create_model()
    with pytest.raises(AppError, match=r"the weights of .*own\.keras' do not fit the app's model"):
        await unloaded.load_model(tmp_path / "own.keras")


@pytest.mark.slow
async def test_advice_changes_no_bit_of_the_training(one_worker):
    """The first run has no advice, the second one has quick advice, and the third one's app was asked for all advice before."""

    class Random(Blobs):
        norm, dropout, optimizer = True, 0.3, "adam"

        async def load_dataset(self):
            await super().load_dataset()
            self.x_train = self.x_train * 1000  # large inputs cause an advice

    runs = [Random(one_worker) for _ in range(3)]
    runs[0].advice = "off"
    assert (await runs[2].advise()).advice
    values = []
    for run, expects_advice in zip(runs, (False, True, True), strict=True):
        advised = []
        run.subscribe(lambda event, advised=advised: advised.append(event) if isinstance(event, Advised) else None)
        await run.train_sync(2)
        assert bool(advised) == expects_advice
        values.append([v.numpy() for v in (*run.model.variables, *run.model.optimizer.variables)])
    assert equal(values[0], values[1])
    assert equal(values[0], values[2])
