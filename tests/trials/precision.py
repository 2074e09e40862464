"""Compare the accuracy of mixed precision with that of float32: three models, three seeds.

    KERAS_BACKEND=jax python -m tests.trials.precision [--models dense cnn attention] [--seeds 0 1 2] [--epochs 4]

Two workers in one process train on 6,000 digits of MNIST, and the master tests on 10,000. For each model and format, the
mean accuracy over the seeds may be at most half a point below the mean of float32. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import ddlf
from ddlf.testing import in_process_cluster

TRAINED, TESTED = 6000, 10_000
FORMATS = ("float32", "mixed_bfloat16", "mixed_float16")
ALLOWED = 0.005


class Digits(ddlf.IApp):
    """An app that trains one of three models on digits of MNIST."""

    verbose = False
    batch_size = 64
    kind = "dense"
    samples, tested = TRAINED, TESTED

    async def load_dataset(self) -> None:
        """Take the first digits."""
        (x, y), (x_test, y_test) = ddlf.load_mnist()
        self.x_train, self.y_train = x[: self.samples], y[: self.samples]
        self.x_test, self.y_test = x_test[: self.tested], y_test[: self.tested]

    async def create_model(self) -> None:
        """Make a dense network, a convolutional one, or one with attention over the rows of a picture."""
        import keras
        from keras import layers

        shape = self.x_train.shape[1:]
        inputs = keras.Input(shape)
        pictures = layers.Reshape((28, 28, 1))(inputs)
        if self.kind == "dense":
            features = layers.Dense(128, "relu")(layers.Flatten()(inputs))
        elif self.kind == "cnn":
            features = layers.Conv2D(16, 3, strides=2, activation="relu")(pictures)
            features = layers.BatchNormalization()(features)
            features = layers.Flatten()(layers.Conv2D(32, 3, strides=2, activation="relu")(features))
        else:
            rows = layers.Dense(32)(layers.Reshape((28, 28))(pictures))
            rows = layers.LayerNormalization()(rows + layers.MultiHeadAttention(2, 16)(rows, rows))
            features = layers.Flatten()(layers.Dense(32, "gelu")(rows))
        outputs = layers.Dense(10, "softmax", dtype="float32")(features)
        self.model = keras.Model(inputs, outputs)
        sparse = self.y_train.ndim == 1
        loss = "sparse_categorical_crossentropy" if sparse else "categorical_crossentropy"
        self.model.compile("adam", loss, metrics=["accuracy"])


async def accuracy(kind: str, format: str, seed: int, epochs: int, **changes: object) -> float:
    """Train a model once, and return its accuracy on the test data."""
    async with in_process_cluster(2) as cluster:
        app = Digits(cluster)
        app.kind, app.precision, app.seed, app.master_epochs = kind, format, seed, epochs
        vars(app).update(changes)
        await app.train_sync()
        return (await app.evaluate_model())["accuracy"]


def rows(
    kinds: Sequence[str], seeds: Sequence[int], epochs: int, **changes: object
) -> list[tuple[str, str, list[float]]]:
    """Train each model with each format and seed, print the accuracies, and return them."""
    results = []
    for kind in kinds:
        for format in FORMATS:
            begin = time.monotonic()
            accuracies = [asyncio.run(accuracy(kind, format, seed, epochs, **changes)) for seed in seeds]
            took = (time.monotonic() - begin) / len(seeds)
            values = ", ".join(f"{value:.2%}" for value in accuracies)
            print(
                f"{kind:<10} {format:<15} {values}; mean {statistics.mean(accuracies):.2%}, {took:.0f} s each",
                flush=True,
            )
            results.append((kind, format, accuracies))
    return results


def lower(results: Sequence[tuple[str, str, list[float]]], allowed: float = ALLOWED) -> list[str]:
    """Return a sentence for each format whose mean accuracy is lower than allowed."""
    usual = {kind: statistics.mean(accuracies) for kind, format, accuracies in results if format == "float32"}
    return [
        f"{kind} with {format} is {usual[kind] - mean:.2%} below float32"
        for kind, format, accuracies in results
        if (mean := statistics.mean(accuracies)) < usual[kind] - allowed
    ]


def main() -> int:
    """Run the trial. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["dense", "cnn", "attention"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    wrong = lower(rows(options.models, options.seeds, options.epochs))
    print("\n".join(wrong) or "each format is within half a point of float32")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
