"""Tests that the memory of an array is freed with its last reference, without garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from ddlf.rpc.messages import FrameDecoder, Limits, dumps, encode_frame, loads

LIMITS = Limits()


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_sent_array_is_freed_with_its_last_reference() -> None:
    array = np.ones(10_000)
    reference = weakref.ref(array)
    buffers = dumps([array, ("in a tuple", array)])
    del array
    assert reference() is not None
    del buffers
    assert reference() is None


def test_a_received_array_is_freed_with_its_last_reference() -> None:
    memories: list[weakref.ref[np.ndarray]] = []

    def allocate(size: int) -> np.ndarray:
        memory = np.empty(size, np.uint8)
        memories.append(weakref.ref(memory))
        return memory

    decoder = FrameDecoder(LIMITS, allocate)
    frames = []
    for piece in encode_frame(2, 1, "", dumps((np.ones(100_000),)), limits=LIMITS):
        unread = memoryview(piece)
        while unread:
            room = decoder.wants()
            count = min(len(room), len(unread))
            room[:count] = unread[:count]
            unread = unread[count:]
            frames += decoder.received(count)
    (value,) = loads(frames.pop().buffers)
    assert value.sum() == 100_000
    view = value[5:]
    del value
    assert memories[0]() is not None
    del view, room
    assert memories[0]() is None
