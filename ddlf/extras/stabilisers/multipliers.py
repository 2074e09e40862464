"""An optimizer that multiplies the steps of some layers, or freezes them. Runs wherever a model is."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import keras

from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.wrapper import Wrapper
from ddlf.training.slot.optimizers import chain

FACTORS = "_ddlf_factors"
"""The attribute of a model that stores the factors for each optimizer that it is compiled with."""


@keras.saving.register_keras_serializable(package="ddlf")
class Multipliers(Wrapper):
    """Multiply the steps of some weights: ``w <- w + m (w' - w)``. The inner optimizer computes ``w'`` from ``w``.

    The factor m acts like a factor of the learning rate for every kind of optimizer, and includes weight decay. A
    factor of 0 freezes a weight: the inner optimizer does not see it and has no state for it, and its bits do not
    change.

    Args:
        inner_optimizer: The optimizer that updates the weights.
        factors: Factors of 0 or more, by the name of a layer, or of a weight such as ``"dense/kernel"``. If several
            names match a weight, the longest one applies.
        name: The optimizer's name in Keras.

    Raises:
        ConfigError: A factor is out of range. When the model is built: a name matches no weight, or all weights are
            frozen.

    Example::

        Multipliers(keras.optimizers.Adam(1e-3), {"backbone": 0.1, "head/bias": 2.0})
    """

    def __init__(self, inner_optimizer: Any, factors: Mapping[str, float], name: str | None = None) -> None:
        super().__init__(inner_optimizer, name)
        self.factors = {str(key): float(factor) for key, factor in factors.items()}
        for key, factor in self.factors.items():
            if not (isfinite(factor) and factor >= 0):
                raise ConfigError(f"the factor of {key!r} must be finite and 0 or more, got {factor}")

    def begin(self, variables: list[Any]) -> None:
        """Find the factor of each weight. Implements ``Wrapper.begin``."""
        paths = [variable.path for variable in variables]
        if unknown := [key for key in self.factors if not any(is_part(key, path) for path in paths)]:
            raise ConfigError(
                f"a factor is given for {unknown[0]!r}, but the model trains no such layer or weight",
                hint=f"give names such as {', '.join(dict.fromkeys(path.rpartition('/')[0] for path in paths[:3]))}",
            )
        self._by_key = {self._var_key(variable): factor_of(variable.path, self.factors) for variable in variables}
        if not any(self._by_key.values()):
            raise ConfigError("all weights are frozen, so there is no weight to train", hint="leave one factor above 0")

    def stepped(self, variables: list[Any]) -> list[Any]:
        """Return the weights whose factor is not 0. Implements ``Wrapper.stepped``."""
        return [variable for variable in variables if self._by_key[self._var_key(variable)]]

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Take a step of the inner optimizer, and multiply it by the factors. Implements ``Wrapper.change``."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if self._by_key[self._var_key(v)]]
        slowed = [(v, self._by_key[self._var_key(v)]) for _, v in pairs if self._by_key[self._var_key(v)] != 1]
        before = [keras.ops.copy(v) for v, _ in slowed]  # the inner optimizer updates weights in place
        self.inner_optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        for (variable, factor), old in zip(slowed, before, strict=True):
            variable.assign(old + factor * (keras.ops.convert_to_tensor(variable) - old))

    def options(self) -> dict[str, Any]:
        """Return the arguments to save with the optimizer. Implements ``Wrapper.options``."""
        return {"factors": self.factors}


def is_part(key: str, path: str) -> bool:
    """Return whether a name matches a weight: it may be the name of the weight, of its layer, or of an enclosing model."""
    return f"/{key}/" in f"/{path}/"


def factor_of(path: str, factors: Mapping[str, float]) -> float:
    """Return the factor of a weight; 1 if no name matches."""
    fitting = sorted((key.count("/"), len(key), factor) for key, factor in factors.items() if is_part(key, path))
    return fitting[-1][2] if fitting else 1.0


def multiplied(model: Any, factors: Mapping[str, float]) -> Any:
    """Apply these factors to every optimizer that a model is compiled with, such as those of ``lrm=`` in a text.

    Args:
        model: A built model. This function replaces its ``compile``. A saved model contains the optimizer with the
            factors.
        factors: Factors by layer name. A factor of a layer without trained weights has no effect.

    Returns:
        The model.
    """
    if not factors:
        return model
    vars(model)[FACTORS] = dict(factors)
    compile_plain = model.compile

    def compile(optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        compile_plain(with_factors_of(model, optimizer), *args, **kwargs)

    vars(model)["compile"] = compile
    return model


def with_factors_of(model: Any, optimizer: Any) -> Any:
    """Return the optimizer, with the factors that ``multiplied`` gave to the model, if there are any."""
    if not (factors := vars(model).get(FACTORS)):
        return optimizer
    paths = [variable.path for variable in model.trainable_variables]
    used = {key: factor for key, factor in factors.items() if any(is_part(key, path) for path in paths)}
    return with_factors(keras.optimizers.get(optimizer), used)


def with_factors(optimizer: Any, factors: Mapping[str, float]) -> Any:
    """Return the optimizer with these factors, unless it already has factors. A loss scaling optimizer stays
    outermost."""
    if not factors or any(isinstance(wrapped, Multipliers) for wrapped in chain(optimizer)):
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.inner_optimizer = Multipliers(optimizer.inner_optimizer, factors)
        return optimizer
    return Multipliers(optimizer, factors)
