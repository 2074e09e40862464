"""Tests that models end with their last use."""

import asyncio
import gc
import weakref

import numpy as np
import pytest

from ddlf.training.slot import model_memory
from ddlf.training.slot.model_memory import BuiltModels, free_gradients_with_graphs
from ddlf.training.slot.replica import Replica
from tests.training.slot.replicas import replica_of


@pytest.fixture(autouse=True)
def registry():
    """Free gradients, and return the names of the registered gradients of graphs."""
    from tensorflow.python.framework import ops

    free_gradients_with_graphs()
    free_gradients_with_graphs()  # the second time changes nothing
    return lambda: {name for name in ops.gradient_registry.list() if name.startswith("CustomGradient-")}


def graph_of_step(model, xs, ys):
    """Train a model for one step, and return a weak reference to the graph of its step."""
    import keras
    import tensorflow as tf

    graphs = []

    class Recording(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return super().apply(*args, **kwargs)

    model.compile(Recording(0.01, momentum=0.9), "mse")
    model.fit(xs, ys, verbose=0)
    return graphs[0]


def test_the_graph_of_a_trained_model_ends_with_the_model(registry):
    import keras

    before, array = registry(), np.ones((4, 3), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="silu")])
    graph = graph_of_step(model, array, array)
    model.predict(array, verbose=0)
    gc.collect()
    assert registry() > before  # TensorFlow still registers the gradients of silu and of the optimizer
    assert graph() is not None
    del model
    gc.collect()
    assert registry() == before
    assert graph() is None


def test_a_function_keeps_its_gradient_after_the_function_around_it():
    import tensorflow as tf

    @tf.function
    def inner(x):
        return tf.nn.silu(x)

    outer = tf.function(lambda x: inner(x))
    x = tf.constant(0.5)
    assert outer(x) == tf.nn.silu(x)
    del outer
    gc.collect()
    with tf.GradientTape() as eager:
        eager.watch(x)
        expected = tf.nn.silu(x)
    with tf.GradientTape() as traced:
        traced.watch(x)
        y = inner(x)
    np.testing.assert_allclose(traced.gradient(y, x), eager.gradient(expected, x), rtol=1e-6)


def test_a_loop_has_its_gradient_when_its_function_is_differentiated_later():
    import tensorflow as tf

    @tf.function
    def repeated(x):
        for _ in tf.range(3):
            x = tf.nn.silu(x)
        return x

    def gradient(function):
        x = tf.constant(0.5)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    repeated.get_concrete_function(tf.TensorSpec((), tf.float32))
    gc.collect()
    np.testing.assert_allclose(gradient(repeated), gradient(repeated.python_function), rtol=1e-6)


def test_a_saved_function_has_its_custom_gradient(tmp_path):
    import tensorflow as tf

    module = tf.Module()
    module.f = tf.function(tf.nn.silu, input_signature=[tf.TensorSpec((), tf.float32)])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path / "saved"), options=options)
    loaded, x = tf.saved_model.load(str(tmp_path / "saved")), tf.constant(0.5)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        restored, direct = loaded.f(x), tf.nn.silu(x)
    np.testing.assert_allclose(tape.gradient(restored, x), tape.gradient(direct, x), rtol=1e-6)


def test_a_gradient_with_a_name_of_its_own_stays():
    import tensorflow as tf
    from tensorflow.python.framework import ops

    @tf.function
    def register():
        tf.RegisterGradient("OfThisTest")(lambda op, dy: dy)

    register()
    gc.collect()
    assert "OfThisTest" in ops.gradient_registry.list()


@pytest.mark.parametrize("node", ["worker", "master"])
def test_each_node_frees_gradients_before_it_builds_a_model(monkeypatch, node):
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.registry import Registry

    replica, plain = replica_of(), Registry("gradient")
    for name in ("gradient_registry", "_gradient_registry"):
        monkeypatch.setattr(ops, name, plain)

    async def create():
        assert type(ops.gradient_registry) is not Registry

    if node == "worker":
        replica.begin()
    else:
        asyncio.run(Replica.build_on_master(replica.app, 0, create))
    assert type(ops.gradient_registry) is not Registry
    assert ops.gradient_registry is ops._gradient_registry


@pytest.mark.parametrize(("limit", "is_freed"), [(4 * 12, True), (4 * 12 + 1, False)])
def test_the_master_frees_models_after_a_number_of_bytes(monkeypatch, limit, is_freed):
    import keras

    monkeypatch.setattr(model_memory, "COLLECT_BYTES", limit)
    models, cycle = BuiltModels(), type("Cycle", (), {})()
    cycle.itself = cycle
    cycle_ref = weakref.ref(cycle)
    models.add(keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]))
    gc.disable()
    try:
        del cycle
        models.free()
        assert (cycle_ref() is None) == is_freed
    finally:
        gc.enable()
