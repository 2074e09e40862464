"""Measure how well many replicas of Downpour SGD learn with each push rule, in one process.

    python -m benchmarks.downpour xor [--seeds 200] [--hidden 4] [--rate 12] [--rules plain,aware] [--orders random,turns]
    python -m benchmarks.downpour mnist [--seeds 3] [--replicas 16] [--rules plain,default] [--rate 0.2] [--samples 60000]
    python -m benchmarks.downpour mnist --seeds 1 --samples 6000 --hidden 32      # the short form

The rules are DDLF's own, and NumPy replaces Keras. Only the order of the replicas is simulated. A replica fetches
weights, computes the gradient of one batch, and pushes it. Between its fetch and its push other replicas push, so its
gradient is stale. In ``random`` order each push comes from a replica that is drawn at random. In ``turns`` the replicas
push one after another.

``xor`` is the classic demo: 25 replicas, batches of one example, and one pass over 50,000 examples that are divided
among the replicas. It counts the seeds whose four outputs end within 0.1 of their targets. ``mnist`` trains a network
of 784-100-10 units with relu, in one pass with batches of 32, and prints the test accuracy in percent. Each rule has
the rate that is best for one replica.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import some_of, table
from ddlf.algorithms.push_rules import PUSHED, Pushed
from ddlf.algorithms.staleness import STALENESS, Staleness

Row = npt.NDArray[np.float32]
RULES = {
    "plain": ("sgd", "constant", 0),
    "aware": ("sgd", "inverse", 0),
    "aware-warm": ("sgd", "inverse", 200),
    "adagrad": ("adagrad", "constant", 0),
    "warm": ("adagrad", "constant", 200),
    "default": ("adagrad", "inverse", 200),
    "polynomial": ("sgd", "polynomial:a=0.5", 0),
    "hinge": ("sgd", "hinge", 0),
    "momentum": ("momentum", "constant", 0),
    "momentum-aware": ("momentum", "inverse", 0),
    "momentum-warm": ("momentum", "inverse", 200),
    "adam": ("adam", "constant", 0),
    "adam-aware": ("adam", "inverse", 0),
    "adam-warm": ("adam", "inverse", 200),
}
"""Each way by its name: push rule, staleness rule, and number of pushes of the first replica before the other replicas begin."""
ORDERS = ("random", "turns")
RATES = {
    "xor": {"sgd": 0.5, "adagrad": 0.2, "momentum": 0.05, "adam": 0.01},
    "mnist": {"sgd": 0.2, "adagrad": 0.05, "momentum": 0.02, "adam": 0.002},
}
"""The learning rate of each rule: for XOR the published one if it exists, for MNIST the best one of one replica."""
CHUNK = 10
"""Number of seeds of XOR that are computed together, with the same order of replicas."""


def order_of(kind: str, replicas: int, pushes: int, warm: int, chance: np.random.Generator) -> list[int]:
    """Return the replica of each push: the first replica while it is alone, then replicas in turns or at random."""
    rest = pushes - warm
    drawn = np.arange(rest) % replicas if kind == "turns" else chance.integers(0, replicas, rest)
    return [0] * warm + drawn.tolist()


def train(
    weights: Row,
    gradient: Callable[[Row, int], Row],
    rule: Pushed,
    factor: Callable[[int], float],
    order: Sequence[int],
    warm: int,
) -> None:
    """Apply the pushes of all replicas to one shard, in place.

    Args:
        weights: All values.
        gradient: Returns the gradient of a replica's next batch, at the replica's weights.
        rule: The rule of the server for a push.
        factor: Returns the factor of a step for the staleness of its push.
        order: The replica of each push.
        warm: The number of the push at which all replicas except the first one fetch and begin.
    """
    state = rule.start(weights.size)
    began = weights
    read: dict[int, tuple[int, Row]] = {}
    for version, replica in enumerate(order):
        if version in (0, warm):
            began = weights.copy()
        since, fetched = read.get(replica, (warm if version >= warm else 0, began))
        rule.apply(weights, state, gradient(fetched, replica), factor(version - since), version)
        read[replica] = version + 1, weights.copy()


class Xor:
    """Networks 2-hidden-1 of sigmoids with squared error, one of each seed; their weights are one row.

    Args:
        seeds: Seeds of the first weights and the examples.
        hidden: Units of the hidden layer.
        replicas: Number of replicas that share the examples, in order.
        examples: Number of examples for each seed.
    """

    INPUTS = np.array([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], np.float32)  # the first is the bias
    TARGETS = np.array([0, 1, 1, 0], np.float32)

    def __init__(self, seeds: Sequence[int], hidden: int, replicas: int, examples: int) -> None:
        chances = [np.random.default_rng(seed) for seed in seeds]
        self.hidden, self.count = hidden, 4 * hidden + 1
        self.weights = np.concatenate([chance.normal(0, 0.2, self.count) for chance in chances]).astype(np.float32)
        drawn = np.stack([chance.integers(0, 4, examples) for chance in chances], -1)
        self.parts = np.array_split(drawn, replicas)
        self.at = [0] * replicas

    def layers(self, row: Row) -> tuple[Row, Row]:
        """Return the weights for each seed, of shapes (hidden, 3) and (1 + hidden,); column and place 0 are biases."""
        both = row.reshape(-1, self.count)
        cut = 3 * self.hidden
        return both[:, :cut].reshape(-1, self.hidden, 3), both[:, cut:]

    def forward(self, row: Row, x: Row) -> tuple[Row, Row]:
        """Return the hidden units and the output of each seed."""
        first, second = self.layers(row)
        units = 1 / (1 + np.exp(-(first @ x[..., None])[..., 0]))
        return units, 1 / (1 + np.exp(-(second[:, 0] + (second[:, 1:] * units).sum(-1))))

    def gradient(self, row: Row, replica: int) -> Row:
        """Return the gradient of a replica's next example, for all seeds. After its last example, a replica starts again."""
        part, at = self.parts[replica], self.at[replica]
        case = part[at % len(part)]
        self.at[replica] = at + 1
        x = self.INPUTS[case]
        units, y = self.forward(row, x)
        delta = (y - self.TARGETS[case]) * y * (1 - y)
        inner = delta[:, None] * self.layers(row)[1][:, 1:] * units * (1 - units)
        first = (inner[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        return np.concatenate([first, delta[:, None], delta[:, None] * units], 1).reshape(-1)

    def learned(self) -> npt.NDArray[np.bool_]:
        """Return for each seed whether all four outputs are within 0.1 of their targets."""
        outputs = [
            self.forward(self.weights, np.broadcast_to(x, (len(self.weights) // self.count, 3)))[1] for x in self.INPUTS
        ]
        learned: npt.NDArray[np.bool_] = np.abs(np.stack(outputs, -1) - self.TARGETS).max(-1) < 0.1
        return learned


class Mnist:
    """A network 784-hidden-10, relu and softmax, with the mean cross-entropy of a batch of 32.

    Args:
        data: Images (n, 784) from -0.5 to 0.5 and labels, for training and for testing.
        seed: Seed of the first weights (Glorot's), and of the distribution of samples to replicas.
        hidden: Units of the hidden layer.
        replicas: Number of replicas that share the samples.
    """

    BATCH = 32

    def __init__(self, data: Sequence[Any], seed: int, hidden: int, replicas: int) -> None:
        self.x, self.y, self.x_test, self.y_test = data
        chance = np.random.default_rng(seed)
        inputs = self.x.shape[1]
        self.shapes = [(inputs, hidden), (hidden,), (hidden, 10), (10,)]
        parts = [
            chance.uniform(-1, 1, shape) * (6 / sum(shape)) ** 0.5 if len(shape) == 2 else np.zeros(shape)
            for shape in self.shapes
        ]
        self.weights = np.concatenate([part.ravel() for part in parts]).astype(np.float32)
        self.parts = np.array_split(chance.permutation(len(self.x)), replicas)
        self.at = [0] * replicas

    def layers(self, row: Row) -> list[Row]:
        """Return weights and biases, as views."""
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(row, ends), self.shapes, strict=True)]

    def gradient(self, row: Row, replica: int) -> Row:
        """Return the gradient of a replica's next batch. After its last batch, a replica starts again."""
        part, at = self.parts[replica], self.at[replica]
        rows = np.take(part, range(at, at + self.BATCH), mode="wrap")
        self.at[replica] = at + self.BATCH
        first, b, second, c = self.layers(row)
        x = self.x[rows]
        units = np.maximum(x @ first + b, 0)
        delta = softmax(units @ second + c)
        delta[np.arange(self.BATCH), self.y[rows]] -= 1
        delta /= self.BATCH
        inner = (delta @ second.T) * (units > 0)
        gradients = [x.T @ inner, inner.sum(0), units.T @ delta, delta.sum(0)]
        return np.concatenate([gradient.ravel() for gradient in gradients])

    def accuracy(self) -> float:
        """Return the accuracy on the test samples, in percent."""
        first, b, second, c = self.layers(self.weights)
        logits = np.maximum(self.x_test @ first + b, 0) @ second + c
        return 100 * float(np.mean(np.argmax(logits, -1) == self.y_test))


def softmax(logits: Row) -> Row:
    """Return the probabilities of each row."""
    e = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Row = e / e.sum(-1, keepdims=True)
    return probabilities


def mnist_data(samples: int) -> list[Any]:
    """Return the first training samples and all test samples, flat, from -0.5 to 0.5."""
    import ddlf

    (x, y), (x_test, y_test) = ddlf.load_mnist()
    flat = [images.reshape(len(images), -1) for images in (x[:samples], x_test)]
    return [flat[0], y[:samples].argmax(-1), flat[1], y_test.argmax(-1)]


def way(options: argparse.Namespace, name: str) -> tuple[Pushed, Staleness, int]:
    """Return the rule of the servers, the staleness rule, and the number of pushes of the first replica alone."""
    text, staleness, warm = RULES[name]
    rate = RATES[options.study][text] if options.rate is None else options.rate
    return PUSHED.read(f"{text}:rate={rate}"), STALENESS.read(staleness), warm


def xor(options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Return for each rule and order which seeds learned, as ones and zeros."""
    results: dict[tuple[str, str], list[float]] = {}
    for name in options.rules:
        rule, factor, warm = way(options, name)
        for kind in options.orders:
            learned: list[float] = []
            for low in range(0, options.seeds, CHUNK):
                nets = Xor(
                    range(low, min(low + CHUNK, options.seeds)), options.hidden, options.replicas, options.samples
                )
                order = order_of(kind, options.replicas, options.samples, warm, np.random.default_rng([1, low]))
                with np.errstate(over="ignore"):  # of exp, where a rate is too high: a sigmoid is 0 there
                    train(nets.weights, nets.gradient, rule, factor, order, warm)
                    learned += nets.learned().tolist()
            results[name, kind] = learned
            print(f"{name} {kind}: {int(sum(learned))} of {len(learned)} learned", flush=True)
    return results


def mnist(options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Return for each rule and order the test accuracy of each seed, in percent."""
    data, results = mnist_data(options.samples), dict[tuple[str, str], list[float]]()
    for name in options.rules:
        rule, factor, warm = way(options, name)
        for kind in options.orders:
            accuracies = []
            for seed in range(options.seeds):
                net = Mnist(data, seed, options.hidden, options.replicas)
                order = order_of(
                    kind, options.replicas, options.samples // Mnist.BATCH, warm, np.random.default_rng([1, seed])
                )
                train(net.weights, net.gradient, rule, factor, order, warm)
                accuracies.append(net.accuracy())
            results[name, kind] = accuracies
            print(f"{name} {kind}: {' '.join(f'{accuracy:.1f}' for accuracy in accuracies)} %", flush=True)
    return results


def main(options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Run a study and print a table. Return the result of each seed, by rule and order."""
    results = (xor if options.study == "xor" else mnist)(options)
    count = (
        f"{options.seeds} seeds, {options.replicas} replicas, {options.samples} samples, {options.hidden} hidden units"
    )
    print(f"\n{options.study}, {count}" + f", rate {options.rate}" * (options.rate is not None))
    share = 100 if options.study == "xor" else 1
    rows = [
        [name, *(f"{share * statistics.mean(results[name, kind]):.1f}" for kind in options.orders)]
        for name in options.rules
    ]
    print(table([["%", *options.orders], *rows]))
    return results


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = parser.add_subparsers(dest="study", required=True)
    for name, seeds, replicas, samples, hidden, rules in (
        ("xor", 200, 25, 50_000, 4, ["plain"]),
        ("mnist", 3, 16, 60_000, 100, ["plain", "default"]),
    ):
        study = studies.add_parser(name)
        study.add_argument("--seeds", type=int, default=seeds)
        study.add_argument("--replicas", type=int, default=replicas)
        study.add_argument("--samples", type=int, default=samples)
        study.add_argument("--hidden", type=int, default=hidden)
        study.add_argument("--rules", type=some_of(RULES), default=rules)
        study.add_argument("--orders", type=some_of(ORDERS), default=list(ORDERS))
        study.add_argument("--rate", type=float)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
