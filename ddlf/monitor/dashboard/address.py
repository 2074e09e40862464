"""The port and URL of the dashboard, and the host names that browsers may use for it. Runs on the master."""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddlf.errors import ConfigError, ListenError
from ddlf.rpc.tokens import state_folder

HOST = "127.0.0.1"
PORTS = range(8900, 8920)
"""Ports to try in order, if the user names none."""
TEMPLATE = "DDLF_DASHBOARD_URL"
"""Environment variable with the page's URL behind a proxy. It may contain ``{port}`` and names of environment
variables in braces: ``https://hub.example{JUPYTERHUB_SERVICE_PREFIX}proxy/{port}/``."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


def listen(port: int | None) -> tuple[socket.socket, str]:
    """Open the dashboard's listening socket, on this machine's loopback address.

    Args:
        port: The only port to try; None for the first free port of ``PORTS``.

    Returns:
        The socket, and a note about the port, or an empty text.

    Raises:
        ListenError: No port is free.
        ConfigError: ``port`` is not a port number.
    """
    for candidate in PORTS if port is None else (port,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, candidate))
            sock.listen()  # two processes may both bind a port, but not both listen
        except OverflowError:
            sock.close()
            raise ConfigError(f"the dashboard's port must be 1-65535, got {candidate}") from None
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            reason = (
                "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {os.strerror(error.errno or 0)}"
            )
            hint = "choose another with --dashboard PORT, or leave the number out"
            raise ListenError(f"port {candidate} for the dashboard {reason}", hint=hint) from None
        skipped = candidate != PORTS.start and port is None
        return sock, f"port {PORTS.start} is in use" if skipped else ""
    raise ListenError(
        f"ports {PORTS.start} to {PORTS.stop - 1} for the dashboard are all in use",
        hint="name another: --dashboard PORT",
    )


def page_url(port: int, token: str, environment: Mapping[str, str]) -> str:
    """Return the URL of the dashboard to open in a browser. The token follows the #, so no browser sends it.

    Raises:
        ConfigError: ``DDLF_DASHBOARD_URL`` names a missing variable, or is not a URL.
    """
    template = environment.get(TEMPLATE)
    if not template:
        return f"http://{HOST}:{port}/#{token}"
    try:
        url = template.format_map({**environment, "port": port})
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        missing = f"{{{error.args[0]}}} is not an environment variable" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{TEMPLATE}={template} cannot be used: {missing}", hint="write {port} at the place of the port"
        ) from None
    if not urlsplit(url).netloc:
        raise ConfigError(
            f"{TEMPLATE}={template} is not a complete URL", hint="begin it with https:// and the proxy's name"
        )
    return f"{url.rstrip('/')}/#{token}"


def tunnel(port: int, environment: Mapping[str, str]) -> str:
    """Return the command that tunnels the page to the ssh client's machine; empty without an ssh connection."""
    # the client's address and port, then the server's address and port
    facts = environment.get("SSH_CONNECTION", "").split()
    if len(facts) != 4 or environment.get(TEMPLATE):
        return ""
    port_option = f"-p {facts[3]} " if facts[3] != "22" else ""
    return f"ssh -N -L {port}:{HOST}:{port} {port_option}{getpass.getuser()}@{facts[2]}"


def is_ours(host: str, origin: str | None, url: str) -> bool:
    """Return whether a request comes from the dashboard's own page, so that the server answers it. Pages of other sites
    are refused, even if their host name leads to this machine.

    Args:
        host: Host header: a name of loopback with any port, because tunnels use other ports; or the proxy's host.
        origin: Origin header of the page that asks; None outside of browsers.
        url: URL of the page.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() not in LOOPBACK and host.lower() != urlsplit(url).netloc.lower():
        return False
    return origin is None or urlsplit(origin).netloc.lower() == host.lower()


def announce(port: int, facts: dict[str, Any]) -> Path:
    """Write a file that announces that this process serves a dashboard, so that ``ddlf dashboard`` and ``ddlf top``
    find it.

    Returns:
        The announcement's file. Remove it when the page closes.
    """
    path = state_folder() / "dashboards" / f"{platform.node()}-{os.getpid()}-{port}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump({"port": port, "pid": os.getpid(), "host": platform.node(), **facts}, file)
    draft.replace(path)
    return path


def open_pages() -> list[dict[str, Any]]:
    """Return the announcements of the pages that are open on this machine, newest first. Stale ones are removed."""
    result = []
    for path in (state_folder() / "dashboards").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["host"] != platform.node():
                continue  # several machines share this home folder
            if is_open(facts["port"]) and _lives(facts["pid"]):
                result.append(facts)
            else:
                path.unlink()
    return sorted(result, key=lambda facts: float(facts["began"]), reverse=True)


def is_open(port: int) -> bool:
    """Return whether a process listens on a port of loopback."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=2):
        return True
    return False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
