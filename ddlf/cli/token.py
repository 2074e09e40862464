"""``ddlf token``: make, take over and show the secret that master and workers share."""

from __future__ import annotations

import argparse
import sys

from ddlf.errors import AuthError
from ddlf.rpc import tokens


def new(options: argparse.Namespace) -> int:
    """Write a new token, and say how it comes to other machines."""
    path = tokens.write_token(options.token_file)
    folder, there = tokens.shell_path(path.parent), tokens.shell_path(path)
    print(f"A new token is in {path}. Whoever has it can run code on your workers.")
    print("Copy it to each of the other machines. This line does it, with HOST replaced:")
    print(f"  ssh HOST 'umask 077; mkdir -p {folder}; cat > {there}' < {there}")
    print(
        "Without ssh: 'ddlf token show' here, 'ddlf token paste' there. Then start the workers: ddlf-worker --port 9000"
    )
    return 0


def paste(options: argparse.Namespace) -> int:
    """Write the token of another machine."""
    print(f"The token is in {tokens.write_token(options.token_file, _read_secret())}.")
    return 0


def show(options: argparse.Namespace) -> int:
    """Print the token alone on standard output, and where it is on standard error."""
    found = tokens.find_tokens(options.token_file)
    if found is None:
        raise AuthError("there is no token", hint="make one with: ddlf token new")
    print(f"# {found.source}, fingerprint {found.fingerprint}", file=sys.stderr)
    for secret in found.all:
        print(secret.decode())
    return 0


def _read_secret() -> str:
    """A token from the terminal, where it does not show, or all of standard input. Never from an argument, which others can see."""
    if not sys.stdin.isatty():
        return sys.stdin.read(4096)
    import getpass

    return getpass.getpass("token (it does not show): ")
