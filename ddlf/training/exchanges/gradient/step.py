"""The gradient exchange: a worker computes the gradient of one batch, and the master steps along the mean of all.

``ddlf.training.slot.gradients`` computes the gradients. The master gives the mean gradient to the optimizer that the
model was compiled with. So momentum, clipping, schedules, weight decay and averages are Keras's own.

For n samples in parts of n_k, the loss is the sum of n_k / n times the losses of the parts. The same holds for its
gradient: Keras divides a loss by the number of samples, even if they have weights. Each part contains the whole
regularization loss, and the factors n_k / n add up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.outer import State
from ddlf.algorithms.weights import Tensor, is_float
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.slot.build import first_rows
from ddlf.training.slot.gradients import check_mean_losses
from ddlf.training.slot.optimizers import chain, followers, read_optimizer, write_optimizer
from ddlf.training.slot.transfer import transfer
from ddlf.training.slot.variables import set_weights

AT_FIRST = "_ddlf_at_first"
"""Attribute of an optimizer with its initial state, because Keras cannot reset it."""


def check_model(app: App) -> None:
    """Raise an error for a model whose mean gradient over parts differs from the gradient of the whole batch.

    Raises:
        ConfigError: The model has a scaled loss, or a loss whose reduction is not the mean over samples.
    """
    import keras

    if any(
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
        for optimizer in chain(app.model.optimizer)
    ):
        raise ConfigError(
            "exchange='gradient' does not support a scaled loss: gradients are float32",
            hint="compile the model without LossScaleOptimizer and loss_scale_factor",
        )
    check_mean_losses(app.model, "exchange='gradient'", first_rows(app, "train"), by_entries=True)


class Step:
    """An outer optimizer that changes the weights with a Keras optimizer. The merged updates are gradients.

    Its state is the optimizer's state, so every checkpoint contains it. An untrained weight becomes the mean of the
    workers' values.

    Args:
        model: The master's model, compiled and built. The step changes its weights and its optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._optimizer = model, model.optimizer
        self._last: State | None = None  # the optimizer's current state
        self._apply: Callable[[list[Any]], Any] | None = None
        indices = {id(weight): index for index, weight in enumerate(model.weights)}
        self._indices = [indices[id(weight)] for weight in model.trainable_variables]
        if not self._optimizer.built:  # a resumed run writes a state into it before anything asks for the initial one
            self._optimizer.build(model.trainable_variables)
        self._initial: State = vars(self._optimizer).setdefault(AT_FIRST, read_optimizer(model))

    def plan(self, steps: int, epochs: int) -> None:
        """Give the optimizer's schedules the number of steps and epochs of the run. Each round is one step."""
        for follower in followers(self._optimizer):
            follower.plan(steps, epochs)

    def init(self, weights: Sequence[Tensor]) -> State:
        """Return the optimizer's initial state, as ``OuterOptimizer`` requires."""
        return self._initial

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """Take one step along the mean gradient, as ``OuterOptimizer`` requires. Return the new state and weights."""
        import keras

        if self._apply is None:
            self._apply = _compiled(self._optimizer)
        set_weights(self._model, weights)  # a hook may have changed the model's weights
        if state is not self._last:
            write_optimizer(self._model, state)
        self._apply([keras.ops.convert_to_tensor(merged[index]) for index in self._indices])
        self._last = read_optimizer(self._model)
        after = [np.asarray(w - g, w.dtype) if is_float(w) else w for w, g in zip(weights, merged, strict=True)]
        for index, weight in zip(self._indices, transfer().read(self._model.trainable_variables), strict=True):
            after[index] = weight
        return self._last, after


def _compiled(optimizer: Any) -> Callable[[list[Any]], Any]:
    """Return a function that makes one step of the optimizer along given gradients. TensorFlow compiles it."""
    import keras

    if keras.backend.backend() != "tensorflow":
        apply: Callable[[list[Any]], Any] = optimizer.apply
        return apply
    import tensorflow as tf

    compiled: Callable[[list[Any]], Any] = tf.function(optimizer.apply)
    return compiled
