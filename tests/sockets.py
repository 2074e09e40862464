"""Two connected ends inside one process, without a port."""

from __future__ import annotations

import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected non-blocking sockets; the same code reads and writes them as reads and writes TCP."""
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right
