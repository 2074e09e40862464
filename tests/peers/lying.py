"""A peer in Python that lies: ``python tests/peers/lying.py LINK FILE``.

It trains on its data as usual, but multiplies its posted updates by ``FIRST``, and after ``POSTS`` posts by ``LATER``.
"""

from __future__ import annotations

import sys
from typing import Any

from ddlf.algorithms.weights import Weights
from ddlf.peers.joining import peer_of_data
from ddlf.peers.peer import Peer

FIRST, LATER, POSTS = -30.0, 1000.0, 10
"""A training of a third to three times the usual length becomes 10 to 100 times as long, and later over 100 times."""


class Liar(Peer):
    """A peer that posts a false update."""

    def _load(self, weights: Weights) -> None:
        super()._load(weights)
        self._begun = self.trained.weights()

    def _hidden(self, weights: Weights) -> Any:
        times = FIRST if self.posts < POSTS else LATER
        lie = [
            (begun + times * (live - begun)).astype(live.dtype)
            for begun, live in zip(self._begun, weights, strict=True)
        ]
        self._begun = weights
        return lie


if __name__ == "__main__":
    link, file = sys.argv[1:]
    honest = peer_of_data(link, file)
    Liar(link, honest._make).run()
