"""The readers of the wire keep their promises for inputs that a fuzzer found worth keeping, and for small changes of them.

The long form is ``scripts/fuzz``.
"""

import contextlib
import gc
import os
import pickle
import random
import sys

import pytest

from ddlf.rpc.handshake import HELLO, PROOF_BYTES
from tests.fuzz.__main__ import LEAK_BLOCKS, corpus
from tests.fuzz.targets import TARGETS, nothing_happens, seeds
from tests.processes import python

CHANGED = 4
"""Changes of each input of the corpus."""


def changed(data: bytes, chance: random.Random) -> bytes:
    """The input with a few of its bytes altered, taken out or doubled."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(3):
            case 0:
                made[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del made[at : at + chance.randint(1, 8)]
            case 2:
                made[at:at] = made[at : at + chance.randint(1, 8)]
    return bytes(made)


def left_behind(target: str) -> tuple[int, list[str]]:
    """How many blocks of memory and which descriptors the inputs leave when they are given for the second time."""
    chance = random.Random(1)
    inputs = [*corpus(target), *seeds(target)]
    inputs += [changed(data, chance) for data in inputs for _ in range(CHANGED)]
    found = []
    for _ in range(2):  # the first time fills caches
        for data in inputs:
            TARGETS[target](data)
        gc.collect()
        found.append((sys.getallocatedblocks(), descriptors()))
    (blocks, before), (blocks_after, after) = found
    return blocks_after - blocks, sorted(after - before)


def descriptors() -> set[str]:
    """What this process has open; not the descriptor that finds it out."""
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return opened


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_promise_or_leaves_something_behind(target):
    # In a process of its own: nobody else opens anything there meanwhile.
    said = python(f"from tests.fuzz.test_corpus import left_behind; print(*left_behind({target!r}), sep='\\n')")
    blocks, opened = said.splitlines()
    assert int(blocks) < LEAK_BLOCKS
    assert opened == "[]"


def test_what_is_left_behind_is_found(monkeypatch):
    kept = []
    monkeypatch.setitem(TARGETS, "frames", lambda data: kept.append((os.open(os.devnull, os.O_RDONLY), data)))
    blocks, opened = left_behind("frames")
    for descriptor, _ in kept:
        os.close(descriptor)
    assert blocks > 0
    assert len(opened) == len(kept) / 2


def test_the_audit_notices_what_it_is_there_for():
    data = pickle.dumps(random.Random)
    with pytest.raises(AssertionError, match=r"bytes from outside led to pickle\.find_class"), nothing_happens():
        pickle.loads(data)


def test_a_target_notices_a_side_that_lets_everybody_in(monkeypatch):
    monkeypatch.setattr("ddlf.rpc.handshake.hmac.compare_digest", lambda a, b: True)
    with pytest.raises(AssertionError, match="an altered client was accepted"):
        TARGETS["handshake"](b"\x02" + bytes(HELLO.size + PROOF_BYTES - 1) + b"\x01")
