"""Defines the Keras layer that computes one operator of a model text.

Import this before you load a model with such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from ddlf.extras.text.conversion.formulas import FORMULAS, Options, normalized, scaled

MOMENTUM = 0.99
"""Share of the moving mean that stays at each step, like in Keras's own layer."""


@keras.saving.register_keras_serializable("ddlf")
class Operator(keras.layers.Layer):  # type: ignore[misc]
    """The layer of an operator, with its parameters.

    Args:
        operator: The operator's name.
        operands: The operands in the order of the model text: numbers, and None for each parameter.
        options: The operator's options by name. ``shape`` is the shape of its output without the batch axis.
        parameters: The name, shape, type and initial values of each parameter: the name of an initializer of Keras, or a number.
        types: The type to cast each input to, and the type of the output.
        kwargs: The arguments that every Keras layer takes.
    """

    def __init__(
        self,
        operator: str,
        operands: Sequence[float | None] = (),
        options: Options | None = None,
        parameters: Sequence[Sequence[Any]] = (),
        types: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **{"dtype": "float32"} | kwargs)
        self.operator, self.operands, self.options = operator, tuple(operands), dict(options or {})
        self.parameters, self.types = [tuple(parameter) for parameter in parameters], tuple(types)
        self.seeds = keras.random.SeedGenerator() if operator == "dropout" else None
        self.learned: list[Any] = []

    def build(self, *shapes: Any) -> None:
        """Create the parameters (weights) of the operator."""
        for index, (name, shape, dtype, initial) in enumerate(self.parameters):
            statistic = self.operator == "batchNormalization" and index < 2
            self.learned.append(
                self.add_weight(
                    shape=tuple(shape),
                    dtype=dtype,
                    name=name,
                    trainable=not statistic and "int" not in dtype,
                    initializer=_initializer(initial, self.options.get("filterLayout", "oihw")),
                )
            )

    def call(self, *inputs: Any, training: bool = False) -> Any:
        """Compute the operator's output from its inputs."""
        *before, after = self.types
        if self.operator in ("quantizeLinear", "dequantizeLinear"):
            before = ["float32"]  # cast the input and its scale
        cast_inputs = [ops.cast(item, dtype) for item, dtype in zip(inputs, before, strict=True)]
        learned = iter(self.learned)
        operands = [ops.cast(next(learned) if number is None else number, before[0]) for number in self.operands]
        if self.operator == "gather":  # indices exceed small types
            operands = list(self.operands)
        if self.operator == "dropout":
            return (
                keras.random.dropout(cast_inputs[0], self.options.get("p", 0.5), seed=self.seeds)
                if training
                else cast_inputs[0]
            )
        if self.operator == "batchNormalization":
            return self._normalize_batch(cast_inputs[0], operands, training=training)
        options = self.options | {"dtype": after} if self.operator == "quantizeLinear" else self.options
        return ops.cast(FORMULAS[self.operator](cast_inputs, operands, options), after)

    def _normalize_batch(self, x: Any, operands: list[Any], *, training: bool) -> Any:
        """Normalize a batch (arXiv:1502.03167).

        In training, use the batch's mean and variance, and update the moving ones. Otherwise use the moving ones.
        """
        rank, axis = len(x.shape), self.options.get("axis", 0)
        axis = (axis + 1 if axis >= 0 else axis) % rank
        broadcast_shape = [1 if item != axis else -1 for item in range(rank)]
        mean, variance = (ops.reshape(operand, broadcast_shape) for operand in operands[:2])
        if training and self.trainable:
            mean, variance = ops.moments(x, axes=[item for item in range(rank) if item != axis], keepdims=True)
            for moving, batch_value in zip(self.learned, (mean, variance), strict=False):
                moving.assign(
                    MOMENTUM * moving + (1 - MOMENTUM) * ops.cast(ops.reshape(batch_value, (-1,)), moving.dtype)
                )
        return scaled(
            normalized(x, (mean, variance), self.options),
            [ops.reshape(operand, broadcast_shape) for operand in operands[2:]],
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this layer, which Keras saves with a model."""
        config: dict[str, Any] = super().get_config()
        arguments = {
            "operator": self.operator,
            "operands": list(self.operands),
            "options": self.options,
            "parameters": [list(parameter) for parameter in self.parameters],
            "types": list(self.types),
        }
        return config | arguments


def _initializer(initial: Any, layout: str) -> Any:
    """Return the initializer of a parameter. Filters are drawn in Keras's layout, then transposed."""
    if not isinstance(initial, str):
        return keras.initializers.Constant(initial)
    result = keras.initializers.get(initial)

    def transposed(shape: Any, dtype: Any = None) -> Any:
        if len(shape) != 4:
            return result(shape, dtype=dtype)
        filter_layout = "hwio"
        drawn = result(tuple(shape[layout.index(letter)] for letter in filter_layout), dtype=dtype)
        return ops.transpose(drawn, [filter_layout.index(letter) for letter in layout])

    return transposed
