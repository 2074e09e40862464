"""``ddlf config``: show the settings of a run and their origins, without connecting to or starting a worker."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any

from ddlf.app import IApp
from ddlf.cli.options import add_app_options, check_app_options, reads_cluster_file
from ddlf.cli.parsing import Command, Parser, action
from ddlf.cli.target import find_target, overrides, prepare_app
from ddlf.cluster.config.addresses import find_config
from ddlf.cluster.config.cluster_file import lines_of_run, load_config
from ddlf.errors import ConfigError
from ddlf.monitor.runs.summary import settings_of
from ddlf.settings.setting import Setting
from ddlf.training.registry import SETTINGS, settings_with, spec_of


def _options(parser: Parser) -> None:
    parser.add("--origin", action="store_true", help="print where each value comes from")
    add_app_options(parser)


def show(options: argparse.Namespace) -> int:
    """Print each setting as ``ddlf run`` with the same options would use it; return the exit code.

    Raises:
        ConfigError: ``ddlf run`` would refuse the settings, too. They are printed before this error.
    """
    target: Any = find_target(options.app, options.target) if options.app else IApp
    if not isinstance(target, type):
        raise ConfigError(f"{target.__name__} in {options.app} is not an app, so it has no settings")
    app = prepare_app(target, None, options)
    rows = list(setting_rows(app, options))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, where in rows:
        used = name not in SETTINGS or SETTINGS[name].used_by(app.mode)
        unused = "" if used else f"  not used by {app.mode}"
        print(f"{name:<{names}}  {value:<{values}}  {where if options.origin else ''}".rstrip() + unused)
    if options.app:
        check_values(app, options)
        check_app_options(options, app)
        asyncio.run(app.run_context.check())
    else:
        spec_of(app)
    return 0


def setting_rows(app: IApp, options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield the name, value and origin of each setting: first the app's settings, then the cluster's."""
    path = find_config(options.config) if reads_cluster_file(options) else None
    lines = lines_of_run(path) if path else {}
    origins = {name: where for name, _, where in overrides(type(app), options)}
    for name, row in settings_of(app, origins).items():
        where = row["origin"]
        yield name, str(row["value"]), f"{path}:{lines[name]}" if where == str(path) else where
    if path:
        for name, value in load_config(path).run:
            if name not in SETTINGS:
                yield name, str(value), f"{path}:{lines[name]}" if name in lines else "default"


def check_values(app: IApp, options: argparse.Namespace) -> None:
    """Check the value of each setting by itself.

    Raises:
        ConfigError: A value is wrong. The text begins with its place: an option, a line of the cluster file, or a
            class.
    """
    settings = settings_with(app.mode, app.exchange)
    for name, _, origin in setting_rows(app, options):
        if name in settings:
            _check_value(settings[name], getattr(app, name, settings[name].default), origin)


def check_given_values(options: argparse.Namespace) -> None:
    """Check the value of each setting that an option or the cluster file gives, without the app.

    Raises:
        ConfigError: A value is wrong, or the cluster file is. The text is that of ``check_values``.
    """
    path = find_config(options.config) if reads_cluster_file(options) else None
    without_app = argparse.Namespace(**{**vars(options), "parameters": []})  # parameters may be attributes of the app
    values = {name: (value, origin) for name, value, origin in overrides(IApp, without_app)}
    lines = lines_of_run(path) if path else {}
    for name, (value, origin) in values.items():
        if name in SETTINGS:
            is_of_file = origin == str(path) and name in lines
            _check_value(SETTINGS[name], value, f"{path}:{lines[name]}" if is_of_file else origin)


def _check_value(setting: Setting[Any, Any], value: Any, origin: str) -> None:
    try:
        setting.check(setting.name, value)
    except ConfigError as error:
        error.message = f"{origin}: {error.message}"
        raise


CONFIG = Command(
    description="Show the settings of a run.",
    examples=("ddlf config show --origin", "ddlf config show app.py --mode async --origin"),
    actions={
        "show": action(
            "print each setting and its value",
            "Print each setting and its value, as ddlf run with the same options would use it.",
            _options,
            show,
            *("ddlf config show --origin", "ddlf config show app.py --mode async --origin"),
        )
    },
)
