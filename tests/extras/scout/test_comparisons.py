"""Tests of comparing other batch sizes, warm-ups and seeds, with made-up losses."""

import math

import pytest

from ddlf.extras.scout.comparisons import compare
from ddlf.extras.scout.halving import Curve, Point, Rung, Trial
from ddlf.extras.scout.scouting import line_of

RUNG = Rung(steps=40, starts=2)
CURVE = Curve(first=(2.0, 2.0), points=(Point(rate=0.1, steps=40, losses=(1.0, 1.0)),))


def answer(setting, loss, seeds=(0, 1), curve=CURVE):
    """Return the answer for made-up losses, and the trials."""
    comparison = compare(setting, curve, 0.1, RUNG, 16, seeds)
    trials = list(next(comparison))
    with pytest.raises(StopIteration) as end:
        comparison.send([loss(trial) for trial in trials])
    return end.value.value, trials


def test_batches_see_the_same_samples_at_three_rates():
    _, trials = answer("batch", lambda trial: 1.0)
    assert {trial.batch * trial.steps for trial in trials} == {640}
    assert [(trial.batch, trial.rate) for trial in trials if trial.start] == [
        *((8, rate) for rate in (0.05, 0.071, 0.1)),
        *((32, rate) for rate in (0.1, 0.14, 0.2)),
        *((64, rate) for rate in (0.1, 0.2, 0.4)),
    ]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("batch", "batch sizes with rates: 9 pairs, 2 starts, 10 to 80 steps each"),
        ("warmup", "warm-ups with rates: 6 pairs, 2 starts, 40 steps each"),
        ("seed", "1 rate, 2 starts, 40 steps each"),
    ],
)
def test_the_line_of_a_comparison_gives_the_number_of_its_trials(setting, line):
    _, trials = answer(setting, lambda trial: 1.0)
    assert line_of(trials) == line
    pairs = len({(trial.batch, trial.warmup, trial.rate) for trial in trials})
    assert len(trials) == 2 * pairs


@pytest.mark.parametrize(
    ("losses", "batch", "rate"),
    [
        ({}, 16, 0.1),  # no other batch size is as good
        ({(32, 0.14): 1.09}, 32, 0.14),  # the larger batch is as good with half of the steps
        ({(32, 0.14): 1.09, (8, 0.1): 0.95}, 16, 0.1),  # the larger batch is not near the smallest loss
        ({(32, 0.14): 1.09, (8, 0.1): 0.5}, 8, 0.1),
        ({(32, 0.14): 1.0, (64, 0.4): 1.09, (64, 0.2): 1.01}, 64, 0.2),
        ({(8, 0.1): 0.89}, 8, 0.1),
        ({(8, 0.1): 0.91}, 16, 0.1),
        ({(8, 0.1): math.nan}, 16, 0.1),
    ],
)
def test_a_larger_batch_wins_if_it_is_as_good_and_a_smaller_one_if_it_is_better(losses, batch, rate):
    also_answer, _ = answer("batch", lambda trial: losses.get((trial.batch, trial.rate), 1.5))
    assert (also_answer.chosen.value, also_answer.chosen.rate) == (batch, rate)


@pytest.mark.parametrize(("loss", "share"), [(0.91, 0.0), (0.89, 0.3)])
def test_a_warmup_must_be_better(loss, share):
    also_answer, trials = answer("warmup", lambda trial: loss if (trial.warmup, trial.rate) == (0.3, 0.2) else 1.0)
    assert trials[0] == Trial(rate=0.1, start=0, steps=40, warmup=0.1)
    assert also_answer.chosen.value == share


@pytest.mark.parametrize(("larger", "batch"), [(0.266, 16), (0.11, 64)])
def test_a_larger_batch_with_a_multiple_of_the_smallest_loss_is_not_as_good(larger, batch):
    curve = Curve(first=(5.3, 5.3), points=(Point(rate=0.1, steps=40, losses=(0.268, 0.268)),))
    losses = {(8, 0.1): 0.104, (64, 0.4): larger}
    also_answer, _ = answer("batch", lambda trial: losses.get((trial.batch, trial.rate), 1.5), curve=curve)
    assert also_answer.chosen.value == batch


def test_no_seed_is_chosen_by_its_loss():
    also_answer, trials = answer("seed", lambda trial: 1.0 - 0.1 * (trial.start == 2), seeds=(7, 8, 10))
    assert trials == [Trial(rate=0.1, start=start, steps=40) for start in range(3)]
    assert also_answer.chosen == also_answer.present
    assert [(variant.value, variant.loss) for variant in (also_answer.present, *also_answer.variants)] == [
        (7, 1.0),
        (8, 1.0),
        (10, 0.9),
    ]
