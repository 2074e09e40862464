"""Means of sets on the server: computes the weights that the ledger or a secure sum asks for, and writes their entry.

A mean is a task of the server, and its arithmetic runs on threads. The ledger asks for one mean at a time, and keeps its sets
until the entry is taken. Posts arrive meanwhile, and their sets wait for the next mean. If the weights are a release, they are
counted before anybody can get them. A disk that refuses delays the entry, and the sets stay as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np

from ddlf.algorithms.set_merge import towards
from ddlf.algorithms.weights import Weights
from ddlf.errors import BudgetSpent, CheckpointError
from ddlf.peers import clock
from ddlf.peers.checks import SetCheck
from ddlf.peers.entries import NO_SET, Merged, Summed
from ddlf.peers.journal_writer import JournalWriter, until_written
from ddlf.peers.kept_sets import KeptSets, state_bytes
from ddlf.peers.ledger import Mean, WeightLedger
from ddlf.peers.merging import HEAVIEST, Part, mean_of_swaps, most_samples, next_base
from ddlf.peers.release_counter import ReleaseCounter
from ddlf.peers.said_lately import SaidLately
from ddlf.peers.secure_rounds import AddUp
from ddlf.peers.secure_updates import base_of
from ddlf.peers.served_model import Model
from ddlf.peers.sketches import Sketch
from ddlf.peers.wire import Wire
from ddlf.privacy import secure_sum


class Means:
    """Computes means and writes them.

    Args:
        ledger: The ledger. It is only read.
        model: The model.
        wire: Reads sets, and makes the sets that travel.
        sets: The sets, and the state of the outer optimizer.
        check: Knows which sets have a long training.
        writer: Writes the entries.
        releases: Counts releases; None without noise.
        spent_reasons: Peers that must not post again, and why.
        end_spent: Ends the training, because another release would exceed the privacy budget.
        say: Prints a line.
        lately: Prints a line about a peer, but rarely.
    """

    def __init__(
        self,
        ledger: WeightLedger,
        model: Model,
        wire: Wire,
        sets: KeptSets,
        check: SetCheck,
        writer: JournalWriter,
        *,
        releases: ReleaseCounter | None,
        spent_reasons: Mapping[int, str],
        end_spent: Callable[[str], Awaitable[None]],
        say: Callable[[str], None],
        lately: SaidLately,
    ) -> None:
        self._ledger, self._model, self._wire = ledger, model, wire
        self._sets, self._check, self._writer = sets, check, writer
        self._releases, self._spent_reasons, self._end_spent = releases, spent_reasons, end_spent
        self._say, self._lately = say, lately

    async def merge(self, mean: Mean) -> None:
        """Write the mean of sets that the ledger asks for."""
        parts = {number: self._sets.part(number) for number in mean.of}
        lines: list[str] = []
        spent_reason = ""
        left_out: tuple[int, ...] = ()
        if mean.base == NO_SET:
            left_out = self._long_sets(mean.of)
            parts = {number: part for number, part in parts.items() if number not in left_out}
            lines = [f"set {number}: its training is long, so other sets count only" for number in left_out]
            weights = await asyncio.to_thread(mean_of_swaps, list(parts.values()))
        else:
            base = self._wire.decode(self._sets.exact(mean.base))
            received = await asyncio.to_thread(self._wire.decode, self._sets.travelling[mean.base])
            samples = median_low(part.samples for part in parts.values())
            parts = {number: self._counted_part(number, part, received, samples) for number, part in parts.items()}
            parts = self._cap_samples(parts)
            weights, outer, lines = await asyncio.to_thread(
                next_base, self._ledger.plan, base, received, parts, self._sets.state, self._model.trainable
            )
            if self._releases is not None and not self._releases.spending.is_by_post and weights is not base:
                try:
                    spent_reason = await self._releases.count(*(self._ledger.sets[number].peer for number in mean.of))
                except BudgetSpent as error:  # the sum does not leave: the base stays
                    weights, outer, spent_reason = base, self._sets.state, error.message
            elif self._spent_reasons:  # before others get the next base, and post in vain
                await self._end_spent(next(iter(self._spent_reasons.values())))
            self._sets.next_state = [np.asarray(array) for array in outer]
        data = await asyncio.to_thread(self._model.layout.encode, weights)
        travelling = await asyncio.to_thread(self._wire.travelling, data)
        if travelling and (problem := await asyncio.to_thread(self._wire.overflow, weights)):
            lines.append(problem)
        for line in lines:
            self._say(f"suspect   {line}")
        sketch = await asyncio.to_thread(self._sets.sketch, travelling or data)
        data += state_bytes(self._sets.next_state)
        releases = 0 if self._releases is None else self._releases.spending.account.accountant.releases

        def entry() -> Merged:
            return Merged(
                at=clock.now(),
                set=self._sets.new_number(),
                of=mean.of,
                left_out=left_out,
                why=tuple(lines),
                releases=releases,
            )

        await self._commit(entry, data, travelling, sketch)
        if spent_reason:
            await self._end_spent(spent_reason)

    async def add_up(self, work: AddUp) -> None:
        """Unmask a sum, and write the next base.

        Raises:
            ProtocolError: The sum cannot be right.
            Unfit: The training has ended meanwhile.
        """
        vectors = {peer: post.set for peer, post in work.posts.items()}
        base, shares = self._wire.decode(self._sets.exact(work.base)), list(work.shares.values())
        total = await asyncio.to_thread(secure_sum.unmasked, vectors, work.answers)
        weights, outer = await asyncio.to_thread(
            base_of, self._ledger.plan, base, total, shares, self._sets.state, self._model.trainable
        )
        self._sets.next_state = [np.asarray(array) for array in outer]
        data = await asyncio.to_thread(self._model.layout.encode, weights)

        def entry() -> Summed:
            posts = work.posts.values()
            numbers, updates = tuple(post.number for post in posts), tuple(post.updates for post in posts)
            return Summed(
                at=clock.now(), set=self._sets.new_number(), peers=tuple(work.posts), numbers=numbers, updates=updates
            )

        await self._commit(entry, data + state_bytes(self._sets.next_state))

    async def _commit(
        self, entry: Callable[[], Merged | Summed], data: bytes, travelling: bytes = b"", sketch: Sketch | None = None
    ) -> None:
        """Write an entry with weights that the server has computed, as soon as the disk takes it."""

        async def write() -> None:
            merged = entry()
            if sketch is not None:
                self._check.keep(merged.set, sketch)
            try:
                await self._writer.commit(merged, data, travelling)
            except CheckpointError:
                self._check.drop(merged.set)
                raise

        await until_written(write, self._ledger)

    def _counted_part(self, number: int, part: Part, received: Weights, usual_samples: int) -> Part:
        """Return a set of a round with the share of its training that counts. Then it has at most the usual samples."""
        if (share := self._ledger.sets[number].share) == 1:
            return part
        samples = min(part.samples, usual_samples)
        return replace(part, read=lambda: towards(received, part.read(), share), samples=samples)

    def _cap_samples(self, parts: dict[int, Part]) -> dict[int, Part]:
        """Return the sets of a round without numbers of samples that would outweigh all other peers."""
        plan = self._ledger.plan
        if not plan.longest or plan.mechanism is not None:  # with noise, each update counts once
            return parts
        most = most_samples(part.samples for part in parts.values())
        for number in (number for number, part in parts.items() if part.samples > most):
            peer = self._ledger.sets[number].peer
            claim = f"{self._ledger.label(peer)} says that it has {parts[number].samples:,} samples"
            line = f"capped    {claim}, and counts with {most:,}: {HEAVIEST} times as many as is usual here"
            self._lately.say(line, "samples", peer, now=clock.now())
        return {number: replace(part, samples=min(part.samples, most)) for number, part in parts.items()}

    def _long_sets(self, of: Sequence[int]) -> tuple[int, ...]:
        """Return the sets of a mean that do not count in it, since their training is long. One always stays."""
        long = tuple(number for number in of if self._check.is_long(self._ledger.sets[number]))
        return long if len(long) < len(of) else ()
