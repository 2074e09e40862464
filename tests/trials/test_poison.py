"""Test that a small model survives the bad updates of one of four slots, as docs/contributing/trials.md says."""

import pytest

from tests.trials import poison


@pytest.fixture(scope="module")
def accuracies():
    return poison.main(["--rounds", "8", "--seeds", "1"])


@pytest.mark.parametrize("sent", [name for name in poison.POISONS if name != "undisturbed"])
@pytest.mark.parametrize(("policy", "merge"), [("reject", "mean"), ("clip", "mean")])
def test_a_policy_protects_the_model_from_bad_updates_of_one_slot(accuracies, sent, policy, merge):
    assert accuracies[sent, policy, merge] == pytest.approx(accuracies["undisturbed", policy, merge], abs=0.02)


@pytest.mark.parametrize("sent", ["zeros", "x 1000", "sign flipped", "x -1000"])
@pytest.mark.parametrize("merge", ["median", "trimmed:0.25"])
def test_a_robust_merge_protects_the_model_without_a_policy(accuracies, sent, merge):
    assert accuracies[sent, "stop", merge] == pytest.approx(accuracies["undisturbed", "stop", merge], abs=0.02)


@pytest.mark.parametrize("merge", ["mean", "median", "trimmed:0.25"])
def test_the_default_policy_stops_at_a_nan(accuracies, merge):
    assert accuracies["NaN", "stop", merge] is None


def test_without_policy_and_robust_merge_the_model_is_ruined(accuracies):
    """Show that bad updates do harm without a protection, so the tests above are meaningful."""
    assert accuracies["x -1000", "stop", "mean"] < 0.5
