"""Gives a worker to one master at a time, and numbers the grants. Pure; runs in the daemon.

The rules:

    1. Any master may get a free worker. If a worker has a holder, other masters are refused, unless they take it over
       or the holder has fallen silent.
    2. Every grant has a higher epoch than the one before. This holds even if a restarted daemon has forgotten its
       grants, because masters send their last epoch.
    3. A master that had the worker may come back if no other master has had it meanwhile. Otherwise it is refused, even
       if the worker is free again, because the worker's state is no longer its own.
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
    """Return the pass that lets another worker of a run call this worker. The master makes it, and this worker
    checks it.

    It is computed from the lease's key, so it is as hard to forge as the lease. Its owner cannot act as the master.

    Args:
        key: Key of the called worker's lease.
        run: Name of the run.
        executor: Name of the calling worker's executor.
    """
    return hmac.digest(key, f"ddlf peer {run} {executor}".encode(), hashlib.sha256)


def offer_number(shown: bytes) -> int:
    """Return the number of the connections that a called worker opens to its caller, because the caller cannot dial it.
    The caller accepts no connection with another number.

    Args:
        shown: The caller's pass for this worker.
    """
    return int.from_bytes(hashlib.sha256(b"ddlf offer" + shown).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class Holder:
    """A master that has or wants a worker.

    Args:
        master_id: Random bytes that the master chose. They stay the same when it comes back.
        name: Its name for people, such as ``"anna@pc7 pid 41"``.
        job: Its job, for people; may be empty.
        since: Time of day of its claim, for people.
    """

    master_id: bytes
    name: str
    job: str = ""
    since: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.job})" if self.job else self.name


class Lease:
    """The lease of one worker: which master may use it at present.

    Attributes:
        epoch: Epoch of the last grant; 0 before the first.
        holder: The master that has the worker; None if it is free.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.holder: Holder | None = None
        self._last: Holder | None = None

    @property
    def key(self) -> bytes:
        """The bytes that a data connection must send: the master's id and the epoch. Empty while the worker is free."""
        return self.holder.master_id + _EPOCH.pack(self.epoch) if self.holder else b""

    def claim(self, master: Holder, known_epoch: int = 0, *, takeover: bool = False, silent: bool = False) -> int:
        """Give the lease of the worker to a master.

        Args:
            master: The master that wants the worker.
            known_epoch: Epoch of its previous grant; 0 if it had none.
            takeover: Whether to take the worker from a living holder.
            silent: Whether the holder has fallen silent.

        Returns:
            The epoch of the grant.

        Raises:
            LeaseError: Another master has the worker, or has taken it over.
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
        """Free the worker, because the holder has left."""
        self.holder = None
