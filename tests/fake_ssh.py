"""An ``ssh`` for tests that runs each command on this machine. Hosts with certain names fail like with the real ``ssh``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPT = r"""#!/bin/sh
[ "$1" = "-V" ] && { echo "OpenSSH of a test" >&2; exit 0; }
while [ "$1" != "--" ]; do
    [ "$1" = "-R" ] && forward=${2#0:}
    shift
done
host=$2 command=$3
say() { printf '%s\r\n' "$1" >&2; }
say "Warning: Permanently added '$host' (ED25519) to the list of known hosts."
case $host in
    refused) say "ssh: connect to host refused port 22: Connection refused"; exit 255;;
    unknown) say "ssh: Could not resolve hostname unknown: Name or service not known"; exit 255;;
    newkey) say "No ED25519 host key is known for newkey and you have requested strict checking."
        say "Host key verification failed."; exit 255;;
    changed) say "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"
        say "Host key verification failed."; exit 255;;
    nokey) say "ann@nokey: Permission denied (publickey,password)."; exit 255;;
    noforward) say "Warning: remote port forwarding failed for listen port 0"; exec cat;;
    silent) exec cat;;
esac
[ -n "$forward" ] && say "Allocated port ${forward#*:} for remote forward to $forward"
echo "Welcome to $host"
printf 'your quota is fine'
echo "stty: standard input: Inappropriate ioctl for device" >&2
cd /
sh -c "$command"
exit $?
"""


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a test find this ``ssh``, and give programs of ``remote_programs.py`` a separate home folder."""
    commands = folder / "commands"
    commands.mkdir()
    write_script(commands / "ssh", SCRIPT)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))


def write_script(path: Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(0o700)
