"""The other workers of a run: whom this one may call, and who may call it. Runs in the executor, on its event loop.

The master of a run introduces its workers to each other (``ddlf.cluster.introduce``): each is told where the others are, what to show to them, and
who will come. A worker dials another one as a master does, by the same handshake, and begins with ``greet``, in which both find out whether they have
reached whom they meant. From then on it may call what the roles of that run offer, with data alone. All of it ends with the lease under which the
master said so, with the run, and when the master introduces its workers again without that one.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ddlf.errors import AppMissing, DDLFError, LeaseError, ProtocolError
from ddlf.rpc.values import Tag
from ddlf.worker.lease import peer_pass
from ddlf.worker.peer import Dialling, Peer

DIALS_AT_ONCE = 4
"""Of one worker that meets all others: of many workers that do so at the same time, none is dialled by more than its admission lets in."""


def refuse_code(tag: Tag, data: bytes) -> NoReturn:
    """The ``load_object`` of what workers send each other."""
    raise ProtocolError("another worker sent a pickled object, where only data is allowed")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Another worker that may call this one.

    Args:
        executor: The caller's, as it names itself.
        run: Name of the run.
        lease: The key under which it was let in.
    """

    executor: str
    run: str
    lease: bytes


class Peers(Mapping[int, Peer]):
    """The other workers that this one may call, by their numbers.

    Args:
        executor: Name of this worker's executor, which no other has.

    Attributes:
        run: Name of the run that they are in; empty when there is none.
        me: Number of this worker in it.
        numbers: For requests to them.
        dialling: How they are reached.
        lease: Returns the key of this worker's lease.
        changed: Called when others may not call this worker any more.
        lost: Called with the number of a worker of which nothing is heard any more, and why that is known.
    """

    def __init__(self, executor: str) -> None:
        self.executor = executor
        self.run = ""
        self.me = 0
        self.numbers: Iterator[int] = itertools.count(1)
        self.dialling = Dialling(())
        self.lease: Callable[[], bytes] = lambda: b""
        self.changed: Callable[[], object] = lambda: None
        self.lost: Callable[[int, str], object] = lambda id, why: None
        self._peers: dict[int, Peer] = {}
        self._callers: frozenset[str] = frozenset()
        self._lease = b""

    def __getitem__(self, id: int) -> Peer:
        if id not in self._peers:
            raise AppMissing(f"worker {id} is none that this one may call in this run")
        return self._peers[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    # -- commands of the master ---------------------------------------------------------------------------------------

    async def introduce(
        self,
        run: str,
        me: int,
        lease: bytes,
        callers: list[str],
        peers: list[dict[str, Any]],
        dead_after_s: float,
    ) -> None:
        """Take note of who may call whom, instead of what was said before.

        Args:
            run: Name of the run.
            me: Number of this worker in it.
            lease: The key, which only the master that has the worker knows.
            callers: Executors of those who may call this worker.
            peers: Those that it may call: id, name, addresses and shows, as ``Peer`` takes them.
            dead_after_s: As ``Peer`` takes it.

        Raises:
            LeaseError: Who asks does not have the worker.
        """
        if not any(lease) or lease != self.lease():
            raise LeaseError("only the master that has a worker can introduce it to others", hint="not as a guest")
        before = self._peers if (run, me, lease) == (self.run, self.me, self._lease) else {}
        self.run, self.me, self._lease, self._callers = run, me, lease, frozenset(callers)
        old, self._peers = self._peers, {}
        for facts in sorted(peers, key=lambda facts: facts["id"]):
            peer = before.get(facts["id"])
            # What lets this side in is another one for another lease, and so for each time that its master came back.
            if peer is not None and peer.shows == facts["shows"]:
                peer.found_at(facts["addresses"])
            else:
                peer = Peer(self, **facts, dead_after_s=dead_after_s)
            self._peers[facts["id"]] = peer
        for peer in old.values():
            if self._peers.get(peer.id) is not peer:
                peer.close()
        self.changed()

    async def meet(self) -> list[tuple[int, str]]:
        """Try to reach each.

        Returns:
            The numbers of those that were not reached, with why.
        """
        # From the next one on, so that not all workers dial the first one first.
        order = sorted(self._peers.values(), key=lambda peer: (peer.id < self.me, peer.id))
        places = asyncio.Semaphore(DIALS_AT_ONCE)

        async def reach(peer: Peer) -> tuple[int, str] | None:
            async with places:
                try:
                    await peer.reach()
                except DDLFError as error:
                    return peer.id, error.message
            return None

        return [found for found in await asyncio.gather(*map(reach, order)) if found is not None]

    # -- what others ask of this worker -------------------------------------------------------------------------------

    def greet(self, *asked: Any) -> tuple[dict[str, Any], Admitted | None]:
        """Say who this is, and whether another worker may call it.

        Args:
            asked: Name of the run, number of the worker that is looked for, the caller's executor, and what it shows.

        Returns:
            Facts for it, and what lets it in; None if it is not let in.

        Raises:
            ProtocolError: Those are not what was asked.
        """
        if list(map(type, asked)) != [str, int, str, bytes]:
            raise ProtocolError("greet takes a run, a number, the name of an executor, and what it shows")
        run, id, executor, shown = asked
        lease, refusal = self.lease(), ""
        if run != self.run or lease != self._lease or not run:
            refusal = "the worker is not in this run, or not any more"
        elif id != self.me:
            refusal = f"this is worker {self.me}"
        elif executor not in self._callers:
            refusal = "its master has not allowed this worker to call it"
        elif not hmac.compare_digest(shown, peer_pass(lease, run, executor)):
            refusal = "this worker was not let in with the lease that its master has now"
        in_run = run == self.run and lease == self._lease
        facts = {"executor": self.executor, "run": run if in_run else "", "id": self.me, "refusal": refusal}
        return facts, None if refusal else Admitted(executor, run, lease)

    def refusal(self, admitted: Admitted) -> LeaseError | None:
        """Why another worker that was let in may not call this one any more; None if it may."""
        now = admitted.run == self.run and admitted.lease == self.lease() and admitted.executor in self._callers
        return None if now else LeaseError("may not be called by that worker any more", hint="its master has gone on")

    def check(self, admitted: Admitted | None, command: str, args: list[Any]) -> None:
        """Find out whether another worker may ask that.

        Raises:
            LeaseError: It may not ask anything.
            ProtocolError: Not that.
        """
        if admitted is None:
            raise LeaseError("a session of a worker begins with greet")
        if refusal := self.refusal(admitted):
            raise refusal
        if command != "call":
            raise ProtocolError(f"a worker may call what roles offer to others, and not {command[:40]!r}")
        if args[:1] != [admitted.run]:
            raise ProtocolError("a worker may call roles of the run that it was let in for, and no others")

    # -- the end ------------------------------------------------------------------------------------------------------

    def forget(self, run: str) -> None:
        """The run is over here."""
        if run == self.run:
            self.close()
            self.changed()

    def end_without_lease(self) -> None:
        """Let go of all if the lease is another one by now."""
        if self.run and self.lease() != self._lease:
            self.close()

    def close(self) -> None:
        """Call nobody any more, and let nobody call."""
        self.run, self._lease, self._callers = "", b"", frozenset()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
