"""Checks that a data set is undamaged, and exports its samples."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddlf.data.export import WRITERS
from ddlf.data.manifest import Manifest, PartitionFile
from ddlf.data.os_errors import explained
from ddlf.data.partition_file import Arrays
from ddlf.data.place import Place
from ddlf.errors import DatasetError

Moved = Callable[[str, int, int], None]


def damage(place: Place, found: Manifest, moved: Moved = lambda what, done, of: None) -> Iterator[DatasetError]:
    """Yield an error for each damaged or extra file at a place. Every byte is read, on all cores.

    Args:
        place: Place of the data set.
        found: Its manifest.
        moved: Receives the present step, the checked samples and all samples.
    """
    for path in place.extra(found):
        yield DatasetError(f"{path} is not of this data set", hint="remove it")
    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            for file, error in zip(
                found.files, threads.map(lambda file: _of(place, found, file), found.files), strict=True
            ):
                done += file.samples
                moved("checking", done, found.samples)
                if error is not None:
                    yield error
        except KeyboardInterrupt:
            place.close()  # otherwise the threads would wait for the store
            raise


def _of(place: Place, found: Manifest, file: PartitionFile) -> DatasetError | None:
    try:
        place.check(file, found.columns)
    except DatasetError as error:
        return error
    return None


def export(place: Place, found: Manifest, target: Path, moved: Moved = lambda what, done, of: None) -> None:
    """Write all samples into one file, in the order of their ids. Each partition file is checked first.

    Args:
        place: Place of the data set.
        found: Its manifest.
        target: Path of a new file: ``.npz``, ``.parquet``, ``.tar`` or ``.tfrecord``.
        moved: Receives the present step, the written samples and all samples.

    Raises:
        DatasetError: A file is damaged, or the target exists or cannot be written. No incomplete target remains.
    """
    if target.suffix not in WRITERS:
        raise DatasetError(f"{target} is of no kind that is known", hint=f"name it {', '.join(WRITERS)}")
    if target.parts[0].endswith(":"):  # a Path shortens s3:// to s3:/
        raise DatasetError(
            f"{target} is a URL, and one file is written on this machine", hint="name a path, and copy it"
        )
    if os.path.lexists(target):
        raise DatasetError(f"{target} is there already, and nothing is overwritten", hint="name another file")
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    done = 0

    def parts() -> Iterator[Arrays]:
        nonlocal done
        for file in found.files:
            yield place.mapped(file, found.columns)
            done += file.samples
            moved("writing", min(done, found.samples), found.samples)

    with explained(target, "write", need=found.nbytes):
        try:
            WRITERS[target.suffix](temporary, found, parts)
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
