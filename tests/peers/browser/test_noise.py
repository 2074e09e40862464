"""Tests that compare clipping and noise of the browser's peer, which runs in Node, with Python."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ddlf.peers.browser.assets import ENGINE
from ddlf.privacy import release
from ddlf.privacy.release import Mechanism, gaussian
from tests.patience import PATIENCE_S
from tests.privacy.test_release import is_normal


def test_a_browser_clips_and_adds_noise_as_python_does(monkeypatch):
    chance = np.random.default_rng(1)
    base = {"w": chance.normal(size=(2, 40)), "kept": chance.normal(size=3), "b": chance.normal(size=5)}
    base = {name: array.astype(np.float32) for name, array in base.items()}
    weights = {name: (array + chance.normal(size=array.shape)).astype(np.float32) for name, array in base.items()}
    trained, data = (True, False, True), chance.bytes(1600)
    plan = {"clip": 0.7, "noise": 1.5, "quorum": 3}
    case = {"bytes": list(data), "count": 77, "std": 2.0, "trained": ["w", "b"], "plan": plan, "many": 200_001}
    case |= {"given": {name: array.ravel().tolist() for name, array in base.items()}}
    case |= {"weights": {name: array.ravel().tolist() for name, array in weights.items()}}
    program = Path(__file__).with_name("noise.js")
    done = subprocess.run(
        ["node", program, ENGINE.as_uri()],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    output = json.loads(done.stdout)

    def fixed(count):
        return (data * (1 + count // len(data)))[:count]

    np.testing.assert_allclose(output["fixed"], gaussian(77, 2.0, fixed), rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(
        release, "gaussian_like", lambda array, std: gaussian(array.size, std, fixed).reshape(array.shape)
    )
    mechanism = Mechanism(clip=0.7, noise=1.5, divisor=3, least=3, trust="nobody")
    update = mechanism.protected([base[name] - weights[name] for name in base], trained)
    for (name, before), step in zip(base.items(), update, strict=True):
        expected = (before - step).ravel()
        np.testing.assert_allclose(output["hidden"][name], expected, atol=3e-7, err_msg=name)
    np.testing.assert_array_equal(np.float32(output["hidden"]["kept"]), base["kept"])
    first, second = np.array(output["many"])
    assert first.std() == pytest.approx(2.0, rel=0.01)
    assert is_normal(first / 2.0, second / 2.0)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02  # 8 standard deviations


def test_a_peer_in_a_browser_that_trusts_nobody_posts_only_hidden_updates():
    """The server answers "validate" and "replace" to each of two posts."""
    program = Path(__file__).with_name("hidden.js")
    done = subprocess.run(
        ["node", program, ENGINE.as_uri()], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    output = json.loads(done.stdout)
    assert output["sent"] == ["hello", "post", "post", "bye"]  # no score, because a metric has no noise
    # training subtracts 1 from each weight, and clipping reduces this update to the norm 2
    step = 2.0 / np.sqrt(20_000)
    for post, base, untrained in zip(output["posts"], (0.0, 0.5), (0.0, 7.0), strict=True):
        assert post["std"] == pytest.approx(3.0 * 2.0 / 2, rel=0.03)  # the share of the noise for a quorum of 4
        assert abs(post["mean"] - (base - step)) < 6 * 3.0 / np.sqrt(20_000)
        assert (post["kept"], post["accuracy"], post["loss"]) == ([untrained, untrained], -1, -1)
    assert 1 in output["epsilons"]  # from the answer to the first post
    # The first answer replaces all weights, so neither the remaining update nor the noise stays.
    assert output["loaded"][:2] == [[0.0, 0.0, 0.0], [0.5, 0.5, 7.0]]
