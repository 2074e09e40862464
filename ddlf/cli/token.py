"""``ddlf token``: create, copy and show the secret that master and workers share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ddlf.cli.parsing import Command, Parser, action
from ddlf.errors import AuthError
from ddlf.rpc import tokens


def new(options: argparse.Namespace) -> int:
    """Run ``ddlf token new``: write a new token, and print how to copy it to other machines."""
    path = tokens.write_token(options.token_file)
    folder, target = tokens.shell_path(path.parent), tokens.shell_path(path)
    print(f"A new token is in {path}. Anyone with this token can run code on your workers.")
    print("Copy it to each of the other machines. This command does it, with HOST replaced:")
    print(f"  ssh HOST 'umask 077; mkdir -p {folder}; cat > {target}' < {target}")
    print(
        "Without ssh: 'ddlf token show' here, 'ddlf token paste' there. Then start the workers: ddlf-worker --port 9000"
    )
    return 0


def paste(options: argparse.Namespace) -> int:
    """Run ``ddlf token paste``: read the token of another machine, and write it to this user's file."""
    print(f"The token is in {tokens.write_token(options.token_file, _read_secret())}.")
    return 0


def show(options: argparse.Namespace) -> int:
    """Run ``ddlf token show``: print only the token on standard output, and the path of its file on standard error."""
    token_set = tokens.find_tokens(options.token_file)
    if token_set is None:
        raise AuthError("there is no token", hint="create one with: ddlf token new")
    print(f"# {token_set.source}, fingerprint {token_set.fingerprint}", file=sys.stderr)
    for secret in token_set.all:
        print(secret.decode())
    return 0


def _read_secret() -> str:
    """Read a token from the terminal without showing it, or from standard input. It is not an argument of the command,
    because other users could see it.
    """
    if not sys.stdin.isatty():
        return sys.stdin.read(4096)
    import getpass

    return getpass.getpass("token (not shown): ")


def _options(help: str) -> Callable[[Parser], None]:
    return lambda parser: parser.add("--token-file", type=Path, metavar="PATH", help=help)


PLACE = "(default: in your configuration folder)"
TOKEN = Command(
    description="Create, copy or show the secret that master and workers share.",
    examples=(
        "ddlf token new      # once, on the master; it prints how to copy the token",
        "ddlf token paste    # on another machine",
    ),
    actions={
        "new": action(
            "create a token",
            "Create a token for your account.",
            _options(f"where to write it {PLACE}"),
            new,
            *("ddlf token new", "ddlf token new --token-file lab-token"),
        ),
        "paste": action(
            "save the token of another machine",
            "Save the token of another machine on this one. It is read from the terminal, without showing it, or from "
            "standard input.",
            _options(f"where to write it {PLACE}"),
            paste,
            *("ddlf token paste", "ssh pc01 ddlf token show | ddlf token paste"),
        ),
        "show": action(
            "show the token, to copy it",
            "Print where the token is, and the token itself.",
            _options(f"the file of the token {PLACE}"),
            show,
            "ddlf token show",
        ),
    },
)
