"""Measure whether the gradient noise scale predicts how many samples other batch sizes need for the same accuracy.

    python -m benchmarks.equal_loss [--models mlp,cnn] [--batches 16,64,256,1024] [--seeds 3] [--target 0.95]

The theory (arXiv:1812.06162): a training with batch B needs samples in proportion to B + B_noise, if each batch size has
its best learning rate. B_noise = S / |g|^2 follows from the norms of gradients of two batch sizes b < B: |g|^2 = (B G_B^2
- b G_b^2) / (B - b) and S = (G_b^2 - G_B^2) / (1/b - 1/B). So samples to a target, each with the best rate of a grid, are
compared with the prediction of the noise scale at the first weights, which a plan could measure, and after a part of the
training. Bar: the batch sizes are in the right order, and each predicted factor is within 1.5 of the measured one.

It trains on one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from apps.mlp import MLP
from apps.mnist_cnn import MNISTCNN
from benchmarks.measure import Spread, some_of, table
from benchmarks.workload import SINGLE_THREADED

MODELS: dict[str, type] = {"mlp": MLP, "cnn": MNISTCNN}
RATES = (0.1, 0.03, 0.3)
WORSE = 1.5
"""A rate that needs this many times the samples of the best rate so far is not trained to its end. Likely rates come first."""
WITHIN = 1.5
SMALL, LARGE, BATCHES = 32, 1024, 16
"""b and B, and the number of large batches of an estimate. The small batches have as many samples in total."""
LOOK, LOOKS = 2_000, 20
"""Minimum number of samples between two tests. Later tests are a twentieth of the previous samples apart."""
AFTER = 0.5
"""The second estimate is made after this part of the samples that the smallest batch needs."""


def noise_scale(small: float, large: float, b: int, B: int) -> float:
    """Return B_noise; infinite if the noise hides the gradient.

    Args:
        small: Mean of the squared norm of the gradient of a batch of b.
        large: The same with a batch of B.
        b: The small batch size.
        B: The large one.
    """
    gradient = (B * large - b * small) / (B - b)
    noise = (small - large) / (1 / b - 1 / B)
    return noise / gradient if gradient > 0 else math.inf


def factors(batches: Sequence[int], scale: float) -> list[float]:
    """Return how many times the samples of the first batch size each batch size needs, by the theory."""
    if math.isinf(scale):
        return [1.0] * len(batches)
    return [(batch + scale) / (batches[0] + scale) for batch in batches]


def holds(measured: Sequence[float], predicted: Sequence[float]) -> bool:
    """Return whether predictions have the right order, and each is within a factor of ``WITHIN``."""
    order = sorted(range(len(measured)), key=measured.__getitem__) == sorted(
        range(len(measured)), key=predicted.__getitem__
    )
    return order and all(
        1 / WITHIN <= actual / expected <= WITHIN for actual, expected in zip(measured, predicted, strict=True)
    )


class Trainer:
    """Trains one model several times with plain gradient descent.

    Args:
        name: A name in ``MODELS``.
        samples: Number of training samples; None for all.
        tested: Number of test samples.
    """

    def __init__(self, name: str, samples: int | None = None, tested: int = 5_000) -> None:
        os.environ.update(SINGLE_THREADED)
        import tensorflow as tf

        self._tf, self._app = tf, MODELS[name]()
        asyncio.run(self._app.load_dataset())
        self._x, self._y = (tf.constant(array[:samples]) for array in (self._app.x_train, self._app.y_train))
        self._x_test, self._y_test = (tf.constant(array[:tested]) for array in (self._app.x_test, self._app.y_test))
        asyncio.run(self._app.create_model())
        self.model, self.samples = self._app.model, len(self._x)
        signature = tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([], tf.float32)
        self._steps = tf.function(self._some_steps, input_signature=signature)
        self._test = tf.function(self._one_test)
        self._norm = tf.function(self._one_norm, reduce_retracing=True)

    def begin(self, seed: int) -> None:
        """Set the first weights by a seed."""
        import keras

        keras.utils.set_random_seed(seed)
        self.model.set_weights(keras.models.clone_model(self.model).get_weights())
        self._chance, self._left = np.random.default_rng(seed), np.array([], np.int64)

    def _next(self, count: int) -> Any:
        """Return the numbers of the next samples, in an order that changes with each epoch."""
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._chance.permutation(self.samples)])
        chosen, self._left = self._left[:count], self._left[count:]
        return chosen

    def _gradients(self, x: Any, y: Any) -> Any:
        with self._tf.GradientTape() as tape:
            loss = self.model.compute_loss(x=x, y=y, y_pred=self.model(x, training=True))
        return tape.gradient(loss, self.model.trainable_variables)

    def _some_steps(self, chosen: Any, rate: Any) -> None:
        for indices in chosen:  # TensorFlow makes a loop of it, because calls from Python take longer than small steps
            gradients = self._gradients(self._tf.gather(self._x, indices), self._tf.gather(self._y, indices))
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True):
                variable.assign_sub(rate * gradient)

    def _one_norm(self, chosen: Any) -> Any:
        gradients = self._gradients(self._tf.gather(self._x, chosen), self._tf.gather(self._y, chosen))
        return self._tf.add_n([self._tf.reduce_sum(gradient**2) for gradient in gradients])

    def _one_test(self, x: Any, y: Any) -> Any:
        tf = self._tf
        right = tf.argmax(self.model(x, training=False), -1) == tf.argmax(y, -1)
        return tf.reduce_mean(tf.cast(right, "float32"))

    def accuracy(self) -> float:
        """Return the test accuracy."""
        return float(self._test(self._x_test, self._y_test))

    def noise(self, small: int = SMALL, large: int = LARGE, count: int = BATCHES) -> float:
        """Return B_noise at the present weights."""
        norms = {
            size: statistics.mean(float(self._norm(self._next(size))) for _ in range(count * large // size))
            for size in (small, large)
        }
        return noise_scale(norms[small], norms[large], small, large)

    def train(self, batch: int, rate: float, samples: int) -> int:
        """Train on at least so many samples, and return how many there were."""
        steps = -(-samples // batch)
        self._steps(self._next(steps * batch).reshape(steps, batch), self._tf.constant(rate))
        return steps * batch

    def to_target(self, seed: int, batch: int, rate: float, target: float, most: float) -> float:
        """Return the samples until the test accuracy is reached; infinite if that takes more than ``most``."""
        self.begin(seed)
        done = 0
        while done < most:
            done += self.train(batch, rate, max(LOOK, done // LOOKS))
            if self.accuracy() >= target:
                return float(done)
        return math.inf


def best(trainer: Trainer, batch: int, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Return the rate of a batch size with the least median of samples to the target, and the samples of each seed."""
    samples_of: dict[float, list[float]] = {}
    most = options.most * trainer.samples
    for rate in RATES:
        samples_of[rate] = [trainer.to_target(seed, batch, rate, options.target, most) for seed in range(options.seeds)]
        most = min(most, WORSE * statistics.median(samples_of[rate]))
    rate = min(samples_of, key=lambda candidate: statistics.median(samples_of[candidate]))
    return rate, samples_of[rate]


def study(name: str, options: argparse.Namespace) -> bool:
    """Print the table of one model, and return whether the prediction at the first weights holds."""
    trainer = Trainer(name, options.samples)
    first = []
    for seed in range(options.seeds):
        trainer.begin(seed)
        first.append(trainer.noise())
    print(f"{name}: B_noise at the first weights {Spread.of(first).text(',.0f')}", flush=True)
    rates, samples = list[float](), list[list[float]]()
    for batch in options.batches:
        rate, samples_needed = best(trainer, batch, options)
        print(f"{name}: batch {batch}: rate {rate:g}, samples {Spread.of(samples_needed).text(',.0f')}", flush=True)
        rates.append(rate)
        samples.append(samples_needed)
    middle = [statistics.median(values) for values in samples]
    later = []
    for seed in range(options.seeds):
        trainer.begin(seed)
        if math.isfinite(middle[0]):
            trainer.train(options.batches[0], rates[0], int(AFTER * middle[0]))
        later.append(trainer.noise())
    measured = [values / middle[0] for values in middle]
    scales = {"first": statistics.median(first), "later": statistics.median(later)}
    theory = {when: factors(options.batches, scale) for when, scale in scales.items()}
    rows = [["batch", "best rate", f"samples to {options.target:.0%}", "factor", "by noise, first", "by noise, later"]]
    for number, batch in enumerate(options.batches):
        text = [f"{theory[when][number]:.2f}" for when in theory]
        spread = Spread.of(samples[number]).text(",.0f")
        rows.append([str(batch), f"{rates[number]:g}", spread, f"{measured[number]:.2f}", *text])
    print(f"{name}: B_noise {scales['first']:,.0f} at the first weights, {scales['later']:,.0f} later")
    print(table(rows))
    for when, predicted in theory.items():
        print(f"{name}, {when}: {'holds' if holds(measured, predicted) else 'does NOT hold'} within {WITHIN}")
    return holds(measured, theory["first"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS))
    parser.add_argument(
        "--batches", type=lambda text: [int(size) for size in text.split(",")], default=[16, 64, 256, 1024]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--samples", type=int, help="number of training samples; default all")
    parser.add_argument("--most", type=float, default=60.0, help="maximum number of epochs for a rate")
    options = parser.parse_args(argv)
    is_met = [study(name, options) for name in options.models]
    print("the bar is met" if all(is_met) else "the bar is missed")


if __name__ == "__main__":
    main()
