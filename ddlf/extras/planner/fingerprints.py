"""Fingerprints of an app's data and of its imported files, so that changes of them are noticed. Runs on the master."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from ddlf.data.app_data import data_set_of, has_data, samples_of
from ddlf.data.trees import leaves
from ddlf.rpc.code import own_modules
from ddlf.training.context import App

MOST_ROWS = 64
"""Samples of each array that are compared."""


def data_of(app: App) -> str:
    """Return a fingerprint of the training data that an app has loaded; empty if it has loaded none.

    It covers the number, shape and type of the samples, and the values of some of them. To read all takes seconds.
    """
    if not has_data(app, "train"):
        return ""
    digest = hashlib.sha256()
    if (data_set := data_set_of(app, "train")) is not None:
        digest.update(str(data_set.manifest.identity).encode())
    for name in ("x_train", "y_train", "w_train"):
        if (value := getattr(app, name, None)) is None:
            continue
        for path, leaf in leaves(value, name):
            array = np.asarray(leaf)
            digest.update(f"{path} {array.dtype} {array.shape}".encode())
            if array.ndim and len(array) and not array.dtype.hasobject:
                indices = np.unique(np.linspace(0, len(array) - 1, MOST_ROWS).astype(int))
                digest.update(np.ascontiguousarray(array[indices]).tobytes())
    return f"{samples_of(app, 'train')} {digest.hexdigest()[:16]}"


def files_of(app: App) -> dict[str, str]:
    """Return the user's imported files in the folders of the app's classes, with their hashes."""
    folders = []
    for kind in type(app).__mro__:
        with suppress(OSError, TypeError):
            folders += [Path(inspect.getfile(kind)).resolve().parent] * (kind.__module__.partition(".")[0] != "ddlf")
    files = {Path(module.__file__).resolve() for module in own_modules()}
    app_files = [file for file in files if any(file.is_relative_to(folder) for folder in folders)]
    return {str(file): hash_of(file) for file in sorted(app_files)}


def changed(files: Mapping[str, str]) -> list[str]:
    """Return the files that no longer have these hashes."""
    return [file for file, digest in files.items() if hash_of(Path(file)) != digest]


def hash_of(file: Path) -> str:
    """Return the hash of a file's content; empty if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
