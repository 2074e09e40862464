"""Where a page can be reached: its port, its URL, and which names a browser may call it by. Runs on the master."""

from __future__ import annotations

import errno
import getpass
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from ddlf.errors import ConfigError, ListenError

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
