"""Measure the cost of each stabiliser in a step, and whether it helps, with and without it, seed by seed.

    python -m benchmarks.stable [--quick] [--parts steps,outliers,frozen,tasks] [--rows agc,rlion] [--seeds 10] [--repeats 31]

- ``steps`` compares a step with each stabiliser with a step of the same model with the bare optimizer. Both train the
  same batches, one directly after the other. The output is the median of the ratios of such pairs, with its spread.
  After the first repeat, nothing may be compiled again.
- ``outliers`` is a regression in which some samples are multiplied by a number, with and without ``RollingClip``.
- ``frozen`` has two local workers, with and without 75 % of the weights frozen. It measures the bytes that come back,
  and checks that the frozen tensors keep their bits.
- ``tasks`` has two tasks on one trunk, whose losses differ by a factor of 100, and a separate model for each task. The
  rate of all ends at 0. The unit is points of accuracy for classes, and points of explained variance for numbers.

``--quick`` is the short form, with few rows, seeds, repeats and epochs.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.measure import Spread, some_of, table, turns
from ddlf import Cluster, IApp, load_digits

Array = np.ndarray[Any, Any]
Result = dict[str, Any]


def seeds(options: argparse.Namespace) -> range:
    """Those of the pairs."""
    return range(options.first_seed, options.first_seed + options.seeds)


def chosen(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Return the names of those rows of a table that ``--rows`` has, in their order; all of them without ``--rows``."""
    return [name for name in names if options.rows is None or name in options.rows]


# -- what a step costs --------------------------------------------------------------------------------------------------


def steps(options: argparse.Namespace) -> Result:
    """Return the milliseconds of a step by name, and how often a step was traced after the first repeat."""
    random = np.random.default_rng(0)
    size = options.steps * options.batch_size
    x, y = random.normal(size=(size, 784)).astype("float32"), random.integers(0, 10, size)
    rows = chosen((name for name in KINDS if beside(name) != name), options)
    models = {name: KINDS[name](options.width) for name in dict.fromkeys([*rows, *map(beside, rows)])}

    def timed(name: str, repeat: int) -> float:
        model, labels, traced = models[name]
        targets = {"a": y, "b": y} if labels == "two" else y
        before, begin = len(traced), time.perf_counter()
        model.fit(x, targets, options.batch_size, verbose=0, shuffle=False)
        assert not repeat or len(traced) == before, f"{name} was traced again"  # the first one compiles
        return 1000 * (time.perf_counter() - begin) / options.steps

    # A machine that others use is twice as fast in one second as in the next: the bare one is measured right before or behind each.
    pairs_of: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for repeat, name in turns(list(pairs_of), options.repeats + 1):
        pair = (name, beside(name))
        times = {kind: timed(kind, repeat) for kind in (pair if repeat % 2 else reversed(pair))}
        if repeat:
            pairs_of[name].append((times[pair[0]], times[pair[1]]))
    lines = [["stabiliser", "ms a step", "beside", "its ms", "ratio"]]
    ratios = {}
    for name, pairs in pairs_of.items():
        ours, bare = zip(*pairs, strict=True)
        ratios[name] = Spread.of([value / other for value, other in pairs])
        lines.append([name, Spread.of(ours).text(), beside(name), Spread.of(bare).text(), ratios[name].text(".3f")])
    print(table(lines))
    return {"ratios": {name: value.median for name, value in ratios.items()}}


def _model(
    width: int,
    optimizer: Callable[[Any], Any],
    *,
    two: bool = False,
    uncertain: bool = False,
    masked: bool = False,
) -> tuple[Any, str, list[int]]:
    """Return a model, the kind of its labels, and a list that grows each time that its step is traced."""
    import keras

    from ddlf.extras.stabilisers import Masked, Uncertain

    layers, traced = keras.layers, []
    plain = keras.losses.SparseCategoricalCrossentropy()
    inner = Masked(plain) if masked else plain

    class Counted(keras.losses.Loss):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **more: Any) -> Any:
            traced.append(1)
            return inner(*arguments, **more)

    inputs = keras.Input((784,))
    hidden = layers.Dense(width, "relu", name="second")(layers.Dense(width, "relu", name="first")(inputs))
    if two:
        outputs = {name: layers.Dense(10, "softmax", name=name)(hidden) for name in ("a", "b")}
        model = keras.Model(inputs, outputs)
    else:
        model = keras.Model(inputs, layers.Dense(10, "softmax", name="last")(hidden))
    built = optimizer(model)
    if uncertain:
        model = Uncertain(model)
    model.compile(built, {"a": Counted(), "b": Counted()} if two else Counted())
    return model, "two" if two else "", traced


def _adam(rate: Any = 1e-3) -> Any:
    import keras

    return keras.optimizers.Adam(rate)


def _kind(optimizer: Callable[[Any, Any], Any], **how: Any) -> Callable[[int], Any]:
    """Return a function that makes a model of a width. ``optimizer`` receives the model and ``ddlf.extras.stabilisers``."""

    def make(width: int) -> Any:
        from ddlf.extras import stabilisers

        return _model(width, lambda model: optimizer(model, stabilisers), **how)

    return make


def _lion(model: Any, ours: Any) -> Any:
    import keras

    return keras.optimizers.Lion(1e-4, weight_decay=0.01)


def _scaled(model: Any, ours: Any) -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(_adam())


KINDS: dict[str, Callable[[int], Any]] = {
    "adam": _kind(lambda model, ours: _adam()),
    "schedule": _kind(lambda model, ours: _adam(ours.RunSchedule(1e-3, "warmup:0.05,cosine", steps=10_000))),
    "rolling clip": _kind(lambda model, ours: ours.RollingClip(_adam())),
    "agc": _kind(lambda model, ours: ours.AGC(_adam())),
    "multipliers": _kind(lambda model, ours: ours.Multipliers(_adam(), {"first": 0.1})),
    "frozen by depth": _kind(lambda model, ours: ours.frozen_to(model, 0.5, _adam())),
    "unfreezing": _kind(lambda model, ours: ours.Unfreezing.of(model, _adam(), (0.5, 0.0), steps=10_000)),
    "loss scaling": _kind(_scaled),
    "masked": _kind(lambda model, ours: _adam(), masked=True),
    "lion": _kind(_lion),
    "rlion": _kind(lambda model, ours: ours.Rlion(1e-4)),
    "two outputs": _kind(lambda model, ours: _adam(), two=True),
    "uncertainty": _kind(lambda model, ours: _adam(), two=True, uncertain=True),
}
"""All kinds of training. The kinds without a stabiliser are the baselines of the kinds with one."""
BESIDE = {"lion": "lion", "rlion": "lion", "two outputs": "two outputs", "uncertainty": "two outputs"}


def beside(kind: str) -> str:
    """Return the baseline of a kind: itself if it has no stabiliser."""
    return BESIDE.get(kind, "adam")


# -- batches of outliers --------------------------------------------------------------------------------------------------

SIZES = (10.0, 100.0, 1e4, 1e20)
"""Factors of the outliers."""
SGD, ADAM = "sgd", "adam"


def outliers(options: argparse.Namespace) -> Result:
    """Return for each size of outliers, optimizer and seed the loss on a test set without outliers, with and without the clip;
    NaN if a weight is NaN.
    """
    pairs_of: dict[str, list[tuple[float, float]]] = {}
    lines = [["outliers", "optimizer", "finite with", "finite without", "test loss with", "without"]]
    for size in options.sizes:
        for kind in chosen((SGD, ADAM), options):
            pairs = [
                (_regression(seed, size, kind, True, options), _regression(seed, size, kind, False, options))
                for seed in seeds(options)
            ]
            pairs_of[f"{size:g} {kind}"] = pairs
            counts = [f"{sum(map(math.isfinite, losses))} of {options.seeds}" for losses in zip(*pairs, strict=True)]
            medians = [_median(losses) for losses in zip(*pairs, strict=True)]
            lines.append([f"x {size:g}", kind, *counts, *medians])
            print(*lines[-1], flush=True)
    print(table(lines))
    return {"pairs": pairs_of}


def _median(losses: Any) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return Spread.of(finite).text(".3g") if finite else "-"


def _regression(seed: int, size: float, kind: str, clips: bool, options: argparse.Namespace) -> float:
    """Return the test loss; NaN or infinite if a weight is."""
    import keras

    from ddlf.extras.stabilisers import RollingClip

    random = np.random.default_rng(seed)
    slope = random.normal(size=(8, 1))
    x = random.normal(size=(960, 8))
    y = np.tanh(x @ slope) + 0.05 * random.normal(size=(960, 1))
    train, rest = x[:640].copy(), x[640:]
    train[random.choice(640, 6, replace=False)] *= size
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05) if kind == SGD else keras.optimizers.Adam(0.005)
    model.compile(RollingClip(optimizer) if clips else optimizer, "mse")
    model.fit(train.astype("float32"), y[:640], 32, options.epochs, verbose=0)
    if not all(np.isfinite(weights).all() for weights in model.get_weights()):
        return math.nan
    predicted = model.predict(rest.astype("float32"), verbose=0).astype(np.float64)
    return float(np.mean(np.square(predicted - y[640:])))


# -- frozen tensors -------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "star": {},
    "optimizers stay": {"optimizer_state": "stays"},
    "int8": {"codec": "int8"},
    "async": {"mode": "async"},
}
"""Each way by its name: settings of a run."""
WIDE = 48
FROZEN = ("first", "second", "third")


class Frozen(IApp):
    """Digits, by four layers of one width. Three of them can be frozen."""

    verbose, batch_size, slots = False, 64, 2
    freezes = False

    async def load_dataset(self) -> None:
        (x, y), (x_test, y_test) = load_digits()
        self.x_train, self.y_train = x.reshape(len(x), -1)[:, :WIDE], y
        self.x_test, self.y_test = x_test.reshape(len(x_test), -1)[:, :WIDE], y_test

    async def create_model(self) -> None:
        import keras

        layers = keras.layers
        hidden = [layers.Dense(WIDE, "relu", name=name) for name in (*FROZEN, "fourth")]
        self.model = keras.Sequential([keras.Input((WIDE,)), *hidden, layers.Dense(10, "softmax", name="last")])
        self.model.compile(keras.optimizers.Adam(1e-3), "categorical_crossentropy", metrics=["accuracy"])

    def on_round(self, record: Any) -> None:
        """Say nothing."""


async def frozen(options: argparse.Namespace) -> Result:
    """Return for each seed how many times as many bytes come back in a round with frozen tensors as without, and whether the
    frozen tensors are unchanged.
    """
    shares: dict[str, list[float]] = {}
    is_kept: dict[str, list[bool]] = {}
    async with Cluster.local(options.workers) as cluster:
        for seed in seeds(options):
            for way in chosen(WAYS, options):
                back = []
                for named in (",".join(f"{name}=0" for name in FROZEN), None):
                    app = Frozen(cluster)
                    for name, value in {"seed": seed, "master_epochs": 2, "multipliers": named, **WAYS[way]}.items():
                        setattr(app, name, value)
                    await app.prepare()
                    before = app.model.get_weights()
                    records = await app.train_model()
                    back.append(statistics.median(record.bytes_back for record in records))
                    if named:
                        pairs = zip(app.model.weights, before, app.model.get_weights(), strict=True)
                        same = [a.tobytes() == b.tobytes() for w, a, b in pairs if w.path.split("/")[-2] in FROZEN]
                        is_kept.setdefault(way, []).append(len(same) == 2 * len(FROZEN) and all(same))
                shares.setdefault(way, []).append(back[0] / back[1])
    values = 3 * (WIDE * WIDE + WIDE)
    share = values / (values + WIDE * WIDE + WIDE + 10 * WIDE + 10)
    print(f"{share:.0%} of the values are frozen")
    lines = [["way", "bit-equal", "bytes back"]]
    for way, shares_of_way in shares.items():
        less = Spread.of([100 * (share - 1) for share in shares_of_way])
        lines.append([way, f"{sum(is_kept[way])} of {options.seeds}", f"{less.text('.1f')} %"])
    print(table(lines))
    return {"shares": shares, "kept": is_kept}


# -- two tasks --------------------------------------------------------------------------------------------------------------


OWN = "own"
LOSSES = (OWN, "sum", "from 0", "uncertainty")
"""Separate models, the plain sum of losses, uncertainty from 0, and uncertainty from the first losses."""


def tasks(options: argparse.Namespace) -> Result:
    """Return for each seed the scores of both tasks with each of ``LOSSES``. All are compared with separate models."""
    ways = [OWN, *chosen(LOSSES[1:], options)]
    points: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for seed in seeds(options):
        for way in ways:
            points[way].append(_points(seed, way, options))
        print(seed, *(f"{way} {a:.1f} {b:.1f}" for way in ways for a, b in [points[way][-1]]), flush=True)
    lines = [["losses", "classes", "numbers", "least of own, in pairs"]]
    worst = {}
    for way, points_of_way in points.items():
        a, b = zip(*points_of_way, strict=True)
        pairs = zip(points_of_way, points[OWN], strict=True)
        less = [min(score - own_score for score, own_score in zip(scores, owns, strict=True)) for scores, owns in pairs]
        worst[way] = less
        lines.append([way, Spread.of(a).text(".1f"), Spread.of(b).text(".1f"), Spread.of(less).text("+.1f")])
    print(table(lines))
    return {"points": points, "worst": worst}


FIRST = {"digit": math.log(10), "ink": 100 * math.log(10)}
"""Approximate losses before training: for guessed classes, and 100 times this value."""


def _points(seed: int, way: str, options: argparse.Namespace) -> tuple[float, float]:
    if way == OWN:
        return _trained(seed, ("digit",), way, options)["digit"], _trained(seed, ("ink",), way, options)["ink"]
    scores = _trained(seed, ("digit", "ink"), way, options)
    return scores["digit"], scores["ink"]


def _trained(seed: int, heads: tuple[str, ...], way: str, options: argparse.Namespace) -> dict[str, float]:
    import keras

    from ddlf.extras.stabilisers import RunSchedule, Uncertain

    (x, y), (x_test, y_test) = (
        (x.reshape(len(x), -1).astype("float32"), labels.argmax(axis=1)) for x, labels in load_digits()
    )
    ink, ink_test = _ink(x, x), _ink(x_test, x)
    targets = {"digit": y, "ink": ink}
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    inputs = keras.Input((x.shape[1],))
    trunk = layers.Dense(128, "relu")(layers.Dense(128, "relu")(inputs))
    ends = {"digit": layers.Dense(10, "softmax", name="digit"), "ink": layers.Dense(1, name="ink")}
    model = keras.Model(inputs, {name: ends[name](trunk) for name in heads})
    if way in ("from 0", "uncertainty"):
        model = Uncertain(model, first=FIRST if way == "uncertainty" else None)
    losses = {"digit": keras.losses.SparseCategoricalCrossentropy(), "ink": keras.losses.MeanSquaredError()}
    # The s_i go as far in a step as weights do, and have up to 5 to go: so many steps it takes.
    epochs = 2 * options.epochs
    rate = RunSchedule(3e-3, options.schedule, steps=math.ceil(len(x) / 32) * epochs) if options.schedule else 3e-3
    model.compile(keras.optimizers.Adam(rate), {name: losses[name] for name in heads})
    model.fit(x, {name: targets[name] for name in heads}, 32, epochs, verbose=0)
    predicted = model.predict(x_test, verbose=0)
    points = {}
    if "digit" in heads:
        points["digit"] = 100 * float(np.mean(predicted["digit"].argmax(axis=1) == y_test))
    if "ink" in heads:
        points["ink"] = 100 * (1 - float(np.mean(np.square(predicted["ink"] - ink_test)) / np.var(ink_test)))
    return points


def _ink(x: Array, training_images: Array) -> Array:
    """Return how much more ink the upper half of each image has. The mean square is 100 times the loss of ten guessed classes."""

    def raw(images: Array) -> Array:
        rows = np.square(images + 0.5).reshape(len(images), 8, 8)
        return np.asarray(rows[:, :4].sum(axis=(1, 2)) - rows[:, 4:].sum(axis=(1, 2)))

    usual = raw(training_images)
    values = (raw(x) - usual.mean()) / usual.std() * math.sqrt(100 * math.log(10))
    return np.asarray(values, "float32")[:, None]


# -- all of them ------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "outliers": outliers,
    "tasks": tasks,
    "frozen": lambda options: asyncio.run(frozen(options)),
    "steps": steps,
}
ROWS = list(dict.fromkeys([*(name for name in KINDS if beside(name) != name), SGD, ADAM, *WAYS, *LOSSES[1:]]))
QUICK = ["rolling clip", "uncertainty", SGD, "star"]
"""The rows of the short form: in each part one or two that differ."""


def main(options: argparse.Namespace) -> dict[str, Result]:
    """Measure, print a table for each part, and return the results."""
    if options.quick:
        options.seeds, options.repeats, options.epochs, options.steps, options.width = 1, 1, 1, 4, 16
        options.rows = options.rows or QUICK
    results = {}
    for name in options.parts:
        print(f"-- {name}", flush=True)
        results[name] = PARTS[name](options)
    return results


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", type=some_of(ROWS), help=f"of the tables of these parts, of {', '.join(ROWS)}")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--sizes",
        type=lambda text: [float(number) for number in text.split(",")],
        default=list(SIZES),
        help="of outliers",
    )
    parser.add_argument("--repeats", type=int, default=31, help="of steps")
    parser.add_argument("--epochs", type=int, default=30, help="of outliers; tasks take twice as many")
    parser.add_argument(
        "--schedule", default="cosine", help="of the learning rate of tasks, in all ways; empty for a fixed one"
    )
    parser.add_argument("--steps", type=int, default=30, help="in a repeat")
    parser.add_argument("--batch-size", type=int, default=256, help="of steps")
    parser.add_argument("--width", type=int, default=512, help="of both hidden layers of steps")
    parser.add_argument("--workers", type=int, default=2, help="that carry the two slots of frozen")
    parser.add_argument("--quick", action="store_true", help="the short form")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
