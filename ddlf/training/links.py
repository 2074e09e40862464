"""Links between workers of a run that do not reach each other, though the master sees both, and the ways around them. Runs on the master.

What two such workers have for each other goes through a third one that reaches both. Where there is none, the one of the two that more others do not
reach takes no part any more, so its slots are carried by the rest. Either way the bits are the same. All pairs are tried again when workers are
introduced to each other the next time: when one joins or comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ddlf.cluster.introduce import no_way
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConnectError, DDLFError
from ddlf.events import Warned
from ddlf.training.crew import Crew
from ddlf.training.recovery import LOSS

NOTICED_S = 10.0
"""How long the master may take to see that a worker is lost which another one does not reach: longer, and it is the link between them."""

Pair = tuple[int, int]
"""Two workers by number, the lower one first."""


class Links:
    """The links of one run that are broken.

    Args:
        role: How its replicas are called on the workers.
        crew: Workers.
        members: Those that are there, by number.
    """

    def __init__(self, role: tuple[str, str], crew: Crew, members: Callable[[], Mapping[int, ProxyWorker]]) -> None:
        self._role, self._crew, self._members = role, crew, members
        self._broken: dict[Pair, str] = {}
        self._around: dict[Pair, int] = {}  # the worker through which each goes that was told of
        self._one_at_a_time = asyncio.Lock()
        self._looking: set[asyncio.Task[None]] = set()

    async def met(self, unmet: Sequence[tuple[ProxyWorker, ProxyWorker, str]], *, first: bool) -> None:
        """Take note of who was found to have no way to whom, of all workers.

        Args:
            unmet: Who calls, who is called, and why it is not reached.
            first: Whether they meet for the first time: then nobody is left out.

        Raises:
            ConnectError: There is no way around a pair.
        """
        async with self._one_at_a_time:
            if self.missing(unmet) and first:
                error = no_way(unmet)
                self._crew.end(error)
                raise error
            await self._go_around()

    def missing(self, unmet: Sequence[tuple[ProxyWorker, ProxyWorker, str]]) -> str:
        """Which way between two workers there is not, nor one around, in words; empty if there are all. Arguments as of ``met``."""
        self._broken = {
            _pair(one.id, other.id): f"{one.name} has no way to {other.name}: {why}" for one, other, why in unmet
        }
        return next((why for pair, why in self._broken.items() if self._via(pair, Counter()) is None), "")

    async def cut(self, one: int, other: int, why: str) -> None:
        """Go around a link that two workers have lost, which are both there.

        Args:
            one: Number of the one that does not reach the other.
            other: Number of that.
            why: How it noticed.
        """
        async with self._one_at_a_time:
            there = self._members()
            if one in there and other in there and _pair(one, other) not in self._broken:
                self._broken[_pair(one, other)] = (
                    f"{there[one].name} does not reach {there[other].name} any more: {why}"
                )
                await self._go_around()

    def silent(self, worker: int, other: int, why: str) -> None:
        """Find out whether it is the link, or one of both is lost, when a worker hears nothing of another one any more."""
        looking = asyncio.ensure_future(self._look(worker, other, why))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)

    async def close(self) -> None:
        """End what still goes on."""
        for looking in self._looking:
            looking.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    async def _look(self, worker: int, other: int, why: str) -> None:
        there = self._members()
        if worker not in there or other not in there:
            return
        try:
            async with asyncio.timeout(NOTICED_S):
                await there[other].status()  # of its daemon, which answers always
        except (DDLFError, TimeoutError):
            return  # it is lost, of which the crew hears
        await self.cut(worker, other, why)

    async def _go_around(self) -> None:
        """Find a way around each link, tell of those that are new, and have the workers use them."""
        while True:
            there, used = self._members(), Counter[int]()
            pairs = [pair for pair in self._broken if there.keys() >= {*pair}]
            around: dict[Pair, int] = {}
            for pair in pairs:
                if (via := self._via(pair, used)) is not None:
                    around[pair] = via
                    used[via] += 1
            if len(around) == len(pairs):
                break
            alone = Counter(worker for pair in pairs if pair not in around for worker in pair)
            worst = max(alone, key=lambda worker: (sum(worker in pair for pair in pairs), worker))
            why = next(self._broken[pair] for pair in pairs if pair not in around and worst in pair)
            why = f"{why}; no third worker reaches both, so {there[worst].name} is left out"
            self._crew.put_out(there[worst], ConnectError(why, hint="look at the network between the two"))
        for pair, via in around.items():
            if self._around.get(pair) != via:
                why = f"{self._broken[pair]}; what they exchange goes through {there[via].name}"
                self._crew.emit(Warned(about="network", why=why))
        self._around = around
        self._crew.changed()
        await asyncio.gather(*(self._tell(worker, proxy) for worker, proxy in there.items()))

    async def _tell(self, worker: int, proxy: ProxyWorker) -> None:
        ways = [(sum(pair) - worker, via) for pair, via in self._around.items() if worker in pair]
        with contextlib.suppress(*LOSS):  # the crew will hear of it
            await proxy.call(self._role, "go_around", ways)

    def _via(self, pair: Pair, used: Mapping[int, int]) -> int | None:
        """A worker that reaches both of a pair, the one that the fewest pairs use so far; None if there is none."""
        fit = [
            worker
            for worker in self._members()
            if worker not in pair and not any(_pair(worker, one) in self._broken for one in pair)
        ]
        return min(fit, key=lambda worker: (used.get(worker, 0), worker), default=None)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)
