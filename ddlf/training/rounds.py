"""What an algorithm is told of its run: what does not change, its rounds, and that it has ended. Runs on the master."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddlf.algorithms.local_rules import LocalRule
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.events import UpdateArrived
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.slot.task import Reply, Task


class Elsewhere(list[Any]):
    """In the place of weights that are on the workers: nobody takes those of an earlier round for them.

    Args:
        evaluated: Evaluates them there; None if that is to be done here.
        brought: Brings them.
        read: Reads them where they are also, in a checkpoint; None if they are in none.

    Attributes:
        slices: Of that checkpoint, which workers can read.
        like: Arrays with their shapes and types, if these are not read.
    """

    why = "the weights of this round are on the workers: with exchange='sharded' the master has them after a checkpoint and the last round"
    hint = "set checkpoint_every to have them here that often, or use exchange='star'"

    def __init__(
        self,
        evaluated: Callable[..., Awaitable[dict[str, float] | None]],
        brought: Callable[[], Awaitable[Weights]],
        read: Callable[[], Weights] | None = None,
    ) -> None:
        super().__init__()
        self.evaluated, self.brought, self._read = evaluated, brought, read
        self.slices: Slices | None = None
        self.like: Weights | None = None
        self._found: Weights | None = None

    def _whole(self) -> Weights:
        if self._read is None:
            raise ConfigError(self.why, hint=self.hint)
        if self._found is None:
            self._found = self._read()
        return self._found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def __getitem__(self, place: Any) -> Any:
        return self._whole()[place]


def shapes(weights: Weights) -> Weights:
    """Arrays with the shapes and types of these, wherever they are."""
    like: Weights | None = getattr(weights, "like", None)
    return weights if like is None else like


async def nowhere(*_: Any) -> None:
    """Evaluated is on this side."""


def arrived(reply: Reply) -> UpdateArrived:
    """What is told of a reply that has come."""
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
    """Cancel what still runs and wait for it, so that nothing goes on behind an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Ended(Exception):
    """Raised by ``Run.all`` where the run ends for a reason that was known only when its round had begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What does not change in a run.

    Args:
        samples: n, in the data set of every node.
        names: Paths of the weights.
        trainable: Whether each weight is trained; the others are averaged plainly.
        batch_size: Samples in a batch of each worker.
        seed: Seed of the partitions and of everything random on the workers.
        update_policy: What to do with an update that looks wrong.
        local: What local training adds to its gradients.
        apart: Places of the weights that each slot keeps apart.
        statistics: Places of the moving statistics that are computed anew after each merge.
        files: The data set of partition files, as the master has opened it; None where the data is arrays.
        shuffle: How rows of partition files are mixed, as text.
        grows: Whether workers that come meanwhile get slots of their own.
    """

    samples: int
    names: list[str]
    trainable: list[bool]
    batch_size: int
    seed: int
    update_policy: str
    local: LocalRule
    grows: bool
    apart: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    files: Any = None
    shuffle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of all slots.

    Args:
        number: Number, from 0.
        tasks: A task for each slot, in slot order: its part of the samples, and the weights of now. At the end of an epoch that is cut into rounds
            (``worker_steps``) there may be fewer samples than slots: then the first slots have one.
        last: Whether no other is planned after it.
    """

    number: int
    tasks: list[Task]
    last: bool
