"""Tests of the checks of posted sets: sketches, verdicts, limited steps, and strikes in the ledger."""

from dataclasses import replace

import numpy as np
import pytest

from ddlf.algorithms.set_merge import SET_MERGE, WeightSet
from ddlf.peers import sketches
from ddlf.peers.checks import LEAST_USUAL, Last, SetCheck
from ddlf.peers.entries import Arrived, Began, Invited, Joined, Posted, Rejected
from ddlf.peers.ledger import GOOD_POSTS, LONGEST_OUT_S, OUT_S, STRIKES, LedgerSet
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.sets import layout_of
from ddlf.peers.sketches import WIDTH, Sketcher
from ddlf.peers.swap import SwapLedger
from ddlf.peers.wire import Wire

MODELS = {
    "one type": {"a": ((40, 30), "float32"), "b": ((30,), "float32")},
    "three types": {"a": ((40, 30), "float32"), "b": ((30,), "float64"), "n": ((3,), "int64"), "s": ((30,), "float32")},
}


def drawn(model, random, scale=1.0):
    return [np.asarray(scale * random.normal(size=shape), kind) for shape, kind in MODELS[model].values()]


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [2**18, 512])
def test_a_sketch_keeps_lengths_and_is_linear(monkeypatch, model, codec, chunk):
    monkeypatch.setattr(sketches, "CHUNK", chunk)
    random = np.random.default_rng(0)
    layout = layout_of(dict(zip(MODELS[model], drawn(model, random), strict=True)))
    trainable = [name != "s" for name in layout.names]
    wire = Wire(layout, codec, trainable)
    errors = []
    for seed in range(20):
        sketcher = Sketcher(wire, trainable, seed)
        first, second = drawn(model, random, 10.0), drawn(model, random, 10.0)
        first_bytes, second_bytes = wire.encode(first), wire.encode(second)
        far = sketcher.sketch(first_bytes)[0] - sketcher.sketch(second_bytes)[0]
        moved = [
            a.astype(float) - b.astype(float)
            for a, b, name in zip(wire.decode(first_bytes), wire.decode(second_bytes), layout.names, strict=True)
            if name in "ab"
        ]
        errors.append(sketches.length(far) / np.sqrt(sum(np.sum(np.square(m)) for m in moved)) - 1)
    assert abs(np.mean(errors)) < 0.05
    assert np.std(errors) < 0.1
    average = SET_MERGE.read("average")
    merged = average.merge(WeightSet(weights=first, trainings=1), WeightSet(weights=second, trainings=1))
    sketcher = Sketcher(Wire(layout, "float32", trainable), trainable, 1)
    mean = sum(sketcher.sketch(layout.encode(weights))[0] for weights in (first, second)) / 2
    np.testing.assert_allclose(sketcher.sketch(layout.encode(merged.weights))[0], mean, atol=1e-2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("model", MODELS)
def test_a_set_with_one_bad_value_has_a_sketch_that_is_not_finite(model, value):
    weights = drawn(model, np.random.default_rng(0))
    layout = layout_of(dict(zip(MODELS[model], weights, strict=True)))
    trainable = [True] * len(weights)
    sketcher = Sketcher(Wire(layout, "float32", trainable), trainable, 0)
    assert sketches.is_finite(sketcher.sketch(layout.encode(weights)))
    weights[-1][3 % len(weights[-1])] = value
    assert not sketches.is_finite(sketcher.sketch(layout.encode(weights)))


@pytest.mark.parametrize("model", MODELS)
def test_a_huge_set_has_a_sketch_that_is_always_refused(model):
    """A mean with a weight of 1e30 is useless, and the square of the weight overflows float32."""
    weights = drawn(model, np.random.default_rng(0))
    layout = layout_of(dict(zip(MODELS[model], weights, strict=True)))
    sketcher = Sketcher(Wire(layout, "float32", [True] * len(weights)), [True] * len(weights), 0)
    for huge, fits in ((1e15, True), (1e19, False), (1e30, False)):
        weights[0][7, 7] = huge
        sketch = sketcher.sketch(layout.encode(weights))
        assert sketches.is_finite(sketch) == fits
        if not fits:
            judgement = SetCheck(Plan(longest=0.0)).judge(1, sketch, 20, 0, 0)
            assert (judgement.reason, judgement.strike) == ("its values are not finite, or too large", "again")


# -- verdicts ---------------------------------------------------------------------------------------------------------------


def at(value, moved=0.0, axis=0):
    """Return the sketch of a set at a point of a line."""
    vector = np.zeros(WIDTH)
    vector[axis] = value
    return vector, np.array([moved])


HELD = LedgerSet(state="outstanding", trainings=1)


class Checked:
    """A check with peers; their weights are points on a line."""

    def __init__(self, peers=3, **plan):
        self.check = SetCheck(Plan(**({"merge": "average"} | plan)))
        self.check.keep(1, at(10.0))
        self.set = 1
        for peer in range(1, peers + 1):
            self.check.arrived(peer, 1, 0)

    def judge(self, peer, sketch, updates=20, contains=0):
        return self.check.judge(peer, sketch, updates, contains, base=1)

    def post(self, peer, sketch, updates=20, contains=0):
        judgement = self.judge(peer, sketch, updates, contains)
        assert not judgement.reason
        self.set += 1
        self.check.keep(self.set, sketch)
        entry = Posted(
            at=0.0, peer=peer, number=1, set=self.set, contains=contains, updates=updates, base=1,
            length=judgement.length, moved=judgement.moved,
        )  # fmt: skip
        self.check.accepted(entry, 1)
        return judgement


def test_the_length_of_a_training_follows_from_the_sets_that_its_peer_has_received():
    checked = Checked()
    checked.post(1, at(11.0))
    assert checked.judge(2, at(13.0)).length == 3.0
    checked.post(2, at(13.0))
    assert checked.check.step(1, 3, HELD, validated=False) == 1.0  # a step from 11 to 12
    assert checked.judge(1, at(12.5), contains=3).length == 0.5
    assert checked.judge(1, at(12.5), contains=0).length == 1.5  # the peer has not merged the set
    checked.check.replaced(1, 1)
    assert checked.judge(1, at(12.5), contains=1).length == 2.5


@pytest.mark.parametrize("way", ["swap", "rounds"])
def test_a_far_too_long_training_is_a_strike_and_a_long_one_counts_partly(way):
    checked = Checked(way=way, merge="mean" if way == "rounds" else "average", longest=6.0)
    checked.post(1, at(11.0))
    assert not checked.judge(3, at(90.0)).reason  # with only one other peer, the server cannot know which one is wrong
    assert checked.judge(3, at(1000.0)).reason == "its training is 99 times as long as the weights themselves"
    checked.post(2, at(11.0))
    judgement = checked.judge(3, at(150.0))
    assert (judgement.reason, judgement.strike) == ("its training is 140 times as long as is usual", "yes")
    judgement = checked.judge(3, at(17.0))
    assert (judgement.reason, judgement.strike, judgement.share) == ("", "no", 0.5 / 7)
    judgement = checked.judge(3, at(17.0))
    reason = "its training is 7.0 times as long as is usual, and the one before was long, too" if way == "swap" else ""
    assert (judgement.reason, judgement.strike, judgement.share) == (reason, "no", 1.0 if way == "swap" else 0.5 / 7)
    for position, share in ((15.0, 1.0), (17.0, 0.5 / 7)):
        judgement = checked.judge(3, at(position))
        assert (judgement.reason, judgement.share) == ("", share)


def test_a_training_in_the_opposite_direction_may_be_half_as_long():
    checked = Checked(longest=6.0)
    for position in range(11, 30):
        checked.post(1, at(position))
        checked.post(2, at(position))
    assert checked.judge(3, at(6.0)).share == 0.5 / 4
    judgement = checked.judge(3, at(6.0))
    reason = (
        "its training is 4.0 times as long as is usual, and the one before was long, too (cosine with the others -1.00)"
    )
    assert (judgement.reason, judgement.strike) == (reason, "no")
    assert not checked.judge(3, at(8.0)).reason
    assert not checked.judge(3, at(14.0)).reason


def test_statistics_that_moved_far_are_a_strike():
    checked = Checked()
    checked.post(1, at(11.0, moved=1.0))
    checked.post(2, at(11.0, moved=1.0))
    assert not checked.judge(3, at(11.0, moved=-50.0)).reason
    assert checked.judge(3, at(11.0, moved=-500.0)).reason == "its statistics moved 500 times as far as is usual"


def test_a_repeated_old_set_is_rejected_without_a_strike():
    checked = Checked()
    for peer in (1, 2, 3):
        checked.post(peer, at(11.0))
    judgement = checked.judge(3, at(11.0))
    assert (judgement.reason, judgement.strike) == (
        "it has trained nothing: these are the weights that it had before",
        "no",
    )


@pytest.mark.parametrize("way", ["swap", "rounds"])
@pytest.mark.parametrize("restarted", [False, True])
def test_converged_peers_do_not_exclude_a_new_one(way, restarted):
    """Their trainings have become a thousand times shorter. The third peer trains as far as they did at first."""
    checked = Checked(way=way, merge="mean" if way == "rounds" else "average", longest=6.0)
    for length in (1.0, 0.1, 0.001):
        for peer in (1, 2):
            checked.check.replaced(peer, 1)
            checked.post(peer, at(10.0 + length), contains=1)
    if restarted:
        again = Checked(0, way=way, merge="mean" if way == "rounds" else "average", longest=6.0)
        again.check.recall({peer: Last(length=0.001, updates=20, moved=0.0, longest=1.0) for peer in (1, 2)})
        again.check.arrived(3, 1, 0)
        checked = again
    judgement = checked.judge(3, at(11.0))
    assert (judgement.reason, judgement.share) == ("", 1.0)
    assert checked.judge(3, at(10.0 + 7 * LEAST_USUAL)).share < 1  # 7 times the least usual length
    assert checked.judge(3, at(10.0 + 101 * LEAST_USUAL)).strike == "yes"


def test_a_converged_peer_is_rejected_only_if_it_has_trained_nothing():
    checked = Checked()
    for peer in (2, 3):
        checked.post(peer, at(11.0))
    position = 10.0
    for length in (1.0, 0.1, 0.01, 0.001):
        position += length
        checked.post(1, at(position))
    assert checked.judge(1, at(position)).reason.startswith("it has trained nothing")


def test_more_batches_allow_a_longer_training_up_to_the_limit_of_the_plan():
    checked = Checked(updates=100, seconds=1.0, longest=6.0)
    checked.post(1, at(11.0), updates=10)
    checked.post(2, at(11.0), updates=10)
    assert not checked.judge(3, at(60.0), updates=100).reason
    assert checked.judge(3, at(60.0), updates=10).share < 1
    assert checked.judge(3, at(80.0), updates=10**9).reason


def test_a_minority_cannot_change_the_usual_length():
    checked = Checked(5)
    for peer in (1, 2, 3):
        checked.post(peer, at(11.0))
    position = 10.0
    for _ in range(50):
        position += 5.9
        checked.post(4, at(position))
    assert checked.judge(5, at(17.0)).share < 1


def test_the_owner_can_turn_the_checks_off():
    checked = Checked(longest=0.0)
    for peer in (1, 2):
        checked.post(peer, at(11.0))
    assert not checked.judge(3, at(1e9)).reason
    assert checked.judge(3, at(np.nan)).reason


def test_a_step_towards_an_unvalidated_set_is_limited():
    checked = Checked(longest=6.0)
    for peer in (1, 2, 3):
        checked.post(peer, at(11.0))
    checked.check.keep(99, at(111.0))
    assert checked.check.step(1, 99, HELD, validated=True) == 1.0
    assert checked.check.step(1, 99, HELD, validated=False) == pytest.approx(6 / 50)  # half of the distance is 50
    # the peer moved to 17, and its training has the length 1
    assert checked.judge(1, at(18.0), contains=99).length == pytest.approx(1.0)
    assert checked.check.step(1, 99, replace(HELD, share=0.1), validated=False) == pytest.approx(0.5 / 50)


# -- strikes ----------------------------------------------------------------------------------------------------------------


class Struck:
    """A ledger with peers. A test rejects or accepts their posts."""

    def __init__(self, ledger, **plan):
        self.ledger = ledger(Plan(validate_s=0.0, **plan))
        self.ledger.apply(Began(at=0.0, set=1, run="run"))
        for peer in (1, 2, 3):
            self.ledger.apply(Invited(at=0.0, code=str(peer), until=1e9))
            self.ledger.apply(Joined(at=0.0, peer=peer, code=str(peer), key=str(peer)))
            self.ledger.apply(Arrived(at=0.0, peer=peer, name="", samples=10, keeps=False))
        self.now, self.sets = 1.0, 1

    def reject(self, peer, strike):
        number = self.ledger.members[peer].number + 1
        entry = Rejected(at=self.now, peer=peer, number=number, contains=0, why="a reason", strike=strike)
        return self.ledger.apply(entry)

    def post(self, peer, length=1.0):
        self.sets += 1
        number, base = self.ledger.members[peer].number + 1, self.ledger.base
        entry = Posted(
            at=self.now, peer=peer, number=number, set=self.sets, contains=0, updates=1, base=base, length=length
        )
        return self.ledger.apply(entry)


def test_one_useless_post_is_not_a_strike_and_two_in_a_row_are_one():
    struck = Struck(SwapLedger)
    struck.reject(1, "again")
    struck.post(1)
    struck.reject(1, "again")
    assert struck.ledger.members[1].strikes == 0
    struck.reject(1, "again")
    assert struck.ledger.members[1].strikes == 1
    struck.reject(1, "no")
    assert struck.ledger.members[1].strikes == 1


def test_three_strikes_exclude_a_peer_for_a_minute():
    struck = Struck(SwapLedger)
    for _ in range(STRIKES):
        assert struck.ledger.out_s(1, struck.now) == 0
        struck.reject(1, "yes")
    assert struck.ledger.out_s(1, struck.now) == OUT_S
    for _ in range(5):
        struck.reject(1, "yes")  # posts of an excluded peer do not count
    struck.now += OUT_S
    assert struck.ledger.out_s(1, struck.now) == 0
    struck.reject(1, "yes")
    assert struck.ledger.out_s(1, struck.now) == 2 * OUT_S
    struck.now += 2 * OUT_S
    for _ in range(GOOD_POSTS * (STRIKES - 1)):
        assert struck.ledger.members[1].strikes
        struck.post(1)
    assert (struck.ledger.members[1].strikes, struck.ledger.members[1].outs) == (0, 0)
    for _ in range(20 * STRIKES):
        struck.now += struck.ledger.out_s(1, struck.now)
        struck.reject(1, "yes")
    assert struck.ledger.out_s(1, struck.now) == LONGEST_OUT_S


def test_the_longest_training_of_a_peer_survives_a_restart():
    struck = Struck(SwapLedger)
    for length in (1.0, 3.0, 2.0):
        struck.post(1, length)
    again = SwapLedger(struck.ledger.plan)
    again.restore(struck.ledger.state())
    assert (again.members[1].length, again.members[1].longest) == (2.0, 3.0)


def test_strikes_survive_a_restart():
    struck = Struck(SwapLedger)
    for _ in range(STRIKES):
        struck.reject(1, "yes")
    again = SwapLedger(struck.ledger.plan)
    again.restore(struck.ledger.state())
    assert again.state() == struck.ledger.state()
    assert again.out_s(1, struck.now) == OUT_S


def test_a_round_does_not_wait_for_a_peer_whose_post_was_rejected():
    struck = Struck(RoundLedger, way="rounds", merge="mean")
    struck.post(1)
    struck.reject(2, "again")
    means = struck.post(3)
    assert [mean.of for mean in means] == [(2, 3)]
