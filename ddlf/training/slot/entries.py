"""How many entries of each sample's labels a loss counts. Runs where a model trains; the master merges by their sum (``Reply.weight``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlf.data.parts import place_of
from ddlf.errors import ConfigError

NONE = np.zeros(0, np.int64)


def entries_of(app: Any) -> np.ndarray[Any, Any]:
    """Of each sample how many entries count, shape (n,); an empty array where the loss leaves none out.

    Args:
        app: With data and a compiled model.

    Raises:
        ConfigError: They cannot be counted, or one number cannot weigh the update.
    """
    masked = masked_loss(app.model)
    if masked is None:
        return NONE
    if place_of(app, "train") is not None:
        raise ConfigError(
            "the loss Masked weighs updates by the entries that count, and those of partition files are not known before they are read",
            hint="train on arrays: self.y_train = self.train_data['y']",
        )
    labels = np.asarray(app.y_train)
    return np.asarray(masked.entries_in(labels.reshape(len(labels), -1)), np.int64)


def masked_loss(model: Any) -> Any:
    """The loss of a model that leaves entries out; None if there is none.

    Raises:
        ConfigError: There are several outputs: each would need a merge of its own.
    """
    loss = getattr(model, "loss", None)
    several = [*loss.values()] if isinstance(loss, dict) else [*loss] if isinstance(loss, list | tuple) else [loss]
    found = [one for one in several if hasattr(one, "entries_in")]
    if found and len(several) > 1:
        raise ConfigError(
            "the loss Masked weighs updates by the entries that count, and with several outputs each has its own",
            hint="give the weights of samples (w_train) in the place of Masked",
        )
    return found[0] if found else None
