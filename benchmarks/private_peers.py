"""Several Python peers in one process, which take turns with one Keras model. ``benchmarks.private_accuracy`` starts it.

    python -m benchmarks.private_peers LINK=FILE LINK=FILE .. --updates 100

Each peer has its own connection, thread and data, and leaves after this number of batches. One model for all compiles
once. Plain SGD has no state that a peer would have to take along.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.peers.link import Offer
from ddlf.peers.model import Trained, trained_from_text
from ddlf.peers.peer import Peer

TURN = threading.Lock()
"""The lock of the model: one peer at a time uses it."""
MODELS: list[Any] = []
"""The model of this process, after the first peer has built it."""


class Turns(Trained):
    """A training whose model other peers of the process use, too.

    Args:
        model: The model of the process.
        data: The data of this peer.
        seed: Seed of the order of samples.
    """

    def __init__(self, model: Any, data: Mapping[str, Any], seed: int) -> None:
        super().__init__(model, data, seed)
        self._own_weights = super().weights()

    def batch(self, size: int) -> None:
        """Train one batch with the weights of this peer."""
        with TURN:
            super().assign(self._own_weights)
            super().batch(size)
            self._own_weights = super().weights()

    def weights(self) -> Weights:
        """Return the weights of this peer."""
        return list(self._own_weights)

    def assign(self, weights: Weights) -> None:
        """Replace the weights of this peer."""
        self._own_weights = [np.array(array) for array in weights]


def peer_of(link: str, file: str, seed: int) -> Peer:
    """Return a peer that trains the server's model on the samples of a file."""
    with np.load(file) as archive:
        arrays = dict(archive)

    def make(offer: Offer) -> Trained:
        with TURN:
            first = trained_from_text(offer.model, arrays, file, lambda line: None, seed)
            if not MODELS:
                MODELS.append(first.model)
            return Turns(MODELS[0], first.data, seed)

    return Peer(link, make, say=lambda line: None)


def main() -> None:
    """Run the peers until all have left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", help="link and file of each peer")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    peers = [peer_of(*text.rsplit("=", 1), options.seed + number) for number, text in enumerate(options.peers)]
    with ThreadPoolExecutor(len(peers)) as threads:
        for left in [threads.submit(peer.run, most_updates=options.updates) for peer in peers]:
            left.result()


if __name__ == "__main__":
    main()
