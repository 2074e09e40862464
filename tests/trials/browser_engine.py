"""Compare the engine of browsers with Keras on random models of supported layers. The engine runs in Node, and in Chromium
with WebAssembly and with WebGPU in software.

python -m tests.trials.browser_engine [--graphs 100] [--steps 3] [--only node wasm webgpu]

Each case is one forward pass and some steps of training. WebAssembly must stay within 1e-5 of Keras, WebGPU within 1e-4.
A missing Node or Chromium is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from ddlf.peers.browser.assets import ENGINE
from tests.peers.browser import cases
from tests.peers.browser.cases import Case
from tests.peers.browser.models import BATCH, IMAGE, SEQUENCE, VECTOR, mnist_case, numbers
from tests.peers.browser.page import engine_page

HERE = Path(cases.__file__).parent
TOLERANCES = {"node": 1e-5, "wasm": 1e-5, "webgpu": 1e-4}
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
RUN = "async (text) => JSON.stringify(await engine.run(engine, JSON.parse(text)))"
SMOOTH = ("tanh", "sigmoid", "gelu", "silu", "softplus", "elu", "relu", "linear", "softsign", "mish")


def random_case(seed: int, steps: int) -> Case:
    """Return a case with a random functional model, which has branches and shared layers."""
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    shapes = [(VECTOR, SEQUENCE, IMAGE)[rng.integers(3)] for _ in range(rng.integers(1, 3))]
    entries = [keras.Input(shape) for shape in shapes]
    branches = []
    for x in entries:
        for _ in range(rng.integers(1, 5)):
            x = _some(rng, x)
        branches.append(x if len(x.shape) == 2 else layers.Flatten()(x))
    shared = layers.Dense(4, activation=_activation(rng))
    ends = [shared(layers.Dense(6)(x)) for x in branches]
    joined = (
        getattr(layers, rng.choice(["Add", "Concatenate", "Average", "Multiply"]))()(ends) if len(ends) > 1 else ends[0]
    )
    classes = bool(rng.integers(2))
    model = keras.Model(
        entries if len(entries) > 1 else entries[0], layers.Dense(3, activation="softmax" if classes else None)(joined)
    )
    kinds = keras.optimizers
    optimizer = (kinds.SGD(0.05), kinds.SGD(0.05, momentum=0.9, nesterov=True), kinds.Adagrad(0.02))[rng.integers(3)]
    model.compile(optimizer, "categorical_crossentropy" if classes else "huber", run_eagerly=True)
    batches = []
    for _ in range(steps):
        labels = np.eye(3, dtype="float32")[rng.integers(0, 3, BATCH)] if classes else numbers(rng, BATCH, 3)
        batches.append(([numbers(rng, BATCH, *shape) for shape in shapes], [labels]))
    return Case(f"graph {seed}", model, batches)


def _activation(rng: np.random.Generator) -> str:
    return str(rng.choice(SMOOTH))


def _some(rng: np.random.Generator, x: Any) -> Any:
    """Return x after one random layer, or after two branches that meet again."""
    if rng.random() < 0.2:
        width = x.shape[-1]
        return layers.Add()([x, layers.Dense(width, activation=_activation(rng))(x)])
    size, filters, activation = int(rng.integers(1, 4)), int(rng.integers(2, 5)), _activation(rng)
    padding = str(rng.choice(["valid", "same"]))
    choices: dict[int, Sequence[Any]] = {
        2: (
            layers.Dense(5, activation=activation),
            layers.BatchNormalization(),
            layers.LayerNormalization(),
            layers.Activation(activation),
            layers.RepeatVector(4),
        ),
        3: (
            layers.Conv1D(filters, size, padding="same", activation=activation),
            layers.SeparableConv1D(filters, size, padding="same"),
            layers.MaxPooling1D(2, strides=1, padding=padding),
            layers.AveragePooling1D(2, strides=1, padding="same"),
            layers.LSTM(3, return_sequences=True),
            layers.Bidirectional(layers.GRU(2, return_sequences=True)),
            layers.ZeroPadding1D(1),
            layers.UpSampling1D(2),
            layers.GlobalMaxPooling1D(),
            layers.RMSNormalization(),
        ),
        4: (
            layers.Conv2D(filters, size, padding="same", strides=int(rng.integers(1, 3)), activation=activation),
            layers.DepthwiseConv2D(size, padding="same"),
            layers.Conv2DTranspose(filters, size + 1, strides=int(rng.integers(1, 3)), padding=padding),
            layers.MaxPooling2D(2, padding="same"),
            layers.AveragePooling2D(2, padding="same"),
            layers.BatchNormalization(),
            layers.PReLU(shared_axes=[1, 2]),
            layers.GlobalAveragePooling2D(),
            layers.Permute((2, 1, 3)),
        ),
    }
    some = choices[len(x.shape)]
    return some[rng.integers(len(some))](x)


def in_node(all_cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the engine's result for each case, computed in Node."""
    node = shutil.which("node")
    assert node, "install it: apt-get install nodejs"
    lines = "\n".join(json.dumps(case.written) for case in all_cases)
    done = subprocess.run([node, str(HERE / "node.js"), str(ENGINE)], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield from map(json.loads, done.stdout.splitlines())


async def in_chromium(all_cases: Sequence[Case], device: str) -> list[dict[str, Any]]:
    """Return the engine's result for each case, computed in Chromium."""
    async with engine_page(device, WEBGPU if device == "webgpu" else ()) as page:
        return [json.loads(await page.evaluate(RUN, json.dumps(case.written))) for case in all_cases]


def differences(where: str, graphs: int, steps: int) -> list[str]:
    """Return the differences from Keras in one environment, such as ``"node"``, as sentences."""
    some = [*(random_case(seed, steps) for seed in range(graphs)), mnist_case(steps=1)]
    results = list(in_node(some)) if where == "node" else asyncio.run(in_chromium(some, where))
    return [line for case, result in zip(some, results, strict=True) for line in case.wrong(result, TOLERANCES[where])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=TOLERANCES, default=list(TOLERANCES))
    options = parser.parse_args(arguments)
    wrong = 0
    for where in options.only:
        differing = differences(where, options.graphs, options.steps)
        print(
            f"{where}: {options.graphs} graphs, {len(differing)} differences above {TOLERANCES[where]:g}",
            *differing,
            sep="\n",
        )
        wrong += len(differing)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
