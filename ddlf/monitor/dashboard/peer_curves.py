"""The curves of each peer with private data over the seconds of a run: its batches, and the accuracy of its training.
Runs on the master.

A curve has gaps while its peer is away. Memory is bounded: a new peer beyond ``MOST_PEERS`` takes the place of the peer
that has been away longest, and gets no curves if all of them are present.
"""

from __future__ import annotations

from ddlf import events as e
from ddlf.monitor.dashboard.series import Series

MOST_PEERS = 200
"""Maximum number of peers with curves."""
MOST_POINTS = 240
"""Maximum number of points of a curve. More points are merged in pairs."""


class PeerCurves:
    """The curves of all peers.

    Attributes:
        series: The curves ``"batches 3"`` and ``"accuracy 3"`` of peer 3, over seconds.
        names: Names of the peers with curves, by number.
    """

    def __init__(self) -> None:
        self.series = Series(MOST_POINTS)
        self.names: dict[int, str] = {}
        self._batches: dict[int, int] = {}
        self._accuracy: dict[int, float] = {}
        self._absent: dict[int, None] = {}  # the longest first
        self._posted: set[int] = set()

    @property
    def count(self) -> int:
        """Number of all peers so far."""
        return len(self._batches)

    def tell(self, event: e.PeerEvent) -> None:
        """Update the curves by an event of a peer."""
        peer = event.peer
        self._batches.setdefault(peer, 0)
        match event:
            case e.PeerArrived():
                self._absent.pop(peer, None)
            case e.PeerPosted():
                self._batches[peer] += event.batches
                self._accuracy[peer] = event.accuracy
                self._posted.add(peer)
            case e.PeerLeft():
                self._absent[peer] = None
        if peer in self.names or len(self.names) < MOST_PEERS or self._removed():
            self.names[peer] = event.name

    def _removed(self) -> bool:
        """Remove the curves of the peer that has been away longest. Return whether there was one."""
        longest = next((peer for peer in self._absent if peer in self.names), None)
        if longest is None:
            return False
        del self.names[longest]
        self.series.drop((f"batches {longest}", f"accuracy {longest}"))
        return True

    def add(self, seconds: float) -> None:
        """Add a point to the curves of all peers that are there, or have posted since the last point."""
        values: dict[str, float] = {}
        for peer in self.names:
            if peer not in self._absent or peer in self._posted:
                values[f"batches {peer}"] = self._batches[peer]
                values[f"accuracy {peer}"] = round(self._accuracy.get(peer, float("nan")), 4)
        self._posted.clear()
        if values:
            self.series.add(round(seconds, 2), values)
