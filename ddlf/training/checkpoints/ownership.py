"""One writer for each folder. Runs on the master.

``owner.json`` in the folder names the session that may write there, with an epoch that grows with every owner and never goes back. Whoever changes
the folder holds the lock meanwhile and looks first whether the name is still its own: a master that was stopped, lost the folder to another one and
wakes up is refused then, however late. The lock is held for moments only; what says that an owner lives is its process.

Rules:
    An owner that closed the folder, or whose process on this machine is gone, is replaced without a word.
    One that lives is not, and neither is one on another machine, where nobody can see from here: that needs ``takeover``.
    A process is the same when number, start and boot are: numbers come again.
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
"""The lock is held for as long as a rename and the removal of old files take."""


class Owner(BaseModel):
    """Who may write into the folder, or the last one who could.

    Args:
        session: Random, new for every opening.
        epoch: From 1, one more than that of the owner before.
        holder: What the owner calls itself, for people.
        host: Name of its machine.
        pid: Number of its process.
        started: When that process started, in clock ticks since the boot; None where the system does not tell.
        boot: Random name of the boot of its machine; None where the system does not tell.
        closed: Whether it has ended its work here.
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
        """For messages: ``"pid 41 on pc7 (ddlf run app.py)"``."""
        return f"pid {self.pid} on {self.host}" + (f" ({self.holder})" if self.holder else "")

    def may_live(self) -> bool:
        """Whether the owner can still be there; True when it cannot be known from here."""
        if self.closed:
            return False
        if self.host != this_host():
            return True
        if self.boot != boot():
            return False  # this machine was started again since
        return is_running(self.pid) and self.started == started(self.pid)


class Ownership:
    """The right to write into a folder.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / OWNER
        self.mine: Owner | None = None

    def claim(self, holder: str, *, takeover: bool = False, epoch_above: Callable[[], int] = lambda: 0) -> Owner:
        """Become the owner.

        Args:
            holder: What to call this session, for people.
            takeover: Also when another owner lives, or cannot be seen from here.
            epoch_above: Gives the highest epoch that is known otherwise, should ``owner.json`` be lost.

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
                seen = "" if before.host == this_host() else f", as far as can be seen from {this_host()}"
                raise LeaseError(
                    f"folder {self.folder} is in use by {before.where()}{seen}",
                    hint="end that job, use another folder, or take this one over with --takeover",
                )
            self.mine = Owner(
                session=secrets.token_hex(16),
                epoch=1 + (before.epoch if before is not None else epoch_above()),
                holder=holder,
                host=this_host(),
                pid=os.getpid(),
                started=started(os.getpid()),
                boot=boot(),
            )
            self._write(self.mine)
        return self.mine

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else changes the folder, or takes it over, inside of this.

        Raises:
            LeaseError: The folder has another owner.
        """
        with self._lock():
            self.check()
            yield

    def check(self) -> None:
        """See that the folder is still ours. Without ``held``, that can change at once.

        Raises:
            LeaseError: It has another owner.
        """
        if self.mine is None:
            raise LeaseError(f"folder {self.folder} was not opened for writing; nothing was written")
        now = self.read()
        if now is None:
            raise LeaseError(f"{self.file} was removed while this job wrote there; nothing was written")
        if now.session != self.mine.session:
            raise LeaseError(
                f"the job was taken over by {now.where()}, epoch {now.epoch} > {self.mine.epoch}; nothing was written"
            )

    def release(self) -> None:
        """Let the next one have it at once. Does nothing when the folder is not, or no longer, ours."""
        if self.mine is None:
            return
        with contextlib.suppress(LeaseError), self.held():
            self._write(self.mine.model_copy(update={"closed": True}))
        self.mine = None

    def read(self) -> Owner | None:
        """Who owns the folder now, or did last.

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
                who = self.read()
                raise LeaseError(
                    f"folder {self.folder} has been locked for {LOCK_WAIT_S:g} s"
                    + (f" by {who.where()}" if who else ""),
                    hint="end that process if it is stopped, or use another folder",
                ) from None
            raise LeaseError(f"folder {self.folder} has been locked for {LOCK_WAIT_S:g} s") from None
        try:
            yield
        finally:
            lock.release()


def this_host() -> str:
    """Name of this machine."""
    return os.uname().nodename


def boot() -> str | None:
    """Random name that this machine got when it started; None where there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def started(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the boot; None where that cannot be known."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_running(pid: int) -> bool:
    """Whether a process of this number runs on this machine. One that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, so it runs
    fields = _stat(pid)
    return not fields or fields[0] not in ("Z", "X")


def _stat(pid: int) -> list[str]:
    """``/proc/PID/stat`` from the state on: what is before, the program's name, may hold anything."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
