"""Tests of the admission of connections.

Strangers take places only from each other, and cannot fill the log.
"""

import asyncio
import resource

import pytest

from ddlf.rpc import admission as admission_module
from ddlf.rpc.admission import (
    GRACE_S,
    MAX_CONNECTIONS,
    MAX_HALF_OPEN,
    MAX_HALF_OPEN_PER_ADDRESS,
    RESERVED_DESCRIPTORS,
    Admission,
    free_descriptors,
)


class Door:
    """An admission with handshakes that last until they are cancelled. Only ``wait`` moves the clock."""

    def __init__(self):
        self.now = 0.0
        self.lines = []
        self.ended = []
        self.admission = Admission(self.lines.append, lambda: 0)

    async def knock(self, address, name):
        async def greeting():
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(name)

        self.admission.start(greeting(), address)
        await asyncio.sleep(0)

    async def wait(self, seconds):
        self.now += seconds
        for _ in range(3):  # first timers run, then the tasks that they cancel, then the ends of the tasks
            await asyncio.sleep(0)

    async def close(self):
        for task in self.admission.tasks:
            task.cancel()
        await asyncio.sleep(0)


@pytest.fixture
async def door(monkeypatch):
    door = Door()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: door.now)
    yield door
    await door.close()


async def test_the_oldest_handshakes_of_an_address_are_cancelled_after_a_moment(door):
    await door.knock("10.0.0.2", "other")
    for number in range(MAX_HALF_OPEN_PER_ADDRESS + 2):
        await door.knock("10.0.0.1", number)
    assert door.ended == [], "so many may be real masters that begin at the same moment"
    await door.wait(2 * GRACE_S)
    assert door.ended == [0, 1]
    assert door.lines == ["refused 10.0.0.1: too many handshakes at once, so the oldest connection was closed"]


async def test_new_handshakes_are_not_cancelled(door):
    for number in range(MAX_HALF_OPEN_PER_ADDRESS + 1):
        await door.knock("10.0.0.1", number)
    await door.wait(0.6 * GRACE_S)
    for number in range(100, 120):
        await door.knock("10.0.0.1", number)
    await door.wait(0.6 * GRACE_S)
    assert set(door.ended) == set(range(MAX_HALF_OPEN_PER_ADDRESS + 1))


async def test_the_oldest_handshake_is_cancelled_when_many_addresses_take_all_places(door):
    for number in range(MAX_HALF_OPEN + 3):
        await door.knock(f"10.0.1.{number}", number)
    await asyncio.sleep(0)
    assert door.ended == [0, 1, 2]
    assert len(door.admission.tasks) == MAX_HALF_OPEN


@pytest.mark.parametrize(
    ("soft", "half_open", "connections"),
    [(20_000, MAX_HALF_OPEN, MAX_CONNECTIONS), (1024, MAX_HALF_OPEN, 1024 - 64 - 64), (80, 8, 8), (30, 2, 2)],
)
def test_some_descriptors_are_reserved_for_other_purposes(monkeypatch, soft, half_open, connections):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    admission = Admission(lambda line: None, lambda: connections)
    assert (admission.max_half_open, admission.max_connections) == (half_open, connections)
    assert not admission.has_place
    assert half_open + connections <= max(4, soft - RESERVED_DESCRIPTORS)


def test_without_a_limit_of_descriptors_the_limits_of_the_admission_hold(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert free_descriptors() > 10**9
    assert Admission(lambda line: None, lambda: 0).max_connections == MAX_CONNECTIONS


def test_lines_of_one_kind_are_logged_once_a_minute_with_their_number(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(admission_module.time, "monotonic", lambda: now[0])
    lines = []
    admission = Admission(lines.append, lambda: 0)
    for number in range(100):
        admission.log_refusal("10.0.0.1", f"not a DDLF client (first bytes {number:02x} 00)")
        admission.log_refusal("10.0.0.1", f"the other side speaks protocol {number}.1, this side 1.0")
    assert len(lines) == 2
    now[0] = 61
    admission.log_refusal("10.0.0.1", "not a DDLF client (first bytes aa 00)")
    assert lines[2:] == ["refused 10.0.0.1: not a DDLF client (first bytes aa 00) (99 more since the last line)"]


def test_strangers_of_many_addresses_cannot_fill_memory_or_the_disk(monkeypatch):
    lines = []
    admission = Admission(lines.append, lambda: 0)
    for number in range(3 * admission_module.MAX_LOGGED):
        admission.log_refusal(f"10.0.{number // 256}.{number % 256}", "token mismatch")
    assert len(lines) == len(admission._refused) == admission_module.MAX_LOGGED
