"""Tests of epsilon against the golden table and closed formulas, also with members that join and leave."""

import subprocess
import sys
from math import erfc, exp, log, sqrt

import pytest

from ddlf.errors import ConfigError
from ddlf.privacy.accountant import LARGE, Accountant, Cost, Noise, check_delta, epsilon

GOLDEN = {(1, 1): 4.3772, (1, 10): 17.8566, (2, 50): 20.6755, (4, 100): 13.2067}
"""Epsilon at delta = 1e-5 by noise multiplier and number of releases, from dp-accounting 0.6's PLDAccountant."""
ALL = Noise(multiplier=1.0)


def phi(x):
    return erfc(-x / sqrt(2)) / 2


def delta_of(eps, z, releases):
    """Return delta of composed Gaussian mechanisms, by equation 6 of Balle and Wang 2018."""
    mu = sqrt(releases) / z
    return phi(mu / 2 - eps / mu) - exp(eps) * phi(-mu / 2 - eps / mu)


def epsilon_of(z, releases):
    """Return epsilon at delta = 1e-5, by bisection."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, z, releases) > 1e-5 else (low, middle)
    return high


@pytest.mark.parametrize(("z", "releases"), GOLDEN)
def test_epsilon_equals_the_golden_table(z, releases):
    spent = epsilon({Noise(multiplier=z): releases}, 1e-5)
    assert spent == pytest.approx(GOLDEN[z, releases], abs=1e-3)
    assert spent == pytest.approx(epsilon_of(z, releases), abs=1e-6)


def test_epsilon_equals_the_privacy_loss_distribution_without_sampling():
    import dp_accounting

    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1.5), 3).compose(dp_accounting.GaussianDpEvent(0.8), 2)
    spent = epsilon({Noise(multiplier=1.5): 3, Noise(multiplier=0.8): 2}, 1e-5)
    assert spent == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-3)


def test_epsilon_of_poisson_batches_is_smaller_and_equals_dp_accounting():
    import dp_accounting

    step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    expected = dp_accounting.pld.PLDAccountant().compose(step, 1000).get_epsilon(1e-5)
    spent = epsilon({Noise(multiplier=1.0, sampled=0.01): 1000}, 1e-5)
    assert spent == pytest.approx(expected, abs=1e-3)
    assert spent == pytest.approx(1.8282, abs=1e-3)
    assert spent < epsilon({ALL: 1000}, 1e-5) / 100
    mixed = epsilon({Noise(multiplier=1.0, sampled=0.01): 1000, ALL: 1}, 1e-5)
    assert epsilon({ALL: 1}, 1e-5) < mixed < epsilon({ALL: 1}, 1e-5) + spent


def test_epsilon_of_little_noise_on_poisson_batches_is_an_upper_bound_at_once():
    """The exact loss distribution would take gigabytes. The number 660.47 is the exact epsilon of a smaller case."""
    moderate = {Noise(multiplier=0.5, sampled=0.4): 1000}
    assert 660.47 < epsilon(moderate, 1e-5) <= 2000 + 2 * sqrt(2000 * log(1e5))
    little = [epsilon({Noise(multiplier=z, sampled=0.4): 40}, 1e-5) for z in (1e-9, 1e-6, 0.01, 0.1)]
    assert little == sorted(little, reverse=True)
    assert little[-1] > LARGE


def test_accountant_counts_each_member_by_its_own_releases():
    """Peer a is in all rounds, b is lost after two, and c joins late. The post of d arrives too late, and does not count."""
    rounds = [("a", "b"), ("a", "b"), ("a",), ("a", "c"), ("a", "c")]
    accountant = Accountant(1e-5, [Cost(members=members, noise=Noise(multiplier=2.0)) for members in rounds])
    by_hand = {"a": 5, "b": 2, "c": 2}
    assert accountant.members() == list(by_hand)
    for member, count in by_hand.items():
        assert accountant.epsilon(member) == pytest.approx(epsilon_of(2.0, count), abs=1e-3)
    assert accountant.epsilon("d") == 0
    assert accountant.worst() == accountant.epsilon("a")
    assert accountant.releases == 5


def test_after_tells_the_cost_of_a_release_without_counting_it():
    accountant = Accountant(1e-5)
    release = Cost(members=("a", "b"), noise=ALL)
    assert accountant.worst() == 0
    assert accountant.after(release) == pytest.approx(4.3772, abs=1e-3)
    assert accountant.releases == 0
    accountant.add(Cost(members=("b",), noise=ALL, steps=9))
    assert accountant.after(release) == pytest.approx(17.8566, abs=1e-3)


@pytest.mark.parametrize("delta", [0, 1, -0.5, 2, float("nan")])
def test_accountant_refuses_an_impossible_delta(delta):
    with pytest.raises(ConfigError, match="delta must be above 0 and below 1"):
        Accountant(delta)


def test_check_delta_refuses_a_delta_that_publishes_a_sample():
    check_delta(1e-3, 999)
    with pytest.raises(ConfigError, match=r"delta = 0\.001 would let a run publish the data of one of 1,000"):
        check_delta(1e-3, 1000)


@pytest.mark.parametrize("values", [{"multiplier": 0}, {"multiplier": -1}, {"multiplier": float("inf")}])
def test_noise_refuses_a_useless_multiplier(values):
    with pytest.raises(ConfigError, match="finite and above 0"):
        Noise(**values)


@pytest.mark.parametrize("sampled", [0, -0.1, 1.1, float("nan")])
def test_noise_refuses_an_impossible_probability(sampled):
    with pytest.raises(ConfigError, match="probability of a sample"):
        Noise(multiplier=1, sampled=sampled)


def test_release_refuses_no_steps():
    with pytest.raises(ConfigError, match="one or more steps"):
        Cost(members=("a",), noise=ALL, steps=0)


def test_epsilon_names_the_command_without_dp_accounting(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        epsilon({Noise(multiplier=1.2345): 1}, 1e-5)
    assert "pip install 'ddlf[privacy]'" in str(caught.value)


def test_accountant_needs_dp_accounting_only_to_compute_an_epsilon():
    code = (
        "import sys; from ddlf.privacy.accountant import *;"
        "Accountant(1e-5, [Cost(members=('a',), noise=Noise(multiplier=1))]);"
        "assert not {'dp_accounting', 'scipy', 'keras'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
