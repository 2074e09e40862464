"""How a worker asks other workers of its run for something. Runs in the executor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ddlf.errors import ConnectError, WorkerLost

if TYPE_CHECKING:
    from ddlf.worker.hosting import Hosting
    from ddlf.worker.worker import Worker

Ask = Callable[..., Awaitable[Any]]
"""Asks a worker, which may be this one: its number, the name of a role, a verb, and the verb's own arguments. Raises Unreached if the link fails."""


class Unreached(Exception):
    """Another worker did not give what it was asked for.

    Args:
        worker: Its number.
        why: What happened, in one line.
        link: Whether the link between the two workers failed.
    """

    def __init__(self, worker: int, why: str, *, link: bool = False) -> None:
        super().__init__(why)
        self.worker, self.why, self.link = worker, why, link


def calls_of(worker: Worker, run: str) -> Ask:
    """Calls of roles in a run.

    Args:
        worker: The worker that calls.
        run: Name of the run.
    """

    async def ask(number: int, role: str, verb: str, *arguments: Any) -> Any:
        if number == worker.id:
            return await played_here(worker.roles, run, role, verb, *arguments)
        peer = worker.peers[number]
        try:
            peer.refuse_silent()  # dialling would take seconds, and the master tries this link again
            try:
                return await peer.call((run, role), verb, *arguments)
            except WorkerLost:  # a connection that was reset is opened anew, so a request may be sent twice
                peer.refuse_silent()
                return await peer.call((run, role), verb, *arguments)
        except (WorkerLost, ConnectError) as error:
            raise Unreached(number, error.message.partition("\n")[0], link=True) from error

    return ask


async def played_here(roles: Hosting, run: str, role: str, verb: str, *arguments: Any) -> Any:
    """What a role of this worker answers, as it would another worker.

    Raises:
        AppMissing: There is no such role.
    """
    function = roles.find(run, role, verb, by_peer=True).function
    assert function is not None
    return await function(*arguments)
