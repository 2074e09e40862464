"""Finds labels that are beyond the outputs of a model. Runs on workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.training.context import App


def beyond_outputs(app: App, part: str) -> str:
    """Return a sentence about labels of a part that are beyond the outputs of the app's model; empty if there are none.

    It counts these labels, and lists none. It knows models with one output and the loss
    ``sparse_categorical_crossentropy``.

    Args:
        app: The user's ``IApp``, with its data and its compiled model.
        part: ``"train"``, ``"val"`` or ``"test"``.
    """
    labels: Any = getattr(app, f"y_{part}", None)
    outputs: Any = getattr(app.model, "outputs", None) or ()
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf" or len(outputs) != 1:
        return ""
    classes, (counts, ignored) = outputs[0].shape[-1], _loss_of(app.model)
    if not counts or not classes:
        return ""
    wrong = (labels < 0) | (labels >= classes)
    if ignored is not None:
        wrong &= labels != ignored
    if not (count := int(np.count_nonzero(wrong))):
        return ""
    return f"{count:,} of {labels.size:,} labels in y_{part} are not in 0 to {classes - 1}, the outputs of the model"


def _loss_of(model: Any) -> tuple[bool, int | None]:
    """Return whether a model's loss takes numbers of classes, and the number that the loss ignores; None if none."""
    import keras

    loss = model.loss
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return True, loss.get_config().get("ignore_class")
    return loss is keras.losses.sparse_categorical_crossentropy, None
