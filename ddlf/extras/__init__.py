"""Optional parts of DDLF: models as text, the adviser, the planner, the scout, model export, and stabilisers of training. The core
never imports them. They plug into it with hooks.

Each part is a package with an ``EXTRA`` in its ``__init__``. Another package can provide a part through the entry point
group ``ddlf.extras``. For example, the core calls ``hooks("save_model")``, and gets this hook of every installed part.
Parts do not import each other either. They use ``hooks``, too. A part may be deleted: the core then works without it,
and refuses the settings that need it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

from ddlf.errors import ConfigError

BUILT_IN = ("text", "advice", "export", "planner", "scout", "stabilisers")
"""The parts in the folder of this file."""
GROUP = "ddlf.extras"
OPTIONAL_SETTINGS = ("notation", "schedule", "clip", "multipliers", "advice", "planned", "scout")
"""The settings that the core declares and an optional part implements."""


class AdviceReport(Protocol):
    """The report of the adviser. Its text is the output of ``ddlf advise``."""

    @property
    def advice(self) -> Sequence[object]:
        """Return the findings, the worst first."""


class TrainingPlan(Protocol):
    """The predictions of the planner. Its data are the output of ``ddlf plan --json``."""

    def to_data(self) -> dict[str, Any]:
        """Return the plan for JSON."""


class MeasuredRounds(Protocol):
    """The times of the parts of a round, from kept measurements of an app on its workers."""

    @property
    def origin(self) -> str:
        """Say where the times are from, such as ``"as ddlf plan has measured on 2026-05-01"``."""

    def step_s(self, batch: int) -> float:
        """Return the seconds of a step of one slot alone."""

    def exchange_s(self, mode: str, exchange: str, codec: str, slots: int) -> float | None:
        """Return the seconds of a round besides its steps; None if no such rounds were measured."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional part of DDLF, such as the adviser, with the hooks (functions) that the core calls if the part is
    installed.

    A hook is the text ``"module:function"``. The core imports it on first use, so that an unused part costs nothing.

    Args:
        name: The name of the part in errors.
        commands: Commands of ``ddlf``. Each has the arguments of ``ddlf.cli.parsing.Commands.add``: group, name, home
            and the line in the help.
        settings: Names of the settings of ``OPTIONAL_SETTINGS`` that the part implements, with spaces between them.
        app_of_file: Returns the app class of a file that is not Python: ``(path: Path, data: str | None) ->
            type[IApp]``.
        file_types: The suffixes of the files that ``app_of_file`` accepts, with spaces between them.
        check_app: Refuses an invalid app before the run starts: ``async (app) -> None``.
        choose_settings: Sets attributes of an app before training: ``async (app) -> None``. It may connect the workers.
        ready_model: Changes the compiled model of an app on every node before training: ``(app, model) -> None``.
        watch_run: Checks an app on the master before training: ``async (app) -> AbstractContextManager``. The context
            is open during the training.
        advise: Looks for mistakes in an app: ``async (app, level: str) -> AdviceReport``.
        start_check: Returns a function that tells why a model cannot learn from first weights, "" if it can: ``(app) ->
            Callable[[Weights], str]``. The app has data and the model, which the function may change.
        plan: Predicts how long an app trains: ``async (app, budget_s: float | str | None) -> TrainingPlan``.
        measured_rounds: Returns the times of the parts of a round of an app: ``(app, cluster) -> MeasuredRounds | None``.
            The cluster is connected, or None.
        preview_plan: Returns what a dry run says about the plan of an app, "" for nothing: ``(app, workers:
            Sequence[Mapping[str, Any]]) -> str``. ``workers`` has facts about each worker.
        save_model: Writes a model to a file with one of ``saved_types``: ``(model, path: Path) -> None``.
        saved_types: Suffixes of the files that ``save_model`` writes, with spaces between them.
        begin_executor: Runs once in each executor: ``(ask_master: Callable[[str, str], Any]) -> None``.
            ``ask_master(kind, name)`` returns the result of ``answer`` on the master.
        answer: Answers a question that an executor asked its master: ``(kind: str, name: str, folders: Sequence[Path])
            -> bytes | None``. It may only return files below these folders.
        provide: Returns an object to other parts: ``(name: str) -> Any``. None if the part lacks the object.
    """

    name: str
    commands: tuple[tuple[str, str, str, str], ...] = ()
    settings: str = ""
    app_of_file: str = ""
    file_types: str = ""
    check_app: str = ""
    choose_settings: str = ""
    ready_model: str = ""
    watch_run: str = ""
    advise: str = ""
    start_check: str = ""
    plan: str = ""
    measured_rounds: str = ""
    preview_plan: str = ""
    save_model: str = ""
    saved_types: str = ""
    begin_executor: str = ""
    answer: str = ""
    provide: str = ""


@functools.cache
def installed() -> tuple[Extra, ...]:
    """Return the installed optional parts: first the built-in ones, then the parts of other packages, sorted by name."""
    modules = [f"{__name__}.{name}" for name in BUILT_IN if importlib.util.find_spec(f"{__name__}.{name}")]
    extras = [extra for module in modules if (extra := getattr(importlib.import_module(module), "EXTRA", None))]
    outside = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    return (*extras, *(entry.load() for entry in outside))


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    """Yield one kind of hook: the function of each installed part that provides it.

    Args:
        name: The name of a field of ``Extra``, such as ``"ready_model"``.
    """
    for extra in installed():
        if target := getattr(extra, name):
            yield resolve_name(target)


def measured_rounds(app: object, cluster: object) -> MeasuredRounds | None:
    """Return the measured times of the parts of a round of an app.

    Args:
        app: The user's ``IApp``.
        cluster: Its workers.

    Returns:
        The times; None if there are no measurements of this app on these workers.
    """
    return next((rounds for hook in hooks("measured_rounds") if (rounds := hook(app, cluster)) is not None), None)


def hook_for(name: str, types: str, suffix: str) -> Callable[..., Any] | None:
    """Return the hook function of the optional part that handles files with this suffix, or None if no part does.

    Args:
        name: The name of the hook.
        types: The name of the field with the suffixes, ``"file_types"`` or ``"saved_types"``.
        suffix: For example ``".nnm"``.
    """
    for extra in installed():
        if suffix in getattr(extra, types).split():
            hook: Callable[..., Any] = resolve_name(getattr(extra, name))
            return hook
    return None


def suffixes(types: str) -> tuple[str, ...]:
    """Return the suffixes of all files that the installed optional parts can read or write.

    Args:
        types: ``"file_types"`` or ``"saved_types"``.
    """
    return tuple(suffix for extra in installed() for suffix in getattr(extra, types).split())


def provided(name: str, needed_by: str) -> Any:
    """Return an object, such as a class, that an optional part provides to other parts. Parts do not import each other.

    Args:
        name: For example ``"Multipliers"``.
        needed_by: The setting or feature that needs the object, for the error.

    Raises:
        ConfigError: No installed part provides the object.
    """
    for provide in hooks("provide"):
        if (provided_object := provide(name)) is not None:
            return provided_object
    raise ConfigError(
        f"{needed_by} needs {name!r}, which no installed part of DDLF has",
        hint="install DDLF with all parts of ddlf.extras, or leave it out",
    )


def check_settings(app: object, defaults: Mapping[str, Any]) -> None:
    """Refuse a setting of the app that needs an optional part of DDLF which is not installed.

    Args:
        app: The user's ``IApp``, or another object with these settings.
        defaults: The default values of settings by name.

    Raises:
        ConfigError: No installed part implements a setting; the error names it.
    """
    for name in OPTIONAL_SETTINGS:
        value = getattr(app, name)
        if value in (None, "none", "off", defaults.get(name)):
            continue
        if not any(name in extra.settings.split() for extra in installed()):
            raise ConfigError(
                f"{name}={value!r} has no effect: the part of DDLF that implements it is not installed",
                hint=f"install DDLF with all parts of ddlf.extras, or leave {name} out",
            )
