"""The folder of a run of ``ddlf run``: where it is, what it is called, what goes into it by default."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.target import told
from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.recording import recorded

if TYPE_CHECKING:
    from ddlf.app import IApp


@contextlib.contextmanager
def in_folder(app: IApp, options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Path | None]:
    """Have a folder for a run, say where it is, and at the end where its report is.

    Raises:
        ConfigError: An option has no effect without one.
    """
    origins = {name: where for name, _, where in told(type(app), options)}
    path = None
    try:
        with recorded(app, origins) as path:
            if path is not None:
                say(f"folder    {path}")
            if options.checkpoint_every is not None and app.checkpoint is None and app.resume is None:
                if path is None:
                    raise ConfigError("there is no folder for checkpoints", hint="name one with --checkpoint DIR")
                app.checkpoint, origins["checkpoint"] = path / folder.CHECKPOINTS, "the run's folder"
            yield path
    finally:
        if path is not None and (path / folder.REPORT).exists():
            say(f"report    {path / folder.REPORT}" + ("" if app.history else ", of a run that came to no round"))


def resumed(options: argparse.Namespace) -> str | None:
    """What ``--resume`` names: for a run, by its name or its folder, the checkpoints in that; ``last`` is the newest run that has some.

    Raises:
        ConfigError: The run has no checkpoints.
    """
    name: str | None = options.resume
    if not name or name == "auto" or (Path(name).exists() and not (Path(name) / folder.STATE).exists()):
        return name
    runs = runs_of(options)
    how = "--checkpoint-every N writes them into the run's folder"
    if name == "last":
        found = next((path for path in folder.runs_in(runs) if (path / folder.CHECKPOINTS).is_dir()), None)
        if found is None:
            raise ConfigError(f"no run in {str(runs)!r} has checkpoints", hint=how)
        return str(found / folder.CHECKPOINTS)
    try:
        found = Path(name) if Path(name).exists() else folder.find(runs, name)
    except ConfigError:
        return name  # no run: a folder that is not there is refused where it is looked into
    if not (found / folder.CHECKPOINTS).is_dir():
        raise ConfigError(f"the run {found.name} has no checkpoints", hint=how)
    return str(found / folder.CHECKPOINTS)


def runs_of(options: argparse.Namespace) -> Path:
    """Where the runs are that a command is about."""
    return Path(options.out or folder.usual_out())
