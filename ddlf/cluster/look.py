"""Asks the daemons of a cluster for the state of each worker, for displays. Runs on the master.

Daemons answer at any time, also while their executor runs user code.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ddlf.cluster.members import Members
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import DDLFError

LOOK_S = 2.0
"""Seconds to wait for an answer. For a slower worker, only the facts that the master already knows are returned."""
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
    """Return the state of all workers. All daemons are asked at once.

    Args:
        members: Members of the cluster.
        reach: Whether to connect to daemons without a connection. During a run, the run itself does that.

    Returns:
        A dict for each worker: its number and name; its state for this master (``"alive"``, ``"suspect"``, ``"dead"``
        or ``"missing"``); the bytes on its data connections; and its daemon's answer, or the reason ``"why"`` there is
        none.
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
