"""Compare models in stages with one process that adds up the same micro-batches.

    python -m tests.trials.split_alike [--backends tensorflow jax] [--models MLP CNN] [--steps 20] [--dtype float64]

Each model trains in 2 and in 3 stages. Each stage runs on its own thread with its own copy of the model, like on workers.
The table has the largest difference of a weight after all steps, and the largest relative difference of a metric. The
limits are 1e-6 with SGD and momentum, 1e-4 with Adam, and 1e-6 for metrics. The exit code is 1 if a difference is larger.

Dense layers have smooth activations: at the kink of a ReLU, a different last bit changes a whole gradient, and later steps
amplify the difference. With ``--dtype float64`` all limits are 1e-10. This distinguishes wrong mathematics from rounding,
which Adam amplifies where a gradient is near 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.trials.options import read_options

BATCH, MICRO_BATCHES = 64, 8
LAST = 40
"""Number of samples of the last batch."""
BARS = {"sgd": 1e-6, "momentum": 1e-6, "adam": 1e-4}
METRICS = 1e-6
DOUBLE = 1e-10
"""The largest allowed difference of weights and metrics in float64."""
WORDS, LENGTH = 1000, 32


def optimizer(name: str) -> Any:
    """Return an optimizer."""
    import keras

    optimizers = keras.optimizers
    makers = {
        "sgd": lambda: optimizers.SGD(0.01),
        "momentum": lambda: optimizers.SGD(0.005, momentum=0.9),
        "adam": lambda: optimizers.Adam(1e-3),
    }
    return makers[name]()


def classifier(inputs: Any, outputs: Any, name: str) -> Any:
    """Return a compiled model of 10 classes."""
    import keras

    model = keras.Model(inputs, outputs)
    model.compile(optimizer(name), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def mlp(name: str, dropout: float = 0.0) -> Any:
    """Return a network of dense layers for digits."""
    import keras

    layers = keras.layers
    x = hidden = keras.Input((784,))
    for units in (512, 256, 128):
        hidden = layers.Dense(units, activation="tanh")(hidden)
        hidden = layers.Dropout(dropout)(hidden) if dropout else hidden
    return classifier(x, layers.Dense(10, activation="softmax")(hidden), name)


def with_dropout(name: str) -> Any:
    """Return the network of dense layers with dropout between them."""
    return mlp(name, 0.3)


def cnn(name: str) -> Any:
    """Return a convolutional network for digits."""
    import keras

    layers = keras.layers
    x = keras.Input((28, 28, 1))
    hidden = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(x))
    hidden = layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu")(hidden))
    hidden = layers.Dropout(0.25)(layers.Dense(128, activation="relu")(layers.Flatten()(hidden)))
    return classifier(x, layers.Dense(10, activation="softmax")(hidden), name)


def skip(name: str) -> Any:
    """Return a network with a skip connection that crosses both cuts between three stages."""
    import keras

    layers = keras.layers
    x = keras.Input((784,))
    first = layers.Dense(256, activation="tanh")(x)
    second = layers.Dense(256, activation="tanh")(first)
    third = layers.Dense(256, activation="tanh")(second)
    return classifier(x, layers.Dense(10, activation="softmax")(layers.Add()([third, first])), name)


def transformer(name: str) -> Any:
    """Return a network that uses one block of a transformer twice."""
    import keras

    layers = keras.layers
    x = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, 64)(x)
    attend, first_norm, second_norm = (
        layers.MultiHeadAttention(4, 16),
        layers.LayerNormalization(),
        layers.LayerNormalization(),
    )
    wide, narrow = layers.Dense(256, activation="gelu"), layers.Dense(64)
    for _ in range(2):
        hidden = first_norm(layers.Add()([hidden, attend(hidden, hidden)]))
        hidden = second_norm(layers.Add()([hidden, narrow(wide(hidden))]))
    return classifier(x, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(hidden)), name)


def several(name: str) -> Any:
    """Return a network with two inputs and two outputs. An early stage computes one output."""
    import keras

    layers = keras.layers
    image, more = keras.Input((784,), name="image"), keras.Input((16,), name="more")
    hidden = layers.Dense(256, activation="tanh")(image)
    early = layers.Dense(1, name="early")(hidden)
    joined = layers.Concatenate()([layers.Dense(128, activation="tanh")(hidden), more])
    late = layers.Dense(10, activation="softmax", name="late")(layers.Dense(128, activation="tanh")(joined))
    model = keras.Model({"image": image, "more": more}, {"early": early, "late": late})
    losses = {"early": "mse", "late": "sparse_categorical_crossentropy"}
    metrics = {"late": ["accuracy"], "early": ["mae"]}
    model.compile(optimizer(name), loss=losses, loss_weights={"early": 0.5, "late": 1.0}, metrics=metrics)
    return model


MODELS: dict[str, Callable[[str], Any]] = {
    "MLP": mlp,
    "CNN": cnn,
    "skip over two cuts": skip,
    "transformer block, used twice": transformer,
    "two inputs and outputs": several,
    "dropout": with_dropout,
}


def batches(model: str, steps: int) -> list[tuple[Any, ...]]:
    """Return generated batches for a model. The last one is smaller."""
    import keras

    dtype = keras.config.floatx()
    chance, result = np.random.default_rng(7), list[tuple[Any, ...]]()
    for step in range(steps):
        count = LAST if step == steps - 1 else BATCH
        y = chance.integers(0, 10, count)
        image = (0.3 * chance.normal(size=(count, 784)) + 0.1 * y[:, None]).astype(dtype)
        if model == "CNN":
            result.append((image.reshape(count, 28, 28, 1), y))
        elif model.startswith("transformer"):
            result.append((chance.integers(0, WORDS, (count, LENGTH)).astype("int32"), y))
        elif model.startswith("two"):
            x = {"image": image, "more": chance.normal(size=(count, 16)).astype(dtype)}
            result.append((x, {"early": chance.normal(size=(count, 1)).astype(dtype), "late": y}))
        else:
            result.append((image, y))
    return result


def compared(model: str, name: str, stages: int, steps: int) -> tuple[float, float]:
    """Return the largest difference of a weight, and the largest relative difference of a metric."""
    from tests.training.models import distance
    from tests.training.split.together import Parts, trained_plain

    build, data = lambda: MODELS[model](name), batches(model, steps)
    parts = Parts(build, f"stages:{stages}", BATCH, MICRO_BATCHES)
    parts.begin_epoch()
    for number, batch in enumerate(data):
        parts.train(batch, (0, number))
    weights, metrics = trained_plain(build, data, MICRO_BATCHES)
    own_metrics = parts.metrics((steps - 1) * BATCH + LAST)
    assert own_metrics.keys() == metrics.keys()
    return distance(parts.weights(), weights), max(
        abs(own_metrics[metric] / value - 1) for metric, value in metrics.items()
    )


def rows(models: Sequence[str], steps: int, stages: Sequence[int], dtype: str) -> bool:
    """Print a row for each model, optimizer and number of stages. Return whether all differences are small enough."""
    import keras

    keras.config.set_floatx(dtype)
    double, fine = dtype == "float64", True
    for model in models:
        for name, bar in BARS.items():
            for count in stages:
                weights, metrics = compared(model, name, count, steps)
                within = weights <= (DOUBLE if double else bar) and metrics <= (DOUBLE if double else METRICS)
                fine = fine and within
                of = {"backend": keras.backend.backend(), "model": model, "optimizer": name, "stages": count}
                print(json.dumps({**of, "weights": weights, "metrics": metrics, "within": within}), flush=True)
    return fine


def main(argv: Sequence[str] | None = None) -> int:
    """Compare on each backend in a separate process. Return the exit code."""
    models, backends = list(MODELS), ["tensorflow", "jax"]
    numbers = {"steps": 20, "stages": [2, 3], "dtype": ("float32", "float64")}
    options = read_options(__doc__, argv, backends=backends, models=models, **numbers, here=False)
    if options.here:
        return 0 if rows(options.models, options.steps, options.stages, options.dtype) else 1
    again = [sys.executable, "-m", "tests.trials.split_alike", "--here", "--steps", str(options.steps)]
    again += ["--dtype", options.dtype]
    again += ["--stages", *map(str, options.stages), "--models", *options.models]
    wide = {"JAX_ENABLE_X64": "1"} if options.dtype == "float64" else {}
    codes = [
        subprocess.run(again, env={**os.environ, "KERAS_BACKEND": backend, **wide}, check=False).returncode
        for backend in options.backends
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
