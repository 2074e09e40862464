"""An optimizer around another one: what all of ours have in common. Runs wherever a model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.utils import tracking

from ddlf.errors import ConfigError
from ddlf.training.slot.optimizers import chain

SPARED = "uncertainty_log_variance"
"""In the paths of weights that nothing clips: ``uncertainty`` trains them beside those of the model."""


class Wrapper(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer that does something to gradients or weights before or after another one has stepped.

    It works as Keras's ``LossScaleOptimizer`` does, by ``apply``, on every backend. Its variables are its own and those of the inner one.

    Args:
        inner_optimizer: The optimizer inside; also another wrapper. What scales the loss belongs outside of all.
        name: Keras's.

    Raises:
        ConfigError: What is inside scales the loss: then gradients would be seen scaled.
    """

    def __init__(self, inner_optimizer: Any, name: str | None = None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = keras.optimizers.get(inner_optimizer)
        for one in chain(self.inner_optimizer):
            if isinstance(one, keras.optimizers.LossScaleOptimizer) or one.loss_scale_factor is not None:
                raise ConfigError(
                    f"{type(self).__name__} sees gradients before {type(one).__name__} has divided them by the scale of the loss",
                    hint=f"put it inside: LossScaleOptimizer({type(self).__name__}(...))",
                )

    @tracking.no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, variables: Sequence[Any]) -> None:
        """Make what is kept of these weights."""
        if self.built:
            return
        self.begin(list(variables))
        self.inner_optimizer.build(self.stepped(list(variables)))
        super().build(variables)

    def begin(self, variables: list[Any]) -> None:
        """Make own variables."""

    def stepped(self, variables: list[Any]) -> list[Any]:
        """Those of the weights that the inner optimizer steps."""
        return variables

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Do a step: change gradients or weights, and call ``apply`` of the inner optimizer."""
        raise NotImplementedError

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Step along gradients, as Keras calls it."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables or ()))
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        self.change(*self._filter_empty_gradients(list(grads), list(given)))

    @property
    def variables(self) -> list[Any]:
        """Its own, and those of the inner optimizer."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """That of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.inner_optimizer.learning_rate = rate

    @property
    def iterations(self) -> Any:
        """Those of the inner optimizer."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """See Keras."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """As it is saved."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, **self.options()}

    def options(self) -> dict[str, Any]:
        """Arguments beside the inner optimizer, as they are saved."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """As it was saved."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "inner_optimizer": inner})


def is_spared(variable: Any) -> bool:
    """Whether nothing is to clip a weight."""
    return SPARED in str(getattr(variable, "path", variable.name))


def dense(gradient: Any) -> Any:
    """A gradient as a tensor; that of an embedding has only the rows that were used, some of them twice."""
    return keras.ops.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: Any) -> Any:
    """A gradient times a number, with the rows that it had."""
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):
        values = gradient.values * keras.ops.cast(factor, gradient.values.dtype)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    return keras.ops.multiply(gradient, keras.ops.cast(factor, gradient.dtype))
