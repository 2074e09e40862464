"""Compare layers that are split between workers with whole layers: outputs, gradients, shares and bytes.

    python -m tests.trials.layer_plan [--backends tensorflow jax] [--workers 2 3] [--samples 64] [--cases "transformer block"]

Each case is split between 2 and 3 workers, which run as threads of one process. The trial compares outputs and gradients
with plain Keras. It reports the largest difference as a part of the largest value. For a small gradient, such as the bias of
keys, which is 0, the divisor is at least a thousandth of the largest value of all gradients.

*share* is the largest part of a layer's units, heads or image rows on one worker. *bytes* is the number of bytes that the
workers send in a batch of n samples. *formula* is the expected number. It has two kinds of terms, which both count once more
for the gradients:

- 4 n v (p - 1) bytes for each sum or gather of v values over p workers
- 4 n (k - s) w c (p - 1) bytes for a convolution by image rows with k rows, stride s, width w and c channels

The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.trials.options import read_options

CLOSE, LARGEST_SHARE, MOST_BYTES = 1e-5, 0.4, 1.05
TOKENS, WIDTH, HEADS = 32, 96, 6


@dataclass(frozen=True)
class Case:
    """A model, and the number of values that its workers must send.

    Args:
        build: A function that makes the model.
        split: The end of the setting ``split``.
        values: A function that returns the number of values for each sample on p workers, without gradients.
        shape: The shape of a sample.
        words: Whether samples consist of word numbers instead of real numbers.
    """

    build: Callable[[], Any]
    split: str
    values: Callable[[int], int]
    shape: tuple[int, ...]
    words: bool = False


def compiled(model: Any) -> Any:
    """Compile a model, and return it."""
    model.compile("sgd", "categorical_crossentropy")
    return model


def dense() -> Any:
    """Make a network 784-512-10."""
    import keras

    layers = keras.layers
    hidden = [layers.Dense(512, activation="relu"), layers.Dense(10, activation="softmax")]
    return compiled(keras.Sequential([keras.Input((784,)), *hidden]))


def cnn(padding: str) -> Any:
    """Make a network with three convolutions, two of them with stride 2."""
    import keras

    layers = keras.layers
    hidden = [
        layers.Conv2D(24, 3, padding=padding, activation="relu"),
        layers.Conv2D(48, 3, strides=2, padding=padding, activation="relu"),
        layers.Conv2D(48, 5, strides=2, padding=padding, activation="relu"),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]
    return compiled(keras.Sequential([keras.Input((32, 32, 3)), *hidden]))


def same() -> Any:
    """Make the convolutional network with zeros at the edges."""
    return cnn("same")


def valid() -> Any:
    """Make the convolutional network without zeros at the edges."""
    return cnn("valid")


def block() -> Any:
    """Make a transformer block, with a mean over the positions and a classifier."""
    import keras

    layers = keras.layers
    x = keras.Input((TOKENS,), dtype="int32")
    hidden = layers.Embedding(100, WIDTH)(x)
    attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(hidden, hidden)
    hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
    wide = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(hidden))
    hidden = layers.LayerNormalization()(layers.Add()([hidden, wide]))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return compiled(keras.Model(x, layers.Dense(10, activation="softmax")(hidden)))


def of_dense(p: int) -> int:
    """Return the values of the sum after the layer that is split by rows."""
    return 10 * (p - 1)


def of_filters(sizes: tuple[int, int]) -> Callable[[int], int]:
    """Return the values of the sums over channels after the second and the third convolution, and of the last sum."""
    return lambda p: (sum(size**2 * 48 for size in sizes) + 10) * (p - 1)


def of_rows(widths: tuple[int, int], channels: tuple[int, int] = (24, 48)) -> Callable[[int], int]:
    """Return the values at the borders of the second and third convolution, and of the last sum."""
    first, second = (3 - 2) * widths[0] * channels[0], (5 - 2) * widths[1] * channels[1]
    return lambda p: (first + second + 10) * (p - 1)


def of_block(p: int) -> int:
    """Return the values: two gathers and two sums of the width, two numbers of two normalizations, and the last sum."""
    return (TOKENS * WIDTH * 4 + 2 * 2 * TOKENS * p + 10) * (p - 1)


CASES = {
    "Dense 784-512-10": Case(dense, "", of_dense, (784,)),
    "CNN by filters, same": Case(same, ",images:filters", of_filters((16, 8)), (32, 32, 3)),
    "CNN by filters, valid": Case(valid, ",images:filters", of_filters((14, 5)), (32, 32, 3)),
    "CNN by rows, same": Case(same, ",images:rows", of_rows((32, 16)), (32, 32, 3)),
    "CNN by rows, valid": Case(valid, ",images:rows", of_rows((30, 14)), (32, 32, 3)),
    "transformer block": Case(block, "", of_block, (TOKENS,), words=True),
}


def difference(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of some arrays, each as a part of its largest value."""
    pairs, least = zip(actual, expected, strict=True), 1e-3 * max(float(np.abs(b).max()) for b in expected)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), least)) for a, b in pairs)


def compared(case: Case, workers: int, samples: int) -> dict[str, float]:
    """Return the differences, the share and the bytes of one case with a number of workers."""
    from tests.training.split.together import Parts, build_model, gradients_of

    chance = np.random.default_rng(0)
    size = (samples, *case.shape)
    x = chance.integers(0, 100, size, np.int32) if case.words else chance.normal(size=size).astype("float32")
    y = np.eye(10, dtype="float32")[chance.integers(0, 10, samples)]
    model = build_model(case.build)
    model._symbolic_build(data_batch=(x, y))
    expected = [np.asarray(gradient) for gradient in gradients_of(model, (x, y), samples, 1.0)]
    outputs = np.asarray(model(x, training=False))

    parts = Parts(case.build, f"within:{workers}{case.split}", samples, 1)
    by_weight = dict[int, dict[int, Any]]()
    for part, me in zip(parts.parts, parts.plan.parts, strict=True):
        for weight in me.weights:
            by_weight.setdefault(weight, {})

        def step(scale: float = 1.0, part: Any = part, me: Any = me) -> None:
            for variable, gradient in zip(part.trained, part._sums, strict=False):
                weight = next(i for i in me.weights if part._model.weights[i] is variable)
                by_weight[weight][part.number] = np.asarray(gradient)

        part.step = step
    parts.train((x, y), (0, 0))
    sent = sum(parts.sent_activations)
    gradients = [
        parts.plan.joined(weight, [gradient for _, gradient in sorted(by_weight[weight].items())])
        for weight in sorted(by_weight)
    ]
    units = {
        name: way.counted.counts
        for (name, *_), way in zip(parts.plan.layers(), parts.plan.program.ways, strict=True)
        if way.counted is not None
    }
    whole = [name for name, how, share, _ in parts.plan.layers() if how == "whole" and share]
    return {
        "outputs": difference([outputs_of(parts, x, y)], [outputs]),
        "gradients": difference(gradients, expected),
        "share": max(max(counts) / sum(counts) for counts in units.values()) if not whole else 1.0,
        "bytes": sent,
        "formula": 2 * 4 * samples * case.values(workers),
    }


def outputs_of(parts: Any, x: Any, y: Any) -> Any:
    """Return the outputs of a model in parts. The parts compute without compilation."""
    outputs = []
    for part in parts.parts:
        part._evaluated = lambda segment, received, data, part=part: part._run(
            segment, received, data, (), training=False
        )
    loss = parts.parts[-1]._model._compile_loss
    call = loss.call
    vars(loss)["call"] = lambda y, y_pred, weight=None: (outputs.append(np.asarray(y_pred)), call(y, y_pred, weight))[1]
    parts.evaluate([(x, y)])
    return outputs[0]


def child(cases: Sequence[str], workers: Sequence[int], samples: int) -> None:
    """Print a line of JSON for each case, with the backend of this process."""
    for name in cases:
        for count in workers:
            print(json.dumps({"case": name, "workers": count, **compared(CASES[name], count, samples)}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all cases on each backend, and print the table. Return the exit code."""
    lists: dict[str, Any] = {"backends": ["tensorflow", "jax"], "workers": [2, 3], "cases": [*CASES]}
    options = read_options(__doc__, argv, **lists, samples=64, child=False)
    if options.child:
        child(options.cases, options.workers, options.samples)
        return 0
    missed = 0
    print(
        "| backend | case | workers | outputs | gradients | share | bytes | formula |\n|---|---|---|---|---|---|---|---|"
    )
    for backend in options.backends:
        how = [*map(str, options.workers), "--samples", str(options.samples), "--cases", *options.cases, "--child"]
        command = [sys.executable, "-m", "tests.trials.layer_plan", "--workers", *how]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            row = json.loads(line)
            good = (
                max(row["outputs"], row["gradients"]) <= CLOSE
                and (row["workers"] != 3 or row["share"] <= LARGEST_SHARE)
                and row["bytes"] <= MOST_BYTES * row["formula"]
            )
            missed += not good
            sizes = f"{row['share']:.1%} | {row['bytes']:,} | {row['formula']:,}"
            differences = f"{row['outputs']:.1e} | {row['gradients']:.1e}"
            print(
                f"| {backend} | {row['case']} | {row['workers']} | {differences} | {sizes} |{'' if good else ' missed'}"
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
