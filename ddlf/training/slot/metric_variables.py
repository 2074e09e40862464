"""Creates the variables of losses and metrics before the first step. Runs on workers, and on the master's evaluation."""

from __future__ import annotations

import contextlib
from typing import Any

from ddlf.training.slot.distribution import scope_of


def make_metric_variables(model: Any, batch: Any) -> None:
    """Create the variables of a model's losses and metrics, as Keras does in its first step.

    TensorFlow compiles a step that creates variables a second time. Without them the first step of a new model takes
    two thirds of the time.

    Args:
        model: Compiled model. One with its own ``call`` or its own step is left alone: only the step knows what its
            metrics get.
        batch: Inputs, and perhaps labels and sample weights: arrays, or whatever else has shapes and dtypes. An error
            of theirs is left to the step, which explains it.
    """
    import keras
    from keras.src.models.functional import Functional

    function = model._functional if isinstance(model, keras.Sequential) else model
    call = keras.Sequential.call if isinstance(model, keras.Sequential) else Functional.call
    steps = ("train_step", "test_step", "compute_metrics", "compute_loss")
    is_overridden = any(getattr(type(model), name) is not getattr(keras.Model, name) for name in steps)
    if is_overridden or not isinstance(function, Functional) or type(model).call is not call:
        return
    # A loss or metric of yours may raise anything; so does the step.
    with scope_of(model), contextlib.suppress(Exception):
        make_variables_of(model, function, *batch)


def make_variables_of(model: Any, function: Any, x: Any, y: Any = None, weight: Any = None) -> None:
    """Create the variables of a model's losses and metrics, without a pass through the whole model.

    Args:
        model: Compiled model.
        function: The functional model that computes its outputs.
        x, y, weight: A batch: whatever has shapes and dtypes.
    """
    import keras
    from keras.src.models.functional import unpack_singleton

    def symbol(value: Any) -> Any:
        dtype = keras.backend.standardize_dtype(getattr(value, "dtype", None))
        return None if value is None else keras.KerasTensor(tuple(value.shape), dtype)

    samples = keras.tree.flatten(x)[0].shape[0]
    shapes = [keras.KerasTensor((samples, *output.shape[1:]), output.dtype) for output in function.outputs]
    outputs = unpack_singleton(keras.tree.pack_sequence_as(function._outputs_struct, shapes))
    y, weight = keras.tree.map_structure(symbol, (y, weight))
    build = keras.src.backend.compute_output_spec
    if model._compile_metrics is not None and not model._compile_metrics.built:
        build(model._compile_metrics.update_state, y, outputs, weight)
    if not model._compile_loss.built:
        build(model._compile_loss, y, outputs, weight)
