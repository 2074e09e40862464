"""Tests that the readers of the wire keep their promises for the inputs of the corpus and for small changes of them.

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
from tests.fuzz.targets import TARGETS, no_side_effects, seeds
from tests.processes import python

CHANGED = 4
"""Number of changed copies of each input."""


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return the input after a few of its bytes were altered, removed or doubled."""
    altered = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(altered) + 1)
        match chance.randrange(3):
            case 0:
                altered[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del altered[at : at + chance.randint(1, 8)]
            case 2:
                altered[at:at] = altered[at : at + chance.randint(1, 8)]
    return bytes(altered)


def leaks(target: str) -> tuple[int, list[str]]:
    """Return the number of blocks of memory, and the descriptors, that remain after a second pass over the inputs."""
    chance = random.Random(1)
    inputs = [*corpus(target), *seeds(target)]
    inputs += [changed(data, chance) for data in inputs for _ in range(CHANGED)]
    counts = []
    for _ in range(2):  # the first pass fills caches
        for data in inputs:
            TARGETS[target](data)
        gc.collect()
        counts.append((sys.getallocatedblocks(), descriptors()))
    (blocks, before), (blocks_after, after) = counts
    return blocks_after - blocks, sorted(after - before)


def descriptors() -> set[str]:
    """Return the open descriptors of this process, without the descriptor that this function uses to list them."""
    opened = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return opened


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_promise_or_leaks(target):
    # In a new process, no other test opens files meanwhile.
    output = python(f"from tests.fuzz.test_corpus import leaks; print(*leaks({target!r}), sep='\\n')")
    blocks, opened = output.splitlines()
    assert int(blocks) < LEAK_BLOCKS
    assert opened == "[]"


def test_leaks_are_found(monkeypatch):
    leaked = []
    monkeypatch.setitem(TARGETS, "frames", lambda data: leaked.append((os.open(os.devnull, os.O_RDONLY), data)))
    blocks, opened = leaks("frames")
    for descriptor, _ in leaked:
        os.close(descriptor)
    assert blocks > 0
    assert len(opened) == len(leaked) / 2


def test_the_audit_notices_a_pickle():
    data = pickle.dumps(random.Random)
    with pytest.raises(AssertionError, match=r"bytes from outside led to pickle\.find_class"), no_side_effects():
        pickle.loads(data)


def test_a_target_notices_a_side_that_lets_everybody_in(monkeypatch):
    monkeypatch.setattr("ddlf.rpc.handshake.hmac.compare_digest", lambda a, b: True)
    with pytest.raises(AssertionError, match="an altered client was accepted"):
        TARGETS["handshake"](b"\x02" + bytes(HELLO.size + PROOF_BYTES - 1) + b"\x01")
