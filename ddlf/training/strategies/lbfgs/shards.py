"""The vectors of L-BFGS, cut into shards. Runs in the executor, on its event loop.

A shard is a range of all trained values. A worker that owns it has, for this range, the weights, their gradient, the
direction, and the last pairs of changes. Another worker has a backup without the direction. The master, which has no
vector, sends commands::

    aim(coefficients)       direction = sum of coefficient * vector; answers with numbers
    trial(pass, step)       from replicas: the first one begins the pass with trial = weights + step * direction
    add(pass, ...)          from replicas: add the gradient of some portions of the samples
    sums(pass)              answers with the slope
    stage(pass)             the trial may become the weights: send both to the backup; answers with numbers
    settle(version, ...)    owner and backup: it becomes the weights; answers with dot products of the new vectors
    dots(which)             answers with dot products of some vectors with all vectors

All commands except ``stage`` and ``settle`` leave the state of the last iteration unchanged. ``settle`` may be repeated. So if
a worker is lost, the backups become the owners, and the iteration begins again with the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddlf.algorithms.flat_weights import Rows
from ddlf.algorithms.lbfgs import Array, FixedPoint, dot, packed, packed_row
from ddlf.errors import AppMissing, BadUpdate, LeaseError
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import Destination, Written, write_if_seen
from ddlf.training.strategies.lbfgs.state import ShardState, StoredShard
from ddlf.worker.activity import Shard as Shown
from ddlf.worker.calls import concurrent, offered
from ddlf.worker.peers import Ask, Unreached

SHARDS = "shards"
"""Name of the role that has a worker's shards."""
INLINE = 1 << 15
"""A shard with at most this many values computes on the event loop, a larger one in a thread."""


async def call_shards(ask: Ask, worker: int, verb: str, *arguments: Any) -> Any:
    """Call a verb of another worker's shards.

    Raises:
        Unreached: The worker cannot be reached, or does not have the shard any more.
    """
    try:
        return await ask(worker, SHARDS, verb, *arguments)
    except (AppMissing, LeaseError) as error:
        raise Unreached(worker, error.message.partition("\n")[0]) from error


@dataclass(frozen=True, slots=True)
class NotReached:
    """The answer of a verb that could not reach another worker.

    An error would reach the master as one of this worker, which would then count as lost.

    Args:
        worker: Number of the other worker.
        reason: Why it could not be reached.
        link: Whether the link to it has failed.
    """

    worker: int
    reason: str
    link: bool

    @classmethod
    def of(cls, error: Unreached) -> NotReached:
        """Return the answer after an error."""
        return cls(error.worker, error.reason, error.link)


class Aimed(NamedTuple):
    """The slope of a new direction, and the size of the gradient, in one shard. Sums are packed.

    Args:
        slope: Dot product of the gradient and the direction.
        size: Sum of the gradient's absolute values.
        peak: The largest of these values.
    """

    slope: bytes
    size: bytes
    peak: float


class PassSums(NamedTuple):
    """The result of a pass in one shard.

    Args:
        slope: Dot product of the trial's gradient and the direction, packed; None without a direction.
        added: Number of portions whose gradients were added.
    """

    slope: bytes | None
    added: int


class Staged(NamedTuple):
    """The numbers of one shard that decide whether a step and its pair are kept. The dot products are packed.

    Args:
        ss, sy, yy: Dot products of the changes of the weights, ``s``, and of the gradient, ``y``.
        peak: Largest absolute value of the gradient after the step.
    """

    ss: bytes
    sy: bytes
    yy: bytes
    peak: float


@dataclass(slots=True, kw_only=True)
class Shard:
    """One range of all vectors.

    Args:
        first: Index of the first value in whole vectors.
        version: Number of ``settle`` so far: 0 with the first weights, 1 with their gradient, then one more each step.
        weights: The current weights.
        gradient: The gradient of the loss at these weights; None in version 0.
        s: The last changes of the weights, oldest first.
        y: The change of the gradient for each of ``s``.
        history: Maximum number of pairs.
    """

    first: int
    version: int
    weights: Array
    gradient: Array | None
    s: list[Array]
    y: list[Array]
    history: int
    direction: Array | None = None
    trial: Array | None = None
    number: int = 0  # of the current pass
    total: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    format: FixedPoint = field(default_factory=lambda: FixedPoint(0, 1))
    added: set[int] = field(default_factory=set)
    staged: tuple[Array, Array] | None = None

    def state(self) -> ShardState:
        """Return all that another worker needs to have this shard."""
        return ShardState(
            first=self.first,
            version=self.version,
            weights=self.weights,
            gradient=self.gradient,
            s=list(self.s),
            y=list(self.y),
            history=self.history,
        )

    @classmethod
    def from_state(cls, state: ShardState) -> Shard:
        """Return a shard with a state."""
        return cls(
            first=state.first,
            version=state.version,
            weights=state.weights,
            gradient=state.gradient,
            s=list(state.s),
            y=list(state.y),
            history=state.history,
        )

    @property
    def part(self) -> tuple[int, int]:
        """Begin and end of the range."""
        return self.first, self.first + self.weights.size

    def vectors(self) -> list[Array]:
        """Return the vectors that the direction is made from: ``s_1..s_k, y_1..y_k, g``."""
        assert self.gradient is not None
        return [*self.s, *self.y, self.gradient]

    def dots(self, indices: Sequence[int]) -> list[bytes]:
        """Return the dot products of some vectors, by their indices in ``vectors``, with all of these, as packed rows."""
        vectors = self.vectors() if indices else []
        return [packed_row(dot(vectors[i], vector) for vector in vectors) for i in indices]

    def aim(self, coefficients: Array) -> Aimed:
        """Set the direction."""
        assert self.gradient is not None
        total = np.zeros(self.weights.size, np.float64)
        for coefficient, vector in zip(coefficients, self.vectors(), strict=True):
            total += coefficient * vector
        self.direction = total.astype(self.weights.dtype)
        sizes = np.abs(self.gradient)
        slope, total_size = dot(self.gradient, self.direction), dot(sizes, np.ones(sizes.size))
        return Aimed(packed(slope), packed(total_size), float(sizes.max(initial=0.0)))

    def begin(self, number: int, step: float, format: FixedPoint) -> None:
        """Begin a pass over all samples with other weights: ``step`` along the direction."""
        self.number, self.format, self.added = number, format, set()
        self.trial = self.weights
        if step:
            assert self.direction is not None
            self.trial = (self.weights + step * self.direction.astype(np.float64)).astype(self.weights.dtype)
        self.total = np.zeros(self.weights.size, np.int64)

    def add(self, portions: Sequence[int], total: Array) -> None:
        """Add the gradient of some portions, as integers. A repeated call has no effect: its answer was lost.

        Raises:
            BadUpdate: It does not fit, or only some of the portions are new.
        """
        if total.dtype != np.int64 or total.shape != self.total.shape:
            raise BadUpdate(f"a gradient has {total.dtype} {total.shape} for {self.total.size} integers")
        twice = self.added.intersection(portions)
        if len(twice) == len(portions):
            return
        if twice:
            raise BadUpdate(f"the gradient of portion {min(twice) + 1} came twice")
        self.added.update(portions)
        self.total += total

    def trial_gradient(self) -> Array:
        """Return the gradient at the trial, rounded to the type of the weights."""
        return self.format.value(self.total).astype(self.weights.dtype)

    def sums(self) -> PassSums:
        """Return the result of the pass so far."""
        slope = None if self.direction is None else packed(dot(self.trial_gradient(), self.direction))
        return PassSums(slope, len(self.added))

    def changes(self) -> tuple[Array, Array]:
        """Return the staged change of the weights and of the gradient. The first pass has none."""
        assert self.staged is not None
        weights, gradient = self.staged
        if self.gradient is None:
            return np.zeros(0, weights.dtype), np.zeros(0, weights.dtype)
        return weights - self.weights, gradient - self.gradient

    def stage(self) -> Staged:
        """Note that the trial may become the weights."""
        assert self.trial is not None
        self.staged = self.trial, self.trial_gradient()
        s, y = self.changes()
        peak = float(np.abs(self.staged[1]).max(initial=0.0))
        return Staged(packed(dot(s, s)), packed(dot(s, y)), packed(dot(y, y)), peak)

    def settle(self, version: int, pair_kept: bool, afresh: bool) -> bool:
        """Make the staged weights and gradient the current ones, unless this was done before.

        Args:
            version: The version that they make.
            pair_kept: Whether their pair is kept.
            afresh: Whether older pairs are dropped.

        Returns:
            Whether this shard has that version now. Otherwise it has not received it.
        """
        if self.version >= version:
            return True
        if self.staged is None or self.version != version - 1:
            return False
        s, y = self.changes()
        before = ([], []) if afresh else (self.s, self.y)
        self.s, self.y = ([*old, *[new] * pair_kept][-self.history :] for old, new in zip(before, (s, y), strict=True))
        self.weights, self.gradient = self.staged
        self.version, self.staged = version, None
        return True


class Shards(Restored):
    """The shards and the backups of shards on one worker.

    Args:
        me: Number of this worker.
        run: Name of the run.
        ask: Calls other workers.
        rows: Returns the layout of the model's trained weights as one vector.
        show: Receives the line for ``ddlf status``; None for no line.
    """

    def __init__(
        self,
        me: int,
        run: str,
        ask: Ask,
        rows: Callable[[], Rows],
        show: Callable[[Shown | None], object] = lambda shard: None,
    ) -> None:
        super().__init__()
        self._me, self._run, self._ask, self._rows, self._show_line = me, run, ask, rows, show
        self._shards: dict[int, Shard] = {}
        self._owned: set[int] = set()
        self._one_at_a_time = asyncio.Lock()

    # -- verbs for the master -----------------------------------------------------------------------------------------

    @concurrent
    async def here(self) -> list[int]:
        """Return the numbers of the shards and backups on this worker."""
        return sorted(self._shards)

    @concurrent
    async def own(self, number: int, message: dict[str, Any]) -> None:
        """Receive a whole shard, from the message of a ``ShardState``."""
        self._own(number, ShardState.from_message(message))

    @concurrent
    async def own_stored(self, number: int, message: dict[str, Any]) -> None:
        """Receive a shard, from the message of a ``StoredShard``. This worker has the slice with its vectors."""
        stored, arrays = StoredShard.from_message(message), self.restored.pop(number)
        self._own(number, await asyncio.to_thread(stored.loaded, self._rows(), arrays))

    def _own(self, number: int, state: ShardState) -> None:
        self._shards[number] = Shard.from_state(state)
        self._owned.add(number)
        self._show()

    @concurrent
    async def keep(self, owned: Sequence[int], backups: Sequence[int]) -> None:
        """Drop all shards and backups but these. A backup may become an owned shard."""
        self._owned = set(owned)
        self._shards = {n: shard for n, shard in self._shards.items() if n in self._owned or n in backups}
        self._show()

    @concurrent
    async def send(self, number: int, to: int) -> NotReached | None:
        """Send a whole shard to another worker, which then has a backup. Return None on success."""
        try:
            await call_shards(self._ask, to, "copy", number, self._shard(number).state().to_message())
        except Unreached as error:
            return NotReached.of(error)
        return None

    @concurrent
    async def aim(self, number: int, coefficients: Array) -> list[Any]:
        """Set the direction, and return the fields of an ``Aimed``."""
        return list(await self._computed(number, lambda shard: shard.aim(coefficients)))

    @concurrent
    async def sums(self, number: int, pass_number: int) -> list[Any]:
        """Return the fields of a ``PassSums`` after the pass ``pass_number``."""
        self._in_pass(number, pass_number)
        return list(await self._computed(number, Shard.sums))

    @concurrent
    async def stage(self, number: int, pass_number: int, backup: int) -> list[Any] | NotReached:
        """Call ``Shard.stage``, and send the staged values to the worker with the backup; 0 for none.

        Return the fields of a ``Staged``.
        """
        shard = self._in_pass(number, pass_number)
        numbers = list(await self._computed(number, Shard.stage))
        if backup and shard.staged is not None:
            try:
                await call_shards(self._ask, backup, "staged", number, shard.version, *shard.staged)
            except Unreached as error:
                return NotReached.of(error)
        return numbers

    @concurrent
    async def settle(
        self, number: int, version: int, pair_kept: bool, afresh: bool, indices: Sequence[int]
    ) -> list[bytes] | None:
        """Call ``Shard.settle``. Return what ``dots`` returns; None if the shard does not have this version."""

        def settled(shard: Shard) -> list[bytes] | None:
            return shard.dots(indices) if shard.settle(version, pair_kept, afresh) else None

        rows: list[bytes] | None = await self._computed(number, settled)
        self._show()
        return rows

    @concurrent
    async def dots(self, number: int, indices: Sequence[int]) -> list[bytes]:
        """Return the dot products of some vectors, by index, with all vectors."""
        return list(await self._computed(number, lambda shard: shard.dots(indices)))

    @concurrent
    async def whole(self, number: int) -> dict[str, Any]:
        """Return the message of a shard's whole state, a ``ShardState``."""
        return self._shard(number).state().to_message()

    @concurrent
    async def write(self, number: int, names: Sequence[str], destination: Destination) -> Written[None]:
        """Write a shard's whole state into a checkpoint.

        Args:
            number: Number of the shard.
            names: Paths of the weights.
            destination: Destination.
        """
        parts = self._shard(number).state().to_arrays(self._rows(), names)
        return await asyncio.to_thread(write_if_seen, destination, parts, self._me), None

    async def close(self) -> None:
        """Free the memory of all shards."""
        self._shards.clear()
        self._owned.clear()
        self._show()

    # -- verbs for other workers --------------------------------------------------------------------------------------

    @offered
    async def copy(self, number: int, message: dict[str, Any]) -> None:
        """Receive a backup of another worker's shard, from the message of a ``ShardState``."""
        self._shards[number] = Shard.from_state(ShardState.from_message(message))
        self._owned.discard(number)
        self._show()

    @offered
    async def staged(self, number: int, version: int, weights: Array, gradient: Array) -> None:
        """Receive the values that may become the next version.

        Raises:
            AppMissing: The backup here is of another version.
        """
        shard = self._shard(number)
        if shard.version != version:
            raise AppMissing(f"the backup of shard {number + 1} here is of version {shard.version}")
        shard.staged = weights, gradient

    @offered
    async def current(self, number: int, version: int) -> Array:
        """Return a shard's weights of a version. The array does not change any more.

        Raises:
            AppMissing: The shard has another version now.
        """
        shard = self._shard(number)
        if shard.version != version:
            raise AppMissing(f"shard {number + 1} has version {shard.version} now")
        return shard.weights

    @offered
    async def trial(self, number: int, pass_number: int, step: float, format: Sequence[int]) -> Array:
        """Return a shard's weights for the pass ``pass_number``. The array does not change any more.

        The first call of a pass begins it, like ``Shard.begin``.
        """

        def begun(shard: Shard) -> None:
            if shard.number < pass_number and not (step and shard.direction is None):
                shard.begin(pass_number, step, FixedPoint(*format))

        await self._computed(number, begun)
        shard = self._in_pass(number, pass_number)
        assert shard.trial is not None
        return shard.trial

    @offered
    async def add(self, number: int, pass_number: int, portions: list[int], total: Array) -> None:
        """Add the gradient of some portions to the pass ``pass_number``, like ``Shard.add``."""
        self._in_pass(number, pass_number)
        await self._computed(number, lambda shard: shard.add(portions, total))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _shard(self, number: int) -> Shard:
        if number not in self._shards:
            raise AppMissing(f"shard {number + 1} is not on this worker")
        return self._shards[number]

    def _in_pass(self, number: int, pass_number: int) -> Shard:
        shard = self._shard(number)
        if shard.number != pass_number:
            raise AppMissing(f"shard {number + 1} is in pass {shard.number}, and not in pass {pass_number}")
        return shard

    async def _computed(self, number: int, work: Callable[[Shard], Any]) -> Any:
        shard = self._shard(number)
        if shard.weights.size <= INLINE:
            return work(shard)
        async with self._one_at_a_time:
            return await asyncio.to_thread(work, shard)

    def _show(self) -> None:
        """Update the line of ``ddlf status``: it names the first shard on this worker, and the number of shards."""
        if not self._shards:
            self._show_line(None)
            return
        first = next((self._shards[number] for number in sorted(self._owned)), None)
        begin, end, version = (0, 0, 0) if first is None else (*first.part, first.version)
        backups = len(self._shards) - len(self._owned)
        self._show_line(Shown(begin, end, self._rows().sizes[0], version, self._run, len(self._owned), backups))
