"""Train a small language model with DiLoCo: measure the loss after the same samples, and the exchanged bytes.

    python -m benchmarks.language [--epochs 3] [--steps 64] [--width 64] [--batch-size 8] [--rate 6e-3] [--rate-averaged 6e-3]
                                  [--outer nesterov:0.9,0.6] [--only diloco streaming]

A transformer of two blocks reads Python's help texts byte by byte. The reference averages the gradients of four slots
in each step. It is computed as one process with the batches of all slots together, which gives the same result. Its
bytes are those of an exchange of all weights in each step.

The other runs have four slots on one worker. AdamW stays with its slot, its rate falls by a cosine, and the bytes are
counted on the connection. *Peak* is the largest exchange except two: the first one sends all weights, and the last one
returns all fragments.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measure import table
from ddlf import Cluster, IApp

SLOTS, LENGTH, VOCABULARY = 4, 48, 128
INT4 = {"codec": "int4-block", "weights_codec": "delta:int4-block"}


class Language(IApp):
    """Predicts the next byte of a text.

    Attributes:
        width: Units of each position.
        blocks: Number of blocks. Each has attention and two dense layers.
        sequences: Training sequences; fewer if the text has fewer, and a multiple of what all slots read in a step.
        steps_in_all: Steps of each slot, for the schedule.
        rate: Highest learning rate of the schedule.
    """

    optimizer_state = "stays"
    slots = SLOTS
    verbose = False
    width = 64
    blocks = 2
    sequences = 8192
    steps_in_all = 1
    rate = 6e-3

    async def load_dataset(self) -> None:
        from pydoc_data import topics

        text = np.frombuffer("\n".join(topics.topics.values()).encode("ascii", "replace"), np.uint8)
        rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype(np.int32)
        rows = np.random.default_rng(0).permutation(rows)
        test, train = rows[:512], rows[512:]
        train = train[: min(self.sequences, len(train)) // (SLOTS * self.batch_size) * SLOTS * self.batch_size]
        self.x_train, self.y_train = train[:, :-1], train[:, 1:]
        self.x_test, self.y_test = test[:, :-1], test[:, 1:]

    async def create_model(self) -> None:
        import keras
        from keras import layers

        text = keras.Input((LENGTH,), dtype="int32")
        # Made from the input: of a constant the layer would be none of the model's, and its weights would never be trained.
        positions = layers.Embedding(LENGTH, self.width)(keras.ops.cumsum(keras.ops.ones_like(text), axis=1) - 1)
        x = layers.Embedding(VOCABULARY, self.width)(text) + positions
        for _ in range(self.blocks):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, self.width // 4)(y, y, use_causal_mask=True)
            y = layers.Dense(4 * self.width, activation="gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dense(self.width)(y)
        scores = layers.Dense(VOCABULARY)(layers.LayerNormalization()(x))
        self.model = keras.Model(text, scores)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(self.optimizer(), loss, metrics=["accuracy"])

    def optimizer(self) -> Any:
        """Return a new optimizer, with a falling rate."""
        import keras

        rate = keras.optimizers.schedules.CosineDecay(
            0.0, self.steps_in_all, alpha=0.05, warmup_target=self.rate, warmup_steps=max(1, self.steps_in_all // 20)
        )
        return keras.optimizers.AdamW(rate, weight_decay=0.1, beta_2=0.95, clipnorm=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a way of training.

    Args:
        loss: Loss on the test sequences, in nats per byte.
        bytes: Total number of exchanged bytes.
        peak: Bytes of the largest exchange, without the first and the last one.
    """

    loss: float
    bytes: float
    peak: float


async def main(options: argparse.Namespace) -> dict[str, Result]:
    """Train in each way and print a table; returns it by the names of the ways."""
    fragments = {"outer": "streaming:fragments=5", "worker_steps": max(1, options.steps // 5)}
    ways: dict[str, dict[str, Any]] = {
        "diloco": {"outer": options.outer},
        "streaming": fragments,
        "diloco, int4": {"outer": options.outer, **INT4},
        "streaming, int4": fragments | INT4,
        "average of 10 steps, int4": {"worker_steps": 10, **INT4},
    }
    results: dict[str, Result] = {}
    async with Cluster.local(1) as cluster:
        app = await _app(cluster, options)
        steps = app.steps_in_all
        for name, settings in ways.items():
            if options.only and name not in options.only:
                continue
            trained_app = await _app(cluster, options)
            vars(trained_app).update(
                {"worker_steps": options.steps, "master_epochs": options.epochs, "seed": options.seed, **settings}
            )
            records = await trained_app.train_model()
            moved = [record.bytes_out + record.bytes_back for record in records]
            loss = (await trained_app.evaluate_model())["loss"]
            results[name] = Result(loss=loss, bytes=sum(moved), peak=max(moved[1:-1], default=0))
            whole = 2 * SLOTS * sum(weight.nbytes for weight in trained_app.model.get_weights())
    import keras

    keras.utils.set_random_seed(options.seed)
    app.rate = options.rate_averaged
    await app.create_model()
    app.model.fit(app.x_train, app.y_train, SLOTS * app.batch_size, options.epochs, verbose=0)
    loss = app.model.evaluate(app.x_test, app.y_test, SLOTS * app.batch_size, verbose=0, return_dict=True)["loss"]
    results = {"averaged in each step": Result(loss=loss, bytes=steps * whole, peak=whole), **results}
    rows = [["", "loss", "beside it", "bytes", "1/", "peak bytes", "1/"]]
    first = results["averaged in each step"]
    for name, result in results.items():
        less, lower = first.bytes / result.bytes, first.peak / result.peak if result.peak else math.nan
        change = f"{result.loss / first.loss - 1:+.1%}"
        rows.append(
            [
                name,
                f"{result.loss:.4f}",
                change,
                f"{result.bytes:,.0f}",
                f"{less:.0f}",
                f"{result.peak:,.0f}",
                f"{lower:.1f}",
            ]
        )
    counts = (
        f"{app.model.count_params():,} weights, {len(app.x_train):,} sequences, {options.epochs} epochs, {steps} steps"
    )
    print(f"{counts}, an exchange after {options.steps}")
    print(table(rows))
    return results


async def _app(cluster: Cluster, options: argparse.Namespace) -> Language:
    app = Language(cluster)
    app.width, app.blocks, app.sequences, app.batch_size, app.rate = (
        options.width,
        options.blocks,
        options.sequences,
        options.batch_size,
        options.rate,
    )
    await app.load_dataset()
    app.steps_in_all = len(app.x_train) // (SLOTS * app.batch_size) * options.epochs
    return app


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64, help="batches of each slot between two exchanges of a weight")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences, of each slot")
    parser.add_argument("--rate", type=float, default=6e-3, help="highest learning rate of the slots")
    parser.add_argument("--rate-averaged", type=float, default=6e-3, help="that of averaging in each step")
    parser.add_argument("--outer", default="diloco", help="of the ways that are called diloco")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    return parser


if __name__ == "__main__":
    asyncio.run(main(arguments().parse_args()))
