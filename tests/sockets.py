"""Two connected ends inside one process, without a port."""

from __future__ import annotations

import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected non-blocking sockets. The code for TCP sockets can read and write them."""
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return left, right
