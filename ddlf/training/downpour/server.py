"""Servers of slices of the weights in Downpour SGD: replicas fetch from them and push to them. Runs in the executor, on its event loop.

Each server is a role of its own, which replicas on other workers call. ``Servers`` are those on one worker: the master says which these are.

A push is named by (replica, life, round, number) and counts once. A replica that is carried anew, after the loss of its worker, lives on with the
next *life*: what an earlier one still sends is refused. Whoever takes a server over later needs what ``snapshot`` gives, and no more.

Other workers that have copies get such a snapshot after some pushes. A copy is replaced as a whole, by what the server is at one moment: its values
and what the rule keeps of them. With one such array for as many pushes as there are replicas, that is an eighth of what 8 replicas fetch and push.
A push that is in all copies is *safe*. Its replica keeps what is not, and sends it again to whoever takes the server over. That costs a part of what
it would to send each push twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec, Float32
from ddlf.algorithms.encoding import encode_update
from ddlf.algorithms.flat_weights import Row, Rows, is_finite
from ddlf.algorithms.push_rules import KNOWN, PUSHED, Last, Pushed, Softsync
from ddlf.algorithms.ranges import Slice
from ddlf.algorithms.staleness import STALENESS, Staleness
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppMissing, BadUpdate, DDLFError
from ddlf.training.checkpoints.slices import PUSHED as PUSHED_STATE
from ddlf.training.checkpoints.slices import WEIGHTS, part_name, write_if_seen
from ddlf.training.downpour.client import RETRY_S, Owners, name_of
from ddlf.training.exchanges.peers import Ask, Unreached
from ddlf.training.exchanges.restored import Restored, shard_of_parts
from ddlf.training.roles import SERVERS
from ddlf.worker.activity import Shard
from ddlf.worker.hosting import Hosting
from ddlf.worker.methods import concurrent, offered

INLINE = 1 << 16
"""A shard of at most so many values is stepped on the event loop, a larger one in a thread."""
HOW = ("part", "rule", "staleness", "codec", "collects", "every")
"""What a shard is told once."""


@dataclass(slots=True, kw_only=True)
class Server:
    """One server: a slice of the weights, which is a role of its own.

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
        worker: Number of the worker that it is on.
        rows: Gives the rows of the model, when it is to be written into a checkpoint.
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
    worker: int = 0
    rows: Callable[[], Rows] | None = None
    _with: frozenset[tuple[int, int]] = frozenset()  # of the holders those that have a copy
    _wanted: int = 0  # pushes that somebody waits for to be safe
    _lent: bool = False
    _encoded: tuple[int, Any] | None = None  # of which version, and what travels
    _lent_state: bool = False
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @classmethod
    def made(cls, facts: dict[str, Any], epoch: int = 1, falls: Sequence[Sequence[int]] = ()) -> Server:
        """A server of what ``snapshot`` gave, on another worker, and how it is stepped.

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

    @concurrent
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

    @concurrent
    async def mark(self, moment: int) -> None:
        """Keep the values of now, to be evaluated; those that were kept before are forgotten. With 0 none are."""
        async with self._news:
            self._lent = self._lent or moment > 0
            self.marked = (moment, self.weights, self.rest) if moment else None

    @offered
    async def values(self, moment: int) -> list[Row]:
        """The values that were marked; none if those of that moment are not here."""
        return list(self.marked[1:]) if self.marked is not None and self.marked[0] == moment else []

    @offered
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

    @offered
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

    @offered
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

    @concurrent
    async def write(self, part: Any, names: Sequence[str], place: dict[str, Any]) -> dict[str, Any]:
        """Write all that it is into a checkpoint.

        Args:
            part: Its slices of both rows.
            names: Paths of the weights.
            place: Where.

        Returns:
            What ``write_if_seen`` does; ``by``; and the numbers of ``shard_parts``.
        """
        assert self.rows is not None
        parts, numbers = shard_parts(self.rows(), part, names, await self.snapshot())
        return {**await asyncio.to_thread(write_if_seen, place, parts), "by": self.worker, **numbers}

    # -- its copies -----------------------------------------------------------------------------------------------------

    @property
    def now_safe(self) -> int:
        """Pushes that are not lost with this worker: all of them, if there is nobody to have a copy."""
        return self.copied if self.holders else self.received

    @offered
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

    async def close(self) -> None:
        """See ``Role``."""
        await self.shut()

    async def shut(self) -> dict[str, Any]:
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


LONGEST_S = 2.0
"""Longest pause before a worker is tried again that does not take its copy: it is lost, or the shard is somebody else's by now."""


async def keep_copied(shard: Server, number: int, ask: Ask) -> None:
    """Bring the copies of a shard up to date, as long as it is here.

    Args:
        shard: The shard.
        number: Which, from 0.
        ask: Asks other workers.
    """
    pause = RETRY_S
    while await shard.copies_due(shard.how["every"]):
        holders, facts = shard.holders, await shard.snapshot()
        sending = [ask(worker, SERVERS, "copy", shard.epoch, number, facts) for worker, _ in holders]
        found = await asyncio.gather(*sending, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        if unexpected := [one for one in errors if not isinstance(one, DDLFError | Unreached)]:
            raise unexpected[0]
        if errors:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        else:
            await shard.were_copied(holders, facts["received"])
            pause = RETRY_S


class ServerCopies:
    """Copies of other workers' shards that are here."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, dict[str, Any]]] = {}
        self._epochs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a copy, instead of an older one.

        Raises:
            AppMissing: The shard was given to somebody else since.
        """
        known, before = self._copies.get(shard, (0, {"received": 0}))
        if epoch < max(known, self._epochs.get(shard, 0)):
            raise AppMissing(f"shard {shard + 1} is another worker's by now")
        if (known, before["received"]) <= (epoch, facts["received"]):
            self._copies[shard] = epoch, facts

    def take(self, epoch: int, shard: int) -> dict[str, Any]:
        """A copy, to be a shard from an epoch on; its owner of before cannot replace it any more.

        Raises:
            AppMissing: There is none.
        """
        self._epochs[shard] = max(epoch, self._epochs.get(shard, 0))
        if shard not in self._copies:
            raise AppMissing(f"there is no copy of shard {shard + 1} here yet")
        return self._copies.pop(shard)[1]

    def only(self, shards: set[int], epochs: list[int]) -> None:
        """Keep copies of these shards and no others, and none of an owner of an earlier epoch: its pushes may be undone."""
        self._copies = {
            shard: copy for shard, copy in self._copies.items() if shard in shards and copy[0] >= epochs[shard]
        }
        self._epochs |= {shard: max(epoch, self._epochs.get(shard, 0)) for shard, epoch in enumerate(epochs)}


def shard_of(shards: dict[int, Server], epoch: int, number: int) -> Server:
    """A server that is on this worker.

    Raises:
        AppMissing: It is not, or not any more.
    """
    shard = shards.get(number)
    if shard is None or shard.epoch != epoch:
        raise AppMissing(f"shard {number + 1} is not here")
    return shard


class Servers(Restored):
    """The servers on one worker, and where all of them are.

    Args:
        me: Number of this worker.
        run: Name of the run.
        roles: The worker's roles, which each of its servers becomes one of.
        ask: Asks workers.
        rows: Gives the rows of the model, when it is to be written into a checkpoint.
        show: Takes what ``ddlf status`` is to show of them; None for nothing.

    Attributes:
        shards: The servers by number.
        copies: Copies of other workers' servers.
        owners: Where all servers are.
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
        """Own a shard from now on; see ``Server.made``. With ``restored`` its values are in a slice of a checkpoint that has come here before."""
        if "restored" in facts:
            how = facts["part"], facts["names"], self.restored.pop(shard), facts["restored"]
            facts = {**facts, **await asyncio.to_thread(shard_of_parts, self.rows(), *how)}
            facts["part"] = facts["part"][0]
        await self._let_go(shard)
        one = self.shards[shard] = Server.made(facts, epoch, falls)
        one.worker, one.rows = self._me, self.rows
        self._play(shard, one)
        self._copying[shard] = asyncio.ensure_future(keep_copied(one, shard, self._ask))

    @concurrent
    async def arrange(
        self, number: int, owners: list[int], parts: list[Any], epochs: list[int], copies: list[list[Any]]
    ) -> None:
        """Hear where the shards are and who is to have copies; see ``Owners``.

        Args:
            number: How often the master has said so; what comes late is nothing.
            owners, parts, epochs: As attributes of ``Owners``.
            copies: Of each shard as ``Shard.holders``.
        """
        mine = self.owners
        if number < mine.arranged:
            return
        mine.arranged, mine.parts = number, [((a, b), (c, d)) for (a, b), (c, d) in parts]
        holders = [tuple((worker, opened) for worker, opened in one) for one in copies]
        mine.arrange(owners, epochs)
        here = {shard for shard, one in enumerate(holders) if self._me in dict(one)}
        self.copies.only(here, epochs)
        for shard, one in list(self.shards.items()):
            if epochs[shard] > one.epoch or (epochs[shard] == one.epoch and owners[shard] != self._me):
                await self._let_go(shard)
            else:
                await one.copy_to(holders[shard])
        self._show()

    async def marked(self, moment: int, others: Sequence[Any]) -> Weights | None:
        """The weights that all shards have marked.

        Args:
            moment: What the master calls it.
            others: What is on no shard, by its place; None for what is.

        Returns:
            None if not all of them can be had.
        """
        try:
            found = await self.owners.each(lambda shard: self.owners.of(shard, "values", moment))
        except (DDLFError, Unreached):
            return None
        if not all(found):
            return None
        trained, rest = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return self.rows().weights(trained, rest, others)

    @concurrent
    async def versions(self) -> list[Any]:
        """Numbers of the shards that are here, the steps of each, and of each replica its round and number of the last push there."""
        self._show()
        return [
            [number, shard.version, [[replica, last.round, last.number] for replica, last in shard.last.items()]]
            for number, shard in self.shards.items()
        ]

    @concurrent
    async def take_over(self, epoch: int, shard: int, falls: list[list[int]], whole: bool) -> list[list[int]]:
        """Own a shard from now on of which there is a copy here; or again one that nobody else has got.

        Args:
            epoch: From now on.
            shard: Which, from 0.
            falls: Those of before; see ``Shard``.
            whole: Whether its last owner has handed over all that it had.

        Returns:
            All falls.

        Raises:
            AppMissing: There is no copy.
        """
        if shard in self.shards:
            one = self.shards[shard]
            self._roles.drop(self._run, name_of(shard, one.epoch), one)
            await one.open(epoch)
            self._play(shard, one)
            return falls
        facts = self.copies.take(epoch, shard)
        falls = falls if whole else [*falls, [epoch, facts["received"]]]
        await self.own(epoch, shard, facts, falls)
        return falls

    @concurrent
    async def release(self, epoch: int, shard: int, following: int, to: list[int]) -> str:
        """Hand all that a shard is to another worker, which takes it over then, and to those that have copies.

        Args:
            epoch: Until now.
            shard: Which, from 0.
            following: Epoch from then on.
            to: The other worker, and behind it those.

        Returns:
            Why that one did not get it, in which case it stays; empty if it did.
        """
        one = shard_of(self.shards, epoch, shard)
        facts, is_over = await one.shut(), False
        sending = [asyncio.ensure_future(self._ask(worker, SERVERS, "copy", following, shard, facts)) for worker in to]
        try:
            await asyncio.wait(sending)
            error = sending[0].exception()
            is_over = error is None
            return "" if error is None else str(error).partition("\n")[0]
        finally:
            if not is_over:
                await one.open(epoch)
            for sent in sending:
                sent.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    @offered
    async def copy(self, epoch: int, shard: int, facts: dict[str, Any]) -> None:
        """Keep a copy of another worker's shard; see ``ServerCopies``."""
        self.copies.keep(epoch, shard, facts)

    async def close(self) -> None:
        """Have no server any more."""
        for shard in list(self.shards):
            await self._let_go(shard)

    def _play(self, shard: int, one: Server) -> None:
        self._roles.play(self._run, name_of(shard, one.epoch), one, of=SERVERS)
        self._show()

    def _show(self) -> None:
        """Have ``ddlf status`` show the first server here, and how many more there are."""
        if not self.shards and not len(self.copies):
            self._show_line(None)
            return
        first = next(iter(self.shards.values()), None)
        begin, end, version = (0, 0, 0) if first is None else (*first.how["part"], first.version)
        of = self.rows().sizes[0]
        self._show_line(Shard(begin, end, of, version, self._run, len(self.shards), len(self.copies)))

    async def _let_go(self, shard: int) -> None:
        one, copying = self.shards.pop(shard, None), self._copying.pop(shard, None)
        if one is not None:
            self._roles.drop(self._run, name_of(shard, one.epoch), one)
            await one.shut()
        if copying is not None:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)


def shard_parts(
    rows: Rows, part: tuple[Slice, Slice], names: Sequence[str], facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that a shard is, as it is in a slice of a checkpoint.

    Args:
        rows: Of the model's weights.
        part: Its slices of both rows.
        names: Paths of the weights.
        facts: From ``Shard.snapshot``.

    Returns:
        Arrays by name; and what is no array, with how many rows its rule keeps as ``kept``.
    """
    found = {}
    for one, row, places in zip(part, (facts["weights"], facts["rest"]), (rows.trained, rows.rest), strict=True):
        for i, low, values in rows.slices(one, row, places):
            found[part_name(WEIGHTS, low, f"{i:04d} {names[i]}")] = values
    for number, row in enumerate(facts["state"]):
        found[part_name(PUSHED_STATE, part[0][0], f"{number:04d}")] = row
    numbers = {name: facts[name] for name in ("version", "received", "count", "factors", "last")}
    return found, {**numbers, "kept": len(facts["state"])}
