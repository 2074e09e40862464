"""Tests of sending weights and updates: sender and receiver together, without a network."""

import numpy as np
import pytest

from ddlf.algorithms.encoding import decode_update
from ddlf.errors import ConfigError
from ddlf.training.exchanges.carrier import StarWeights
from ddlf.training.slot.parts import read_weights, send_update


def tensors(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=(40, 30)).astype("float32"), random.normal(size=2000).astype("float32")]


@pytest.mark.parametrize("name", ["float32", "delta:float32"])
def test_exact_codecs_deliver_the_same_bits(name):
    out, cached = StarWeights(name, [False, False]), None
    for round in range(3):
        cached = read_weights(out.encode(0, tensors(round), round), cached, tensors(0))
        assert all(np.array_equal(a, b) for a, b in zip(cached, tensors(round), strict=True))


def test_weights_for_all_workers_are_encoded_once():
    out = StarWeights("float16", [False, False])
    weights = tensors(0)
    assert out.encode(0, weights, 0) is out.encode(1, weights, 0)
    assert out.encode(0, tensors(1), 1) is not out.encode(0, weights, 1)


def test_error_of_deltas_does_not_add_up():
    out, cached = StarWeights("delta:int8", [False, False]), {}
    random = np.random.default_rng(0)
    weights = tensors(0)
    for round in range(30):
        weights = [w + 0.01 * random.normal(size=w.shape).astype("float32") for w in weights]
        for slot in range(2):
            if slot == 1 and round % 3:
                continue  # this worker is asked less often
            cached[slot] = read_weights(out.encode(slot, weights, round), cached.get(slot), weights)
            assert max(np.abs(a - b).max() for a, b in zip(cached[slot], weights, strict=True)) < 0.001


def test_another_worker_gets_the_weights_that_the_slots_own_worker_holds():
    out, cached = StarWeights("delta:int8", [False, False]), None
    for round in range(3):
        weights = tensors(round)
        cached = read_weights(out.encode(0, weights, round), cached, weights)
        with pytest.raises(ConfigError, match="before any weights"):
            read_weights({**out.encode(0, weights, round), "delta": True}, None, weights)
        of_another_worker = read_weights(out.encode(0, weights, round, holds=False), None, weights)
        assert all(np.array_equal(a, b) for a, b in zip(cached, of_another_worker, strict=True))
    assert not np.array_equal(cached[0], weights[0]), "int8 is lossy, or this test shows nothing"


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_difference_of_unchanged_weights_is_sent_once(codec):
    out, cached = StarWeights(f"delta:{codec}", [False, False]), None
    for round, weights in enumerate([tensors(0), *[tensors(1)] * 3]):  # the same list
        cached = read_weights(out.encode(0, weights, round), cached, weights)
    assert max(np.abs(a - b).max() for a, b in zip(cached, weights, strict=True)) < 0.001


def test_lost_part_of_an_update_is_sent_later():
    residual, update = None, [np.full((40, 30), 1e-4, "float32"), np.zeros(2000, "float32")]
    update[0][0, 0] = 1.0  # so large that int8 rounds the others to zero
    total = np.zeros((40, 30))
    for _ in range(200):
        encoded, residual, error = send_update("int8", update, [False, False], residual)
        total += decode_update(encoded, update)[0]
        assert 0 <= error < 1
    assert np.allclose(total.mean(), 200 * update[0].mean(), rtol=0.02)
