"""Tests of robust merges, which few bad updates cannot move far: formulas, and the slots that they need."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlf.algorithms.merge import MERGE, ClippedMean, GeometricMedian, Krum, Mean, merged
from ddlf.errors import ConfigError
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun

point_sets = hnp.arrays(np.float64, st.tuples(st.integers(1, 7), st.just(5)), elements=st.integers(-8, 8))


def in_two(rows):
    """Return the rows as updates of two tensors."""
    return [[row[:2].reshape(2, 1), row[2:]] for row in rows]


def in_one_row(update):
    return np.concatenate([tensor.ravel() for tensor in update])


# --- geometric median -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(11))
def test_geometric_median_follows_the_formula_of_its_source(steps):
    """The formula is smoothed Weiszfeld: v moves step by step, and distances are measured from it."""
    chance = np.random.default_rng(5)
    points, counts = chance.normal(size=(7, 5)) + 3, np.array([5, 1, 8, 2, 9, 3, 4])
    points[2] *= -10
    v = np.average(points, axis=0, weights=counts)
    for _ in range(steps):
        b = counts / np.maximum(1e-6, np.linalg.norm(points - v, axis=1))
        v = (b[:, np.newaxis] * points).sum(axis=0) / b.sum()
    median = in_one_row(merged(GeometricMedian(steps=steps), in_two(points), counts))
    np.testing.assert_allclose(median, v, rtol=0, atol=1e-12)


def test_the_geometric_median_has_the_least_sum_of_distances():
    chance = np.random.default_rng(6)
    points, counts = chance.normal(size=(9, 5)), chance.integers(1, 20, size=9)
    points[:3] *= 50

    def sum_of_distances(v):
        return (counts * np.linalg.norm(points - v, axis=1)).sum()

    median = in_one_row(merged(GeometricMedian(steps=200), in_two(points), counts))
    assert all(sum_of_distances(median) < sum_of_distances(median + 0.01 * chance.normal(size=5)) for _ in range(50))


@given(point_sets)
def test_geometric_median_lies_among_the_updates(points):
    median = in_one_row(merged(GeometricMedian(), in_two(points), [1] * len(points)))
    assert np.isfinite(median).all()
    assert (points.min(axis=0) - 1e-9 <= median).all()
    assert (median <= points.max(axis=0) + 1e-9).all()


def test_most_of_the_samples_decide_where_the_geometric_median_is():
    """A slot with most of the samples is the median, for any other updates."""
    points = np.random.default_rng(7).normal(size=(3, 5)) * 1000
    median = in_one_row(merged(GeometricMedian(steps=500), in_two(points), [10, 2, 3]))
    np.testing.assert_allclose(median, points[0], atol=1e-3)


# --- clipped mean -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [0.5, 1.0, 3.0])
@given(points=point_sets, counts=st.lists(st.integers(1, 100), min_size=7, max_size=7))
def test_the_clipped_mean_is_its_formula_over_all_tensors(longest, points, counts):
    counts = counts[: len(points)]
    lengths = np.linalg.norm(points, axis=1)
    limit = longest * np.median(lengths)
    factors = [min(1.0, limit / length) if length else 1.0 for length in lengths]
    expected = sum(n * f * row for n, f, row in zip(counts, factors, points, strict=True)) / sum(counts)
    mean = in_one_row(merged(ClippedMean(longest=longest), in_two(points), counts))
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)


def test_updates_of_equal_length_are_averaged():
    points = np.random.default_rng(8).normal(size=(5, 5))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    mean = in_one_row(merged(ClippedMean(), in_two(points), [3, 1, 4, 1, 5]))
    np.testing.assert_allclose(mean, in_one_row(merged(Mean(), in_two(points), [3, 1, 4, 1, 5])), atol=1e-15)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("geometric:-1", "steps must be 0 or more, got -1"),
        ("geometric:1.5", "steps must be a whole number"),
        ("geometric:smoothing=0", "smoothing must be finite and 1e-100 or more"),
        ("geometric:smoothing=1e-308", "smoothing must be finite and 1e-100 or more"),
        ("clipped:0", "longest must be finite and > 0, got 0.0"),
        ("clipped:inf", "longest must be finite and > 0"),
    ],
)
def test_impossible_parameters_are_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MERGE.read(text)


# --- Krum with too few slots ------------------------------------------------------------------------------------------


def test_krum_needs_as_many_slots_as_its_proof():
    assert [Krum(bad=bad).least for bad in (0, 1, 2, 3)] == [1, 5, 7, 9]


@pytest.mark.parametrize("settings", [{"slots": 4}, {}])
async def test_krum_with_too_few_slots_is_refused_before_workers_start(settings):
    run = FakeRun(FakeCluster(4), merge="krum", **settings)
    with pytest.raises(ConfigError, match=r"merge='krum:bad=1,keep=1' needs 5 slots .* there are 4; set slots=5"):
        await run.train_model()
    assert not run.history
    assert run.events == []
    run.slots = 5
    assert len(await run.train_model()) == run.master_epochs


async def test_krum_is_refused_when_training_continues_with_too_few_slots():
    run = FakeRun(FakeCluster(3))
    await run.train_model()
    run.merge = "krum"
    run.cluster.workers += FakeCluster(6).workers[3:]
    run.slots = 3
    with pytest.raises(ConfigError, match="needs 5 slots"):
        await run.train_model()
    assert len(run.history) == run.master_epochs


# --- other rules with too few slots-------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["median", "trimmed", "trimmed:0.3", "geometric", "clipped:2"])
def test_rule_bounds_one_bad_update_from_its_useful_number_of_slots(text):
    rule = MERGE.read(text)
    honest, far = np.ones((rule.useful, 5)), 1e9

    def moved(slots):
        points = honest[:slots].copy()
        points[-1] *= -far
        return np.abs(in_one_row(merged(rule, in_two(points), [1] * slots))).max()

    assert moved(rule.useful) < 10
    assert moved(rule.useful - 1) > far / 20


@pytest.mark.parametrize(
    ("merge", "slots", "messages"),
    [
        ("median", 2, ["merge='median' of 2 slots cannot tell a bad update from a good one: it needs at least 3 slots"]),
        ("trimmed", 4, ["merge='trimmed:beta=0.2' of 4 slots cannot tell a bad update from a good one: it needs at least 5 slots"]),
        ("trimmed", 5, []),
        ("trimmed:0", 2, []),
        ("mean", 1, []),
        ("krum:0", 1, []),
    ],
)  # fmt: skip
async def test_run_warns_of_a_rule_without_effect_for_so_few_slots(merge, slots, messages):
    run, warnings = FakeRun(FakeCluster(slots), merge=merge), []
    run.subscribe(
        lambda event: warnings.append(event.why) if isinstance(event, Warned) and event.about == "merge" else None
    )
    await run.train_model()
    assert warnings == messages


# --- codecs that leave most values out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["median", "trimmed:0.1"])
async def test_a_merge_by_coordinates_is_refused_with_a_sparse_codec(merge):
    run = FakeRun(merge=merge, codec="topk:0.1")
    with pytest.raises(
        ConfigError, match=r"looks at each coordinate, and codec='topk:0.1' sends so few .* use topk:0.2 or more"
    ):
        await run.train_model()
    for codec in ("topk:0.2", "int4-block", "powersgd"):
        run.codec = codec
        await run.train_model(fresh=True)
    not_by_coordinates = FakeRun(merge="geometric", codec="topk:0.1")
    assert len(await not_by_coordinates.train_model()) == not_by_coordinates.master_epochs
