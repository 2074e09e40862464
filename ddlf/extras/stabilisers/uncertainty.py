"""Several losses, each weighed by how uncertain its task is, which is learned. Runs wherever a model is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.multipliers import with_factors_of
from ddlf.extras.stabilisers.wrapper import SPARED
from ddlf.training.slot.optimizers import innermost


def weighed(losses: Any, log_variances: Any, ops: Any) -> Any:
    """L, of the losses of the tasks, shape (tasks,): ``sum(L_i / (2 exp s_i) + s_i / 2)``, least where ``s_i = ln L_i``."""
    return ops.sum(losses * ops.exp(-log_variances) + log_variances) / 2


@keras.saving.register_keras_serializable(package="ddlf")
class Uncertain(keras.Model):  # type: ignore[misc]
    """A model of several outputs whose losses may be of any size: ``L = sum(L_i / (2 exp s_i) + s_i / 2)``.

    The s_i are a weight of the model, trained from 0 without weight decay and without ``RollingClip`` and ``AGC``. Metrics are those of the model,
    and ``NAME_loss`` for each output, as without it.

    Args:
        model: With two outputs or more, a list or a dict. Its weights are this one's.
        name: Keras's.
        first: About what each loss is at first, by the output's name: s_i begins with its logarithm, in place of 0, and has not far to go.

    Raises:
        ConfigError: It has one output, or first losses that are none; or, in ``compile``, not one loss for each, or ``loss_weights``, in whose
            place this stands.

    Source:
        Kendall, Gal, Cipolla 2018, arXiv:1705.07115.
    """

    def __init__(
        self, model: Any, name: str | None = None, first: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(name=name or f"{model.name}_uncertain", **kwargs)
        self.inner = model
        named = getattr(
            model, "_outputs_struct", None
        )  # by which labels and losses are given; Keras has those of the last layers
        self.output_names = sorted(named) if isinstance(named, Mapping) else list(model.output_names)
        if len(self.output_names) < 2:
            raise ConfigError(
                f"{model.name!r} has one output, and uncertainty weighs several losses", hint="compile it as it is"
            )
        self.first = None if first is None else {name: float(first.get(name, 0)) for name in self.output_names}
        if self.first is not None and not (
            set(first or ()) == set(self.first) and all(map(_is_loss, self.first.values()))
        ):
            raise ConfigError(
                f"first needs a loss above 0 for each of {', '.join(self.output_names)}, got {first!r}",
                hint="what the losses are before training",
            )
        self.log_variances = self.add_weight(shape=(len(self.output_names),), initializer="zeros", name=SPARED)
        if self.first is not None:
            self.log_variances.assign([math.log(self.first[name]) for name in self.output_names])
        self.parts = [keras.metrics.Mean(name=f"{one}_loss") for one in self.output_names]
        self.built = True

    @property
    def wrapped_model(self) -> Any:
        """See ``ddlf.training.slot.optimizers.unwrapped``."""
        return self.inner

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The outputs of the model."""
        return self.inner(inputs, training=training)

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, loss_weights: Any = None, **kwargs: Any) -> None:
        """See Keras."""
        if loss_weights is not None:
            raise ConfigError(
                "loss_weights has no effect: uncertainty weighs the losses", hint="leave loss_weights out"
            )
        given = self._in_order(loss) if keras.tree.is_nested(loss) else [loss] * len(self.output_names)
        self.losses_of = [keras.losses.get(one) for one in given]
        if len(given) != len(self.output_names) or None in self.losses_of:
            raise ConfigError(
                f"{len(self.output_names)} outputs need as many losses, got {loss!r}",
                hint=f"loss={{{', '.join(f'{one!r}: ...' for one in self.output_names)}}}",
            )
        super().compile(optimizer=with_factors_of(self.inner, optimizer), loss=loss, **kwargs)
        # Beside those that the user leaves out of the weight decay.
        inner = innermost(self.optimizer)
        spared = {*getattr(inner, "_exclude_from_weight_decay", ()), inner._var_key(self.log_variances)}
        inner._exclude_from_weight_decay = spared
        inner._exclude_from_weight_decay_pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """As it was saved."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """See Keras."""
        labels, outputs = self._in_order(y), self._in_order(y_pred)
        weights = (
            self._in_order(sample_weight) if keras.tree.is_nested(sample_weight) else [sample_weight] * len(labels)
        )
        found = []
        for loss, label, output, weight, part in zip(self.losses_of, labels, outputs, weights, self.parts, strict=True):
            one = loss(label, output) if weight is None else loss(label, output, weight)
            found.append(one := keras.ops.mean(one))
            part.update_state(one, sample_weight=keras.ops.shape(output)[0])
        return weighed(keras.ops.stack(found), keras.ops.convert_to_tensor(self.log_variances), keras.ops) + sum(
            self.losses
        )

    def _in_order(self, given: Any) -> list[Any]:
        """What is given for each output, in the order of the names."""
        return [given[name] for name in self.output_names] if isinstance(given, Mapping) else list(given)

    def get_config(self) -> dict[str, Any]:
        """As it is saved."""
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.inner),
            "first": self.first and dict(self.first),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """As it was saved."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(model, name=config["name"], first=config.get("first"))


def _is_loss(value: float) -> bool:
    return math.isfinite(value) and value > 0
