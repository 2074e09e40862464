"""A store at a URL: calls fsspec's drivers with retries and deadlines, and explains errors. Runs on all machines.

Access rights are a matter of each machine. Drivers find credentials in its environment and its files, never in a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ddlf.errors import ConfigError, DatasetError

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S = 120.0
"""Maximum seconds for the repetitions of a failed request. The pauses between them grow to ``LONGEST_PAUSE_S``."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
STALL_S = 30.0
"""Maximum seconds without new bytes. A request without progress reports may take that long for each ``STALL_BYTES``."""
STALL_BYTES = 10**6
ONE_PUT = 2**32
"""Larger files are uploaded in several pieces. Conditions only work for an upload in one piece."""

DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
}
"""The package that each URL scheme needs."""


class Gone(Exception):
    """Raised if the requested file does not exist in the store."""


class Changed(Exception):
    """Raised if the requested version of a file does not exist in the store any more, because the file was written."""


class Store:
    """The files below a URL. Each process makes its own ``Store``.

    Args:
        url: The URL, such as ``s3://bucket/folder``.
        options: Arguments for the driver, by name. None lets the driver use its environment and its files.

    Raises:
        ConfigError: The URL is invalid.
        DatasetError: There is no driver.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.password:
            plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            raise ConfigError(
                f"{plain} contains a password, which other users could see",
                hint="leave it out; each machine has its own, in its environment or the files of the driver",
            )
        if parts.query or parts.fragment:
            raise ConfigError(
                f"{self.url.partition('?')[0]} ends with a query or a fragment (? or #)", hint="name only the folder"
            )
        self._fs, self._root = opened(self.url, parts.scheme, options or {})
        self._closed = threading.Event()

    def __str__(self) -> str:
        return self.url

    def close(self) -> None:
        """End the requests that threads wait for with an error, and refuse later ones."""
        self._closed.set()

    def interrupt(self) -> None:
        """End the requests that threads wait for with an error. Later requests work again."""
        if not self._closed.is_set():
            waiting, self._closed = self._closed, threading.Event()
            waiting.set()

    def ending(self) -> Callable[[], bool]:
        """Return a function for work that begins now. The function returns True after ``interrupt`` or ``close``, when
        this work must end.
        """
        return self._closed.is_set

    def read(self, name: str, nbytes: int) -> bytes:
        """Return all bytes of a file.

        Args:
            name: Path below the URL.
            nbytes: Expected size, which sets the deadline. The caller must check the size.

        Raises:
            Gone: The file does not exist.
            DatasetError: The file cannot be read.
        """
        limit = STALL_S * (1 + nbytes / STALL_BYTES)
        path = self._path(name)
        return bytes(self._tried(f"read {self._full_name(name)}", lambda: self._done("cat_file", limit, path)))

    @property
    def is_s3(self) -> bool:
        """Whether the store is S3, so that requests can have conditions, such as the version to read. fsspec does not
        pass conditions on, so DDLF calls the driver of S3 directly.
        """
        return "s3" in self._fs.protocol

    def read_range(self, name: str, begin: int, end: int, etag: str = "") -> bytes:
        """Return some bytes of a file.

        Args:
            name: Path below the URL.
            begin: Position of the first byte.
            end: Position after the last byte.
            etag: The version to read. Only S3 checks it.

        Raises:
            Gone: The file does not exist.
            Changed: The file has another version by now.
            DatasetError: The bytes cannot be read, or the store only returns whole files.
        """
        path = self._path(name)

        def read_once() -> bytes:
            limit = STALL_S * (1 + (end - begin) / STALL_BYTES)
            if etag and self.is_s3:
                data = bytes(self._awaited(self._read_version(path, begin, end, etag), limit))
            else:
                data = bytes(self._done("cat_file", limit, path, start=begin, end=end))
            if len(data) < end - begin:
                raise ConnectionError(f"{len(data):,} of {end - begin:,} bytes came")
            if len(data) > end - begin:
                raise DatasetError(
                    f"{self._full_name(name)} cannot be read in parts: the server ignores ranges of bytes",
                    hint="use a server that supports ranges, or copy the files to a folder",
                )
            return data

        try:
            return self._tried(f"read {self._full_name(name)}", read_once)
        except DatasetError as error:
            if etag and _is_refused_condition(error):
                raise Changed(name) from None
            raise

    async def _read_version(self, path: str, begin: int, end: int, etag: str) -> bytes:
        bucket, key, _ = self._fs.split_path(path)
        range_ = f"bytes={begin}-{end - 1}"
        answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=range_, IfMatch=f'"{etag}"')
        return bytes(await answer["Body"].read())

    def find(self, pattern: str) -> dict[str, dict[str, Any]]:
        """Return the files whose paths match a pattern, sorted, with the store's facts about each.

        Args:
            pattern: A glob pattern: ``*`` and ``?`` within a folder, ``**`` for any folders.

        Raises:
            DatasetError: The store cannot be listed.
        """
        path = f"{self._root}/{pattern}"
        try:
            infos = self._tried(
                f"list {self._full_name(pattern)}", lambda: self._done("glob", 20 * STALL_S, path, detail=True)
            )
        except Gone:
            return {}
        root = self._fs._strip_protocol(self._root).rstrip("/")
        names = {str(name).removeprefix(root).lstrip("/"): info for name, info in infos.items()}
        return {name: names[name] for name in sorted(names) if names[name].get("type") == "file"}

    def info(self, name: str) -> dict[str, Any]:
        """Return the store's facts about a file: its size, and others that depend on the store.

        Raises:
            Gone: The file does not exist.
            DatasetError: The store cannot be asked.
        """
        path = self._path(name)
        return dict(
            self._tried(f"read the state of {self._full_name(name)}", lambda: self._done("info", STALL_S, path))
        )

    def fetch(self, name: str, nbytes: int, target: Path) -> None:
        """Copy a whole file to a disk of this machine. Its bytes are not checked.

        Args:
            name: Path below the URL.
            nbytes: Expected size.
            target: Path of the copy.

        Raises:
            Gone: The file does not exist.
            DatasetError: The file cannot be read, or has another size.
            OSError: The disk cannot store it.
        """
        path = self._path(name)

        def fetch_once() -> None:
            counter = load_fsspec().callbacks.Callback()  # counts the received bytes
            try:
                self._done("get_file", STALL_S, path, str(target), counter=counter, most=nbytes, callback=counter)
            except OSError as error:
                _check_disk(target, error)
                raise
            if (length := target.stat().st_size) < nbytes:
                raise ConnectionError(f"{length:,} of {nbytes:,} bytes came")
            if length > nbytes:
                raise _Longer(f"it has more than {nbytes:,} bytes")

        self._tried(f"read {self._full_name(name)}", fetch_once)

    def mark(self, name: str) -> str:
        """Return a mark of a file, such as an ETag, that changes when the file is written. It is empty if the file is
        missing, or if the store has no marks.
        """
        try:
            return str(self.info(name).get("ETag") or "")
        except Gone:
            return ""

    def write(self, name: str, data: bytes, *, new: bool = False, over: str = "") -> None:
        """Write a file. Stores that can, such as buckets, write it completely or not at all.

        Args:
            name: Path below the URL.
            data: All bytes of the file.
            new: Whether the file must not exist yet.
            over: ``mark`` of the only file that may be replaced. Only S3 checks it, because only its driver passes it
                on.

        Raises:
            FileExistsError: The file exists but must be new, or another file is there by now.
            DatasetError: The file cannot be written.
        """
        limit = STALL_S * (1 + len(data) / STALL_BYTES)
        path = self._path(name)
        self._make_folder(path)
        conditions: dict[str, Any] = {"mode": "create"} if new else {}
        if over and self.is_s3:
            conditions = {"IfMatch": over, "chunksize": ONE_PUT}
        try:
            self._tried(
                f"write {self._full_name(name)}", lambda: self._done("pipe_file", limit, path, data, **conditions)
            )
        except DatasetError as error:
            if conditions and _is_refused_condition(error):
                raise FileExistsError(name) from None
            raise

    def put(self, source: Path, name: str) -> None:
        """Upload a file from this machine's disk.

        Raises:
            DatasetError: The file cannot be written.
        """
        limit = STALL_S * (1 + source.stat().st_size / STALL_BYTES)
        path = self._path(name)
        self._make_folder(path)
        self._tried(f"write {self._full_name(name)}", lambda: self._done("put_file", limit, str(source), path))

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted paths of the files and folders in a folder; empty if there is no such folder.

        Raises:
            DatasetError: The folder cannot be read.
        """
        path = self._path(folder)
        try:
            paths = self._tried(
                f"list {self._full_name(folder)}", lambda: self._done("ls", STALL_S, path, detail=False, refresh=True)
            )
        except Gone:
            return []
        parent = self._fs._strip_protocol(path)
        below = [str(entry).rstrip("/") for entry in paths]
        return sorted(
            f"{folder}/{entry.rpartition('/')[2]}".lstrip("/") for entry in below if entry != parent.rstrip("/")
        )

    def remove(self, folder: str) -> None:
        """Remove a file, or a folder with its content. A missing file is not an error."""
        path = self._path(folder)
        with contextlib.suppress(Gone):
            self._tried(f"remove {self._full_name(folder)}", lambda: self._fs.rm(path, recursive=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") if name else self._root

    def _full_name(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _make_folder(self, path: str) -> None:
        """Create the folder for a file in the store, before it is written.

        Buckets have no folders. Their drivers would make a bucket, which may be a misspelt one, so they are skipped.
        """
        if not getattr(self._fs, "async_impl", False):
            self._tried(f"write to {self}", lambda: self._fs.makedirs(path.rpartition("/")[0], exist_ok=True))

    def _tried(self, doing: str, attempt: Callable[[], T]) -> T:
        """Call ``attempt``, which makes a request to the store, and repeat the call after a temporary error. Turn other
        errors into one sentence.
        """
        from tenacity import (
            Retrying,
            retry_if_exception,
            stop_after_delay,
            stop_when_event_set,
            wait_random_exponential,
        )
        from tenacity.nap import sleep_using_event

        was_logged, closed = False, self._closed

        def tell(state: Any) -> None:
            nonlocal was_logged
            reason = _reason(state.outcome.exception())
            log.log(logging.DEBUG if was_logged else logging.WARNING, "cannot %s: %s; tried again", doing, reason)
            was_logged = True

        try:
            return Retrying(
                retry=retry_if_exception(may_pass),
                wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                stop=stop_after_delay(PATIENCE_S) | stop_when_event_set(closed),
                sleep=sleep_using_event(closed),
                before_sleep=tell,
                reraise=True,
            )(attempt)
        except (DatasetError, FileExistsError, _Disk):
            raise
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                message = f"cannot {doing}: {_reason(error)}"
                raise DatasetError(message, hint="make the bucket, or name another") from error
            raise Gone from error
        except Exception as error:
            raise DatasetError(f"cannot {doing}: {_reason(error)}", hint=_hint(error)) from error

    def _done(self, verb: str, limit: float, *args: Any, counter: Any = None, most: int = 0, **options: Any) -> Any:
        """Call a method of the fsspec driver. A driver with an event loop gets a deadline; others have their own, or
        none.

        Args:
            verb: Name of the method of the file system.
            limit: Seconds for the call; with ``counter``, seconds since the last new bytes.
            counter: Counts the received bytes.
            most: Maximum number of bytes to receive.
        """
        if self._closed.is_set():
            raise self._was_closed()
        if not getattr(self._fs, "async_impl", False):
            return getattr(self._fs, verb)(*args, **options)
        return self._awaited(getattr(self._fs, f"_{verb}")(*args, **options), limit, counter, most)

    def _awaited(self, call: Coroutine[Any, Any, Any], limit: float, counter: Any = None, most: int = 0) -> Any:
        """Wait for a call of an asynchronous driver, as long as it makes progress."""
        future = asyncio.run_coroutine_threadsafe(
            self._limited(call, self._closed, limit, counter, most), self._fs.loop
        )
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _was_closed(self) -> DatasetError:
        return DatasetError(f"{self} was closed", hint="open it again")

    async def _limited(
        self, call: Coroutine[Any, Any, Any], closed: threading.Event, limit: float, counter: Any, most: int
    ) -> Any:
        task = asyncio.ensure_future(call)
        before, waited, step = -1, 0.0, min(limit / 4, 0.25)
        try:
            while not (await asyncio.wait([task], timeout=step))[0]:
                if closed.is_set():
                    raise self._was_closed()
                now = counter.value if counter is not None else 0
                if most and now > most:
                    raise _Longer(f"it has more than {most:,} bytes")
                waited = 0.0 if now != before else waited + step
                before = now
                if waited >= limit:
                    raise TimeoutError(f"no bytes arrived for {limit:.0f} s")
            return task.result()
        finally:
            task.cancel()


def _is_refused_condition(error: DatasetError) -> bool:
    """Return whether a store refused a request because its condition does not hold. Buckets report this only in the
    text of the error."""
    return "condition" in str(error).lower()


class _Longer(Exception):
    """Raised if the store sent more bytes than expected."""


class _Disk(OSError):
    """Raised if this machine's disk cannot store more, to distinguish it from an error of the store."""


def _check_disk(target: Path, error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or not target.parent.is_dir():
        raise _Disk(error.errno, error.strerror) from error


def _reason(error: BaseException | None) -> str:
    """Return the reason that the driver gives in an error of the store, without the surrounding text."""
    status = getattr(error, "status", None)
    if status is not None:
        return f"the store answered {status} {getattr(error, 'message', '')}".rstrip()
    if isinstance(error, PermissionError):
        return f"no permission ({first_line(error)})"
    return first_line(error) or type(error).__name__


def _hint(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    if any(
        phrase in text.lower() for phrase in ("timetooskewed", "time too skewed", "difference between the request time")
    ):
        return "set this machine's clock"
    if isinstance(error, PermissionError) or "Credential" in text or getattr(error, "status", 0) in (401, 403):
        clock = ", and check its clock" if "Forbidden" in text else ""  # the store often gives no other reason
        return f"give this machine credentials with this permission, in the form that its driver expects{clock}"
    if isinstance(error, NotImplementedError) or getattr(error, "status", 0) in (405, 501):
        return "this store is read-only; write to another one"
    return "check the store and the connection to it, then run the command again"


def may_pass(error: BaseException) -> bool:
    """Return whether a request to the store may succeed if it is repeated. It cannot if the error is about the request
    itself.
    """
    lasting = (
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
        NotImplementedError,
        ImportError,
        DatasetError,
        _Longer,
        _Disk,
        KeyboardInterrupt,
        SystemExit,
    )
    if isinstance(error, lasting) or not isinstance(error, Exception):
        return False
    if isinstance(error, OSError) and error.errno == errno.EINVAL:  # the request itself is wrong
        return False
    status = getattr(error, "status", None)
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status != 501)
    text = type(error).__name__ + str(error)
    return not isinstance(error, TypeError | ValueError | AttributeError) and "Credential" not in text


@functools.cache
def load_fsspec() -> Any:
    """Return the package fsspec.

    Raises:
        DatasetError: fsspec is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise DatasetError("data at a URL needs fsspec, which is not installed", hint="pip install fsspec") from None
    return fsspec


def opened(url: str, scheme: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Open the fsspec file system of a URL. Return it with the path that the URL names in it.

    Args:
        url: The URL, such as ``s3://bucket/folder``.
        scheme: Text before the colon of the URL.
        options: Arguments for the driver.

    Raises:
        ConfigError: The URL is invalid.
        DatasetError: There is no driver, or it cannot start.
    """
    fsspec = load_fsspec()
    if scheme not in fsspec.available_protocols():
        hint = "use s3://, gs://, abfs://, https:// or a folder"
        raise DatasetError(f"no driver is known for {scheme}://", hint=hint)
    try:
        # Always list the present state, and do not share the file system with other stores.
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError:
        driver = DRIVERS.get(scheme, f"the driver of fsspec for {scheme}")
        message = f"{scheme}:// needs {driver}, which is not installed here"
        raise DatasetError(message, hint=f"pip install {driver}") from None
    except ValueError as error:
        raise ConfigError(f"{url} cannot be used ({error})", hint="write it as s3://bucket/folder") from None
    except Exception as error:  # for example from hdfs, if Java is not installed
        raise DatasetError(
            f"{scheme}:// cannot be used: {first_line(error)}", hint="install the programs that its driver needs"
        ) from error
    return fs, root.rstrip("/")


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def path_of(url: str) -> Path | None:
    """Return the folder of a ``file://`` URL; None for other URLs.

    Raises:
        ConfigError: The folder is on another machine.
    """
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url} names a folder of another machine", hint="mount it, and name the folder here")
    return Path(unquote(parts.path))
