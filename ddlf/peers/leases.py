"""The leases of peers: who is connected, and when the server has last heard each peer. Runs on the server's event loop.

A peer is gone when its lease runs out: the ledger decides it from the times in ``last_signs``. A byte of the peer, an answer
to a ping and a byte that has reached it are signs of life. A peer that waits for the server is alive. Time in which the
server itself was held up counts for nobody. Nothing here writes an entry or awaits one, so leases continue on a slow disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from ddlf.peers import clock
from ddlf.peers.ledger import WeightLedger
from ddlf.peers.peer_connection import PeerConnection
from ddlf.peers.quotas import reading_s

PING_S = 2.5
"""Seconds between two pings of a peer."""


class Leases:
    """Knows the connections and signs of life of all peers.

    Args:
        ledger: The ledger, which says who is present and how long a lease is. It is only read.
        say: Prints a line.

    Attributes:
        connections: The newest connection of each connected peer.
        last_signs: Time of the last sign of life of each peer, as far as it was noted.
    """

    def __init__(self, ledger: WeightLedger, say: Callable[[str], None]) -> None:
        self.connections: dict[int, PeerConnection] = {}
        self.last_signs: dict[int, float] = {}
        self._returning: set[int] = set()  # peers of an earlier server, which have not come back yet
        self._ledger, self._say = ledger, say

    def recall(self, now: float) -> None:
        """Give each peer that is present in a journal, but not connected, one lease to come back."""
        self.last_signs = dict.fromkeys(self._ledger.present, now)
        self._returning = set(self.last_signs)

    def note(self, peer: int) -> None:
        """Note a sign of life of a peer."""
        self.last_signs[peer] = clock.now()

    def connect(self, peer: int, connection: PeerConnection) -> None:
        """Take the newest connection of a peer that the ledger has admitted."""
        self.connections[peer] = connection
        self._returning.discard(peer)

    def disconnect(self, peer: int, connection: PeerConnection) -> None:
        """Forget a connection, unless the peer has a newer one."""
        if self.connections.get(peer) is connection:
            del self.connections[peer]

    def heard(self) -> dict[int, float]:
        """Return the time of the last sign of life of each peer."""
        return self.last_signs | {peer: self.heard_from(peer, line) for peer, line in self.connections.items()}

    def heard_from(self, peer: int, connection: PeerConnection) -> float:
        """Return the time of the last sign of life of a connected peer."""
        socket = connection.socket
        if connection.is_working or connection.is_resting or socket.waits_for_turn:
            return clock.now()
        if clock.now() - socket.heard_at > PING_S:
            socket.note_acknowledged()
        return max(self.last_signs.get(peer, 0.0), socket.heard_at)

    async def watch(self, peer: int, connection: PeerConnection) -> None:
        """Ping a peer, and end its connection if it does not answer within its lease. A task of each connection."""
        while True:
            await asyncio.sleep(PING_S)
            try:
                async with asyncio.timeout(self._ledger.members[peer].lease_s):
                    await (await connection.socket.ping())
            except TimeoutError:
                if clock.now() - self.heard_from(peer, connection) > self._ledger.members[peer].lease_s:
                    connection.socket.transport.abort()
                    return
                continue  # the answer to the ping follows its message
            self.note(peer)

    def extend(self, late_s: float, now: float) -> None:
        """Add the time in which the server itself was held up, so that it could hear nobody, to all leases and limits."""
        for peer, at in self.last_signs.items():
            self.last_signs[peer] = min(at + late_s, now)
        for connection in self.connections.values():
            connection.socket.heard_at = min(connection.socket.heard_at + late_s, now)
            connection.read_by += late_s

    def cut_expired(self, peer: int) -> None:
        """End the connection of a peer that has lost its lease. A peer that was only held up notices, and comes back."""
        connection = self.connections.get(peer)
        if connection is not None and not self._ledger.members[peer].present:
            connection.socket.transport.abort()

    def cut_slow_readers(self, now: float) -> None:
        """End the connections of peers that read their answers too slowly."""
        for peer, connection in self.connections.items():
            if now > connection.read_by:
                size = connection.reading_bytes
                self._say(
                    f"cut       {self._ledger.label(peer)}: it has not read {size:,} bytes in {reading_s(size):.0f} s"
                )
                connection.read_by = inf
                connection.socket.transport.abort()

    def waits_for_peers(self, now: float) -> bool:
        """Return whether peers of an earlier server are about to come back. Only connected peers get the last set."""
        return any(now - self.last_signs[peer] <= self._ledger.members[peer].lease_s for peer in self._returning)
