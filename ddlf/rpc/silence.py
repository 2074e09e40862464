"""Lets the kernel end a connection to a lost machine. Runs on both sides, in addition to heartbeats.

The kernel notices missing acknowledgements, which a process cannot see. It does not notice a stopped process, whose
kernel continues to acknowledge. Use it only for connections that the other side always reads, because a full buffer
also counts as silence.
"""

from __future__ import annotations

import contextlib
import socket

PROBES = 2


def end_when_silent(sock: socket.socket, dead_after_s: float) -> None:
    """Reset the connection if no data was acknowledged for ``dead_after_s`` seconds, where the system supports it."""
    options = {
        "TCP_USER_TIMEOUT": round(dead_after_s * 1000),  # Linux: sent data that is not acknowledged
        "TCP_KEEPIDLE": max(1, round(dead_after_s / 2)),  # an idle connection; macOS calls it TCP_KEEPALIVE
        "TCP_KEEPALIVE": max(1, round(dead_after_s / 2)),
        "TCP_KEEPINTVL": max(1, round(dead_after_s / 2 / PROBES)),
        "TCP_KEEPCNT": PROBES,
    }
    with contextlib.suppress(OSError):  # not a TCP socket, or already closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
