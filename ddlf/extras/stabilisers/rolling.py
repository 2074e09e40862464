"""An optimizer that clips by what norms were before. Runs wherever a model is; ``ddlf/algorithms/clipping.py`` has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ddlf.algorithms.clipping import Rolling
from ddlf.extras.stabilisers.wrapper import Wrapper, dense, is_spared, scaled


@keras.saving.register_keras_serializable(package="ddlf")
class RollingClip(Wrapper):
    """Clip gradients by the rolling mean and spread of their norm: a batch of outliers steps no further than usual ones.

    A batch with a gradient that is not finite changes nothing: neither weights nor what optimizers keep.

    Args:
        inner_optimizer: What steps.
        decay, first, later, warm: As of ``ddlf.algorithms.clipping.Rolling``.
        name: Keras's.

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
        """See ``Wrapper``."""
        self.norms = self.add_variable((2,), name="norms", dtype="float32")  # mean and spread
        self.count = self.add_variable((), name="count", dtype="int32")

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """See ``Wrapper``."""
        norm = self._norm(gradients, variables)
        if keras.backend.backend() == "tensorflow":
            keras.ops.cond(keras.ops.isfinite(norm), lambda: self._step(gradients, variables, norm), lambda: None)
            return
        # With JAX a branch has no side effects: it is handed all values, and gives those that they become.
        whole = [*variables, *self.variables]
        values = [one.value for one in whole]

        def stepped() -> list[Any]:
            with keras.StatelessScope(state_mapping=list(zip(whole, values, strict=True))) as scope:
                self._step(gradients, variables, norm)
            return [scope.get_current_value(one) for one in whole]

        for one, value in zip(whole, keras.ops.cond(keras.ops.isfinite(norm), stepped, lambda: values), strict=True):
            one.assign(value)

    def _step(self, gradients: list[Any], variables: list[Any], norm: Any) -> None:
        norms = keras.ops.convert_to_tensor(self.norms)
        mean, spread, most = self.rule.seen(
            norm, norms[0], norms[1], keras.ops.convert_to_tensor(self.count), keras.ops
        )
        factor = self.rule.factor(norm, most, keras.ops)
        self.norms.assign(keras.ops.stack([mean, spread]))
        self.count.assign_add(1)
        # All of them are made in this branch: TensorFlow takes no others.
        factors = [1.0 if is_spared(v) else factor for v in variables]
        self.inner_optimizer.apply([scaled(g, f) for g, f in zip(gradients, factors, strict=True)], variables)

    def _norm(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """G, of all gradients together."""
        squares = [
            keras.ops.sum(keras.ops.square(keras.ops.cast(dense(g), "float32")))
            for g, v in zip(gradients, variables, strict=True)
            if not is_spared(v)
        ]
        return keras.ops.sqrt(sum(squares[1:], squares[0]))

    def options(self) -> dict[str, Any]:
        """See ``Wrapper``."""
        return {name: getattr(self.rule, name) for name in ("decay", "first", "later", "warm")}
