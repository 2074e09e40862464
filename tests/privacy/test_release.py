"""Tests of clip, noise and sum of ``ddlf.privacy.release`` against formulas and SciPy."""

import math
import random
import struct

import numpy as np
import pytest

from ddlf.algorithms.weights import is_float
from ddlf.errors import BadUpdate, ConfigError
from ddlf.privacy.release import Mechanism, clipped, gaussian, norm_of, released
from tests.later import Later

stats = Later("scipy.stats")

LIKE = [np.zeros((3, 4), np.float32), np.zeros(5, np.float64), np.zeros(2, np.int64), np.zeros(6, np.float32)]
TRAINED = (True, True, True, False)


def an_update(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return [
        (scale * generator.normal(size=tensor.shape)).astype(tensor.dtype)
        if is_float(tensor)
        else generator.integers(0, 9, tensor.shape)
        for tensor in LIKE
    ]


def is_normal(*samples):
    """Whether one of two samples passes. A single sample fails by chance in one of 1,000 tests."""
    return max(stats.kstest(sample, "norm").pvalue for sample in samples) > 0.001


def one_value(mechanism, *values):
    """Return the release of updates with one value."""
    release = mechanism.start(len(values), [np.zeros(1)])
    for slot, value in enumerate(values):
        release.add(slot, [np.array([float(value)])], 1)
    return float(release.result()[0][0])


def test_noise_is_normal_with_the_stated_deviation():
    samples = [gaussian(100_000, 3.0) for _ in range(2)]
    assert samples[0].std() == pytest.approx(3.0, rel=0.01)
    assert is_normal(*[noise / 3.0 for noise in samples])


def test_the_noise_of_a_release_has_the_stated_deviation():
    mechanism = Mechanism(clip=0.5, noise=4.0, divisor=10)
    like = [np.zeros(100_000, np.float32)] * 2
    release = mechanism.start(1, like)
    release.add(0, like, 1)
    noises = release.result()
    assert noises[0].dtype == np.float32
    assert noises[0].std() == pytest.approx(4.0 * 0.5 / 10, rel=0.01)
    assert is_normal(*[noise / 0.2 for noise in noises])


def test_noise_differs_between_tensors_and_between_releases():
    mechanism = Mechanism(clip=1.0, noise=1.0, divisor=1)
    like = [np.zeros(1000), np.zeros(1000)]
    noises = []
    for _ in range(2):  # seeds have no influence
        np.random.seed(0)
        random.seed(0)
        release = mechanism.start(1, like)
        release.add(0, like, 1)
        noises += release.result()
    peers = [
        noise_a
        for _ in range(2)
        for noise_a in Mechanism(clip=1.0, noise=1.0, divisor=1, trust="nobody").protected(like)
    ]
    for a, noise_a in enumerate(noises + peers):
        for noise_b in (noises + peers)[:a]:
            assert abs(np.corrcoef(noise_a, noise_b)[0, 1]) < 0.2  # 6 standard deviations


def test_a_release_returns_the_same_noise_again():
    release = Mechanism(clip=1.0, noise=1.0, divisor=1).start(1, LIKE)
    release.add(0, an_update(0), 1)
    assert release.result() is release.result()


def test_shares_of_8_peers_with_2_lost_leave_at_least_the_stated_noise():
    mechanism = Mechanism(clip=2.0, noise=1.5, divisor=8, least=6, trust="nobody")
    like = [np.zeros(100_000)]
    posts = [mechanism.protected(like) for _ in range(8)]
    for lost, more in ((2, 1.0), (0, math.sqrt(8 / 6))):
        release = mechanism.start(8 - lost, like)
        for slot, post in enumerate(posts[lost:]):
            release.add(slot, post, 1)
        [noise] = release.result()
        assert noise.std() * 8 == pytest.approx(2.0 * 1.5 * more, rel=0.01)
    assert posts[0][0].std() == pytest.approx(mechanism.noise_of_one * 2.0, rel=0.01)


def test_a_release_of_fewer_shares_than_stated_is_refused():
    mechanism = Mechanism(clip=1.0, noise=1.0, divisor=4, least=3, trust="nobody")
    release = mechanism.start(3, LIKE)
    for slot in range(2):
        release.add(slot, an_update(slot), 1)
    release.leave_out(2)
    with pytest.raises(ConfigError, match="3 updates or more, got 2"):
        release.result()


def test_an_update_is_clipped_over_all_tensors_together():
    update = an_update(1, 10.0)
    tensors = [update[0], update[1]]
    norm = math.sqrt(sum(float(value) ** 2 for tensor in tensors for value in tensor.ravel()))
    assert norm_of(tensors) == pytest.approx(norm, rel=1e-12)
    for tensor, clipped_tensor in zip(tensors, clipped(tensors, 2.0), strict=True):
        np.testing.assert_allclose(clipped_tensor, tensor.astype(float) * (2.0 / norm), rtol=1e-12)
    assert norm_of(clipped(tensors, 2.0)) == pytest.approx(2.0, rel=1e-12)


def test_updates_that_are_short_or_zero_stay_as_they_are():
    for scale in (0.0, 1e-30, 0.1):
        tensors = an_update(2, scale)[:2]
        for tensor, clipped_tensor in zip(tensors, clipped(tensors, 10.0), strict=True):
            np.testing.assert_array_equal(clipped_tensor, tensor)


def test_a_release_is_the_clipped_sum_over_the_fixed_divisor():
    mechanism = Mechanism(clip=0.7, noise=1e-9, divisor=5)
    updates = [an_update(seed) for seed in range(3)]
    release = mechanism.start(4, LIKE, trainable=TRAINED)
    for slot, update in enumerate(updates):
        release.add(slot, update, 1 + 100 * slot)  # the number of samples does not count
    release.leave_out(3)
    result = release.result()
    for index in (0, 1):
        factors = [min(1, 0.7 / norm_of(update[:2])) for update in updates]
        expected = sum(factor * update[index] for factor, update in zip(factors, updates, strict=True)) / 5
        np.testing.assert_allclose(result[index], expected, atol=1e-7)
    assert not result[2].any()  # integers
    assert not result[3].any()  # not trained, such as the statistics of BatchNorm


def test_untrained_weights_are_not_part_of_an_update():
    mechanism = Mechanism(clip=1.0, noise=1.0, divisor=1, trust="nobody")
    sent = mechanism.protected(an_update(3), TRAINED)
    assert not sent[2].any()
    assert not sent[3].any()
    assert [tensor.dtype for tensor in sent] == [tensor.dtype for tensor in LIKE]
    assert released(LIKE, TRAINED) == [0, 1]
    assert released(LIKE) == [0, 1, 3]


def test_the_influence_of_one_update_is_bounded_by_the_clip():
    mechanism = Mechanism(clip=1.0, noise=1e-9, divisor=1)
    assert one_value(mechanism, 0, 1000) - one_value(mechanism, 0) == pytest.approx(1.0, abs=1e-6)
    assert one_value(mechanism, 0, -0.25) == pytest.approx(-0.25, abs=1e-6)


def test_the_server_clips_no_update_that_has_noise_already():
    mechanism = Mechanism(clip=1.0, noise=100.0, divisor=1, trust="nobody")
    assert one_value(mechanism, 77.0) == 77.0


def test_no_honest_update_with_noise_is_longer_than_the_limit():
    mechanism = Mechanism(clip=1.0, noise=2.0, divisor=4, least=4, trust="nobody")
    for size in (1, 10, 1000):
        limit = mechanism.longest(size)
        assert max(norm_of(mechanism.protected([np.full(size, 9.0)])) for _ in range(100)) < limit
        assert limit < 1 + (math.sqrt(size) + 11)
    assert Mechanism(clip=1.0, noise=2.0, divisor=4).longest(10) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_an_update_that_is_not_finite_is_refused(bad, trust):
    mechanism = Mechanism(clip=1.0, noise=1.0, divisor=1, trust=trust)
    update = an_update(4)
    update[1][0] = bad
    with pytest.raises(BadUpdate):
        mechanism.protected(update)
    release = mechanism.start(1, LIKE)
    with pytest.raises(BadUpdate):
        release.add(0, update, 1)
    if trust == "server":
        with pytest.raises(BadUpdate, match="not finite"):
            release.add(0, update, 1, checked=True)


def test_values_too_large_for_a_norm_are_refused():
    with pytest.raises(BadUpdate, match="not finite"):
        clipped([np.full(2, 1e200)], 1.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("noise", value) for value in (0, -1, math.inf, math.nan, "1", None, True)),
        *(("clip", value) for value in (0, -1.0, math.inf, math.nan)),
        *(("divisor", value) for value in (0, -1, 1.5, True)),
        ("least", 0),
        ("trust", "everybody"),
    ],
)
def test_a_value_without_sense_is_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=f"^{setting} must be"):
        Mechanism(**{"clip": 1.0, "noise": 1.0, "divisor": 2, setting: value})


def test_a_product_of_clip_and_noise_that_vanishes_is_refused():
    with pytest.raises(ConfigError, match="must be a finite number above 0"):
        Mechanism(clip=1e-320, noise=1e-9, divisor=1)


def test_noise_follows_box_and_muller_from_the_bytes():
    """The formula is applied value by value. The test of the browser's engine uses the same bytes."""
    numbers = [0, 2**64 - 1, 1 << 63, 12345 << 40, 1 << 11, 1 << 62]  # three lengths, three angles
    data = struct.pack("<6Q", *numbers)
    noise = gaussian(5, 2.0, lambda count: data[:count])
    units = [(number >> 11) * 2.0**-53 for number in numbers]
    radii = [2.0 * math.sqrt(-2 * math.log(unit + 2.0**-53)) for unit in units[:3]]
    angles = [2 * math.pi * unit for unit in units[3:]]
    expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
    np.testing.assert_allclose(noise, expected[:5], rtol=1e-12, atol=1e-12)
