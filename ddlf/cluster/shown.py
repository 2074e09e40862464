"""What a notebook shows of workers: what the master knows without asking them. Runs on the master."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ddlf.events.record import size

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker

COLUMNS = ("worker", "name", "state", "machine", "cores", "threads", "Python", "sent", "received")


def workers_table(workers: Sequence[ProxyWorker]) -> str:
    """A row for each worker."""
    return table(COLUMNS, map(_cells, workers))


def _cells(worker: ProxyWorker) -> list[object]:
    facts = [worker.facts.get(name, "") for name in ("host", "cores", "threads", "python")]
    carried = [size(worker.bytes_sent), size(worker.bytes_received)] if worker.facts else ["", ""]
    return [worker.id, worker.label, worker.state if worker.connected else "not connected", *facts, *carried]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML. All text is escaped, because names come from users and from other machines.

    Args:
        columns: The heads of the columns.
        rows: Rows of as many values.
    """
    head = _row("th", columns)
    return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(tag: str, values: Sequence[Any]) -> str:
    cells = (f'<{tag} style="text-align: left">{escape(str(value))}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"
