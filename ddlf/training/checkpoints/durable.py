"""Files that survive a power cut and reveal damage. Runs on the master, with the standard library only.

Rules:
    When a function returns, its data are on the disk: it syncs the file, then the folder with its name.
    A file name never refers to an incomplete file: content is written under a temporary name, synced and renamed.
    A sealed file is JSON in one fixed spelling that ends with its own SHA-256. Any changed byte counts as damage, even
    one that JSON ignores, such as ``1e5`` for ``1E5``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddlf.errors import CheckpointCorrupt, CheckpointError, DDLFError
from ddlf.events.record import size

SEAL = "sha256"
OWNER = "owner.json"
"""File that names the writer of a folder of checkpoints."""
MANIFEST = "manifest.json"
"""File that lists the contents of a checkpoint."""
MAX_SEALED_BYTES = 64 * 2**20  # such files are read into memory and parsed: limits the cost of a damaged or forged one


def seal(content: dict[str, Any]) -> bytes:
    """Encode JSON data with their SHA-256 as the last entry, so that a reader notices damage.

    The same data give the same bytes.

    Raises:
        CheckpointError: The data are not JSON, or too large.
    """
    try:
        spelled = _spell(content)
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: also an integer of more than 4300 digits
        raise CheckpointError(f"cannot be written as JSON: {error}") from error
    sealed = _spell({**content, SEAL: hashlib.sha256(spelled).hexdigest()})
    if len(sealed) > MAX_SEALED_BYTES:
        raise CheckpointError(
            f"facts and names take {size(len(sealed))} of JSON, over the limit of {size(MAX_SEALED_BYTES)}"
        )
    return sealed


def unseal(data: bytes, file: Path) -> dict[str, Any]:
    """Return the content of a file that ``seal`` encoded, without the SHA-256, after checking it.

    Args:
        data: The file's bytes.
        file: The file's name, for the error message.

    Raises:
        CheckpointCorrupt: The bytes differ from the output of ``seal``.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        damage = "is empty" if not data else "holds only zeros" if not data.strip(b"\0") else f"is not JSON ({error})"
        raise damaged(file, "sealed JSON", f"{len(data):,} bytes", text=f"{file} {damage}") from error
    if type(content) is not dict or type(content.get(SEAL)) is not str:
        raise damaged(file, f"JSON with its {SEAL}", "JSON without", text=f"{file} is JSON, but not sealed")
    claimed = content.pop(SEAL)
    try:
        spelled = _spell(content)
    except RecursionError as error:  # the parser accepts deeper nesting than the encoder
        raise damaged(file, "sealed JSON", "JSON nested too deep") from error
    actual = hashlib.sha256(spelled).hexdigest()
    if actual != claimed:
        raise damaged(file, f"SHA-256 {claimed}", f"SHA-256 {actual}")
    if data != _spell({**content, SEAL: claimed}):
        raise damaged(file, "JSON as it was spelled when sealed", "the same values in another spelling")
    return content


def _spell(content: dict[str, Any]) -> bytes:
    """Encode JSON data as bytes. The order of entries matters. NaN and infinities are spelled as in JavaScript."""
    return _text(content, "\n").encode() + b"\n"


def _text(value: Any, line: str) -> str:
    """Return the same text as ``json.dumps(value, indent=1)``, but create no reference cycles.

    Only the garbage collector frees reference cycles. With a checkpoint after each update it would soon examine the
    whole process, and stop all threads meanwhile.
    """
    inner = f"{line} "
    if value and isinstance(value, dict):
        entries = (f"{json.dumps(name)}: {_text(entry, inner)}" for name, entry in value.items())
        return f"{{{inner}{f',{inner}'.join(entries)}{line}}}"
    if value and isinstance(value, list | tuple):
        return f"[{inner}{f',{inner}'.join(_text(entry, inner) for entry in value)}{line}]"
    return json.dumps(value)


def damaged(file: Path, expected: str, got: str, *, text: str = "") -> CheckpointCorrupt:
    """Return the error that reports a damaged file. If ``text`` is given, it is the whole message."""
    return CheckpointCorrupt(
        text or f"{file} is damaged: expected {expected}, found {got}",
        hint="use another checkpoint, or a copy of this one",
        file=str(file),
        expected=expected,
        got=got,
    )


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names of the files in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders, and need not: their server syncs when a name changes.
        if not (error.errno in (errno.EINVAL, errno.ENOTSUP) and path.is_dir()):
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    import fcntl

    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the bytes in the drive's cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def write_new(path: Path, *parts: bytes) -> None:
    """Write a new file that only its owner may read, and sync it. Its folder is not synced."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.writelines(parts)
        file.flush()
        _sync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: a reader sees the old or the new bytes, even after a power cut."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_new(temporary, data)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


EARLIER = "earlier checkpoints are complete"
"""The files that a full disk does not harm while a checkpoint is written."""


def free_bytes(folder: Path) -> int | None:
    """Return the number of bytes that this user may still write to the disk; None if that is unknown."""
    total, _, free = shutil.disk_usage(folder)
    return free if total else None


@contextlib.contextmanager
def explained(folder: Path, doing: str, *, need: int = 0, unharmed: str = "") -> Iterator[None]:
    """Turn operating system errors in a ``with`` block into DDLF errors with a clear message.

    Args:
        folder: Folder of the operation.
        doing: The operation in words, such as ``"write a checkpoint in"``.
        need: Number of bytes to write, for the sentence about a full disk.
        unharmed: The files that a full disk does not harm, in words, for the same sentence.

    Raises:
        CheckpointError: Replaces any OSError that is not a ``DDLFError``, with its ``errno``.
    """
    try:
        yield
    except DDLFError:
        raise
    except OSError as error:
        raise in_words(error, folder, doing, need=need, unharmed=unharmed) from error


def in_words(error: OSError, folder: Path, doing: str, *, need: int = 0, unharmed: str = "") -> CheckpointError:
    """Return the DDLF error for an operating system error, as ``explained`` raises it."""
    sentence, hint = f"cannot {doing} {folder}: {error.strerror or error}", ""
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            return no_space(folder, need, unharmed)
        sentence, hint = f"no space in {folder}", "free some, or use another folder"
    elif error.errno == errno.EDQUOT:
        sentence, hint = (
            f"no space: need {size(need)}, but the quota in {folder} is used up",
            "free some, or use another folder",
        )
    elif error.errno == errno.EFBIG:
        sentence, hint = f"no space: need {size(need)} in {folder}, more than a file may have here", "see ulimit -f"
    elif error.errno == errno.EROFS:
        hint = "use another folder"
    elif error.errno in (errno.EACCES, errno.EPERM):
        sentence, hint = f"{sentence} for uid {os.geteuid()}", "change its owner or mode, or use another folder"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST) and not folder.is_dir():
        sentence, hint = f"cannot {doing} {folder}: it or one above it is a file, not a folder", "name a folder"
    elif error.errno == errno.ESTALE:
        hint = "the network file system lost it; mount it again"
    result = CheckpointError(sentence, hint=hint)
    result.errno = error.errno
    return result


def no_space(folder: Path, need: int, unharmed: str = "") -> CheckpointError:
    """Return the error that says that the disk is full."""
    free = free_bytes(folder)
    facts = [f"need {size(need)}"] * bool(need) + [f"free {size(free or 0)}"] * (free is not None)
    error = CheckpointError(
        f"no space: {', '.join(facts)} in {folder}",
        hint="free some, or use another folder" + f"; {unharmed}" * bool(unharmed),
    )
    error.errno = errno.ENOSPC
    return error
