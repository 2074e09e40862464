"""The base class of optimizers that wrap another optimizer. Runs wherever a model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.utils import tracking

from ddlf.errors import ConfigError
from ddlf.training.slot.optimizers import chain

SPARED = "uncertainty_log_variance"
"""The path part of weights that no wrapper clips. ``uncertainty`` trains them besides the model's weights."""


class Wrapper(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that changes gradients or weights before or after another optimizer updates the weights.

    It overrides ``apply``, like Keras's ``LossScaleOptimizer``, and works on every backend. Its variables include those
    of the inner optimizer.

    Args:
        inner_optimizer: The optimizer inside, or another wrapper. A loss scaling optimizer must be outermost.
        name: The optimizer's name in Keras.

    Raises:
        ConfigError: The inner optimizer scales the loss, so that this wrapper would get scaled gradients.
    """

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = keras.optimizers.get(inner_optimizer)
        for wrapped in chain(self.inner_optimizer):
            if isinstance(wrapped, keras.optimizers.LossScaleOptimizer) or wrapped.loss_scale_factor is not None:
                raise ConfigError(
                    f"{type(self).__name__} sees gradients before {type(wrapped).__name__} has divided them by the scale of the loss",
                    hint=f"put it inside: LossScaleOptimizer({type(self).__name__}(...))",
                )

    @tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer state for these weights.

        Raises:
            ConfigError: The model has copies on several cards, in a strategy of TensorFlow.
        """
        if self.built:
            return
        strategy = getattr(self, "_distribution_strategy", None)  # only TensorFlow has one, also by default
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise ConfigError(
                f"{type(self).__name__} would see the gradients of one card only, but the strategy of TensorFlow has "
                f"{strategy.num_replicas_in_sync}",
                hint="leave out the strategy, and start one worker for each card",
            )
        self.begin(list(variables))
        self.inner_optimizer.build(self.stepped(list(variables)))
        super().build(variables)

    def begin(self, variables: list[Any]) -> None:
        """Create the state of this wrapper before training. Subclasses override this."""

    def stepped(self, variables: list[Any]) -> list[Any]:
        """Return the weights that the inner optimizer updates; by default all. Subclasses override this."""
        return variables

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Take a training step: change gradients or weights, and call ``apply`` of the inner optimizer. Subclasses
        override this.
        """
        raise NotImplementedError

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply gradients to weights, as Keras calls it."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables or ()))
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        self.change(*self._filter_empty_gradients(list(grads), list(variables)))

    @property
    def variables(self) -> list[Any]:
        """Return the variables of this wrapper and of the inner optimizer."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """Return the learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.inner_optimizer.learning_rate = rate

    @property
    def iterations(self) -> Any:
        """Return the step count of the inner optimizer."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Let the inner optimizer do its last changes of the weights, such as averages. Overrides Keras's
        ``finalize_variable_values``.
        """
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this wrapper, including the inner optimizer, which Keras saves with a model."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, **self.options()}

    def options(self) -> dict[str, Any]:
        """Return the arguments to save, except the inner optimizer."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create the wrapper from the arguments that Keras has saved."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "inner_optimizer": inner})


def is_spared(variable: Any) -> bool:
    """Return whether a weight is marked to be excluded from clipping, such as the log variances of ``Uncertain``."""
    return SPARED in str(getattr(variable, "path", variable.name))


def dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor. An embedding's sparse gradient may contain a row twice."""
    return keras.ops.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: Any) -> Any:
    """Return a gradient times a number. A sparse gradient stays sparse."""
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):
        values = gradient.values * keras.ops.cast(factor, gradient.values.dtype)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    return keras.ops.multiply(gradient, keras.ops.cast(factor, gradient.dtype))
