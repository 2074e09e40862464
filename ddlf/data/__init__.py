"""Data: sets that are ready, trees of arrays, and what an app has of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlf.storage.opened import DataSet


def open(place: str | Path) -> DataSet:
    """Open a data set of partition files: its columns as arrays, by name; every byte is checked first.

    Args:
        place: Folder that ``ddlf data split`` has written.

    Raises:
        DatasetError: There is no data set, or it is damaged.
    """
    from ddlf.storage.opened import DataSet

    return DataSet(place)
