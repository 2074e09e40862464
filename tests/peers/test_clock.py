"""Tests of the clock of a server: the clock of its machine may be wrong, and may be set."""

import asyncio
import time

from ddlf.peers import clock
from ddlf.peers.clock import Clock
from tests.patience import PATIENCE_S
from tests.peers.test_server import Running, a_set


class Machine:
    """The clock of a machine that a test can set."""

    def __init__(self, monkeypatch):
        self.ahead_s, usual = 0.0, time.time
        monkeypatch.setattr(clock.time, "time", lambda: usual() + self.ahead_s)
        monkeypatch.setattr(clock, "now", Clock().now)  # other tests have another clock


def test_the_clock_never_goes_back(monkeypatch):
    times = iter([100.0, 101.0, 50.0, 52.0, 200.0, 60.0, 61.0])
    monkeypatch.setattr(clock.time, "time", lambda: next(times))
    server_clock = Clock()
    assert [server_clock.now() for _ in range(7)] == [100.0, 101.0, 101.0, 103.0, 251.0, 251.0, 252.0]


def test_the_clock_of_a_later_server_continues_that_of_an_earlier_one(monkeypatch):
    monkeypatch.setattr(clock.time, "time", iter([40.0, 41.0]).__next__)
    server_clock = Clock()
    server_clock.continue_after(100.0)
    assert [server_clock.now(), server_clock.now()] == [100.0, 101.0]


async def test_a_server_whose_clock_is_set_back_still_takes_posts(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    async with Running(tmp_path) as running:
        machine.ahead_s = 7200.0  # as before the first answer of a time server
        peers = [await running.peer(), await running.peer()]
        for number in range(3):
            for place, peer in enumerate(peers):
                await asyncio.wait_for(peer.post(a_set(1.0 + number + place / 10)), PATIENCE_S)
            machine.ahead_s = 0.0
