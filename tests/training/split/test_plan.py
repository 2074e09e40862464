"""Tests of the plan of a split: where models are cut, the numbers of each part, and refused models."""

import re

import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.training.exchanges.split.cut import CUT
from ddlf.training.exchanges.split.graph import Graph, check_graph
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.replica import check_backend
from ddlf.training.exchanges.split.variables import deferred, unmade
from ddlf.training.slot.variables import is_made, set_value


def model_of(*layers, optimizer="sgd", loss="mse", kind=None, **options):
    import keras

    model = (kind or keras.Sequential)([keras.Input((8,)), *layers])
    model.compile(optimizer, loss, **options)
    return model


def plan_of(model, split, batch_size=16, micro_batches=4):
    return Plan.of(Graph.of(model), CUT("split", split), batch_size, micro_batches)


def dense(*units, **options):
    import keras

    return [keras.layers.Dense(n, name=f"d{index}", **options) for index, n in enumerate(units)]


def test_stages_are_balanced_by_multiplications():
    plan = plan_of(model_of(*dense(100, 10, 10, 100)), "stages:2")
    assert plan.ends == [2, 4]
    assert [call.products for call in plan.graph.calls] == [8 * 100 + 100, 1010, 110, 1100]


def test_the_numbers_of_a_part_follow_from_shapes():
    plan = plan_of(model_of(*dense(100, 10), optimizer="adam"), "stages:2")
    first, last = plan.parts
    assert plan.bytes_of_weights(first) == 4 * (8 * 100 + 100)
    assert (
        plan.bytes_of_optimizer(first) == 2 * plan.bytes_of_weights(first) + 8 + 4
    )  # the iterations and the learning rate
    assert plan.bytes_of_activations(first) == 2 * 4 * 100 * 4  # two micro-batches of 4 samples
    assert plan.bytes_of_activations(last) == 1 * 4 * 10 * 4
    assert plan.bytes_sent(first) == plan.bytes_sent(last) == 16 * 100 * 4
    assert re.search(r"1 +d0 +3\.6 kB +7\.2 kB +3\.2 kB +900 +6\.4 kB", plan.table())


def test_automatic_cut_has_the_fewest_parts_that_fit_into_the_memory():
    model = model_of(*dense(100, 100, 100, 100))
    uncut = plan_of(model, "stages:1")
    assert len(plan_of(model, f"memory:{uncut.memory(uncut.parts[0])}").parts) == 1
    assert len(plan_of(model, f"memory:{uncut.memory(uncut.parts[0]) - 1}").parts) == 2
    with pytest.raises(ConfigError, match="is too little: the largest part of"):
        plan_of(model, "memory:1kB")


def test_parts_begin_with_the_named_layers():
    assert plan_of(model_of(*dense(5, 6, 7, 8)), "layers:d1,d3").ends == [1, 3, 4]


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ("stages:4", "needs 4 layers, and the model"),
        ("layers:d7", "names the layer 'd7', which the model"),
        ("layers:d0", "is the first layer, so part 1 would be empty"),
        ("layers:d2,d0", "names 'd0', which is the first layer"),
        ("layers:d2,d1", "does not name the layers in the order of the model"),
    ],
)
def test_a_cut_that_the_model_does_not_have_is_refused(split, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan_of(model_of(*dense(5, 6, 7)), split)


def bad_models():
    import keras

    layers, optimizers = keras.layers, keras.optimizers

    class OwnStep(keras.Sequential):
        def train_step(self, data):
            return {}

    class Subclassed(keras.Model):
        def __init__(self, layers_of_model):
            super().__init__()
            self.stack = layers_of_model[1:]

    class OwnApply(optimizers.SGD):
        def apply(self, *_):
            pass

    recurrent = keras.Sequential([keras.Input((4, 8), batch_size=2), layers.LSTM(3, stateful=True)])
    recurrent.compile("sgd", "mse")
    masked = keras.Sequential([keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True), layers.LSTM(3)])
    masked.compile("sgd", "mse")
    return {
        "has its own train_step": model_of(*dense(4), kind=OwnStep),
        "is a Subclassed with its own call": model_of(*dense(4), kind=Subclassed),
        "is stateful": recurrent,
        "does not support masks": masked,
        "activity_regularizer of the layer 'd0'": model_of(*dense(4, activity_regularizer="l2")),
        "has reduction='sum'": model_of(*dense(4), loss=keras.losses.MeanSquaredError(reduction="sum")),
        "combines samples of a batch": model_of(*dense(4), loss=keras.losses.Dice()),
        "does not support LossScaleOptimizer": model_of(
            *dense(4), optimizer=optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
        ),
        "OwnApply has its own apply": model_of(*dense(4), optimizer=OwnApply(0.1)),
        "averages of the weights": model_of(*dense(4), optimizer=optimizers.SGD(0.1, use_ema=True)),
        "does not support loss_scale_factor": model_of(*dense(4), optimizer=optimizers.SGD(0.1, loss_scale_factor=2)),
    }


def test_models_that_do_not_work_in_parts_are_refused():
    for sentence, model in bad_models().items():
        with pytest.raises((AppError, ConfigError), match=sentence):
            check_graph(Graph.of(model))


def test_an_optimizer_whose_variables_share_names_is_refused():
    import keras

    with pytest.raises(ConfigError, match="does not support Adafactor: several of its variables have the same name"):
        plan_of(model_of(*dense(4, 2), optimizer=keras.optimizers.Adafactor(0.1)), "stages:2")


def test_a_layer_that_its_call_changes_stays_in_one_part():
    import keras

    x, norm = keras.Input((8,)), keras.layers.BatchNormalization(name="norm")
    model = keras.Model(x, norm(keras.layers.Dense(8, name="d")(norm(x))))
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="'norm' changes when it is called, and is used in parts 1 and 2"):
        plan_of(model, "layers:d").check()
    assert "normalizes over micro-batches of 4 samples" in plan_of(model, "stages:1").warning()


def test_a_layer_that_mixes_samples_is_named_and_stays_in_one_part():
    import keras

    x = keras.Input((8,))
    hidden = keras.layers.Dense(8, name="d")(x)
    mean = keras.ops.mean(hidden, axis=0, keepdims=True)
    model = keras.Model(x, keras.layers.Dense(2, name="last")(hidden - mean))
    model.compile("sgd", "mse")
    plan = plan_of(model, "layers:last")
    plan.check()
    assert "mixes samples over micro-batches of 4 samples, not over batches of 16" in plan.warning()
    with pytest.raises(ConfigError, match="returns a tensor without samples, which several parts need"):
        plan_of(model, "layers:subtract").check()
    assert plan_of(model_of(*dense(5, 6, 7)), "stages:2").warning() == ""


def test_a_model_is_built_without_memory_and_its_weights_are_made_one_by_one():
    import keras
    from keras.src import backend

    with unmade():
        model = model_of(*dense(5, 6), optimizer="adam")
    assert [tuple(weight.shape) for weight in model.weights] == [(8, 5), (5,), (5, 6), (6,)]
    assert not any(map(is_made, model.weights))
    with deferred():  # Keras makes its deferred variables at the end of a scope, but not these
        pass
    backend.compute_output_spec(model, keras.KerasTensor((2, 8)))
    assert not any(map(is_made, model.weights))
    set_value(model.weights[1], model.weights[1].numpy() + 2)
    assert [is_made(weight) for weight in model.weights] == [False, True, False, False]
    assert model.weights[1].numpy().tolist() == [2.0] * 5
    assert all(map(is_made, model_of(*dense(5)).weights))


def test_another_backend_than_the_masters_is_refused():
    import keras

    check_backend(keras.backend.backend())
    with pytest.raises(ConfigError, match=r"the master with torch: the parts of a model need the same backend"):
        check_backend("torch")
