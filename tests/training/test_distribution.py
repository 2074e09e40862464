"""Tests of models in strategies of TensorFlow: which trainings accept or refuse them. ``tests/trials/test_parallel.py`` has several devices."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.events import ModelBuilt
from ddlf.testing import in_process_cluster
from ddlf.training.slot.build import ready_model
from ddlf.training.slot.distribution import (
    check_balance,
    check_division,
    check_one_card,
    check_strategy,
    copies_of,
    scope_of,
    separate_strategies,
    strategy_of,
    without_distribution,
)
from ddlf.training.slot.replica import Replica
from tests.training.models import Blobs, app


def model_for(copies, kind="MirroredStrategy", steps=1):
    """A stand-in for a model in a strategy with some copies."""
    strategy = type(kind, (), {"num_replicas_in_sync": copies})()
    return SimpleNamespace(name="cnn", distribute_strategy=strategy, compiled=True, steps_per_execution=steps)


@pytest.mark.parametrize(("samples", "batch_size"), [(64, 32), (36, 32), (4, 32), (0, 32)])
def test_batches_that_all_cards_share_equally_are_accepted(samples, batch_size):
    check_division(model_for(4), samples, batch_size)


@pytest.mark.parametrize(("samples", "batch_size", "batch"), [(65, 32, 1), (31, 32, 31), (300, 30, 30), (3, 32, 3)])
def test_batches_that_cards_share_unequally_are_refused(samples, batch_size, batch):
    with pytest.raises(AppError, match=f"a batch of {batch} samples cannot be divided among 4 cards; let 4 divide"):
        check_division(model_for(4), samples, batch_size)


def test_a_distribution_of_jax_divides_batches_along_its_axis_for_them(monkeypatch):
    mesh = SimpleNamespace(shape=(2, 4), axis_names=["batch", "model"])
    for axis, parts in (("batch", 2), ("model", 4)):
        distribution = SimpleNamespace(device_mesh=mesh, batch_dim_name=axis)
        monkeypatch.setattr("keras.distribution.distribution", lambda distribution=distribution: distribution)
        check_division(SimpleNamespace(), 64, 32)
        with pytest.raises(AppError, match=f"a batch of 3 samples cannot be divided among {parts} cards"):
            check_division(SimpleNamespace(), 67, 32)


def test_an_evaluation_has_no_distribution_and_restores_it(monkeypatch):
    now = ["of the app"]
    monkeypatch.setattr("keras.distribution.distribution", lambda: now[-1])
    monkeypatch.setattr("keras.distribution.set_distribution", now.append)
    with without_distribution():
        assert now[-1] is None
    assert now[-1] == "of the app"


async def test_distribution_of_create_model_ends_with_it_on_the_master(monkeypatch):
    """Otherwise it divides the model of the next app, too."""
    blobs, now = Blobs(), [None]
    monkeypatch.setattr("keras.distribution.distribution", lambda: now[-1])
    monkeypatch.setattr("keras.distribution.set_distribution", now.append)

    async def create():
        await blobs.create_model()
        now.append("of the app")

    await Replica.build_on_master(blobs, 0, create)
    assert now == [None, "of the app", None]


def test_models_without_a_strategy_may_have_any_batches():
    for model in (model_for(1, kind="_DefaultDistributionStrategy"), SimpleNamespace(), None):
        check_division(model, 7, 3)
        check_strategy(model)
        check_one_card(model, "mode='downpour'")
        assert copies_of(model) == 1
        with scope_of(model):
            pass


def test_parts_by_speed_are_refused_if_several_cards_share_a_batch():
    check_balance(model_for(1), "speed")
    check_balance(model_for(2), "equal")
    with pytest.raises(AppError, match="balance='speed' gives slots any number of samples, which 2 cards"):
        check_balance(model_for(2), "speed")


def test_strategies_that_span_machines_are_refused():
    with pytest.raises(
        AppError, match="'cnn' is made in a MultiWorkerMirroredStrategy of TensorFlow, which does not fit"
    ):
        check_strategy(model_for(2, kind="MultiWorkerMirroredStrategy"))


def test_several_steps_in_one_call_of_a_strategy_are_refused():
    with pytest.raises(AppError, match="steps_per_execution=4 does not work with the MirroredStrategy"):
        check_strategy(model_for(2, steps=4))


def test_steps_on_one_card_refuse_copies_on_several():
    check_one_card(model_for(1), "exchange='gradient'")
    with pytest.raises(
        ConfigError, match=r"exchange='gradient' computes on one card, but the model 'cnn' is made .* for 2 "
    ):
        check_one_card(model_for(2), "exchange='gradient'")


class Mirrored(Blobs):
    """Its model is made in a strategy of TensorFlow with one copy."""

    async def create_model(self):
        import tensorflow as tf

        with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
            await super().create_model()


@pytest.mark.slow
async def test_model_of_a_strategy_trains_to_the_same_weights_as_without():
    weights = []
    async with in_process_cluster(1) as cluster:
        for kind in (Blobs, Mirrored):
            trained = app(cluster, kind, slots=2, optimizer="adam", local_rule="fedprox:0.1", precision="mixed_float16")
            await trained.train_sync()
            weights.append(trained.model.get_weights())
    assert copies_of(trained.model) == 1
    assert type(strategy_of(trained.model)).__name__ == "MirroredStrategy"
    for plain, mirrored in zip(*weights, strict=True):
        np.testing.assert_allclose(plain, mirrored, atol=1e-5)


async def test_run_reports_into_how_many_parts_cards_divide_each_batch(monkeypatch):
    monkeypatch.setattr("ddlf.training.slot.replica.parts_of_batch", lambda model: 2)
    async with in_process_cluster(1) as cluster:
        trained, built = app(cluster, Blobs, master_epochs=1), []
        trained.subscribe(lambda event: built.append(event.batch_parts) if isinstance(event, ModelBuilt) else None)
        await trained.train_sync()
    assert built == [2]


async def test_a_strategy_with_steps_per_execution_is_refused_on_the_master():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        blobs = Blobs()
        await blobs.create_model()
        blobs.model.compile("sgd", "categorical_crossentropy", steps_per_execution=4)
    with pytest.raises(AppError, match="leave out steps_per_execution: Keras cannot put several steps"):
        ready_model(blobs)


@pytest.mark.parametrize("inside", ["model", "compile"])
async def test_an_optimizer_of_another_strategy_than_its_model_is_refused(inside):
    import tensorflow as tf

    blobs, scope = Blobs(), tf.distribute.MirroredStrategy(["/cpu:0"]).scope
    with scope() if inside == "model" else nullcontext():
        await blobs.create_model()
    with scope() if inside == "compile" else nullcontext():
        blobs.model.compile("sgd", "categorical_crossentropy")
    with pytest.raises(AppError, match=r"'sequential.*' and its optimizer are not made in the same strategy"):
        ready_model(blobs)


@pytest.mark.parametrize("setting", ["gradient_accumulation_steps=2", "jit_compile=True"])
async def test_steps_that_keras_cannot_compile_in_a_strategy_are_refused(setting):
    import keras
    import tensorflow as tf

    jit, steps = ("jit" in setting or "auto"), (None if "jit" in setting else 2)
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        blobs = Blobs()
        await blobs.create_model()
        blobs.model.compile(
            keras.optimizers.SGD(gradient_accumulation_steps=steps), "categorical_crossentropy", jit_compile=jit
        )
    with pytest.raises(AppError, match=f"{setting} does not work with the strategy of the model"):
        ready_model(blobs)


async def test_a_model_without_input_shape_is_built_in_its_strategy():
    import keras
    import tensorflow as tf

    blobs = Blobs()
    await blobs.load_dataset()
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        blobs.model = keras.Sequential([keras.layers.Dense(4, activation="softmax")])
        blobs.model.compile("sgd", "categorical_crossentropy")
    ready_model(blobs)
    blobs.model.fit(blobs.x_train, blobs.y_train, verbose=0)


async def test_a_built_model_of_a_strategy_is_not_built_by_another_batch():
    mirrored = Mirrored()
    await mirrored.load_dataset()
    await mirrored.create_model()
    build = vars(ready_model(mirrored))["_maybe_symbolic_build"]

    def batches():
        yield None, None, iter([(mirrored.x_test, mirrored.y_test)])
        raise AssertionError("a second batch was read")

    build(batches())
    assert mirrored.model._compile_metrics.built
    build(iter([(None, None, None)]))


def test_each_strategy_of_a_process_has_numbers_of_its_own():
    import tensorflow as tf

    separate_strategies()
    separate_strategies()
    first, second = (tf.distribute.MirroredStrategy(["/cpu:0"]).extended for _ in range(2))
    assert first._collective_key_base != second._collective_key_base


def test_stabilisers_refuse_copies_on_several_cards():
    import keras

    from ddlf.extras.stabilisers.wrapper import Wrapper

    wrapped = Wrapper(keras.optimizers.SGD())
    wrapped._distribution_strategy = SimpleNamespace(num_replicas_in_sync=2)
    with pytest.raises(ConfigError, match=r"Wrapper would see the gradients of one card only.* has 2; leave out"):
        wrapped.build([keras.Variable(np.zeros(2))])
