"""An optimizer whose steps are longer or shorter for some layers, or none at all. Runs wherever a model is."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import keras

from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.wrapper import Wrapper
from ddlf.training.slot.optimizers import chain

FACTORS = "_ddlf_factors"
"""Where a model has the factors that each optimizer of it is to have."""


@keras.saving.register_keras_serializable(package="ddlf")
class Multipliers(Wrapper):
    """Multiply the steps of some weights: ``w <- w + m (w' - w)``, with ``w'`` what the inner optimizer makes of ``w``.

    So it is a factor of the learning rate whatever the optimizer keeps, weight decay with it. With 0 a weight is frozen: the
    inner optimizer does not see it, keeps nothing of it, and its bits stay.

    Args:
        inner_optimizer: What steps.
        factors: By the names of layers, or of weights as ``"dense/kernel"``; of several that fit the longest counts. Each is 0 or more.
        name: Keras's.

    Raises:
        ConfigError: A factor is out of range; or, when the model is built, no weight belongs to a name, or all are frozen.

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
        """See ``Wrapper``."""
        paths = [one.path for one in variables]
        if unknown := [key for key in self.factors if not any(is_part(key, path) for path in paths)]:
            raise ConfigError(
                f"a factor is given for {unknown[0]!r}, but the model trains no such layer or weight",
                hint=f"give names such as {', '.join(dict.fromkeys(path.rpartition('/')[0] for path in paths[:3]))}",
            )
        self._by_key = {self._var_key(one): factor_of(one.path, self.factors) for one in variables}
        if not any(self._by_key.values()):
            raise ConfigError("all weights are frozen: nothing is left to train", hint="leave one factor above 0")

    def stepped(self, variables: list[Any]) -> list[Any]:
        """See ``Wrapper``."""
        return [one for one in variables if self._by_key[self._var_key(one)]]

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """See ``Wrapper``."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if self._by_key[self._var_key(v)]]
        others = [(v, self._by_key[self._var_key(v)]) for _, v in pairs if self._by_key[self._var_key(v)] != 1]
        before = [keras.ops.copy(v) for v, _ in others]  # the step is done in place
        self.inner_optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        for (variable, factor), old in zip(others, before, strict=True):
            variable.assign(old + factor * (keras.ops.convert_to_tensor(variable) - old))

    def options(self) -> dict[str, Any]:
        """See ``Wrapper``."""
        return {"factors": self.factors}


def is_part(key: str, path: str) -> bool:
    """Whether a weight belongs to a name: that of its layer, of a model that the layer is in, or its own."""
    return f"/{key}/" in f"/{path}/"


def factor_of(path: str, factors: Mapping[str, float]) -> float:
    """The factor of a weight, 1 if it has none."""
    fitting = sorted((key.count("/"), len(key), factor) for key, factor in factors.items() if is_part(key, path))
    return fitting[-1][2] if fitting else 1.0


def multiplied(model: Any, factors: Mapping[str, float]) -> Any:
    """Have whatever optimizer a model is compiled with step by these factors, such as ``lrm=`` of a text.

    Args:
        model: Built. Its ``compile`` is another one from here on; what is saved has the optimizer with its factors.
        factors: By the names of layers; those of layers without weights that are trained have no effect.

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
    """An optimizer that has the factors of ``multiplied``, if a model has any."""
    if not (factors := vars(model).get(FACTORS)):
        return optimizer
    paths = [one.path for one in model.trainable_variables]
    known = {key: one for key, one in factors.items() if any(is_part(key, path) for path in paths)}
    return with_factors(keras.optimizers.get(optimizer), known)


def with_factors(optimizer: Any, factors: Mapping[str, float]) -> Any:
    """An optimizer that has these factors, if it has none already; what scales the loss stays outside."""
    if not factors or any(isinstance(one, Multipliers) for one in chain(optimizer)):
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.inner_optimizer = Multipliers(optimizer.inner_optimizer, factors)
        return optimizer
    return Multipliers(optimizer, factors)
