"""The readers of the wire keep their promises for inputs that a fuzzer found worth keeping, and for small changes of them.

The long form is ``scripts/fuzz``.
"""

import gc
import os
import pickle
import random
import sys

import pytest

from ddlf.wire.handshake import HELLO, PROOF_BYTES
from tests.fuzz.__main__ import LEAK_BLOCKS, corpus
from tests.fuzz.targets import TARGETS, nothing_happens, seeds

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


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_promise_or_leaves_something_behind(target):
    chance = random.Random(1)
    inputs = [*corpus(target), *seeds(target)]
    inputs += [changed(data, chance) for data in inputs for _ in range(CHANGED)]
    left = []
    for _ in range(2):  # the first time fills caches
        for data in inputs:
            TARGETS[target](data)
        gc.collect()
        left.append((sys.getallocatedblocks(), len(os.listdir("/proc/self/fd"))))
    (blocks, descriptors), (blocks_after, descriptors_after) = left
    assert blocks_after - blocks < LEAK_BLOCKS
    assert descriptors_after == descriptors


def test_the_audit_notices_what_it_is_there_for():
    data = pickle.dumps(random.Random)
    with pytest.raises(AssertionError, match=r"bytes from outside led to pickle\.find_class"), nothing_happens():
        pickle.loads(data)


def test_a_target_notices_a_side_that_lets_everybody_in(monkeypatch):
    monkeypatch.setattr("ddlf.wire.handshake.hmac.compare_digest", lambda a, b: True)
    with pytest.raises(AssertionError, match="an altered client was accepted"):
        TARGETS["handshake"](b"\x02" + bytes(HELLO.size + PROOF_BYTES - 1) + b"\x01")
