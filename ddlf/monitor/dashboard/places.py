"""Which masters of this user show a page now: a file for each, which goes with it. Runs on the master, and where somebody looks for one."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

from ddlf.monitor.dashboard.address import HOST
from ddlf.rpc.tokens import state_folder


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


def found() -> list[dict[str, Any]]:
    """What the masters on this machine said that still show one, the newest first. What others left behind is removed."""
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
