"""``ddlf``: the commands of the master. ``ddlf --help`` imports nothing heavy: a command is imported when it is used."""

from __future__ import annotations

from ddlf.cli import interrupts  # isort: skip - before what takes time

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import NoReturn

from ddlf import errors
from ddlf.cli.parsing import HELP_COLUMN, Command, Commands, Parser, reader_may_leave
from ddlf.errors import DDLFError
from ddlf.version import __version__

interrupts.imported()

CORE = (
    ("train", "run", "ddlf.cli.options:RUN", "run an app on a cluster"),
    ("train", "check", "ddlf.cli.check:CHECK", "compare an app with plain Keras"),
    ("train", "new", "ddlf.cli.new:NEW", "create a small project to start with"),
    ("train", "demo", "ddlf.cli.new:DEMO", "train a small model on this machine"),
    ("train", "peers", "ddlf.cli.peers:PEERS", "train with peers, whose data stay with them"),
    ("cluster", "up", "ddlf.cli.machines:UP", "start the workers of the cluster file by ssh"),
    ("cluster", "down", "ddlf.cli.machines:DOWN", "end the workers that ddlf up has started"),
    ("cluster", "runcmd", "ddlf.cli.machines:RUNCMD", "run a command on the machines of the cluster file"),
    ("cluster", "status", "ddlf.cli.workers:STATUS", "show what the workers are doing"),
    ("cluster", "top", "ddlf.cli.top:TOP", "watch a run, or the workers, in the terminal"),
    ("cluster", "dashboard", "ddlf.cli.dashboard:DASHBOARD", "open the page of a run in the browser"),
    ("cluster", "stop", "ddlf.cli.workers:STOP", "stop workers, or the work that they run"),
    ("cluster", "clean", "ddlf.cli.workers:CLEAN", "free what earlier runs left on the workers"),
    ("cluster", "k8s", "ddlf.cli.k8s:K8S", "train in the pods of a Kubernetes cluster"),
    ("cluster", "slurm", "ddlf.cli.slurm:SLURM", "print the script of a job of Slurm"),
    ("cluster", "bench", "ddlf.cli.bench:BENCH", "measure the connections to the workers"),
    ("data and models", "data", "ddlf.cli.data:DATA", "create, check and show data sets in files"),
    ("past runs", "runs", "ddlf.cli.runs:RUNS", "list, compare and remove runs"),
    ("past runs", "logs", "ddlf.cli.runs:LOGS", "show what the workers printed in a run"),
    ("past runs", "report", "ddlf.cli.runs:REPORT", "write and show the report of a run"),
    ("setup", "doctor", "ddlf.cli.doctor:DOCTOR", "find problems here and on the workers"),
    ("setup", "env", "ddlf.cli.env:ENV", "print what a bug report needs"),
    ("setup", "config", "ddlf.cli.config:CONFIG", "show the settings of a run"),
    ("setup", "token", "ddlf.cli.token:TOKEN", "create or show the shared secret"),
    ("setup", "completion", "ddlf.cli.completion:COMPLETION", "complete commands and options in your shell"),
)
"""Group, name, home and line in the help of each command of the core. Optional parts add theirs."""
NOT_COMMANDS = {
    "worker": "did you mean 'ddlf-worker'? It is a separate command",
    "start": "'ddlf up' starts the workers of a cluster file, 'ddlf-worker' one here, 'ddlf run' a training",
    "train": "did you mean 'ddlf run'?",
    "resume": "did you mean 'ddlf run APP --resume auto --checkpoint DIR'?",
    "compare": "did you mean 'ddlf runs compare'?",
    "prune": "did you mean 'ddlf runs prune'?",
    "kill": "did you mean 'ddlf stop'?",
    "init": "did you mean 'ddlf new'?",
}
"""Names that people type by mistake, and the hint for each."""
FIRST_STEPS = """\
first steps:
  ddlf demo                          train on two workers on this machine
  ddlf new lab && cd lab             start your own project
  ddlf run app.py --local 2
  ddlf-worker --port 9000            start a worker, on each machine
  ddlf run app.py -c cluster.yaml    train on these workers
  ddlf doctor -c cluster.yaml        when something is wrong"""


def command() -> None:
    """Run the command ``ddlf``, as its entry point in the installed package."""
    with interrupts.quiet():
        main()


def main(argv: list[str] | None = None) -> None:
    """Run the command of ``ddlf`` that the arguments name, and end with ``SystemExit``."""
    with reader_may_leave():
        _main(sys.argv[1:] if argv is None else argv)


def core_commands() -> Commands:
    """Return the built-in commands, without the commands of optional parts such as the adviser."""
    commands = Commands()
    for row in CORE:
        commands.add(*row)
    return commands


def all_commands() -> Commands:
    """Return the commands by name, in the order of the help."""
    from ddlf.extras import installed

    commands = core_commands()
    for extra in installed():
        for row in extra.commands:
            commands.add(*row)
    return commands


def top_parser(commands: Commands) -> Parser:
    """Return the parser for arguments before the command. Its help lists the commands in groups."""
    rows: dict[str, list[str]] = {}
    for name, entry in commands.items():
        rows.setdefault(entry.group, []).append(f"  {name:<{HELP_COLUMN - 4}}  {entry.help}")
    lists = "\n\n".join("\n".join([f"{group}:", *lines]) for group, lines in rows.items())
    result = Parser(
        "ddlf",
        "Train unchanged Keras models on the machines you have.",
        epilog=f"{lists}\n\n{FIRST_STEPS}",
        placeholders=["COMMAND"],
    )
    result.add("--version", action="version", version=f"ddlf {__version__}", help="print the version")
    result.add("--schema", action="store_true", help="print the JSON Schema of cluster.yaml, for editors")
    return result


def parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """Return the command that the arguments name, and its parsed options. A mistake exits with code 2."""
    name, commands = argv[0] if argv else "", core_commands()
    if name not in commands:
        commands = all_commands()
    if name not in commands:
        _refuse(top_parser(commands), commands, argv)
    with interrupts.importing():
        command = commands[name].load()
    chosen, parser, remaining = command.chosen(f"ddlf {name}", argv[1:])
    return chosen, parser.parse_args(remaining)


def _main(argv: list[str]) -> NoReturn:
    if "_DDLF_COMPLETE" in os.environ:
        from ddlf.cli.completion import print_candidates

        print_candidates(argv, all_commands())
        sys.exit(0)
    if argv[:1] == ["help"] and argv[1:]:
        _help_without_command(argv[1])
    while argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if argv[:1] in ([], ["-h"], ["--help"], ["--help-all"], ["--version"], ["--schema"]):
        _without_command(argv)
    chosen, options = parse(argv)
    try:
        code = run_parsed(chosen, options)
    except DDLFError as error:
        from ddlf.cli.output import show_error

        show_error(error, whole=getattr(options, "debug", False))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _without_command(argv: list[str]) -> NoReturn:
    parser = top_parser(all_commands())
    if parser.parse_args(argv).schema:
        from ddlf.cluster import config

        [folder] = config.__path__
        with open(os.path.join(folder, "cluster.schema.json"), encoding="utf-8") as schema:
            print(schema.read(), end="")
        sys.exit(0)
    print(parser.format_help(), end="")
    sys.exit(2)


def _help_without_command(name: str) -> None:
    """Run ``ddlf help NAME`` for a name that is not a command: print the full description of an error class, and exit; or
    exit with code 2. Do nothing for the name of a command.
    """
    kinds = {kind.lower(): kind for kind in errors.__all__}
    if (kind := kinds.get(name.lower())) is not None:
        print(errors.explained(kind), end="")
        sys.exit(0)
    if (
        name.startswith("-")
        or name in ("help", *core_commands(), *NOT_COMMANDS)
        or name in (commands := all_commands())
    ):
        return
    from ddlf.cli.options import GROUPS

    parser = top_parser(commands)
    if name in GROUPS:
        parser.error(f"{name!r} is a group of options: ddlf run --help {name}")
    matches = difflib.get_close_matches(name, (*kinds.values(), *commands, *GROUPS), 1)
    advice = "name a command of ddlf --help, an error such as WorkerLost, or options such as downpour: ddlf run --help downpour"
    parser.error(f"there is no help on {name!r}{f', did you mean {matches[0]!r}?' if matches else f'; {advice}'}")


def _refuse(parser: Parser, commands: Commands, argv: Sequence[str]) -> NoReturn:
    """Exit with code 2, because the first word is not a command. Suggest the nearest command."""
    name = argv[0] if argv else ""
    if name.startswith("-"):
        later = next((word for word in argv if word in commands), None)
        if later is None:
            parser.parse_args(argv)
            parser.error(f"a command is missing: {', '.join(commands)}")
        parser.error(f"{name} stands before the command; write: ddlf {later} {name} ...")
    matches = difflib.get_close_matches(name, (*commands, *NOT_COMMANDS), 1)
    if matches and matches[0] in NOT_COMMANDS:
        parser.error(f"unknown command {name!r}, {NOT_COMMANDS[matches[0]]}")
    suggestion = f", did you mean {matches[0]!r}?" if matches else f"; there are: {', '.join(commands)}"
    parser.error(f"unknown command {name!r}{suggestion}")


def run_parsed(chosen: Command, options: argparse.Namespace) -> int:
    """Run a command with its parsed options, and return the exit code."""
    assert chosen.run is not None
    with interrupts.importing():
        run = resolve_name(chosen.run) if isinstance(chosen.run, str) else chosen.run
    result = run(options)
    if inspect.iscoroutine(result):
        import asyncio

        code: int = asyncio.run(result)
        return code
    assert isinstance(result, int)
    return result


if __name__ == "__main__":
    command()
