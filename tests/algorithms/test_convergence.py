import pytest

from ddlf.algorithms.convergence import CONVERGE, Never, Target
from ddlf.errors import ConfigError


def test_the_mean_of_the_last_values_reaches_a_target():
    rule = CONVERGE.read("target:accuracy,0.97,last=3")
    values = [0.5, 0.99, 0.96, 0.95, 0.985, 0.985, 0.95]
    reached = [rule.reached(values[max(0, n - 3) : n]) for n in range(1, 8)]
    assert reached == [len(v) == 3 and sum(v) / 3 >= 0.97 for v in (values[max(0, n - 3) : n] for n in range(1, 8))]
    assert reached == [False, False, False, False, False, True, True]


def test_a_loss_reaches_its_target_from_above_and_nan_never_does():
    rule = Target(metric="val_loss", value=0.1, last=2)
    assert [rule.reached(values) for values in ([0.2, 0.1], [0.1, 0.1], [float("nan"), 0.0])] == [False, True, False]
    assert not Target(last=1).reached([float("nan")])
    assert not Never().reached([])


@pytest.mark.parametrize("metric", ["mae", "val_mse", "val_root_mean_squared_error", "test_binary_crossentropy"])
def test_every_metric_to_minimize_reaches_its_target_from_above(metric):
    rule = Target(metric=metric, value=0.1, last=1)
    assert [rule.reached([value]) for value in (5.0, 0.1)] == [False, True]


@pytest.mark.parametrize("rule", [Never(), Target(), Target(metric="test_loss", value=1e-3, last=1)])
def test_a_rule_is_written_as_text_and_read_back(rule):
    assert CONVERGE.read(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "target:0.97",
        "target:last=0",
        f"target:last={10**30}",
        "target:value=nan",
        "target:metric=",
        "target:x=1",
        "targt",
        "never:1",
    ],
)
def test_an_impossible_target_is_refused(text):
    with pytest.raises(ConfigError):
        CONVERGE.read(text)
