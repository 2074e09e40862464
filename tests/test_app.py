"""Tests of ``IApp`` on real workers: its arguments, its errors, repeated runs and saved models."""

import numpy as np
import pytest

import ddlf
from ddlf.errors import AppError, ConfigError
from tests.training.models import Blobs, Quick, app, blobs, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_the_designs_example_runs(two_workers):
    example = app(two_workers)
    await example.connect()
    await example.load_dataset()
    await example.create_model()
    records = await example.train_sync(master_epochs=4, worker_epochs=2, batch_size=32)
    assert len(records) == 2
    assert example.history == records
    assert (await example.evaluate_model())["accuracy"] > 0.5


@pytest.mark.slow
async def test_arguments_win_over_attributes_of_object_and_class(two_workers):
    example = app(two_workers, Quick, worker_epochs=3)
    assert [record.epochs for record in await example.train_model()] == [2]
    assert [record.epochs for record in await example.train_sync(master_epochs=3)] == [3]
    assert [record.epochs for record in await example.train_sync(master_epochs=3, worker_epochs=2)] == [2, 1]


async def test_error_says_which_method_an_app_must_define(two_workers):
    class Empty(ddlf.IApp):
        pass

    class Half(ddlf.IApp):
        async def load_dataset(self):
            self.x_train, self.y_train = blobs(10)

    with pytest.raises(AppError, match="Empty has no load_dataset; write one that sets"):
        await Empty(two_workers).train_model()
    with pytest.raises(AppError, match="Half has no create_model; write one that sets"):
        await Half(two_workers).train_model()


async def test_a_second_run_on_the_same_workers_loads_nothing_and_says_so(two_workers, capsys):
    first, second = (app(two_workers, Quick, samples=317, verbose=True) for _ in range(2))
    await first.train_model()
    assert "loaded on 2 workers" in capsys.readouterr().out
    await second.train_model()
    assert "already on all 2 workers, not loaded again" in capsys.readouterr().out
    assert equal(first.model.get_weights(), second.model.get_weights())


@pytest.mark.slow
async def test_different_models_are_refused(two_workers):
    class Different(Blobs):
        async def create_model(self):
            from tests.training.models import small_model

            self.model = small_model(norm=hasattr(self, "worker"))

    with pytest.raises(AppError, match="create_model makes another model on worker 1"):
        await Different(two_workers).train_model()


@pytest.mark.slow
async def test_train_can_be_overridden_plain_and_async(two_workers):
    class Plain(Blobs):
        def train(self, weights, worker_epochs, batch_size):
            return [np.full_like(array, 0.25) for array in weights]

    class Async(Blobs):
        async def train(self, weights, worker_epochs, batch_size):
            return [np.full_like(array, 0.25) for array in weights], {"loss": float(len(self.indices))}

    for kind in (Plain, Async):
        example = kind(two_workers)
        await example.prepare()
        before = example.model.get_weights()
        records = await example.train_sync(master_epochs=2)
        assert all(np.allclose(a, b - 0.5, atol=1e-6) for a, b in zip(example.model.get_weights(), before, strict=True))
    assert records[0].loss == (102 * 102 + 101 * 101) / 203


async def test_error_of_the_app_on_workers_is_shown_once_with_file_and_line(
    two_workers,
):
    class Failing(Blobs):
        async def create_model(self):
            if hasattr(self, "worker"):
                raise KeyError("layers")
            await super().create_model()

    with pytest.raises(KeyError) as failed:
        await Failing(two_workers).train_model()
    assert "test_app.py" in str(failed.value)
    assert 'raise KeyError("layers")' in str(failed.value)
    assert failed.value.worker.startswith("worker ")
    assert len(await app(two_workers, Quick).train_model()) == 2


async def test_saved_model_loads_again(two_workers, tmp_path):
    import keras

    example = app(two_workers, Quick)
    await example.train_model()
    await example.save_model(tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
    other = app(two_workers)
    await other.load_model(tmp_path / "model.keras")
    assert equal(example.model.get_weights(), other.model.get_weights())
    assert equal(example.model.get_weights(), keras.models.load_model(tmp_path / "model.keras").get_weights())
    with pytest.raises(ConfigError, match=r"saved as a \.keras or \.safetensors file"):
        await example.save_model(tmp_path / "model.h5")
    with pytest.raises(ConfigError, match="there is no model file"):
        await example.load_model(tmp_path / "none.keras")
    with pytest.raises(ConfigError, match="does not exist"):
        await example.save_model(tmp_path / "no" / "model.keras")


async def test_a_saved_model_that_carries_code_is_refused(two_workers, tmp_path):
    import keras

    inputs = keras.Input((8,))
    keras.Model(inputs, keras.layers.Lambda(lambda x: x * 2)(inputs)).save(tmp_path / "lambda.keras")
    with pytest.raises(ValueError, match="unsafe"):
        await app(two_workers).load_model(tmp_path / "lambda.keras")


@pytest.mark.slow
async def test_no_test_data_is_an_error_with_advice(two_workers):
    class WithoutTest(Quick):
        async def load_dataset(self):
            self.x_train, self.y_train = blobs(20)

    example = WithoutTest(two_workers)
    await example.train_model()
    with pytest.raises(AppError, match=r"set self\.x_test"):
        await example.evaluate_model()


async def test_data_model_and_cluster_do_not_travel_with_the_app():
    example = app(None, mine=3)
    await example.load_dataset()
    await example.create_model()
    example._private = 4
    assert example.__getstate__() == {"mine": 3, "_private": 4}
