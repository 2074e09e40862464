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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec, Float32
from ddlf.algorithms.encoding import encode_update
from ddlf.algorithms.flat_weights import Row, Rows, Slice, overlapped
from ddlf.algorithms.push_rules import KNOWN, PUSHED, Last, Pushed, Softsync, is_finite
from ddlf.algorithms.staleness import STALENESS, Staleness
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.errors import AppMissing, BadUpdate, DDLFError
from ddlf.training.checkpoints.durable import damaged
from ddlf.training.checkpoints.slice_reader import Restored
from ddlf.training.checkpoints.slices import PUSHED as PUSHED_STATE
from ddlf.training.checkpoints.slices import WEIGHTS, part_name, write_if_seen
from ddlf.training.roles import SERVERS
from ddlf.training.strategies.downpour.client import RETRY_S, Owners, name_of
from ddlf.worker.activity import Shard
from ddlf.worker.calls import Hosting, concurrent, offered
from ddlf.worker.peers import Ask, Unreached

INLINE = 1 << 16
"""A server with at most this many values steps on the event loop, a larger one in a thread."""
HOW = ("part", "rule", "staleness", "codec", "collects", "every")
"""Facts that a server receives once and that never change."""


@dataclass(slots=True, kw_only=True)
class Server:
    """One Downpour server: a range of the weights on a worker, which replicas on other workers fetch and push to.

    Args:
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
        how: Facts in a snapshot that never change, such as the codec.
        epoch: Term: the number of times that the server was given to a worker.
        falls: Rollbacks (losses of pushes). For each takeover by a backup that may have missed pushes: the term from
            then on, and the number of pushes in the backup.
        copied: Number of pushes in all backups.
        holders: Workers that are to have backups, and how often each received the app. A changed count means that its
            backups are lost.
        closed: Whether another worker owns the server now.
        worker: Number of this worker.
        rows: Returns the rows of the model, to write the server into a checkpoint.
        marked: Values to evaluate: the number that the master gave to this state, the trained values, and the others.
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
    worker: int = 0
    rows: Callable[[], Rows] | None = None
    _with: frozenset[tuple[int, int]] = frozenset()  # the holders that have a backup
    _required: int = 0  # number of pushes that a caller waits for to be safe
    _lent: bool = False  # whether a message may still contain the values, so that the next step has to copy them
    _encoded: tuple[int, Any] | None = None  # version, and its encoded weights
    _lent_state: bool = False  # the same for the rule's state
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @classmethod
    def from_facts(cls, facts: dict[str, Any], epoch: int = 1, falls: Sequence[Sequence[int]] = ()) -> Server:
        """Return a server with the state that ``snapshot`` returned on another worker or earlier.

        Args:
            facts: ``weights`` and ``rest``; ``rule``, ``staleness`` and ``codec`` as text; ``collects``, the number of
                pushes in a step; and if known ``state``, ``version``, ``received``, ``last``, and ``count`` and
                ``factors`` of collected pushes.
            epoch: The server's term.
            falls: Its rollbacks.
        """
        weights, rest = (np.array(facts[name], np.float32) for name in ("weights", "rest"))
        rule, state = PUSHED.read(facts["rule"]), [np.array(row, np.float32) for row in facts.get("state", ())]
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
            last={int(replica): Last(*map(int, values)) for replica, *values in facts.get("last", ())},
            how={name: facts[name] for name in HOW if name in facts},
            epoch=epoch,
            falls=[(since, received) for since, received in falls],
        )

    @concurrent
    async def snapshot(self) -> dict[str, Any]:
        """Return the server's whole state at one moment, for backups, new owners and checkpoints."""
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
            "last": [[replica, *last] for replica, last in sorted(self.last.items())],
            "count": 0 if softsync is None else softsync.count,
            "factors": 0.0 if softsync is None else softsync.factors,
        }

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
            ``last``: number, count of earlier pushes and staleness of the replica's last push of this round that this
            server has; None for none. ``falls``: the rollbacks.

        Raises:
            AppMissing: A later incarnation of the replica has begun.
        """
        async with self._news:
            last = self._alive(replica, life)
            self.last[replica] = last._replace(life=life)
            last_push = list(last[2:]) if last.round == round else None
            return {"last": last_push, "falls": [list(fall) for fall in self.falls]}

    @offered
    async def fetch(self, replica: int, life: int) -> dict[str, Any]:
        """Return the current values of the server's range to a replica.

        Args:
            replica: Number of the calling replica.
            life: Its incarnation: how often the replica has begun a round, or begun it again after a loss.

        Returns:
            ``weights``, encoded, and ``rest``: both arrays never change afterwards; ``version`` and ``received``;
            ``round`` and ``number`` of the replica's last push in them; ``epoch``; and the number of ``safe`` pushes.
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
            if self.falls and type(read) is int:  # its weights may have contained pushes that a rollback has undone
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
    async def write(self, part: Any, names: Sequence[str], destination: dict[str, Any]) -> dict[str, Any]:
        """Write the server's whole state into a checkpoint.

        Args:
            part: The server's ranges of the rows of trained and untrained values.
            names: Paths of the weights.
            destination: Destination.

        Returns:
            The result of ``write_if_seen``; ``by``, this worker's number; and the numbers of ``shard_parts``.
        """
        assert self.rows is not None
        parts, numbers = shard_parts(self.rows(), part, names, await self.snapshot())
        return {**await asyncio.to_thread(write_if_seen, destination, parts), "by": self.worker, **numbers}

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

    async def shut(self) -> dict[str, Any]:
        """Refuse further calls, and return the server's whole state, which is about to move to another worker."""
        async with self._news:
            self.closed = True
            self._news.notify_all()
            return self._snapshot()

    async def open(self, epoch: int) -> None:
        """Accept calls again after the server could not be moved to another worker.

        Backups from the earlier term are worthless, because their workers drop them.
        """
        async with self._news:
            self.closed, self.epoch, self._with = False, epoch, frozenset()

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _travelling(self) -> Any:
        """Return the current weights, encoded for the network. All replicas that fetch them share one encoding."""
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
    while await shard.copies_due(shard.how["every"]):
        holders, facts = shard.holders, await shard.snapshot()
        sending = [ask(worker, SERVERS, "copy", shard.epoch, number, facts) for worker, _ in holders]
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if unexpected := [error for error in errors if not isinstance(error, DDLFError | Unreached)]:
            raise unexpected[0]
        if errors:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        else:
            await shard.were_copied(holders, facts["received"])
            pause = RETRY_S


class ServerCopies:
    """This worker's backups of servers that other workers have."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, dict[str, Any]]] = {}
        self._epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a backup of a server, and drop the older one.

        Raises:
            AppMissing: The server has another owner now.
        """
        kept_epoch, before = self._copies.get(shard, (0, {"received": 0}))
        if epoch < max(kept_epoch, self._epochs.get(shard, 0)):
            raise AppMissing(f"shard {shard + 1} now belongs to another worker")
        if (kept_epoch, before["received"]) <= (epoch, facts["received"]):
            self._copies[shard] = epoch, facts

    def take(self, epoch: int, shard: int) -> dict[str, Any]:
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
    async def own(self, epoch: int, shard: int, facts: dict[str, Any], falls: Sequence[Sequence[int]] = ()) -> None:
        """Start a server on this worker, as the owner, from the facts that ``Server.from_facts`` needs.

        With ``restored``, its values are in a slice of a checkpoint that this worker has received.
        """
        if "restored" in facts:
            how = facts["part"], facts["names"], self.restored.pop(shard), facts["restored"]
            facts = {**facts, **await asyncio.to_thread(shard_of_parts, self.rows(), *how)}
            facts["part"] = facts["part"][0]
        await self._let_go(shard)
        server = self.shards[shard] = Server.from_facts(facts, epoch, falls)
        server.worker, server.rows = self._me, self.rows
        self._play(shard, server)
        self._keep_copied(shard, server)

    @concurrent
    async def arrange(
        self, number: int, owners: list[int], parts: list[Any], epochs: list[int], copies: list[list[Any]]
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
        known_owners.arranged, known_owners.parts = number, [((a, b), (c, d)) for (a, b), (c, d) in parts]
        holders = [tuple((worker, opened) for worker, opened in of_shard) for of_shard in copies]
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
    async def versions(self) -> list[Any]:
        """Return the progress of the servers on this worker.

        For each: its number, its steps, and the last push (replica, round, number) of each replica.
        """
        self._show()
        return [
            [number, shard.version, [[replica, last.round, last.number] for replica, last in shard.last.items()]]
            for number, shard in self.shards.items()
        ]

    @concurrent
    async def take_over(self, epoch: int, shard: int, falls: list[list[int]], whole: bool) -> list[list[int]]:
        """Own a server from a backup on this worker, or own it again after it could not be moved.

        Args:
            epoch: The new term.
            shard: Number of the server, from 0.
            falls: Earlier rollbacks, as in ``Server``.
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
            return falls
        facts = self.copies.take(epoch, shard)
        falls = falls if whole else [*falls, [epoch, facts["received"]]]
        await self.own(epoch, shard, facts, falls)
        return falls

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
        facts, is_over = await server.shut(), False
        sending = [asyncio.ensure_future(self._ask(worker, SERVERS, "copy", following, shard, facts)) for worker in to]
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
    async def copy(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a backup of another worker's server, like ``ServerCopies.keep``."""
        self.copies.keep(epoch, shard, facts)

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
        begin, end, version = (0, 0, 0) if first is None else (*first.how["part"], first.version)
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


def shard_parts(
    rows: Rows, part: tuple[Slice, Slice], names: Sequence[str], facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a server's whole state as named arrays, to be written as one slice (file) of a checkpoint.

    Args:
        rows: Layout of the model's weights.
        part: The server's ranges of the rows of trained and untrained values.
        names: Paths of the weights.
        facts: The server's ``snapshot``.

    Returns:
        Arrays by name; and the numbers of the state, with the number of the rule's rows as ``kept``.
    """
    arrays = {}
    for span, row, indices in zip(part, (facts["weights"], facts["rest"]), (rows.trained, rows.rest), strict=True):
        for i, low, values in rows.slices(span, row, indices):
            arrays[part_name(WEIGHTS, low, f"{i:04d} {names[i]}")] = values
    for number, row in enumerate(facts["state"]):
        arrays[part_name(PUSHED_STATE, part[0][0], f"{number:04d}")] = row
    numbers = {name: facts[name] for name in ("version", "received", "count", "factors", "last")}
    return arrays, {**numbers, "kept": len(facts["state"])}


def shard_of_parts(
    rows: Rows, part: tuple[Slice, Slice], names: Sequence[str], arrays: Mapping[str, Tensor], rule_rows: int
) -> dict[str, Any]:
    """Return the values of a Downpour server and the state of its push rule, from a slice that ``shard_parts`` made.

    Args:
        rows: Layout of the model's weights.
        part: The server's ranges of the rows of trained and untrained values.
        names: Paths of the weights.
        arrays: Arrays of the server's slice of the checkpoint.
        rule_rows: Number of rows that the push rule keeps.

    Returns:
        ``weights``, ``rest`` and ``state``, as in ``Server.snapshot``.

    Raises:
        CheckpointCorrupt: A part is missing, or has the wrong size.
    """

    def of(name: str, length: int) -> Tensor:
        array = arrays.get(name)
        if array is None or array.shape != (length,):
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise damaged(Path("a slice of the checkpoint"), f"{length:,} values of {name!r}", got)
        return np.asarray(array, np.float32)

    state: dict[str, Any] = {}
    for name, indices, span in zip(("weights", "rest"), (rows.trained, rows.rest), part, strict=True):
        like = [rows.like[i] for i in indices]
        values = [
            of(part_name(WEIGHTS, low, f"{indices[at]:04d} {names[indices[at]]}"), high - low)
            for at, low, high in overlapped(like, span)
        ]
        state[name] = np.concatenate(values) if values else np.zeros(0, np.float32)
    (begin, end), _ = part
    state["state"] = [of(part_name(PUSHED_STATE, begin, f"{number:04d}"), end - begin) for number in range(rule_rows)]
    return state
