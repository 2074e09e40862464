"""The folder of a run of ``ddlf run``: where it is, what it is called, what goes into it by default."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.target import told
from ddlf.errors import ConfigError
from ddlf.runs import folder
from ddlf.runs.recording import recorded

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
            say(f"report    {path / folder.REPORT}")


def resumed(options: argparse.Namespace) -> str | None:
    """What ``--resume`` names: for a run, by its name, its folder or ``last``, the checkpoints in its folder."""
    name = options.resume
    if name in (None, "", "auto") or (Path(name).exists() and not (Path(name) / folder.CHECKPOINTS).is_dir()):
        return name  # type: ignore[no-any-return]
    try:
        found = Path(name) if Path(name).is_dir() else folder.find(runs_of(options), name)
    except ConfigError:
        return name  # type: ignore[no-any-return]
    return str(found / folder.CHECKPOINTS)


def runs_of(options: argparse.Namespace) -> Path:
    """Where the runs are that a command is about."""
    return Path(options.out or folder.usual_out())
