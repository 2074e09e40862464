"""Tests of receiving large sets: only a few arrive at the same time, and a slow peer does not delay another one."""

import asyncio

import pytest

from ddlf.peers import turns as module
from ddlf.peers.turns import Turns
from tests.patience import PATIENCE_S


class Transport:
    """A transport that records whether the server reads."""

    reads = True

    def __init__(self, resumed):
        self.resumed = resumed

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True
        self.resumed.set()


class Sender:
    """A connection that sends a large message."""

    much = False

    def __init__(self):
        self.resumed = asyncio.Event()
        self.transport = Transport(self.resumed)

    def read_much(self, much):
        self.much = much


@pytest.fixture
def senders():
    return [Sender() for _ in range(4)]


def reading(senders):
    return [sender.transport.reads for sender in senders]


async def test_senders_wait_until_a_turn_ends_and_continue_in_order(senders):
    turns = Turns(2)
    for sender in senders:
        turns.begin(sender)
    assert reading(senders) == [True, True, False, False]
    assert [turns.waits(sender) for sender in senders] == [False, False, True, True]
    turns.begin(senders[3])  # more bytes of its message had arrived
    turns.end(senders[1])
    assert reading(senders) == [True, True, True, False]
    assert [sender.much for sender in senders] == [True, False, True, False]
    turns.end(senders[3])  # it has disconnected
    turns.end(senders[0])
    turns.end(senders[2])
    turns.begin(senders[1])
    assert reading(senders) == [True, True, True, False]


async def test_a_slow_sender_continues_but_loses_its_turn(senders, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    turns = Turns(1)
    turns.begin(senders[0])
    turns.begin(senders[1])
    await asyncio.wait_for(senders[1].resumed.wait(), PATIENCE_S)
    turns.begin(senders[0])
    assert reading(senders) == [True, True, True, True]


async def test_a_message_that_has_arrived_keeps_its_turn_until_it_is_on_the_disk(senders, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    turns, passed = Turns(1), asyncio.Event()
    turns.begin(senders[0])
    turns.arrived(senders[0])
    turns.begin(senders[1])
    asyncio.get_running_loop().call_later(0.0, passed.set)  # the timer of the turn would have ended before this one
    await asyncio.wait_for(passed.wait(), PATIENCE_S)
    assert not senders[1].transport.reads
    turns.end(senders[0])
    assert senders[1].transport.reads
