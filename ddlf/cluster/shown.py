"""The table of workers in notebooks. It shows only facts that the master already knows. Runs on the master."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from ddlf.events.record import size

COLUMNS = ("worker", "name", "state", "machine", "cores", "threads", "Python", "sent", "received")


class ShownWorker(Protocol):
    """The attributes of a worker that the table shows; ``ddlf.cluster.proxy.ProxyWorker`` describes them."""

    @property
    def id(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


def workers_table(workers: Iterable[ShownWorker]) -> str:
    """Return a table in HTML with one row for each worker."""
    return table(COLUMNS, map(_cells, workers))


def _cells(worker: ShownWorker) -> list[object]:
    facts = [worker.facts.get(name, "") for name in ("host", "cores", "threads", "python")]
    carried = [size(worker.bytes_sent), size(worker.bytes_received)] if worker.facts else ["", ""]
    return [worker.id, worker.label, worker.state if worker.connected else "not connected", *facts, *carried]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML. All text is escaped, because names come from users and from other machines.

    Args:
        columns: The headings of the columns.
        rows: The rows, each with one value for each column.
    """
    head = _row("th", columns)
    return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(tag: str, values: Sequence[Any]) -> str:
    cells = (f'<{tag} style="text-align: left">{escape(str(value))}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"
