"""How a worker asks other workers of its run for something. Runs in the executor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ddlf.errors import ConnectError, WorkerLost

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

Ask = Callable[..., Awaitable[Any]]
"""Asks another worker: its number, a verb, and the verb's own arguments. Raises Unreached if the link to it fails."""


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


def over_links(call: Ask) -> Ask:
    """The same calls, which raise Unreached if the link to the other worker fails.

    Args:
        call: Calls another worker.
    """

    async def ask(worker: int, verb: str, *arguments: Any) -> Any:
        try:
            return await call(worker, verb, *arguments)
        except (WorkerLost, ConnectError) as error:
            raise Unreached(worker, error.message.partition("\n")[0], link=True) from error

    return ask


def calls_of(worker: Worker, role: tuple[str, str]) -> Ask:
    """Calls of a role on other workers.

    Args:
        worker: The worker that calls.
        role: Name of the run, and of the role on the other workers.
    """

    async def call(number: int, verb: str, *arguments: Any) -> Any:
        peer = worker.peers[number]
        peer.refuse_silent()  # dialling would take seconds, and the master tries this link again
        try:
            return await peer.call(role, verb, *arguments)
        except WorkerLost:  # a connection that was reset is opened anew, so a request may be sent twice
            peer.refuse_silent()
            return await peer.call(role, verb, *arguments)

    return over_links(call)
