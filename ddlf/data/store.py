"""A store at a URL: what fsspec's drivers do, with patience, deadlines and one sentence for what goes wrong. Runs on all machines.

Who may read and write is a matter of each machine: drivers find credentials in its environment and its files, and none is ever in a URL.
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
"""How long a request is tried again, in pauses that grow to ``LONGEST_PAUSE_S``."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
STALL_S = 30.0
"""How long nothing may come of what is fetched. What does not come by pieces has so long for each ``STALL_BYTES``, too."""
STALL_BYTES = 10**6
ONE_PUT = 2**32
"""Bytes that are put at once at least: a condition is looked at for what comes in one piece."""

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
"""What has to be installed for a URL's scheme."""


class Gone(Exception):
    """What was asked for is not there."""


class Store:
    """Files below a URL. Not for other processes: made where it is used.

    Args:
        url: Such as ``s3://bucket/folder``.
        options: What the driver is to be made with, by name; None leaves that to its environment and its files.

    Raises:
        ConfigError: The URL cannot be used.
        DatasetError: There is no driver.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        found = urlsplit(self.url)
        if found.password:
            plain = f"{found.scheme}://{found.netloc.rpartition('@')[2]}{found.path}"
            raise ConfigError(
                f"{plain} was given with a password, which would be seen by all",
                hint="leave it out; each machine has its own, in its environment or the files of the driver",
            )
        if found.query or found.fragment:
            raise ConfigError(f"{self.url.partition('?')[0]} has a ? or # behind it", hint="name the folder alone")
        self._fs, self._root = opened(self.url, found.scheme, options or {})
        self._closed = threading.Event()

    def __str__(self) -> str:
        return self.url

    def close(self) -> None:
        """End what waits, with an error, and take nothing on."""
        self._closed.set()

    def interrupt(self) -> None:
        """End what waits, with an error. What is asked for later is done."""
        if not self._closed.is_set():
            waiting, self._closed = self._closed, threading.Event()
            waiting.set()

    def ending(self) -> Callable[[], bool]:
        """Says whether what is begun now is to end."""
        return self._closed.is_set

    def read(self, name: str, nbytes: int) -> bytes:
        """All bytes of a file.

        Args:
            name: Below the URL.
            nbytes: How many there should be, which says how long it may take; more of them are an error only to the caller.

        Raises:
            Gone: There is none.
            DatasetError: It cannot be read.
        """
        limit = STALL_S * (1 + nbytes / STALL_BYTES)
        path = self._path(name)
        return bytes(self._tried(f"read {self._said(name)}", lambda: self._done("cat_file", limit, path)))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Some bytes of a file.

        Args:
            name: Below the URL.
            begin: Place of the first.
            end: Place behind the last.

        Raises:
            Gone: There is no such file.
            DatasetError: They cannot be read, or the store gives only whole files.
        """
        path = self._path(name)

        def once() -> bytes:
            limit = STALL_S * (1 + (end - begin) / STALL_BYTES)
            data = bytes(self._done("cat_file", limit, path, start=begin, end=end))
            if len(data) < end - begin:
                raise ConnectionError(f"{len(data):,} of {end - begin:,} bytes came")
            if len(data) > end - begin:
                raise DatasetError(
                    f"{self._said(name)} comes only as a whole: the server does not read ranges of bytes",
                    hint="serve it from one that does, or copy the files to a folder",
                )
            return data

        return self._tried(f"read {self._said(name)}", once)

    def find(self, pattern: str) -> dict[str, dict[str, Any]]:
        """Files below the URL whose names match a pattern, in the order of their names, each with what the store says of it.

        Args:
            pattern: As of ``glob``: ``*`` and ``?`` within a folder, ``**`` for any folders.

        Raises:
            DatasetError: The store cannot be listed.
        """
        path = f"{self._root}/{pattern}"
        try:
            found = self._tried(
                f"list {self._said(pattern)}", lambda: self._done("glob", 20 * STALL_S, path, detail=True)
            )
        except Gone:
            return {}
        root = self._fs._strip_protocol(self._root).rstrip("/")
        names = {str(name).removeprefix(root).lstrip("/"): info for name, info in found.items()}
        return {name: names[name] for name in sorted(names) if names[name].get("type") == "file"}

    def info(self, name: str) -> dict[str, Any]:
        """What the store says of a file: its size, and whatever else it has.

        Raises:
            Gone: There is no such file.
            DatasetError: It cannot be looked at.
        """
        path = self._path(name)
        return dict(self._tried(f"look at {self._said(name)}", lambda: self._done("info", STALL_S, path)))

    def fetch(self, name: str, nbytes: int, target: Path) -> None:
        """Bring a file to a disk of this machine, whole; its bytes are not compared with anything.

        Args:
            name: Below the URL.
            nbytes: How many there should be.
            target: File to write.

        Raises:
            Gone: There is none.
            DatasetError: It cannot be read, or has another length.
            OSError: The disk does not take it.
        """
        path = self._path(name)

        def once() -> None:
            came = known().callbacks.Callback()  # counts the bytes that come
            try:
                self._done("get_file", STALL_S, path, str(target), came=came, most=nbytes, callback=came)
            except OSError as error:
                _check_disk(target, error)
                raise
            if (length := target.stat().st_size) < nbytes:
                raise ConnectionError(f"{length:,} of {nbytes:,} bytes came")
            if length > nbytes:
                raise _Longer(f"it has more than {nbytes:,} bytes")

        self._tried(f"read {self._said(name)}", once)

    def mark(self, name: str) -> str:
        """Another text when a file was written to since; empty where it is not there, or nobody can say."""
        try:
            return str(self.info(name).get("ETag") or "")
        except Gone:
            return ""

    def write(self, name: str, data: bytes, *, new: bool = False, over: str = "") -> None:
        """Write a file, whole or not at all where the store can do that, as buckets can.

        Args:
            name: Below the URL.
            data: All of it.
            new: Whether it must not be there yet.
            over: ``mark`` of what is there, which alone is to be replaced; looked at by S3, the only store whose driver passes that on.

        Raises:
            FileExistsError: It is there and should not be, or something else is there by now.
            DatasetError: It cannot be written.
        """
        limit = STALL_S * (1 + len(data) / STALL_BYTES)
        path = self._path(name)
        self._made(path)
        more: dict[str, Any] = {"mode": "create"} if new else {}
        if over and "s3" in self._fs.protocol:
            more = {"IfMatch": over, "chunksize": ONE_PUT}
        try:
            self._tried(f"write {self._said(name)}", lambda: self._done("pipe_file", limit, path, data, **more))
        except DatasetError as error:
            if more and "condition" in str(error).lower():  # as buckets say it
                raise FileExistsError(name) from None
            raise

    def put(self, source: Path, name: str) -> None:
        """Write a file from this machine's disk.

        Raises:
            DatasetError: It cannot be written.
        """
        limit = STALL_S * (1 + source.stat().st_size / STALL_BYTES)
        path = self._path(name)
        self._made(path)
        self._tried(f"write {self._said(name)}", lambda: self._done("put_file", limit, str(source), path))

    def names(self, folder: str = "") -> list[str]:
        """Names below a folder, with the folder before them; none where there is no such folder.

        Raises:
            DatasetError: It cannot be read.
        """
        path = self._path(folder)
        try:
            found = self._tried(
                f"list {self._said(folder)}", lambda: self._done("ls", STALL_S, path, detail=False, refresh=True)
            )
        except Gone:
            return []
        here = self._fs._strip_protocol(path)
        below = [str(each).rstrip("/") for each in found]
        return sorted(f"{folder}/{each.rpartition('/')[2]}".lstrip("/") for each in below if each != here.rstrip("/"))

    def remove(self, folder: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if it is not there."""
        path = self._path(folder)
        with contextlib.suppress(Gone):
            self._tried(f"remove {self._said(folder)}", lambda: self._fs.rm(path, recursive=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") if name else self._root

    def _said(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _made(self, path: str) -> None:
        """Make the folder of a file where there are folders: in buckets there are none, and a bucket is not made for somebody who mistyped it."""
        if not getattr(self._fs, "async_impl", False):
            self._tried(f"write to {self}", lambda: self._fs.makedirs(path.rpartition("/")[0], exist_ok=True))

    def _tried(self, doing: str, once: Callable[[], T]) -> T:
        """Do it, again where that may help; say what goes wrong in one sentence."""
        from tenacity import (
            Retrying,
            retry_if_exception,
            stop_after_delay,
            stop_when_event_set,
            wait_random_exponential,
        )
        from tenacity.nap import sleep_using_event

        told, closed = False, self._closed

        def tell(state: Any) -> None:
            nonlocal told
            why = _reason(state.outcome.exception())
            log.log(logging.DEBUG if told else logging.WARNING, "cannot %s: %s; tried again", doing, why)
            told = True

        try:
            return Retrying(
                retry=retry_if_exception(may_pass),
                wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                stop=stop_after_delay(PATIENCE_S) | stop_when_event_set(closed),
                sleep=sleep_using_event(closed),
                before_sleep=tell,
                reraise=True,
            )(once)
        except (DatasetError, FileExistsError, _Disk):
            raise
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                said = f"cannot {doing}: {_reason(error)}"
                raise DatasetError(said, hint="make the bucket, or name another") from error
            raise Gone from error
        except Exception as error:
            raise DatasetError(f"cannot {doing}: {_reason(error)}", hint=_hint(error)) from error

    def _done(self, verb: str, limit: float, *args: Any, came: Any = None, most: int = 0, **more: Any) -> Any:
        """Call a driver's verb, with a deadline where it has an event loop; the others have their own, or none.

        Args:
            verb: A method of the file system.
            limit: Seconds; with ``came`` since anything came last.
            came: Counts what comes.
            most: Bytes that may come.
        """
        closed = self._closed
        if closed.is_set():
            raise DatasetError(f"{self} was closed", hint="open it again")
        if not getattr(self._fs, "async_impl", False):
            return getattr(self._fs, verb)(*args, **more)
        limited = _limited(self, closed, verb, limit, args, came, most, more)
        future = asyncio.run_coroutine_threadsafe(limited, self._fs.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _limited(
    store: Store,
    closed: threading.Event,
    verb: str,
    limit: float,
    args: Any,
    came: Any,
    most: int,
    more: dict[str, Any],
) -> Any:
    """Await a verb of an asynchronous driver, as long as something comes of it."""
    call: Coroutine[Any, Any, Any] = getattr(store._fs, f"_{verb}")(*args, **more)
    task = asyncio.ensure_future(call)
    before, waited, step = -1, 0.0, min(limit / 4, 0.25)
    try:
        while not (await asyncio.wait([task], timeout=step))[0]:
            if closed.is_set():
                raise DatasetError(f"{store} was closed", hint="open it again")
            now = came.value if came is not None else 0
            if most and now > most:
                raise _Longer(f"it has more than {most:,} bytes")
            waited = 0.0 if now != before else waited + step
            before = now
            if waited >= limit:
                raise TimeoutError(f"nothing came for {limit:.0f} s")
        return task.result()
    finally:
        task.cancel()


class _Longer(Exception):
    """More came than there should be."""


class _Disk(OSError):
    """This machine's disk does not take more: no matter of the store."""


def _check_disk(target: Path, error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or not target.parent.is_dir():
        raise _Disk(error.errno, error.strerror) from error


def _reason(error: BaseException | None) -> str:
    """What a driver says, without what is around it."""
    status = getattr(error, "status", None)
    if status is not None:
        return f"the store answered {status} {getattr(error, 'message', '')}".rstrip()
    if isinstance(error, PermissionError):
        return f"no permission ({first_line(error)})"
    return first_line(error) or type(error).__name__


def _hint(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    if any(
        said in text.lower() for said in ("timetooskewed", "time too skewed", "difference between the request time")
    ):
        return "set this machine's clock"
    if isinstance(error, PermissionError) or "Credential" in text or getattr(error, "status", 0) in (401, 403):
        clock = ", and look at its clock" if "Forbidden" in text else ""  # often all that is said
        return f"give this machine credentials that may do so, as its driver wants them{clock}"
    if isinstance(error, NotImplementedError) or getattr(error, "status", 0) in (405, 501):
        return "this store can only be read; write to another one"
    return "look at the store and at the way to it, then run it again"


def may_pass(error: BaseException) -> bool:
    """Whether an error of a store may be gone when it is asked again: all but what it says about the request itself."""
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
    if isinstance(error, OSError) and error.errno == errno.EINVAL:  # of a request that is wrong in itself
        return False
    status = getattr(error, "status", None)
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status != 501)
    text = type(error).__name__ + str(error)
    return not isinstance(error, TypeError | ValueError | AttributeError) and "Credential" not in text


@functools.cache
def known() -> Any:
    """The package fsspec.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise DatasetError("data at a URL needs fsspec, which is not installed", hint="pip install fsspec") from None
    return fsspec


def opened(url: str, scheme: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path of the URL there.

    Args:
        url: Such as ``s3://bucket/folder``.
        scheme: What stands before its colon.
        options: What the driver is made with.

    Raises:
        ConfigError: The URL cannot be used.
        DatasetError: There is no driver, or it cannot begin.
    """
    fsspec = known()
    if scheme not in fsspec.available_protocols():
        hint = "use s3://, gs://, abfs://, https:// or a folder"
        raise DatasetError(f"no driver is known for {scheme}://", hint=hint)
    try:
        # Lists are of what is there now, and a store of this process is nobody else's.
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError:
        wanted = DRIVERS.get(scheme, f"the driver of fsspec for {scheme}")
        said = f"{scheme}:// needs {wanted}, which is not installed here"
        raise DatasetError(said, hint=f"pip install {wanted}") from None
    except ValueError as error:
        raise ConfigError(f"{url} cannot be used ({error})", hint="write it as s3://bucket/folder") from None
    except Exception as error:  # as that of hdfs where there is no Java
        raise DatasetError(
            f"{scheme}:// cannot be used: {first_line(error)}", hint="install what its driver needs"
        ) from error
    return fs, root.rstrip("/")


def first_line(error: BaseException | None) -> str:
    """What an error says first, of at most 300 characters."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def path_of(url: str) -> Path | None:
    """The folder that a ``file://`` URL names; None for others.

    Raises:
        ConfigError: It is on another machine.
    """
    found = urlsplit(url)
    if found.scheme != "file":
        return None
    if found.netloc not in ("", "localhost"):
        raise ConfigError(f"{url} names a folder of another machine", hint="mount it, and name the folder here")
    return Path(unquote(found.path))
