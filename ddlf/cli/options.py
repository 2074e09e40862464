"""The options that ``ddlf run`` and an app's own script share, and checks for contradictions between them."""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.parsing import Command, Option, Parser, addresses, cards, listening, memory, number
from ddlf.errors import ConfigError
from ddlf.settings.checks import OneOf, Whole, switch
from ddlf.settings.setting import Setting
from ddlf.training.registry import EXCHANGE, MODE, SETTINGS, KindOf, option, titles

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.launch.launcher import Workers

GROUPS: Mapping[str, tuple[str, ...]] = {**titles(), "cluster": (), "app": ()}
"""All settings by the groups of ``ddlf run --help-all`` and of the reference page."""
COMMON = frozenset(("mode", "master_epochs", "batch_size", "codec", "merge", "checkpoint", "resume"))
"""The settings that the short help lists."""
OF_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.flag is not None)
"""Options that set the app's attribute of the same name."""
OF_AN_APP = (*(name for name in OF_SETTINGS if name != "ui"), "save")
OF_A_CLUSTER = (
    *("config", "local", "gpus", "gpu_memory", "hosts", "launcher", "listen", "workers"),
    *("token_file", "insecure_plaintext", "takeover", "wait"),
    *("pickle_results", "dashboard"),
)


NOT_SHORT = (
    *("planned", "scout", "dry_run", "save", "checkpoint", "checkpoint_every", "resume", "requeue"),
    *("out", "run_name", "trackers", "ui"),
)
"""Options without effect on short trainings, whose models are dropped, and which have no display or folder of a run."""


def add_options(parser: Parser, *, common: bool = True) -> None:
    """Add the options that ``ddlf run`` and an app's own script share.

    Args:
        parser: The parser that gets the options.
        common: Whether the short help lists the most used ones.
    """
    for group, names in GROUPS.items():
        if group == "cluster":
            _add_cluster_options(parser, common)
        if group == "output":
            _add_output_options(parser, common)
        for name in names:
            if name in OF_SETTINGS:
                setting, listed = SETTINGS[name], common and name in COMMON
                groups = tuple(dict.fromkeys((group, *setting.strategies)))
                parser.add(
                    option(name), dest=name, help=setting.help, group=groups, common=listed, **_values(name, setting)
                )
        if group == "checkpoint":
            parser.add(
                "--save",
                type=Path,
                metavar="PATH",
                help="save the trained model as a .keras file, or its weights as .safetensors",
                group=group,
                common=common,
            )
            parser.add(
                "--requeue",
                action="store_true",
                help="after SIGTERM, have Slurm or Kubernetes run the command again; it continues in the run's folder",
                group=group,
                common=False,
            )
    add_parameters(parser, common=common)
    built_in = {name: kinds for kinds in (MODE, EXCHANGE) for name in kinds.names if name not in kinds.more}
    parser.more_groups = lambda: {
        name: partial(_help_of_kind, kinds, name)
        for name, kinds in {
            **built_in,
            **{name: kinds for kinds in (MODE, EXCHANGE) for name in kinds.more},
        }.items()
        if name not in GROUPS
    }


def _help_of_kind(kinds: KindOf[Any], name: str, columns: int) -> str:
    """Return the help about a strategy or exchange that has no group of settings, such as one of another package, or
    the reason why it cannot be imported.
    """
    try:
        kind = kinds.kind(name)
    except ConfigError as error:
        return f"{name}:\n  {error}"
    own_settings = [setting for setting in kind.settings() if setting.name not in SETTINGS]
    shared = any(name in setting.strategies for setting in SETTINGS.values())
    rows = [_parameter(setting).row(columns) for setting in own_settings]
    example = f"{name}:{own_settings[0].field}={own_settings[0].value}" if own_settings else name
    usage = textwrap.fill(
        f"{(inspect.getdoc(kind) or '').partition(chr(10))[0]} Choose it with {option(kinds.setting)} {example}."
        + ("" if own_settings or shared else " It has no further settings."),
        columns,
        initial_indent="  ",
        subsequent_indent="  ",
    )
    return "\n".join([f"{name}:", usage, *rows])


def _parameter(setting: Setting[Any, Any]) -> Option:
    """Return a setting of another package as an option to list in the help. The user sets it with ``-p``."""
    text = f"{setting.help} (default: {setting.default})"
    return Option((f"-p {setting.name}={setting.flag or 'VALUE'}",), setting.name, "", text, tuple, False, (), False)


def _add_cluster_options(parser: Parser, common: bool) -> None:
    def add(*names: str, common: bool = False, **more: Any) -> None:
        parser.add(*names, group="cluster", common=common, **more)

    exclusive = parser.add_mutually_exclusive_group()
    add(
        *("-c", "--config"),
        type=Path,
        metavar="PATH",
        help="cluster file that lists the workers (default: $DDLF_CONFIG, ./cluster.yaml, else --local 2)",
        within=exclusive,
        common=common,
    )
    add(
        *("--local",),
        type=number(1, 1024),
        metavar="N",
        help="start N workers on this machine",
        within=exclusive,
        common=common,
    )
    add(
        "--gpus",
        type=cards,
        metavar="0,1",
        help="with --local: the cards to use, by their numbers in nvidia-smi, or none (default: all without a worker)",
    )
    add(
        "--gpu-memory",
        type=memory,
        metavar="SIZE",
        help="with --local: limit of each worker's memory on its card, such as 8GiB",
    )
    add("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of running workers", within=exclusive)
    add(
        "--launcher",
        metavar="NAME[:TEXT]",
        help="have an engine start the workers: command, dask, k8s, mpi, ray, slurm, spark, ssh, or that of a package",
        within=exclusive,
    )
    add(
        "--listen",
        type=listening,
        metavar="[HOST:]PORT",
        help="wait for workers that dial this port: ddlf-worker --join",
        within=exclusive,
    )
    add(
        "--workers",
        type=workers_range,
        metavar="N",
        help="with --listen or --launcher: the number of workers, or a range such as 2..8 to begin with 2",
    )
    add("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    add("--insecure-plaintext", action="store_true", help="with --hosts or --listen: do not encrypt")
    add("--takeover", action="store_true", help="take workers and the checkpoint folder over from another master")
    add(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        alone="for-ever",
        help="wait until busy workers are free; with --listen: until workers come, else 10 minutes (no value: indefinitely)",
    )
    add(
        "--pickle-results",
        action="store_true",
        help="also accept results that must be unpickled; a malicious worker could then run code here",
    )


def _add_output_options(parser: Parser, common: bool) -> None:
    def add(*names: str, common: bool = False, **more: Any) -> None:
        parser.add(*names, group="output", common=common, **more)

    exclusive = parser.add_mutually_exclusive_group()
    add(
        "--dashboard",
        type=_page,
        metavar="[PORT]",
        alone="on",
        help="serve a page for the browser (default: if the output is a terminal)",
        within=exclusive,
        common=common,
    )
    add("--no-dashboard", dest="dashboard", action="store_const", const=False, help="serve no page", within=exclusive)
    add("-q", "--quiet", action="store_true", help="print only the results")
    add("-v", "--verbose", "--debug", dest="debug", action="store_true", help="print full tracebacks")
    add("--dry-run", action="store_true", help="check everything and print the plan, but train nothing")


def add_parameters(parser: Parser, *, common: bool = True) -> None:
    """Add the option that sets attributes of the app."""
    parser.add(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an attribute of the app, such as learning_rate=0.1; may be repeated",
        group="app",
        common=common,
    )


def add_cluster_options(parser: Parser) -> Any:
    """Add the options that name running workers. Return the group of argparse that allows only one of them."""
    exclusive = parser.add_mutually_exclusive_group()
    parser.add(
        *("-c", "--config"),
        type=Path,
        metavar="PATH",
        help="cluster file that lists the workers (default: $DDLF_CONFIG, ./cluster.yaml)",
        within=exclusive,
    )
    parser.add("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of workers", within=exclusive)
    parser.add("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    parser.add("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    parser.add("--timeout", type=number(1), default=5, metavar="S", help="seconds to wait for an answer (default: 5)")
    add_verbose(parser)
    return exclusive


def add_app_options(parser: Parser) -> None:
    """Add the argument for the app whose settings are shown, and the options of ``ddlf run``, which change them."""
    parser.add("app", type=Path, nargs="?", metavar="[APP]", help="Python file with a subclass of ddlf.IApp")
    add_target(parser)
    add_options(parser, common=False)


def add_target(parser: Parser, *, kind: str = "class", common: bool = True) -> None:
    """Add the option that chooses one of several apps of a file."""
    parser.add(
        "--target", metavar="NAME", help=f"the {kind} to use, if the file has several", group="app", common=common
    )


def add_verbose(parser: Parser) -> None:
    """Add the option ``-v``, which shows whole tracebacks."""
    parser.add("-v", "--verbose", "--debug", dest="debug", action="store_true", help="print full tracebacks")


def add_json(parser: Parser) -> None:
    """Add the option for output that programs read."""
    parser.add("--json", action="store_true", help="print JSON")


def _values(name: str, setting: Setting[Any, Any]) -> dict[str, Any]:
    """Return the arguments for argparse that describe the values of a setting, such as the choices. The rest is checked
    when all settings are known.
    """
    check = setting.accepts
    if isinstance(check, OneOf):
        return {"choices": check.names}
    if check is switch:
        return {"action": "store_true", "default": None}
    if isinstance(check, Whole):
        return {"type": number(check.low, check.high), "metavar": setting.flag}
    kind = float if isinstance(setting.default, float) else str
    return {"type": kind, "metavar": setting.flag, "offers": lambda: getattr(check, "names", ())}


def _page(text: str) -> bool | int:
    return True if text == "on" else number(1, 65535)(text)


def workers_range(text: str) -> Workers:
    """Parse the value of ``--workers``, such as ``4`` or ``2..8``."""
    from ddlf.cluster.launch.launcher import Workers

    try:
        return Workers.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    return math.inf if text == "for-ever" else number(1)(text)


def given_options(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Return the options among ``names`` that the user has given, as they are typed."""

    def is_given(name: str) -> bool:
        value: Any = getattr(options, name)
        return value is not None and value is not False

    return [option(name) for name in names if is_given(name)]


def check_short(options: argparse.Namespace, purpose: str) -> None:
    """Refuse options that have no effect on a command that only trains for a short time, and a missing app.

    Args:
        options: The parsed options.
        purpose: The command with its purpose, such as ``"ddlf plan, which only measures"``.

    Raises:
        ConfigError: There are such options, or no app.
    """
    if options.app is None:
        command = purpose.partition(",")[0]
        raise ConfigError(f"{command} needs an app", hint=f"name its file: {command} app.py")
    if unused := given_options(options, NOT_SHORT):
        raise ConfigError(
            f"{', '.join(unused)} {has_or_have(unused)} no effect on {purpose}",
            hint=f"leave {'it' if len(unused) == 1 else 'them'} out",
        )


def has_or_have(names: Sequence[str]) -> str:
    """Return the verb for these names: ``"has"`` for one, ``"have"`` for several."""
    return "has" if len(names) == 1 else "have"


def check_cluster_options(options: argparse.Namespace) -> None:
    """Refuse options that have no effect on the cluster that the other options name.

    Raises:
        ConfigError: There are such options; the text names them.
    """
    if options.workers is not None and options.listen is None and options.launcher is None:
        raise ConfigError(
            "--workers has no effect without --listen or --launcher",
            hint=f"for workers on this machine: --local {options.workers}",
        )
    if options.launcher is not None and options.wait is not None:
        raise ConfigError(
            "--wait has no effect with --launcher, which starts workers for this run alone", hint="leave it out"
        )
    if options.listen is not None and options.workers is None:
        raise ConfigError("--listen needs the number of workers", hint="add --workers N")
    if new_workers(options):
        unused = given_options(options, ("token_file", "insecure_plaintext", "wait"))
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
        return
    if unused := given_options(options, ("gpus", "gpu_memory")):
        raise ConfigError(
            f"{', '.join(unused)} has no effect without --local",
            hint="in a cluster file it is a key of a worker; an engine has the key gpus, as in --launcher slurm:gpus=1",
        )
    if options.insecure_plaintext and not (options.hosts or options.listen):
        raise ConfigError(
            "--insecure-plaintext has no effect without --hosts or --listen",
            hint="in a cluster file it is insecure_plaintext under security",
        )


def check_app_options(options: argparse.Namespace, app: IApp) -> None:
    """Refuse options that have no effect with the app's present settings.

    Raises:
        ConfigError: There are such options; the text names them.
    """
    from ddlf.monitor.runs.folder import is_wanted

    is_in_folder = is_wanted(app.out)
    if options.worker_epochs is not None and (app.worker_steps is not None or app.round_samples is not None):
        setting_name = "worker_steps" if app.worker_steps is not None else "round_samples"
        raise ConfigError(
            f"--worker-epochs has no effect with {setting_name}={getattr(app, setting_name)!r}, which sets the length of a round",
            hint="leave one of them out",
        )
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
    """Return whether a run starts its own workers: with ``--local``, or if neither an option nor a cluster file names
    workers.
    """
    from ddlf.cluster.config.addresses import find_config

    return bool(options.local) or (reads_cluster_file(options) and not find_config(options.config))


def reads_cluster_file(options: argparse.Namespace) -> bool:
    """Return whether no option names the workers, so that the cluster file does, if there is one."""
    return not (options.local or options.hosts or options.launcher or options.listen)


def named_cluster(options: argparse.Namespace, **more: Any) -> Cluster:
    """Return the cluster of ``--hosts``, or of the cluster file.

    Args:
        options: The parsed options.
        more: Arguments of ``Cluster``. With ``guest`` it can also ask workers that another master uses.

    Raises:
        ConfigError: The cluster file names a launcher, which starts the workers for each run, so none runs now.
    """
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.config.addresses import parse_address

    if not options.hosts:
        from ddlf.cluster.config.cluster_file import load_config

        if (launcher := load_config(options.config).launcher_name) is not None:
            raise ConfigError(
                f"the cluster file has each run start its workers with launcher {launcher!r}: none can be asked",
                hint="name workers that run with --hosts, or show the last run with: ddlf status --run",
            )
        return Cluster.from_config(options.config, token_file=options.token_file, **more)
    hosts, ports = zip(*(parse_address(part) for part in options.hosts.split(",") if part), strict=True)
    plaintext = options.insecure_plaintext
    return Cluster(hosts, ports, token_file=options.token_file, insecure_plaintext=plaintext, **more)


def _run_options(parser: Parser) -> None:
    parser.add(
        "app",
        type=Path,
        help="Python file with a subclass of ddlf.IApp or an async function main(cluster), or a model as text (.nnm)",
    )
    add_options(parser)
    parser.add(
        "--data",
        metavar="NAME|FILE.npz",
        help="data for a model as text: digits, mnist, cifar10, iris, or arrays",
        group="app",
        common=False,
    )
    add_target(parser, kind="class or function", common=False)


RUN = Command(
    description="Run an app on a cluster.",
    examples=(
        "ddlf run app.py                    # 2 workers here, or those of ./cluster.yaml",
        "ddlf run app.py --local 4 --master-epochs 20 --save model.keras",
        "ddlf run app.py --hosts pc1:9000,pc2:9000 -p learning_rate=0.05",
        "ddlf run app.py --merge median --codec int8",
        "ddlf run app.py --checkpoint ckpt --resume auto    # run it again to continue",
        "ddlf run app.py -c cluster.yaml --dry-run          # print the plan only",
        "ddlf run model.nnm --data digits   # a model as text, no Python",
    ),
    options=_run_options,
    run="ddlf.cli.run:run_file",  # its help must not import what trains
)


def variables(texts: Sequence[str] | None) -> dict[str, str]:
    """Return the environment variables of repeated options ``--env NAME=VALUE``.

    Raises:
        ConfigError: One of them has no equals sign.
    """
    for text in texts or ():
        if "=" not in text:
            raise ConfigError(f"--env is NAME=VALUE, got {text!r}", hint="as in: --env KERAS_BACKEND=jax")
    return dict(text.split("=", 1) for text in texts or ())


def checked_run_options(app: Path, text: str) -> list[str]:
    """Split options of ``ddlf run`` that a printed script contains, after the parser of ``ddlf run`` has checked them. A
    mistake exits with code 2.

    Raises:
        ConfigError: A quotation mark has no partner.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--options cannot be read: {error}", hint="quote it as a shell does") from None
    RUN.parser("ddlf run").parse_args([str(app), *words])
    return words
