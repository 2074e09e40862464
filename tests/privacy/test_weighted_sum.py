"""Tests of the mean of masked updates: its formula in NumPy, and refused values."""

import numpy as np
import pytest

from ddlf.errors import BadUpdate, ConfigError, ProtocolError
from ddlf.privacy.secure_sum import LEVELS, Answer, unmasked
from ddlf.privacy.weighted_sum import check_types, mean_of, numbers_of
from tests.privacy.test_secure_sum import shares_of

SAMPLES = (40, 100, 23, 7)
SHAPES = ((5, 3), (3,), ())
LIMIT = 2.0


def updates():
    random = np.random.default_rng(3)
    return [[np.asarray(random.uniform(-LIMIT, LIMIT, shape), "float32") for shape in SHAPES] for _ in SAMPLES]


def test_mean_of_masked_numbers_is_the_mean_by_samples():
    members, largest = shares_of(len(SAMPLES)), max(SAMPLES)
    weights = [samples / largest for samples in SAMPLES]
    vectors = {
        number + 1: member.masked(numbers_of(update, weight, LIMIT)).astype("<u4").tobytes()
        for number, (member, update, weight) in enumerate(zip(members, updates(), weights, strict=True))
    }
    named = [*vectors]
    signatures = {number: members[number - 1].sign(named) for number in named}
    answers: dict[int, Answer] = {number: members[number - 1].answer(signatures) for number in named}
    mean = mean_of(unmasked(vectors, answers), len(weights), sum(weights), updates()[0], LIMIT)
    expected = [
        np.average(np.array(tensors, float), axis=0, weights=SAMPLES) for tensors in zip(*updates(), strict=True)
    ]
    bound = len(SAMPLES) * LIMIT / LEVELS / 2 / sum(weights) + LIMIT * np.finfo("float32").eps
    for tensor, right, shape in zip(mean, expected, SHAPES, strict=True):
        assert (tensor.shape, tensor.dtype) == (shape, np.float32)
        assert np.abs(tensor - right).max() <= bound


def test_values_beyond_the_limit_and_impossible_sums_are_refused():
    with pytest.raises(BadUpdate, match="1 of 2 values of the update are beyond the limit of 1, or not finite"):
        numbers_of([np.array([1.0, 1.5], "float32")], 1.0, 1.0)
    with pytest.raises(BadUpdate, match="1 of 1 values"):
        numbers_of([np.array([np.nan], "float32")], 1.0, 1.0)
    with pytest.raises(ProtocolError, match="larger than 3 members can make it"):
        mean_of(np.array([4 * LEVELS], np.uint32), 3, 3.0, [np.zeros(1, "float32")], 1.0)


def test_weights_that_are_not_float32_are_named():
    check_types([("kernel", "float32")], hint="")
    with pytest.raises(ConfigError, match="adds up updates of float32 weights, and 'steps' is int64"):
        check_types([("kernel", "float32"), ("steps", "int64")], hint="")
