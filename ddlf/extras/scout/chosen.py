"""``scout=True`` and ``ddlf run --scout``: find the learning rate, and train with it. Runs on the master."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

from ddlf.app import IApp
from ddlf.errors import ConfigError
from ddlf.events import Decided
from ddlf.extras.scout.curve import number
from ddlf.extras.scout.scouting import Scouted, scout
from ddlf.training.context import App

_chosen: WeakSet[App] = WeakSet()
"""Apps that have their rate. They keep it in later calls."""


async def check_settings(app: IApp) -> None:
    """Refuse an app that asks for a scouted rate, if its settings alone show that it cannot take one.

    Raises:
        ConfigError: The run is resumed, or the app has no attribute ``learning_rate`` with a number.
    """
    if not _asks(app):
        return
    if app.resume is not None:
        raise ConfigError(
            "scout=True has no effect with resume: a resumed run trains as before", hint="leave one of them out"
        )
    rate = getattr(app, "learning_rate", None)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ConfigError(
            f"scout=True sets learning_rate, and {type(app).__name__} has no such attribute with a number",
            hint="add learning_rate = 0.01 to the class, compile with self.learning_rate; of a model text, write it "
            "with ddlf scout --write",
        )


async def choose_settings(app: IApp) -> None:
    """Set ``learning_rate`` of an app to the rate that trials find, if the app asks for it.

    Raises:
        ConfigError: Another setting contradicts it, or ``learning_rate`` is not the rate of the app's optimizer.
    """
    if not _asks(app) or app in _chosen:
        return
    await check_settings(app)
    await app.connect()

    def check_own(optimizer_rate: float) -> None:
        if not math.isclose(float(app.learning_rate), optimizer_rate, rel_tol=1e-5):
            raise ConfigError(
                f"learning_rate={app.learning_rate:g} of the app is not the rate of its optimizer, {optimizer_rate:g}, so "
                "scout=True cannot change that",
                hint="compile the model with self.learning_rate, or leave scout out",
            )

    result = await scout(app, say=lambda text: app.say(f"trials    {text}"), check_own=check_own)
    if not result.keeps:
        app.learning_rate = result.verdict.rate
    _chosen.add(app)
    app.run_context.emit(
        Decided(key="learning_rate", value=f"{app.learning_rate:g}", rule="scout", why=reason_of(result))
    )


def _asks(app: IApp) -> bool:
    """Return whether an app asks for a rate. With private data it gets none, and the run refuses the setting by name."""
    return getattr(app, "scout", False) is True and not app.private


def reason_of(result: Scouted) -> str:
    """Return why a run takes its learning rate."""
    verdict = result.verdict
    if result.doubt:
        return f"unclear, the rate of the app stays: {result.doubt}"
    flat = f"flat from {number(verdict.low)} to {number(verdict.high)}" if verdict.low < verdict.high else ""
    if verdict.keeps:
        return f"{flat or 'no other rate is as good'}, the rate of the app stays"
    instead = f"instead of {number(verdict.own_rate)}" if verdict.own_rate is not None else ""
    rule = (
        "the best rate" if verdict.rate == verdict.best else "between the best rate and the lowest one that is as good"
    )
    return f"{', '.join(filter(None, [rule, instead, flat]))} ({result.trials} trials)"


async def watch_run(app: App) -> AbstractContextManager[None]:
    """Refuse a run of an app that asks for a scouted rate, but was started in a way that does not scout.

    Raises:
        ConfigError: The app was not trained with ``train_model``.
    """
    if getattr(app, "scout", False) and app not in _chosen:
        raise ConfigError("scout=True has no effect on this method", hint="call train_model, which takes the mode")
    return nullcontext()
