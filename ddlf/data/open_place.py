"""Opening the place that a user names: a folder or a URL."""

from __future__ import annotations

from pathlib import Path

from ddlf.data.place import Folder, Place


def open_place(text: str | Path) -> Place:
    """The place that a user names.

    Args:
        text: A folder, or a URL that a driver of fsspec knows.

    Raises:
        ConfigError: The URL cannot be used.
        DatasetError: There is no driver for it.
    """
    if "://" not in str(text):
        return Folder(text)
    from ddlf.data.remote_folder import RemoteFolder  # imports what only a URL needs
    from ddlf.data.store import path_of

    path = path_of(str(text))
    return RemoteFolder(str(text)) if path is None else Folder(path)
