"""The layer of Keras that holds one operator of a model as text. Import this before a model with such layers is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from ddlf.extras.text.conversion.formulas import FORMULAS, Options, normalized, scaled

MOMENTUM = 0.99
"""How much of a mean over batches stays at each step, as in Keras's own layer."""


@keras.saving.register_keras_serializable("ddlf")
class Operator(keras.layers.Layer):  # type: ignore[misc]
    """An operator with its parameters.

    Args:
        operator: Its name.
        operands: Numbers, and for each parameter None, in the order of the text.
        options: Its options by name; ``shape`` is the shape of its output without the batch.
        parameters: The name, shape, type and initial values of each parameter: the name of an initializer of Keras, or a number.
        types: The type in which it computes each input, and the type of its output.
        kwargs: The arguments of any layer.
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
        self.made: list[Any] = []

    def build(self, *shapes: Any) -> None:
        """Make the parameters."""
        for index, (name, shape, dtype, initial) in enumerate(self.parameters):
            statistic = self.operator == "batchNormalization" and index < 2
            self.made.append(
                self.add_weight(
                    shape=tuple(shape),
                    dtype=dtype,
                    name=name,
                    trainable=not statistic and "int" not in dtype,
                    initializer=_initializer(initial, self.options.get("filterLayout", "oihw")),
                )
            )

    def call(self, *into: Any, training: bool = False) -> Any:
        """Compute what the operator says."""
        *before, after = self.types
        if self.operator in ("quantizeLinear", "dequantizeLinear"):
            before = ["float32"]  # what it makes larger or smaller, and by how much
        given = [ops.cast(item, dtype) for item, dtype in zip(into, before, strict=True)]
        learned = iter(self.made)
        operands = [ops.cast(next(learned) if number is None else number, before[0]) for number in self.operands]
        if self.operator == "gather":  # a place, which small types have no room for
            operands = list(self.operands)
        if self.operator == "dropout":
            return keras.random.dropout(given[0], self.options.get("p", 0.5), seed=self.seeds) if training else given[0]
        if self.operator == "batchNormalization":
            return self._normalize_batch(given[0], operands, training=training)
        options = self.options | {"dtype": after} if self.operator == "quantizeLinear" else self.options
        return ops.cast(FORMULAS[self.operator](given, operands, options), after)

    def _normalize_batch(self, x: Any, operands: list[Any], *, training: bool) -> Any:
        """Normalize by the batch's mean and variance in training, and update the kept ones; else by the kept ones (arXiv:1502.03167)."""
        rank, axis = len(x.shape), self.options.get("axis", 0)
        axis = (axis + 1 if axis >= 0 else axis) % rank
        wide = [1 if item != axis else -1 for item in range(rank)]
        mean, variance = (ops.reshape(operand, wide) for operand in operands[:2])
        if training and self.trainable:
            mean, variance = ops.moments(x, axes=[item for item in range(rank) if item != axis], keepdims=True)
            for kept, now in zip(self.made, (mean, variance), strict=False):
                kept.assign(MOMENTUM * kept + (1 - MOMENTUM) * ops.cast(ops.reshape(now, (-1,)), kept.dtype))
        return scaled(
            normalized(x, (mean, variance), self.options), [ops.reshape(operand, wide) for operand in operands[2:]]
        )

    def get_config(self) -> dict[str, Any]:
        """Return the config of the layer."""
        config: dict[str, Any] = super().get_config()
        own = {
            "operator": self.operator,
            "operands": list(self.operands),
            "options": self.options,
            "parameters": [list(parameter) for parameter in self.parameters],
            "types": list(self.types),
        }
        return config | own


def _initializer(initial: Any, layout: str) -> Any:
    """Return the initializer of a parameter. Filters are drawn in Keras's layout, then transposed."""
    if not isinstance(initial, str):
        return keras.initializers.Constant(initial)
    result = keras.initializers.get(initial)

    def turned(shape: Any, dtype: Any = None) -> Any:
        if len(shape) != 4:
            return result(shape, dtype=dtype)
        usual = "hwio"
        drawn = result(tuple(shape[layout.index(letter)] for letter in usual), dtype=dtype)
        return ops.transpose(drawn, [usual.index(letter) for letter in layout])

    return turned
