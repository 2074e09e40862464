import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.pairwise import cosines, norm
from ddlf.algorithms.update_check import Limits, judge, scaled
from ddlf.algorithms.weights import fault
from ddlf.errors import BadUpdate, ConfigError

NAMES = ["dense/kernel", "dense/bias"]
LIKE = [np.zeros((40, 5), np.float32), np.zeros(5, np.float32)]


def honest(slots, seed=0, agreement=1.0, samples=100):
    """Return updates of one direction plus noise. Their pairwise cosine is about agreement**2 / (agreement**2 + 1)."""
    random = np.random.default_rng(seed)
    direction = [random.normal(size=tensor.shape) for tensor in LIKE]
    return {
        slot: ([np.float32(agreement * d + random.normal(size=d.shape)) for d in direction], samples)
        for slot in range(slots)
    }


def with_update(updates, slot, change):
    """Return the same round with changed tensors of one slot."""
    tensors, samples = updates[slot]
    return {**updates, slot: ([np.asarray(change(tensor), tensor.dtype) for tensor in tensors], samples)}


def actions(updates, policy, **options):
    return [verdict.action for verdict in judge(updates, LIKE, policy, **options).values()]


def one_nan(tensor):
    changed = tensor.copy()
    changed.flat[:3] = np.nan, np.inf, -np.inf
    return changed


@pytest.mark.parametrize("policy", ["stop", "reject", "clip"])
def test_honest_updates_are_accepted_under_every_policy(policy):
    verdicts = judge(honest(5), LIKE, policy)
    assert [(v.slot, v.action, v.factor, v.reason) for v in verdicts.values()] == [
        (slot, "accept", 1.0, "") for slot in range(5)
    ]


@pytest.mark.parametrize("policy", ["stop", "reject", "clip"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_nan_is_rejected_with_slot_tensor_and_count(policy, slots):
    updates = honest(slots)
    updates[slots - 1][0][0] = one_nan(updates[slots - 1][0][0])
    verdict = judge(updates, LIKE, policy, names=NAMES)[slots - 1]
    assert str(verdict) == f"slot {slots - 1} rejected: 3 of 200 values of dense/kernel are NaN or infinite"
    error = verdict.error(worker="worker 4 (10.0.0.7:9000)")
    assert isinstance(error, BadUpdate)
    assert isinstance(error, ValueError)
    assert (error.worker, error.tensor, error.count) == ("worker 4 (10.0.0.7:9000)", "dense/kernel", 3)
    assert str(error).startswith(f"worker 4 (10.0.0.7:9000): slot {slots - 1}: 3 of 200 values of dense/kernel are NaN")


def test_only_the_bad_slot_is_rejected():
    assert actions(with_update(honest(4), 2, one_nan), "reject") == ["accept", "accept", "reject", "accept"]


@pytest.mark.parametrize(
    ("update", "samples", "reason", "tensor"),
    [
        (LIKE, 0, "trained on 0 samples; its update has no weight", ""),
        (LIKE[:1], 1, "sent 1 tensors, but the model has 2", ""),
        (
            [LIKE[0].T, LIKE[1]],
            1,
            "dense/kernel: expected float32 (40, 5), got float32 (5, 40)",
            "dense/kernel",
        ),
        ([LIKE[0], LIKE[1].astype("f8")], 1, "dense/bias: expected float32 (5,), got float64 (5,)", "dense/bias"),
    ],
)
def test_an_update_of_another_form_is_a_fault(update, samples, reason, tensor):
    problem = fault(update, samples, LIKE, NAMES)
    assert (problem.reason, problem.tensor) == (reason, tensor)


def test_tensors_without_names_are_numbered():
    assert "tensor 1" in fault([LIKE[0], np.float32([0, 0, np.nan, 0, 0])], 1, LIKE).reason


def test_default_policy_checks_for_unusable_updates_only():
    updates = with_update(honest(4), 1, lambda tensor: tensor * 1000)
    assert actions(updates, "stop") == ["accept"] * 4


def test_too_long_update_is_rejected_or_scaled_to_the_median():
    updates = with_update(honest(4), 1, lambda tensor: tensor * 1000)
    rejected = judge(updates, LIKE, "reject")
    assert [v.action for v in rejected.values()] == ["accept", "reject", "accept", "accept"]
    assert rejected[1].reason.endswith("times the median of the others")
    norms = [np.sqrt(sum((tensor.astype("f8") ** 2).sum() for tensor in updates[slot][0])) for slot in (0, 2, 3)]
    clipped = judge(updates, LIKE, "clip")[1]
    assert clipped.action == "clip"
    assert norm(scaled(updates[1][0], clipped.factor)) == pytest.approx(np.median(norms), rel=1e-6)
    assert rejected[1].reason == f"norm {1 / clipped.factor:,.0f} times the median of the others"


@pytest.mark.parametrize("policy", ["reject", "clip"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: tensor * 0, "all zeros"),
        (lambda tensor: tensor * 1e-4, "norm 1/10,200 of the median of the others"),
        (lambda tensor: -tensor, "opposite to the others (cosine -0.9"),
        (lambda tensor: tensor * -1000, ""),
    ],
)
def test_zeros_tiny_and_opposite_updates_are_not_merged(policy, change, reason):
    updates = with_update(honest(4, agreement=5), 3, change)
    verdicts = judge(updates, LIKE, policy)
    assert [v.action for v in verdicts.values()] == ["accept", "accept", "accept", "reject"]
    assert reason in verdicts[3].reason


@pytest.mark.parametrize("change", [lambda t: t * 1000, lambda t: t * 0, lambda t: t * 1e-4, lambda t: -t])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_bad_slot_of_three_is_found(change, bad):
    assert [
        v.slot for v in judge(with_update(honest(3, agreement=3), bad, change), LIKE, "reject").values() if v.reason
    ] == [bad]


@given(bad=st.sets(st.integers(0, 8), min_size=1, max_size=3), seed=st.integers(0, 100))
def test_a_minority_of_flipped_updates_is_found_among_nine(bad, seed):
    updates = honest(9, seed=seed, agreement=3)
    for slot in bad:
        updates = with_update(updates, slot, lambda tensor: -tensor)
    assert {v.slot for v in judge(updates, LIKE, "reject").values() if v.action == "reject"} == bad


def test_longer_update_of_two_slots_counts_as_wrong():
    updates = with_update(honest(2), 0, lambda tensor: tensor * 1000)
    verdicts = judge(updates, LIKE, "reject")
    assert [v.action for v in verdicts.values()] == ["reject", "accept"]
    assert "two slots do not show which one is wrong" in verdicts[0].reason
    assert actions(updates, "clip") == ["clip", "accept"]
    assert actions(with_update(honest(2), 0, lambda tensor: tensor * 0), "reject") == ["reject", "accept"]
    assert actions(with_update(honest(2, agreement=9), 0, lambda tensor: -tensor), "reject") == ["accept", "accept"]


def test_a_single_slot_is_accepted_without_comparison():
    assert actions(with_update(honest(1), 0, lambda tensor: tensor * 0), "reject") == ["accept"]


def test_a_round_of_zero_updates_is_accepted():
    assert actions({slot: ([t * 0 for t in u], n) for slot, (u, n) in honest(4).items()}, "reject") == ["accept"] * 4


def test_an_update_may_be_longer_in_proportion_to_its_samples():
    updates = with_update(honest(4), 0, lambda tensor: tensor * 60)
    assert actions(updates, "reject")[0] == "reject"
    assert actions({**updates, 0: (updates[0][0], 6_000)}, "reject")[0] == "accept"
    small = with_update(honest(4), 0, lambda tensor: tensor / 300)
    assert actions(small, "reject")[0] == "reject"
    assert actions({**small, 0: (small[0][0], 10)}, "reject")[0] == "accept"


def test_honest_updates_without_agreement_do_not_count_as_opposite():
    """At the end of training, updates are noise around zero."""
    for seed in range(200):
        assert actions(honest(4, seed=seed, agreement=0.1), "reject") == ["accept"] * 4


def test_batchnorm_statistics_are_only_checked_for_their_length():
    updates = honest(4)
    for slot, factor in enumerate((1, 0, -1, 1000)):
        updates[slot][0][1] = np.ones(5, np.float32) * factor
    verdicts = judge(updates, LIKE, "reject", trainable=[True, False])
    assert [v.action for v in verdicts.values()] == ["accept", "accept", "accept", "reject"]
    assert verdicts[3].reason == "norm of the untrained weights 1,000 times the median of the others"


def test_counters_are_neither_compared_nor_scaled():
    like = [*LIKE, np.array(0)]
    updates = {slot: ([*tensors, np.array(10**slot)], n) for slot, (tensors, n) in honest(4).items()}
    assert {v.action for v in judge(updates, like, "reject").values()} == {"accept"}
    assert scaled(updates[3][0], 0.5)[2] == 1000


def test_values_near_the_end_of_float32_do_not_overflow():
    updates = with_update(honest(4), 1, lambda tensor: np.sign(tensor) * np.float32(3e38))
    assert actions(updates, "reject") == ["accept", "reject", "accept", "accept"]
    assert actions({slot: ([np.sign(t) * np.float32(3e38) for t in u], n) for slot, (u, n) in updates.items()}, "clip")


def test_cosines_equal_those_of_the_flattened_updates():
    updates = [tensors for tensors, _ in honest(5).values()]
    flat = np.stack([np.concatenate([tensor.ravel() for tensor in update]) for update in updates]).astype("f8")
    lengths = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(cosines(updates), flat @ flat.T / np.outer(lengths, lengths), atol=1e-12)


def test_a_scaled_update_is_a_copy_with_its_type():
    (update, _) = honest(1)[0]
    half = scaled(update, 0.5)
    assert half[0].dtype == np.float32
    np.testing.assert_array_equal(half[0], update[0] * np.float32(0.5))


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown update_policy 'ignore'; choose one of stop, reject, clip"):
        judge(honest(2), LIKE, "ignore")


@pytest.mark.parametrize(
    "wrong",
    [
        dict(longest=1.0),
        dict(longest=float("inf")),
        dict(shortest=-0.1),
        dict(shortest=1.0),
        dict(opposite=0.0),
        dict(opposite=1.1),
        dict(opposite=float("nan")),
    ],
)
def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
