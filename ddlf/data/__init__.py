"""Data: sets that are ready, trees of arrays, and what an app has of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlf.storage.opened import DataSet


def open(place: str | Path) -> DataSet:
    """Open a data set of partition files: for ``self.train_data``, or its columns as arrays, by name. A file is checked before it is used.

    Args:
        place: Folder that ``ddlf data split`` has written.

    Raises:
        DatasetError: There is no data set.
    """
    from ddlf.storage.opened import DataSet

    return DataSet(place)
