"""A loss that ignores masked entries, such as missing labels and padding.

Its mean counts only unmasked ones, within a batch and over all slots. Runs wherever a model is.
"""

from __future__ import annotations

from typing import Any

import keras

from ddlf.errors import ConfigError


@keras.saving.register_keras_serializable(package="ddlf")
class Masked(keras.losses.Loss):  # type: ignore[misc]
    """The mean of another loss over unmasked entries, whose label is not ``ignore``: ``sum(losses) / count``.

    The other loss gives one value for each entry. For a classification loss, an entry is a step of a sequence; for a
    regression loss, it is a number. With ``n_k`` unmasked entries in slot k, the merged gradient of a run is ``sum(n_k
    g_k) / sum(n_k)``. The loss of a batch without unmasked entries is 0.

    Args:
        loss: A Keras loss, by name or as an object.
        ignore: The label of the entries to ignore. ``nan`` ignores the labels that are NaN.
        name: The loss's name in Keras.

    Example::

        model.compile("adam", Masked("sparse_categorical_crossentropy", ignore=-1))
    """

    def __init__(self, loss: Any, ignore: float = -1, name: str = "masked") -> None:
        super().__init__(name=name, reduction="sum_over_batch_size")
        self.loss, self.ignore = keras.losses.get(loss), ignore
        if self.loss is None or isinstance(self.loss, Masked):
            raise ConfigError("Masked needs a loss of Keras", hint="Masked('mse')")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the mean loss over the unmasked entries.

        Args:
            y_true: Labels, shape (batch, ...).
            y_pred: Outputs.
            sample_weight: Weights of shape (batch,) or of the entries' shape. They multiply the losses, but do not
                change the count.
        """
        ops = keras.ops
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        valid = y_true == y_true if self.ignore != self.ignore else y_true != ops.cast(self.ignore, y_true.dtype)
        losses = self._losses(ops.where(valid, y_true, ops.zeros_like(y_true)), y_pred)
        counted = ops.cast(ops.reshape(valid, ops.shape(losses)), losses.dtype)
        total = losses * counted
        if sample_weight is not None:
            weight = ops.cast(sample_weight, losses.dtype)
            total = total * ops.reshape(weight, (*weight.shape, *[1] * (len(losses.shape) - len(weight.shape))))
        return ops.sum(total) / ops.maximum(ops.sum(counted), 1)

    def _losses(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each label by itself, without a mean over labels."""
        call = self.loss.call if isinstance(self.loss, keras.losses.Loss) else self.loss
        if y_true.shape[1:] != y_pred.shape[1:]:  # numbers of classes
            flat = y_true[..., 0] if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1 else y_true
            return call(flat, y_pred)
        # Keras's regression losses average over the last axis. With one number in it, each number has a loss.
        return call(y_true[..., None], y_pred[..., None])

    def entries_in(self, labels: Any) -> Any:
        """Return the number of unmasked entries in each sample.

        Args:
            labels: An array of shape (n, entries).
        """
        return (labels == labels if self.ignore != self.ignore else labels != self.ignore).sum(axis=1)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this loss, which Keras saves with a model."""
        return {"name": self.name, "loss": keras.losses.serialize(self.loss), "ignore": self.ignore}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Create the loss from the arguments that Keras has saved."""
        return cls(**{**config, "loss": keras.losses.deserialize(config["loss"])})
