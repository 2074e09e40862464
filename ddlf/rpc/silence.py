"""Let the kernel end a connection whose other side is silently gone. Runs on both sides; the second line behind heartbeats.

The kernel sees what a process does not: that nobody acknowledges. A process that is stopped it does not see, since that one's kernel goes on
acknowledging. Only for connections that the other side always reads: a full buffer counts as silence too.
"""

from __future__ import annotations

import contextlib
import socket

PROBES = 2


def end_when_silent(sock: socket.socket, dead_after_s: float) -> None:
    """Reset the connection when nothing was acknowledged for ``dead_after_s`` seconds, as far as this system can do that."""
    options = {
        "TCP_USER_TIMEOUT": round(dead_after_s * 1000),  # Linux: data that was sent
        "TCP_KEEPIDLE": max(1, round(dead_after_s / 2)),  # an idle connection; macOS calls it TCP_KEEPALIVE
        "TCP_KEEPALIVE": max(1, round(dead_after_s / 2)),
        "TCP_KEEPINTVL": max(1, round(dead_after_s / 2 / PROBES)),
        "TCP_KEEPCNT": PROBES,
    }
    with contextlib.suppress(OSError):  # not a TCP socket, or closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
