"""Calls from a worker to other workers of its run. Runs in the executor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ddlf.errors import ConnectError, WorkerLost

if TYPE_CHECKING:
    from ddlf.worker.methods import Hosting
    from ddlf.worker.worker import Worker

Ask = Callable[..., Awaitable[Any]]
"""Calls a worker, maybe this one, by its number, a role, a verb, and arguments. Raises Unreached if the link fails."""


class Unreached(Exception):
    """Another worker did not answer a call.

    Args:
        worker: Number of the other worker.
        why: The error, in one line.
        link: Whether the link between the two workers failed.
    """

    def __init__(self, worker: int, why: str, *, link: bool = False) -> None:
        super().__init__(why)
        self.worker, self.why, self.link = worker, why, link


def calls_of(worker: Worker, run: str) -> Ask:
    """Return a function that calls roles of a run on other workers.

    Args:
        worker: The worker that calls.
        run: Name of the run.
    """

    async def ask(number: int, role: str, verb: str, *arguments: Any) -> Any:
        if number == worker.id:
            return await played_here(worker.roles, run, role, verb, *arguments)
        peer = worker.peers[number]
        try:
            peer.refuse_silent()  # a new connection would take seconds, and the master tries this link again
            try:
                return await peer.call((run, role), verb, *arguments)
            except WorkerLost:  # connect again after a reset; the peer may receive the request twice
                peer.refuse_silent()
                return await peer.call((run, role), verb, *arguments)
        except (WorkerLost, ConnectError) as error:
            raise Unreached(number, error.message.partition("\n")[0], link=True) from error

    return ask


async def played_here(roles: Hosting, run: str, role: str, verb: str, *arguments: Any) -> Any:
    """Call a verb of a role on this worker, like another worker would.

    Raises:
        AppMissing: This worker has no such role.
    """
    function = roles.find(run, role, verb, by_peer=True).function
    assert function is not None
    return await function(*arguments)
