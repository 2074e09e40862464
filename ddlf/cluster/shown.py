"""What a notebook shows of workers: what the master knows without asking them. Runs on the master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddlf.events.record import size
from ddlf.monitor.observe.html import table

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker

COLUMNS = ("worker", "name", "state", "machine", "cores", "threads", "Python", "sent", "received")


def workers_table(workers: Sequence[ProxyWorker]) -> str:
    """A row for each worker."""
    return table(COLUMNS, map(_row, workers))


def _row(worker: ProxyWorker) -> list[object]:
    facts = [worker.facts.get(name, "") for name in ("host", "cores", "threads", "python")]
    carried = [size(worker.bytes_sent), size(worker.bytes_received)] if worker.facts else ["", ""]
    return [worker.id, worker.label, worker.state if worker.connected else "not connected", *facts, *carried]
