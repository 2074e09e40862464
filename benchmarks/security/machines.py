"""Two machines on one: network namespaces joined by a cable, and what happens between them with right and wrong secrets.

    python -m benchmarks.security.machines

Needs Linux, and the right to make namespaces (as root, or where users may have their own). Nothing of it is seen outside of them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tls import Authority

ROOT = Path(__file__).parents[2]
HERE, THERE = "10.77.0.1", "10.77.0.2"
INSIDE = "DDLF_INSIDE_NAMESPACE"


def available() -> bool:
    """Whether this machine lets this user make namespaces."""
    try:
        return subprocess.run(["unshare", "-Urn", "ip", "link"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def enter(module: str) -> None:
    """Start this script anew in a namespace of its own; return when it is in there."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, "-m", module, *sys.argv[1:]])


@contextlib.contextmanager
def other_machine() -> Iterator[list[str]]:
    """Make it and lay a cable; gives the words before a command that is to run there."""
    with subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo ready; exec sleep 3600"], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        there = ["nsenter", "-t", str(holder.pid), "-n"]
        for command in (
            "ip link set lo up",
            f"ip link add here type veth peer name there netns {holder.pid}",
            f"ip addr add {HERE}/24 dev here",
            "ip link set here up",
        ):
            subprocess.run(command.split(), check=True)
        for command in (f"ip addr add {THERE}/24 dev there", "ip link set there up", "ip link set lo up"):
            subprocess.run([*there, *command.split()], check=True)
        try:
            yield there
        finally:
            holder.kill()


def home(folder: Path) -> dict[str, str]:
    """The environment of a user who lives in ``folder``."""
    folder.mkdir(exist_ok=True)
    others = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "DDLF_TOKEN"))}
    return {**others, "HOME": str(folder), "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def worker(there: list[str], environment: dict[str, str], *arguments: Any, port: int = 9000) -> Iterator[str]:
    """A worker over there; gives the line in which it says that it is ready."""
    command = [*there, sys.executable, "-m", "ddlf.cli.worker", "--port", str(port), *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ready on"):
            lines.append(process.stdout.readline())
            if not lines[-1]:
                raise RuntimeError("".join(lines))
        try:
            yield lines[-1].strip()
        finally:
            process.terminate()


def ddlf(environment: dict[str, str], *arguments: Any) -> tuple[int, str]:
    """Run the command over here; returns its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def copy_token(master: dict[str, str], machine: dict[str, str]) -> str:
    """Make a token and copy it with the line that the command prints, a shell of the other user in the place of ssh."""
    _, said = ddlf(master, "token", "new")
    line = next(line.strip() for line in said.splitlines() if "ssh HOST" in line)
    subprocess.run(
        line.replace("ssh HOST", f"env HOME={machine['HOME']} sh -c"),
        shell=True,
        env=master,
        check=True,
    )
    return line


def cases(there: list[str], folder: Path) -> Iterator[tuple[str, bool, str]]:
    """Each thing that was tried, whether it went as it should, and what was said."""
    master, machine, stranger = home(folder / "master"), home(folder / "machine"), home(folder / "stranger")
    address = f"{THERE}:9000"

    def asked(environment: dict[str, str], code: int, text: str, *options: Any) -> tuple[bool, str]:
        found, said = ddlf(environment, "status", "--hosts", address, *options)
        return found == code and re.search(text, said) is not None, said

    with worker(there, machine, "--state-dir", folder / "s0"):
        ddlf(stranger, "token", "new")
        yield "a fresh worker is not there for others", *asked(stranger, 3, "connection refused, nothing listens there")
    line = copy_token(master, machine)
    with worker(there, machine, "--state-dir", folder / "s1") as ready:
        yield "a token, one line and one command", "with TLS" in ready, f"{line} ... {ready}"
        yield "the copied token", *asked(master, 0, "idle")
        _, said = ddlf(master, "status", "--hosts", address, "--json")
        yield "the connection is encrypted", json.loads(said)[0]["tls"] is True, "tls: true"
        yield "another token", *asked(stranger, 4, "it holds another token than this side")
        yield (
            "a master that wants plaintext",
            *asked(master, 3, "the worker demands encryption", "--insecure-plaintext"),
        )
    with worker(there, machine, "--insecure-plaintext") as ready:
        yield "a worker without encryption says so", "INSECURE PLAINTEXT" in ready, ready
        yield "a master that encrypts", *asked(master, 3, "does not encrypt connections from here")
        yield "both without", *asked(master, 0, "INSECURE PLAINTEXT", "--insecure-plaintext")
    yield from certificates(there, folder, master, machine)


def certificates(
    there: list[str], folder: Path, master: dict[str, str], machine: dict[str, str]
) -> Iterator[tuple[str, bool, str]]:
    """The same with an organisation's certificates on top."""
    (folder / "other").mkdir()
    ca, other = Authority(folder), Authority(folder / "other")
    expired = Authority(folder, "expired", datetime.timedelta(days=-1))
    shown = ca.issue("master", host=HERE)

    def asked(code: int, text: str, authority: Authority, *, certificate: bool = True) -> tuple[bool, str]:
        own = f", tls_cert: {shown[0]}, tls_key: {shown[1]}" if certificate else ""
        config = folder / "cluster.yaml"
        config.write_text(f"workers: ['{THERE}:9000']\nsecurity: {{tls_ca: {authority.file}{own}}}\n")
        found, said = ddlf(master, "status", "--config", config)
        return found == code and re.search(text, said) is not None, said

    certificate, key = ca.issue("worker", host=THERE)
    with worker(there, machine, "--tls-ca", ca.file, "--tls-cert", certificate, "--tls-key", key):
        yield "certificates of one organisation", *asked(0, "idle", ca)
        yield "a master that shows none", *asked(4, "does not accept this side's certificate", ca, certificate=False)
        yield "a worker of another organisation", *asked(4, "is not signed by tls_ca", other)
        yield "an authority that has expired", *asked(2, "tls_ca .* has expired", expired)
    certificate, key = ca.issue("elsewhere", host="10.9.9.9")
    with worker(there, machine, "--tls-cert", certificate, "--tls-key", key):
        yield "a certificate for another host", *asked(4, "certificate is for another host", ca)


def main() -> None:
    """Print a table; exit with 1 when something went otherwise."""
    enter("benchmarks.security.machines")
    wrong = 0
    with tempfile.TemporaryDirectory() as name, other_machine() as there:
        for what, right, said in cases(there, Path(name)):
            wrong += not right
            print(f"{'ok   ' if right else 'WRONG'}  {what:<40}  {said.splitlines()[-1][:150]}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
