"""Measure the processor time of a training batch of 64 in WebAssembly, beside TensorFlow.js.

    python -m benchmarks.browser [--batches 30]

Both run in Node in one thread: the CNN of the WebNN paper, and an MLP 784-256-10. npm fetches TensorFlow.js into a
temporary folder. The output is the processor time of a batch, without the first ones, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ddlf.extras.text.conversion.weights import variables
from ddlf.peers.browser.assets import ENGINE
from ddlf.peers.browser.graph import layer_graph

HERE = Path(__file__).parent
TFJS = "@tensorflow/tfjs@4.22.0"


def cnn() -> Any:
    """Return the CNN of the WebNN paper, of 5,994 parameters."""
    layers = keras.layers
    convolution = [layers.Conv2D(8, 5, activation="relu"), layers.MaxPooling2D(2)]
    convolution += [layers.Conv2D(16, 5, activation="relu"), layers.MaxPooling2D(2)]
    model = keras.Sequential([keras.Input((28, 28, 1)), *convolution, layers.Flatten(), layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy")
    return model


def mlp() -> Any:
    """Return an MLP of 203,530 parameters."""
    layers = [keras.Input((784,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy")
    return model


def task(model: Any, batches: int) -> str:
    """Return the text that both programs read: the graph, weights, a batch, and how many times to train it."""
    rng = np.random.default_rng(1)
    inputs = rng.random((64, *model.input_shape[1:])) * (rng.random((64, *model.input_shape[1:])) > 0.8)
    weights = variables(model)
    return json.dumps(
        {
            "graph": layer_graph(model, weights),
            "weights": {name: value.numpy().ravel().tolist() for name, value in weights.items()},
            "inputs": {"data": inputs.ravel().tolist(), "shape": inputs.shape},
            "labels": {"data": np.eye(10)[rng.integers(0, 10, 64)].ravel().tolist(), "shape": [64, 10]},
            "batches": batches,
        }
    )


def milliseconds(program: str, text: str, *arguments: str, **options: Any) -> float:
    """Return the processor time of a batch in one program."""
    node = shutil.which("node")
    assert node, "install it: apt-get install nodejs npm"
    done = subprocess.run(
        [node, program, *arguments], input=text, capture_output=True, text=True, check=True, **options
    )
    return float(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "install", "--silent", "--ignore-scripts", TFJS], cwd=folder, check=True)
        other = shutil.copy(HERE / "tfjs.cjs", folder)
        for name, model in (("WebNN CNN", cnn()), ("MLP 784-256-10", mlp())):
            ours = milliseconds(str(HERE / "engine.mjs"), task(model, options.batches), str(ENGINE))
            tfjs = milliseconds(other, task(model, max(3, options.batches // 10)), cwd=folder)
            print(f"{name}: {ours:.1f} ms, TensorFlow.js on cpu {tfjs:.1f} ms, ratio {tfjs / ours:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
