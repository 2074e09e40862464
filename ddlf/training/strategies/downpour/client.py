"""A replica's client of the Downpour servers: it fetches weights and pushes gradients while the replica computes.

This code runs in the executor, on its event loop. The replica computes on another thread, and calls it after a step::

    take: wait for the current fetch; subtract the replica's own gradients that it misses; begin the next fetch
    push: hand over the sum of some gradients, which travels to all servers after the replica's last push

The client keeps a push until it is safe: until the backups of all servers contain it. When a backup takes over, the
client asks for its own last push there, and sends the later ones again, in order. So each push counts once. At the end
of a round the loss of one worker cannot lose any of its pushes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ddlf.algorithms.encoding import EncodedUpdate, decode_update
from ddlf.algorithms.flat_weights import Row, Slice
from ddlf.algorithms.push_rules import KNOWN, Cadence
from ddlf.errors import ConfigError, DDLFError, LeaseError, RemoteError
from ddlf.training.messages import Message
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.task import Task
from ddlf.worker.peers import Ask, Unreached

NOTICED_S = 10.0
"""Seconds for retries of a call to a server that does not answer. After this time the master has noticed a lost worker;
otherwise only the link has failed."""
RETRY_S = 0.2

T = TypeVar("T")


class Moved(Exception):
    """Error: the server has a new owner, a worker that may lack pushes which the previous owner had received."""


def name_of(shard: int, epoch: int) -> str:
    """Return the name of a server among the objects that its worker offers to other workers.

    The name contains the term, so it changes each time another worker takes the server over.
    """
    return f"server:{shard + 1}:{epoch}"


@dataclass(slots=True)
class Owners:
    """For each server of the run, the worker that has it, as far as one worker knows.

    Args:
        ask: Calls workers.
        arranged: Number of the master's last announcement of the servers' workers.
        owners: The worker of each server.
        epochs: The term of each server: how often it was given to a worker.
        parts: For each server, its ranges of the trained values and of the untrained values.
    """

    ask: Ask
    arranged: int = 0
    owners: Sequence[int] = ()
    epochs: Sequence[int] = ()
    parts: Sequence[tuple[Slice, Slice]] = ()
    _news: asyncio.Future[None] | None = None
    _asking: dict[asyncio.Task[Any], tuple[int, int]] = field(default_factory=dict)

    def arrange(self, owners: Sequence[int], epochs: Sequence[int]) -> None:
        """Store which worker now has each server, as the master announced it, and cancel calls to earlier owners."""
        self.owners, self.epochs = list(owners), list(epochs)
        for asking, (shard, epoch) in self._asking.items():
            if self.epochs[shard] != epoch:
                asking.cancel()
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    async def for_all(self, call: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        """Call a coroutine function for each server, all at the same time. If one fails, cancel the others."""
        return await for_each(call, len(self.owners))

    async def call(
        self, shard: int, verb: str, *arguments: Any, again: int | None = None, epoch: int | None = None
    ) -> Any:
        """Call a method of a server on the worker that has it now, and return the answer.

        Args:
            shard: Number of the server.
            verb: Name of the server's method.
            arguments: Arguments of the method.
            again: Index of the argument to set to True from the second attempt on.
            epoch: The term that the call is meant for; None for any.

        Raises:
            Moved: The server has a new owner.
            Unreached: The worker did not answer in ``NOTICED_S``.
            RemoteError: The server has refused the call.
        """
        loop = asyncio.get_running_loop()
        begin, tried = loop.time(), 0
        while True:
            now, owner = self.epochs[shard], self.owners[shard]
            if epoch not in (None, now):
                raise Moved
            if tried and again is not None:
                arguments = (*arguments[:again], True, *arguments[again + 1 :])
            tried += 1
            try:
                return await self._call_owner(owner, now, shard, verb, arguments)
            except Moved:
                begin = loop.time()
            except RemoteError:
                raise
            except (DDLFError, Unreached) as error:
                if self.epochs[shard] != now:
                    continue
                lost = isinstance(error, Unreached | LookupError | ConnectionError | LeaseError)
                if not lost or loop.time() - begin > NOTICED_S:
                    raise Unreached(owner, str(error).partition("\n")[0]) from error
                await self._pause()

    async def _call_owner(self, owner: int, epoch: int, shard: int, verb: str, arguments: tuple[Any, ...]) -> Any:
        """Call a server on a worker, and return the answer.

        If the worker is silent, stop waiting as soon as the server has a new owner.
        """
        if self.epochs[shard] != epoch:
            raise Moved
        asking = asyncio.ensure_future(self.ask(owner, name_of(shard, epoch), verb, *arguments))
        self._asking[asking] = shard, epoch
        try:
            return await asking
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if self.epochs[shard] == epoch or (asker is not None and asker.cancelling()):
                raise
            raise Moved from None  # ``arrange`` has cancelled the call
        finally:
            del self._asking[asking]

    async def _pause(self) -> None:
        """Wait for ``RETRY_S`` before another attempt, or until the master announces new workers for the servers."""
        await asyncio.wait({self._arranging()}, timeout=RETRY_S)

    def _arranging(self) -> asyncio.Future[None]:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return self._news


async def for_each(call: Callable[[int], Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Call a coroutine function for some numbers from 0, all at the same time. If one fails, cancel the others."""
    if count == 1:
        return [await call(0)]
    tasks = [asyncio.ensure_future(call(number)) for number in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class SomeOwners:
    """The workers of some servers, for a client that only has the layers on these.

    Args:
        all: The workers of all servers.
        shards: Numbers of these servers, which follow each other. The client counts them from 0.
    """

    all: Owners
    shards: Sequence[int]

    @property
    def owners(self) -> Sequence[int]:
        """The worker of each server."""
        return [self.all.owners[shard] for shard in self.shards]

    @property
    def epochs(self) -> Sequence[int]:
        """The term of each server."""
        return [self.all.epochs[shard] for shard in self.shards]

    @property
    def parts(self) -> Sequence[tuple[Slice, Slice]]:
        """For each server, its ranges of the client's rows of trained and of untrained values."""
        parts = [self.all.parts[shard] for shard in self.shards]
        (first, _), (low, _) = parts[0]
        return [((a - first, b - first), (c - low, d - low)) for (a, b), (c, d) in parts]

    async def for_all(self, call: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        """Call a coroutine function for each server, like ``Owners.for_all``."""
        return await for_each(call, len(self.shards))

    async def call(
        self, shard: int, verb: str, *arguments: Any, again: int | None = None, epoch: int | None = None
    ) -> Any:
        """Call a method of a server, like ``Owners.call``."""
        return await self.all.call(self.shards[shard], verb, *arguments, again=again, epoch=epoch)


ON_THEIR_WAY = 2
"""Maximum number of a replica's unacknowledged pushes. The next push waits."""
NONE = np.zeros(0, np.float32)
HELD = 4
"""Maximum number of a replica's unsafe pushes. At this number the replica has the servers update their backups, and
waits."""
LARGE = 1 << 16
"""A push with more values than this waits for the next fetch, if the replica computes longer than it waits for
weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEntry(Message):
    """The entry about weights in the task of a slot: it names the replicas that the slot carries.

    Args:
        replicas: Numbers of these replicas, from 0.
        all: Number of replicas of the run.
        life: Their incarnation.
        alone: Number of pushes that the first replica makes before the others begin.
    """

    replicas: Sequence[int]
    all: int
    life: int
    alone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry(Message):
    """The entry ``replica`` in the order of a part, if a group of workers carries a replica.

    Args:
        id: Number of the replica, from 0.
        life: Its incarnation.
        all: Number of replicas of the run.
        numbers: For each server of the run, the number of the first push that it lacks.
        epochs: Term of each server of the run when ``numbers`` was read.
        shards: Numbers of the servers that have the weights of the part.
    """

    id: int
    life: int
    all: int
    numbers: Sequence[int]
    epochs: Sequence[int]
    shards: Sequence[int] = ()


class FetchedRange(NamedTuple):
    """A server's answer to a fetch of a replica. It travels as a list, because a replica may fetch at each step.

    Args:
        weights: Trained values of the server's range, or these values encoded by a codec.
        rest: The untrained values.
        version: Version of the server.
        received: Number of pushes in the values.
        round: Round of the replica's last push in the values, from 0; -1 for none.
        number: Number of this push in its round, from 0; -1 for none.
        epoch: Term of the server.
        safe: Number of pushes that all backups of the server contain.
    """

    weights: Row | EncodedUpdate
    rest: Row
    version: int
    received: int
    round: int
    number: int
    epoch: int
    safe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Message):
    """A server's answer to a replica that continues with it after pushes to an earlier owner.

    Args:
        last: The replica's last push of this round that the server has: its number, the number of earlier pushes of all
            replicas, and its staleness. None for none.
        rollbacks: The rollbacks of the server.
    """

    last: tuple[int, int, int] | None
    rollbacks: Sequence[tuple[int, int]]


@dataclass(slots=True)
class Fetched:
    """The weights that one fetch returned from all servers.

    Args:
        weights: Trained values. The caller may change the array.
        rest: The untrained values.
        versions: Version of each server.
        received: Number of pushes in each server.
        numbers: For each server, the number of the replica's last push of this round in it, from 0; -1 for none.
        epochs: Term of each server.
        safe: For each server, the number of pushes that all of its backups contain.
    """

    weights: Row
    rest: Row
    versions: list[int]
    received: list[int]
    numbers: list[int]
    epochs: list[int]
    safe: list[int]


@dataclass(frozen=True, slots=True)
class _Push:
    """A push (a sum of gradients) that a replica keeps until it is safe, that is, until all backups contain it.

    Args:
        number: Number of the push in its round, from 0.
        read: For each server, the version of the weights that the gradient was computed from.
        gradient: Gradient for all servers.
        rest: Change of the untrained values.
    """

    number: int
    read: list[int]
    gradient: Row
    rest: Row


@dataclass(kw_only=True)
class ModelReplica:
    """The client of one replica of the model in one round: it fetches weights from all servers and pushes gradients.

    Args:
        id: Number of the replica, from 0.
        life: How often the replica has begun a round or begun it again after a loss (its incarnation).
        round: Number of the round, from 0.
        steps: Number of the replica's steps in the round.
        owners: Locations of the servers.
        cadence: Decides before each step whether it fetches or pushes.
        numbers: For each server, the number of the first push that it lacks. It is
            not 0 if the replica had pushed before its worker was lost.
        epochs: Term of each server when ``numbers`` was read.
        begins: Number of the first push that some server of the whole replica lacks; None if ``numbers`` has all of
            its servers.

    Attributes:
        first: Number of the first push that some server lacks. This incarnation begins with its steps.
        done: Number of steps so far in this incarnation.
        read: For each server, its version when the current weights were fetched.
        lost: For each server, the number of this round's pushes that were lost with it.
    """

    id: int
    life: int
    round: int
    steps: int
    owners: Owners | SomeOwners
    cadence: Cadence
    numbers: Sequence[int]
    epochs: list[int]
    begins: int | None = None
    done: int = 0
    read: list[int] = field(default_factory=list)
    lost: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.first = min(self.numbers) if self.begins is None else self.begins
        self.left = max(self.steps - self.first * self.cadence.n_push, 0)
        self._next = self.first
        self._fetching: asyncio.Future[Fetched] | None = None
        self._begun = 0
        self._fetches: list[Fetched] = []
        self._lacking: deque[tuple[int, Row]] = deque()
        self._sending: deque[asyncio.Future[None]] = deque()
        self._turn = asyncio.Lock()
        self._unsafe: deque[_Push] = deque()
        self._forgotten = self.first  # the number after the last safe push
        self._answers: dict[int, list[tuple[int, int] | None]] = {}  # push -> for each server, place and staleness
        self._rollbacks: list[list[tuple[int, int]]] = [[] for _ in self.numbers]
        self._safe = [0 for _ in self.numbers]
        self._taken_at, self._waited_s = 0.0, 0.0  # time of the last take, and how long it waited

    @property
    def fetched_pushes(self) -> list[list[int]]:
        """For each fetch and server, the number of pushes that the fetched weights contain, for the master's record.

        It is ``KNOWN`` if some of these pushes were lost since with their server.
        """
        return [
            [
                KNOWN if any(since > epoch and at < received for since, at in rollbacks) else received
                for received, epoch, rollbacks in zip(fetched.received, fetched.epochs, self._rollbacks, strict=True)
            ]
            for fetched in self._fetches
        ]

    @property
    def pushes(self) -> list[list[int]]:
        """For each push, the facts that the master records.

        They are its number, then for each server its staleness, then for each server the number of earlier pushes.
        """
        complete = ((number, answers) for number, answers in sorted(self._answers.items()) if None not in answers)
        return [
            [number, *(answer[1] for answer in answers if answer), *(answer[0] for answer in answers if answer)]
            for number, answers in complete
        ]

    @property
    def next(self) -> int:
        """The number of the next push, from 0."""
        return self._next

    async def take(self, unpushed: Row | None, rate: float) -> tuple[Row, Row]:
        """Return the weights of the current fetch from the servers.

        Begin the next fetch if a later step needs it.

        Args:
            unpushed: Sum of the gradients that are not pushed yet; None for none.
            rate: Local learning rate: how far an own gradient moves the weights.

        Returns:
            The trained values, moved by the replica's own recent gradients; the other values.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        fetched = await (self._fetching or self._fetch())
        self._fetching, self._taken_at = None, clock()
        self._waited_s = self._taken_at - begun
        self.read = fetched.versions
        for shard, (epoch, safe) in enumerate(zip(fetched.epochs, fetched.safe, strict=True)):
            if epoch == self.epochs[shard]:
                self._safe[shard] = max(self._safe[shard], safe)
        for number, gradient in self._lacking:
            for last_number, (part, _) in zip(fetched.numbers, self.owners.parts, strict=True):
                if number > last_number:
                    fetched.weights[slice(*part)] -= np.float32(rate) * gradient[slice(*part)]
        while self._lacking and self._lacking[0][0] <= min(fetched.numbers):
            self._lacking.popleft()
        self._fetches.append(dataclasses.replace(fetched, weights=NONE, rest=NONE))
        if unpushed is not None:
            fetched.weights -= np.float32(rate) * unpushed
        if self.cadence.begins(self.done, self.left):
            self._fetching = self._fetch()
        return fetched.weights, fetched.rest

    async def push(self, gradient: Row, rest: Row) -> None:
        """Give a gradient to the client, which sends it to all servers after the last push.

        Wait only if too many pushes are unacknowledged.

        Args:
            gradient: Sum of the gradients since the last push. The client keeps the array.
            rest: Change of the untrained values.
        """
        number, self._next = self._next, self._next + 1
        self._lacking.append((number, gradient))
        push = _Push(number, list(self.read), gradient, rest)
        self._answers[number] = [
            (KNOWN, 0) if number < first_lacking else None for first_lacking in self.numbers
        ]  # pushed before
        computes = asyncio.get_running_loop().time() - self._taken_at > self._waited_s
        yields = computes and len(gradient) > LARGE
        self._sending.append(asyncio.ensure_future(self._send(push, self._begun + 1 if yields else 0)))
        while len(self._sending) > ON_THEIR_WAY or (self._sending and self._sending[0].done()):
            await self._sending.popleft()

    def skip(self) -> None:
        """Leave out a push that has unusable values.

        Also cancel the current fetch, so that the next one gets the servers' values.
        """
        self._next += 1
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def pushed(self) -> None:
        """Wait until the replica's own pushes, and all pushes in the weights that it fetched, are safe in backups."""
        while self._sending:
            await self._sending.popleft()
        async with self._turn:
            await self.owners.for_all(self._make_safe)
            self._forget()

    def end(self) -> None:
        """Cancel the fetches and pushes that are under way."""
        for task in (self._fetching, *self._sending):
            if task is not None:
                task.cancel()

    def _fetch(self) -> asyncio.Future[Fetched]:
        self._begun += 1
        return asyncio.ensure_future(self._fetched())

    async def _fetched(self) -> Fetched:
        fetched = await self.owners.for_all(lambda shard: self.owners.call(shard, "fetch", self.id, self.life))
        answers = [FetchedRange(*answer) for answer in fetched]
        weights, rest = [], []
        for owner, answer, (part, rest_part) in zip(self.owners.owners, answers, self.owners.parts, strict=True):
            weights.append(_read(owner, answer.weights, part))
            rest.append(_read(owner, answer.rest, rest_part))
        return Fetched(
            np.concatenate(weights),
            np.concatenate(rest),
            [answer.version for answer in answers],
            [answer.received for answer in answers],
            [answer.number if answer.round == self.round else -1 for answer in answers],
            [answer.epoch for answer in answers],
            [answer.safe for answer in answers],
        )

    # -- pushes: one at a time for each replica, to all servers at once -----------------------------------------------

    async def _send(self, push: _Push, fetches: int) -> None:
        async with self._turn:
            await self._fetches_ended(fetches)
            self._unsafe.append(push)
            await self.owners.for_all(self._bring)
            self._forget()
            while len(self._unsafe) > HELD:
                await self.owners.for_all(lambda shard: self._make_safe(shard, self._unsafe[0].number))
                self._forget()

    async def _fetches_ended(self, number: int) -> None:
        """Wait until earlier fetches have ended, before a push uses the links.

        The next step waits for its fetch, but no step waits for a push.
        """
        while self._fetching is not None and self._begun <= number and not self._fetching.done():
            await asyncio.wait({self._fetching})
            await asyncio.sleep(0)  # the waiting step uses this fetch and begins the next one

    async def _bring(self, shard: int) -> None:
        """Send a server all pushes that it lacks. If it moves to another worker meanwhile, continue there."""
        while True:
            epoch = self.owners.epochs[shard]
            try:
                if epoch != self.epochs[shard]:
                    await self._resume(shard, epoch)
                for push in list(self._unsafe):
                    if self._answers[push.number][shard] is None:
                        self._answers[push.number][shard] = await self._push(shard, push, epoch)
                return
            except Moved:
                continue

    async def _push(self, shard: int, push: _Push, epoch: int) -> tuple[int, int]:
        (begin, end), (low, high) = self.owners.parts[shard]
        push_id = self.id, self.life, self.round, push.number, push.read[shard]
        slices = push.gradient[begin:end], push.rest[low:high]
        answer = await self.owners.call(shard, "push", *push_id, *slices, False, again=7, epoch=epoch)
        return int(answer[0]), int(answer[1])

    async def _resume(self, shard: int, epoch: int) -> None:
        """Ask the new owner of a server which of the replica's pushes it has, and note the pushes that it lacks."""
        message = await self.owners.call(shard, "resume", self.id, self.life, self.round, epoch=epoch)
        resumed = Resumed.from_message(message)
        reached, at, tau = resumed.last or (-1, KNOWN, 0)
        for push in self._unsafe:
            answers = self._answers[push.number]
            if push.number > reached:
                answers[shard] = None
            elif answers[shard] is None:
                answers[shard] = at, tau  # the answer to this push was lost; at most one push waits for an answer
        for number in range(
            reached + 1, self._forgotten
        ):  # pushes that cannot be sent again; skipped numbers lose nothing
            if number in self._answers:
                self._answers[number][shard] = KNOWN, 0
            self.lost[shard] += number in self._answers or number < self.first
        self._rollbacks[shard] = [*resumed.rollbacks]
        self._safe[shard], self.epochs[shard] = 0, epoch

    async def _make_safe(self, shard: int, number: int | None = None) -> None:
        """Wait until the backups of a server contain all pushes up to a number.

        By default, wait for all own pushes, and for all pushes in the fetched weights.
        """
        while True:
            await self._bring(shard)
            numbers = [push.number for push in self._unsafe if number is None or push.number <= number]
            required = max((self._pushes_before(unsafe, shard) for unsafe in numbers), default=KNOWN) + 1
            if number is None:
                required = max(required, *(fetch[shard] for fetch in self.fetched_pushes), 0)
            if required <= self._safe[shard]:
                return
            try:
                epoch = self.epochs[shard]
                self._safe[shard] = int(await self.owners.call(shard, "safe", required, epoch=epoch))
            except Moved:
                continue

    def _pushes_before(self, number: int, shard: int) -> int:
        answer = self._answers[number][shard]
        assert answer is not None
        return answer[0]

    def _forget(self) -> None:
        """Forget the pushes that are safe in backups, because they need not be sent again."""
        while self._unsafe:
            first = self._unsafe[0]
            for shard, answer in enumerate(self._answers[first.number]):
                if answer is None or answer[0] >= self._safe[shard]:
                    return
            self._forgotten = first.number + 1
            self._unsafe.popleft()


def _read(worker: int, values: Any, part: Slice) -> Row:
    """Return the weights in a server's answer, decoded and checked.

    Raises:
        Unreached: The values do not fit.
    """
    size = part[1] - part[0]
    if isinstance(values, dict):  # encoded by a codec
        try:
            (values,) = decode_update(cast(EncodedUpdate, values), [np.broadcast_to(np.float32(0), (size,))])
        except ConfigError as error:
            raise Unreached(worker, f"its answer cannot be read: {error.message}") from None
    if not isinstance(values, np.ndarray) or (values.shape, values.dtype) != ((size,), np.dtype(np.float32)):
        description = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise Unreached(worker, f"it sent {description} for a slice of {size:,} float32 values")
    return values


async def replicas_of(owners: Owners, task: Task, steps: Sequence[int], cadence: Cadence) -> list[ModelReplica]:
    """Return the clients of a slot's replicas at the beginning of the slot's round.

    Args:
        owners: The workers that have the servers.
        task: The round. Its weights entry names its replicas.
        steps: Number of steps of each replica.
        cadence: Decides before each step whether a replica fetches or pushes.
    """
    entry = ReplicaEntry.from_message(task.weights)
    ids, life = entry.replicas, entry.life
    epochs = list(owners.epochs)
    numbers = await owners.for_all(lambda shard: owners.call(shard, "begin", ids, life, task.round))
    return [
        ModelReplica(
            id=id,
            life=life,
            round=task.round,
            steps=count,
            owners=owners,
            cadence=cadence,
            numbers=[int(of_shard[index]) for of_shard in numbers],
            epochs=list(epochs),
        )
        for index, (id, count) in enumerate(zip(ids, steps, strict=True))
    ]


def record(replicas: Sequence[ModelReplica], *, refused: int = 0, unreached: Unreached | None = None) -> RoundPushes:
    """Return the pushes and fetches of a round, which the master records.

    Args:
        replicas: The clients of the slot's replicas.
        refused: Number of pushes that were left out.
        unreached: The error that has ended the round, if a server could not be reached.
    """
    return RoundPushes(
        pushes=[[replica.id, *push] for replica in replicas for push in replica.pushes],
        fetches=[[replica.id, *fetch] for replica in replicas for fetch in replica.fetched_pushes],
        lost=[lost for replica in replicas for lost in replica.lost.items()],
        refused=refused,
        unreached=None if unreached is None else unreached.worker,
        reason="" if unreached is None else unreached.reason,
    )
