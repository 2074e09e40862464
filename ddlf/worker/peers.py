"""The other workers of a run: which of them this worker may call, and which may call it. Runs in the executor, on its
event loop.

The master of a run introduces its workers to each other (``ddlf.cluster.introduce``). Each worker receives the
addresses of the others, the passes to show to them, and the names of its callers. A worker connects to another one by
the same handshake as a master. It begins with ``greet``, in which both sides check that they have reached the right
worker. From then on it may call the offered verbs of the run's roles, with data only. This right ends with the lease
under which the master gave it, with the run, and when the master introduces its workers again without that worker.
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
"""Most connections that one worker opens at once when it meets all others. If many workers do so at the same time, no
worker gets more connections than its admission allows.
"""


def refuse_code(tag: Tag, data: bytes) -> NoReturn:
    """Refuse pickled objects. This is the ``load_object`` between workers."""
    raise ProtocolError("another worker sent a pickled object, where only data is allowed")


@dataclass(frozen=True, slots=True)
class Admitted:
    """Another worker that may call this worker.

    Args:
        executor: Name of the caller's executor, as it reports it.
        run: Name of the run.
        lease: The key of the lease under which it was admitted.
    """

    executor: str
    run: str
    lease: bytes


class Peers(Mapping[int, Peer]):
    """The other workers that this worker may call, by their numbers.

    Args:
        executor: Unique name of this worker's executor.

    Attributes:
        run: Name of their run; empty if there is none.
        me: Number of this worker in it.
        numbers: Numbers for requests to them.
        dialling: How to connect to them.
        lease: Returns the key of this worker's lease.
        changed: Called when the set of workers that may call this worker changes.
        lost: Called with the number of a worker whose link is silent, and the reason.
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
        """Record which workers may call each other. This replaces the previous introduction.

        Args:
            run: Name of the run.
            me: Number of this worker in it.
            lease: The key, which only the master that has the worker knows.
            callers: Executors of the workers that may call this worker.
            peers: The workers that it may call: the arguments id, name, addresses and shows of ``Peer``.
            dead_after_s: Seconds of silence before a link counts as lost.

        Raises:
            LeaseError: The caller is not the master that has the worker.
        """
        if not any(lease) or lease != self.lease():
            raise LeaseError("only the master that has a worker can introduce it to others", hint="not as a guest")
        before = self._peers if (run, me, lease) == (self.run, self.me, self._lease) else {}
        self.run, self.me, self._lease, self._callers = run, me, lease, frozenset(callers)
        old, self._peers = self._peers, {}
        for facts in sorted(peers, key=lambda facts: facts["id"]):
            peer = before.get(facts["id"])
            # The pass differs for each lease, and therefore after each return of the master.
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
        """Try to connect to each worker.

        Returns:
            The numbers of the workers that were not reached, with the reasons.
        """
        # Begin with the next worker, so that not all workers connect to the first one at the same time.
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

    # -- requests of other workers ------------------------------------------------------------------------------------

    def greet(self, *asked: Any) -> tuple[dict[str, Any], Admitted | None]:
        """Identify this worker, and check whether another worker may call it.

        Args:
            asked: Name of the run, number of the wanted worker, the caller's executor, and its pass.

        Returns:
            Facts for the caller, and its admission; None if it is not admitted.

        Raises:
            ProtocolError: The arguments do not have this form.
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
        """Return why an admitted worker may no longer call this worker; None if it may."""
        now = admitted.run == self.run and admitted.lease == self.lease() and admitted.executor in self._callers
        return None if now else LeaseError("may not be called by that worker any more", hint="its master has gone on")

    def check(self, admitted: Admitted | None, command: str, args: list[Any]) -> None:
        """Check whether another worker may send a request.

        Raises:
            LeaseError: It may send no requests.
            ProtocolError: It may not send this request.
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
        """Forget the peers of a run that has ended on this worker."""
        if run == self.run:
            self.close()
            self.changed()

    def end_without_lease(self) -> None:
        """End all connections if the lease has changed."""
        if self.run and self.lease() != self._lease:
            self.close()

    def close(self) -> None:
        """End the connections to all peers, and admit none of them."""
        self.run, self._lease, self._callers = "", b"", frozenset()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
