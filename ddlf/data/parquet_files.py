"""Finds Parquet files in a folder, a store or a web server, and reads ranges of their bytes. Runs on all machines."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ddlf.data.arrow import load_pyarrow
from ddlf.data.manifest import NAME
from ddlf.data.os_errors import explained
from ddlf.data.store import Changed, Gone, Store, path_of
from ddlf.errors import ConfigError, DatasetDamaged, DatasetError
from ddlf.events.record import size

TAIL = 2**16
"""Number of bytes at the end of a file that are read first. Most footers are shorter."""
MAX_FOOTER_BYTES = 2**28
AT_ONCE = 16
"""Number of footers that are read concurrently."""
PREFETCH_BYTES = 2**24
"""If the needed bytes of a row group are at most this size, they are read in one piece, otherwise page by page."""
GAP_BYTES = 2**16
"""Two ranges with a smaller distance than this are read as one."""
GLOB = re.compile(r"[*?\[]")
ENDINGS = (".parquet", ".parq", ".pq")
MARKS = ("ETag", "etag", "md5Hash", "content_md5", "generation")
"""Names that stores use for the mark of a file. The mark changes when the file is written."""
TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
COPY = "copy it again, or write it again"


def is_parquet(location: str | Path | Sequence[str]) -> bool:
    """Return whether a location names Parquet files.

    It does if it is a glob, ends like a Parquet file, has several files, or is a local folder with Parquet files and no
    manifest.
    """
    if not isinstance(location, str | Path) or _pattern_at(str(location)) is not None:
        return True
    folder = path_of(str(location)) if "://" in str(location) else Path(location)
    if folder is not None and (folder := folder.expanduser()).is_dir():
        return not (folder / NAME).exists() and any(next(folder.glob(f"*{end}"), None) for end in ENDINGS)
    return str(location).lower().endswith(ENDINGS)


def _pattern_at(text: str) -> int | None:
    """Return the position of the first character in a path that makes it a glob pattern, such as ``*``; None without
    one. A local path that exists is not a pattern.
    """
    begin = 0
    if "://" not in text:
        ends = (match.start() for match in re.finditer(r"(?<=.)/|$", text))
        begin = max((end for end in ends if Path(text[:end]).expanduser().exists()), default=0)
    sign = GLOB.search(text, begin)
    return sign.start() if sign else None


@dataclass(frozen=True)
class FileVersion:
    """The identity of a Parquet file, to notice a change of it: facts that are cheap to read.

    Args:
        name: Path below the root of the location.
        nbytes: Size of the file.
        mark: The store's mark of the file; empty without one.
        footer: SHA-256 of the footer, which describes the schema, the rows and the positions of all columns.
        state: Size, and mark or time. It changes when the file is written.
    """

    name: str
    nbytes: int
    mark: str
    footer: str
    state: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A text that identifies this version of the file: a hash of its size, mark and footer, 8 hex digits. The
        file's time follows if the store gives no mark.
        """
        facts = hashlib.sha256(f"{self.nbytes} {self.mark} {self.footer}".encode()).hexdigest()[:8]
        return facts if self.mark else f"{facts} {self.state[1]}"


class ParquetFiles:
    """The Parquet files of a location, in the order of their names.

    Args:
        location: A file, a folder, a glob, or several files. They are local, or at a URL with an fsspec driver.
        options: Arguments for the driver.

    Raises:
        DatasetError: There are no files, or they cannot be read.
        ConfigError: The URL is invalid.
    """

    def __init__(self, location: str | Path | Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        texts = [str(location)] if isinstance(location, str | Path) else [str(path) for path in location]
        self._text = texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more"
        if other_formats := [text for text in texts if text.lower().endswith((".csv", ".arrow", ".feather", ".json"))]:
            raise DatasetError(
                f"{other_formats[0]} is not a Parquet file, and DDLF reads only Parquet files in place",
                hint="write it as Parquet, as pandas does with to_parquet; or make partition files: ddlf data split",
            )
        if repeated := [text for number, text in enumerate(texts) if text in texts[:number]]:
            raise DatasetError(f"{repeated[0]} is named twice", hint="leave it out once")
        root, names = _split(texts)
        self.store: Store | None = None
        folder = path_of(root) if "://" in root else Path(root)
        if folder is None:
            self.store = Store(root, options)
        else:
            self._root = folder.expanduser()
            if options:
                raise ConfigError(
                    f"{self} is a folder, and storage_options have no effect on folders",
                    hint="leave storage_options out",
                )
        self._infos: dict[str, dict[str, Any]] = {}
        for name, is_pattern in names:
            self._infos.update(self._find(name) if is_pattern else {name: self._info(name)})
        self.names = sorted(self._infos)
        if not self.names:
            raise DatasetError(
                f"there is no Parquet file at {self}",
                hint="name a file, a folder or a glob such as train/*.parquet; the columns of partition files "
                "have their names: leave out x= and y=",
            )

    def __str__(self) -> str:
        return self._text

    def full_name(self, name: str) -> str:
        """Return the full name of a file, including its folder or URL, for errors."""
        return f"{self.store}/{name}" if self.store is not None else str(self._root / name)

    def interrupt(self) -> None:
        """End a thread's wait for the store: the thread gets an error."""
        if self.store is not None:
            self.store.interrupt()

    def heads(self) -> list[tuple[FileVersion, Any]]:
        """Return the identity of each file with pyarrow's metadata, in the order of names.

        Raises:
            DatasetError: A file cannot be read.
        """
        with ThreadPoolExecutor(AT_ONCE, "footer") as threads:
            return list(threads.map(self._opened, self.names))

    def _opened(self, name: str) -> tuple[FileVersion, Any]:
        info = self._infos[name]
        nbytes, state = int(info["size"]), _state(info)
        mark = "" if self.store is None else _mark(info)
        footer, metadata = self._footer(name, nbytes, mark)
        return FileVersion(name, nbytes, mark, hashlib.sha256(footer).hexdigest(), state), metadata

    def metadata(self, head: FileVersion) -> Any:
        """Read the metadata in a file's footer again.

        Raises:
            DatasetError: The footer cannot be read, or has changed.
        """
        footer, metadata = self._footer(head.name, head.nbytes, head.mark)
        if hashlib.sha256(footer).hexdigest() != head.footer:
            raise self._changed(head.name)
        return metadata

    def check(self, head: FileVersion) -> None:
        """Refuse a file that was written after it was opened.

        Raises:
            DatasetError: The file has changed, or is missing.
        """
        if _state(self._info(head.name)) != head.state:
            raise self._changed(head.name)

    def source(self, head: FileVersion, ranges: Sequence[tuple[int, int]]) -> tuple[Any, Callable[[], None]]:
        """Open a file for pyarrow. If the file is in a store, read the needed ranges at once, if they are short.

        Args:
            head: The file.
            ranges: Begin and end of the bytes that will be read.

        Returns:
            A path or a file object, and a function to call after reading: ``check`` for this file. If the bytes are
            already in memory, a thread asks the store while they are decoded. S3 needs no such check, because each
            request names the version of the file.
        """
        if self.store is None:
            return self.full_name(head.name), partial(self.check, head)
        merged = list[tuple[int, int]]()
        for begin, end in sorted(ranges):
            if merged and begin - merged[-1][1] <= GAP_BYTES:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        prefetched = merged if sum(end - begin for begin, end in merged) <= PREFETCH_BYTES else []
        file = load_pyarrow().PythonFile(_Ranges(self, head, prefetched), mode="r")
        if head.mark and self.store.is_s3:
            return file, lambda: None
        return file, self._threads.submit(self.check, head).result if prefetched else partial(self.check, head)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, "check")

    def read(self, name: str, begin: int, end: int, mark: str = "") -> bytes:
        """Return some bytes of a file.

        Args:
            name: Path of the file below the root of the location.
            begin: Position of the first byte.
            end: Position after the last byte.
            mark: Mark of the version to read; empty for any version.

        Raises:
            DatasetDamaged: The file is missing, or too short.
            DatasetError: The file cannot be read, or has changed.
        """
        if self.store is None:
            with explained(self.full_name(name), "read"), open(self._root / name, "rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        try:
            return self.store.read_range(name, begin, end, mark)
        except Changed:
            raise self._changed(name) from None
        except Gone:
            raise DatasetDamaged(f"{self.full_name(name)} is missing", hint=COPY) from None

    def _footer(self, name: str, nbytes: int, mark: str) -> tuple[bytes, Any]:
        arrow = load_pyarrow()
        try:
            tail = self.read(name, max(nbytes - TAIL, 0), nbytes, mark)
            length = int.from_bytes(tail[-8:-4], "little")
            if tail[-4:] == b"PARE":
                raise ValueError("it is encrypted")
            if tail[-4:] != b"PAR1" or length + 12 > nbytes:
                raise ValueError("it does not end like a Parquet file")
            if length > MAX_FOOTER_BYTES:
                raise ValueError(f"its footer has {size(length)}")
            if length + 8 > len(tail):
                tail = self.read(name, nbytes - length - 8, nbytes, mark)
            return tail[-8 - length :], arrow.parquet.read_metadata(arrow.BufferReader(tail))
        except (arrow.ArrowException, ValueError) as error:
            raise DatasetDamaged(
                f"{self.full_name(name)} is not a readable Parquet file ({error})", hint=COPY
            ) from None

    def _changed(self, name: str) -> DatasetError:
        return DatasetError(
            f"{self.full_name(name)} was written to since the data set was opened",
            hint="start a new run with the present files",
        )

    def _info(self, name: str) -> dict[str, Any]:
        missing = DatasetDamaged(f"{self.full_name(name)} is missing", hint=COPY)
        if self.store is None:
            with explained(self.full_name(name), "read"):
                if not (path := self._root / name).is_file():
                    raise missing
                about = path.stat()
                return {"size": about.st_size, "mtime": about.st_mtime_ns}
        try:
            return self.store.info(name)
        except Gone:
            raise missing from None

    def _find(self, pattern: str) -> dict[str, dict[str, Any]]:
        if self.store is not None:
            infos = self.store.find(pattern)
        else:
            with explained(self._root, "read"):
                paths = [path for path in self._root.glob(pattern) if path.is_file()]
            names = [path.relative_to(self._root).as_posix() for path in paths]
            infos = {name: self._info(name) for name in names if not _is_hidden(name)}
        return {name: info for name, info in infos.items() if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    """Return whether a file in a folder of Parquet files contains no samples, such as ``_metadata``, ``_SUCCESS`` and
    ``.part-0.crc``.
    """
    return any(part[:1] in (".", "_") for part in name.split("/"))


def _mark(info: Mapping[str, Any]) -> str:
    """Return the store's mark of a file, such as its ETag, which changes when the file is written. Some stores put it
    in quotes.
    """
    return next((str(info[key]).removeprefix("W/").strip('"') for key in MARKS if info.get(key)), "")


def _state(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a file's size with its mark, or else with its time. The value changes when the file is written."""
    time = next((info[key] for key in TIMES if info.get(key)), "")
    seconds = time.timestamp() if isinstance(time, datetime) else time  # listings and answers use different types
    return str(info["size"]), _mark(info) or str(seconds)


def _split(texts: Sequence[str]) -> tuple[str, list[tuple[str, bool]]]:
    """Split the paths that the user has given. Return their common folder, and for each path its name below the folder
    and whether this name is a glob pattern.
    """
    if not texts:
        raise DatasetError("no Parquet file is named", hint="name a file, a folder or a glob")
    folders, names, are_patterns = [], [], []
    for text in texts:
        text = text.rstrip("/")
        glob = _pattern_at(text)
        is_file = glob is None and (
            text.lower().endswith(ENDINGS) or ("://" not in text and Path(text).expanduser().is_file())
        )
        are_patterns.append(not is_file)
        if glob is not None:
            folder = text[:glob].rpartition("/")[0]
            name = text[len(folder) :].lstrip("/")
        elif is_file:
            folder, _, name = text.rpartition("/")
        else:
            folder, name = text, "**/*.parquet"
        folders.append(folder or ("/" if text.startswith("/") else "."))
        names.append(name)
    parts = [folder.split("/") for folder in folders]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    root = "/".join(common)
    if "://" in texts[0] and len(common) < 3:
        raise DatasetError(f"{texts[0]} and the others are in several stores", hint="name files of one store")
    below = [folder[len(root) :].strip("/") for folder in folders]
    paths = [f"{folder}/{name}".lstrip("/") for folder, name in zip(below, names, strict=True)]
    return root or "/", list(zip(paths, are_patterns, strict=True))


class _Ranges(io.RawIOBase):
    """A file of a store as a Python file object for pyarrow. Ranges of bytes that were read ahead come from memory."""

    def __init__(self, files: ParquetFiles, head: FileVersion, ahead: Sequence[tuple[int, int]]) -> None:
        self._files, self._head, self._at = files, head, 0
        self._ahead = [(begin, files.read(head.name, begin, end, head.mark)) for begin, end in ahead]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._head.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self._head.nbytes if count < 0 else min(self._at + count, self._head.nbytes)
        begin, self._at = self._at, max(end, self._at)
        if end <= begin:
            return b""
        for first, data in self._ahead:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return self._files.read(self._head.name, begin, end, self._head.mark)


@contextlib.contextmanager
def arrow_errors(where: str) -> Iterator[None]:
    """Turn errors of pyarrow into an error that names the location.

    Raises:
        DatasetDamaged: Replaces each error of pyarrow.
    """
    try:
        yield
    except DatasetError:
        raise
    except (load_pyarrow().ArrowException, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DatasetDamaged(f"{where} cannot be read ({reason})", hint=COPY) from None
