"""Files that survive a power cut and tell when they are damaged. Runs on the master; only the standard library.

Rules:
    What was written is on the disk when the function returns: first the file is synced, then the folder that names it.
    A name never stands for half a file: content is written under another name, synced and renamed.
    A sealed file is JSON in one fixed spelling that ends with its own SHA-256. Not only other values but every other byte is
    damage, also one that JSON would not mind, such as ``1e5`` for ``1E5``.
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
"""Which says who writes into a folder of checkpoints."""
MANIFEST = "manifest.json"
"""Which says what is in a checkpoint."""
MAX_SEALED_BYTES = 64 * 2**20  # read into memory and parsed: a bound on what a damaged or made-up file can cost


def seal(content: dict[str, Any]) -> bytes:
    """Spell JSON data with its SHA-256 as the last entry. The same data gives the same bytes.

    Raises:
        CheckpointError: It is no JSON, or too large.
    """
    try:
        spelled = _spell(content)
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: also a whole number of more than 4300 digits
        raise CheckpointError(f"cannot be written as JSON: {error}") from error
    sealed = _spell({**content, SEAL: hashlib.sha256(spelled).hexdigest()})
    if len(sealed) > MAX_SEALED_BYTES:
        raise CheckpointError(
            f"facts and names take {size(len(sealed))} of JSON, over the limit of {size(MAX_SEALED_BYTES)}"
        )
    return sealed


def unseal(data: bytes, file: Path) -> dict[str, Any]:
    """The content of a sealed file, without the seal.

    Args:
        data: The file's bytes.
        file: Name, for the error.

    Raises:
        CheckpointCorrupt: It is not, byte for byte, what ``seal`` made.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not data else "holds only zeros" if not data.strip(b"\0") else f"is not JSON ({error})"
        raise damaged(file, "sealed JSON", f"{len(data):,} bytes", text=f"{file} {what}") from error
    if type(content) is not dict or type(content.get(SEAL)) is not str:
        raise damaged(file, f"JSON with its {SEAL}", "JSON without", text=f"{file} is JSON, but not sealed")
    claimed = content.pop(SEAL)
    try:
        spelled = _spell(content)
    except RecursionError as error:  # what the parser still takes can be too deep for the encoder
        raise damaged(file, "sealed JSON", "JSON nested too deep") from error
    actual = hashlib.sha256(spelled).hexdigest()
    if actual != claimed:
        raise damaged(file, f"SHA-256 {claimed}", f"SHA-256 {actual}")
    if data != _spell({**content, SEAL: claimed}):
        raise damaged(file, "JSON as it was spelled when sealed", "the same values in another spelling")
    return content


def _spell(content: dict[str, Any]) -> bytes:
    """Order of entries is kept, so it counts as content too; NaN and infinities are spelled as Python and JavaScript do."""
    return _text(content, "\n").encode() + b"\n"


def _text(value: Any, line: str) -> str:
    """What ``json.dumps(value, indent=1)`` gives. That leaves functions that refer to each other, which only the garbage collector frees.

    With a checkpoint after each update it would soon look through the whole process, and hold up all of its threads meanwhile.
    """
    inner = f"{line} "
    if value and isinstance(value, dict):
        entries = (f"{json.dumps(name)}: {_text(entry, inner)}" for name, entry in value.items())
        return f"{{{inner}{f',{inner}'.join(entries)}{line}}}"
    if value and isinstance(value, list | tuple):
        return f"[{inner}{f',{inner}'.join(_text(entry, inner) for entry in value)}{line}]"
    return json.dumps(value)


def damaged(file: Path, expected: str, got: str, *, text: str = "") -> CheckpointCorrupt:
    """The error for a file that is not what it should be; ``text`` replaces the sentence."""
    return CheckpointCorrupt(
        text or f"{file} is damaged: expected {expected}, found {got}",
        hint="use another checkpoint, or a copy of this one",
        file=str(file),
        expected=expected,
        got=got,
    )


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _sync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders, and need not: their server does when a name changes.
        if not (error.errno in (errno.EINVAL, errno.ENOTSUP) and path.is_dir()):
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    import fcntl

    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the bytes in the drive's own memory
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, for its owner only, and sync it. Its folder is not synced."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        _sync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Give a file new content at once: whoever reads it sees the old or the new bytes, also after a power cut."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_new(temporary, data)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def free_bytes(folder: Path) -> int | None:
    """What this user may still write there; None when the file system does not say."""
    total, _, free = shutil.disk_usage(folder)
    return free if total else None


@contextlib.contextmanager
def explained(folder: Path, doing: str, *, need: int = 0) -> Iterator[None]:
    """Turn what the operating system says into a sentence.

    Args:
        folder: Where it happens.
        doing: What is done, as ``"write a checkpoint in"``.
        need: Bytes that shall be written, for the sentence about a full disk.

    Raises:
        CheckpointError: In place of any OSError that is not ours, with its ``errno``.
    """
    try:
        yield
    except DDLFError:
        raise
    except OSError as error:
        raise in_words(error, folder, doing, need=need) from error


def in_words(error: OSError, folder: Path, doing: str, *, need: int = 0) -> CheckpointError:
    """The sentence for an error of the operating system; see ``explained``."""
    what, hint = f"cannot {doing} {folder}: {error.strerror or error}", ""
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            return no_space(folder, need)
        what, hint = f"no space in {folder}", "free some, or use another folder"
    elif error.errno == errno.EDQUOT:
        what, hint = (
            f"no space: need {size(need)}, but the quota in {folder} is used up",
            "free some, or use another folder",
        )
    elif error.errno == errno.EFBIG:
        what, hint = f"no space: need {size(need)} in {folder}, more than a file may have here", "see ulimit -f"
    elif error.errno == errno.EROFS:
        hint = "use another folder"
    elif error.errno in (errno.EACCES, errno.EPERM):
        what, hint = f"{what} for uid {os.geteuid()}", "change its owner or mode, or use another folder"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST) and not folder.is_dir():
        what, hint = f"cannot {doing} {folder}: it or one above it is a file, not a folder", "name a folder"
    elif error.errno == errno.ESTALE:
        hint = "the network file system lost it; mount it again"
    result = CheckpointError(what, hint=hint)
    result.errno = error.errno
    return result


def no_space(folder: Path, need: int) -> CheckpointError:
    """The error for a full disk."""
    free = free_bytes(folder)
    facts = [f"need {size(need)}"] * bool(need) + [f"free {size(free or 0)}"] * (free is not None)
    error = CheckpointError(
        f"no space: {', '.join(facts)} in {folder}",
        hint="free some, or use another folder; what was saved before is whole",
    )
    error.errno = errno.ENOSPC
    return error
