"""The owner and the backups of each Downpour server, as workers come and go. Runs on the master, which alone decides.

When a worker is lost, workers with backups take over its servers, and the servers get new backups elsewhere. A worker
that joins receives a server from a worker that has two more. A worker that leaves the run hands its servers on. Workers
set aside for servers train no slot. If one of them is lost, the next worker that joins replaces it. Each change of the
owner raises the server's *term* (``epoch``), so that a late earlier owner is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ClusterTooSmall, ConnectError, RequestTimeout
from ddlf.events import Warned
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.crew.recovery import LOSS, end_all, first_line
from ddlf.training.exchanges.members import Member, Members
from ddlf.training.refusals import check
from ddlf.training.run import Run
from ddlf.training.strategies.downpour.client import name_of
from ddlf.training.strategies.downpour.state import Ranges, ServerProgress, ServerState, StoredState

if TYPE_CHECKING:
    from ddlf.training.strategies.downpour.settings import DownpourSettings

ANNOUNCE_S = 1.0
"""Seconds to wait until all workers have received new locations. A worker that hangs receives them when it
continues."""
HAND_ON_S = 30.0
"""Time limit for a worker to hand a server on."""


@dataclass(frozen=True, slots=True)
class ServerStart:
    """The state that a server starts with.

    Args:
        state: The state.
        slices: The checkpoint with the values of a ``StoredState``; None for a ``ServerState``.
    """

    state: ServerState | StoredState
    slices: Slices | None = None


Announcement = tuple[int, list[int], list[Ranges], list[int], list[list[Member]]]
"""The arguments of ``Servers.arrange``."""
Restore = Callable[[int], tuple[ServerStart, str]]
"""Returns the state of a server when the master had it last, and a sentence about the pushes lost since."""


class Placement:
    """Decides which workers have the servers of one run and their backups, and tells all workers.

    Args:
        run: The run.
        members: Reaches the workers of the run.
        settings: The settings of Downpour.
        restore: Returns the state to start a server again that has lost its owner and all backups. Raises
            ClusterTooSmall if there is none.

    Attributes:
        owners: The worker of each server; empty before the servers are given to workers.
        parts: For each server, its ranges of the row of trained values and of the row of untrained values.
        reached: Round and number of the last known push of each replica.

    Raises:
        ConfigError: There are too few workers for the backups, or none would be left to train.
    """

    def __init__(self, run: Run, members: Members, settings: DownpourSettings, restore: Restore) -> None:
        check(settings.worker_refusals(len(members.proxies()), one_at_a_time=False))
        self._servers = servers = settings.extra_workers
        run.crew.spared = (
            frozenset(number for number, _ in sorted(members.members())[1:][-servers:]) if servers else frozenset()
        )
        self._run, self._members, self._restore = run, members, restore
        self._copies = 1 if settings.copies is None else settings.copies
        self._role = members.holder
        self.owners: list[Member] = []
        self.parts: list[Ranges] = []
        self.reached: dict[int, tuple[int, int]] = {}
        self._epochs: list[int] = []
        self._highest_epochs: list[int] = []  # the highest term that a worker may have seen, by server
        self._holders: list[list[Member]] = []
        self._rollbacks: list[list[list[int]]] = []
        self._number = 0
        self._arranged: set[Member] = set()
        self._met = {number for number, _ in members.members()}
        self._lost_members: set[Member] = set()
        self._one_at_a_time = asyncio.Lock()
        self._announcing: set[asyncio.Task[None]] = set()

    @property
    def epochs(self) -> Sequence[int]:
        """The term of each server."""
        return self._epochs

    @property
    def holders(self) -> Sequence[Sequence[Member]]:
        """For each server, the workers that are to have its backups."""
        return self._holders

    async def assign(self, parts: Sequence[Ranges], starts: Sequence[ServerStart]) -> None:
        """Give each server to a worker at the beginning, and announce to all workers which worker has it.

        Args:
            parts: For each server, its ranges of the row of trained values and of the row of untrained values.
            starts: Initial state of each server.

        Raises:
            ConnectError: All workers are lost. The next task tries again.
        """
        async with self._one_at_a_time:
            epoch = 1
            while not self.owners:
                alive = {
                    member: worker
                    for member, worker in self._members.members().items()
                    if member not in self._lost_members
                }
                if not (pool := self._pool(alive)):
                    raise ConnectError("all workers were lost while they received the shards")
                owners = [pool[shard % len(pool)] for shard in range(len(parts))]
                giving = [
                    self._assign(alive[owner], epoch, shard, starts[shard], []) for shard, owner in enumerate(owners)
                ]
                outcomes = await asyncio.gather(*giving, return_exceptions=True)
                lost = {
                    owner: outcome
                    for owner, outcome in zip(owners, outcomes, strict=True)
                    if isinstance(outcome, BaseException)
                }
                for owner, error in lost.items():
                    if not isinstance(error, LOSS):
                        raise error
                    self._lost_members.add(owner)
                    if not self._alive():
                        raise error
                if not lost:
                    self.owners, self.parts = owners, list(parts)
                    self._epochs = [epoch] * len(owners)
                    self._highest_epochs = [epoch] * len(owners)
                    self._holders, self._rollbacks = [[] for _ in owners], [[] for _ in owners]
                epoch += 1
            self._arranged = set(self._alive())
            await self._arrange()

    async def replace_lost(self) -> None:
        """Make sure that each server and each backup is on a worker that is still in the run.

        Raises:
            ClusterTooSmall: A server is lost, and there is no backup or checkpoint to continue from.
        """
        members = self._members.members()
        for owner in dict.fromkeys(self.owners):
            if owner not in members:
                await self.lost(owner, None)
        for member, worker in members.items():
            if member in self._arranged and not worker.connected:
                self._run.crew.lose_if_free(worker, ConnectError("the connection was lost", worker=worker.name))
        async with self._one_at_a_time:
            alive = self._alive()
            if any(holder not in alive for holders in self._holders for holder in holders):
                await self._arrange()

    async def announce_to_new(self) -> None:
        """Tell workers that joined since the last announcement which workers have the servers."""
        async with self._one_at_a_time:
            alive = self._alive()
            if new := alive.keys() - self._arranged:
                self._replace_servers(alive, new)
                self._arranged |= new
                await self._arrange()

    async def balance(self) -> None:
        """Move a server to a worker with at least two fewer servers, or away from a worker that should have none."""
        alive = self._alive()
        pool = [member for member in self._pool(alive) if member in self._arranged]
        load = Counter(dict.fromkeys(pool, 0))
        load.update(owner for owner in self.owners if owner in pool)
        misplaced = [owner for owner in self.owners if owner in alive and owner not in pool]
        if pool and (misplaced or max(load.values()) - min(load.values()) >= 2):
            most, least = (
                (misplaced or [load.most_common()[0][0]])[0],
                min(load, key=lambda member: (load[member], member)),
            )
            shard = max(shard for shard, owner in enumerate(self.owners) if owner == most)
            async with self._one_at_a_time:
                if self.owners[shard] != most:
                    return
                if await self._hand_on(shard, alive[most], least, alive[least]):
                    reason = "was set aside for shards" if misplaced else "had fewer"
                    self._warn(
                        f"{self._called([shard])} went from worker {most[0]} to worker {least[0]}, which {reason}"
                    )
                await self._arrange()

    async def call(self, shard: int, verb: str, *arguments: Any) -> Any:
        """Call a method of a server on its current owner, and return the answer.

        Raises:
            ClusterTooSmall: The server is lost, and there is no backup or checkpoint to continue from.
        """
        while True:
            owner, epoch = self.owners[shard], self._epochs[shard]
            worker = None if owner in self._lost_members else self._members.members().get(owner)
            error: Exception | None = None
            if worker is not None:
                try:
                    return await worker.call((self._role[0], name_of(shard, epoch)), verb, *arguments)
                except LOSS as loss:
                    error = loss
            async with self._one_at_a_time:
                moved = (owner, epoch) != (self.owners[shard], self._epochs[shard])
            if not moved:
                await self.lost(owner, error)

    async def versions(self) -> list[int]:
        """Return how many steps each server has made. Servers whose worker is lost during the call are missing.

        Raises:
            ClusterTooSmall: A server is lost, and there is no backup or checkpoint to continue from.
        """

        async def of(owner: Member, worker: ProxyWorker) -> list[int]:
            try:
                servers: list[ServerProgress] = await worker.call(self._role, "progress")
            except LOSS as error:
                await self.lost(owner, error)
                return []
            for server in servers:
                for replica, reached in server.reached.items():
                    self.reached[replica] = max(self.reached.get(replica, reached), reached)
            return [server.version for server in servers if self.owners[server.shard] == owner]

        await self.replace_lost()
        members = self._members.members()
        asking = [of(owner, members[owner]) for owner in dict.fromkeys(self.owners) if owner in members]
        return [version for versions in await asyncio.gather(*asking) for version in versions]

    async def lost(self, owner: Member, error: Exception | None) -> None:
        """Have other workers take over the servers of a lost or leaving worker.

        Args:
            owner: The worker.
            error: The error that told the master of the loss; None if the worker has left the run.

        Raises:
            ClusterTooSmall: There is no backup or checkpoint to continue from.
        """
        async with self._one_at_a_time:
            if owner not in self.owners:
                return
            self._lost_members.add(owner)
            worker = self._members.members().get(owner)
            if worker is not None and error is not None:
                self._run.crew.lose_if_free(worker, error)
            for shard in [shard for shard, other in enumerate(self.owners) if other == owner]:
                await self._replace(shard, owner, "" if error is None else f" ({first_line(error)})")
            await self._arrange()

    async def hand_back(self, number: int) -> None:
        """Have other workers take over the servers of a worker that is leaving."""
        for owner in {owner for owner in self.owners if owner[0] == number}:
            await self.lost(owner, None)

    async def close(self) -> None:
        """Cancel announcements that have not reached their workers yet."""
        await end_all([*self._announcing])

    # -- parts --------------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Return the number of workers that may have servers: those set aside for servers, or all workers."""
        return len(self._pool(self._members.members()))

    def _replace_servers(self, alive: Collection[Member], new: Collection[Member]) -> None:
        """Set new workers aside for servers, in place of lost ones. Only workers that have just joined are chosen."""
        crew, present = self._run.crew, {number for number, _ in alive}
        for number in sorted({number for number, _ in new} - self._met):
            if absent := crew.spared - present:
                crew.spared = crew.spared - {min(absent)} | {number}
        self._met |= present

    def _pool(self, alive: Collection[Member]) -> list[Member]:
        """Return the workers that may have servers: those set aside for them, while one is present, otherwise all."""
        spared = [member for member in alive if member[0] in self._run.crew.spared]
        return sorted(spared or alive)

    def _alive(self) -> dict[Member, ProxyWorker]:
        return {
            member: worker
            for member, worker in self._members.members().items()
            if member not in self._lost_members and worker.connected
        }

    async def _assign(
        self, worker: ProxyWorker, epoch: int, shard: int, start: ServerStart, rollbacks: Sequence[Sequence[int]]
    ) -> None:
        """Have a worker own a server. It receives the values, or reads them from a slice of a checkpoint."""
        if start.slices is not None:
            await self._members.checkpoints.give(worker, start.slices, [shard])
        verb = "own" if start.slices is None else "own_stored"
        await worker.call(self._role, verb, epoch, shard, start.state.to_message(), rollbacks)
        self._run.crew.served(worker.id)

    async def _replace(self, shard: int, owner: Member, cause: str) -> None:
        """Find a new owner for a server: a worker with its backup.

        Without a backup, give the last state of the server that the master had to any worker.
        """
        if self._run.crew.is_leaving(owner[0]) and await self._handed_on(shard, owner):
            return
        for holder in self._holders[shard]:
            worker = self._alive().get(holder)
            if worker is not None and await self._take_over(shard, holder, worker, self._next_epoch(shard)):
                self._warn(
                    f"{self._called([shard])} was on worker {owner[0]}, which is lost{cause}: worker {holder[0]} continues with its copy"
                )
                return
        if await self._handed_on(shard, owner):
            return
        try:
            start, since = self._restore(shard)
        except ClusterTooSmall as error:
            shards = [number for number, other in enumerate(self.owners) if other == owner]
            error = ClusterTooSmall(
                f"{self._called(shards)} of the weights {'were' if len(shards) > 1 else 'was'} on worker {owner[0]}, "
                f"which is lost{cause}{error.message}",
                hint=error.hint,
            )
            self._run.crew.end(error)
            raise error from None
        while True:
            alive = self._alive()
            if not alive:
                too_small = ClusterTooSmall(
                    f"{self._called([shard])} of the weights is lost{cause}, and so are all workers"
                )
                self._run.crew.end(too_small)
                raise too_small
            load = Counter(self.owners)
            new_owner = min(self._pool(alive), key=lambda member: (member not in self._arranged, load[member], member))
            self._epochs[shard] = epoch = self._next_epoch(shard)
            received = start.state.counters.received
            self._rollbacks[shard] = [*self._rollbacks[shard], [epoch, received]]
            try:
                await self._assign(alive[new_owner], epoch, shard, start, self._rollbacks[shard])
            except LOSS:
                self._lost_members.add(new_owner)
                continue
            self.owners[shard] = new_owner
            sentence = f"{self._called([shard])} was on worker {owner[0]}, which is lost{cause}; {since}"
            self._run.verdicts.append(sentence)
            self._warn(sentence)
            return

    async def _take_over(
        self, shard: int, holder: Member, worker: ProxyWorker, epoch: int, *, whole: bool = False
    ) -> bool:
        """Have a worker turn its backup of a server into the server, for a new term. Return whether the worker did."""
        self._epochs[shard] = epoch
        try:
            rollbacks = await worker.call(self._role, "take_over", epoch, shard, self._rollbacks[shard], whole)
        except LOSS:
            return False
        self.owners[shard], self._rollbacks[shard] = holder, [list(rollback) for rollback in rollbacks]
        self._run.crew.served(holder[0])
        return True

    async def _handed_on(self, shard: int, owner: Member) -> bool:
        """Have a worker that has left the run, but is still connected, hand a server on. Return whether it did."""
        proxies = {worker.id: worker for worker in self._members.proxies()}
        worker, alive = proxies.get(owner[0]), self._alive()
        is_member = owner in self._members.members() and not self._run.crew.is_leaving(owner[0])
        if worker is None or not worker.connected or is_member or not alive:
            return False
        load = Counter(self.owners)
        to = min(self._pool(alive), key=lambda member: (member not in self._arranged, load[member], member))
        if not await self._hand_on(shard, worker, to, alive[to]):
            return False
        self._warn(
            f"{self._called([shard])} went from worker {owner[0]}, which takes no part any more, to worker {to[0]}"
        )
        return True

    async def _hand_on(self, shard: int, worker: ProxyWorker, to: Member, other: ProxyWorker) -> bool:
        """Have a worker send a server's whole state to another one, which then owns it. Return whether it does."""
        epoch, owner = self._epochs[shard], self.owners[shard]
        receivers = [to[0], *(number for number, _ in self._holders[shard] if number != to[0])]
        following = self._next_epoch(shard)
        try:
            refusal = await worker.call(self._role, "release", epoch, shard, following, receivers, timeout_s=HAND_ON_S)
        except (*LOSS, RequestTimeout) as error:
            refusal = first_line(error)
        if not refusal and await self._take_over(shard, to, other, following, whole=True):
            return True
        if not await self._take_over(shard, owner, worker, self._next_epoch(shard), whole=True):
            self._epochs[shard] = epoch  # the owner is lost, too; the loss is noticed later, and the backups stay valid
        return False

    def _next_epoch(self, shard: int) -> int:
        """Return a term of a server that no worker has seen: a worker refuses backups of a term before one that it has seen."""
        self._highest_epochs[shard] += 1
        return self._highest_epochs[shard]

    async def _arrange(self) -> None:
        """Choose the workers that keep backups of each server, and announce all servers and backups to all workers."""
        alive = self._alive()
        arranged = [member for member in sorted(alive) if member in self._arranged]
        load = Counter(holder for holders in self._holders for holder in holders)
        spared = self._run.crew.spared
        for shard, owner in enumerate(self.owners):
            holders = [holder for holder in self._holders[shard] if holder in alive and holder != owner]
            position = arranged.index(owner) if owner in arranged else 0
            following = [
                *arranged[position + 1 :],
                *arranged[:position],
            ]  # the next workers first, preferably on other machines
            candidates = [member for member in following if member != owner and member not in holders]
            candidates.sort(
                key=lambda member: (
                    owner in alive and alive[member].host == alive[owner].host,
                    bool(spared) and member[0] not in spared,
                    load[member],
                )
            )
            more = candidates[: max(self._copies - len(holders), 0)]
            load.update(more)
            self._holders[shard] = [*holders, *more]
        self._number += 1
        announcement: Announcement = (
            self._number,
            [number for number, _ in self.owners],
            self.parts,
            self._epochs,
            self._holders,
        )
        announcing = {asyncio.ensure_future(self._announce(member, alive[member], announcement)) for member in arranged}
        self._announcing |= announcing
        for task in announcing:
            task.add_done_callback(self._finish_announcing)
        if announcing:
            await asyncio.wait(announcing, timeout=ANNOUNCE_S)

    async def _announce(self, member: Member, worker: ProxyWorker, announcement: Announcement) -> None:
        try:
            await worker.call(self._role, "arrange", *announcement)
        except LOSS as error:
            self._arranged.discard(member)
            self._run.crew.lose_if_free(worker, error)

    def _finish_announcing(self, announcing: asyncio.Task[None]) -> None:
        self._announcing.discard(announcing)
        if not announcing.cancelled() and isinstance(error := announcing.exception(), Exception):
            self._run.crew.end(error)

    def _called(self, shards: Sequence[int]) -> str:
        numbers = ", ".join(str(shard + 1) for shard in shards)
        return f"shard{'s' * (len(shards) > 1)} {numbers} of {len(self.owners)}"

    def _warn(self, sentence: str) -> None:
        self._run.crew.emit(Warned(about="shards", why=sentence))
