"""An optimizer that clips each unit's gradient by its weights. Runs wherever a model is;
``ddlf/algorithms/clipping.py`` has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ddlf.algorithms.clipping import Adaptive
from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.wrapper import Wrapper, dense, is_spared


@keras.saving.register_keras_serializable(package="ddlf")
class AGC(Wrapper):
    """Adaptive gradient clipping, for deep networks without normalization.

    Args:
        inner_optimizer: The optimizer that updates the weights.
        share: The largest ratio of a unit's gradient norm to its weight norm (lambda in the formula), > 0.
        last: Names of the last layers, whose gradients are not clipped. None selects the layer of the last weight.
        name: The optimizer's name in Keras.

    Raises:
        ConfigError: A value is out of range, or the model trains no layer with a name in ``last``.
    """

    def __init__(
        self, inner_optimizer: Any, share: float = 0.01, last: Sequence[str] | None = None, name: str | None = None
    ) -> None:
        super().__init__(inner_optimizer, name)
        self.rule = Adaptive(share=share)
        self.last = None if last is None else list(last)

    def begin(self, variables: list[Any]) -> None:
        """Find the weights whose gradients are not clipped. Implements ``Wrapper.begin``."""
        layers = [variable.path.rpartition("/")[0] for variable in variables if not is_spared(variable)]
        last_layers = [layers[-1]] if self.last is None else self.last
        if missing := [name for name in last_layers if not any(_is_in(layer, name) for layer in layers)]:
            raise ConfigError(
                f"last names {missing[0]!r}, but the model trains no such layer", hint="give the layer's name"
            )
        self._free = {
            self._var_key(variable)
            for variable in variables
            if is_spared(variable) or any(_is_in(variable.path.rpartition("/")[0], name) for name in last_layers)
        }

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Clip the gradients, and let the inner optimizer apply them. Implements ``Wrapper.change``."""
        self.inner_optimizer.apply([self._clipped(g, v) for g, v in zip(gradients, variables, strict=True)], variables)

    def _clipped(self, gradient: Any, variable: Any) -> Any:
        if self._var_key(variable) in self._free:
            return gradient
        dense_gradient = dense(gradient)
        return dense_gradient * self.rule.factor(dense_gradient, keras.ops.convert_to_tensor(variable), keras.ops)

    def options(self) -> dict[str, Any]:
        """Return the arguments to save with the optimizer. Implements ``Wrapper.options``."""
        return {"share": self.rule.share, "last": self.last}


def _is_in(layer: str, name: str) -> bool:
    return f"/{name}/" in f"/{layer}/"
