"""``planned=True`` and ``ddlf run --planned``: train with the best choice of the app's plan. Runs on the master."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

from ddlf.app import IApp
from ddlf.errors import ConfigError
from ddlf.events import Decided
from ddlf.extras.planner.fingerprints import changed
from ddlf.extras.planner.measurement_files import own_parameters, path_on, read_file
from ddlf.extras.planner.planning import plan_from
from ddlf.extras.planner.probe import own_ways
from ddlf.extras.planner.result import Plan, option_words, settings_of, speed_text
from ddlf.monitor.runs.summary import source_of
from ddlf.training.context import App
from ddlf.worker.status import ExecutorInfo

SHORT = 40
"""Letters of the longest value that a message shows."""
OWN = "with its own settings"
"""How a run trains whose plan is unclear."""

_planned: WeakSet[App] = WeakSet()
"""Apps that have their settings. They keep them, although a later plan may choose others."""


async def check_settings(app: IApp) -> None:
    """Refuse an app that asks for its plan, if its settings alone show that it cannot use one.

    Raises:
        ConfigError: The run is resumed, or the planner knows no model of its strategy or exchange.
    """
    if not _asks_for_plan(app):
        return
    if app.resume is not None:
        raise ConfigError(
            "planned=True has no effect with resume: a resumed run trains as before", hint="leave one of them out"
        )
    own_ways(app)


async def choose_settings(app: IApp) -> None:
    """Set slots, mode, exchange and codec of an app to the best choice of its plan, if the app asks for it.

    The app keeps its own settings if its plan is unclear.

    Raises:
        ConfigError: There is no plan, or another setting contradicts it.
    """
    if not _asks_for_plan(app) or app in _planned:
        return
    await check_settings(app)
    await app.connect()
    assert app.cluster is not None
    plan = _plan(app, [worker.executor for worker in app.cluster.workers])
    vars(app).update(_settings_to_take(app, plan))
    _planned.add(app)
    value, reason = _decision(plan)
    app.run_context.emit(Decided(key="run", value=value, rule="planned", why=reason))


def preview_plan(app: IApp, workers: Sequence[ExecutorInfo]) -> str:
    """Return what a dry run says about the plan of an app; empty if the planner cannot plan such an app.

    Args:
        app: The app, with its cluster.
        workers: The executor of each worker; an unknown one if nothing is known about it.

    Raises:
        ConfigError: The app asks for its plan, but the run would be refused.
    """
    if app.private:
        return ""
    if not all(worker.host for worker in workers):
        return "unknown, because it belongs to the workers, which are not here yet" * _asks_for_plan(app)
    if _asks_for_plan(app):
        plan = _plan(app, workers)
        _settings_to_take(app, plan)
        return ": ".join(_decision(plan))
    try:
        own_ways(app)
    except ConfigError:
        return ""
    try:
        plan = _plan(app, workers)
    except ConfigError:
        return f"none yet, which would say whether these workers pay; make one: {_plan_command(app)}"
    return f"{plan.verdict}: {' '.join(option_words(plan.best))} is {speed_text(plan.best)}; --planned trains as the plan says"


def check_planned(app: App) -> None:
    """Refuse a run of an app that asks for its plan, but was started in a way that does not use the plan.

    Raises:
        ConfigError: The app was not trained with ``train_model``.
    """
    if getattr(app, "planned", False) and app not in _planned:
        raise ConfigError("planned=True has no effect on this method", hint="call train_model, which takes the mode")


def check_fits(app: App) -> None:
    """Refuse a run that uses its plan, but has other data or files than the plan.

    Raises:
        ConfigError: The run uses its plan.
    """
    if app in _planned:
        raise ConfigError(
            "planned=True, but the training data or imported files have changed since the plan",
            hint="plan again, as before",
        )


def _asks_for_plan(app: App) -> bool:
    """Return whether an app asks for its plan. One with private data has none, and the run refuses the setting by name."""
    return bool(getattr(app, "planned", False)) and not app.private


def _plan(app: IApp, workers: Sequence[ExecutorInfo]) -> Plan:
    """Return the plan of an app on workers with these executors.

    Raises:
        ConfigError: There is no plan, or the user's files have changed since then.
    """
    ways = own_ways(app)
    path = path_on(app, workers)
    measurements = None if path is None else read_file(path)
    if measurements is not None and (files := changed(measurements.files)):
        raise ConfigError(
            f"{', '.join(Path(file).name for file in files)} has changed since the plan of {type(app).__name__}",
            hint=f"plan again: {_plan_command(app)}",
        )
    if measurements is None or not measurements.answers(ways[:1], [app.batch_size], 0.0):
        raise ConfigError(
            f"there is no plan of {type(app).__name__} with {ways[0]}, {ways[0].codec}, batch size {app.batch_size}{_parameters(app)} "
            "for these workers",
            hint=f"make one: {_plan_command(app)}",
        )
    return plan_from(app, ways, measurements, [app.batch_size])


def _plan_command(app: IApp) -> str:
    """Return how to plan an app, with the options of the run."""
    file = source_of(app)
    if file and app.run_context.typed:
        return f"ddlf plan {shlex.join([file, *app.run_context.typed])}"
    return f"ddlf plan {shlex.quote(file)}, or await app.plan()" if file else "await app.plan()"


def _parameters(app: IApp) -> str:
    """Return the app's own attributes that were set after it was made, for a message."""
    return "".join(f", {name}={value}" for name, value in sorted(own_parameters(app).items()) if len(value) <= SHORT)


def _settings_to_take(app: App, plan: Plan) -> dict[str, int | str]:
    """Return the settings that a run takes from its plan.

    Raises:
        ConfigError: Another setting contradicts one of them.
    """
    settings = settings_of(plan.best) if plan.is_taken else {}
    for name, value in settings.items():
        if name in vars(app) and str(vars(app)[name]) != str(value):
            raise ConfigError(
                f"{name}={vars(app)[name]!r} contradicts planned=True, which takes {name}={value!r}",
                hint="leave one of them out",
            )
    return settings


def _decision(plan: Plan) -> tuple[str, str]:
    """Return how a run trains that uses its plan, and why."""
    best = " ".join(option_words(plan.best))
    if plan.is_taken:
        sure = ", but surely faster than your settings" * (plan.verdict == "unclear")
        return best, f"{speed_text(plan.best)}, {plan.verdict}{sure}"
    return (
        OWN,
        f"{best} is {speed_text(plan.best)}, which is unclear: plan with more time (--budget 2m), or on idle machines",
    )
