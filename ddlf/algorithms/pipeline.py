"""Pipelines of a model that is cut into stages: the order of their work, and where to cut. Pure functions.

A batch is cut into M micro-batches. Each of the s stages computes the forward pass of each micro-batch once, and its
backward pass once, in the order of PipeDream-Flush, also called 1F1B (Narayanan et al. 2021, arXiv:2006.09503)::

    stage i (from 0):  min(M, s - i - 1) forward passes
                       then in turn one forward and one backward pass, until all M forward passes are done
                       then the remaining backward passes; then one step with the sum of the gradients

So stage i keeps the activations of at most s - i micro-batches. With stages of equal cost, a step takes
(M + s - 1) / M of the time that a stage computes, and each stage is idle for (s - 1) / (M + s - 1) of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of a stage over a micro-batch.

    Args:
        forward: Whether it is the forward pass.
        number: Number of the micro-batch, from 0.
    """

    forward: bool
    number: int


def passes(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of a stage over all micro-batches of a batch, in order.

    Args:
        stage: Number of the stage, from 0.
        stages: s, the number of stages.
        micro_batches: M, the number of micro-batches.
    """
    ahead = min(micro_batches, stages - stage - 1)
    for number in range(ahead):
        yield Pass(True, number)
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            yield Pass(True, ahead + number)
        yield Pass(False, number)


def sizes(samples: int, micro_batches: int) -> list[int]:
    """Return the number of samples in each micro-batch of a batch. They differ by at most 1.

    A batch with fewer samples than ``micro_batches`` has one micro-batch for each sample.
    """
    count = min(samples, micro_batches)
    least, remainder = divmod(samples, count)
    return [least + (number < remainder) for number in range(count)]


def balanced(costs: Sequence[int], borders: Sequence[int], parts: int) -> list[int]:
    """Return where to cut a sequence of calls into parts, so that the most expensive part costs as little as possible.

    If several cuts have the same largest cost, the cut with the smallest borders is chosen.

    Args:
        costs: Cost of each call.
        borders: For each call but the last, the cost of a cut behind it.
        parts: The number of parts, at most the number of calls.

    Returns:
        For each part, the index behind its last call.
    """
    total = [0, *accumulate(costs)]
    count = len(costs)
    # best[end]: the largest cost, the sum of the borders, and the ends of the parts before ``end``
    best: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ())] + [None] * count
    for part in range(1, parts + 1):
        following: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            border = borders[end - 1] if end < count else 0
            following[end] = min(
                (max(before[0], total[end] - total[begin]), before[1] + border, (*before[2], end))
                for begin in range(part - 1, end)
                if (before := best[begin]) is not None
            )
        best = following
    cheapest = best[count]
    assert cheapest is not None  # there are at least as many calls as parts
    return list(cheapest[2])
