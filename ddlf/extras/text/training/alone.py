"""A model that is text, trained on this machine with Keras's ``fit``, by what its block ``train`` says and what was decided. No run of DDLF."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ddlf.errors import DatasetError
from ddlf.extras import OPTIONAL_SETTINGS, check_settings, hooks
from ddlf.extras.text.training.given import held_out
from ddlf.training.roles.run_position import followers
from ddlf.training.settings.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from ddlf.extras.text.training.loaded import Notation


def train(
    notation: Notation,
    x: Any,
    y: Any,
    beside: Any,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> dict[str, list[float]]:
    """Train; see ``Notation.train``, whose arguments are these.

    Args:
        beside: Inputs and outputs of validation; None for none.
    """
    import keras

    def said(name: str, given: Any = None) -> Any:
        value = notation.settings.get(name, getattr(Settings, name)) if given is None else given
        return SETTINGS[name].check(name, value)

    if share := getattr(notation.own("validation"), "value", 0.0):
        if beside is not None:
            raise DatasetError(
                f"{notation.place('validation')} would hold out some of the samples, and validation is given as well",
                hint="leave one of both out",
            )
        (x, x_val), (y, y_val) = (held_out(each, max(round(1 / share), 2)) for each in (x, y))  # as a run does
        beside = (x_val, y_val)
    if notation.made is None:
        keras.utils.set_random_seed(said("seed", seed))
    model = notation.be_compiled(x, y, validation=beside is not None)
    epochs, batch_size = said("master_epochs", epochs), said("batch_size", batch_size)
    settings = SimpleNamespace(**{name: said(name) for name in OPTIONAL_SETTINGS if name in SETTINGS}, notation=None)
    check_settings(settings, Settings)
    for finish in hooks("ready_model"):
        finish(settings, model)
    if found := followers(model.optimizer):
        first = next(iter(x.values())) if isinstance(x, dict) else x
        made = int(model.optimizer.iterations)  # a schedule counts from the first step of all
        for one in found:
            one.plan(made + epochs * math.ceil(len(first) / batch_size), epochs)
        model.train_function = None  # what was planned before may be compiled into it
    callbacks = []
    if beside is not None and notation.patience is not None:
        callbacks = [keras.callbacks.EarlyStopping(patience=notation.patience, restore_best_weights=True)]
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=beside,
        callbacks=callbacks,
        class_weight=said("class_weight"),
        verbose=0,
    ).history
    return {name: [float(value) for value in each] for name, each in history.items()}
