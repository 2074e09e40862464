"""Optional parts: models as text, the adviser, export, stabilisers. They plug into the core, which never imports them.

Each part is a package with an ``EXTRA`` in its ``__init__``. A package from outside brings one through the entry point group
``ddlf.extras``. The core calls ``hooks("save_model")`` and gets that hook of every part that is installed. A part may be deleted: the
core then works without it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

BUILT_IN = ("text", "advice", "export", "stabilisers")
"""Packages beside this file."""
GROUP = "ddlf.extras"


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Where an optional part plugs into the core.

    Each hook is the text ``"module:function"``. It is imported when the core first needs it, so that a part costs nothing until then.

    Args:
        name: What the part is called in errors.
        commands: Commands of ``ddlf``, each with its group, name, home and line in the help, as ``ddlf.cli.parsing.Commands.add`` takes them.
        app_of_file: Makes an app of a file that is not Python: ``(path: Path) -> type[IApp] | None``.
        file_types: Suffixes of the files that ``app_of_file`` takes, with spaces between them.
        check_app: Refuses an app before anything starts: ``async (app, base: type) -> None``.
        ready_model: Finishes the model of an app on every node: ``(app, model) -> model``.
        before_run: Looks at an app before training: ``async (app) -> Iterable[Event]``.
        during_run: Watches a run: ``(app) -> AbstractContextManager``.
        save_model: Writes a model to a file with one of ``saved_types``: ``(model, path: Path) -> None``.
        saved_types: Suffixes of the files that ``save_model`` writes, with spaces between them.
        on_executor: Runs once in each executor: ``(ask_master: Callable[[str], Any]) -> None``.
        answer: Answers a question that an executor asked its master: ``(kind: str, name: str, folders) -> bytes | None``.
    """

    name: str
    commands: tuple[tuple[str, str, str, str], ...] = ()
    app_of_file: str = ""
    file_types: str = ""
    check_app: str = ""
    ready_model: str = ""
    before_run: str = ""
    during_run: str = ""
    save_model: str = ""
    saved_types: str = ""
    on_executor: str = ""
    answer: str = ""


@functools.cache
def installed() -> tuple[Extra, ...]:
    """Return the parts that are installed: the built-in ones first, then those of other packages by name."""
    modules = [f"{__name__}.{name}" for name in BUILT_IN if importlib.util.find_spec(f"{__name__}.{name}")]
    found = [extra for module in modules if (extra := getattr(importlib.import_module(module), "EXTRA", None))]
    outside = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    return (*found, *(entry.load() for entry in outside))


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    """Yield a hook of each installed part that has it.

    Args:
        name: The name of a field of ``Extra``, such as ``"ready_model"``.
    """
    for extra in installed():
        if target := getattr(extra, name):
            yield resolve_name(target)


def hook_for(name: str, types: str, suffix: str) -> Callable[..., Any] | None:
    """Return the hook of the part that handles files with a suffix, or None.

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
