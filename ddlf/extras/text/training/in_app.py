"""A model that is text in an app: the text is read on the master, its settings become those of the run, the model is compiled when data is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.data.parts import has
from ddlf.errors import AppError
from ddlf.events import Decided, Warned
from ddlf.extras.text.conversion.deciding import OF_RUNS
from ddlf.training.settings.settings import SETTINGS, Settings

SET_RATES = ("LearningRateScheduler", "ReduceLROnPlateau")
"""Callbacks of Keras that need a rate that can be set."""

if TYPE_CHECKING:
    from ddlf.extras.text.training.loaded import Notation


async def check_app(app: Any) -> None:
    """Read the text that an app names in ``notation``; see ``take_notation``."""
    if app.notation is not None:
        take_notation(app)


def take_notation(app: Any) -> None:
    """Read the text that an app names in ``notation``, and take the settings in it that the app does not set itself.

    Raises:
        NotationError: Something is wrong in it.
        AppError: It is no text.
    """
    from ddlf.extras.text.training.loaded import Notation, load_notation

    given = app.notation
    if isinstance(given, str | Path):
        given = app.notation = load_notation(given)
    if not isinstance(given, Notation):
        raise AppError(
            f"notation must be the file of a text, or what ddlf.load_notation gives, got {type(given).__name__}"
        )
    for name, value in given.train_block.settings.items():
        if not _says(app, name):
            setattr(app, name, value)


def _says(app: Any, name: str) -> bool:
    """Whether an app has a value of its own for a setting."""
    return name in vars(app) or not issubclass(Settings, _home(app, name))


def not_open(app: Any) -> list[str]:
    """The settings of a run that no rule is to decide for an app: those that it sets itself, and those that would not go with what it sets."""
    found = [name for name in OF_RUNS if _says(app, name)]
    if SETTINGS["rate_decay"].check("rate_decay", app.rate_decay) != SETTINGS["rate_decay"].check(
        "rate_decay", "never"
    ):
        found.append("schedule")
    if any(kind.__name__ in SET_RATES for one in app.callbacks for kind in type(one).__mro__):
        found.append("schedule")
    if app.mode == "downpour":
        found.append("clip")  # whose replicas take no optimizer around another one
    return found


def take_decided(app: Any, notation: Notation) -> None:
    """Set on an app the settings of a run that were decided."""
    for each in notation.decisions:
        if each.block == "train" and each.key in OF_RUNS:
            setattr(app, each.key, notation.settings[each.key])


def _home(app: Any, name: str) -> type:
    return next(kind for kind in type(app).__mro__ if name in vars(kind))


def ready(notation: Notation, app: Any) -> Any:
    """The model of Keras that an app trains; see ``Notation.ready``."""
    before = notation.made
    if before is not None and before.compiled:
        return before
    x, y, w = (getattr(app, name, None) for name in ("x_train", "y_train", "w_train"))
    # Where a program loads the text itself, settings are the program's.
    given = not_open(app) if app.notation is not None else OF_RUNS
    settled = notation.settled(x, y, validation=has(app, "val"), weighted=w is not None, given=given)
    if app.notation is not None:
        take_decided(app, settled)
    model = settled.compiled()
    if not hasattr(app, "worker"):
        _tell(settled, app)
        if settled.patience is not None:
            import keras

            app.callbacks = [
                *app.callbacks,
                keras.callbacks.EarlyStopping(patience=settled.patience, restore_best_weights=True),
            ]
    return model


def _tell(notation: Notation, app: Any) -> None:
    """Say what was decided, and what of the text has no effect in this app."""
    for each in notation.decisions:
        app._tell(Decided(key=f"{each.block}:{each.key}", value=each.value, rule=each.rule, why=each.reason))
    unused = (
        []
        if getattr(app, "takes_data", False)
        else [key for key in ("data", "validation") if notation.own(key) is not None]
    )
    for key in unused:
        app._tell(
            Warned(
                about="model", why=f"train:{key} of {notation.file} has no effect: load_dataset says what the data is"
            )
        )
    if app.notation is not None:
        return
    for name, value in notation.train_block.settings.items():
        if SETTINGS[name].check(name, value) != SETTINGS[name].check(name, getattr(app, name)):
            how = f"write notation = {notation.file!r} in the class, in the place of create_model"
            app._tell(Warned(about="model", why=f"train:{name} of {notation.file} has no effect here: {how}"))
