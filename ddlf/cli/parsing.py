"""Command line arguments, with errors that help. argparse, whose import takes 13 ms; nothing else."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction["Parser"]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what was meant: near misses, and what to use instead of options that must not exist."""

    INSTEAD = {"--token": "tokens on the command line are visible to other users; use --token-file"}  # noqa: RUF012
    MEANT = {  # noqa: RUF012 - what other programs call it
        "--epochs": "--master-epochs",
        "--rounds": "--master-epochs",
        "--workers": "--local",
        "--num-workers": "--local",
        "--batch": "--batch-size",
        "--output": "--save",
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.may_stand_alone: dict[str, str] = {}
        """Options whose value may be left out, and the value that they have then. Not argparse's "?", which takes the next argument for it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but unknown options are explained, by the command that they were given to."""
        args = self._with_values(list(sys.argv[1:] if args is None else args))
        self._check_options_before_an_action(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.unknown(unknown[0])
        return found, unknown

    def _check_options_before_an_action(self, args: list[str]) -> None:
        """Name a misspelt option: argparse would take its value for the action, and complain of that."""
        actions = {name for part in self._actions if part.nargs == argparse.PARSER for name in part.choices or ()}
        for arg in itertools.takewhile(lambda arg: actions and arg not in actions, args):
            if arg.startswith("--") and arg.partition("=")[0] not in self._option_string_actions:
                self.unknown(arg)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], 1)
            if near:
                error.message += f"; did you mean {near[0]!r}?"
            raise

    def _with_values(self, args: list[str]) -> list[str]:
        result: list[str] = []
        for arg in [*args, "the end"]:
            if result and (value := self.may_stand_alone.get(result[-1])) is not None:
                result[-1] += f"={arg if arg.isdigit() else value}"
                if arg.isdigit():
                    continue
            result.append(arg)
        return result[:-1]

    def unknown(self, option: str) -> NoReturn:
        """End with exit code 2 because of an option that does not exist."""
        name = option.split("=")[0]
        if name in self.INSTEAD:
            self.error(f"unknown option {name}: {self.INSTEAD[name]}")
        meant = self.MEANT.get(name)
        near = [meant] if meant in self._option_string_actions else []
        words = {known.lstrip("-"): known for known in self._option_string_actions}  # without what all have in common
        near = near or [words[word] for word in difflib.get_close_matches(name.lstrip("-"), words, 1)]
        kind = "option" if name.startswith("-") else "argument"
        more = f", did you mean {near[0]}?" if near else ""
        if not near and name.startswith("--") and "-p" in self._option_string_actions:
            more = f"; an attribute of the app is set with -p {name[2:].replace('-', '_')}=..."
        self.error(f"unknown {kind} {name!r}{more}")

    def error(self, message: str) -> NoReturn:
        """One line with the reason, one with the way to help; exit code 2."""
        sys.stderr.write(f"{self.prog}: {message}\nSee: {self.prog} --help\n")
        sys.exit(2)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End with 141, as other tools do, when nobody reads the output any more: ``ddlf status | head -1``."""
    try:
        try:
            yield
        finally:
            _flush()
    except BrokenPipeError:
        _write_no_more()
        sys.exit(141)


def _flush() -> None:
    """Write what is left of the output, or end with 1 where it has no room."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _write_no_more()
        sys.stderr.write(f"error  the output could not be written: {error.strerror}\n")
        sys.exit(1)


def _write_no_more() -> None:
    """Python flushes once more at its end, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number(name: str, low: int, high: int | None = None) -> Any:
    """An argparse type: a whole number in a range, with an error that names the option."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if value < low or (high is not None and value > high):
            range_ = f"{low}-{high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"must be {range_}, got {value}")
        return value

    parse.__name__ = name
    return parse


def addresses(text: str) -> str:
    """An argparse type: addresses with commas between them. None at all, as of an empty variable, must not mean another cluster."""
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"names no worker, got {text!r}")
    return text


def verb(verbs: Verbs, name: str, act: str, help: str, description: str, *examples: str) -> Parser:
    """Add a verb.

    Args:
        verbs: Those of ``ddlf``, or of a verb that has actions.
        name: Name of the verb.
        act: The function that does it, as ``"package.module:function"``, or ``"module:function"`` for a module of ``ddlf.cli``. It takes the
            parsed options and returns the exit code; it may be async.
        help: For the list of verbs.
        description: On top of its own help.
        examples: Whole commands.
    """
    result = verbs.add_parser(name, help=help, description=description, epilog=examples_of(*examples))
    result.set_defaults(act=act)
    return result


def verb_with_actions(verbs: Verbs, name: str, help: str, description: str, *examples: str) -> Verbs:
    """Add a verb that has actions, or find the one that another part has added.

    Args:
        verbs: Those of ``ddlf``.
        name: Name of the verb.
        help: For the list of verbs.
        description: On top of its own help.
        examples: Whole commands.

    Returns:
        The actions of the verb, to add more.
    """
    if (known := verbs.choices.get(name)) is not None:
        return next(action for action in known._actions if isinstance(action, argparse._SubParsersAction))
    result = verbs.add_parser(name, help=help, description=description, epilog=examples_of(*examples))
    return result.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)


def examples_of(*lines: str) -> str:
    """Whole commands, as they stand below a help."""
    return "\n  ".join(["examples:", *lines])
