"""What each worker of a cluster is and does, for whoever looks on: asked of the daemons, which answer whatever runs there. Runs on the master."""

from __future__ import annotations

import asyncio
from typing import Any

from ddlf.cluster.members import Members
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError

LOOK_S = 2.0
"""For an answer; a worker that takes longer shows what this side knows of it."""
SHOWN = (
    "host",
    "executor",
    "restarts",
    "last_exit",
    "busy",
    "uptime_s",
    "cores",
    "memory",
    "lease",
    "python",
    "datasets",
)


async def look(members: Members, *, reach: bool = False) -> list[dict[str, Any]]:
    """Ask all workers at once.

    Args:
        members: Members of the cluster.
        reach: Whether to connect to daemons that there is no connection to. In a run that is the run's own affair.

    Returns:
        For each its number and name, its state as this side sees it (``"alive"``, ``"suspect"``, ``"dead"``, ``"missing"``), bytes on its data
        connections, and what it has answered; ``"why"`` if it has not.
    """
    return list(await asyncio.gather(*(_look(worker, members, reach) for worker in members.known)))


async def _look(worker: ProxyWorker, members: Members, reach: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"worker": worker.id, "name": worker.label, "address": f"{worker.host}:{worker.port}"}
    try:
        if reach and not worker.connected:
            await worker.connect_control(timeout_s=LOOK_S)
        if worker.connected:
            status = await worker.status(LOOK_S)
            facts |= {name: status.get(name) for name in SHOWN}
    except DDLFError as error:
        error.worker = ""
        facts["why"] = str(error).removeprefix(worker.label).lstrip(": ")
    missing = worker in members.missing
    return facts | {
        "state": "missing" if missing and not worker.connected else worker.state,
        "silent_s": worker.silent_s,
        "sent": worker.bytes_sent,
        "received": worker.bytes_received,
    }
