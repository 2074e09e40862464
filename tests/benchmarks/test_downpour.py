"""The study of Downpour's rules in its shortest form: many replicas from old weights diverge with a fixed rate, and learn with the default."""

import numpy as np

from benchmarks import downpour
from tests.mnist import folder_with_mnist


def said(text):
    return downpour.parser().parse_args(text.split())


def test_the_gradients_are_those_of_differences():
    def squared(row):
        return float(np.square(nets.forward(row, nets.INPUTS[which])[1] - nets.TARGETS[which]).sum() / 2)

    nets = downpour.Xor([0, 1], hidden=3, replicas=5, examples=20)
    nets.weights = nets.weights.astype(np.float64)
    which = nets.parts[2][0]
    assert_is_gradient(nets.gradient(nets.weights, 2), squared, nets.weights)

    chance = np.random.default_rng(3)
    net = downpour.Mnist([chance.normal(size=(32, 6)), chance.integers(0, 10, 32), None, None], 0, hidden=4, replicas=1)

    def entropy(row):
        first, b, second, c = net.layers(row)
        logits = np.maximum(net.x @ first + b, 0) @ second + c
        return float(-np.mean(np.log(downpour.softmax(logits)[np.arange(32), net.y])))

    net.weights = net.weights.astype(np.float64)
    assert_is_gradient(net.gradient(net.weights, 0), entropy, net.weights)


def assert_is_gradient(found, loss, row):
    steps = np.eye(row.size) * 1e-6
    np.testing.assert_allclose(found, [(loss(row + s) - loss(row - s)) / 2e-6 for s in steps], rtol=1e-5, atol=1e-8)


def test_a_replica_is_as_stale_as_there_were_pushes_since_its_fetch_and_others_begin_with_what_one_alone_came_to():
    seen, held = [], []

    def gradient(row, replica):
        held.append((replica, float(row[0])))
        return np.array([-1.0], np.float32)

    order = downpour.order_of("turns", 3, 8, 2, np.random.default_rng(0))
    assert order == [0, 0, 0, 1, 2, 0, 1, 2]
    rule = downpour.PUSHED.read("sgd:rate=1")
    weights = np.zeros(1, np.float32)
    downpour.train(weights, gradient, rule, lambda tau: seen.append(tau) or 1.0, order, warm=2)
    assert seen == [0, 0, 0, 1, 2, 2, 2, 2]
    assert held == [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (0, 3), (1, 4), (2, 5)]
    assert weights.tolist() == [8]


def test_16_replicas_learn_with_the_default_and_not_with_a_fixed_rate(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    found = downpour.main(said("mnist --seeds 1 --samples 20000 --hidden 16"))
    assert {pair: accuracies[0] < 50 for pair, accuracies in found.items()} == {
        ("plain", "random"): True,
        ("plain", "turns"): True,
        ("default", "random"): False,
        ("default", "turns"): False,
    }
    assert "1 seeds, 16 replicas, 20000 samples, 16 hidden units" in capsys.readouterr().out


def test_where_a_fixed_rate_of_replicas_in_turns_diverges_staleness_divides_it():
    """At rate 12, as XOR's 25 replicas do; with fewer examples."""
    found = downpour.main(said("xor --seeds 4 --samples 20000 --orders turns --rules plain,aware --rate 12"))
    assert sum(found["plain", "turns"]) == 0
    assert sum(found["aware", "turns"]) >= 2
