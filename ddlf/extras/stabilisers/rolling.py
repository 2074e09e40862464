"""An optimizer that clips gradients by the norms of earlier steps.

Runs wherever a model is; ``ddlf/algorithms/clipping.py`` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ddlf.algorithms.clipping import Rolling
from ddlf.extras.stabilisers.wrapper import Wrapper, dense, is_spared, scaled


@keras.saving.register_keras_serializable(package="ddlf")
class RollingClip(Wrapper):
    """Clip gradients by the rolling mean and spread of their norm. A batch of outliers then takes a usual step.

    A batch with a gradient that is NaN or infinite changes neither the weights nor the optimizer state.

    Args:
        inner_optimizer: The optimizer that updates the weights.
        decay, first, later, warm: The arguments of ``ddlf.algorithms.clipping.Rolling``.
        name: The optimizer's name in Keras.

    Raises:
        ConfigError: A value is out of range.

    Example::

        model.compile(RollingClip(keras.optimizers.Adam(1e-3)), loss)
    """

    def __init__(
        self,
        inner_optimizer: Any,
        decay: float = 0.9,
        first: float = 4.0,
        later: float = 2.0,
        warm: int = 15,
        name: str | None = None,
    ) -> None:
        super().__init__(inner_optimizer, name)
        self.rule = Rolling(decay=decay, first=first, later=later, warm=warm)

    def begin(self, variables: list[Any]) -> None:
        """Create the variables for the rolling mean and spread of the norm. Implements ``Wrapper.begin``."""
        self.norms = self.add_variable((2,), name="norms", dtype="float32")  # mean and spread
        self.count = self.add_variable((), name="count", dtype="int32")

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Clip the gradients, and let the inner optimizer apply them. Implements ``Wrapper.change``."""
        norm = self._norm(gradients, variables)
        if keras.backend.backend() == "tensorflow":
            keras.ops.cond(keras.ops.isfinite(norm), lambda: self._step(gradients, variables, norm), lambda: None)
            return
        # A branch in JAX has no side effects: it takes all values as arguments, and returns the new ones.
        all_variables = [*variables, *self.variables]
        values = [variable.value for variable in all_variables]

        def stepped() -> list[Any]:
            with keras.StatelessScope(state_mapping=list(zip(all_variables, values, strict=True))) as scope:
                self._step(gradients, variables, norm)
            return [scope.get_current_value(variable) for variable in all_variables]

        for variable, value in zip(
            all_variables, keras.ops.cond(keras.ops.isfinite(norm), stepped, lambda: values), strict=True
        ):
            variable.assign(value)

    def _step(self, gradients: list[Any], variables: list[Any], norm: Any) -> None:
        norms = keras.ops.convert_to_tensor(self.norms)
        mean, spread, most = self.rule.observe(
            norm, norms[0], norms[1], keras.ops.convert_to_tensor(self.count), keras.ops
        )
        factor = self.rule.factor(norm, most, keras.ops)
        self.norms.assign(keras.ops.stack([mean, spread]))
        self.count.assign_add(1)
        # TensorFlow requires that this branch creates all of its tensors.
        factors = [1.0 if is_spared(v) else factor for v in variables]
        self.inner_optimizer.apply([scaled(g, f) for g, f in zip(gradients, factors, strict=True)], variables)

    def _norm(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Return G, the norm of all gradients together."""
        squares = [
            keras.ops.sum(keras.ops.square(keras.ops.cast(dense(g), "float32")))
            for g, v in zip(gradients, variables, strict=True)
            if not is_spared(v)
        ]
        return keras.ops.sqrt(sum(squares[1:], squares[0]))

    def options(self) -> dict[str, Any]:
        """Return the arguments to save with the optimizer. Implements ``Wrapper.options``."""
        return {name: getattr(self.rule, name) for name in ("decay", "first", "later", "warm")}
