"""Tables as notebooks show them. Pure; runs on the master."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in HTML, with all text escaped: names come from users and from other machines.

    Args:
        columns: What stands above each.
        rows: Rows of as many values.
    """
    head = _row("th", columns)
    return f"<table><thead>{head}</thead><tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def _row(tag: str, values: Sequence[Any]) -> str:
    cells = (f'<{tag} style="text-align: left">{escape(str(value))}</{tag}>' for value in values)
    return f"<tr>{''.join(cells)}</tr>"
