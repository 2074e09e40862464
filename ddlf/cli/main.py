"""``ddlf``: the master's commands. Each imports what it needs when it runs; ``ddlf --help`` imports nothing of weight."""

from __future__ import annotations

from ddlf.cli import interrupts  # isort: skip - before what takes time

import argparse
import asyncio
import difflib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ddlf import errors
from ddlf.cli.parsing import reader_may_leave
from ddlf.cli.verbs import TopParser, parser
from ddlf.errors import DDLFError

interrupts.imported()

OF_RUNS = ("compare", "prune")
"""Actions of ``ddlf runs``, which people take for verbs."""


def command() -> None:
    """The entry point of the command."""
    with interrupts.quiet():
        main()


def main(argv: list[str] | None = None) -> None:
    """Run a command; ends with ``SystemExit``."""
    with reader_may_leave():
        _main(sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> NoReturn:
    top = parser()
    if argv[:1] == ["help"] and argv[1:] and argv[1][:1].isupper():
        _explain(top, argv[1])
    while argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    _check_verb(top, argv)
    options = top.parse_args(argv)
    if options.schema:
        print(
            (Path(__file__).parents[1] / "cluster" / "config" / "cluster.schema.json").read_text(encoding="utf-8"),
            end="",
        )
        sys.exit(0)
    if options.command is None:
        top.print_help()
        sys.exit(2)
    try:
        code = act(options)
    except DDLFError as error:
        from ddlf.cli.output import show_error

        show_error(error, whole=getattr(options, "debug", False))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _explain(top: TopParser, name: str) -> NoReturn:
    """Print what there is to know of an error."""
    if name not in errors.__all__:
        near = difflib.get_close_matches(name, errors.__all__, 1)
        top.error(f"there is no error {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    print(errors.explained(name), end="")
    sys.exit(0)


def _check_verb(top: TopParser, argv: list[str]) -> None:
    """End with a sentence if the first word is no verb, and say which is meant."""
    names = tuple(top.verbs.choices)
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version", "--schema"):
        later = next((word for word in argv if word in names), None)
        if later is not None:
            top.error(f"{argv[0]} stands before the command; write: ddlf {later} {argv[0]} ...")
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        near = difflib.get_close_matches(argv[0], (*names, "worker", *OF_RUNS), 1)
        if near and near[0] in OF_RUNS:
            near = [f"runs {near[0]}"]
        if near == ["worker"]:
            top.error(f"unknown command {argv[0]!r}, did you mean 'ddlf-worker'? It is a command of its own")
        top.error(
            f"unknown command {argv[0]!r}"
            + (f", did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names)}")
        )


def function_of(act: str) -> Callable[[argparse.Namespace], Any]:
    """Import the function that carries out a verb.

    Args:
        act: As ``ddlf.cli.parsing.verb`` takes it.
    """
    function: Callable[[argparse.Namespace], Any] = pkgutil.resolve_name(act if "." in act else f"ddlf.cli.{act}")
    return function


def act(options: argparse.Namespace) -> int:
    """Do what the verb says; returns the exit code."""
    done = function_of(options.act)(options)
    code: int = asyncio.run(done) if asyncio.iscoroutine(done) else done
    return code


if __name__ == "__main__":
    command()
