"""Weighs several losses by the uncertainty of their tasks, which the model learns. Runs wherever a model is."""

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
    """Return ``L = sum(L_i / (2 exp s_i) + s_i / 2)``, which has its minimum at ``s_i = ln L_i``.

    The losses L_i and the log variances s_i have the shape (tasks,)."""
    return ops.sum(losses * ops.exp(-log_variances) + log_variances) / 2


@keras.saving.register_keras_serializable(package="ddlf")
class Uncertain(keras.Model):  # type: ignore[misc]
    """A model that balances the losses L_i of its outputs: ``L = sum(L_i / (2 exp s_i) + s_i / 2)``.

    The s_i are a weight of the model. Training starts them at 0, and applies neither weight decay nor ``RollingClip``
    nor ``AGC`` to them. The wrapped model's metrics stay the same, including ``NAME_loss`` for each output.

    Args:
        model: The model to wrap. Its outputs are a list or a dict of two or more. The wrapper shares its weights.
        name: The model's name in Keras.
        first: The approximate initial loss of each output, by name. Its logarithm replaces 0 as the first s_i, so that
            s_i converges sooner.

    Raises:
        ConfigError: The model has one output, or a first loss is not above 0. In ``compile``: an output has no loss, or
            ``loss_weights`` is set, which ``Uncertain`` replaces.

    Source:
        Kendall, Gal, Cipolla 2018, arXiv:1705.07115.
    """

    def __init__(
        self, model: Any, name: str | None = None, first: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(name=name or f"{model.name}_uncertain", **kwargs)
        self.inner = model
        # Labels and losses have these names. Keras names outputs by their last layers.
        outputs = getattr(model, "_outputs_struct", None)
        self.output_names = sorted(outputs) if isinstance(outputs, Mapping) else list(model.output_names)
        if len(self.output_names) < 2:
            raise ConfigError(
                f"{model.name!r} has one output, and uncertainty weighs several losses",
                hint="compile the model without Uncertain",
            )
        self.first = None if first is None else {name: float(first.get(name, 0)) for name in self.output_names}
        if self.first is not None and not (
            set(first or ()) == set(self.first) and all(map(_is_loss, self.first.values()))
        ):
            raise ConfigError(
                f"first needs a loss above 0 for each of {', '.join(self.output_names)}, got {first!r}",
                hint="give the losses before training",
            )
        self.log_variances = self.add_weight(shape=(len(self.output_names),), initializer="zeros", name=SPARED)
        if self.first is not None:
            self.log_variances.assign([math.log(self.first[name]) for name in self.output_names])
        self.parts = [keras.metrics.Mean(name=f"{output}_loss") for output in self.output_names]
        self.built = True

    @property
    def wrapped_model(self) -> Any:
        """Return the wrapped model, so that ``ddlf.training.slot.optimizers.unwrapped`` can find it."""
        return self.inner

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the outputs of the wrapped model."""
        return self.inner(inputs, training=training)

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, loss_weights: Any = None, **kwargs: Any) -> None:
        """Compile the model with a loss for each output. Overrides Keras's ``compile``."""
        if loss_weights is not None:
            raise ConfigError(
                "loss_weights has no effect: uncertainty weighs the losses", hint="leave loss_weights out"
            )
        losses = self._ordered_by_output(loss) if keras.tree.is_nested(loss) else [loss] * len(self.output_names)
        self.losses_of = [keras.losses.get(output_loss) for output_loss in losses]
        if len(losses) != len(self.output_names) or None in self.losses_of:
            raise ConfigError(
                f"{len(self.output_names)} outputs need {len(self.output_names)} losses, got {loss!r}",
                hint=f"loss={{{', '.join(f'{name!r}: ...' for name in self.output_names)}}}",
            )
        super().compile(optimizer=with_factors_of(self.inner, optimizer), loss=loss, **kwargs)
        # Keep the weights that the user excluded from weight decay.
        inner = innermost(self.optimizer)
        spared = {*getattr(inner, "_exclude_from_weight_decay", ()), inner._var_key(self.log_variances)}
        inner._exclude_from_weight_decay = spared
        inner._exclude_from_weight_decay_pattern = getattr(inner, "_exclude_from_weight_decay_pattern", None)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Create the object from its saved config."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the weighed sum of the losses. Overrides Keras's ``compute_loss``."""
        labels, outputs = self._ordered_by_output(y), self._ordered_by_output(y_pred)
        weights = (
            self._ordered_by_output(sample_weight)
            if keras.tree.is_nested(sample_weight)
            else [sample_weight] * len(labels)
        )
        losses = []
        for loss, label, output, weight, part in zip(self.losses_of, labels, outputs, weights, self.parts, strict=True):
            output_loss = loss(label, output) if weight is None else loss(label, output, weight)
            losses.append(output_loss := keras.ops.mean(output_loss))
            part.update_state(output_loss, sample_weight=keras.ops.shape(output)[0])
        return weighed(keras.ops.stack(losses), keras.ops.convert_to_tensor(self.log_variances), keras.ops) + sum(
            self.losses
        )

    def _ordered_by_output(self, values: Any) -> list[Any]:
        """Return values that are given for each output, such as labels, in the order of the output names."""
        return [values[name] for name in self.output_names] if isinstance(values, Mapping) else list(values)

    def get_config(self) -> dict[str, Any]:
        """Return the wrapped model and the other arguments, which Keras saves with this model."""
        return {
            "name": self.name,
            "model": keras.saving.serialize_keras_object(self.inner),
            "first": self.first and dict(self.first),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create the object from its saved config."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(model, name=config["name"], first=config.get("first"))


def _is_loss(value: float) -> bool:
    return math.isfinite(value) and value > 0
