"""Tests of the audit: it bounds the epsilon of the real release, and finds builds with little noise or wrong clips."""

import random
from functools import partial

import numpy as np
import pytest

from ddlf.cli.main import main
from ddlf.errors import ConfigError
from ddlf.peers.auditing import audit_rounds
from ddlf.peers.plan import Plan
from ddlf.privacy import release
from ddlf.privacy.accountant import Noise
from ddlf.privacy.audit import SHAPES, Canary, audit, audit_mechanism, released
from ddlf.privacy.release import Mechanism, Release, clipped, gaussian

SERVER = Mechanism(clip=2.0, noise=1.0, divisor=3)
NOBODY = Mechanism(clip=2.0, noise=1.0, divisor=3, least=3, trust="nobody")
FEW = 1_000


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch):
    """Give each test the same random bytes, because random audits refute a correct build in a few of a thousand cases."""
    monkeypatch.setattr(release, "gaussian", partial(gaussian, random=random.Random(7).randbytes))
    generator = np.random.default_rng(7)
    monkeypatch.setattr("ddlf.privacy.audit.coins", lambda runs: generator.random(runs) < 0.5)


def test_audit_finds_at_most_the_stated_epsilon_and_at_least_half_of_it():
    result = audit_mechanism(SERVER, runs=10_000)
    assert result.stated == pytest.approx(4.3772, abs=1e-3)
    assert result.stated / 2 <= result.as_gaussian <= result.stated
    assert result.stated / 2 <= result.as_any <= result.stated
    assert not result.is_refuted


@pytest.mark.parametrize("mechanism", [SERVER, NOBODY])
def test_audit_finds_half_of_the_noise(mechanism, monkeypatch):
    correct = release.gaussian_like
    assert not audit_mechanism(mechanism, runs=FEW).is_refuted
    monkeypatch.setattr(release, "gaussian_like", lambda tensor, std: correct(tensor, std / 2))
    result = audit_mechanism(mechanism, runs=FEW)
    assert result.is_refuted
    assert result.as_gaussian > 1.5 * result.stated


@pytest.mark.parametrize("mechanism", [SERVER, NOBODY])
def test_audit_finds_a_build_that_clips_each_tensor_alone(mechanism, monkeypatch):
    monkeypatch.setattr(release, "clipped", lambda update, clip: [clipped([tensor], clip)[0] for tensor in update])
    assert audit_mechanism(mechanism, runs=FEW).is_refuted


def test_audit_of_rounds_finds_half_of_the_noise(monkeypatch):
    plan = Plan(way="rounds", merge="mean", clip=2.0, noise=1.0, quorum=3)
    result = audit_rounds(plan, runs=4 * FEW)
    assert 0.5 * result.stated < result.as_gaussian <= result.stated
    correct = release.gaussian_like
    monkeypatch.setattr(release, "gaussian_like", lambda tensor, std: correct(tensor, std / 2))
    assert audit_rounds(plan, runs=FEW).is_refuted


class ClipsLate(Release):
    """Adds noise first, and clips the noised sum."""

    def _take(self, slot, update, count):
        for total, tensor in zip(self._sums.values(), update, strict=True):
            total += tensor
        self.count += 1

    def result(self):
        noised = [tensor * self.mechanism.divisor for tensor in super().result()]
        return [tensor / self.mechanism.divisor for tensor in clipped(noised, self.mechanism.clip)]


def test_audit_finds_a_build_that_clips_after_the_noise(monkeypatch):
    monkeypatch.setattr(release, "Release", ClipsLate)
    assert audit_mechanism(SERVER, runs=FEW).is_refuted


def test_audit_finds_a_tensor_without_noise(monkeypatch):
    correct = release.gaussian_like
    monkeypatch.setattr(release, "gaussian_like", lambda tensor, std: correct(tensor, std * (tensor.shape != (3, 2))))
    assert audit_mechanism(SERVER, runs=FEW).is_refuted


def test_audit_of_gaussian_noise_equals_the_formula():
    """An adversary who guesses at the middle is right with Phi(mu / 2), and this mu has the stated epsilon."""
    generator = np.random.default_rng(3)
    result = audit(lambda is_in: generator.normal(size=1) + is_in, Noise(multiplier=1.0), runs=60_000)
    assert 0.9 * result.stated < result.as_gaussian <= result.stated


@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_bound_for_any_noise_holds_for_the_release_that_reveals_most(delta):
    """It reveals the input with probability delta. Otherwise it is right with e^2 / (1 + e^2) (Kairouz et al. 2015)."""
    generator = np.random.default_rng(5)
    right = np.exp(2.0) / (1 + np.exp(2.0))

    def draw(is_in):
        tells_all = generator.random() < delta
        side = 1.0 if is_in else -1.0
        return np.array([3.0 * side if tells_all else side * (1.0 if generator.random() < right else -1.0)])

    result = audit(draw, Noise(multiplier=1.0), runs=20_000, delta=delta)
    assert 1.7 < result.as_any <= 2.0


def test_audit_finds_nothing_in_a_release_without_the_update():
    generator = np.random.default_rng(4)
    result = audit(lambda is_in: generator.normal(size=3), Noise(multiplier=1.0), runs=FEW)
    assert result.as_gaussian < 0.3
    assert result.as_any < 0.3


def test_audited_release_equals_clipped_updates_without_noise(monkeypatch):
    monkeypatch.setattr(release, "gaussian_like", lambda tensor, std: np.zeros(tensor.shape))
    canary = Canary(2.0)
    noiseless = released(SERVER, [canary.update, canary.zeros])
    assert [array.shape for array in noiseless] == list(SHAPES)
    assert canary.projections(noiseless).sum() == pytest.approx(2.0 / 3, rel=1e-6)


def test_audit_refuses_too_few_runs_and_an_impossible_delta():
    with pytest.raises(ConfigError, match="an audit needs 1,000 runs or more, got 999"):
        audit_mechanism(SERVER, runs=999)
    with pytest.raises(ConfigError, match="delta must be above 0 and below 1"):
        audit_mechanism(SERVER, delta=1.0)


def test_audit_refuses_a_clip_whose_worst_case_update_no_peer_could_send():
    with pytest.raises(ConfigError, match="which float32 cannot hold"):
        Canary(1e36)
    assert np.isfinite(Canary(1e35).update[0]).all()


def exit_code(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["peers", "audit", *arguments])
    return ended.value.code


def test_command_shows_the_bound_beside_the_stated_value(capsys):
    assert exit_code("--noise", "1", "--runs", "1000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "release   clip 1, noise 1; the server adds the noise"
    assert lines[1] == "stated    epsilon 4.377 at delta 1e-05, for one release"
    assert lines[-1].startswith("result    consistent")


def test_command_says_what_a_server_that_nobody_trusts_sees(capsys):
    assert exit_code("--noise", "2", "--trust", "nobody", "--least", "4", "--runs", "1000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "server    it sees each post alone, with one share of the noise: epsilon 4.377, which is not measured here"
    )


def test_command_fails_for_a_build_that_is_refuted(capsys, monkeypatch):
    monkeypatch.setattr(release, "gaussian_like", lambda tensor, std: np.zeros(tensor.shape))
    assert exit_code("--noise", "1", "--trust", "nobody", "--least", "2", "--runs", "1000") == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize("noise", ["0", "-1", "inf", "nan"])
def test_command_refuses_a_useless_noise(noise, capsys):
    assert exit_code(f"--noise={noise}") == 2
    assert "noise must be a finite number above 0" in capsys.readouterr().err
