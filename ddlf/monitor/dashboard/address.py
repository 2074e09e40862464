"""Where a page can be reached: its port, its URL, and which names a browser may call it by. Runs on the master."""

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
"""Tried one after the other, when none is named."""
TEMPLATE = "DDLF_DASHBOARD_URL"
"""The environment variable that holds the URL by which a proxy shows the page, with ``{port}`` and variables of the environment in braces:
``https://hub.example{JUPYTERHUB_SERVICE_PREFIX}proxy/{port}/``."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


def listen(port: int | None) -> tuple[socket.socket, str]:
    """Bind a socket on loopback.

    Args:
        port: Port to take, and no other; None for the first of ``PORTS`` that is free.

    Returns:
        The socket, which does not listen yet, and what there is to say about the port, or nothing.

    Raises:
        ListenError: There is none.
        ConfigError: It is no port.
    """
    for candidate in PORTS if port is None else (port,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, candidate))
            sock.listen()  # two that bind may both succeed, two that listen not
        except OverflowError:
            sock.close()
            raise ConfigError(f"the dashboard's port must be 1-65535, got {candidate}") from None
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {os.strerror(error.errno or 0)}"
            hint = "choose another with --dashboard PORT, or leave the number out"
            raise ListenError(f"port {candidate} for the dashboard {why}", hint=hint) from None
        skipped = candidate != PORTS.start and port is None
        return sock, f"port {PORTS.start} is in use" if skipped else ""
    raise ListenError(
        f"ports {PORTS.start} to {PORTS.stop - 1} for the dashboard are all in use",
        hint="name another: --dashboard PORT",
    )


def page_url(port: int, token: str, environment: Mapping[str, str]) -> str:
    """The URL to open, with the token behind the #, which no browser sends.

    Raises:
        ConfigError: ``DDLF_DASHBOARD_URL`` names what is not there, or is no URL.
    """
    template = environment.get(TEMPLATE)
    if not template:
        return f"http://{HOST}:{port}/#{token}"
    try:
        url = template.format_map({**environment, "port": port})
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        missing = f"{{{error.args[0]}}} is no variable of the environment" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"{TEMPLATE}={template} cannot be used: {missing}", hint="give {port} where it goes"
        ) from None
    if not urlsplit(url).netloc:
        raise ConfigError(f"{TEMPLATE}={template} is no whole URL", hint="begin it with https:// and the proxy's name")
    return f"{url.rstrip('/')}/#{token}"


def tunnel(port: int, environment: Mapping[str, str]) -> str:
    """The command that makes the page reachable from the machine that somebody has come from by ssh; empty when nobody has."""
    facts = environment.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    if len(facts) != 4 or environment.get(TEMPLATE):
        return ""
    other = f"-p {facts[3]} " if facts[3] != "22" else ""
    return f"ssh -N -L {port}:{HOST}:{port} {other}{getpass.getuser()}@{facts[2]}"


def is_ours(host: str, origin: str | None, url: str) -> bool:
    """Whether a request may be answered: another site's page must not reach this one by a name of its own.

    Args:
        host: Host of its header: a name of loopback, with any port, since tunnels have others; or that of the proxy.
        origin: Likewise, of the page that asks; None outside browsers.
        url: Url of the page.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() not in LOOPBACK and host.lower() != urlsplit(url).netloc.lower():
        return False
    return origin is None or urlsplit(origin).netloc.lower() == host.lower()


def announce(port: int, facts: dict[str, Any]) -> Path:
    """Say that this process shows a page.

    Returns:
        The file, which is to be removed with it.
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
                continue  # a home folder that several machines share
            if is_open(facts["port"]) and _lives(facts["pid"]):
                result.append(facts)
            else:
                path.unlink()
    return sorted(result, key=lambda facts: float(facts["began"]), reverse=True)


def is_open(port: int) -> bool:
    """Whether something listens on a port of loopback."""
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
