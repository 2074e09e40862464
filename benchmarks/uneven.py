"""Compare every synchronous rule on MNIST with unevenly distributed labels.

    python -m benchmarks.uneven [--partition dirichlet:0.1] [--slots 8] [--rounds 20] [--seeds 3] [--samples 60000] [--rules NAME,NAME]
    python -m benchmarks.uneven --samples 4000 --seeds 1        # the short form

The output is the test accuracy after some rounds, with mean and spread over the seeds. The model is a small dense
network, with one local epoch a round and plain SGD. All runs of a seed have the same initial weights and the same
parts. The rules run in turns. The result depends only on the slots, so two workers carry them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import ddlf
from benchmarks.measure import some_of
from ddlf import Cluster

RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {"merge": "median"},
    "trimmed:0.2": {"merge": "trimmed:0.2"},
    "krum": {"merge": "krum:bad=1,keep=5"},
    "geometric": {"merge": "geometric"},
    "clipped": {"merge": "clipped"},
    "fedavgm 0.9": {"outer": "fedavgm:1.0,momentum=0.9"},
    "fedavgm 0.7": {"outer": "fedavgm:1.0,momentum=0.7"},
    "nesterov (DiLoCo)": {"outer": "nesterov"},
    "fedadagrad": {"outer": "fedadagrad:learning_rate=0.03"},
    "fedadam": {"outer": "fedadam:learning_rate=0.01"},
    "fedyogi": {"outer": "fedyogi:learning_rate=0.01"},
    "fedprox 0.1": {"local_rule": "fedprox:0.1"},
    "scaffold": {"local_rule": "scaffold"},
}


class Uneven(ddlf.IApp):
    """A dense network of 50,890 parameters on MNIST."""

    verbose = False
    samples = 60_000
    learning_rate = 0.05

    async def load_dataset(self) -> None:
        """Load MNIST and keep the first samples."""
        (self.x_train, self.y_train), (self.x_test, self.y_test) = ddlf.load_mnist()
        self.x_train, self.y_train = self.x_train[: self.samples], self.y_train[: self.samples]

    async def create_model(self) -> None:
        """One hidden layer of 64 units."""
        import keras
        from keras import layers

        shape = self.x_train.shape[1:]
        hidden = [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10, activation="softmax")]
        self.model = keras.Sequential([keras.Input(shape), *hidden])
        self.model.compile(keras.optimizers.SGD(self.learning_rate), "categorical_crossentropy", metrics=["accuracy"])


async def accuracy(cluster: Cluster, options: argparse.Namespace, seed: int, rule: dict[str, Any]) -> float:
    """Return the test accuracy after all rounds."""
    app = Uneven(cluster)
    app.samples, app.partition, app.slots = options.samples, options.partition, options.slots
    for name, value in rule.items():
        setattr(app, name, value)
    await app.train_sync(master_epochs=options.rounds, worker_epochs=1, batch_size=32, seed=seed)
    return (await app.evaluate_model())["accuracy"]


async def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train with every rule and seed, in turns, and print a table; returns the accuracies of each rule."""
    accuracies_of: dict[str, list[float]] = {name: [] for name in options.rules}
    async with Cluster.local(2) as cluster:
        for seed in range(options.seeds):
            for name, values in accuracies_of.items():
                values.append(await accuracy(cluster, options, seed, RULES[name]))
                print(f"seed {seed}  {name:<18} {values[-1]:.4f}", flush=True)
    usual = statistics.mean(accuracies_of["mean"]) if "mean" in accuracies_of else 0.0
    print(
        f"\n{options.partition}, {options.slots} slots, {options.rounds} rounds, {options.samples} samples, {options.seeds} seeds"
    )
    print(f"{'rule':<18} {'accuracy':>8} {'spread':>7} {'points to the mean':>19}")
    for name, values in accuracies_of.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(
            f"{name:<18} {statistics.mean(values):8.4f} {spread:7.4f} {100 * (statistics.mean(values) - usual):+19.1f}"
        )
    return accuracies_of


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--rules", type=some_of(RULES), default=list(RULES))
    return parser


if __name__ == "__main__":
    asyncio.run(run(arguments().parse_args()))
