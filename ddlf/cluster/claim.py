"""A master's claim to a worker: who it is, and the lease that the worker's daemon gave it. Runs on the master."""

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
    """What one master shows to one worker.

    Args:
        guest: Ask without having the worker.
        takeover: Take it from another master that has it.

    Attributes:
        epoch: Epoch of the lease; 0 without one.
    """

    def __init__(self, *, guest: bool, takeover: bool) -> None:
        self.guest = guest
        self.takeover = takeover
        self.renew()

    def renew(self) -> None:
        """Be a new master, without a lease."""
        self.master_id = secrets.token_bytes(16)
        self.epoch = 0

    def request(self, first_id: int, timing: Timing) -> Request:
        """Take the worker, and say which requests are this side's: when it is gone, however that comes, the daemon ends what runs of them."""
        claim = Request("claim", first_id)
        if not self.guest:
            claim.kwargs = dict(
                session=self.master_id,
                epoch=self.epoch,
                takeover=self.takeover and self.epoch == 0,  # once: who was replaced does not fight back
                who=master_name(),
                job=program_name(),
                heartbeat_s=timing.heartbeat_s,
                dead_after_s=timing.dead_after_s,
            )
        return claim

    @property
    def key(self) -> dict[str, Any]:
        """What an executor is shown."""
        return {"guest": True} if self.guest else {"lease": self.master_id + self.epoch.to_bytes(8, "little")}


def master_name() -> str:
    """This process, as people on other machines know it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    return f"{user}@{platform.node()} pid {os.getpid()}"


def program_name() -> str:
    """What this process runs, as its command line says: the app's file, or the script."""
    words = [word for word in sys.argv[:3] if word.endswith(".py")] or sys.argv[:1]
    return Path(words[-1]).name[:60] if words else ""
