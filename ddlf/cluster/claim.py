"""A master's claim to a worker: the master's id, and the lease from the worker's daemon. Runs on the master."""

from __future__ import annotations

import getpass
import os
import platform
import secrets
import sys
from pathlib import Path
from typing import Any

from ddlf.rpc.liveness import Timing
from ddlf.rpc.messages import Request


class Claim:
    """The proof of identity that one master shows to one worker.

    Args:
        guest: Use the worker without a lease.
        takeover: Take the lease from another master that has it.

    Attributes:
        epoch: Epoch of the lease; 0 without a lease.
    """

    def __init__(self, *, guest: bool, takeover: bool) -> None:
        self.guest = guest
        self.takeover = takeover
        self.renew()

    def renew(self) -> None:
        """Become a new master, without a lease."""
        self.master_id = secrets.token_bytes(16)
        self.epoch = 0

    def request(self, first_id: int, timing: Timing) -> Request:
        """Return the request that claims the worker.

        ``first_id`` says which requests belong to this master. When the master disappears, for whatever reason, the
        daemon ends the calls of these requests.
        """
        claim = Request("claim", first_id)
        if not self.guest:
            claim.kwargs = dict(
                session=self.master_id,
                epoch=self.epoch,
                takeover=self.takeover and self.epoch == 0,  # once: a replaced master does not take the lease back
                who=master_name(),
                job=program_name(),
                heartbeat_s=timing.heartbeat_s,
                dead_after_s=timing.dead_after_s,
            )
        return claim

    @property
    def key(self) -> dict[str, Any]:
        """Return the keyword arguments that prove this claim to an executor."""
        return {"guest": True} if self.guest else {"lease": self.master_id + self.epoch.to_bytes(8, "little")}


def master_name() -> str:
    """Return the name of this process for people on other machines: user, machine and process id."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the container has no name for its user
        user = str(os.getuid())
    return f"{user}@{platform.node()} pid {os.getpid()}"


def program_name() -> str:
    """Return the name of the app's file or of the script, from the command line."""
    words = [word for word in sys.argv[:3] if word.endswith(".py")] or sys.argv[:1]
    return Path(words[-1]).name[:60] if words else ""
