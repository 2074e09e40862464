"""The listening socket of a server of peers. It closes new connections of an address beyond its quota.

A closed connection costs the server no TLS handshake, no task and no object of a connection. The event loop of Windows
accepts connections without this method, so the quota has no effect there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

MOST_AT_ONCE = 1_000
"""Connections that are closed before the event loop does something else."""


class Door(socket.socket):
    """Takes over a listening socket.

    Args:
        sock: The socket. It is closed for its owner.
        is_full: Returns whether an address has used up its quota of new connections, and uses it otherwise.
    """

    def __init__(self, sock: socket.socket, is_full: Callable[[str], bool]) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self._is_full = is_full

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a new connection and its address."""
        for _ in range(MOST_AT_ONCE):
            connection, address = super().accept()
            if not self._is_full(address[0]):
                return connection, address
            connection.close()
        raise BlockingIOError
