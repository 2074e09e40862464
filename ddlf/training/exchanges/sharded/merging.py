"""Carries out a plan on one worker: merges and steps its own range, and fetches the others. Runs in the executor.

``ddlf.training.exchanges.sharded.worker`` is the worker's role in the exchange. ``means`` computes the means of slot
state that a plan contains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ddlf.algorithms.codec import peak_of
from ddlf.algorithms.encoding import EncodedUpdate
from ddlf.algorithms.flat_weights import Slice, cut, overlapped
from ddlf.algorithms.merge import MERGE, Merge, WholeMerge
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.weights import Tensor, Weights, fault
from ddlf.errors import AppMissing
from ddlf.training.exchanges.sharded.pairs import Sent, decoded, limited
from ddlf.training.exchanges.sharded.plan import Generation, Plan, State, Unfit, codec_of, write
from ddlf.training.exchanges.sharded.ranges import (
    crossed,
    cut_range,
    moved,
    pieces,
    runs,
    size_of,
    stepped,
    within,
    write_range,
)

Ask = Callable[..., Awaitable[Any]]
"""Calls a verb of the exchange on a worker, which may be this one, by number, verb and arguments. Raises Unreached."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A merge rule for ranges of updates: a weighted mean whose weights are known before.

    Args:
        weights: Weight of each slot.
        divisor: Divisor of the weighted sum.
    """

    weights: Sequence[float]
    divisor: float

    least: ClassVar[int] = 1
    useful: ClassVar[int] = 1

    def start(self, slots: int, like: Sequence[Tensor], names: Sequence[str] = ()) -> Merge:
        return WholeMerge(slots, like, names, weigh=lambda updates, counts: (np.array(self.weights), self.divisor))


class Merging:
    """One worker's part in computing a generation (the next numbered version of the weights).

    Args:
        me: Number of this worker.
        plan: The plan of the generation.
        base: The generation that the slots began with.
        ask: Calls workers.

    Attributes:
        new: The new generation. Other workers may already fetch its finished pieces.
        own_range: The range that this worker steps.
    """

    def __init__(self, me: int, plan: Plan, base: Generation, ask: Ask) -> None:
        self._me, self._plan, self._base, self._ask = me, plan, base, ask
        self._slices = cut(size_of(base.weights), len(plan.owners))
        self.own_range = self._slices[list(plan.owners).index(me)]
        exchanged = set(range(len(base.weights)) if plan.tensors is None else plan.tensors)
        self._runs = runs(base.weights, exchanged)
        weights = [np.empty(w.shape, w.dtype) if i in exchanged else w for i, w in enumerate(base.weights)]
        self.new = Generation(weights, codec=codec_of(plan.codec), trainable=plan.trainable, means=dict(base.means))
        changing = [piece for part in self._slices for piece in self._changing_pieces(part)]
        self.new.ready = {piece: asyncio.Event() for piece in [*changing, *self._unchanged_pieces(self.own_range)]}

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines for all parts of this worker's work. They run at the same time."""
        plan, coroutines = self._plan, [self._compute_own_range()]
        for number, (part, owner) in enumerate(zip(self._slices, plan.owners, strict=True)):
            if owner == self._me:
                continue
            coroutines.append(
                fetch(
                    self._ask,
                    owner,
                    ("values", plan.generation),
                    self.new,
                    self._changing_pieces(part),
                    (plan.base, self._base),
                )
            )
            if plan.copies and plan.owners[(number + 1) % len(self._slices)] == self._me:
                coroutines.append(self._back_up(owner, part))
        return coroutines

    async def _compute_own_range(self) -> None:
        """Compute the next weights of this worker's range, piece by piece.

        Merge the updates of a piece, then apply the outer optimizer.
        """
        plan, new = self._plan, self.new
        state = self._empty_state(self.own_range)
        new.state.append((self.own_range, state))
        needs_peaks = new.codec is not None and new.codec.by_peak

        async def compute_piece(piece: Slice) -> None:
            updates, old = await asyncio.gather(
                asyncio.gather(*(update_of(self._ask, plan.base, sent, piece) for sent in plan.updates)),
                self._state_before(piece),
            )
            values = await asyncio.to_thread(self._step, piece, updates, old, state)
            if not needs_peaks:
                await asyncio.to_thread(new.set, piece, values)
                new.ready[piece].set()

        async def copy_unchanged(piece: Slice) -> None:
            self._copy_into(
                state, piece, self.own_range, [a for group in await self._state_before(piece) for a in group]
            )
            new.ready[piece].set()

        await limited(copy_unchanged, self._unchanged_pieces(self.own_range))
        await limited(compute_piece, self._changing_pieces(self.own_range))
        if needs_peaks:
            await self._encode_by_peaks(state[-1])

    def _step(self, piece: Slice, updates: Sequence[EncodedUpdate], old: State, state: State) -> Weights:
        """Return the next weights of a piece (a part of this worker's range).

        Write the outer optimizer's next state for them into ``state``.
        """
        plan, base = self._plan, self._base
        merge = Weighed(plan.weighed[:-1], plan.weighed[-1]) if plan.weighed else MERGE.read(plan.merge)
        outer, coded = OUTER.read(plan.outer), self.new.codec is not None
        indices = [i for i, _, _ in overlapped(base.weights, piece)]
        # The step for moving statistics keeps no state, and leaves the state as it is.
        arrays_of_optimizer = getattr(outer, "state_arrays", 0)
        samples = [samples for _, _, samples, _ in plan.updates]
        after, values = stepped(
            merge,
            outer,
            [array for group in old[:arrays_of_optimizer] for array in group],
            old[-1] if coded else cut_range(base.weights, piece),
            list(zip(decoded(updates, plan.updates, base.weights, piece), samples, strict=True)),
            [plan.trainable[i] for i in indices],
            [base.weights[i].size for i in indices],
        )
        if (problem := fault(values, 1, values, [plan.names[i] for i in indices])) is not None:
            raise Unfit(problem)
        unused = [array for group in old[arrays_of_optimizer : len(old) - coded] for array in group]
        self._copy_into(state, piece, self.own_range, [*after, *unused, *(values if coded else ())])
        return values

    async def _encode_by_peaks(self, exact: Weights) -> None:
        """Encode this worker's range with a codec that needs each tensor's largest magnitude over all ranges."""
        new, overlaps = self.new, overlapped(self._base.weights, self.own_range)
        new.within = [0.0] * len(new.weights)
        for (i, _, _), values in zip(overlaps, exact, strict=True):
            new.within[i] = peak_of(values)
        new.stepped.set()
        requests = (self._ask(owner, "peaks", self._plan.generation) for owner in self._plan.owners)
        new.peaks = [max(peaks) for peaks in zip(*await asyncio.gather(*requests), strict=True)]

        async def encode_piece(piece: Slice) -> None:
            await asyncio.to_thread(new.set, piece, cut_range(exact, moved(piece, self.own_range[0])))
            new.ready[piece].set()

        await limited(encode_piece, self._changing_pieces(self.own_range))

    async def _back_up(self, owner: int, part: Slice) -> None:
        """Keep a backup of the outer optimizer's state of another worker's range."""
        state = self._empty_state(part)

        async def fetch_piece(piece: Slice) -> None:
            groups = await self._ask(owner, "kept", self._plan.generation, *piece)
            for group, values in zip(state, groups, strict=True):
                write(owner, group, moved(piece, part[0]), values)

        async def copy_unchanged(piece: Slice) -> None:
            self._copy_into(state, piece, part, [a for group in await self._state_before(piece) for a in group])

        await limited(copy_unchanged, self._unchanged_pieces(part))
        await limited(fetch_piece, self._changing_pieces(part))
        self.new.state.append((part, state))

    async def _state_before(self, piece: Slice) -> State:
        """Return the outer optimizer's state of a piece of the weights before this round.

        It comes from this worker or from the workers that have its parts.
        """
        plan, base = self._plan, self._base
        if not plan.kept:
            return []
        try:
            return base.state_of(piece)
        except AppMissing:
            pass
        like = cut_range(base.weights, piece)
        state: State = [[np.empty_like(view) for view in like] for _ in range(plan.kept)]
        for part, worker in within(piece, [((begin, end), worker) for begin, end, worker in plan.state]):
            groups = await self._ask(worker, "kept", plan.base, *part)
            for group, values in zip(state, groups, strict=True):
                write(worker, group, moved(part, piece[0]), values)
        return state

    def _empty_state(self, part: Slice) -> State:
        """Return uninitialized arrays for the outer optimizer's state of a range."""
        return [[np.empty_like(view) for view in cut_range(self._base.weights, part)] for _ in range(self._plan.kept)]

    def _copy_into(self, state: State, piece: Slice, part: Slice, arrays: Weights) -> None:
        """Copy the outer optimizer's state of a piece into the state of the range that contains it."""
        n = len(arrays) // max(len(state), 1)
        for i, group in enumerate(state):
            write_range(group, moved(piece, part[0]), arrays[i * n : (i + 1) * n])

    def _changing_pieces(self, part: Slice) -> list[Slice]:
        """Return the pieces (parts) of a range whose tensors are exchanged in this round. Only their weights change."""
        return [piece for run in crossed(part, self._runs) for piece in pieces(run, self._plan.piece)]

    def _unchanged_pieces(self, part: Slice) -> list[Slice]:
        """Return the pieces (parts) of a range whose tensors are not exchanged in this round.

        Return none if the plan keeps no state, since nothing must be copied then.
        """
        if not self._plan.kept:
            return []
        ends = [part[0], *(end for run in crossed(part, self._runs) for end in run), part[1]]
        gaps = [(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if begin < end]
        return [piece for gap in gaps for piece in pieces(gap, self._plan.piece)]


async def fetch(
    ask: Ask,
    owner: int,
    request: Sequence[Any],
    new: Generation,
    parts: Sequence[Slice],
    old: tuple[int, Generation] | None = None,
) -> None:
    """Fetch pieces (parts) of the weights or of state from a worker that has them or is computing them.

    Args:
        ask: Calls workers.
        owner: Number of that worker.
        request: The name of the method that returns a piece, and its first arguments.
        new: Generation to write the pieces into.
        parts: The pieces.
        old: Number and weights of a generation on this worker. Tensors that have not changed since do not travel.
    """
    verb, *more = request
    old_number, old_weights = old or (None, None)

    async def fetch_piece(piece: Slice) -> None:
        since = () if old_number is None else (old_number,)
        write(owner, new.weights, piece, await ask(owner, verb, *more, *piece, *since), old_weights)
        new.ready[piece].set()

    await limited(fetch_piece, parts)


async def update_of(ask: Ask, base: int, sent: Sent, piece: Slice) -> EncodedUpdate:
    """Fetch a range of a slot's update from the worker that has the update."""
    slot, worker, _, _ = sent
    update: EncodedUpdate = await ask(worker, "update", base, slot, *piece)
    return update
