"""Kill workers and the master of L-BFGS, count the master's bytes, and compare the number of passes with SciPy.

    python -m tests.trials.lbfgs [--only kills bytes scipy uneven] [--kills 20] [--masters 5] [--workers 3] [--seed 0] [--seeds 10]

- **kills**: A Keras app trains on ``ddlf-worker`` processes. ``kill -9`` ends executors. Between these kills it ends the
  master, which restarts and continues from the last checkpoint. The SHA-256 of the weights must equal the one of an
  undisturbed run.
- **bytes**: Count the bytes of the master in an iteration with 3 shards and 16 portions, by the number of its passes. This
  uses a model and another one that is ten times as large, with 1 and with 3 slots.
- **scipy**: Count the passes of DDLF and of SciPy's L-BFGS-B until the loss is within 1e-8 (float64) or 1e-5 (float32) of
  the minimum. The functions are Rosenbrock's function, a quadratic function in 20 dimensions, and softmax regression on
  6,000 samples of MNIST with L2 1e-3, as a Keras app. Rounding errors decide a single number of passes for the last
  function. So there is also the median over 10 random subsets of 1,000 samples, without Keras.
- **uneven**: Use four workers with simulated computing. One of them is 4 times as slow, or stops at its last portion.

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

import ddlf
from ddlf.algorithms.lbfgs import WolfeSearch
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.slot.numpy_model import NumpyModel
from ddlf.training.strategies.lbfgs import master
from tests.trials.killed import kills
from tests.trials.options import read_options

APP = "tests.trials.lbfgs:Points"


class Points(ddlf.IApp):
    """A small network on generated points, which trains with L-BFGS."""

    mode, verbose, threads = "lbfgs", False, 1
    tolerance = 0
    samples, width = 1_200, 30

    async def load_dataset(self) -> None:
        """Generate points. A linear model with noise gives their classes."""
        chance = np.random.default_rng(0)
        x = chance.normal(size=(self.samples, self.width)).astype("float32")
        scores = x @ chance.normal(size=(self.width, 5)) + chance.gumbel(size=(self.samples, 5))
        self.x_train, self.y_train = x, scores.argmax(1)

    async def create_model(self) -> None:
        """Make a network with one hidden layer and a little regularization."""
        import keras
        from keras import layers

        output = layers.Dense(5, "softmax", kernel_regularizer=keras.regularizers.L2(1e-4))
        self.model = keras.Sequential([keras.Input((self.width,)), layers.Dense(20, "tanh"), output])
        self.model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])


class Wide(Points):
    """A network with enough weights for three shards."""

    samples, width, units = 64, 100, 2_000
    tolerance = 0

    async def create_model(self) -> None:
        """Make a network with one wide hidden layer."""
        import keras
        from keras import layers

        hidden = layers.Dense(self.units, "tanh")
        output = layers.Dense(5, "softmax", kernel_regularizer=keras.regularizers.L2(1e-2))
        self.model = keras.Sequential([keras.Input((self.width,)), hidden, output])
        self.model.compile("sgd", "sparse_categorical_crossentropy")


class Softmax(ddlf.IApp):
    """Softmax regression on MNIST."""

    mode, verbose, threads, master_epochs = "lbfgs", False, 1, 3_000
    tolerance = 0
    samples = 6_000
    kind = "float64"

    async def load_dataset(self) -> None:
        """Take the first samples."""
        (x, y), _ = ddlf.load_mnist()
        self.x_train, self.y_train = x[: self.samples].reshape(-1, 784).astype(self.kind), y[: self.samples]

    async def create_model(self) -> None:
        """Make one layer that begins with zeros."""
        import keras

        keras.config.set_floatx(self.kind)
        layer = keras.layers.Dense(10, "softmax", kernel_initializer="zeros", kernel_regularizer=L2())
        self.model = keras.Sequential([keras.Input((784,)), layer])
        self.model.compile("sgd", "categorical_crossentropy")


PENALTY = 1e-3


def L2() -> Any:
    """Return half of the squared norm, times ``PENALTY``."""
    import keras

    return keras.regularizers.L2(PENALTY / 2)


# -- bytes -------------------------------------------------------------------------------------------------------------


async def master_bytes(units: int, slots: int, iterations: int = 20) -> dict[str, Any]:
    """Return the bytes that the master sends and receives in an iteration with all pairs, and the size of the model.

    Every second line search is stricter than usual, so that some iterations have two passes.

    Args:
        units: Units of the hidden layer.
        slots: Number of slots, which share the 16 portions.
        iterations: Number of iterations.
    """
    turns = itertools.cycle([0.9, 0.1])
    with patch.object(master, "WolfeSearch", lambda *args, **how: WolfeSearch(*args, curvature=next(turns), **how)):
        async with ddlf.Cluster.local(3) as cluster:
            app = Wide(cluster)
            app.units, app.master_epochs, app.slots, app.portion = units, iterations, slots, app.samples // 16
            await app.train_model()
    moved: dict[int, list[int]] = {}
    for record in app.history[12:]:
        moved.setdefault(int(record.metrics["passes"]), []).append(record.bytes_out + record.bytes_back)
    return {
        "parameters": app.model.count_params(),
        "slots": slots,
        "bytes by passes": {passes: statistics.median(some) for passes, some in sorted(moved.items())},
        "iterations by passes": {passes: len(some) for passes, some in sorted(moved.items())},
    }


# -- SciPy -------------------------------------------------------------------------------------------------------------


async def against_scipy(kind: str, within: float) -> dict[str, Any]:
    """Return the numbers of passes of DDLF and SciPy until the loss is near the minimum."""
    from scipy import optimize

    (x, y), _ = ddlf.load_mnist()
    x, y = x[: Softmax.samples].reshape(-1, 784).astype("float64"), y[: Softmax.samples].astype("float64")
    scipy_losses: list[float] = []

    def loss_of(row: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        kernel, bias = row[:7840].reshape(784, 10), row[7840:]
        scores = x @ kernel + bias
        scores -= scores.max(1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(1, keepdims=True)
        loss = -np.mean(np.log(np.maximum((p * y).sum(1), 1e-300))) + PENALTY / 2 * np.sum(kernel**2)
        slope = (p - y) / len(x)
        scipy_losses.append(float(loss))
        return float(loss), np.concatenate([(x.T @ slope + PENALTY * kernel).ravel(), slope.sum(0)])

    least = float(optimize.minimize(loss_of, np.zeros(7850), jac=True, method="L-BFGS-B", options=HOW).fun)
    async with ddlf.Cluster.local(2) as cluster:
        app = Softmax(cluster)
        app.kind = kind
        app.is_convergent = lambda record: record.loss <= least + within  # type: ignore[method-assign]
        await app.train_model()
    return {"function": "softmax regression", "type": kind, **compared(app.history, scipy_losses, least, within)}


HOW = {"maxcor": 10, "ftol": 0, "gtol": 1e-9, "maxiter": 3000, "maxfun": 3000}
"""Options of SciPy's L-BFGS-B. With them, only rounding errors end its search."""


def compared(history: Any, scipy_losses: Sequence[float], least: float, within: float) -> dict[str, Any]:
    """Return the numbers of passes of DDLF and SciPy until the loss was near the minimum.

    Args:
        history: The records of DDLF.
        scipy_losses: The losses that SciPy has computed.
        least: The minimum.
        within: The wanted distance to it.
    """
    reached = np.cumsum([record.metrics["passes"] for record in history])
    own_passes = next(
        (int(n) for n, record in zip(reached, history, strict=True) if record.loss <= least + within), None
    )
    scipy_passes = next(n for n, loss in enumerate(scipy_losses, 1) if loss <= least + within)
    return {
        "passes": own_passes,
        "passes of SciPy": scipy_passes,
        "ratio": None if own_passes is None else round(own_passes / scipy_passes, 3),
        "above the minimum": min(record.loss for record in history) - least,
        "ended": history.ended,
    }


def rosenbrock(row: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
    """Return Rosenbrock's function in two dimensions, and its gradient. Its minimum is 0."""
    from scipy import optimize

    return float(optimize.rosen(row)), optimize.rosen_der(row)


CURVES = np.logspace(0, 4, 20)
TURN = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 20)))[0]


def quadratic(row: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
    """Return the value and the gradient of a rotated quadratic function in 20 dimensions. Its minimum is 0.

    Its curvatures are from 1 to 10,000.
    """
    slope = TURN @ (CURVES * (TURN.T @ row))
    return float(row @ slope / 2), slope


def softmax_of(seed: int, samples: int = 1_000) -> tuple[Any, int]:
    """Return the loss of softmax regression on random samples of MNIST, and its number of weights.

    It does not use pixels that are 0 in all samples.

    Args:
        seed: Seed of the samples.
        samples: Number of samples.
    """
    (x, y), _ = ddlf.load_mnist()
    chosen = np.random.default_rng(seed).permutation(len(x))[:samples]
    x, y = x[chosen].reshape(samples, -1).astype("float64"), y[chosen].astype("float64")
    x = np.ascontiguousarray(x[:, x.any(0)])

    def softmax(row: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        kernel, bias = row[:-10].reshape(-1, 10), row[-10:]
        scores = x @ kernel + bias
        scores -= scores.max(1, keepdims=True)
        p = np.exp(scores)
        total = p.sum(1, keepdims=True)
        loss = np.mean(np.log(total[:, 0]) - (scores * y).sum(1)) + PENALTY / 2 * np.sum(kernel**2)
        slope = (p / total - y) / samples
        return float(loss), np.concatenate([(x.T @ slope + PENALTY * kernel).ravel(), slope.sum(0)])

    return softmax, 10 * x.shape[1] + 10


async def sampled(seeds: int) -> dict[str, Any]:
    """Compare with SciPy for softmax regression on several random samples.

    Rounding errors change the number of passes of both programs by hundreds, so only the median is meaningful.
    """
    from scipy import optimize

    ratios, passes = [], []
    for seed in range(seeds):
        function, values = softmax_of(seed)
        start, options = np.zeros(values), {**HOW, "maxcor": 30}
        least = float(optimize.minimize(function, start, jac=True, method="L-BFGS-B", options=options).fun)
        result = await of_function(function, start, least=least, slots=1)
        passes.append((result["passes"], result["passes of SciPy"]))
        ratios.append(result["ratio"] if result["ratio"] is not None else np.inf)
    ratio = round(float(np.median(ratios)), 3)
    return {"function": "softmax regression", "samples": 1_000, "passes": passes, "ratios": ratios, "ratio": ratio}


async def of_function(
    function: Any, start: Any, within: float = 1e-8, least: float = 0.0, slots: int = 4
) -> dict[str, Any]:
    """Compare with SciPy for a function without samples, on four workers in this process.

    Args:
        function: A function that returns its value and its gradient.
        start: The first point.
        within: The wanted distance to the minimum.
        least: The minimum.
        slots: Number of slots. Each slot has eight portions. A single slot has one portion, which saves time.
    """
    from scipy import optimize

    scipy_losses: list[float] = []

    def noted(row: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        loss, slope = function(row)
        scipy_losses.append(loss)
        return loss, slope

    def gradient(model: Any, batch: Any, weights: Any) -> Any:
        loss, slope = function(weights[0])
        return [slope], {"loss": loss}

    optimize.minimize(noted, np.array(start), jac=True, method="L-BFGS-B", options=HOW)
    before, NumpyModel.gradient_of = NumpyModel.gradient_of, gradient  # type: ignore[assignment,method-assign]
    try:
        settings = {
            "slots": slots,
            "samples": 40,
            "start": {"w": np.array(start)},
            "master_epochs": 3_000,
            "tolerance": 0,
        }
        run = FakeRun(FakeCluster(slots), mode="lbfgs", portion=40 if slots == 1 else None, **settings)
        run.is_convergent = lambda record: record.loss <= least + within  # type: ignore[method-assign]
        await run.train_model()
    finally:
        NumpyModel.gradient_of = before  # type: ignore[method-assign]
    return {"function": function.__name__, "type": "float64", **compared(run.history, scipy_losses, least, within)}


# -- uneven workers ----------------------------------------------------------------------------------------------------


async def uneven(slow: float = 1.0, stops: bool = False, portion_s: float = 0.1) -> dict[str, Any]:
    """Return the share of portions and the duration of a pass when one of four workers is slow or stops.

    A worker sleeps instead of computing a portion, so this measures only the distribution of portions.
    """

    def gradient(model: Any, batch: Any, weights: Any) -> Any:
        row = np.asarray(weights[0], np.float64)
        return [row * np.arange(1, row.size + 1)], {"loss": float(np.sum(row * row * np.arange(1, row.size + 1)) / 2)}

    before, NumpyModel.gradient_of = NumpyModel.gradient_of, gradient  # type: ignore[assignment,method-assign]
    try:
        start = {"w": np.ones(20)}
        run = FakeRun(FakeCluster(4), mode="lbfgs", slots=4, samples=320, start=start, master_epochs=3, tolerance=0)
        begun: dict[int, dict[int, list[float]]] = {}

        for worker in run.cluster.workers:
            lock = asyncio.Lock()

            async def rpc(request: Any, timeout_s: Any = None, worker: Any = worker, lock: Any = lock) -> Any:
                if request.args[2] == "portions":
                    times = begun.setdefault(request.args[3], {}).setdefault(worker.id, [])
                    async with lock:  # a worker computes one portion at a time
                        for _ in request.args[-1]:
                            times.append(time.perf_counter())
                            if worker.id == 4 and stops and len(times) == 8:
                                await asyncio.sleep(60)
                            await asyncio.sleep(portion_s * (slow if worker.id == 4 else 1))
                return await FakeWorker.rpc(worker, request, timeout_s)

            worker.rpc = rpc
        counted = Counter[int]()
        run.subscribe(lambda event: counted.update([event.worker] if type(event).__name__ == "UpdateArrived" else []))
        await run.train_model()
    finally:
        NumpyModel.gradient_of = before  # type: ignore[method-assign]
    ideal = 32 * portion_s / (3 + 1 / slow)
    seconds = statistics.median(record.seconds / record.metrics["passes"] for record in run.history[1:])
    mean_of_others = statistics.mean(counted[worker] for worker in (1, 2, 3))
    return {
        "slow": slow,
        "stops": stops,
        "share": round(counted[4] / mean_of_others, 3),
        "pass / ideal": round(seconds / ideal, 3),
        "exact": run.ledger.is_exact(len(run.history)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial and print its results. Return the exit code."""
    options = read_options(
        __doc__,
        argv,
        only=["kills", "bytes", "scipy", "uneven"],
        kills=20,
        masters=5,
        workers=3,
        iterations=120,
        pause=0.3,
        seed=0,
        seeds=10,
    )
    well = []

    def report(name: str, result: Any, is_well: bool) -> None:
        print(json.dumps({name: result, "well": is_well}), flush=True)
        well.append(is_well)

    if "uneven" in options.only:
        slow, stopped = asyncio.run(uneven(slow=4.0)), asyncio.run(uneven(stops=True))
        report("uneven", slow, 0.15 <= slow["share"] <= 0.3 and slow["pass / ideal"] <= 1.4 and slow["exact"])
        report("uneven", stopped, stopped["pass / ideal"] <= 1.5 and stopped["exact"])
    if "bytes" in options.only:
        for slots in (1, 3):
            small, large = (asyncio.run(master_bytes(units, slots)) for units in (2_000, 20_000))
            few, many = small["bytes by passes"], large["bytes by passes"]
            bars = few[1] <= 10_000 and all(many[passes] <= 1.05 * few[passes] for passes in few.keys() & many.keys())
            report("bytes", [small, large], bars)
    if "scipy" in options.only:
        comparisons = [of_function(rosenbrock, [-1.2, 1.0]), of_function(quadratic, [1.0] * 20)]
        comparisons += [against_scipy("float32", 1e-5), against_scipy("float64", 1e-8)]
        for measurement in [*comparisons, sampled(options.seeds)]:
            result = asyncio.run(measurement)
            report("scipy", result, result["ratio"] is not None and result["ratio"] <= 1.15)
    if "kills" in options.only:
        run_options = options.workers, options.seed, options.iterations, options.pause
        result = kills(APP, options.kills, options.masters, *run_options)
        report("kills", result, result["same"] and result["ledger"])
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
