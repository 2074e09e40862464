"""References to weights that the master may not have in memory: ``WeightsRef``. Runs on the master.

The weights of a star run are plain arrays at the master. In other runs only the workers have the weights of the last
round, or a checkpoint has them in slices that nobody has read yet. Then the progress of the run has a reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddlf.errors import ConfigError

if TYPE_CHECKING:
    from ddlf.algorithms.weights import Weights
    from ddlf.training.checkpoints.slices import Slices


async def no_evaluation(*_: object) -> None:
    """Return None: the master must evaluate."""


@dataclass(slots=True, kw_only=True, eq=False)
class WeightsRef:
    """A reference to a group of arrays, such as the weights, on workers or in the slices of a checkpoint.

    Args:
        like: Arrays with the shapes and types of the group. They may have no memory.
        group: Name of the group in checkpoints.
        slices: The slices of the checkpoint that has the arrays; None if only workers have them.
        from_workers: Function that fetches the arrays from the workers; None if only the checkpoint has them.
        evaluate: Function that evaluates the weights on the workers; returns None if the master must do it.
        unread: The reason why code that cannot await does not get the arrays, and a hint.
    """

    like: Weights
    group: str
    slices: Slices | None = None
    from_workers: Callable[[], Awaitable[Weights]] | None = None
    evaluate: Callable[..., Awaitable[dict[str, float] | None]] = no_evaluation
    unread: tuple[str, str] = ("the weights of this round are on the workers", "")
    _read: Weights | None = field(default=None, init=False)

    async def fetch(self) -> Weights:
        """Return the arrays, from the workers or else from the checkpoint."""
        return await asyncio.to_thread(self.read) if self.from_workers is None else await self.from_workers()

    def read(self) -> Weights:
        """Return the arrays from the checkpoint, for code that cannot await. The first call reads the files.

        Raises:
            ConfigError: Only workers have the arrays.
        """
        if self._read is None:
            if self.slices is None:
                reason, hint = self.unread
                raise ConfigError(reason, hint=hint)
            self._read = list(self.slices.read()[self.group].values())
        return self._read


def local(weights: Weights | WeightsRef) -> Weights:
    """Return the arrays; read them from a checkpoint if the master does not have them yet.

    Raises:
        ConfigError: Only workers have the arrays.
    """
    return weights.read() if isinstance(weights, WeightsRef) else weights


def slices_of(weights: Weights | WeightsRef) -> Slices | None:
    """Return the slices of a checkpoint that have the weights; None if none have them."""
    return weights.slices if isinstance(weights, WeightsRef) else None


def shapes(weights: Weights | WeightsRef) -> Weights:
    """Return arrays with the shapes and types of the weights, without reading the weights."""
    return weights.like if isinstance(weights, WeightsRef) else weights
