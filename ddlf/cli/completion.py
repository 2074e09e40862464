"""``ddlf completion``: complete commands, options and values in a shell.

The script that a shell loads asks ``ddlf`` itself for candidates at each press of the Tab key, with ``_DDLF_COMPLETE``
set. So it is never outdated, and knows the commands of optional parts. An answer takes about 0.15 s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from ddlf.cli.parsing import Command, Commands, Option, Parser
from ddlf.training.registry import EXCHANGE, MODE, SETTINGS, settings_with

FILES = "\tfiles"
"""The line that asks the shell to complete names of files."""

SCRIPTS = {
    "bash": """\
_ddlf() {
    local line IFS=$'\\n'
    COMPREPLY=()
    for line in $(_DDLF_COMPLETE=1 "${COMP_WORDS[0]}" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null); do
        if [[ $line == $'\\tfiles' ]]; then
            compopt -o filenames
            COMPREPLY+=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
        else
            [[ ${line%%$'\\t'*} == *= ]] && compopt -o nospace
            COMPREPLY+=("${line%%$'\\t'*}")
        fi
    done
}
complete -F _ddlf ddlf
""",
    "zsh": """\
#compdef ddlf
_ddlf() {
    local line
    local -a described
    for line in "${(@f)$(_DDLF_COMPLETE=1 "${words[1]}" "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        if [[ $line == $'\\tfiles' ]]; then
            _files
        elif [[ -n $line ]]; then
            described+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    _describe ddlf described
}
if [[ $funcstack[1] == _ddlf ]]; then _ddlf "$@"; else compdef _ddlf ddlf; fi
""",
    "fish": """\
function __ddlf_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in (_DDLF_COMPLETE=1 $words[1] $words[2..-1] 2>/dev/null)
        if test "$line" = \\tfiles
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c ddlf -f -a '(__ddlf_complete)'
""",
}


def _options(parser: Parser) -> None:
    parser.add("shell", choices=tuple(SCRIPTS), help="your shell")


def completion(options: argparse.Namespace) -> int:
    """Print the script that a shell loads to complete the commands of ``ddlf``."""
    print(SCRIPTS[options.shell], end="")
    return 0


def print_candidates(words: Sequence[str], commands: Commands) -> None:
    """Print the possible completions of the last word, each with its help after a tab.

    Args:
        words: The words after ``ddlf``. The last one is incomplete, and may be empty.
        commands: All commands.
    """
    *before, typed = words or [""]
    for name, text in _candidates(before, typed, commands):
        if name == FILES or name.startswith(typed):
            print(name if name == FILES else f"{name}\t{text.partition(';')[0]}")


def _candidates(before: Sequence[str], typed: str, commands: Commands) -> Iterator[tuple[str, str]]:
    if not before:
        yield from ((name, entry.help) for name, entry in commands.items())
        yield from (("--help", "show this help"), ("--version", "print the version"))
        return
    if before[0] not in commands:
        return
    command, remaining = commands[before[0]].load(), list(before[1:])
    while remaining and remaining[0] in command.actions:
        command = command.actions[remaining.pop(0)][1]
    yield from _candidates_of_command(command, remaining, typed)


def _candidates_of_command(command: Command, before: Sequence[str], typed: str) -> Iterator[tuple[str, str]]:
    parser = command.parser("ddlf")
    by_name = {name: option for option in parser.options for name in option.names}
    previous = by_name.get(before[-1]) if before else None
    if before and before[-1] in ("-h", "--help") and parser.is_long:
        yield from ((group, "") for group in parser.groups)
    elif previous is not None and previous.value and before[-1] not in parser.value_when_alone:
        yield from _parameters() if previous.dest == "parameters" else _values(previous)
    elif typed.startswith("-"):
        yield from ((option.names[-1], option.help) for option in parser.options if option.names)
        yield from (("--help-all", "show all options"),) * parser.is_long
    else:
        yield from ((name, text) for name, (text, _) in command.actions.items())
        for option in parser.options:
            if not option.names:
                yield from _values(option)


def _values(option: Option) -> Iterator[tuple[str, str]]:
    yield from ((value, "") for value in option.offers())
    if option.takes_path:
        yield FILES, ""


def _parameters() -> Iterator[tuple[str, str]]:
    """Yield the name and help of each setting that ``-p`` sets: settings without their own option, and settings of
    other packages.
    """
    of_packages = [settings_with(mode, exchange) for mode in MODE.names for exchange in EXCHANGE.names]
    for name, setting in {name: setting for settings in of_packages for name, setting in settings.items()}.items():
        if setting.flag is None or name not in SETTINGS:
            yield f"{name}=", setting.help


COMPLETION = Command(
    description="Print the script that lets your shell complete commands, options and values with the Tab key.",
    examples=(
        "ddlf completion bash > ~/.local/share/bash-completion/completions/ddlf",
        "ddlf completion zsh > ~/.zsh/completions/_ddlf     # a folder of $fpath",
        "ddlf completion fish > ~/.config/fish/completions/ddlf.fish",
    ),
    options=_options,
    run=completion,
)
