"""Opens the place that a user names: a folder or a URL."""

from __future__ import annotations

from pathlib import Path

from ddlf.data.place import Folder, Place


def open_place(text: str | Path) -> Place:
    """Return the place that a user names.

    Args:
        text: A folder, or a URL with an fsspec driver.

    Raises:
        ConfigError: The URL is invalid.
        DatasetError: There is no driver for the URL.
    """
    if "://" not in str(text):
        return Folder(text)
    from ddlf.data.remote_folder import RemoteFolder  # these imports are only needed for a URL
    from ddlf.data.store import path_of

    path = path_of(str(text))
    return RemoteFolder(str(text)) if path is None else Folder(path)
