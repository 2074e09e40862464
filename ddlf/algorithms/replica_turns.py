"""Whose turn it is, of the replicas that share a worker: drawn at random. Runs on workers; pure.

In strict turns the staleness of every push would be the number of the other replicas, which is the worst order there
is: fixed rates that are stable in a random order diverge, and so does Adagrad (parameter servers with 16 replicas on
MNIST: 88% in random order, 13% in turns).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def turns(steps: Sequence[int], length: int, chance: np.random.Generator, *, alone: int = 0) -> list[int]:
    """Which replica makes each step.

    Args:
        steps: How many each of them makes.
        length: Steps of a turn; a replica's last turn may be shorter.
        chance: Draws one of the replicas with remaining steps, for each turn.
        alone: Steps that the first one makes before the others begin.

    Returns:
        Number of the replica, for each step of all. The last step is the last replica's: only its last batch may be
        smaller than the others.
    """
    left = list(steps)
    drawn = [0] * min(alone, left[0])
    left[0] -= len(drawn)
    while going := [replica for replica, count in enumerate(left) if count]:
        replica = going[int(chance.integers(len(going)))]
        count = min(length, left[replica])
        drawn += [replica] * count
        left[replica] -= count
    last = len(steps) - 1
    if steps[last]:
        place = len(drawn) - drawn[::-1].index(last) - 1
        drawn.append(drawn.pop(place))
    return drawn
