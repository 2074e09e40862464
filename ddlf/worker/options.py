"""How a worker is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddlf.rpc.frame import MAX_BODY_BYTES
from ddlf.rpc.tls import Security


@dataclass(slots=True)
class Options:
    """How a worker is started.

    Args:
        host: Address to listen on.
        port: 0 for any free one.
        tokens: Accepted ones, the one to prove with first.
        state_dir: Folder for what survives the daemon, and for the executor's log; None if nothing is to survive it.
        security: Certificates, and whether to encrypt nothing; None on loopback, where nothing needs to be encrypted.
        max_message_bytes: The largest message body accepted.
        shows_prints: Whether what user code prints goes to this process's standard output; else it goes to the executor's log.
        advertise: Host and port at which other workers reach this one; port 0 is its own, None what it finds out itself.
        template_fd: Socket of a template that others have, too; None for one of its own, when a master wants something preloaded.
    """

    host: str
    port: int
    tokens: tuple[bytes, ...] = field(repr=False)
    state_dir: Path | None
    security: Security | None = None
    max_message_bytes: int = MAX_BODY_BYTES
    shows_prints: bool = True
    advertise: tuple[str, int] | None = None
    template_fd: int | None = None
