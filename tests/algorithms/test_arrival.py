"""Tests of the arrival rules: each is compared with its formula in float64, over ten updates of three slots."""

from itertools import pairwise

import numpy as np
import pytest

from ddlf.algorithms.arrival import ARRIVAL, Arrived, Mimic, Weighted
from ddlf.algorithms.outer import Nesterov, Subtract
from ddlf.algorithms.set_merge import WeightSet
from ddlf.algorithms.staleness import STALENESS
from ddlf.errors import ConfigError

K, ORDER = 3, [0, 1, 1, 2, 0, 0, 2, 1, 0, 2]
CHANCE = np.random.default_rng(3)
W = CHANCE.normal(size=4)
UPDATES = [0.1 * CHANCE.normal(size=4) for _ in ORDER]
WHOLE = np.asarray(7)


def apply_updates(
    text, staleness="constant", outer=None, updates=UPDATES, order=ORDER, trainable=True, accuracies=None
):
    """Return the weights after each update, and the start, the staleness and the factor of each update.

    Each slot reads the weights after the master has handled its last update. Half of a model is a counter, which is not merged.
    """
    rule, outer, factor = ARRIVAL.read(text), outer or Subtract(), STALENESS.read(staleness)
    weights = [W.copy(), WHOLE]
    state = {"outer": outer.init(weights), **rule.init(weights)}
    merges = 0
    read = {slot: (rule.begin(state, weights, slot), merges, dict(state)) for slot in range(K)}
    weights_after, facts_of_updates = [], []
    for number, (slot, g) in enumerate(zip(order, updates, strict=True)):
        start, version, before = read[slot]
        tau = merges - version
        arrived = Arrived(
            update=[g, np.asarray(1)],
            start=start,
            before=before,
            slot=slot,
            slots=K,
            factor=factor(tau),
            trainable=[trainable, False],
            outer=outer,
            accuracy=accuracies[number] if accuracies else float("nan"),
            last=number == len(order) - 1,
        )
        untouched = [array.copy() for array in weights], start[0].copy(), {n: [*group] for n, group in state.items()}
        changed, after = rule.arrive(state, weights, arrived)
        assert all(np.array_equal(a, b) for a, b in zip(weights, untouched[0], strict=True))
        assert np.array_equal(start[0], untouched[1])
        assert all(a is b for name, group in untouched[2].items() for a, b in zip(state[name], group, strict=True))
        merges += after is not weights
        state, weights = {**state, **changed}, after
        read[slot] = rule.begin(state, weights, slot), merges, dict(state)
        weights_after.append(weights[0])
        facts_of_updates.append((start[0], tau, arrived.factor))
        assert weights[1] == WHOLE
    return weights_after, facts_of_updates


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_published_subtracts_a_share_of_a_round():
    weights_after, _ = apply_updates("published")
    w, expected = W, []
    for g in UPDATES:
        w = w - g / 3
        expected.append(w)
    close(weights_after, expected)


@pytest.mark.parametrize("staleness", STALENESS.names)
def test_published_weighs_each_update_by_its_staleness(staleness):
    s = {
        "constant": lambda tau: 1,
        "inverse": lambda tau: 1 / max(1, tau),
        "polynomial": lambda tau: (1 + tau) ** -0.5,
        "hinge": lambda tau: 1 if tau <= 4 else 1 / (10 * (tau - 4) + 1),
    }[staleness]
    taus = [0, 1, 0, 3, 3, 0, 2, 4, 2, 2]
    weights_after, facts_of_updates = apply_updates("published", staleness)
    assert [tau for _, tau, _ in facts_of_updates] == taus
    w, expected = W, []
    for g, tau in zip(UPDATES, taus, strict=True):
        w = w - s(tau) * g / 3
        expected.append(w)
    close(weights_after, expected)


def test_published_gives_its_share_to_the_outer_optimizer():
    weights_after, _ = apply_updates("published", "inverse", outer=Nesterov(learning_rate=0.7, momentum=0.9))
    w, v, expected = W, 0, []
    for g, tau in zip(UPDATES, [0, 1, 0, 3, 3, 0, 2, 4, 2, 2], strict=True):
        share = g / max(1, tau) / 3
        v = 0.9 * v + share
        w = w - 0.7 * (share + 0.9 * v)
        expected.append(w)
    close(weights_after, expected)


@pytest.mark.parametrize("staleness", ["constant", "polynomial:0.5"])
def test_fedasync_mixes_the_weights_with_a_rate_that_never_decays(staleness):
    """One public implementation multiplies its rate by the factor permanently."""
    weights_after, facts_of_updates = apply_updates("fedasync:rate=0.6", staleness)
    w, expected = W, []
    for g, (start, tau, _) in zip(UPDATES, facts_of_updates, strict=True):
        a = 0.6 * (1 if staleness == "constant" else (1 + tau) ** -0.5)
        w = (1 - a) * w + a * (start - g)
        expected.append(w)
    close(weights_after, expected)


def test_fedasync_keeps_a_variance_positive():
    """Untrained weights are mixed like trained weights. No rate turns them negative."""
    variance = np.array([1e-3, 1.0])
    arrived = Arrived(
        update=[variance - 1e-6],
        start=[variance],
        before={},
        slot=0,
        slots=1,
        factor=1,
        trainable=[False],
        outer=Subtract(),
    )
    _, (after,) = ARRIVAL.read("fedasync:0.9").arrive({"outer": []}, [np.array([1e-9, 1e-9])], arrived)
    assert np.all(after > 0)


@pytest.mark.parametrize("outer", [Subtract(), Subtract(learning_rate=0.5), Nesterov()])
def test_fedbuff_merges_full_buffers_and_the_rest_at_the_end(outer):
    weights_after, facts_of_updates = apply_updates("fedbuff:size=4", "polynomial:0.5", outer=outer)
    merges = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]  # after each update
    read = [0] * K
    w, state, buffer, expected = [W], outer.init([W]), [], []
    for number, (slot, g, (_, tau, _)) in enumerate(zip(ORDER, UPDATES, facts_of_updates, strict=True)):
        assert tau == (merges[number - 1] if number else 0) - read[slot]
        read[slot] = merges[number]
        buffer.append(g / np.sqrt(1 + tau))
        if len(buffer) == 4 or number == 9:
            state, w = outer.update(state, w, [sum(buffer) / 4], [True])
            buffer = []
        expected.append(w[0])
    close(weights_after, expected)


@pytest.mark.parametrize("outer", [Subtract(), Nesterov()])
def test_dcasgd_corrects_each_update_for_changes_by_other_slots(outer):
    weights_after, facts_of_updates = apply_updates("dcasgd:strength=5", "inverse", outer=outer)
    w, state, expected = [W], outer.init([W]), []
    for g, (start, tau, _) in zip(UPDATES, facts_of_updates, strict=True):
        corrected = g + 5 * g * g * (w[0] - start)
        state, w = outer.update(state, w, [corrected / max(1, tau) / 3], [True])
        expected.append(w[0])
    close(weights_after, expected)
    assert np.abs(np.array(expected) - apply_updates("published", "inverse", outer=outer)[0]).max() > 1e-4


@pytest.mark.parametrize("c", [0.0, 0.3])
def test_delayed_nesterov_moves_its_velocity_once_for_all_slots(c):
    weights_after, _ = apply_updates(f"delayed:rate=0.7,momentum=0.9,c={c}")
    w, m, buffer, expected = W, 0, 0, []
    for t, g in enumerate(UPDATES):
        buffer = buffer + g
        if (t + 1) % 3 == 0:
            m = 0.9 * m + buffer / 3
            w = w - 0.7 * ((1 - c * 3 + c) * 0.9 * m + g / 3)
            buffer = 0
        else:
            w = w - 0.7 * (c * 0.9 * m + g / 3)
        expected.append(w)
    close(weights_after, expected)


def test_elastic_averaging_pulls_both_sides():
    weights_after, facts_of_updates = apply_updates("elastic:alpha=0.2")
    centre, local_weights, expected = W, [W, W, W], []
    for slot, g, (start, _, _) in zip(ORDER, UPDATES, facts_of_updates, strict=True):
        close(start, local_weights[slot])
        local = local_weights[slot] - g
        e = 0.2 * (local - centre)
        local_weights[slot], centre = local - e, centre + e
        expected.append(centre)
    close(weights_after, expected)


# -- peers -----------------------------------------------------------------------------------------------------------


ACCURACIES = [0.3, 0.2, 0.5, 0.5, 0.6, 0.1, 0.7, 0.6, 0.8, 0.75]


def peers(name):
    """Return the weights by the table of the source. The master is one peer, and each slot is another."""
    w, s, a, expected = W, 0, -np.inf, []
    began = [(w, s)] * K
    for slot, g, b in zip(ORDER, UPDATES, ACCURACIES, strict=True):
        start, trainings = began[slot]
        p, q = start - g, trainings + 1
        if name == "average":
            w = (w + p) / 2
        elif name == "weighted":
            w, s = (q * p + s * w) / (q + s), max(s, q)
        elif name == "mimic":
            d = q - s
            along = p - w if d > 0 else w - p
            w, s = w + along / ((abs(d) if d else 1) + 1), max(s, q)
        elif b > a:
            w, a = p, b
        began[slot] = w, s
        expected.append(w)
    return expected


@pytest.mark.parametrize("name", ["average", "weighted", "mimic", "copy"])
def test_a_meeting_of_peers_follows_the_table_of_its_source(name):
    weights_after, facts_of_updates = apply_updates(name, accuracies=ACCURACIES)
    close(weights_after, peers(name))
    if name == "copy":  # a refused update does not count as a merge, so other updates do not age
        assert [np.array_equal(a, b) for a, b in pairwise(weights_after)].count(True) == 5
        assert max(tau for _, tau, _ in facts_of_updates) < max(
            tau for _, tau, _ in apply_updates("average", accuracies=ACCURACIES)[1]
        )


def test_two_peers_meet_without_a_master():
    staler = WeightSet(weights=[np.array([1.0]), WHOLE], trainings=3)
    fresher = WeightSet(weights=[np.array([5.0]), np.asarray(9)], trainings=1)
    met = Weighted().merge(staler, fresher)
    assert (met.weights[0], met.weights[1], met.trainings) == (2.0, WHOLE, 3)
    assert Mimic().merge(staler, fresher).weights[0] == 1 - 4 / 3  # the result moves away from the staler weights
    untrained = Weighted().merge(
        WeightSet(weights=[np.array([1.0])], trainings=0), WeightSet(weights=[np.array([2.0])], trainings=0)
    )
    assert untrained.weights[0] == 1.5


def test_copy_needs_an_accuracy():
    with pytest.raises(ConfigError, match="'copy' compares accuracies, but the model reports none; compile it"):
        apply_updates("copy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dcasgd:-1", "strength must be finite and >= 0, got -1.0"),
        ("delayed:0", "rate must be finite and > 0, got 0.0"),
        ("delayed:momentum=1", r"momentum must be in \[0, 1\) and c in \[0, 1\], got 1.0 and 0.0"),
        ("delayed:c=2", "got 0.9 and 2.0"),
        ("elastic:0", r"alpha must be in \(0, 1\], got 0.0"),
        ("mimic:1", "mimic has no parameters"),
        ("fedasync:0", r"rate must be in \(0, 1\], got 0.0"),
        ("fedasync:1.5", r"rate must be in \(0, 1\], got 1.5"),
        ("fedasync:nan", r"rate must be in \(0, 1\], got nan"),
        ("fedbuff:0", "size must be 1 or more, got 0"),
        ("fedbuff:1.5", "size must be a whole number"),
    ],
)
def test_a_rule_with_parameters_out_of_range_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        ARRIVAL.read(text)


@pytest.mark.parametrize("rule", ARRIVAL.names)
def test_zero_updates_change_no_weight(rule):
    """Every slot returns its weights unchanged, like with a learning rate of 0."""
    weights_after, _ = apply_updates(rule, updates=[np.zeros(4)] * len(ORDER), accuracies=[0.5] * len(ORDER))
    close(weights_after, [W] * len(ORDER))
