"""The options of a worker at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddlf.rpc.messages import MAX_BODY_BYTES
from ddlf.rpc.tls import Security
from ddlf.worker.assignment import NO_WISH, CardWish
from ddlf.worker.joining import Join


@dataclass(slots=True)
class Options:
    """The options of a worker at its start, from the command line or from a launcher.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free port, None to listen nowhere.
        tokens: Accepted tokens. The first one proves this side's identity.
        state_dir: Folder for state that survives the daemon, and for the executor's log; None to keep no state.
        security: Certificates, and whether to encrypt nothing; None on loopback, where no encryption is needed.
        max_message_bytes: The largest message body accepted.
        shows_prints: Whether the output of user code goes to this process's standard output. Otherwise it goes to a
            file.
        shows_native: Whether native code's standard output goes to this process's standard output. Otherwise it goes to
            the executor's log.
        advertise: Host and port of this worker for other workers. Port 0 means its own port, None means the
            addresses that it finds itself.
        template_fd: Socket of a template that workers share. With None this worker starts its own when a master wants a
            preload.
        join: How to join masters; None to wait for masters that dial.
        gpus: The cards that the user wants for this worker.
    """

    host: str
    port: int | None
    tokens: tuple[bytes, ...] = field(repr=False)
    state_dir: Path | None
    security: Security | None = None
    max_message_bytes: int = MAX_BODY_BYTES
    shows_prints: bool = True
    shows_native: bool = True
    advertise: tuple[str, int] | None = None
    template_fd: int | None = None
    join: Join | None = None
    gpus: CardWish = NO_WISH


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """The options that a daemon sends to its executor at the start, as JSON.

    Args:
        name: Name of the process.
        tokens: Accepted tokens. The first one proves this side's identity.
        session_dir: Folder for methods that live as long as the daemon.
        persist_dir: Folder for methods that survive the daemon.
        max_message_bytes: The largest message body accepted.
        prints: File for the output of user code.
        shows_prints: Whether standard output of user code goes to the worker's terminal instead.
        certificate: File of the worker's own certificate; None without encryption.
        tls_ca: File of the organisation's authority, or None.
        tls_cert: File of the organisation's certificate, or None.
        tls_key: File of its key, or None.
        insecure_plaintext: Whether the user switched encryption off.
    """

    name: str
    tokens: tuple[str, ...] = field(repr=False)
    session_dir: str
    persist_dir: str
    max_message_bytes: int
    prints: str
    shows_prints: bool
    certificate: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    insecure_plaintext: bool

    def to_bytes(self) -> bytes:
        """Encode these options as the message that the daemon sends to its executor."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> ExecutorOptions:
        """Decode the options in the daemon's message."""
        return cls(**json.loads(message))
