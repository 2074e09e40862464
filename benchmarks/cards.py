"""Measure what a worker costs on one card (a GPU), beside bare ``fit`` on the same card.

    python -m benchmarks.cards [--model cnn,resnet18,transformer] [--backend jax,torch] [--seconds 2] [--rounds 5]
    python -m benchmarks.cards --only share,weights,several [--workers 1,2,4] [--setting optimizer_state=stays] [--quick]
    python -m benchmarks.cards --only share --model resnet18 --backend torch --samples 12800

There are three measurements::

    share      a round of one DDLF worker and as many epochs of bare ``fit`` take turns on the card. The table has the
               share of bare fit's rate, the fixed cost of a round, and its parts.
    weights    all weights of a model of 100 million parameters move off the card and on it, in the way of a round, beside
               copies between the card and pinned memory; then all 400 arrays of the transformer and its Adam
    several    some workers share the card, each with a limit of memory, and one worker alone has the card

Bare ``fit`` is one call in another process. It pauses after the epochs of a round, so it pays its own start only once.
Without a card, everything runs on the CPU, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import ROOT, Spread, run_child, some_of, table
from ddlf import Cluster, IApp
from ddlf.worker.assignment import usable_cards
from ddlf.worker.cards import MASK

ONLY = ("share", "weights", "several")
WARM = 2
"""Rounds before the first one that counts. The first one compiles the step."""
SHARE, PINNED, SUM = 0.97, 0.8, 0.9
"""The bars: the share of bare fit, of pinned copies, and of one worker's rate."""
BIG = 100_000_000
SIDE = 2000


@dataclass(frozen=True, slots=True)
class Kind:
    """One model of this benchmark, with made-up samples.

    Args:
        samples: Number of samples.
        batch_size: Samples in a batch.
        build: Returns the model, compiled.
        data: Returns ``x`` and ``y`` of some samples.
    """

    samples: int
    batch_size: int
    build: Callable[[], Any]
    data: Callable[[int], tuple[Any, Any]]


def pictures(samples: int) -> tuple[Any, Any]:
    """Return pictures with the shape of CIFAR-10, and their classes."""
    chance = np.random.default_rng(0)
    return chance.random((samples, 32, 32, 3), np.float32), chance.integers(0, 10, samples, np.int32)


def sentences(samples: int) -> tuple[Any, Any]:
    """Return sequences of 128 tokens, and the tokens that follow."""
    tokens = np.random.default_rng(0).integers(0, 1000, (samples, 129), np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def compiled(model: Any, optimizer: Any) -> Any:
    """Return a model after compiling it for a loss of classes."""
    import keras

    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def cnn(width: int = 64) -> Any:
    """Return a network of six convolutions, with Adam; 3.2 million parameters with the default width.

    Args:
        width: Filters of the first convolution.
    """
    import keras
    from keras import layers

    parts: list[Any] = [keras.Input((32, 32, 3))]
    for filters in (width, 2 * width, 4 * width):
        parts += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        parts.append(layers.MaxPooling2D())
    parts += [layers.Flatten(), layers.Dense(8 * width, activation="relu"), layers.Dense(10)]
    return compiled(keras.Sequential(parts), keras.optimizers.Adam())


def resnet18() -> Any:
    """Return the ResNet-18 for pictures of 32 x 32: 11.2 million parameters, with batch normalization and momentum."""
    import keras
    from keras import layers

    def convolution(x: Any, width: int, size: int, stride: int) -> Any:
        x = layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = image = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolution(x, 64, 3, 1))
    for width in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            short = convolution(x, width, 1, stride) if stride > 1 else x
            y = layers.ReLU()(convolution(x, width, 3, stride))
            x = layers.ReLU()(layers.Add()([convolution(y, width, 3, 1), short]))
    x = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(image, x), keras.optimizers.SGD(0.1, momentum=0.9))


def transformer() -> Any:
    """Return a transformer of 8 blocks and 10 million parameters, with Adam."""
    import keras
    from keras import layers

    width, heads = 320, 8
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(1000, width)(tokens)
    for _ in range(8):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))])
    x = layers.Dense(1000)(layers.LayerNormalization()(x))
    return compiled(keras.Model(tokens, x), keras.optimizers.Adam())


SMALL = "small"
KINDS = {
    SMALL: Kind(50_000, 256, partial(cnn, 8), pictures),
    "cnn": Kind(50_000, 256, cnn, pictures),
    "resnet18": Kind(50_000, 256, resnet18, pictures),
    "transformer": Kind(8_192, 64, transformer, sentences),
}


class Times:
    """The moments of one round on the worker, in seconds. ``Timed`` reports the time between two of them."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def note(self, name: str) -> None:
        self.at[name] = time.perf_counter()

    def between(self, first: str, second: str) -> float:
        return self.at[second] - self.at[first]

    def callback(self) -> Any:
        """Return a callback for ``fit`` that notes when the epochs begin and end."""
        import keras

        times = self

        class Noting(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                times.at.setdefault("epochs", time.perf_counter())

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                times.note("epochs over")

        return Noting()


class Timed(IApp):
    """The app of all measurements. Its metrics have the parts of a round.

    Args:
        cluster: Its workers.
        facts: The settings of the measurement.
    """

    verbose = False

    def __init__(self, cluster: Cluster, facts: dict[str, Any]) -> None:
        super().__init__(cluster)
        self.facts = facts
        self.batch_size = facts["batch"]
        for name, value in facts["settings"].items():
            setattr(self, name, value)
        self.worker_epochs, self.master_epochs = facts["epochs"], facts["epochs"] * facts["rounds"]

    async def load_dataset(self) -> None:
        self.x_train, self.y_train = KINDS[self.facts["model"]].data(self.facts["samples"])

    async def create_model(self) -> None:
        self.model = KINDS[self.facts["model"]].build()

    async def on_round(self, record: Any) -> None:
        from benchmarks.cards import TURNS  # a global name of this module would travel to the workers with the app

        await TURNS[0].over(record)

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        times, fit = Times(), self.replica.fit

        def timed(epochs: int, batch_size: int, callbacks: Any = ()) -> dict[str, float]:
            times.note("fit")
            metrics = fit(epochs, batch_size, [*callbacks, times.callback()])
            times.note("fit over")
            return metrics

        vars(self.replica)["fit"] = timed
        times.note("begin")
        try:
            update, metrics = super().train(weights, worker_epochs, batch_size)
        finally:
            del vars(self.replica)["fit"]
        times.note("end")
        parts = {name: times.between(*moments) for name, moments in PARTS.items()}
        return update, metrics | parts


PARTS = {
    "weights to the card": ("begin", "fit"),
    "start of fit": ("fit", "epochs"),
    "epochs": ("epochs", "epochs over"),
    "end of fit": ("epochs over", "fit over"),
    "weights back": ("fit over", "end"),
    "whole": ("begin", "end"),
}
"""The parts of a worker's round that ``Timed`` reports, and the moments at which each begins and ends."""


# -- bare fit -------------------------------------------------------------------------------------------------------------


class Bare:
    """Bare ``fit`` in another process, which trains when it is asked.

    Args:
        facts: The settings of the measurement.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.cards", "--child", json.dumps({**facts, "do": "bare"})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def ask(self, epochs: int) -> dict[str, Any]:
        """Train some more epochs, and return the seconds of each."""
        assert self._process.stdin is not None
        print(epochs, file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next message of the process. It may print other lines, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise RuntimeError(f"bare fit ended with exit code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def be_bare(facts: dict[str, Any]) -> None:
    """Train with ``fit`` alone: one call, which waits after each requested number of epochs."""
    import keras

    kind = KINDS[facts["model"]]
    model, (x, y) = kind.build(), kind.data(facts["samples"])

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        left, took = 0, ()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if not self.left:
                line = sys.stdin.readline()
                if not line:
                    os._exit(0)
                self.left, self.took = int(line), ()
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.took = (*self.took, time.perf_counter() - self.begin)
            self.left -= 1
            if not self.left:
                print(json.dumps({"took": self.took}), flush=True)

    print(json.dumps({"device": device(), "parameters": model.count_params()}), flush=True)
    model.fit(x, y, batch_size=facts["batch"], epochs=1_000_000, verbose=0, callbacks=[Turns()])


def device() -> str:
    """Return the name of the device that Keras computes on."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        card = jax.devices()[0]
        return "CPU" if card.platform == "cpu" else str(card.device_kind)
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    import tensorflow as tf

    cards = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(cards[0])["device_name"] if cards else "CPU"


# -- share ------------------------------------------------------------------------------------------------------------------


class Turns:
    """Takes the time of rounds, and lets bare ``fit`` train after each.

    Args:
        bare: Bare ``fit``; None if rounds follow each other.
        epochs: Epochs of a round.
    """

    def __init__(self, bare: Bare | None, epochs: int) -> None:
        self._bare, self._epochs, self._begin = bare, epochs, time.perf_counter()
        self.rounds: list[dict[str, float]] = []

    async def over(self, record: Any) -> None:
        """Note a round that is over, and train with bare ``fit``."""
        facts = dict(record.metrics) | {
            "round": time.perf_counter() - self._begin,
            "told": record.seconds,
            "compute": record.compute_s,
            "transfer": record.transfer_s,
            "merge": record.merge_s,
        }
        if self._bare is not None:
            took = (await asyncio.to_thread(self._bare.ask, self._epochs))["took"]
            facts["bare"] = sum(took)
        self.rounds.append(facts)
        self._begin = time.perf_counter()


TURNS: list[Turns] = []
"""The turns of this process. It makes one measurement."""


async def share(facts: dict[str, Any]) -> dict[str, Any]:
    """Let rounds of one worker and bare ``fit`` take turns, and return the seconds of both."""
    bare = Bare(facts)
    try:
        about = await asyncio.to_thread(bare.read)
        await asyncio.to_thread(bare.ask, 1)  # it compiles the step
        (epoch,) = (await asyncio.to_thread(bare.ask, 1))["took"]
        facts = {**facts, "epochs": max(1, round(facts["seconds"] / epoch)), "rounds": WARM + facts["rounds"]}
        async with Cluster.local(1) as cluster:
            TURNS.append(turns := Turns(bare, facts["epochs"]))
            await Timed(cluster, facts).train_sync()
    finally:
        bare.close()
    return {**about, "epochs": facts["epochs"], "rounds": turns.rounds[WARM:], "first": turns.rounds[0]["round"]}


def parts_of(round: dict[str, float]) -> dict[str, float]:
    """Return the parts of a round's fixed cost in seconds: all of the round that bare ``fit`` did not need."""
    return {
        "weights to the card": round["weights to the card"],
        "start of fit": round["start of fit"],
        "longer epochs": round["epochs"] - round["bare"],
        "end of fit": round["end of fit"],
        "weights back": round["weights back"],
        "optimizer, encoding": round["compute"] - round["whole"],
        "wire": round["transfer"],
        "merge": round["merge"],
        "master": round["round"] - round["compute"] - round["transfer"] - round["merge"],
    }


# -- weights ------------------------------------------------------------------------------------------------------------------


def weights(facts: dict[str, Any]) -> dict[str, Any]:
    """Return for each model the seconds to move its weights off the card and back, and to copy as many pinned bytes."""
    return {"of": [moved({**facts, **of_model}) for of_model in facts["of"]]}


def moved(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds to move many weights off the card and back, and to copy as many pinned bytes."""
    import keras

    from ddlf.training.slot.transfer import Transfer, transfer

    if facts["model"]:
        model = KINDS[facts["model"]].build()
        model.optimizer.build(model.trainable_variables)
        variables = [*model.weights, *model.optimizer.variables]
    else:
        side = facts["side"]
        layers = [keras.layers.Dense(side, use_bias=False) for _ in range(facts["parameters"] // side**2)]
        variables = keras.Sequential([keras.Input((side,)), *layers]).weights
    values = Transfer().read(variables)
    size = sum(value.nbytes for value in values)
    pinned = pinned_copies(size // 4)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("off", "on", "Keras off", "Keras on", "pinned off", "pinned on")
    }
    for _ in range(facts["rounds"] + 1):
        for name, work in (
            ("off", lambda: transfer().read(variables)),
            ("on", lambda: transfer().write(variables, values)),
            ("Keras off", lambda: Transfer().read(variables)),
            ("Keras on", lambda: Transfer().write(variables, values)),
            *((name, array) for name, array in pinned.items()),
        ):
            wait_for(variables)
            begin = time.perf_counter()
            work()
            wait_for(variables)
            seconds[name].append(time.perf_counter() - begin)
    took = {name: took[1:] for name, took in seconds.items()}  # the first one compiles and takes memory
    first = {f"first {way}": seconds[way][0] for way in ("off", "on")}
    return {"device": device(), "bytes": size, "arrays": len(values), **first, **took}


def wait_for(variables: Sequence[Any]) -> None:
    """Wait until the device has done all work on variables."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready([variable.value for variable in variables])
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def pinned_copies(size: int) -> dict[str, Callable[[], Any]]:
    """Return functions that copy as many values between the card and pinned memory, in one piece. This is the limit."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        device = jax.devices()[0]
        kinds = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device")]
        on = jax.device_put(np.ones(size, np.float32), kinds[1])
        off = jax.block_until_ready(jax.device_put(on, kinds[0]))
        return {
            "pinned off": lambda: jax.block_until_ready(jax.device_put(on, kinds[0])),
            "pinned on": lambda: jax.block_until_ready(jax.device_put(off, kinds[1])),
        }
    if keras.backend.backend() == "torch":
        import torch

        card = "cuda" if torch.cuda.is_available() else "cpu"
        on = torch.ones(size, device=card)
        off = torch.empty(size, pin_memory=card == "cuda")

        return {"pinned off": lambda: off.copy_(on), "pinned on": lambda: on.copy_(off)}
    return {}


# -- several -------------------------------------------------------------------------------------------------------------------


async def several(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the samples per second that several workers on one card train in total."""
    cards = usable_cards(os.environ.get(MASK))
    on_card: dict[str, Any] = {"gpus": [cards[0].number], "gpu_memory": facts["limit"] or None} if cards else {}
    async with Cluster.local(facts["workers"], **on_card) as cluster:
        TURNS.append(turns := Turns(None, facts["epochs"]))
        await Timed(cluster, {**facts, "rounds": WARM + facts["rounds"]}).train_sync()
    samples = facts["samples"] * facts["epochs"]
    rates = [samples / round["round"] for round in turns.rounds[WARM:]]
    return {"rates": rates, "device": cards[0].name if cards else "CPU"}


# -- the command -----------------------------------------------------------------------------------------------------------------


def be_child(facts: dict[str, Any]) -> None:
    """Run one measurement in a process whose Keras has the wanted backend, and print the result as JSON."""
    # by the name of this module, which the workers know, too
    from benchmarks import cards

    if facts["do"] == "bare":
        cards.be_bare(facts)
        return
    work = {"share": cards.share, "several": cards.several, "weights": cards.weights}[facts["do"]]
    result: Any = work(facts)
    print(json.dumps(asyncio.run(result) if asyncio.iscoroutine(result) else result), flush=True)


def measured(backend: str, facts: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one measurement with a backend in a child, and return its result."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = backend
    try:
        return run_child("benchmarks.cards", "--child", json.dumps(facts), timeout_s=timeout_s)
    finally:
        os.environ.pop("KERAS_BACKEND")
        if before is not None:
            os.environ["KERAS_BACKEND"] = before


def show_share(name: str, result: dict[str, Any], facts: dict[str, Any]) -> None:
    """Print the tables of one model with one backend."""
    rounds = result["rounds"]
    shares = Spread.of([100 * round["bare"] / round["round"] for round in rounds])
    fixed = Spread.of([1e3 * (round["round"] - round["bare"]) for round in rounds])
    rates = [facts["samples"] * result["epochs"] / round["round"] for round in rounds]
    print(f"\n{name} on {result['device']}: {result['parameters']:,} parameters, {result['epochs']} epochs in a round")
    rows = [["", "median (range)"]]
    rows.append(["round of DDLF", Spread.of([round["round"] for round in rounds]).text(".3f") + " s"])
    rows.append(["bare fit", Spread.of([round["bare"] for round in rounds]).text(".3f") + " s"])
    rows.append([f"share of bare fit (bar {SHARE:.0%})", shares.text(".1f") + " %"])
    rows.append(["samples/s", Spread.of(rates).text(",.0f")])
    rows.append(["first round, with compiling", f"{result['first']:.1f} s"])
    rows.append(["fixed cost of a round", fixed.text(".0f") + " ms"])
    parts = {part: Spread.of([1e3 * parts_of(round)[part] for round in rounds]) for part in parts_of(rounds[0])}
    rows += [[f"- {part}", f"{took.text('.1f')} ms"] for part, took in parts.items()]
    print(table(rows), flush=True)


def show_weights(backend: str, result: dict[str, Any]) -> None:
    """Print the table of moving weights."""
    print(f"\n{result['arrays']} arrays, {result['bytes'] / 1e6:,.0f} MB, with {backend} on {result['device']}")
    rows = [["direction", "DDLF", "Keras", "pinned copy", f"share of pinned (bar {PINNED:.0%})", "DDLF", "first time"]]
    for way in ("off", "on"):
        rates = [
            Spread.of([result["bytes"] / took / 1e9 for took in result[name]]) if result.get(name) else None
            for name in (way, f"Keras {way}", f"pinned {way}")
        ]
        of_pinned = f"{100 * rates[0].median / rates[2].median:.0f} %" if rates[0] and rates[2] else "-"
        took, first = Spread.of([1e3 * took for took in result[way]]), 1e3 * result[f"first {way}"]
        speeds = [f"{rate.text('.1f')} GB/s" if rate else "-" for rate in rates]
        rows.append([way, *speeds, of_pinned, f"{took.text('.1f')} ms", f"{first:.0f} ms"])
    print(table(rows), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=some_of(ONLY), default=list(ONLY), help="measurements (default: all)")
    parser.add_argument("--model", type=some_of(KINDS), help="default: all, but with --quick only the small one")
    parser.add_argument("--backend", type=some_of(("jax", "torch", "tensorflow")), default=["jax", "torch"])
    parser.add_argument("--samples", type=int, help="fewer samples, if an epoch takes longer than a round should")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="of a round, for 'several' without 'share'")
    parser.add_argument("--workers", default="1,2,4", help="on one card, for 'several' (default: %(default)s)")
    parser.add_argument("--limit", default="", help="memory of each of them (default: equal parts)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the runs of DDLF")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one measurement")
    parser.add_argument(
        "--quick", action="store_true", help="few samples and weights, and a small round, to try the command"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        be_child(options.child)
        return
    settings = dict(text.split("=", 1) for text in options.setting)
    models = options.model or [model for model in KINDS if (model == SMALL) == options.quick]
    for backend in options.backend:
        if "weights" in options.only:
            large = {"side": 100, "parameters": 20_000} if options.quick else {"side": SIDE, "parameters": BIG}
            moved_models: list[dict[str, Any]] = [
                {"model": "", **large},
                {"model": SMALL if options.quick else "transformer"},
            ]
            # Only in a new process, the first time has all of its usual parts.
            for of in [moved_models] if options.quick else [[model] for model in moved_models]:
                facts: dict[str, Any] = {"do": "weights", "rounds": options.rounds, "of": of}
                for result in measured(backend, facts, options.timeout)["of"]:
                    show_weights(backend, result)
        for model in models:
            kind = KINDS[model]
            facts = {
                "model": model,
                "samples": 16 if options.quick else options.samples or kind.samples,
                "batch": 8 if options.quick else kind.batch_size,
                "seconds": 0.0 if options.quick else options.seconds,
                "rounds": options.rounds,
                "settings": settings,
            }
            epochs = options.epochs
            if "share" in options.only:
                result = measured(backend, {"do": "share", **facts}, options.timeout)
                epochs = result["epochs"]
                show_share(f"{model} with {backend}", result, facts)
            if "several" in options.only:
                rows, of_one_worker = (
                    [["workers on one card", "samples/s in all", f"of one worker (bar {SUM:.0%})"]],
                    0.0,
                )
                for workers in map(int, options.workers.split(",")):
                    more = {"do": "several", "workers": workers, "epochs": epochs}
                    more["limit"] = options.limit
                    result = measured(backend, {**facts, **more}, options.timeout)
                    rates, device = Spread.of(result["rates"]), result["device"]
                    of_one_worker = of_one_worker or rates.median
                    rows.append([str(workers), rates.text(",.0f"), f"{100 * rates.median / of_one_worker:.0f} %"])
                    print(
                        f"{workers} of {options.workers} workers: {rows[-1][1]} samples/s", file=sys.stderr, flush=True
                    )
                print(f"\n{model} with {backend}, workers that share {device}")
                print(table(rows), flush=True)


if __name__ == "__main__":
    main()
