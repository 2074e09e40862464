"""A replica's side of Downpour SGD: it fetches weights from all shards, and pushes gradients to them, beside its computing. Runs in the executor.

Everything here is on the event loop. A replica computes elsewhere, and asks for what it needs at the end of a step::

    take: wait for the fetch that is under way; own gradients that are not in it yet are subtracted from it; begin the next one
    push: hand over the sum of some gradients, which goes to all shards behind the replica's last one
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.pushed import Cadence
from ddlf.algorithms.rows import Row
from ddlf.algorithms.shards import Slice
from ddlf.errors import ConfigError, DDLFError, RemoteError
from ddlf.roles.generation import Unreached
from ddlf.roles.shard import KNOWN, Shards

NOTICED_S = 10.0
"""How long a shard is asked again that does not answer: by then the master has noticed that its worker is lost, or it is the link between the two."""
RETRY_S = 0.2
ON_THEIR_WAY = 2
"""Pushes of a replica that are not acknowledged yet; the next one waits."""

T = TypeVar("T")
Ask = Callable[..., Awaitable[Any]]
"""Asks another worker: its number, a verb, and the verb's own arguments."""


@dataclass(slots=True)
class Owners:
    """Where the shards are, as one worker sees it.

    Args:
        me: Number of this worker.
        mine: The shards that it owns.
        ask: Asks others.
        epoch: How often the master has said who owns what.
        owners: The worker of each shard.
        parts: Slices of each shard: of the values that are trained, and of the others.
    """

    me: int
    mine: Shards
    ask: Ask
    epoch: int = 0
    owners: Sequence[int] = ()
    parts: Sequence[tuple[Slice, Slice]] = ()

    async def each(self, one: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        """Do something with every shard, all at the same time; when one fails, the others end."""
        if len(self.owners) == 1:
            return [await one(0)]
        tasks = [asyncio.ensure_future(one(shard)) for shard in range(len(self.owners))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def of(self, shard: int, verb: str, *arguments: Any, again: int | None = None) -> Any:
        """What a shard answers, wherever it is by then.

        Args:
            shard: Which.
            verb: Name of one of its methods.
            arguments: Its own.
            again: Place among them of what is to be True from the second attempt on.

        Raises:
            Unreached: It did not answer in ``NOTICED_S``.
            RemoteError: It has refused.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while True:
            owner = self.owners[shard]
            try:
                if owner == self.me:
                    return await getattr(self.mine.of(self.epoch, shard), verb)(*arguments)
                return await self.ask(owner, "shard", self.epoch, shard, verb, *arguments)
            except RemoteError:
                raise
            except (DDLFError, Unreached) as error:
                lost = isinstance(error, Unreached | LookupError | ConnectionError)
                if not lost or loop.time() - begin > NOTICED_S:
                    raise Unreached(owner, str(error).partition("\n")[0]) from error
            await asyncio.sleep(RETRY_S)
            if again is not None:
                arguments = (*arguments[:again], True, *arguments[again + 1 :])


@dataclass(slots=True)
class Fetched:
    """The weights as all shards had them.

    Args:
        weights: Values that are trained. Of one's own.
        rest: The others.
        versions: Of each shard.
        received: Pushes in each.
        numbers: Of each the number of the replica's last push of this round that is in it, from 0; -1 for none.
    """

    weights: Row
    rest: Row
    versions: list[int]
    received: list[int]
    numbers: list[int]


@dataclass(kw_only=True)
class ModelReplica:
    """One replica in one round.

    Args:
        id: Number, from 0.
        life: How often it was carried, of all of its rounds.
        round: Number of the round, from 0.
        steps: Steps that it makes.
        owners: Where the shards are.
        cadence: When it fetches and pushes.
        numbers: Of each shard the number of the first push that is not there: of an earlier life some may be.
        script: In a replay, ``fetches`` and ``pushes``: of each, for each shard, how many pushes are before it.

    Attributes:
        first: Number of the first push that some shard lacks: this life begins with its steps.
        done: Steps so far, of this life.
        read: Version of each shard that it computes with.
        fetches: Of each fetch that was taken, for each shard how many pushes were in it.
        pushes: Of each push its number, for each shard its staleness, and for each how many pushes were before it.
    """

    id: int
    life: int
    round: int
    steps: int
    owners: Owners
    cadence: Cadence
    numbers: Sequence[int]
    script: dict[str, list[list[int]]] | None = None
    done: int = 0
    read: list[int] = field(default_factory=list)
    fetches: list[list[int]] = field(default_factory=list)
    pushes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = min(self.numbers)
        self.left = max(self.steps - self.first * self.cadence.n_push, 0)
        self._next = self.first
        self._fetching: asyncio.Future[Fetched] | None = None
        self._begun = 0
        self._lacking: deque[tuple[int, Row]] = deque()
        self._sending: deque[asyncio.Future[None]] = deque()
        self._turn = asyncio.Lock()

    async def take(self, unpushed: Row | None, rate: float) -> tuple[Row, Row]:
        """Have the weights of a fetch, and begin the next one if there is a step to take it.

        Args:
            unpushed: Sum of the gradients that are not pushed yet; None for none.
            rate: Local learning rate: how far an own gradient moves the weights.

        Returns:
            Values that are trained, as own gradients have moved them on; the others.
        """
        found = await (self._fetching or self._fetch())
        self._fetching = None
        self.read = found.versions
        self.fetches.append(found.received)
        for number, gradient in self._lacking:
            for known, (part, _) in zip(found.numbers, self.owners.parts, strict=True):
                if number > known:
                    found.weights[slice(*part)] -= np.float32(rate) * gradient[slice(*part)]
        while self._lacking and self._lacking[0][0] <= min(found.numbers):
            self._lacking.popleft()
        if unpushed is not None:
            found.weights -= np.float32(rate) * unpushed
        if self.cadence.begins(self.done, self.left):
            self._fetching = self._fetch()
        return found.weights, found.rest

    async def push(self, gradient: Row, rest: Row) -> None:
        """Send a push behind the last one, and wait only if that is not far.

        Args:
            gradient: Sum of the gradients since the last one. It is kept.
            rest: Change of the values that are not trained.
        """
        number, self._next = self._next, self._next + 1
        self._lacking.append((number, gradient))
        self._sending.append(asyncio.ensure_future(self._send(number, list(self.read), gradient, rest)))
        while len(self._sending) > ON_THEIR_WAY or (self._sending and self._sending[0].done()):
            await self._sending.popleft()

    def skip(self) -> None:
        """Leave out a push that cannot be used: what was on its way to be taken is not, and the next fetch is as the first one."""
        self._next += 1
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def pushed(self) -> None:
        """Wait until all pushes are acknowledged."""
        while self._sending:
            await self._sending.popleft()

    def end(self) -> None:
        """End what is under way."""
        for one in (self._fetching, *self._sending):
            if one is not None:
                one.cancel()

    def _fetch(self) -> asyncio.Future[Fetched]:
        number, self._begun = self._begun, self._begun + 1
        return asyncio.ensure_future(self._fetched(None if self.script is None else self.script["fetches"][number]))

    async def _fetched(self, script: list[int] | None) -> Fetched:
        found = await self.owners.each(
            lambda shard: self.owners.of(shard, "fetch", self.id, self.life, script and script[shard])
        )
        for shard, (one, parts) in enumerate(zip(found, self.owners.parts, strict=True)):
            for name, part in zip(("weights", "rest"), parts, strict=True):
                one[name] = _read(self.owners.owners[shard], one[name], part)
        return Fetched(
            np.concatenate([one["weights"] for one in found]),
            np.concatenate([one["rest"] for one in found]),
            [int(one["version"]) for one in found],
            [int(one["received"]) for one in found],
            [int(one["number"]) if one["round"] == self.round else -1 for one in found],
        )

    async def _send(self, number: int, read: list[int], gradient: Row, rest: Row) -> None:
        async with self._turn:
            place = len(self.pushes)
            script = None if self.script is None else self.script["pushes"][place]

            async def one(shard: int) -> tuple[int, int]:
                if number < self.numbers[shard]:
                    return KNOWN, 0  # of an earlier life
                part, other = self.owners.parts[shard]
                at = None if script is None else script[shard]
                told = (
                    self.id,
                    self.life,
                    self.round,
                    number,
                    read[shard],
                    gradient[slice(*part)],
                    rest[slice(*other)],
                )
                found = await self.owners.of(shard, "push", *told, False, at, again=7)
                return int(found[0]), int(found[1])

            answers = await self.owners.each(one)
            self.pushes.append([number, *(tau for _, tau in answers), *(at for at, _ in answers)])


def _read(worker: int, values: Any, part: Slice) -> Row:
    """Values as they came from a shard.

    Raises:
        Unreached: They do not fit.
    """
    size = part[1] - part[0]
    if isinstance(values, dict):  # a codec has made them smaller
        try:
            (values,) = decode_update(cast(EncodedUpdate, values), [np.broadcast_to(np.float32(0), (size,))])
        except ConfigError as error:
            raise Unreached(worker, f"what it sent cannot be read: {error.message}") from None
    if not isinstance(values, np.ndarray) or (values.shape, values.dtype) != ((size,), np.dtype(np.float32)):
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise Unreached(worker, f"it sent {found} for a slice of {size:,} float32 values")
    return values
