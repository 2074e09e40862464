from functools import partial
from itertools import permutations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlf.algorithms.merge import MERGE, Krum, Mean, Median, RunningMerge, SingleMerge, TrimmedMean, merged
from ddlf.errors import BadUpdate, ConfigError

weighted_mean = partial(merged, Mean())
floats = st.floats(-(2.0**100), 2.0**100, width=32)


def updates_of(slots, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(3, 4), (5,), (), (0,), (2, 1, 3)]
    return [[np.asarray(random.normal(size=shape), np.float32) for shape in shapes] for _ in range(slots)]


def bits(tensors):
    return [(tensor.dtype.str, tensor.shape, tensor.tobytes()) for tensor in tensors]


@given(
    stacked=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3), elements=st.floats(-10, 10, width=32)),
    data=st.data(),
)
def test_the_merge_is_the_mean_weighted_by_samples(stacked, data):
    counts = data.draw(st.lists(st.integers(1, 10**6), min_size=len(stacked), max_size=len(stacked)))
    (merged,) = weighted_mean([[np.asarray(tensor)] for tensor in stacked], counts)
    expected = np.average(stacked.astype(np.float64), axis=0, weights=counts)
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, expected, rtol=1e-6, atol=1e-12)


def test_a_mean_computed_by_hand():
    (merged,) = weighted_mean([[np.float32([1, -2])], [np.float32([5, 2])]], [3, 1])
    assert merged.tolist() == [2.0, -1.0]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_result_has_the_same_bits_in_any_order_of_arrival(order):
    updates, counts = updates_of(4), [1, 20, 300, 7]
    merge = RunningMerge(4, like=updates[0])
    for slot in order:
        merge.add(slot, updates[slot], counts[slot])
    assert bits(merge.result()) == bits(weighted_mean(updates, counts))


def test_summing_in_another_order_would_give_other_bits():
    """So the test above can fail."""
    updates = [[np.float32([1e30])], [np.float32([-1e30])], [np.float32([1.0])]]
    assert weighted_mean(updates, [1, 1, 1])[0] != weighted_mean(updates[::-1], [1, 1, 1])[0]


@given(
    update=hnp.arrays(np.float32, 5, elements=floats), counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=5)
)
def test_the_mean_of_equal_updates_is_exactly_this_update(update, counts):
    assert bits(weighted_mean([[update]] * len(counts), counts)) == bits([update])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@given(values=st.lists(st.floats(-1000, 1000, width=16), min_size=1, max_size=5), count=st.integers(1, 2**40))
def test_mean_of_one_slot_has_bits_of_running_sum(dtype, values, count):
    update = [np.array([*values, -0.0, 1e-45], np.float32).astype(dtype), np.array(1.5, dtype), np.array([7])]
    single, running = Mean().start(1, like=update), RunningMerge(1, like=update)
    assert type(single) is SingleMerge
    for merge in (single, running):
        merge.add(0, update, count, checked=True)
    assert bits(single.result()) == bits(running.result())
    assert [array.dtype for array in single.result()] == [array.dtype for array in running.result()]
    assert np.shares_memory(single.result()[0], update[0])  # the merge needs no copy


def test_mean_of_one_slot_in_float64_is_rounded_like_others():
    assert type(Mean().start(1, like=[np.zeros(2), np.zeros(2, np.float32)])) is RunningMerge


def test_mean_without_its_only_slot_is_refused():
    merge = Mean().start(1, like=[np.zeros(2, np.float32)])
    merge.leave_out(0)
    with pytest.raises(ConfigError, match="the only slot is left out"):
        merge.result()


def test_updates_are_summed_as_soon_as_their_turn_comes():
    updates = updates_of(3)
    merge = RunningMerge(3, like=updates[0])
    merge.add(2, updates[2], 1)
    assert merge.missing == [0, 1]
    merge.add(0, updates[0], 1)
    assert merge.missing == [1]
    for tensor in updates[0]:
        tensor.fill(np.float32(1e9))  # slot 0 was summed already, so its memory may be used again
    merge.add(1, updates[1], 1)
    assert merge.missing == []
    assert bits(merge.result()) == bits(weighted_mean([updates_of(3)[0], *updates[1:]], [1, 1, 1]))


def test_the_updates_are_not_modified_and_the_result_can_be_read_twice():
    updates = updates_of(2)
    merge = RunningMerge(2, like=updates[0])
    merge.add(0, updates[0], 3)
    merge.add(1, updates[1], 4)
    assert bits(merge.result()) == bits(merge.result())
    assert [bits(update) for update in updates] == [bits(update) for update in updates_of(2)]


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int8, np.bool_])
def test_counters_and_seeds_keep_the_masters_value(dtype):
    (merged,) = weighted_mean([[np.array([1, 1], dtype)], [np.array([0, 1], dtype)]], [1, 1])
    assert merged.dtype == dtype
    assert not merged.any()


@given(
    before=hnp.arrays(np.float32, 4, elements=st.floats(0, 2.0**100, width=32)),
    after=hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 2.0**100, width=32)),
)
def test_a_batchnorm_variance_never_becomes_negative(before, after):
    (merged,) = weighted_mean([[before - tensor] for tensor in after], [5, 1, 3])
    assert (before - merged >= 0).all()


def test_a_lost_worker_does_not_shrink_the_merge():
    """A public implementation divides on the worker by the planned number of workers."""
    update = [np.float32([4.0])]
    assert weighted_mean([update] * 3, [10] * 3)[0] == weighted_mean([update] * 4, [10] * 4)[0] == 4.0


def test_non_finite_value_is_refused_and_the_slot_can_be_sent_again():
    updates = updates_of(2)
    broken = [tensor.copy() for tensor in updates[0]]
    broken[1][2:4] = np.nan, np.inf
    merge = RunningMerge(2, like=updates[0])
    merge.add(1, updates[1], 1)
    with pytest.raises(BadUpdate, match="slot 0: 2 of 5 values of tensor 1 are NaN or infinite"):
        merge.add(0, broken, 1)
    merge.add(0, updates[0], 1)
    assert bits(merge.result()) == bits(weighted_mean(updates, [1, 1]))


@pytest.mark.parametrize("name", ["mean", "median", "trimmed:0.25", "krum:keep=2", "geometric", "clipped"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_slots_left_out_change_no_bit_of_the_merge(name, order):
    updates, counts = updates_of(5), [1, 20, 300, 7, 9]
    merge = MERGE.read(name).start(5, like=updates[0])
    for slot in order:
        merge.leave_out(slot) if slot in (0, 3) else merge.add(slot, updates[slot], counts[slot])
    remaining = [1, 2, 4]
    expected = merged(MERGE.read(name), [updates[slot] for slot in remaining], [counts[slot] for slot in remaining])
    assert bits(merge.result()) == bits(expected)


def test_missing_slots_are_named():
    merge = RunningMerge(4, like=updates_of(1)[0])
    merge.add(2, updates_of(1)[0], 1)
    with pytest.raises(ConfigError, match=r"no update from slots \[0, 1, 3\] of 4"):
        merge.result()


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 1)])
def test_second_update_of_a_slot_is_refused(first, second):
    merge = RunningMerge(2, like=updates_of(1)[0])
    merge.add(first, updates_of(1)[0], 1)
    with pytest.raises(ConfigError, match=f"slot {second} was merged already"):
        merge.add(second, updates_of(1)[0], 1)


@pytest.mark.parametrize(
    ("slot", "update", "count", "message"),
    [
        (2, [np.zeros(3, np.float32)], 1, "slot 2 is not one of the 2 slots"),
        (-1, [np.zeros(3, np.float32)], 1, "slot -1 is not one"),
        (0, [np.zeros(3, np.float32)], 0, "slot 0: trained on 0 samples"),
        (0, [np.zeros(3, np.float32)], -4, "slot 0: trained on -4 samples"),
        (0, [], 1, "slot 0: sent 0 tensors, but the model has 1"),
        (0, [np.zeros(1, np.float32)], 1, r"slot 0: tensor 0: expected float32 \(3,\), got float32 \(1,\)"),
        (0, [np.zeros(3)], 1, r"expected float32 \(3,\), got float64 \(3,\)"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(slot, update, count, message):
    merge = RunningMerge(2, like=[np.zeros(3, np.float32)])
    with pytest.raises((ConfigError, BadUpdate), match=message):
        merge.add(slot, update, count)


@pytest.mark.parametrize(("updates", "counts"), [([], []), ([[np.zeros(1, np.float32)]], [1, 2])])
def test_a_merge_without_updates_or_counts_is_refused(updates, counts):
    with pytest.raises(ConfigError):
        weighted_mean(updates, counts)


def test_a_merge_over_no_slots_is_refused():
    with pytest.raises(ConfigError):
        RunningMerge(0, like=[])


stacks = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=floats)


@given(stacked=stacks)
def test_the_median_is_numpys_median(stacked):
    (median,) = merged(MERGE.read("median"), [[np.asarray(tensor)] for tensor in stacked], [1] * len(stacked))
    assert median.dtype == np.float32
    np.testing.assert_array_equal(median, np.median(stacked.astype("f8"), axis=0).astype("f4"))


@given(stacked=stacks, beta=st.floats(0, 0.5, exclude_max=True))
def test_the_trimmed_mean_is_scipys_trimmed_mean(stacked, beta):
    from scipy.stats import trim_mean  # its import takes longer than all tests of this file

    (trimmed,) = merged(TrimmedMean(beta=beta), [[np.asarray(tensor)] for tensor in stacked], [1] * len(stacked))
    expected = trim_mean(stacked.astype("f8"), beta, axis=0)
    np.testing.assert_allclose(trimmed, expected, rtol=1e-6, atol=1e-12 * float(np.abs(stacked).max(initial=1)))


def test_a_trimmed_mean_computed_by_hand():
    updates = [[np.float32([value])] for value in (1000, 1, 2, 6, -1000)]
    assert merged(MERGE.read("trimmed:0.2"), updates, [1] * 5)[0] == 3.0
    assert merged(MERGE.read("trimmed"), updates, [1] * 5)[0] == 3.0
    assert merged(MERGE.read("trimmed:0.4"), updates, [1] * 5)[0] == 2.0
    assert merged(MERGE.read("median"), updates, [1] * 5)[0] == 2.0


def test_the_trimmed_mean_of_few_slots_trims_no_value():
    updates = updates_of(4)
    assert bits(merged(MERGE.read("trimmed:0.2"), updates, [1] * 4)) == bits(weighted_mean(updates, [1] * 4))


@pytest.mark.parametrize("name", ["median", "trimmed:0.25", "krum:keep=3", "geometric", "clipped"])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_robust_merge_has_the_same_bits_in_any_order_of_arrival(name, order):
    updates = updates_of(4)
    merge = MERGE.read(name).start(4, like=updates[0])
    for slot in order:
        merge.add(slot, updates[slot], 1)
    assert bits(merge.result()) == bits(merged(MERGE.read(name), updates, [1] * 4))


@pytest.mark.parametrize("name", ["median", "trimmed:0.2", "krum"])
def test_a_robust_merge_counts_each_slot_once_for_any_number_of_samples(name):
    updates = updates_of(5)
    assert bits(merged(MERGE.read(name), updates, [1, 10, 100, 7, 3])) == bits(
        merged(MERGE.read(name), updates, [1] * 5)
    )


@pytest.mark.parametrize("name", ["median", "trimmed:0.2"])
@given(bad=floats, slot=st.integers(0, 4))
def test_robust_merge_stays_within_the_honest_values(name, bad, slot):
    updates = [[np.float32([value])] for value in (1, 2, 3, 4, 5)]
    honest = [updates[j][0] for j in range(5) if j != slot]
    updates[slot] = [np.float32([bad])]
    (result,) = merged(MERGE.read(name), updates, [1] * 5)
    assert min(honest) <= result <= max(honest)


@pytest.mark.parametrize("name", ["mean", "median", "trimmed:0.2", "krum"])
def test_each_rule_refuses_wrong_updates_and_names_missing_slots(name):
    update = [np.float32([1, 2, 3]), np.array(7)]
    merge = MERGE.read(name).start(2, like=update, names=["dense/bias", "counter"])
    with pytest.raises(BadUpdate, match="slot 1: 1 of 3 values of dense/bias are NaN or infinite"):
        merge.add(1, [np.float32([1, np.nan, 3]), np.array(7)], 1)
    merge.add(1, update, 1)
    with pytest.raises(ConfigError, match=r"no update from slots \[0\] of 2"):
        merge.result()
    with pytest.raises(ConfigError, match="slot 1 was merged already"):
        merge.add(1, update, 1)
    merge.add(0, update, 1)
    assert bits(merge.result()) == bits([update[0], np.array(0)])


def test_an_update_that_was_checked_is_not_checked_again():
    merge = RunningMerge(1, like=[np.zeros(1, np.float32)])
    merge.add(0, [np.float32([np.nan])], 1, checked=True)
    assert np.isnan(merge.result()[0])


def test_rules_are_chosen_by_name():
    assert MERGE.read("mean") == Mean()
    assert MERGE.read("median") == Median()
    assert MERGE.read("trimmed:0.1") == TrimmedMean(beta=0.1)


@pytest.mark.parametrize("beta", ["0.5", "-0.1", "nan"])
def test_a_share_that_cannot_be_left_out_is_refused(beta):
    with pytest.raises(ConfigError, match=r"beta must be in \[0, 0.5\), got .*; write it as trimmed:beta=0.2"):
        MERGE.read(f"trimmed:{beta}")


def test_krum_computed_by_hand():
    """With 4 slots and 1 bad slot, the nearest neighbour counts. Squared distances are 1, 0.25, 0.25 and 72.25."""
    updates = [[np.float32([value])] for value in (0, 1, 1.5, 10)]
    assert merged(MERGE.read("krum"), updates, [1] * 4)[0] == 1.0, "of two that are as near, that of the lower slot"
    assert merged(MERGE.read("krum:keep=2"), updates, [1] * 4)[0] == 1.25
    assert merged(MERGE.read("krum:keep=9"), updates, [1] * 4)[0] == 3.125


@given(
    stacked=hnp.arrays(np.float32, st.tuples(st.integers(1, 7), st.just(5)), elements=st.integers(-8, 8)),
    bad=st.integers(0, 3),
    keep=st.integers(1, 7),
)
def test_multi_krum_is_the_formula_of_its_source_over_all_tensors(stacked, bad, keep):
    scores = []
    for i, row_i in enumerate(stacked):
        distances = sorted(float(((row_i - row_j) ** 2).sum()) for j, row_j in enumerate(stacked) if j != i)
        scores.append(sum(distances[: max(1, len(stacked) - bad - 2)]))
    best = sorted(range(len(stacked)), key=scores.__getitem__)[:keep]
    actual = merged(Krum(bad=bad, keep=keep), [[row[:2], row[2:]] for row in stacked], range(1, len(stacked) + 1))
    np.testing.assert_allclose(np.concatenate(actual), stacked[best].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("change", [np.zeros_like, np.negative, lambda tensor: tensor * np.float32(1000)])
def test_krum_takes_no_bad_update_of_one_slot(change):
    random = np.random.default_rng(0)
    honest = [[np.float32(1 + 0.1 * random.normal(size=50))] for _ in range(5)]
    bad = [[change(tensor) for tensor in honest[2]]]
    mixed = honest[:2] + bad + honest[3:]
    assert bits(merged(Krum(keep=3), mixed, [1] * 5)) != bits(weighted_mean(mixed, [1] * 5))
    assert abs(merged(Krum(keep=3), mixed, [1] * 5)[0] - 1).max() < 0.4


@pytest.mark.parametrize("values", [{"bad": -1}, {"keep": 0}])
def test_impossible_parameters_of_krum_are_refused(values):
    with pytest.raises(ConfigError):
        Krum(**values)
