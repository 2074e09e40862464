"""Where the shards of the weights are, as one worker sees it, and how it asks them, wherever they are by then. Runs in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddlf.algorithms.ranges import Slice
from ddlf.errors import AppMissing, DDLFError, LeaseError, RemoteError
from ddlf.training.downpour.server import Shard
from ddlf.training.exchanges.peers import Unreached

NOTICED_S = 10.0
"""How long a shard is asked again that does not answer: by then the master has noticed that its worker is lost, or it is the link between the two."""
RETRY_S = 0.2

T = TypeVar("T")
Ask = Callable[..., Awaitable[Any]]
"""Asks another worker: its number, a verb, and the verb's own arguments."""


class Moved(Exception):
    """A shard is another worker's by now, which may lack what the one before had."""


def shard_of(shards: dict[int, Shard], epoch: int, number: int) -> Shard:
    """A shard that this worker owns.

    Raises:
        AppMissing: It does not, or not any more.
    """
    shard = shards.get(number)
    if shard is None or shard.epoch != epoch:
        raise AppMissing(f"shard {number + 1} is not here")
    return shard


@dataclass(slots=True)
class Owners:
    """Where the shards are, as one worker sees it.

    Args:
        me: Number of this worker.
        mine: The shards that it owns.
        ask: Asks others.
        arranged: How often the master has said who owns what.
        owners: The worker of each shard.
        epochs: How often each shard was given to a worker.
        parts: Slices of each shard: of the values that are trained, and of the others.
    """

    me: int
    mine: dict[int, Shard]
    ask: Ask
    arranged: int = 0
    owners: Sequence[int] = ()
    epochs: Sequence[int] = ()
    parts: Sequence[tuple[Slice, Slice]] = ()
    _news: asyncio.Future[None] | None = None
    _asking: dict[asyncio.Task[Any], tuple[int, int]] = field(default_factory=dict)

    def arrange(self, owners: Sequence[int], epochs: Sequence[int]) -> None:
        """Hear who owns what from now on."""
        self.owners, self.epochs = list(owners), list(epochs)
        for asking, (shard, epoch) in self._asking.items():
            if self.epochs[shard] != epoch:
                asking.cancel()
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

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

    async def of(
        self, shard: int, verb: str, *arguments: Any, again: int | None = None, epoch: int | None = None
    ) -> Any:
        """What a shard answers, wherever it is by then.

        Args:
            shard: Which.
            verb: Name of one of its methods.
            arguments: Its own.
            again: Place among them of what is to be True from the second attempt on.
            epoch: The one that this is meant for; None for any.

        Raises:
            Moved: The shard was given to another worker since.
            Unreached: It did not answer in ``NOTICED_S``.
            RemoteError: It has refused.
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
                return await self._asked(owner, now, shard, verb, arguments)
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

    async def _asked(self, owner: int, epoch: int, shard: int, verb: str, arguments: tuple[Any, ...]) -> Any:
        """What a worker answers, unless the shard becomes another one's meanwhile: one that is silent is not waited for."""
        if owner == self.me:
            return await getattr(shard_of(self.mine, epoch, shard), verb)(*arguments)
        if self.epochs[shard] != epoch:
            raise Moved
        asking = asyncio.ensure_future(self.ask(owner, "shard", epoch, shard, verb, *arguments))
        self._asking[asking] = shard, epoch
        try:
            return await asking
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if self.epochs[shard] == epoch or (asker is not None and asker.cancelling()):
                raise
            raise Moved from None  # it was ended by what the master has said
        finally:
            del self._asking[asking]

    async def _pause(self) -> None:
        """Wait a moment, or until the master says who owns what."""
        await asyncio.wait({self._arranging()}, timeout=RETRY_S)

    def _arranging(self) -> asyncio.Future[None]:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return self._news
