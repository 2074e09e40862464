"""Servers of Downpour SGD: replicas fetch ranges of the weights from them, and push to them. Runs in the executor.

Each server is a role on a worker's event loop, which replicas on other workers call. ``Servers`` has all servers of one
worker. The master decides which workers have which servers.

A push is identified by (replica, incarnation, round, number) and counts once. When a replica is carried again after the
loss of its worker, it gets the next incarnation number (``life``). Servers refuse calls from an earlier incarnation. A
new owner of a server needs the contents of ``snapshot``, and nothing else.

Workers with backups receive such a snapshot after some pushes. It replaces the whole backup by the server's state at
one moment: its values and its rule's state. With one array of state and as many pushes as replicas between snapshots,
this adds an eighth of the traffic of 8 replicas. A push that all backups contain is *safe*. A replica keeps its unsafe
pushes, and sends them again to a new owner. This costs a fraction of sending each push twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec, Float32
from ddlf.algorithms.encoding import EncodedUpdate, encode_update
from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.push_rules import KNOWN, PUSHED, Last, Pushed, Softsync, is_finite
from ddlf.algorithms.staleness import STALENESS, Staleness
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppMissing, BadUpdate, DDLFError
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import Destination, Written, write_if_seen
from ddlf.training.roles import SERVERS
from ddlf.training.strategies.downpour.client import RETRY_S, FetchedRange, Owners, Resumed, name_of
from ddlf.training.strategies.downpour.state import (
    Counters,
    Ranges,
    ServerProgress,
    ServerSettings,
    ServerState,
    StoredState,
    Summary,
)
from ddlf.worker.activity import Shard
from ddlf.worker.calls import Hosting, concurrent, offered
from ddlf.worker.peers import Ask, Unreached

INLINE = 1 << 16
"""A server with at most this many values steps on the event loop, a larger one in a thread."""


@dataclass(slots=True, kw_only=True)
class Server:
    """One Downpour server: a range of the weights on a worker, which replicas on other workers fetch and push to.

    Args:
        settings: Its settings, which never change.
        weights: The trained values of its range.
        rest: The untrained values of its range that change during training, such as moving statistics.
        rule: Push rule.
        staleness: Rule for the weight of a push that was computed from old weights.
        state: State of the push rule.
        softsync: Collects pushes, if several pushes make one step.
        codec: Codec of trained values to replicas, including replicas on the same worker.
        version: Number of steps so far.
        received: Number of pushes so far.
        last: Last push of each replica.
        epoch: Term: the number of times that the server was given to a worker.
        rollbacks: Losses of pushes. For each takeover by a backup that may have missed pushes: the term from then on,
            and the number of pushes in the backup.
        copied: Number of pushes in all backups.
        holders: Workers that are to have backups, and how often each received the app. A changed count means that its
            backups are lost.
        closed: Whether another worker owns the server now.
        worker: Number of this worker.
        rows: Returns the rows of the model, to write the server into a checkpoint.
        marked: Values to evaluate: the number that the master gave to this state, the trained values, and the others.
    """

    settings: ServerSettings
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
    epoch: int = 1
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    copied: int = 0
    holders: tuple[tuple[int, int], ...] = ()
    closed: bool = False
    marked: tuple[int, Row, Row] | None = None
    worker: int = 0
    rows: Callable[[], Rows] | None = None
    _with: frozenset[tuple[int, int]] = frozenset()  # the holders that have a backup
    _required: int = 0  # number of pushes that a caller waits for to be safe
    _lent: bool = False  # whether a message may still contain the values, so that the next step has to copy them
    _encoded: tuple[int, EncodedUpdate] | None = None  # version, and its encoded weights
    _lent_state: bool = False  # the same for the rule's state
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @classmethod
    def from_state(cls, state: ServerState, epoch: int = 1, rollbacks: Sequence[Sequence[int]] = ()) -> Server:
        """Return a server with a state, such as that of a server on another worker or of an earlier one.

        Args:
            state: Its state. Without arrays of the push rule, the rule starts with its initial state.
            epoch: The server's term.
            rollbacks: Its rollbacks.
        """
        settings, counters = state.settings, state.counters
        weights, rest = (np.array(row, np.float32) for row in (state.weights, state.rest))
        rule, rule_rows = PUSHED.read(settings.rule), [np.array(row, np.float32) for row in state.rule_rows]
        softsync = None
        if settings.collects > 1:
            total = rule_rows.pop() if rule_rows else np.zeros(weights.size, np.float32)
            softsync = Softsync(settings.collects, total, counters.count, counters.factors)
        return cls(
            settings=settings,
            weights=weights,
            rest=rest,
            rule=rule,
            staleness=STALENESS.read(settings.staleness),
            state=rule_rows or rule.start(weights.size),
            softsync=softsync,
            codec=CODEC.read(settings.codec),
            version=counters.version,
            received=counters.received,
            last=dict(counters.last),
            epoch=epoch,
            rollbacks=[(since, received) for since, received in rollbacks],
        )

    @concurrent
    async def snapshot(self) -> dict[str, Any]:
        """Return the message of the server's whole state at one moment, a ``ServerState``."""
        return (await self.whole_state()).to_message()

    async def whole_state(self) -> ServerState:
        """Return the server's whole state at one moment, for backups, new owners and checkpoints."""
        async with self._news:
            return self._whole_state()

    def _whole_state(self) -> ServerState:
        self._lent = self._lent_state = True
        softsync = self.softsync
        return ServerState(
            settings=self.settings,
            counters=Counters(
                version=self.version,
                received=self.received,
                count=0 if softsync is None else softsync.count,
                factors=0.0 if softsync is None else softsync.factors,
                last=dict(self.last),
            ),
            weights=self.weights,
            rest=self.rest,
            rule_rows=[*self.state, *([] if softsync is None else [softsync.total.copy()])],
        )

    @concurrent
    async def mark(self, moment: int) -> None:
        """Keep a copy of the current values for evaluation, instead of an earlier copy, while training continues.

        The master numbers the moment. With 0, keep no copy.
        """
        async with self._news:
            self._lent = self._lent or moment > 0
            self.marked = (moment, self.weights, self.rest) if moment else None

    @offered
    async def values(self, moment: int) -> list[Row]:
        """Return the copy of the values that ``mark`` kept: trained values, then others.

        Return an empty list if the copy is from another moment.
        """
        return list(self.marked[1:]) if self.marked is not None and self.marked[0] == moment else []

    @offered
    async def begin(self, replicas: Sequence[int], life: int, round: int) -> list[int]:
        """Note that replicas begin a round, or begin it again after a loss.

        Returns:
            For each replica, the number of its first push that this server lacks.

        Raises:
            AppMissing: A later incarnation of a replica has begun.
        """
        async with self._news:
            numbers = []
            for replica in replicas:
                last = self._alive(replica, life)
                self.last[replica] = last._replace(life=life)
                numbers.append(last.number + 1 if last.round == round else 0)
            received = self.received
        if any(numbers):  # the earlier incarnation is gone, and cannot send its pushes again
            await self.safe(received)
        return numbers

    @offered
    async def resume(self, replica: int, life: int, round: int) -> dict[str, Any]:
        """Note that a replica continues with this server after pushes to an earlier owner.

        Returns:
            The message of a ``Resumed``.

        Raises:
            AppMissing: A later incarnation of the replica has begun.
        """
        async with self._news:
            last = self._alive(replica, life)
            self.last[replica] = last._replace(life=life)
            last_push = last[2:] if last.round == round else None
            return Resumed(last=last_push, rollbacks=list(self.rollbacks)).to_message()

    @offered
    async def fetch(self, replica: int, life: int) -> list[Any]:
        """Return the current values of the server's range to a replica.

        Args:
            replica: Number of the calling replica.
            life: Its incarnation: how often the replica has begun a round, or begun it again after a loss.

        Returns:
            The fields of a ``FetchedRange``. Its arrays never change afterwards.
        """
        async with self._news:
            last = self._alive(replica, life)
            self._lent = True
            last = self.last.get(replica, last)
            fetched = FetchedRange(
                weights=await self._travelling(),
                rest=self.rest,
                version=self.version,
                received=self.received,
                round=last.round,
                number=last.number,
                epoch=self.epoch,
                safe=self.now_safe,
            )
            return list(fetched)

    @offered
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
        """Receive a push from a replica, and change the weights by it.

        Args:
            replica: Number of the replica.
            life: Its incarnation: how often the replica has begun a round, or begun it again after a loss.
            round: Number of its round, from 0.
            number: Number of the push in the round, from 0.
            read: Version of the weights that the gradient was computed from.
            gradient: Sum of the gradients, one value for each of the server's weights.
            rest: Values to subtract from the untrained values.
            again: Whether the push may have arrived already, because its answer was lost.

        Returns:
            The number of pushes received before it, and its staleness.

        Raises:
            AppMissing: A later incarnation of the replica has begun.
            BadUpdate: The push does not fit, or arrived before.
        """
        async with self._news:
            last = self._alive(replica, life)
            if self.rollbacks and type(read) is int:  # its weights may have contained pushes that a rollback has undone
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

    @concurrent
    async def write(self, part: Ranges, names: Sequence[str], destination: Destination) -> Written[Summary]:
        """Write the server's whole state into a checkpoint.

        Args:
            part: The server's ranges of the rows of trained and untrained values.
            names: Paths of the weights.
            destination: Destination.

        Returns:
            The result of ``write_if_seen``, and the summary of the state.
        """
        assert self.rows is not None
        state = await self.whole_state()
        arrays = state.to_arrays(self.rows(), part, names)
        return await asyncio.to_thread(write_if_seen, destination, arrays, self.worker), state.summary()

    # -- its backups --------------------------------------------------------------------------------------------------

    @property
    def now_safe(self) -> int:
        """Number of pushes that survive the loss of this worker.

        These are the pushes in all backups, or all pushes if no worker is to have a backup.
        """
        return self.copied if self.holders else self.received

    @offered
    async def safe(self, received: int) -> int:
        """Wait until the backups contain a number of pushes, so that these are safe.

        Returns:
            The number of safe pushes.

        Raises:
            AppMissing: Another worker owns the server now.
        """
        async with self._news:
            required = min(received, self.received)
            self._required = max(self._required, required)
            self._news.notify_all()
            await self._news.wait_for(lambda: self.closed or self.now_safe >= required)
            self._check_open()
            return self.now_safe

    async def copy_to(self, holders: tuple[tuple[int, int], ...]) -> None:
        """Set the workers that are to keep backups of this server."""
        async with self._news:
            self.holders, self._with = holders, self._with & set(holders)
            self._news.notify_all()

    async def copies_due(self, every: int) -> bool:
        """Wait until the backups must be updated. Return False once the server is closed.

        They must be after enough pushes, when a caller waits for safe pushes, or when a worker gets its first backup.
        """

        def due() -> bool:
            late = self.received - self.copied >= every or self._required > self.copied
            return self.closed or (bool(self.holders) and (late or not self._with.issuperset(self.holders)))

        async with self._news:
            await self._news.wait_for(due)
            return not self.closed

    async def were_copied(self, holders: tuple[tuple[int, int], ...], received: int) -> None:
        """Note that these workers now have backups that contain this many pushes."""
        async with self._news:
            self.copied, self._with = max(self.copied, received), frozenset(holders)
            self._news.notify_all()

    async def close(self) -> None:
        """Refuse further calls, like any closed ``Role`` (an object that other workers can call)."""
        await self.shut()

    async def shut(self) -> ServerState:
        """Refuse further calls, and return the server's whole state, which is about to move to another worker."""
        async with self._news:
            self.closed = True
            self._news.notify_all()
            return self._whole_state()

    async def open(self, epoch: int) -> None:
        """Accept calls again after the server could not be moved to another worker.

        Backups from the earlier term are worthless, because their workers drop them.
        """
        async with self._news:
            self.closed, self.epoch, self._with = False, epoch, frozenset()

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _travelling(self) -> Row | EncodedUpdate:
        """Return the current weights, encoded for the network. All replicas that fetch them share one encoding."""
        if isinstance(self.codec, Float32):
            return self.weights
        if self._encoded is None or self._encoded[0] != self.version:
            encode = partial(encode_update, self.codec, [self.weights], [False])
            encoded, _ = await asyncio.to_thread(encode) if self.weights.size > INLINE else encode()
            self._encoded = self.version, encoded
        return self._encoded[1]

    async def _stepped(self, gradient: Row, rest: Row, tau: int) -> None:
        if self.weights.size <= INLINE:
            self._step(gradient, rest, tau)
            return
        stepping = asyncio.ensure_future(asyncio.to_thread(self._step, gradient, rest, tau))
        try:
            await asyncio.shield(stepping)
        except asyncio.CancelledError:  # the sender has gone, but the push still counts for the whole server
            await asyncio.wait([stepping])
            raise

    def _step(self, gradient: Row, rest: Row, tau: int) -> None:
        if self._lent:  # copy values that are being sent, which must not change
            self.weights, self.rest, self._lent = self.weights.copy(), self.rest.copy(), False
        if self._lent_state:
            self.state, self._lent_state = [row.copy() for row in self.state], False
        factor = self.staleness(tau)
        merged = (gradient, factor) if self.softsync is None else self.softsync.add(gradient, factor)
        if merged is not None:
            step, share = merged
            self.rule.apply(self.weights, self.state, step, share, self.version)
            self.version += 1
        self.rest -= rest

    def _check_open(self) -> None:
        if self.closed:
            raise AppMissing("this shard now belongs to another worker")

    def _alive(self, replica: int, life: int) -> Last:
        self._check_open()
        last = self.last.get(replica, Last(life))
        if life < last.life:
            raise AppMissing(f"replica {replica + 1} is now on another worker")
        return last

    def _check(self, replica: int, number: int, read: Any, gradient: Any, rest: Any) -> None:
        label = f"push {number + 1} of replica {replica + 1}"
        for name, sent, stored in (("values", gradient, self.weights), ("other values", rest, self.rest)):
            if not isinstance(sent, np.ndarray) or (sent.shape, sent.dtype) != (stored.shape, stored.dtype):
                description = f"{sent.dtype} {sent.shape}" if isinstance(sent, np.ndarray) else type(sent).__name__
                raise BadUpdate(f"{label} has {description} for {name} of {stored.dtype} {stored.shape}")
            if not is_finite(sent):
                raise BadUpdate(f"{label} has NaN or infinite {name}")
        if type(read) is not int or not 0 <= read <= self.version:
            raise BadUpdate(
                f"{label} was made from version {read}, but this shard has had versions 0 to {self.version}"
            )


LONGEST_S = 2.0
"""Longest pause between attempts to send a backup to a worker. The worker may be lost, or the server handed over."""


async def keep_copied(shard: Server, number: int, ask: Ask) -> None:
    """Send backups of a server to other workers again and again, until another worker owns it.

    Args:
        shard: The server.
        number: Number of the server, from 0.
        ask: Calls other workers.
    """
    pause = RETRY_S
    while await shard.copies_due(shard.settings.every):
        holders, state = shard.holders, await shard.whole_state()
        message = state.to_message()
        sending = [ask(worker, SERVERS, "copy", shard.epoch, number, message) for worker, _ in holders]
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if unexpected := [error for error in errors if not isinstance(error, DDLFError | Unreached)]:
            raise unexpected[0]
        if errors:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        else:
            await shard.were_copied(holders, state.counters.received)
            pause = RETRY_S


class ServerCopies:
    """This worker's backups of servers that other workers have."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, ServerState]] = {}
        self._epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, epoch: int, shard: int, state: ServerState) -> None:
        """Keep a backup of a server, and drop the older one.

        Raises:
            AppMissing: The server has another owner now.
        """
        kept_epoch, before = self._copies.get(shard, (0, None))
        if epoch < max(kept_epoch, self._epochs.get(shard, 0)):
            raise AppMissing(f"shard {shard + 1} now belongs to another worker")
        received = 0 if before is None else before.counters.received
        if (kept_epoch, received) <= (epoch, state.counters.received):
            self._copies[shard] = epoch, state

    def take(self, epoch: int, shard: int) -> ServerState:
        """Remove and return a backup, because this worker takes the server over for a new term.

        From then on the previous owner cannot replace the backup any more.

        Raises:
            AppMissing: This worker does not have it.
        """
        self._epochs[shard] = max(epoch, self._epochs.get(shard, 0))
        if shard not in self._copies:
            raise AppMissing(f"there is no copy of shard {shard + 1} here yet")
        return self._copies.pop(shard)[1]

    def only(self, shards: set[int], epochs: list[int]) -> None:
        """Drop the backups of all servers that are not named, and backups from an earlier term.

        Pushes in those may have been undone.
        """
        self._copies = {
            shard: copy for shard, copy in self._copies.items() if shard in shards and copy[0] >= epochs[shard]
        }
        self._epochs |= {shard: max(epoch, self._epochs.get(shard, 0)) for shard, epoch in enumerate(epochs)}


def shard_of(shards: dict[int, Server], epoch: int, number: int) -> Server:
    """Return the server with a number, if this worker owns it in the given term (count of owners).

    Raises:
        AppMissing: This worker does not own the server in this term.
    """
    shard = shards.get(number)
    if shard is None or shard.epoch != epoch:
        raise AppMissing(f"shard {number + 1} is not here")
    return shard


class Servers(Restored):
    """The servers on one worker, and its knowledge of the workers that have the other servers.

    Args:
        me: Number of this worker.
        run: Name of the run.
        roles: The objects on the worker that other workers can call. Each server is added to them.
        ask: Calls workers.
        rows: Returns the rows of the model, to write servers into a checkpoint.
        show: Receives the line for ``ddlf status``; None for no line.

    Attributes:
        shards: The servers on this worker, by number.
        copies: Backups of other workers' servers.
        owners: The workers of all servers.
    """

    def __init__(
        self,
        me: int,
        run: str,
        roles: Hosting,
        ask: Ask,
        rows: Callable[[], Rows],
        show: Callable[[Shard | None], object] = lambda shard: None,
    ) -> None:
        super().__init__()
        self._me, self._run, self._roles = me, run, roles
        self.rows, self._show_line = rows, show
        self.shards: dict[int, Server] = {}
        self.copies = ServerCopies()
        self.owners = Owners(ask)
        self._ask = ask
        self._copying: dict[int, asyncio.Task[None]] = {}

    @concurrent
    async def own(
        self, epoch: int, shard: int, message: dict[str, Any], rollbacks: Sequence[Sequence[int]] = ()
    ) -> None:
        """Start a server on this worker, as the owner, from the message of a ``ServerState``."""
        await self._start(epoch, shard, ServerState.from_message(message), rollbacks)

    @concurrent
    async def own_stored(
        self, epoch: int, shard: int, message: dict[str, Any], rollbacks: Sequence[Sequence[int]] = ()
    ) -> None:
        """Start a server on this worker, as the owner, from the message of a ``StoredState``.

        This worker has received the slice of the checkpoint with the values.
        """
        stored, arrays = StoredState.from_message(message), self.restored.pop(shard)
        await self._start(epoch, shard, await asyncio.to_thread(stored.loaded, self.rows(), arrays), rollbacks)

    async def _start(self, epoch: int, shard: int, state: ServerState, rollbacks: Sequence[Sequence[int]]) -> None:
        await self._let_go(shard)
        server = self.shards[shard] = Server.from_state(state, epoch, rollbacks)
        server.worker, server.rows = self._me, self.rows
        self._play(shard, server)
        self._keep_copied(shard, server)

    @concurrent
    async def arrange(
        self,
        number: int,
        owners: list[int],
        parts: list[Ranges],
        epochs: list[int],
        copies: list[list[tuple[int, int]]],
    ) -> None:
        """Receive the master's announcement of the workers that have the servers and their backups.

        Args:
            number: Number of the master's announcement. Older ones are ignored.
            owners, parts, epochs: Attributes of ``Owners``.
            copies: For each server, its ``Server.holders``.
        """
        known_owners = self.owners
        if number < known_owners.arranged:
            return
        known_owners.arranged, known_owners.parts = number, parts
        holders = [tuple(of_shard) for of_shard in copies]
        known_owners.arrange(owners, epochs)
        copied = {shard for shard, of_shard in enumerate(holders) if self._me in dict(of_shard)}
        self.copies.only(copied, epochs)
        for shard, server in list(self.shards.items()):
            if epochs[shard] > server.epoch or (epochs[shard] == server.epoch and owners[shard] != self._me):
                await self._let_go(shard)
            else:
                await server.copy_to(holders[shard])
        self._show()

    async def marked(self, moment: int, unserved: Sequence[Any]) -> Weights | None:
        """Return the whole weights as they were when the master marked a moment, for an evaluation.

        They are fetched from all servers.

        Args:
            moment: The master's number of the moment.
            unserved: Weights that no server has, by index; None for all other weights.

        Returns:
            The model's weights; None if a server does not return its values.
        """
        try:
            answers = await self.owners.for_all(lambda shard: self.owners.call(shard, "values", moment))
        except (DDLFError, Unreached):
            return None
        if not all(answers):
            return None
        trained, rest = (np.concatenate(parts) for parts in zip(*answers, strict=True))
        return self.rows().weights(trained, rest, unserved)

    @concurrent
    async def progress(self) -> list[ServerProgress]:
        """Return the progress of each server on this worker."""
        self._show()
        return [
            ServerProgress(
                shard=number,
                version=server.version,
                reached={replica: (last.round, last.number) for replica, last in server.last.items()},
            )
            for number, server in self.shards.items()
        ]

    @concurrent
    async def take_over(self, epoch: int, shard: int, rollbacks: list[list[int]], whole: bool) -> list[list[int]]:
        """Own a server from a backup on this worker, or own it again after it could not be moved.

        Args:
            epoch: The new term.
            shard: Number of the server, from 0.
            rollbacks: Earlier rollbacks, as in ``Server``.
            whole: Whether the last owner has handed over its whole state.

        Returns:
            All rollbacks.

        Raises:
            AppMissing: This worker has no backup.
        """
        if shard in self.shards:
            server = self.shards[shard]
            self._roles.drop(self._run, name_of(shard, server.epoch), server)
            await server.open(epoch)
            self._play(shard, server)
            self._keep_copied(shard, server)
            return rollbacks
        state = self.copies.take(epoch, shard)
        rollbacks = rollbacks if whole else [*rollbacks, [epoch, state.counters.received]]
        await self._start(epoch, shard, state, rollbacks)
        return rollbacks

    @concurrent
    async def release(self, epoch: int, shard: int, following: int, to: list[int]) -> str:
        """Move a server to its next owner: send the whole state there, and to the workers with backups.

        Args:
            epoch: The current term.
            shard: Number of the server, from 0.
            following: The next term.
            to: Number of the next owner, then of the workers with backups.

        Returns:
            The reason why the next owner did not receive it, in which case the server stays; empty on success.
        """
        server = shard_of(self.shards, epoch, shard)
        message, is_over = (await server.shut()).to_message(), False
        sending = [
            asyncio.ensure_future(self._ask(worker, SERVERS, "copy", following, shard, message)) for worker in to
        ]
        try:
            await asyncio.wait(sending)
            error = sending[0].exception()
            is_over = error is None
            return "" if error is None else str(error).partition("\n")[0]
        finally:
            if not is_over and self.shards.get(shard) is server:
                await server.open(epoch)
                self._keep_copied(shard, server)
            for sent in sending:
                sent.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    @offered
    async def copy(self, epoch: int, shard: int, message: dict[str, Any]) -> None:
        """Keep a backup of another worker's server, from the message of a ``ServerState``, like ``ServerCopies.keep``."""
        self.copies.keep(epoch, shard, ServerState.from_message(message))

    async def close(self) -> None:
        """Close all servers on this worker."""
        for shard in list(self.shards):
            await self._let_go(shard)

    def _play(self, shard: int, server: Server) -> None:
        self._roles.play(self._run, name_of(shard, server.epoch), server, of=SERVERS)
        self._show()

    def _keep_copied(self, shard: int, server: Server) -> None:
        """Send backups of an open server from now on. Earlier sending has ended when the server was shut, or ends."""
        if (before := self._copying.get(shard)) is not None:
            before.cancel()
        self._copying[shard] = asyncio.ensure_future(keep_copied(server, shard, self._ask))

    def _show(self) -> None:
        """Update the line of ``ddlf status``: it names the first server on this worker, and the number of servers."""
        if not self.shards and not len(self.copies):
            self._show_line(None)
            return
        first = next(iter(self.shards.values()), None)
        begin, end, version = (0, 0, 0) if first is None else (*first.settings.part, first.version)
        of = self.rows().sizes[0]
        self._show_line(Shard(begin, end, of, version, self._run, len(self.shards), len(self.copies)))

    async def _let_go(self, shard: int) -> None:
        server, copying = self.shards.pop(shard, None), self._copying.pop(shard, None)
        if server is not None:
            self._roles.drop(self._run, name_of(shard, server.epoch), server)
            await server.shut()
        if copying is not None:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
