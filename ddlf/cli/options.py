"""The options that ``ddlf run`` and an app's own script share, and which of them fit together."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.parsing import Parser, addresses, number
from ddlf.errors import ConfigError
from ddlf.training.settings.checks import OneOf, Whole
from ddlf.training.settings.setting import Setting
from ddlf.training.settings.settings import SETTINGS, Settings, option

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.cluster.cluster import Cluster

OF_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.flag is not None)
"""Options that set the app's attribute of the same name."""
OF_AN_APP = (*(name for name in OF_SETTINGS if name != "ui"), "save")
OF_A_CLUSTER = (
    *("config", "local", "hosts", "launcher", "token_file", "insecure_plaintext", "takeover", "wait"),
    *("pickle_results", "dashboard"),
)


def add_options(parser: Parser) -> None:
    """The options that ``ddlf run`` and an app's own script share."""
    where = parser.add_argument_group("cluster (default: $DDLF_CONFIG, ./cluster.yaml, else 2 workers on this machine)")
    one = where.add_mutually_exclusive_group()
    one.add_argument("-c", "--config", type=Path, metavar="PATH", help="cluster file")
    one.add_argument("--local", type=number("local", 1, 1024), metavar="N", help="start N workers on this machine")
    one.add_argument("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of workers")
    one.add_argument(
        "--launcher", metavar="NAME[:TEXT]", help="start workers with the launcher of an installed package"
    )
    where.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    where.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    where.add_argument("--takeover", action="store_true", help="take workers and checkpoints from another master")
    where.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="for workers that another run uses; --wait alone: for ever"
    )
    parser.may_stand_alone["--wait"] = "for-ever"
    where.add_argument(
        "--pickle-results",
        action="store_true",
        help="take results that are no plain data, too: a worker could then run code here",
    )
    train = parser.add_argument_group("training (defaults are attributes of the app)")
    for name in OF_SETTINGS:
        train.add_argument(option(name), dest=name, help=SETTINGS[name].help, **_values(name, SETTINGS[name]))
    train.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="save the trained model as a .keras file, or as .safetensors with its text",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--dashboard", type=_page, metavar="[PORT]", help="show the run on a page (default: if this is a terminal)"
    )
    parser.may_stand_alone["--dashboard"] = "on"
    shown.add_argument("--no-dashboard", dest="dashboard", action="store_const", const=False, help="show no page")
    add_parameters(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and train nothing")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the results only")
    parser.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the whole traceback of an error"
    )


def add_parameters(parser: Parser) -> None:
    """The option that sets attributes of the app."""
    parser.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an attribute of the app; may be repeated",
    )


def _values(name: str, setting: Setting) -> dict[str, Any]:
    """What argparse is to know of a setting's values. What it cannot see is seen when all settings are read."""
    check = setting.check
    if isinstance(check, OneOf):
        return {"choices": check.choices}
    if isinstance(check, Whole):
        return {"type": number(name, check.low, check.high), "metavar": setting.flag}
    return {"type": float if isinstance(getattr(Settings, name), float) else str, "metavar": setting.flag}


def _page(text: str) -> bool | int:
    if text == "on":
        return True
    port: int = number("dashboard", 1, 65535)(text)
    return port


def _seconds(text: str) -> float:
    if text == "for-ever":
        return math.inf
    seconds: int = number("seconds", 1)(text)
    return seconds


def given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of some options that were given, as they are written."""

    def is_given(name: str) -> bool:
        value: Any = getattr(options, name)
        return value is not None and value is not False

    return [option(name) for name in names if is_given(name)]


def check_cluster_options(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect on the cluster that the others name.

    Raises:
        ConfigError: The text names them.
    """
    if new_workers(options):
        unused = given(options, ("token_file", "insecure_plaintext", "wait"))
        if unused and options.local:
            raise ConfigError(
                f"{', '.join(unused)} has no effect with --local",
                hint="its workers are new ones, and this process's own",
            )
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} has no effect without --hosts or a cluster file, which is not here",
                hint="name it with --config PATH",
            )
    elif options.insecure_plaintext and not options.hosts:
        raise ConfigError(
            "--insecure-plaintext has no effect without --hosts",
            hint="in a cluster file it is insecure_plaintext under security",
        )


def check_app_options(options: argparse.Namespace, app: IApp) -> None:
    """Refuse options that would have no effect on the app as it is set.

    Raises:
        ConfigError: The text names them.
    """
    from ddlf.monitor.runs.folder import is_wanted

    is_in_folder = is_wanted(app.out)
    if app.checkpoint is None and app.resume is None and options.checkpoint_every is not None and not is_in_folder:
        raise ConfigError("--checkpoint-every has no effect without --checkpoint DIR", hint="give it, too")
    if options.run_name is not None and not is_in_folder:
        raise ConfigError("--name has no effect on a run without a folder", hint="name one with --out DIR")
    if options.takeover and app.checkpoint is None and app.resume is None and new_workers(options):
        raise ConfigError(
            "--takeover has no effect here: the workers are new ones, and there are no checkpoints",
            hint="leave it out",
        )


def new_workers(options: argparse.Namespace) -> bool:
    """Whether a run starts its workers itself."""
    from ddlf.cluster.config.addresses import find_config

    return bool(options.local) or not (options.hosts or options.launcher or find_config(options.config))


def named_cluster(options: argparse.Namespace, **more: Any) -> Cluster:
    """The cluster of ``--hosts``, or of the cluster file.

    Args:
        options: As parsed.
        more: As for ``Cluster``; a ``guest`` asks those workers, too, that another master has.

    Raises:
        ConfigError: The cluster file says what starts them for each run, so that none runs now.
    """
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.config.addresses import parse_address

    if not options.hosts:
        from ddlf.cluster.config.cluster_file import load_config

        if (launcher := load_config(options.config).launcher) is not None:
            raise ConfigError(
                f"the cluster file has each run start its workers with launcher {launcher!r}: none can be asked",
                hint="name workers that run with --hosts",
            )
        return Cluster.from_config(options.config, token_file=options.token_file, **more)
    hosts, ports = zip(*(parse_address(part) for part in options.hosts.split(",") if part), strict=True)
    plaintext = options.insecure_plaintext
    return Cluster(hosts, ports, token_file=options.token_file, insecure_plaintext=plaintext, **more)
