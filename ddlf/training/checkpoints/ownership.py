"""Ensures that a folder has only one writer. Runs on the master.

``owner.json`` in the folder names the session that may write there, and its term (``epoch``), which grows with every
owner. To change the folder, a session holds the lock and first checks that the file still names it. So a stopped master
that lost the folder is refused when it wakes up, however late. The lock is held for moments only: an owner is alive if
its process is.

Rules:
    An owner that closed the folder, or whose process on this machine has ended, is replaced silently.
    An owner that is alive is replaced only with ``takeover``. The same holds for an owner on another machine, because
    this machine cannot see its process. Two processes are the same if their number, start time and boot are equal. The
    system reuses numbers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ddlf.errors import CheckpointCorrupt, LeaseError
from ddlf.training.checkpoints.durable import OWNER, damaged, replace, seal, unseal

LOCK_WAIT_S = 10.0
"""How long to wait for the lock, which is held during a rename and the removal of old files."""


class Owner(BaseModel):
    """The session that owns a folder of checkpoints and may write there, or the last one that did.

    Args:
        session: Random name, new for every opening.
        epoch: Term, from 1; one more than the previous owner's.
        holder: Name of the owner, for people.
        host: Name of its machine.
        pid: Number of its process.
        started: Start time of that process, in clock ticks since the boot; None if the system does not report it.
        boot: Random name of its machine's boot; None if the system does not report it.
        closed: Whether it has closed the folder.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    session: str
    epoch: int
    holder: str
    host: str
    pid: int
    started: int | None
    boot: str | None
    closed: bool = False

    def where(self) -> str:
        """Return process, machine and name of the owner for messages: ``"pid 41 on pc7 (ddlf run app.py)"``."""
        return f"pid {self.pid} on {self.host}" + (f" ({self.holder})" if self.holder else "")

    def may_live(self) -> bool:
        """Return whether the owner's process may still run; True if this machine cannot know."""
        if self.closed:
            return False
        if self.host != this_host():
            return True
        if self.boot != boot():
            return False  # this machine has been restarted since
        return is_running(self.pid) and self.started == started(self.pid)


class Ownership:
    """This session's right to write into a folder of checkpoints.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / OWNER
        self.own_entry: Owner | None = None

    def claim(self, holder: str, *, takeover: bool = False, epoch_above: Callable[[], int] = lambda: 0) -> Owner:
        """Become the owner of the folder, which alone may write there.

        Args:
            holder: Name of this session, for people.
            takeover: Also replace an owner that is alive, or on another machine.
            epoch_above: Returns the highest known term, in case ``owner.json`` is lost.

        Raises:
            LeaseError: The folder is in use.
            CheckpointCorrupt: ``owner.json`` is damaged and ``takeover`` is not set.
        """
        with self._lock():
            try:
                before = self.read()
            except CheckpointCorrupt as error:
                if not takeover:
                    error.hint = "make sure that nobody uses the folder, then take it over with --takeover"
                    raise
                before = None
            if before is not None and not takeover and before.may_live():
                as_seen = "" if before.host == this_host() else f", as far as can be seen from {this_host()}"
                raise LeaseError(
                    f"folder {self.folder} is in use by {before.where()}{as_seen}",
                    hint="end that job, use another folder, or take this one over with --takeover",
                )
            self.own_entry = Owner(
                session=secrets.token_hex(16),
                epoch=1 + (before.epoch if before is not None else epoch_above()),
                holder=holder,
                host=this_host(),
                pid=os.getpid(),
                started=started(os.getpid()),
                boot=boot(),
            )
            self._write(self.own_entry)
        return self.own_entry

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder's lock, so that no other session changes the folder or takes it over meanwhile.

        Raises:
            LeaseError: The folder has another owner.
        """
        with self._lock():
            self.check()
            yield

    def check(self) -> None:
        """Check that this session still owns the folder.

        Without the lock of ``exclusive``, the owner can change at any time.

        Raises:
            LeaseError: The folder has another owner.
        """
        if self.own_entry is None:
            raise LeaseError(f"folder {self.folder} was not opened for writing, so no file was written")
        now = self.read()
        if now is None:
            raise LeaseError(f"{self.file} was removed while this job wrote there, so no further file was written")
        if now.session != self.own_entry.session:
            raise LeaseError(
                f"the job was taken over by {now.where()}, epoch {now.epoch} > {self.own_entry.epoch}; nothing was written"
            )

    def release(self) -> None:
        """Give the folder up, so that another session can own it. Do nothing if this session does not own it."""
        if self.own_entry is None:
            return
        with contextlib.suppress(LeaseError), self.exclusive():
            self._write(self.own_entry.model_copy(update={"closed": True}))
        self.own_entry = None

    def read(self) -> Owner | None:
        """Return the current or last owner of the folder; None if there was none.

        Raises:
            CheckpointCorrupt: ``owner.json`` is damaged.
        """
        try:
            content = unseal(self.file.read_bytes(), self.file)
        except FileNotFoundError:
            return None
        try:
            return Owner.model_validate(content)
        except ValidationError as error:
            raise damaged(self.file, "the entries of an owner", str(error.errors()[0]["msg"])) from error

    def _write(self, owner: Owner) -> None:
        replace(self.file, seal(owner.model_dump()))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        import filelock

        lock = filelock.FileLock(self.folder / ".lock", timeout=LOCK_WAIT_S, mode=0o600)
        try:
            lock.acquire()
        except filelock.Timeout:
            with contextlib.suppress(CheckpointCorrupt):
                owner = self.read()
                raise LeaseError(
                    f"folder {self.folder} has been locked for {LOCK_WAIT_S:g} s"
                    + (f" by {owner.where()}" if owner else ""),
                    hint="end that process if it is suspended, or use another folder",
                ) from None
            raise LeaseError(f"folder {self.folder} has been locked for {LOCK_WAIT_S:g} s") from None
        try:
            yield
        finally:
            lock.release()


def this_host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def boot() -> str | None:
    """Return the random name of this machine's current boot, which changes with each restart; None if there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def started(pid: int) -> int | None:
    """Return the start time of a process of this machine, in clock ticks since the boot; None if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int) -> bool:
    """Return whether a process runs on this machine. A zombie process does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process runs, and belongs to another user
    fields = _stat(pid)
    return not fields or fields[0] not in ("Z", "X")


def _stat(pid: int) -> list[str]:
    """Return the content of ``/proc/PID/stat`` from the process state on.

    The process name before it may have any characters.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
