"""Right and wrong secrets between two machines, and what is said of each.

    python -m tests.trials.credentials

Needs Linux, and the right to make namespaces (``tests/trials/machines.py``).
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
from tests.trials.machines import Link, enter, inside
from tests.trials.workers import Workers

ROOT = Path(__file__).parents[2]
HERE, THERE, PORT = Link.address_a, Link.address_b, 9000


def home(folder: Path) -> dict[str, str]:
    """The environment of a user who lives in ``folder``."""
    folder.mkdir(exist_ok=True)
    others = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "DDLF_TOKEN"))}
    return {**others, "HOME": str(folder), "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def worker(there: str, environment: dict[str, str], *options: Any) -> Iterator[str]:
    """A worker over there; gives the line in which it says that it is ready."""
    with Workers() as workers:
        workers.start(*options, host="", port=PORT, namespace=there, environment=environment)
        yield next(line for line in workers.log.read_text().splitlines() if line.startswith("ready on"))


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


def cases(there: str, folder: Path) -> Iterator[tuple[str, bool, str]]:
    """Each thing that was tried, whether it went as it should, and what was said."""
    master, machine, stranger = home(folder / "master"), home(folder / "machine"), home(folder / "stranger")
    address = f"{THERE}:{PORT}"

    def asked(environment: dict[str, str], code: int, text: str, *options: Any) -> tuple[bool, str]:
        found, said = ddlf(environment, "status", "--hosts", address, *options)
        return found == code and re.search(text, said) is not None, said

    with worker(there, machine):
        ddlf(stranger, "token", "new")
        yield "a fresh worker is not there for others", *asked(stranger, 3, "connection refused, nothing listens there")
    line = copy_token(master, machine)
    with worker(there, machine) as ready:
        yield "a token, one line and one command", "with TLS" in ready, f"{line} ... {ready}"
        yield "the copied token", *asked(master, 0, "idle")
        _, said = ddlf(master, "status", "--hosts", address, "--json")
        yield "the connection is encrypted", json.loads(said)[0]["tls"] is True, "tls: true"
        yield "another token", *asked(stranger, 4, "it has another token than this side")
        yield (
            "a master that wants plaintext",
            *asked(master, 3, "the worker demands encryption", "--insecure-plaintext"),
        )
    with worker(there, machine, "--insecure-plaintext") as ready:
        yield "a worker without encryption says so", "INSECURE PLAINTEXT" in ready, ready
        yield "a master that encrypts", *asked(master, 3, "does not encrypt connections from this address")
        yield "both without", *asked(master, 0, "INSECURE PLAINTEXT", "--insecure-plaintext")
    yield from certificates(there, folder, master, machine)


def certificates(
    there: str, folder: Path, master: dict[str, str], machine: dict[str, str]
) -> Iterator[tuple[str, bool, str]]:
    """The same with an organisation's certificates on top."""
    (folder / "other").mkdir()
    ca, other = Authority(folder), Authority(folder / "other")
    expired = Authority(folder, "expired", datetime.timedelta(days=-1))
    shown = ca.issue("master", host=HERE)

    def asked(code: int, text: str, authority: Authority, *, certificate: bool = True) -> tuple[bool, str]:
        own = f", tls_cert: {shown[0]}, tls_key: {shown[1]}" if certificate else ""
        config = folder / "cluster.yaml"
        config.write_text(f"workers: ['{THERE}:{PORT}']\nsecurity: {{tls_ca: {authority.file}{own}}}\n")
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
    enter("tests.trials.credentials")
    wrong = 0
    with tempfile.TemporaryDirectory() as name, Link() as link, inside(link.a):
        for what, right, said in cases(link.b, Path(name)):
            wrong += not right
            print(f"{'ok   ' if right else 'WRONG'}  {what:<40}  {said.splitlines()[-1][:150]}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
