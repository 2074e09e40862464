"""Tests of two connected ends that do random actions in random order.

Each message arrives unchanged and in order, each end closes once, and no memory stays counted.
"""

import asyncio
import hashlib
from functools import partial

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddlf.errors import FrameTooLarge
from ddlf.rpc.admission import RECEIVING
from ddlf.rpc.connection import Connection
from ddlf.rpc.messages import Limits
from tests.patience import PATIENCE_S
from tests.sockets import socket_pair

LIMITS = Limits(max_body_bytes=4 * 1024**2)
SIZES = st.sampled_from([0, 1, 100, 16 * 1024, 16 * 1024 + 1, 40_000, 1_000_000, 3_000_000])
SIDES = st.integers(0, 1)


def digests(buffers):
    """Return sizes and short hashes of the buffers; printing megabytes after a failure would take minutes."""
    return [f"{len(buffer)}:{hashlib.sha256(buffer).hexdigest()[:8]}" for buffer in buffers]


class Connections(RuleBasedStateMachine):
    """Two connected ends. The model of an end is the list of messages that it has sent."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.counted_before = RECEIVING.used_bytes

    @initialize()
    def connect(self):
        self.sent = [], []
        self.received = [], []
        self.ends = [], []
        self.news = asyncio.Event()
        self.turn(self._connect)

    def _connect(self):
        self.connections = [
            Connection(
                sock,
                partial(self._arrived, side),
                self.ends[side].append,
                limits=LIMITS,
            )
            for side, sock in enumerate(socket_pair())
        ]

    def _arrived(self, side, frame):
        self.received[side].append(digests(frame.buffers))
        self.news.set()

    def turn(self, action, *args):
        """Call ``action`` inside the event loop, then let the loop run its ready callbacks."""

        async def act():
            result = action(*args)
            for _ in range(3):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(act())

    def open(self, side):
        return not self.connections[side].closed

    @rule(side=SIDES, sizes=st.lists(SIZES, max_size=3), fill=st.binary(min_size=1, max_size=8), reused=st.booleans())
    def send(self, side, sizes, fill, reused):
        buffers = [bytearray((fill * (size // len(fill) + 1))[:size]) for size in sizes]
        expected = digests(buffers)

        def act():
            connection = self.connections[side]
            try:
                connection.send(1, len(self.sent[side]), "run", buffers)
            except FrameTooLarge:
                assert sum(sizes) > LIMITS.max_body_bytes
            except ConnectionError:
                assert connection.closed
            else:
                assert sum(sizes) <= LIMITS.max_body_bytes
                self.sent[side].append(expected)
                if reused:
                    connection.detach()
                    for buffer in buffers:
                        buffer[:] = bytes(len(buffer))  # the caller may overwrite its buffers now

        self.turn(act)

    @precondition(lambda self: self.open(0) and self.open(1))
    @rule(side=SIDES)
    def pause(self, side):
        self.turn(self.connections[side].pause_reading)

    @rule(side=SIDES)
    def resume(self, side):
        self.turn(self.connections[side].resume_reading)

    @rule(side=SIDES, abort=st.booleans())
    def close(self, side, abort):
        self.turn(self.connections[side].abort if abort else self.connections[side].close)
        assert not self.open(side)

    @precondition(lambda self: self.open(0) and self.open(1))
    @rule()
    def all_arrives(self):
        """Queued messages arrive when both ends read."""

        async def drained():
            for connection in self.connections:
                connection.resume_reading()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(connection.drain() for connection in self.connections))
                while [*map(len, self.received)] != [len(self.sent[1]), len(self.sent[0])]:
                    self.news.clear()
                    await self.news.wait()

        self.loop.run_until_complete(drained())
        assert [connection.queued_bytes for connection in self.connections] == [0, 0]

    @invariant()
    def received_messages_were_sent_in_this_order(self):
        for side in (0, 1):
            assert self.received[side] == self.sent[1 - side][: len(self.received[side])]

    @invariant()
    def an_end_is_reported_once(self):
        for side in (0, 1):
            assert len(self.ends[side]) == (not self.open(side))

    def teardown(self):
        for connection in self.connections:
            self.turn(connection.close)
        self.loop.close()
        self.an_end_is_reported_once()
        assert RECEIVING.used_bytes == self.counted_before


TestConnections = Connections.TestCase
TestConnections.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
    # shrinking takes too long for a test, and 25 steps are readable
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)
