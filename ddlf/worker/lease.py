"""One master at a time: who holds a worker, and since which change of hands. Pure; runs in the daemon.

The rules:
    1. A free worker is anybody's. A held one is refused to others, unless they take it over or its holder has fallen silent.
    2. Every grant has a higher epoch than the one before, also if a restarted daemon has forgotten what it granted: masters say what they had.
    3. A master that had the worker may come back as long as nobody else had it meanwhile; else it is refused, also if the worker is free
       again: it decides about a state that is no longer its own.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from ddlf.errors import LeaseError

MASTER_ID_BYTES = 16
_EPOCH = struct.Struct("<Q")


def peer_pass(key: bytes, run: str, executor: str) -> bytes:
    """What another worker shows to be allowed to call this one in a run: made by the master, and checked here, of the lease's key.

    So it is worth as much as the lease, and who has it cannot act as the master.

    Args:
        key: Of the called worker's lease.
        run: Name of the run.
        executor: The caller's, as it names itself.
    """
    return hmac.digest(key, f"ddlf peer {run} {executor}".encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Holder:
    """A master that has or wants a worker.

    Args:
        master_id: Random bytes that it chose; the same when it comes back.
        who: For people, as ``"anna@pc7 pid 41"``.
        job: What it runs, for people; may be empty.
        since: Time of day of its claim, for people.
    """

    master_id: bytes
    who: str
    job: str = ""
    since: str = ""

    def __str__(self) -> str:
        return f"{self.who} ({self.job})" if self.job else self.who


class Lease:
    """The lease of one worker.

    Attributes:
        epoch: Epoch of the last grant; 0 before the first.
        holder: Who has it; None when it is free.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.holder: Holder | None = None
        self._last: Holder | None = None

    @property
    def key(self) -> bytes:
        """What a data connection must show: master's id and epoch; empty while the worker is free."""
        return self.holder.master_id + _EPOCH.pack(self.epoch) if self.holder else b""

    def claim(self, master: Holder, known_epoch: int = 0, *, takeover: bool = False, silent: bool = False) -> int:
        """Give the worker to a master.

        Args:
            master: Who wants it.
            known_epoch: Known epoch of the grant that it had before; 0 if it had none.
            takeover: Whether to take it from a holder that lives.
            silent: Whether the holder has fallen silent.

        Returns:
            The epoch of the grant.

        Raises:
            LeaseError: It is held by another, or was taken over by another.
        """
        last = self._last
        if known_epoch and last is not None and last.master_id != master.master_id and self.epoch >= known_epoch:
            raise LeaseError(
                f"was taken over by {last} at {last.since}, epoch {self.epoch} > {known_epoch}",
                hint="end this run, or close the cluster and connect again",
            )
        holder = self.holder
        if holder is not None and holder.master_id != master.master_id and not (takeover or silent):
            raise LeaseError(
                f"leased by {holder} since {holder.since}", hint="wait for it with --wait, or take it with --takeover"
            )
        self.holder = self._last = master
        self.epoch = max(self.epoch, known_epoch) + 1
        return self.epoch

    def release(self) -> None:
        """The holder has left."""
        self.holder = None
