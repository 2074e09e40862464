"""A source of samples from tar files in WebDataset's form: consecutive files with the same stem, such as ``7.png`` and
``7.cls``, are a sample.

The files are not unpacked onto a disk.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ddlf.data.images import ENDINGS, Decoder
from ddlf.data.records import Record, Records
from ddlf.errors import DatasetError

MAX_FILE_BYTES = 2**30
"""Maximum size of one file of a sample."""
NUMBERS = ("cls", "id", "index", "count")
"""File endings whose text is an integer."""


def open_tar(
    path: Path, files: Sequence[Path], *, columns: str = "", image_size: str = "", ragged: str = ""
) -> Records:
    """Return a source of samples from tar files, with a column for each file ending. The image becomes ``x``, or the
    ``.npy`` file if there is no image; the ``.cls`` file becomes ``y``.

    Args:
        path: The path that the user has named.
        files: The tar files at this path, in order.
        columns: The option of ``open_source``.
        image_size: The option of ``open_source``.
        ragged: The option of ``open_source``.

    Raises:
        DatasetError: A file cannot be read, or has members that a data set cannot contain.
        ConfigError: An option cannot be used.
    """
    decoder = Decoder(image_size)
    read = partial(_samples, files, decoder)
    samples = sum(1 for file in files for _ in _groups(file))
    endings = {name for _, record in [next(read(), ("", {}))] for name in record}
    usual = {name: name.removesuffix(".npy") for name in endings if name.endswith(".npy")}
    pictures = sorted(name for name in endings if f".{name}" in ENDINGS) or sorted(endings & {"npy"})
    if pictures:
        usual[pictures[0]] = "x"
    if "cls" in endings:
        usual["cls"] = "y"
    return Records(path, samples, read, columns, usual, ragged)


def _samples(files: Sequence[Path], decoder: Decoder) -> Generator[tuple[str, Record], None, None]:
    for file in files:
        for stem, members in _groups(file, read=True):
            yield (
                f"{stem} of {file}",
                {
                    ending: partial(_array, data, ending, f"{stem}.{ending} of {file}", decoder)
                    for ending, data in members.items()
                },
            )


def _groups(file: Path, *, read: bool = False) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the stem and the files of each sample, by their endings. Without ``read``, the contents are empty."""
    try:
        with tarfile.open(file, "r:*") as archive:
            stem, members = "", dict[str, bytes]()
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps millions of headers in memory
                if member.isdir():
                    continue
                new, ending = _named(member, file)
                if new != stem and members:
                    yield stem, members
                    members = {}
                if ending in members:
                    raise DatasetError(
                        f"{file} has {member.name} twice",
                        hint="give the files of a sample the same stem, and other samples other stems",
                    )
                # Read the data now, because a compressed file cannot go back.
                stem, members[ending] = new, _data(archive, member, file) if read else b""
            if members:
                yield stem, members
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{file} is not a readable tar file ({error})", hint="copy it again") from None


def _named(member: tarfile.TarInfo, file: Path) -> tuple[str, str]:
    """Return the stem and the ending of a file in a tar file. Refuse members that are not plain files."""
    path = PurePosixPath(member.name)
    if not member.isreg():
        kind = "a link" if member.issym() or member.islnk() else "not a plain file"
        raise DatasetError(f"{member.name} of {file} is {kind}", hint="put only plain files into the tar file")
    if path.is_absolute() or ".." in path.parts:
        raise DatasetError(f"{file} names {member.name}, outside of it", hint="make it again with relative names")
    if member.size > MAX_FILE_BYTES:
        raise DatasetError(f"{member.name} of {file} claims {member.size:,} bytes", hint="leave it out")
    stem, dot, ending = path.name.partition(".")
    if not dot or not stem or not ending:
        raise DatasetError(
            f"{member.name} of {file} has no ending", hint="name the files of a sample 0001.png, 0001.cls"
        )
    return str(path.parent / stem), ending.lower()


def _data(archive: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> bytes:
    opened = archive.extractfile(member)
    data = opened.read() if opened is not None else b""
    if len(data) != member.size:
        raise DatasetError(f"{member.name} of {file} ends too early", hint="copy it again")
    return data


def _array(data: bytes, ending: str, where: str, decoder: Decoder, *, encoded: bool = False) -> np.ndarray[Any, Any]:
    kind = ending.rpartition(".")[2]  # left.npy is a separate column of kind npy
    if f".{kind}" in ENDINGS:
        return (decoder.checked if encoded else decoder.pixels)(io.BytesIO(data), where)
    if encoded and kind != "npy":
        return np.frombuffer(data, np.uint8)
    try:
        if kind == "npy":
            return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
        if kind in NUMBERS:
            return np.array(int(data), np.int64)
        if kind in ("float", "score"):
            return np.array(float(data), np.float32)
    except (ValueError, EOFError) as error:
        raise DatasetError(
            f"{where} cannot be read ({error})", hint="repair it, or leave it out with --columns"
        ) from None
    return np.array(data.decode(errors="replace"))
