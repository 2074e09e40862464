"""Tests of the rules that decide open settings of a text: each applies to some facts, but not to similar ones."""

from dataclasses import replace

import pytest

from ddlf.extras.text.training.decisions import (
    RULES,
    InputStatistics,
    LabelStatistics,
    LearningTask,
    OutputStatistics,
    decide,
    loss,
    mismatch,
    scaling,
)

ROWS = LabelStatistics((10,), True, 0.0, 1.0, one_each=True, majority=0.1)
NUMBERS = LabelStatistics((), True, 0.0, 9.0, majority=0.1)
SOFTMAX = OutputStatistics("a", "softmax", (10,), "float32", ROWS)
FINE = InputStatistics("a", (4,), True, False, -1.0, 1.0, (0.0,) * 4, (1.0,) * 4, (2.0,) * 4)
FACTS = LearningTask((FINE,), (SOFTMAX,), 1000, 5000, ("matmul", "add", "relu"), 2, False)
SCE = replace(SOFTMAX, labels=NUMBERS, loss="SCE")
RARE = replace(SCE, labels=replace(NUMBERS, majority=0.96, counts=(96, 4, 0)))
QUANTITY = OutputStatistics("a", "linear", (1,), "float32", LabelStatistics((), False, -3.0, 3.0, sigma=1.0))
FAR = replace(QUANTITY, labels=LabelStatistics((), False, -3.0, 90.0, sigma=1.0, outlier_share=0.01))
QUANTITIES = replace(QUANTITY, block="b", loss="MSE", labels=replace(QUANTITY.labels, square=22.0))
LARGE = replace(QUANTITIES, labels=replace(QUANTITY.labels, square=24.0))
"""An output with a larger loss than 23, ten times the first loss of ten classes."""


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (replace(SOFTMAX, labels=NUMBERS), "SCE"),
        (replace(SOFTMAX, labels=replace(NUMBERS, shape=(1,))), "SCE"),
        (replace(SOFTMAX, last="linear", labels=NUMBERS), "SCE"),
        (SOFTMAX, "CCE"),
        (replace(SOFTMAX, labels=replace(ROWS, is_whole=False)), "KLD"),
        (replace(SOFTMAX, labels=replace(ROWS, majority=0.95)), "FOL"),
        (OutputStatistics("a", "sigmoid", (1,), "float32", LabelStatistics((), True, 0.0, 1.0, majority=0.6)), "BCE"),
        (OutputStatistics("a", "sigmoid", (1,), "float32", LabelStatistics((), True, 0.0, 1.0, majority=0.91)), "FOL"),
        (OutputStatistics("a", "sigmoid", (3,), "float32", LabelStatistics((3,), True, 0.0, 1.0)), "BCE"),
        (OutputStatistics("a", "sigmoid", (3,), "float32", LabelStatistics((3,), False, 0.1, 0.9)), "BCE"),
        (OutputStatistics("a", "sigmoid", (1,), "float32", LabelStatistics((), True, 0.0, 2.0)), "MSE"),
        (OutputStatistics("a", "tanh", (1,), "float32", LabelStatistics((), True, -1.0, 1.0)), "HIL"),
        (QUANTITY, "MSE"),
        (replace(QUANTITY, labels=LabelStatistics((), False, -3.0, 90.0, sigma=1.0, outlier_share=0.01)), "HUL"),
        (OutputStatistics("a", "linear", (96, 256), "float32", LabelStatistics((96,), True, 0.0, 255.0)), "SCE"),
    ],
)
def test_loss_follows_from_output_and_labels(output, value):
    assert loss(output)[0] == value


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (None, "write loss"),
        (replace(NUMBERS, low=1.0, high=10.0), "from 1 to 10: classes are whole numbers from 0 to 9"),
        (replace(NUMBERS, is_whole=False), "classes are whole numbers from 0 to 9"),
        (replace(ROWS, shape=(7,)), r"has the shape \[10\], and its labels have \[7\]"),
    ],
)
def test_loss_refuses_labels_that_it_cannot_compare(labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        loss(replace(SOFTMAX, labels=labels))


def test_huber_delta_is_a_multiple_of_the_deviation():
    output = replace(QUANTITY, labels=LabelStatistics((), False, -3.0, 90.0, sigma=2.0, outlier_share=0.01))
    decisions = {decision.key: decision for decision in decide(replace(FACTS, outputs=(output,)), ())}
    assert decisions["loss"].value == "HUL"
    assert float(decisions["delta"].value) == pytest.approx(1.345 * 2)
    written = {
        decision.key for decision in decide(replace(FACTS, outputs=(replace(output, loss="HUL"),)), {("a", "loss")})
    }
    assert "delta" in written
    assert "delta" not in {decision.key for decision in decide(replace(FACTS, outputs=(output,)), {("a", "delta")})}


def test_focal_alpha_is_the_fraction_of_zeros():
    labels = LabelStatistics((), True, 0.0, 1.0, majority=0.95, counts=(95, 5))
    output = OutputStatistics("a", "sigmoid", (1,), "float32", labels)
    decisions = {decision.key: decision.value for decision in decide(replace(FACTS, outputs=(output,)), ())}
    assert (decisions["loss"], decisions["alpha"]) == ("FOL", "0.95")
    assert "alpha" not in {decision.key for decision in decide(replace(FACTS, outputs=(SOFTMAX,)), ())}


@pytest.mark.parametrize(
    ("statistics", "value"),
    [
        (FINE, "none"),
        (
            replace(FINE, high=255.0, shape=(28, 28), means=(), deviations=(), ranges=()),
            "Rescaling(scale=0.0078125, offset=-0.992188)",
        ),
        (
            replace(FINE, high=12.0, means=(1.0, 0.0), deviations=(2.0, 0.0), ranges=(6.0, 0.0)),
            "Normalization(axis=-1, mean=[1, 0], variance=[4, 1])",
        ),
        (
            replace(FINE, ranges=(0.01, 2.0, 1.0, 1.0)),
            "Normalization(axis=-1, mean=[0, 0, 0, 0], variance=[1, 1, 1, 1])",
        ),
        (replace(FINE, high=255.0, scaled=True), "none"),
        (replace(FINE, high=255.0, numbers=False), "none"),
        (replace(FINE, high=float("nan")), "none"),
        (replace(FINE, low=0.0, high=255.0, means=(), ranges=()), "Rescaling(scale=0.00784314, offset=-1)"),
    ],
)
def test_scaling_acts_unless_the_model_scales(statistics, value):
    assert scaling(statistics)[0] == value


@pytest.mark.parametrize(
    ("key", "facts", "value"),
    [
        ("optimizer", FACTS, "adam"),
        ("initial", FACTS, "by_activation"),
        ("penalty", FACTS, "none"),
        ("penalty", replace(FACTS, parameters=10_001), "L2(l2=0.0001)"),
        ("penalty", replace(FACTS, parameters=10_001, layers=("Dense", "Dropout")), "none"),
        ("penalty", replace(FACTS, inputs=(replace(FINE, shape=(5001,)),)), "L1(l1=0.0001)"),
        ("penalty", replace(FACTS, parameters=0), "none"),
        ("clipping", FACTS, "none"),
        ("clipping", replace(FACTS, layers=("Embedding", "LSTM")), "1.0"),
        ("clipping", replace(FACTS, layers=("gru",)), "1.0"),
        ("patience", FACTS, "none"),
        ("patience", replace(FACTS, validation=True), "10"),
        ("loss_weights", FACTS, "none"),
        ("loss_weights", replace(FACTS, outputs=(SCE, QUANTITIES)), "none"),
        ("loss_weights", replace(FACTS, outputs=(SCE, LARGE)), "uncertainty(a=2.30259, b=24)"),
        ("loss_weights", replace(FACTS, outputs=(SCE, LARGE), weighted=True), "none"),
        ("loss_weights", replace(FACTS, outputs=(SCE, replace(LARGE, labels=None))), "none"),
        ("schedule", FACTS, "none"),
        ("schedule", replace(FACTS, layers=("LayerNormalization", "attend")), '"warmup:0.05,cosine"'),
        ("clip", replace(FACTS, depth=15), "none"),
        ("clip", replace(FACTS, depth=16), "agc"),
        ("clip", replace(FACTS, depth=16, layers=("Rescaling", "matmul")), "agc"),
        ("clip", replace(FACTS, depth=16, layers=("batchNorm", "matmul")), "none"),
        ("clip", replace(FACTS, inputs=(replace(FINE, peak=99.0),)), "none"),
        ("clip", replace(FACTS, inputs=(replace(FINE, peak=101.0),)), "rolling"),
        ("clip", replace(FACTS, inputs=(replace(FINE, peak=101.0),), layers=("lstm",)), "none"),
        ("clip", replace(FACTS, outputs=(replace(FAR, loss="MSE"),)), "rolling"),
        ("clip", replace(FACTS, outputs=(replace(FAR, loss="HUL"),)), "none"),
        ("class_weight", replace(FACTS, outputs=(SCE,)), "none"),
        ("class_weight", replace(FACTS, outputs=(RARE,)), "[0.520833, 12.5, 1]"),
        ("class_weight", replace(FACTS, outputs=(RARE,), weighted=True), "none"),
        ("class_weight", replace(FACTS, outputs=(RARE, RARE)), "none"),
        ("class_weight", replace(FACTS, outputs=(replace(RARE, labels=replace(RARE.labels, shape=(96,))),)), "none"),
        ("class_weight", replace(FACTS, outputs=(replace(RARE, loss="FOL", last="sigmoid"),)), "none"),
    ],
)
def test_rule_decides_its_key(key, facts, value):
    assert RULES[key](facts)[0] == value


def test_written_keys_are_never_decided():
    everything = {decision.key for decision in decide(FACTS, ())}
    assert everything == {"loss", *RULES}
    for key in RULES:
        assert key not in {decision.key for decision in decide(FACTS, {("train", key)})}
    assert "initial" not in {decision.key for decision in decide(replace(FACTS, drawn=False), ())}
    assert "loss" not in {decision.key for decision in decide(FACTS, {("a", "loss")})}
    assert "loss" not in {decision.key for decision in decide(FACTS, {("train", "loss")})}
    assert "loss" in {decision.key for decision in decide(FACTS, {("b", "loss")})}


@pytest.mark.parametrize(
    ("labels", "name", "sentence"),
    [
        (NUMBERS, "SCE", ""),
        (ROWS, "SCE", "write CCE"),
        (replace(NUMBERS, high=10.0), "SCE", "labels go from 0 to 10"),
        (ROWS, "CCE", ""),
        (NUMBERS, "CCE", "write SCE"),
        (None, "CCE", ""),
    ],
)
def test_mismatch_names_the_fitting_loss(labels, name, sentence):
    problem = mismatch(replace(SOFTMAX, labels=labels), name)
    assert bool(problem) == bool(sentence)
    assert sentence in problem


def test_single_output_takes_labels_of_one_number():
    assert mismatch(QUANTITY, "MSE") == ""
