"""Data types that a run and a strategy's loop share: constant facts and rounds. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddlf.events import UpdateArrived
from ddlf.training.slot.task import Reply, Task


def arrived(reply: Reply) -> UpdateArrived:
    """Return the event that reports a reply."""
    return UpdateArrived(
        round=reply.task.round + 1,
        slot=reply.slot + 1,
        worker=reply.worker,
        samples=reply.samples,
        epochs=reply.task.epochs,
        compute_s=reply.compute_s,
        transfer_s=reply.elapsed_s - reply.compute_s,
        bytes_out=reply.bytes_out,
        bytes_back=reply.bytes_back,
        files=tuple(file + 1 for file in reply.files),
    )


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the remaining tasks and wait for them, so that nothing continues after an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Ended(Exception):
    """``Run.all`` raises it if the run has to end for a reason that was found after the round began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that do not change in a run.

    Args:
        samples: n, the number of samples in every node's data set.
        names: Paths of the weights.
        trainable: For each weight, whether it is trained; the others are simply averaged.
        batch_size: Samples in a batch of each worker.
        seed: Seed of the partitions and of all random numbers on the workers.
        update_policy: What to do with a suspicious update.
        local: The local rule, which changes the gradients of local training, as text.
        apart: Places of the weights that each slot keeps to itself.
        statistics: Places of the moving statistics that are recalibrated after each merge.
        files: The data set of partition files, as the master has opened it; None for arrays.
        shuffle: The shuffle rule for rows of partition files, as text.
        grows: Whether workers that join later get their own slots.
    """

    samples: int
    names: list[str]
    trainable: list[bool]
    batch_size: int
    seed: int
    update_policy: str
    local: str
    grows: bool
    apart: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    files: Any = None
    shuffle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of all slots.

    Args:
        number: The round, from 0.
        tasks: The task of each slot, in slot order, with its samples and the current weights. At the end of an epoch
            that is cut into rounds (``worker_steps``), fewer samples than slots may remain; then only the first slots
            have a task.
        last: Whether no further round is planned.
    """

    number: int
    tasks: list[Task]
    last: bool
