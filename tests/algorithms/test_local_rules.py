"""Tests of the local rules: each equals the formula of its source."""

import numpy as np
import pytest

from ddlf.algorithms.local_rules import LOCAL, FedProx, Plain, Scaffold, mean_control
from ddlf.errors import ConfigError

A = np.diag([1.0, 3.0, 0.5])
"""The loss is ``0.5 (y - b) A (y - b)``. Each slot has another b."""
TARGETS = [np.array([1.0, -2.0, 0.5]), np.array([-3.0, 0.0, 2.0]), np.array([0.5, 0.5, -4.0])]
SGD = {"optimizer": "SGD", "optimizer learning_rate": 0.1, "optimizer momentum": 0.0, "optimizer clipnorm": "None"}


def trained(rule, w, target, control, mean, steps, rate):
    """Return the weights after some local steps with a rule."""
    anchors, y = rule.constant(w, control, mean), w
    for _ in range(steps):
        y = y - rate * (A @ (y - target) + rule.correction(y, anchors))
    return y


def test_fedprox_is_descent_on_the_loss_with_the_pull_added():
    rule, w, rate = FedProx(mu=0.3), np.array([0.2, 0.4, -1.0]), 0.1
    pulled = trained(rule, w, TARGETS[0], np.zeros(3), np.zeros(3), 10, rate)
    y = w
    for _ in range(10):
        y = y - rate * (A @ (y - TARGETS[0]) + 0.3 * (y - w))
    assert np.abs(pulled - y).max() < 1e-12
    plain = trained(Plain(), w, TARGETS[0], np.zeros(3), np.zeros(3), 10, rate)
    assert np.linalg.norm(pulled - w) < np.linalg.norm(plain - w)
    assert np.array_equal(trained(FedProx(mu=0), w, TARGETS[0], w, w, 10, rate), plain)


def test_scaffold_is_its_algorithm_over_ten_rounds():
    rule, rate, steps = Scaffold(), 0.1, 5
    w = w_source = np.zeros(3)
    controls, mean = [np.zeros(3) for _ in TARGETS], np.zeros(3)
    c_i, c = [np.zeros(3) for _ in TARGETS], np.zeros(3)
    for _ in range(10):
        after = [trained(rule, w, b, control, mean, steps, rate) for b, control in zip(TARGETS, controls, strict=True)]
        controls = [
            rule.new_control(control, mean, w - y, steps, rate) for control, y in zip(controls, after, strict=True)
        ]
        (mean,) = mean_control([[control] for control in controls])
        w = np.mean(after, axis=0)

        y_i = []
        for i, b in enumerate(TARGETS):
            y = w_source
            for _ in range(steps):
                y = y - rate * (A @ (y - b) - c_i[i] + c)
            y_i.append(y)
        new = [c_i[i] - c + (w_source - y_i[i]) / (steps * rate) for i in range(3)]
        w_source = w_source + sum(y - w_source for y in y_i) / 3
        c = c + sum(n - o for n, o in zip(new, c_i, strict=True)) / 3
        c_i = new
        assert np.abs(w - w_source).max() < 1e-12
        assert np.abs(mean - c).max() < 1e-12
        assert max(np.abs(a - b).max() for a, b in zip(controls, c_i, strict=True)) < 1e-12


def test_a_rate_of_0_does_not_change_a_control():
    control = np.ones(2)
    assert np.array_equal(Scaffold().new_control(control, np.zeros(2), np.zeros(2), 3, 0.0), control)


def test_the_mean_of_controls_counts_slots_without_a_control_as_zeros():
    three = np.full(2, 3.0, np.float32)
    assert mean_control([None, None]) is None
    mean = mean_control([[three, None], None, [3 * three, None]])
    assert (mean[0].dtype, mean[0].tolist(), mean[1]) == (np.float32, [4.0, 4.0], None)


def test_rules_are_written_as_text_with_their_parameters():
    assert LOCAL.read("fedprox:0.1") == FedProx(mu=0.1)
    assert str(LOCAL.read("fedprox")) == "fedprox:mu=0.01"
    assert [str(LOCAL.read(name)) for name in ("plain", "scaffold")] == ["plain", "scaffold"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedprox:-1", "mu must be finite and 0 or more, got -1.0; write it as fedprox:mu=0.01"),
        ("fedprox:nan", "mu must be finite and 0 or more, got nan"),
        ("fedprox:mu=a", "mu must be a number, got 'a'"),
        ("fedprox:mu=1,mu=2", "mu is given twice"),
        ("scaffold:rate=1", "scaffold has no parameters"),
        ("scafold", "unknown local rule 'scafold', did you mean 'scaffold'?"),
    ],
)
def test_an_impossible_rule_is_refused(text, sentence):
    with pytest.raises(ConfigError) as refused:
        LOCAL.read(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("optimizer", "description"),
    [
        ({"optimizer": "Adam"}, "Adam"),
        ({"optimizer": "NoneType"}, "NoneType"),
        (SGD | {"optimizer momentum": 0.9}, "SGD with momentum"),
        (SGD | {"optimizer clipnorm": 1.0, "optimizer weight_decay": 0.1}, "SGD with clipnorm, weight_decay"),
        (SGD | {"optimizer learning_rate": "CosineDecay(...)"}, "SGD with a schedule"),
    ],
)
def test_scaffold_refuses_optimizers_with_other_steps_than_gradients(optimizer, description):
    with pytest.raises(ConfigError, match=rf"needs plain SGD .*, but the model is compiled with {description};"):
        Scaffold().check_optimizer(optimizer)
    FedProx().check_optimizer(optimizer)
    Scaffold().check_optimizer(SGD)
