"""Commands and their options: parsing, help that fits on a screen, and errors that name the nearest option.

argparse stays, and only splits arguments. It imports in 13 ms (click 60 ms, typer 81 ms, cyclopts 121 ms), needs no
dependency, and authors of scripts hand their own ``argparse.ArgumentParser`` to ``ddlf.main``. It has no public list of
its options, so ``Parser.options`` keeps one. Help, near misses and completion read it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from ddlf.errors import ConfigError
from ddlf.settings.checks import count_of_bytes, with_names
from ddlf.settings.setting import SYNONYMS

HELP_COLUMN = 24
"""Where the texts of options begin."""
MAX_COLUMNS = 100
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing to a disk."""
COMMON = "options"
"""The group that every help shows first."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option or a positional argument, as help and completion need it.

    Args:
        names: The names as they are typed, such as ``-c`` and ``--config``; none for a positional argument.
        dest: The name in the parsed options.
        value: Placeholder of the value in the help; "" for a switch.
        help: Its effect, for the help.
        offers: Returns the names of the values that help and completion offer. Some options look for them in packages.
        takes_path: Whether the value is a file or a folder.
        groups: The groups of the help that list it. A help with several groups lists it in the first one.
        is_common: Whether the short help shows it.
    """

    names: tuple[str, ...]
    dest: str
    value: str
    help: str
    offers: Callable[[], Sequence[str]]
    takes_path: bool
    groups: tuple[str, ...]
    is_common: bool

    def row(self, columns: int) -> str:
        """Return the lines of the help about this option, for a terminal of this width."""
        first_column = f"  {', '.join(self.names[:2])}{' ' * bool(self.names and self.value)}{self.value}"
        offers = self.offers()
        text = self.help if self.value == "|".join(offers) else with_names(self.help, offers)
        lines = textwrap.wrap(text, columns - HELP_COLUMN, break_long_words=False, break_on_hyphens=False) or [""]
        if len(first_column) > HELP_COLUMN - 2:
            lines = [first_column, *(f"{'':<{HELP_COLUMN}}{line}" for line in lines)]
        else:
            lines = [f"{first_column:<{HELP_COLUMN}}{lines[0]}", *(f"{'':<{HELP_COLUMN}}{line}" for line in lines[1:])]
        return "\n".join(lines).rstrip()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short and a long help, and errors that suggest the nearest option."""

    INSTEAD: Mapping[str, str] = {
        "--token": "tokens on the command line are visible to other users; use --token-file",
    }
    SYNONYMS: Mapping[str, str] = {
        **{f"--{other}": f"--{name.replace('_', '-')}" for other, name in SYNONYMS.items()},
        "--num-workers": "--local",
        "--output": "--save",
        "--async": "--mode async",
        "--sync": "--mode sync",
        "--downpour": "--mode downpour",
        "--machines": "--hosts",
        "--nodes": "--hosts",
    }
    """Names of options in other programs, and the option of DDLF."""

    def __init__(
        self,
        prog: str = "ddlf",
        description: str = "",
        examples: Sequence[str] = (),
        epilog: str = "",
        parents: Sequence[argparse.ArgumentParser] = (),
        placeholders: Sequence[str] = (),
    ) -> None:
        """Create a parser for the options of a command.

        Args:
            prog: The command as it is typed.
            description: Its effect, for its own help.
            examples: Whole commands, with a comment where that helps.
            epilog: Text at the end of the help.
            parents: Parsers with options of a script's author.
            placeholders: Further words in the usage after the command, such as ``ACTION``.
        """
        super().__init__(
            prog=prog, description=description, epilog=epilog, parents=list(parents), add_help=False, allow_abbrev=False
        )
        self.examples = examples
        self._placeholders = placeholders
        self._words: Sequence[str] = ()
        self.options: list[Option] = []
        self.value_when_alone: dict[str, str] = {}
        """The value of an option that is given without one. argparse's "?" would take the next argument instead."""
        self.more_groups: Callable[[], Mapping[str, Callable[[int], str]]] = dict
        """Returns further groups of the help by name. Each is a function that gets the width and returns the text."""
        self._texts_of_parents = [parent.format_help().partition("\n\n")[2].strip("\n") for parent in parents]
        self.add("-h", "--help", action="store_true", help="show this help")

    def add(
        self,
        *names: str,
        help: str,
        group: str | tuple[str, ...] = COMMON,
        common: bool = True,
        alone: str | None = None,
        within: Any = None,
        offers: Callable[[], Sequence[str]] | None = None,
        **how: Any,
    ) -> None:
        """Add an option or a positional argument.

        Args:
            names: The names, like in ``add_argument``.
            help: Its effect, for the help.
            group: The group of the help that lists it, or several groups.
            common: Whether the short help shows it.
            alone: The value of the option when it is given without a value; None if it always needs one.
            within: A group of argparse that allows only one of its options at a time.
            offers: Returns the values that help and completion offer, if others are allowed, too.
            how: Further arguments of ``add_argument``.
        """
        choices = tuple(how.get("choices") or ())
        if choices:
            how["type"] = one_of(*choices)
        if not names[0].startswith("-"):
            how.setdefault("metavar", names[0].upper())
        action = (within or self).add_argument(*names, help=argparse.SUPPRESS, **how)
        is_switch = how.get("action", "").startswith("store_") or how.get("action") == "version"
        listed = "|".join(choices) if len("|".join(choices)) <= HELP_COLUMN - 6 else ""
        value = "" if is_switch else how.get("metavar") or listed or action.dest.upper().rpartition("_")[2]
        if not action.option_strings:
            group = "arguments"
        takes_path = how.get("type") is Path or value in ("DIR", "PATH")
        self.options.append(
            Option(
                tuple(action.option_strings),
                action.dest,
                value,
                help,
                offers or (lambda: choices),
                takes_path,
                (group,) if isinstance(group, str) else group,
                common,
            )
        )
        if alone is not None:
            self.value_when_alone[names[0]] = alone

    # -- help -------------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[str]:
        """The groups of the help, in their order."""
        return list(dict.fromkeys([*(option.groups[0] for option in self.options), *self.more_groups()]))

    @property
    def is_long(self) -> bool:
        """Whether the short help leaves out options."""
        return not all(option.is_common for option in self.options)

    def format_help(self, groups: Sequence[str] = ()) -> str:
        """Return the text of the help.

        Args:
            groups: The groups whose options are listed in full. Without any, the common options are listed.
        """
        columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        short = not groups
        sections: dict[str, list[str]] = {"arguments": []}
        for option in self.options:
            listed = [group for group in option.groups if group in groups]
            if listed or (short and option.is_common):
                title = COMMON if short and self.is_long and option.names else (listed or option.groups)[0]
                sections.setdefault(title, []).append(option.row(columns))
        parts = [self.format_usage().rstrip()]
        if self.description:
            parts.append(textwrap.fill(self.description, columns))
        parts += ["\n".join([f"{title}:", *rows]) for title, rows in sections.items() if rows]
        parts += [text(columns) for name, text in self.more_groups().items() if name in groups] if groups else []
        parts += self._texts_of_parents
        if self.examples and (short or COMMON in groups):
            parts.append("\n".join(["examples:", *(f"  {line}" for line in self.examples)]))
        if self.epilog:
            parts.append(self.epilog)
        if short and self.is_long:
            groups = [name for name in self.groups if name not in ("arguments", COMMON)]
            names = textwrap.fill(", ".join(groups), columns, initial_indent="  ", subsequent_indent="  ")
            parts.append(f"more options: {self.prog} --help-all, or --help GROUP with one of\n{names}")
        return "\n\n".join(parts) + "\n"

    def format_usage(self) -> str:
        """Return the usage, the form of the command, in one line."""
        arguments = [option.value for option in self.options if not option.names]
        return f"usage: {' '.join([self.prog, *arguments, *self._placeholders])} [OPTIONS]\n"

    def _help_asked(self, args: Sequence[str]) -> str | None:
        """Return the help text (short, long, or of one group) that the arguments ask for; None if they do not ask for
        help.
        """
        for number, arg in enumerate(args):
            if arg == "--help-all":
                return self.format_help(self.groups)
            if arg in ("-h", "--help"):
                name = args[number + 1] if number + 1 < len(args) else ""
                if not self.is_long or not name or name.startswith("-") or "." in name:
                    return self.format_help()
                if name in self.groups:
                    return self.format_help([name])
                self.error(f"--help has no group {name!r}{nearest(name, self.groups)}")
        return None

    # -- parsing ----------------------------------------------------------------------------------------------------

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse.

        A request for help prints the help and exits; an unknown option is explained.
        """
        words = list(sys.argv[1:] if args is None else args)
        until = words.index("--") if "--" in words else len(words)
        if (text := self._help_asked(words[:until])) is not None:
            print(text, end="")
            sys.exit(0)
        self._words = words[:until]
        parsed, unknown = super().parse_known_args(self._with_values(words), namespace)
        if unknown:
            self._explain_unknown(unknown[0])
        return parsed, unknown

    def _with_values(self, args: Sequence[str]) -> list[str]:
        """Insert the values of options that are given without a value."""
        result: list[str] = []
        for number, arg in enumerate(args):
            previous = args[number - 1] if number else ""
            if previous in self.value_when_alone and arg.isdigit():
                continue
            if arg in self.value_when_alone:
                following = args[number + 1] if number + 1 < len(args) else ""
                arg += f"={following if following.isdigit() else self.value_when_alone[arg]}"
            result.append(arg)
        return result

    @property
    def _names(self) -> list[str]:
        own_names = [name for option in self.options for name in option.names]
        return own_names + [name for text in self._texts_of_parents for name in re.findall(r"(?<!\S)--?\w[\w-]*", text)]

    def _explain_unknown(self, argument: str) -> NoReturn:
        """Exit with code 2 because of an option or argument that does not exist."""
        name = argument.split("=")[0]
        if name in self.INSTEAD:
            self.error(f"unknown option {name}: {self.INSTEAD[name]}")
        if not name.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        # Compare without the dashes, which all options have.
        names = {known_name.lstrip("-"): known_name for known_name in self._names}
        word = name.lstrip("-")
        matches = [names[key] for key in difflib.get_close_matches(word, names, 1, cutoff=0.7)]
        if (synonym := self.SYNONYMS.get(name, "")).partition(" ")[0] in names.values():
            matches = [synonym]
        # A value was used like an option, such as --median.
        takers = [
            option
            for option in self.options
            if option.names
            and option.value
            and re.search(rf"\b{re.escape(word)}\b", f"{option.help} {' '.join(option.offers())}")
        ]
        if not matches and len(takers) == 1 and not argument.partition("=")[1]:
            matches = [f"{takers[0].names[-1]} {word}"]
        suggestion = f", did you mean {matches[0]}?" if matches else ""
        if not matches and name.startswith("--") and "-p" in names.values():
            suggestion = f"; to set an attribute of the app, use -p {name[2:].replace('-', '_')}=VALUE"
        self.error(f"unknown option {name!r}{suggestion}")

    def error(self, message: str) -> NoReturn:
        """Print the reason and the command for help, and exit with code 2.

        An unknown option is a better reason than a missing argument, which argparse finds first.
        """
        if "expected one argument" in message:  # argparse takes such a value for an option
            for name, word in itertools.pairwise(self._words):
                if name in self._names and re.match(r"-\d", word):
                    message = f"argument {name}: must not be negative, got {word!r}"
        if "arguments are required" in message:
            for word in self._words:
                if word.startswith("--") and word.partition("=")[0] not in self._names:
                    self._explain_unknown(word)
        sys.stderr.write(f"{self.prog}: {message}\nSee: {self.prog} --help\n")
        sys.exit(2)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ``ddlf``, or an action of one, such as ``split`` of ``ddlf data split``.

    Args:
        description: Its effect, for its own help.
        examples: Whole commands.
        options: A function that adds the command's options to a parser.
        run: A function, maybe async, that takes the parsed options and returns the exit code; or its location as a text
            ``"module:NAME"``, which is imported when the command runs. None if the command has only actions.
        actions: Actions by name, each with its line in the help.
    """

    description: str
    examples: Sequence[str]
    options: Callable[[Parser], None] = lambda parser: None
    run: Callable[[argparse.Namespace], int | Coroutine[Any, Any, int]] | str | None = None
    actions: Mapping[str, tuple[str, Command]] = field(default_factory=dict)

    def parser(self, prog: str) -> Parser:
        """Return the parser of the command's own options.

        Args:
            prog: The command as it is typed.
        """
        rows = [f"  {name:<{HELP_COLUMN - 4}}  {text}" for name, (text, _) in self.actions.items()]
        epilog = "\n".join(["actions:", *rows, "", f"Options of an action: {prog} ACTION --help"]) if rows else ""
        action = "ACTION" if self.run is None else "[ACTION]"
        result = Parser(prog, self.description, self.examples, epilog, placeholders=[action] * bool(self.actions))
        self.options(result)
        return result

    def chosen(self, prog: str, args: Sequence[str]) -> tuple[Command, Parser, list[str]]:
        """Return the command or action that the arguments name, its parser, and the remaining arguments.

        Args:
            prog: The command as it is typed.
            args: The arguments after it.
        """
        parser, args = self.parser(prog), list(args)
        if not self.actions:
            return self, parser, args
        takes_value = {name for option in parser.options if option.value for name in option.names}
        for number, (previous, arg) in enumerate(zip(["", *args], args, strict=False)):
            if arg in self.actions and previous not in takes_value:
                return self.actions[arg][1].chosen(f"{prog} {arg}", args[:number] + args[number + 1 :])
            if not arg.startswith("-") and not previous.startswith("-"):
                parser.error(f"unknown action {arg!r}{nearest(arg, self.actions)}")
        if self.run is None and not {"-h", "--help", "--help-all"} & {*args}:
            if args:
                parser.parse_args(args)  # a wrong option is the better error
            parser.error(f"an action is missing: {', '.join(self.actions)}")
        return self, parser, args


def action(
    help: str,
    description: str,
    options: Callable[[Parser], None],
    run: Callable[[argparse.Namespace], int | Coroutine[Any, Any, int]],
    *examples: str,
) -> tuple[str, Command]:
    """Define an action of a command, such as ``split`` of ``ddlf data``. Return its line in the help and its
    ``Command``.
    """
    return help, Command(description=description, examples=examples, options=options, run=run)


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """The entry of a command in the list of all commands, which does not import the command.

    Args:
        group: The group of the list.
        home: The ``Command``, as ``"module:NAME"``. Its module is imported when the command is used.
        help: Its line in ``ddlf --help``.
        actions: Actions that other parts add, each with its line in the help and its home.
    """

    group: str
    home: str
    help: str
    actions: dict[str, tuple[str, str]] = field(default_factory=dict)

    def load(self) -> Command:
        """Import the module of the command, and return the command."""
        command: Command = resolve_name(self.home)
        loaded = {name: (help, resolve_name(home)) for name, (help, home) in self.actions.items()}
        return replace(command, actions={**command.actions, **loaded}) if loaded else command


class Commands(dict[str, CommandEntry]):
    """All commands by name, in the order of the help."""

    def add(self, group: str, name: str, home: str, help: str) -> None:
        """Add a command, or an action of a command that was added before.

        Args:
            group: ``train``, ``cluster``, ``data and models``, ``past runs`` or ``setup``, or a new one.
            name: The name as it is typed. An action begins with the name of its command, as in ``"model compare"``.
            home: The ``Command``, as ``"module:NAME"``.
            help: Its line in the help.
        """
        command, _, action = name.partition(" ")
        if not action:
            self[name] = CommandEntry(group, home, help)
        elif command in self:
            self[command].actions[action] = help, home


def nearest(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the end of an error about an unknown name: the nearest name, or all existing names."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f", did you mean {matches[0]!r}?" if matches else f"; choose from: {', '.join(names) or 'none'}"


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit with 141, like other tools, if the output has no reader any more, as in ``ddlf status | head -1``."""
    try:
        try:
            yield
        finally:
            _flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(141)


def check_output(error: BaseException) -> None:
    """Exit with 1 and a sentence if an error is that standard output cannot be written, as on a full disk.

    Only another write shows whether the error was about standard output.
    """
    if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
        _flush("\n")


def _flush(text: str = "") -> None:
    """Write the rest of the output, and more; exit with 1 if there is no space for it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        sys.stderr.write(f"error  the output could not be written: {error.strerror}\n")
        sys.exit(1)


def _discard_output() -> None:
    """Discard further output after an error of standard output, because Python flushes it at exit, which must not fail
    again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- types of values --------------------------------------------------------------------------------------------------


def number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return an argparse type that parses a whole number and checks that it is in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if value < low or (high is not None and value > high):
            limits = f"{low}-{high}" if high is not None else f"{low} or more"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {value}")
        return value

    return parse


def cards(text: str) -> tuple[str, ...]:
    """Parse names of cards, such as ``"0,1"``, as an argparse type."""
    from ddlf.worker.cards import read_names

    try:
        return read_names(text, "0 or 0,1")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory(text: str) -> int | None:
    """Parse a size such as ``8GiB``, as an argparse type."""
    try:
        return count_of_bytes("it", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def one_of(*choices: str) -> Callable[[str], str]:
    """Return an argparse type that accepts only one of these names."""

    def parse(text: str) -> str:
        if text in choices:
            return text
        matches = difflib.get_close_matches(text.lower(), choices, 1)
        suggestion = f"; did you mean {matches[0]!r}?" if matches else ""
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}{suggestion}")

    return parse


def listening(text: str) -> tuple[str | None, int]:
    """Parse ``PORT`` or ``HOST:PORT``, where to listen, as an argparse type."""
    from ddlf.cluster.config.addresses import parse_address
    from ddlf.errors import ConfigError

    if text.isascii() and text.isdecimal():
        return None, number(1, 65535)(text)
    try:
        return parse_address(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def addresses(text: str) -> str:
    """Parse addresses with commas between them, as an argparse type.

    An empty text, such as an unset variable, is an error.
    """
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"names no worker, got {text!r}")
    return text
