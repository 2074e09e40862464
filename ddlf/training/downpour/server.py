"""A slice of the weights on the worker that owns it: what replicas fetch from and push to, in Downpour SGD. Runs in the executor, on its event loop.

A push is named by (replica, life, round, number) and counts once. A replica that is carried anew, after the loss of its worker, lives on with the
next *life*: what an earlier one still sends is refused. Whoever takes the shard over later needs what ``snapshot`` gives, and no more.

Other workers that have copies get such a snapshot after some pushes (``ddlf.training.downpour.copying``). A push that is in all of them is
*safe*; what is not,
its replica keeps, and sends again to whoever takes the shard over. That costs a part of what it would to send each push twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec, Float32
from ddlf.algorithms.encoding import encode_update
from ddlf.algorithms.flat_weights import Row, is_finite
from ddlf.algorithms.push_rules import KNOWN, PUSHED, Last, Pushed, Softsync
from ddlf.algorithms.staleness import STALENESS, Staleness
from ddlf.errors import AppMissing, BadUpdate

INLINE = 1 << 16
"""A shard of at most so many values is stepped on the event loop, a larger one in a thread."""
HOW = ("part", "rule", "staleness", "codec", "collects", "every")
"""What a shard is told once."""


@dataclass(slots=True, kw_only=True)
class Shard:
    """One shard.

    Args:
        weights: Its values that are trained.
        rest: Its values that are not, and change all the same, as moving statistics.
        rule: How a push steps it.
        staleness: What is left of the step of a stale push.
        state: What the rule keeps.
        softsync: Collects pushes, if several make a step.
        codec: How its trained values travel to replicas, also to those on the same worker.
        version: Steps so far.
        received: Pushes so far.
        last: Of each replica its last push.
        how: What ``made`` is told that ``snapshot`` does not change.
        epoch: How often it was given to a worker.
        falls: Of each time that a copy took over, which may have lacked pushes, the epoch from then on and the pushes in it.
        copied: Pushes that are in all copies.
        holders: Workers that are to have copies, and how often each was given the app: if that has changed, its copies are gone.
        closed: Whether it is somebody else's by now.
        marked: The values of some moment, which are to be evaluated: what the master calls that, those that are trained, and the others.
    """

    weights: Row
    rest: Row
    rule: Pushed
    staleness: Staleness
    state: list[Row]
    softsync: Softsync | None = None
    codec: Codec = field(default_factory=Float32)
    version: int = 0
    received: int = 0
    last: dict[int, Last] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    epoch: int = 1
    falls: list[tuple[int, int]] = field(default_factory=list)
    copied: int = 0
    holders: tuple[tuple[int, int], ...] = ()
    closed: bool = False
    marked: tuple[int, Row, Row] | None = None
    _with: frozenset[tuple[int, int]] = frozenset()  # of the holders those that have a copy
    _wanted: int = 0  # pushes that somebody waits for to be safe
    _lent: bool = False
    _encoded: tuple[int, Any] | None = None  # of which version, and what travels
    _lent_state: bool = False
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @classmethod
    def made(cls, facts: dict[str, Any], epoch: int = 1, falls: Sequence[Sequence[int]] = ()) -> Shard:
        """A shard of what ``snapshot`` gave, on another worker, and how it is stepped.

        Args:
            facts: ``weights``, ``rest``, ``rule``, ``staleness`` and ``codec`` as text; ``collects``, pushes that make a step; and what there is
                already: ``state``, ``version``, ``received``, ``last``, ``count`` and ``factors`` of pushes that wait.
            epoch: How often it was given to a worker.
            falls: As attribute.
        """
        weights, rest = (np.array(facts[name], np.float32) for name in ("weights", "rest"))
        rule, state = PUSHED.read(facts["rule"]), [np.array(one, np.float32) for one in facts.get("state", ())]
        softsync = None
        if facts["collects"] > 1:
            total = state.pop() if state else np.zeros(weights.size, np.float32)
            softsync = Softsync(facts["collects"], total, facts.get("count", 0), facts.get("factors", 0.0))
        return cls(
            weights=weights,
            rest=rest,
            rule=rule,
            staleness=STALENESS.read(facts["staleness"]),
            state=state or rule.start(weights.size),
            softsync=softsync,
            codec=CODEC.read(facts.get("codec", "float32")),
            version=facts.get("version", 0),
            received=facts.get("received", 0),
            last={int(replica): Last(*map(int, one)) for replica, *one in facts.get("last", ())},
            how={name: facts[name] for name in HOW if name in facts},
            epoch=epoch,
            falls=[(since, received) for since, received in falls],
        )

    async def snapshot(self) -> dict[str, Any]:
        """All that it is, of one moment."""
        async with self._news:
            return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        self._lent = self._lent_state = True
        softsync = self.softsync
        waiting = [] if softsync is None else [softsync.total.copy()]
        return {
            **self.how,
            "weights": self.weights,
            "rest": self.rest,
            "state": [*self.state, *waiting],
            "version": self.version,
            "received": self.received,
            "last": [[replica, *one] for replica, one in sorted(self.last.items())],
            "count": 0 if softsync is None else softsync.count,
            "factors": 0.0 if softsync is None else softsync.factors,
        }

    async def mark(self, moment: int) -> None:
        """Keep the values of now, to be evaluated; those that were kept before are forgotten. With 0 none are."""
        async with self._news:
            self._lent = self._lent or moment > 0
            self.marked = (moment, self.weights, self.rest) if moment else None

    async def values(self, moment: int) -> list[Row]:
        """The values that were marked; none if those of that moment are not here."""
        return list(self.marked[1:]) if self.marked is not None and self.marked[0] == moment else []

    async def begin(self, replicas: Sequence[int], life: int, round: int) -> list[int]:
        """Hear that replicas begin a round, maybe anew.

        Returns:
            The number of the first push of each that is not here yet.

        Raises:
            AppMissing: A later life of one has begun.
        """
        async with self._news:
            found = []
            for replica in replicas:
                last = self._alive(replica, life)
                self.last[replica] = last._replace(life=life)
                found.append(last.number + 1 if last.round == round else 0)
            received = self.received
        if any(found):  # whoever pushed those is gone, and cannot send them again
            await self.safe(received)
        return found

    async def resume(self, replica: int, life: int, round: int) -> dict[str, Any]:
        """Hear from a replica that has pushed to the one whose shard this was.

        Returns:
            ``last``, its last push of this round that is here, as number, place and staleness; None for none. And ``falls``.

        Raises:
            AppMissing: A later life of it has begun.
        """
        async with self._news:
            last = self._alive(replica, life)
            self.last[replica] = last._replace(life=life)
            here = list(last[2:]) if last.round == round else None
            return {"last": here, "falls": [list(fall) for fall in self.falls]}

    async def fetch(self, replica: int, life: int) -> dict[str, Any]:
        """The values of now.

        Args:
            replica: Who asks.
            life: Which life of it.

        Returns:
            ``weights``, as the codec makes them, and ``rest``, which are not changed any more; ``version``, ``received``; of the replica's last push
            in them ``round`` and ``number``; ``epoch``; and how many pushes are ``safe``.
        """
        async with self._news:
            last = self._alive(replica, life)
            self._lent = True
            last = self.last.get(replica, last)
            return {
                "weights": await self._travelling(),
                "rest": self.rest,
                "version": self.version,
                "received": self.received,
                "round": last.round,
                "number": last.number,
                "epoch": self.epoch,
                "safe": self.now_safe,
            }

    async def push(
        self,
        replica: int,
        life: int,
        round: int,
        number: int,
        read: int,
        gradient: Row,
        rest: Row,
        again: bool = False,
    ) -> tuple[int, int]:
        """Take a push, and step by it.

        Args:
            replica: Whose it is.
            life: Which life of it.
            round: Number of its round, from 0.
            number: Number of the push in it, from 0.
            read: Version of the weights that it was made from.
            gradient: Sum of the gradients, as long as the shard.
            rest: What is subtracted from the values that are not trained.
            again: Whether it may have come already: its answer was lost.

        Returns:
            Pushes that were taken before it, and its staleness.

        Raises:
            AppMissing: A later life of the replica has begun.
            BadUpdate: It does not fit, or was here already.
        """
        async with self._news:
            last = self._alive(replica, life)
            if self.falls and type(read) is int:  # what it was made from may have had pushes that are undone
                read = min(read, self.version)
            if (round, number) <= last[1:3]:
                if again:
                    return (last.at, last.tau) if (round, number) == last[1:3] else (KNOWN, 0)
                raise BadUpdate(f"push {number + 1} of replica {replica + 1} in round {round + 1} came twice")
            self._check(replica, number, read, gradient, rest)
            tau, before = self.version - read, self.received
            try:
                await self._stepped(gradient, rest, tau)
            finally:
                self.received += 1
                self.last[replica] = Last(life, round, number, before, tau)
                self._news.notify_all()
            return before, tau

    # -- its copies -----------------------------------------------------------------------------------------------------

    @property
    def now_safe(self) -> int:
        """Pushes that are not lost with this worker: all of them, if there is nobody to have a copy."""
        return self.copied if self.holders else self.received

    async def safe(self, received: int) -> int:
        """Wait until so many pushes are safe.

        Returns:
            How many are.

        Raises:
            AppMissing: It is somebody else's by now.
        """
        async with self._news:
            wanted = min(received, self.received)
            self._wanted = max(self._wanted, wanted)
            self._news.notify_all()
            await self._news.wait_for(lambda: self.closed or self.now_safe >= wanted)
            self._check_open()
            return self.now_safe

    async def copy_to(self, holders: tuple[tuple[int, int], ...]) -> None:
        """Have copies on these workers from now on."""
        async with self._news:
            self.holders, self._with = holders, self._with & set(holders)
            self._news.notify_all()

    async def copies_due(self, every: int) -> bool:
        """Wait until copies are to be made: when so many pushes have come, somebody waits, or a worker has none; False when it is somebody else's."""

        def due() -> bool:
            late = self.received - self.copied >= every or self._wanted > self.copied
            return self.closed or (bool(self.holders) and (late or not self._with.issuperset(self.holders)))

        async with self._news:
            await self._news.wait_for(due)
            return not self.closed

    async def were_copied(self, holders: tuple[tuple[int, int], ...], received: int) -> None:
        """Say that these workers have copies with so many pushes."""
        async with self._news:
            self.copied, self._with = max(self.copied, received), frozenset(holders)
            self._news.notify_all()

    async def close(self) -> dict[str, Any]:
        """Take nothing any more; returns all that it is."""
        async with self._news:
            self.closed = True
            self._news.notify_all()
            return self._snapshot()

    async def open(self, epoch: int) -> None:
        """Go on after all: whoever was to have it did not get it."""
        async with self._news:
            self.closed, self.epoch = False, epoch

    # -- parts ----------------------------------------------------------------------------------------------------------

    async def _travelling(self) -> Any:
        """The values of now as they travel, which are encoded once for all who fetch them."""
        if isinstance(self.codec, Float32):
            return self.weights
        if self._encoded is None or self._encoded[0] != self.version:
            encode = partial(encode_update, self.codec, [self.weights], [False])
            encoded, _ = await asyncio.to_thread(encode) if self.weights.size > INLINE else encode()
            self._encoded = self.version, encoded
        return self._encoded[1]

    async def _stepped(self, *push: Any) -> None:
        if self.weights.size <= INLINE:
            self._step(*push)
            return
        stepping = asyncio.ensure_future(asyncio.to_thread(self._step, *push))
        try:
            await asyncio.shield(stepping)
        except asyncio.CancelledError:  # who sent it is gone; it counts all the same, and for the whole shard
            await asyncio.wait([stepping])
            raise

    def _step(self, gradient: Row, rest: Row, tau: int) -> None:
        if self._lent:  # what somebody is being sent does not change
            self.weights, self.rest, self._lent = self.weights.copy(), self.rest.copy(), False
        if self._lent_state:
            self.state, self._lent_state = [one.copy() for one in self.state], False
        factor = self.staleness(tau)
        found = (gradient, factor) if self.softsync is None else self.softsync.add(gradient, factor)
        if found is not None:
            step, share = found
            self.rule.apply(self.weights, self.state, step, share, self.version)
            self.version += 1
        self.rest -= rest

    def _check_open(self) -> None:
        if self.closed:
            raise AppMissing("this shard is another worker's by now")

    def _alive(self, replica: int, life: int) -> Last:
        self._check_open()
        last = self.last.get(replica, Last(life))
        if life < last.life:
            raise AppMissing(f"replica {replica + 1} is carried by another worker by now")
        return last

    def _check(self, replica: int, number: int, read: Any, gradient: Any, rest: Any) -> None:
        which = f"push {number + 1} of replica {replica + 1}"
        for name, one, mine in (("values", gradient, self.weights), ("other values", rest, self.rest)):
            if not isinstance(one, np.ndarray) or (one.shape, one.dtype) != (mine.shape, mine.dtype):
                found = f"{one.dtype} {one.shape}" if isinstance(one, np.ndarray) else type(one).__name__
                raise BadUpdate(f"{which} has {found} for {name} of {mine.dtype} {mine.shape}")
            if not is_finite(one):
                raise BadUpdate(f"{which} has NaN or infinite {name}")
        if type(read) is not int or not 0 <= read <= self.version:
            raise BadUpdate(
                f"{which} was made from version {read}, but this shard has had versions 0 to {self.version}"
            )
