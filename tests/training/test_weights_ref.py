from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.training.progress import WeightsRef, local, shapes, slices_of

ARRAYS = [np.arange(3.0)]
LIKE = [np.broadcast_to(np.zeros(()), (3,))]


class Slices:
    def __init__(self):
        self.reads = 0

    def read(self):
        self.reads += 1
        return {"weights": {"0000 w": ARRAYS[0]}, "state_outer": {}}


async def test_fetch_asks_workers_if_they_have_the_weights():
    async def from_workers():
        return ARRAYS

    assert await WeightsRef(like=LIKE, group="weights", slices=Slices(), from_workers=from_workers).fetch() is ARRAYS


async def test_fetch_reads_the_checkpoint_once_if_only_it_has_the_weights():
    ref = WeightsRef(like=LIKE, group="weights", slices=(slices := Slices()))
    assert (await ref.fetch())[0] is ARRAYS[0]
    assert local(ref)[0] is ARRAYS[0]
    assert slices.reads == 1


def test_read_fails_with_its_reason_if_only_workers_have_weights():
    ref = WeightsRef(like=LIKE, group="weights", unread=("they are on workers", "use a checkpoint"))
    with pytest.raises(ConfigError, match="they are on workers") as error:
        local(ref)
    assert error.value.hint == "use a checkpoint"


def test_shapes_reads_nothing():
    ref = WeightsRef(like=LIKE, group="weights", slices=(slices := Slices()))
    assert shapes(ref) is LIKE
    assert slices_of(ref) is slices
    assert slices.reads == 0


def test_arrays_at_the_master_are_their_own_values():
    assert local(ARRAYS) is shapes(ARRAYS) is ARRAYS
    assert slices_of(ARRAYS) is None


async def test_workers_evaluate_only_if_the_exchange_offers_it():
    assert await WeightsRef(like=LIKE, group="weights").evaluate(SimpleNamespace(), "test") is None
