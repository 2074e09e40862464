"""How a worker calls the others of its run, where two may have no way to each other. Runs in the executor.

The master, which sees both, names a third worker that reaches both; what the two ask of each other goes through that one, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ddlf.errors import ConnectError, WorkerLost
from ddlf.training.exchanges.sharded.plan import Unreached

Call = Callable[..., Awaitable[Any]]
"""Calls another worker: its number, a verb, and the verb's own arguments."""


class Around:
    """One worker's ways to the others.

    Args:
        call: Calls another worker directly.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._around: dict[int, int] = {}

    def go_around(self, ways: Iterable[tuple[int, int]]) -> None:
        """Ask through others from now on.

        Args:
            ways: Of each worker that this one does not reach its number, and that of one that reaches both.
        """
        self._around = dict(ways)

    async def ask(self, worker: int, verb: str, *arguments: Any) -> Any:
        """What another worker answers.

        Raises:
            Unreached: A link on the way to it is lost.
            DDLFError: What it raises.
        """
        if worker not in self._around:
            return await self._directly(worker, verb, *arguments)
        via = self._around[worker]
        found = await self._directly(via, "relay", worker, verb, *arguments)
        if "unreached" in found:
            raise Unreached(worker, found["unreached"], by=via)
        return found["answer"]

    async def relay(self, worker: int, verb: str, *arguments: Any) -> dict[str, Any]:
        """Ask another worker for one that does not reach it.

        Returns:
            Its ``answer``; or why it is ``unreached`` from here, too.
        """
        try:
            return {"answer": await self._directly(worker, verb, *arguments)}
        except Unreached as error:
            return {"unreached": error.why}

    async def _directly(self, worker: int, verb: str, *arguments: Any) -> Any:
        try:
            return await self._call(worker, verb, *arguments)
        except (WorkerLost, ConnectError) as error:
            raise Unreached(worker, error.message.partition("\n")[0], link=True) from error
