"""The connection of one peer, as the server sees it: what it sends, in which order, and how long the peer may read it.

Answers and messages leave in the order in which they were put. One task at a time sends: the task that listens to the peer,
after each message of it, or the task ``send_when_due``, for answers that come while the peer is silent. So an answer never
overtakes another one. Nothing here awaits the disk: the server puts an answer after its entry is in the journal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ddlf.peers import clock, frames
from ddlf.peers.frames import Answer, Message, Welcome
from ddlf.peers.ledger import Reply
from ddlf.peers.quotas import reading_s

if TYPE_CHECKING:
    from ddlf.peers.turns import Copies, TurnConnection


class WaitingAnswer(NamedTuple):
    """An answer that waits until the peer has read the earlier ones. Its message is made when its turn comes.

    Attributes:
        reply: The answer.
        share: Share of the difference between the set ``start`` and that of the answer that the peer gets.
        start: The set of the peer's post, if the share is below 1.
    """

    reply: Reply
    share: float = 1.0
    start: bytes = b""


class PeerConnection:
    """The connection of one peer.

    Args:
        socket: Its WebSocket.
        copies: Limits the sets that are made for single peers.
        message_of: Makes the message of an answer, with its set.
        sent: Gets the length of a set that the peer has read.

    Attributes:
        socket: Its WebSocket.
        open_post: Number of the post that has no answer yet; 0 without one.
        last_answered: Number of the last post that was answered here.
        is_working: Whether the server works on a message of the peer. Then it may read no answers to pings.
        is_resting: Whether the server reads nothing from the peer for now, since it has used up its quota.
        reading_bytes: Bytes of the last answer.
        read_by: Time until which the peer must have read them; infinite if it has.
    """

    def __init__(
        self,
        socket: TurnConnection,
        copies: Copies,
        message_of: Callable[[WaitingAnswer], Awaitable[Answer]],
        sent: Callable[[int], None],
    ) -> None:
        self.socket = socket
        self.open_post = self.last_answered = 0
        self.is_working = self.is_resting = False
        self.reading_bytes, self.read_by = 0, inf
        self._copies, self._message_of, self._sent = copies, message_of, sent
        self._outbox: deque[WaitingAnswer | Message] = deque()
        self._due = asyncio.Event()  # the outbox has messages that the listening task does not send
        self._is_sending = False

    def answer(self, reply: Reply, share: float = 1.0, start: bytes = b"") -> None:
        """Send an answer, after the earlier ones. ``WaitingAnswer`` explains the arguments."""
        self.last_answered = reply.number
        self._put(WaitingAnswer(reply, share, start))

    def tell(self, message: Message) -> None:
        """Send a message, after the earlier ones."""
        self._put(message)

    def _put(self, waiting: WaitingAnswer | Message) -> None:
        self._outbox.append(waiting)
        if not self.is_working:
            self._due.set()

    async def send_when_due(self) -> None:
        """Send the answers that come while the peer is silent, as at the end of a round. Each connection has a task for it."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.send_waiting()

    async def send_waiting(self) -> None:
        """Send answers one by one, as fast as the peer reads. One task at a time does it."""
        if self._is_sending:
            return
        self._is_sending = True
        while self._outbox:
            waiting = self._outbox.popleft()
            if isinstance(waiting, Message):
                await self.socket.send(frames.encode(waiting))
                continue
            async with self._copies.turn(len(waiting.start)):
                answer = await self._message_of(waiting)
                self.open_post = 0
                await self.send(answer)
        self._is_sending = False

    async def send(self, message: Welcome | Answer) -> None:
        """Send a message with a set. The server ends the connection of a peer that has not read it in time."""
        self.reading_bytes = len(message.set)
        self.read_by = clock.now() + reading_s(self.reading_bytes)
        await self.socket.send_alive(frames.pieces(message))
        self.read_by = inf
        self._sent(self.reading_bytes)
