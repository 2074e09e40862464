"""Where the data of a model that is text comes from: a set that is ready, or a file ``.npz``. Runs on master and workers."""

from __future__ import annotations

import difflib
import hashlib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data import datasets
from ddlf.errors import ConfigError, DatasetError
from ddlf.extras.text.training.block import SETS

MAX_SHIPPED_BYTES = 64 * 2**20
"""A file up to this size goes to the workers; a larger one has to be at the same place on each machine."""

Array = np.ndarray[Any, Any]


class Source:
    """Where data comes from. On its way to a worker a file's content goes along.

    Args:
        name: One of ``SETS``, or the path of a file ``.npz``.
        origin: Who names it, for errors.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(self, name: str, origin: str = "--data") -> None:
        self.name = name
        self.content: bytes | None = None
        self.digest = ""
        if name in SETS:
            return
        path = Path(name)
        if not path.is_file():
            near = difflib.get_close_matches(name, [*SETS, *(each.name for each in path.parent.glob("*.npz"))], 1)
            what = "is a folder" if path.is_dir() else "is neither a file nor a data set"
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SETS)}, or a file that ends in .npz"
            raise ConfigError(f"{origin} {name}: {what}", hint=hint)
        if path.suffix != ".npz":
            raise ConfigError(f"{origin} {name}: a file with arrays ends in .npz", hint="numpy.savez writes one")
        self.name = str(path.resolve())

    def __getstate__(self) -> dict[str, Any]:
        content = self.content
        if content is None and self.name not in SETS:
            content = self._read() if Path(self.name).stat().st_size <= MAX_SHIPPED_BYTES else None
        digest = self.digest or (_digest(self.name) if content is None and self.name not in SETS else "")
        return {"name": self.name, "content": content, "digest": digest}

    def arrays(self) -> dict[str, Array]:
        """All arrays, by name.

        Raises:
            DatasetError: They cannot be read.
        """
        if self.name in SETS:
            (x_train, y_train), (x_test, y_test) = datasets.with_classes(self.name)
            return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
        if self.content is None and self.digest and _digest(self.name) != self.digest:
            raise DatasetError(
                f"{self.name} is another file here than on the master, and too large to be sent along",
                hint="copy it to the same place on each machine, or divide it with ddlf data split",
            )
        content = self.content if self.content is not None else self._read()
        try:
            with np.load(BytesIO(content), allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            objects = "Object arrays" in str(error)
            hint = (
                "numpy.savez writes numbers and texts; turn objects into these"
                if objects
                else "write it again with numpy.savez"
            )
            raise DatasetError(f"{self.name} cannot be read ({error})", hint=hint) from None

    def _read(self) -> bytes:
        try:
            return Path(self.name).read_bytes()
        except OSError as error:
            raise DatasetError(
                f"{self.name} cannot be read here ({error.strerror})",
                hint="a file of more than 64 MiB is not sent along: copy it to the same place on each machine",
            ) from None


def _digest(name: str) -> str:
    try:
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "none"
