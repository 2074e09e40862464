"""Export eight models in all formats from TensorFlow, JAX and torch, and run each file in its own runtime.

    python -m tests.trials.export [--models mlp,lstm] [--formats onnx,stablehlo] [--backends tensorflow,jax,torch] [--batches 1,7,64]
                                  [--markdown]

It needs all of ``pip install 'ddlf[tensorflow,export,export-torch]' jax``. It skips missing packages, and says so. Each
file runs with batches of 1, 7 and 64. The trial compares it with Keras on the backend that wrote it. The difference must
be at most 1e-5. Otherwise the row must name the program that refuses the model, and its reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.extras.export.export import loadable, plan, write
from ddlf.extras.export.formats import ALL, BACKENDS, FORMATS, installed_backends
from ddlf.extras.export.source import find
from ddlf.extras.export.steps import StepRunner
from ddlf.extras.export.verify import BATCHES, TOLERANCE, BackendComparison, Row, compare
from tests.trials.options import read_options

MLP = """mlp:input shape=[64]; mlp:output shape=[10];
mlp:layers dense(shapes=[[48],[24]], activation=relu), dense(shape=[10], activation=softmax);
dense:layers matmul(w), add(b), activation();
"""


def cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, padding="same", strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def lstm(keras: Any) -> Any:
    return keras.Sequential([keras.Input((12, 8)), keras.layers.LSTM(16), keras.layers.Dense(4)])


def residual(keras: Any) -> Any:
    layers = keras.layers
    x = into = keras.Input((8, 8, 6))
    for _ in range(2):
        y = layers.Conv2D(6, 3, padding="same", activation="relu")(x)
        x = layers.add([x, layers.Conv2D(6, 3, padding="same")(y)])
    return keras.Model(into, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def attention(keras: Any) -> Any:
    layers = keras.layers
    into = keras.Input((10, 16))
    x = layers.LayerNormalization()(into)
    x = into + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    return keras.Model(into, layers.Dense(5)(layers.Dense(32, activation="gelu")(x)))


def two(keras: Any) -> Any:
    """Return a model that reveals swapped inputs or outputs.

    The outputs have equal shapes, and the order of the inputs differs from the order of their names.
    """
    layers = keras.layers
    right, left = keras.Input((6,), name="right"), keras.Input((6,), name="left")
    both = layers.concatenate([layers.Dense(8, activation="tanh")(right), layers.Dense(8, activation="relu")(left)])
    outputs = {name: layers.Dense(3, name=name)(both) for name in ("sum", "product")}
    return keras.Model({"right": right, "left": left}, outputs)


def embedding(keras: Any) -> Any:
    layers = keras.layers
    into = keras.Input((20,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(50, 12)(into))
    return keras.Model(into, layers.Dense(4, activation="softmax")(x))


def normalized(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(16, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


MADE: dict[str, Callable[[Any], Any]] = {
    make.__name__: make for make in (cnn, lstm, residual, attention, two, embedding, normalized)
}
MODELS = ("mlp", *MADE)


def make(folder: Path, names: list[str]) -> None:
    """Save models with weights like after some training: none is 0 or 1. This runs in another process, on any backend."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    for name in names:
        model = MADE[name](keras)
        model.set_weights(
            [
                weight + (random.uniform(0.1, 0.5, weight.shape) if weight.ndim == 1 else 0.0)
                for weight in model.get_weights()
            ]
        )
        model.save(folder / f"{name}.keras")


def rows_of(
    path: Path, formats: list[str], backend: str, tell: Callable[[str], None], batches: Sequence[int] = BATCHES
) -> list[Row]:
    """Write a model in all formats that a backend of Keras can write, and compare them with Keras on this backend."""
    source = find(path, None)
    targets = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as work:
        for name in formats:
            try:
                targets += plan(source, [FORMATS[name]], Path(folder), backend=backend)
            except ConfigError as error:
                tell(f"{path.stem:<12}{BACKENDS[backend]:<12}{name:<13}{error}")
        steps = StepRunner(Path(work), None)
        with loadable(source, steps, "tensorflow") as model:
            written = write(model, targets, source.stem, steps)
            comparison = BackendComparison(model, steps, backend, batches=batches)
            backends = installed_backends() if backend == installed_backends()[0] else [backend]
            return compare(comparison, backends, written, lambda row: tell(line_of(path.stem, backend, row)))


def line_of(model: str, backend: str, row: Row) -> str:
    """Return a row as a line of text."""
    return f"{model:<12}{BACKENDS[backend]:<12}{row.label:<13}{row.by:<38}{outcome(row)}"


def outcome(row: Row) -> str:
    """Return the cell of a row: a difference, or the program that refuses the model and its reason."""
    if row.lacking:
        return f"not installed; {row.lacking}"
    if row.refused is not None:
        return str(row.refused)
    return "reference" if row.difference is None else f"{row.difference:.0e}"


def table(rows_by_model: dict[tuple[str, str], list[Row]]) -> str:
    """Return all differences as a table of Markdown, with the refusals below."""
    columns: dict[tuple[str, str, str], None] = {}
    for (_, backend), rows in rows_by_model.items():
        columns |= {(backend, row.label, row.by): None for row in rows if row.label != "keras"}
    lines = [
        "| model | " + " | ".join(f"{kind}, {by}, from {BACKENDS[backend]}" for backend, kind, by in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    notes: dict[str, int] = {}
    for model in dict.fromkeys(model for model, _ in rows_by_model):
        cells = []
        for backend, kind, by in columns:
            row = next(
                (entry for entry in rows_by_model[model, backend] if (entry.label, entry.by) == (kind, by)), None
            )
            text = outcome(row) if row is not None else "-"
            cells.append(text if len(text) < 20 else f"({notes.setdefault(text, len(notes) + 1)})")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"({number}) {text}" for text, number in notes.items())])


def main(argv: list[str] | None = None) -> list[Row]:
    options = read_options(
        __doc__,
        argv,
        models=",".join(MODELS),
        formats=",".join(kind.name for kind in ALL),
        backends=",".join(installed_backends()),
        batches=",".join(map(str, BATCHES)),
        markdown=False,
    )
    names, formats = options.models.split(","), options.formats.split(",")
    rows_by_model = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.nnm").write_text(MLP)
        code = (
            "import sys, pathlib; from tests.trials import export; export.make(pathlib.Path(sys.argv[1]), sys.argv[2:])"
        )
        keras_models = [name for name in names if name != "mlp"]
        if keras_models:
            environment = {**os.environ, "KERAS_BACKEND": options.backends.split(",")[0]}
            subprocess.run(
                [sys.executable, "-c", code, str(folder), *keras_models],
                check=True,
                capture_output=True,
                env=environment,
            )
        for model in names:
            path = folder / ("mlp.nnm" if model == "mlp" else f"{model}.keras")
            for backend in options.backends.split(","):
                batches = [int(size) for size in options.batches.split(",")]
                rows_by_model[model, backend] = rows_of(
                    path, formats, backend, lambda line: print(line, flush=True), batches
                )
    if options.markdown:
        print(table(rows_by_model))
    return [row for rows in rows_by_model.values() for row in rows]


if __name__ == "__main__":
    far = [row for row in main() if row.refused is None and (row.difference or 0.0) > TOLERANCE]
    sys.exit(1 if far else 0)
