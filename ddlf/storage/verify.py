"""Whether a data set is what was written, and its samples as arrays again."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ddlf.errors import DatasetError
from ddlf.storage.explained import explained
from ddlf.storage.manifest import Manifest, PartitionFile
from ddlf.storage.place import Place

Moved = Callable[[str, int, int], None]


def damage(place: Place, found: Manifest, moved: Moved = lambda what, done, of: None) -> Iterator[DatasetError]:
    """What is wrong at a place, file by file; nothing if all is whole. Every byte is read, on all cores.

    Args:
        place: Where it is.
        found: Its manifest.
        moved: Is told what is done, and how many samples of how many.
    """
    for path in place.extra(found):
        yield DatasetError(f"{path} is not of this data set", hint="remove it")
    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for file, error in zip(
            found.files, threads.map(lambda file: _of(place, found, file), found.files), strict=True
        ):
            done += file.samples
            moved("checking", done, found.samples)
            if error is not None:
                yield error


def _of(place: Place, found: Manifest, file: PartitionFile) -> DatasetError | None:
    try:
        place.check(file, found.columns)
    except DatasetError as error:
        return error
    return None


def export(place: Place, found: Manifest, target: Path, moved: Moved = lambda what, done, of: None) -> None:
    """Write all samples into one ``.npz`` file, in the order of their ids; each file is checked first.

    Args:
        place: Where it is.
        found: Its manifest.
        target: File that is not there yet.
        moved: Is told what is done, and how many samples of how many.

    Raises:
        DatasetError: A file is damaged, or the target is there or cannot be written; nothing is left of it then.
    """
    if target.suffix != ".npz":
        raise DatasetError(f"{target} does not end with .npz", hint="name a .npz file")
    if os.path.lexists(target):
        raise DatasetError(f"{target} is there already, and nothing is overwritten", hint="name another file")
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    done = 0
    with explained(target, "write", need=found.nbytes):
        try:
            with zipfile.ZipFile(temporary, "x") as archive:
                for number, (name, column) in enumerate(found.columns.items()):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        kind = np.dtype(column.dtype).newbyteorder("<")
                        head = {"descr": kind.str, "fortran_order": False, "shape": (found.samples, *column.shape)}
                        np.lib.format.write_array_header_2_0(member, head)
                        for file in found.files:
                            member.write(place.mapped(file, found.columns)[name].reshape(-1).view(np.uint8).data)
                            if not number:
                                done += file.samples
                                moved("writing", done, found.samples)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
