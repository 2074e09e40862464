"""Weights and updates as they travel: both ends together, without a network."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.roles.exchange import WorkerEnd
from ddlf.training.exchange import WeightsOut, read_update


def tensors(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=(40, 30)).astype("float32"), random.normal(size=2000).astype("float32")]


@pytest.mark.parametrize("name", ["float32", "delta:float32"])
def test_exact_codecs_bring_the_same_bits(name):
    out, worker = WeightsOut(name, [False, False]), WorkerEnd()
    for round in range(3):
        got = worker.read_weights(0, out.encode(0, tensors(round)), tensors(0))
        assert all(np.array_equal(a, b) for a, b in zip(got, tensors(round), strict=True))


def test_weights_for_all_workers_are_encoded_once():
    out = WeightsOut("float16", [False, False])
    weights = tensors(0)
    assert out.encode(0, weights) is out.encode(1, weights)
    assert out.encode(0, tensors(1)) is not out.encode(0, weights)


def test_a_delta_is_against_what_that_worker_holds_and_its_error_does_not_add_up():
    out, workers = WeightsOut("delta:int8", [False, False]), [WorkerEnd(), WorkerEnd()]
    random = np.random.default_rng(0)
    weights = tensors(0)
    for round in range(30):
        weights = [w + 0.01 * random.normal(size=w.shape).astype("float32") for w in weights]
        for slot, worker in enumerate(workers):
            if slot == 1 and round % 3:
                continue  # this one is asked less often
            got = worker.read_weights(slot, out.encode(slot, weights), weights)
            assert max(np.abs(a - b).max() for a, b in zip(got, weights, strict=True)) < 0.001


def test_another_worker_gets_exactly_what_the_slots_own_one_holds():
    out, own, other = WeightsOut("delta:int8", [False, False]), WorkerEnd(), WorkerEnd()
    for round in range(3):
        weights = tensors(round)
        held = own.read_weights(0, out.encode(0, weights), weights)
        with pytest.raises(ConfigError, match="before any weights"):
            WorkerEnd().read_weights(0, {**out.encode(0, weights), "delta": True}, weights)
        given = other.read_weights(0, out.encode(0, weights, holds=False), weights)
        assert all(np.array_equal(a, b) for a, b in zip(held, given, strict=True))
    assert not np.array_equal(held[0], weights[0]), "int8 is lossy, or this test shows nothing"


def test_what_a_codec_loses_of_a_slots_updates_comes_back_in_its_next_ones():
    worker, update = WorkerEnd(), [np.full((40, 30), 1e-4, "float32"), np.zeros(2000, "float32")]
    update[0][0, 0] = 1.0  # so large that int8 rounds the others to zero
    total = np.zeros((40, 30))
    for number in range(200):
        encoded, error = worker.encode_update(3, "int8", update, [False, False], number)
        total += read_update(encoded, update)[0]
        assert 0 <= error < 1
    assert np.allclose(total.mean(), 200 * update[0].mean(), rtol=0.02)
