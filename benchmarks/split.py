"""Measure a model in parts beside one process, and the idle time and the memory of its stages.

    python -m benchmarks.split [--quick] [--only speed,idle,memory]

*Speed*: the acoustic model of Dean et al. 2012 (440 inputs, four layers of 2,560 sigmoid units, 8,192 outputs: 41.8 M
weights), batches of 256 in 8 micro-batches. ``stages`` are two workers with one thread each. ``within`` are two such
workers that cut each layer, without micro-batches. ``sums`` is one process
with one thread that adds up the gradients of the same micro-batches, so it gets the same weights. ``fit`` is one such
process with Keras's ``fit``, whose matrix products of whole batches are more efficient than those of micro-batches. The
ways take turns. With equal parts and without other costs, ``stages`` would be 16 / 9 = 1.78 times as fast as ``sums``.

*Idle*: stages whose layers only sleep, so all take equally long. The formula is (s - 1) / (M + s - 1).

*Memory*: 4, 8 and 32 micro-batches of one size. Stage i of s keeps at most s - i of them, so the peak memory of a
worker should not depend on their number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.footprint import memory_of
from benchmarks.measure import ROOT, Spread, table, turns
from ddlf import Cluster, IApp
from ddlf.algorithms.pipeline import passes
from ddlf.events import Event, PartTrained

MODULE = "benchmarks.split"
BATCH, MICRO_BATCHES = 256, 8
BARS = {"stages": 1.4, "within": 1.3}
"""How much faster than ``sums`` each way should be."""
CUTS = {"stages": ("stages:2", MICRO_BATCHES), "within": ("within:2", 1)}
"""The cut of each way with two workers, and its number of micro-batches."""
STEPS = 6
"""Steps of a turn."""
FORWARD_S, BACKWARD_S = 0.03, 0.06
"""Seconds that a layer of the measurement of idle time sleeps."""
PIECE = 256
"""Samples of a micro-batch in the measurement of memory."""
PARTS = ("speed", "idle", "memory")


# -- speed ------------------------------------------------------------------------------------------------------------


class Speech(IApp):
    """The network of Dean et al. 2012 for speech, on made-up samples."""

    split, micro_batches, batch_size, threads, verbose = "stages:2", MICRO_BATCHES, BATCH, 1, False
    steps = STEPS

    def load_dataset(self) -> None:
        chance = np.random.default_rng(1)
        self.x_train = chance.normal(size=(BATCH * self.steps, 440)).astype("float32")
        self.y_train = chance.integers(0, 8192, BATCH * self.steps)

    def create_model(self) -> None:
        import keras

        hidden = [keras.layers.Dense(2560, activation="sigmoid") for _ in range(4)]
        self.model = keras.Sequential([keras.Input((440,)), *hidden, keras.layers.Dense(8192)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.SGD(0.01), loss)


def turn() -> bool:
    """Wait for the turn of this process. Return False if there are no more."""
    return bool(sys.stdin.readline())


async def parted(way: str, steps: int) -> None:
    """Train rounds of the model in two parts, one in each turn."""
    async with Cluster.local(2) as cluster:
        app = Speech(cluster)
        app.steps, app.master_epochs = steps, 1_000
        app.split, app.micro_batches = CUTS[way]

        async def next_turn(record: Any) -> None:
            print(record.compute_s / steps, record.seconds / steps, flush=True)
            if not await asyncio.to_thread(turn):
                app.stop_training()

        app.on_round = next_turn  # type: ignore[method-assign]
        if turn():
            await app.train_model()


def alone(way: str, steps: int) -> None:
    """Train epochs of the whole model in this process, one in each turn."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    app = Speech(None)
    app.steps = steps
    app.load_dataset()
    app.create_model()
    train = {"fit": fitted, "sums": summed}[way](app)
    while turn():
        start = time.perf_counter()
        train()
        seconds = (time.perf_counter() - start) / steps
        print(seconds, seconds, flush=True)


def fitted(app: Speech) -> Callable[[], Any]:
    """Return the epoch of Keras's ``fit``."""
    return lambda: app.model.fit(app.x_train, app.y_train, batch_size=BATCH, verbose=0)


def summed(app: Speech) -> Callable[[], Any]:
    """Return an epoch that adds up the gradients of micro-batches, in place, and then makes a step."""
    import tensorflow as tf

    model = app.model
    model.optimizer.build(model.trainable_variables)
    sums = [tf.Variable(tf.zeros(variable.shape), trainable=False) for variable in model.trainable_variables]
    size = BATCH // MICRO_BATCHES

    @tf.function  # type: ignore[untyped-decorator]
    def add(x: Any, y: Any, first: bool) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True)) / MICRO_BATCHES
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign(gradient) if first else total.assign_add(gradient)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        model.optimizer.apply([tf.convert_to_tensor(total) for total in sums], model.trainable_variables)

    def epoch() -> None:
        for start in range(0, len(app.x_train), BATCH):
            for begin in range(start, start + BATCH, size):
                add(app.x_train[begin : begin + size], app.y_train[begin : begin + size], begin == start)
            step()

    return epoch


WAYS = ("stages", "within", "sums", "fit")


@contextlib.contextmanager
def contenders(steps: int, ways: Sequence[str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Yield a process for each way, which waits for its first turn."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    processes = {
        way: subprocess.Popen(
            [sys.executable, "-m", MODULE, "--way", way, "--steps", str(steps)], cwd=ROOT, env=environment, **pipes
        )
        for way in ways
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.communicate()  # it ends with its input


def ask(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Give a process its turn. Return seconds of a step, and seconds with all that belongs to a round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    while line := process.stdout.readline():
        words = line.split()
        with contextlib.suppress(ValueError):
            step_s, whole_s = map(float, words)
            return step_s, whole_s
    raise RuntimeError(f"a contender ended: {process.args}")


def speed(repeats: int, steps: int, ways: Sequence[str]) -> None:
    """Print the table of the speed."""
    times_of: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with contenders(steps, ways) as processes:
        for way in ways:
            ask(processes[way])  # compiles
        for _, way in turns(ways, repeats):
            times_of[way].append(ask(processes[way]))
            print(f"{way}: {times_of[way][-1][0]:.3f} s a step", file=sys.stderr, flush=True)
    cut = [way for way in CUTS if way in ways]
    rows = [["way", "seconds of a step", "with the round", *(f"{way} is faster by" for way in cut)]]
    for way in ways:
        columns = [Spread.of([times[index] for times in times_of[way]]).text() for index in (0, 1)]
        for other in cut:
            ratios = [times[0] / base[0] for base, times in zip(times_of[other], times_of[way], strict=True)]
            columns.append(Spread.of(ratios).text())
        rows.append([way, *columns])
    bars = ", ".join(f"{BARS[way]} for {way}" for way in cut)
    print(
        f"{table(rows)}\n\n{repeats} turns of {steps} steps; the bars beside sums: {bars}; with the round: also its weights to the master\n"
    )


# -- idle time --------------------------------------------------------------------------------------------------------


def sleeping(x: Any) -> Any:
    """Return a tensor after a sleep. Its gradient sleeps, too."""
    import tensorflow as tf

    def slept(seconds: float) -> Callable[[Any], Any]:
        def sleep(value: Any) -> Any:
            time.sleep(seconds)
            return value

        return sleep

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def both(x: Any) -> Any:
        def gradient(g: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(slept(BACKWARD_S), [g], g.dtype), g.shape)

        return tf.ensure_shape(tf.numpy_function(slept(FORWARD_S), [x], x.dtype), x.shape), gradient

    return both(x)


class Sleepers(IApp):
    """A model whose layers sleep, each in its own stage."""

    micro_batches, batch_size, threads, verbose, master_epochs = MICRO_BATCHES, 8, 1, False, 3
    count, steps = 2, 4

    def load_dataset(self) -> None:
        self.x_train = np.ones((8 * self.steps, 4), np.float32)
        self.y_train = np.ones((8 * self.steps, 4), np.float32)

    def create_model(self) -> None:
        import keras

        class Sleeper(keras.layers.Layer):  # type: ignore[misc]
            def build(self, shape: Any) -> None:
                self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

            def call(self, x: Any) -> Any:
                return sleeping(x * self.factor)

            def compute_output_shape(self, shape: Any) -> Any:
                return shape

        layers = [Sleeper(name=f"sleeper_{number}") for number in range(self.count)]
        self.model = keras.Sequential([keras.Input((4,)), *layers])
        self.model.compile(keras.optimizers.SGD(0.01), "mse")


async def idle_of(cluster: Cluster, count: int, steps: int) -> list[float]:
    """Return the mean share of idle time of all stages, in each round but the first."""
    shares: dict[int, list[float]] = {}

    def hear(event: Event) -> None:
        if isinstance(event, PartTrained) and event.round > 1:
            shares.setdefault(event.round, []).append(event.idle_s / event.seconds)

    app = Sleepers(cluster)
    app.count, app.steps = count, steps
    app.split = f"layers:{','.join(f'sleeper_{number}' for number in range(1, count))}"
    app.subscribe(hear)
    await app.train_model()
    return [statistics.mean(idle_shares) for idle_shares in shares.values()]


async def idle(counts: Sequence[int], steps: int) -> None:
    """Print the table of idle time for some numbers of stages."""
    rows = [["stages", "idle", "formula", "difference"]]
    async with Cluster.local(max(counts)) as cluster:
        for count in counts:
            spread = Spread.of(await idle_of(cluster, count, steps))
            formula = (count - 1) / (MICRO_BATCHES + count - 1)
            rows.append([str(count), spread.text(".3f"), f"{formula:.3f}", f"{spread.median - formula:+.3f}"])
    print(f"{table(rows)}\n\n{MICRO_BATCHES} micro-batches; the bar is a difference of 0.05\n")


# -- memory -----------------------------------------------------------------------------------------------------------


class Deep(IApp):
    """A network whose activations need more memory than its weights."""

    split, threads, verbose = "stages:2", 1, False

    def load_dataset(self) -> None:
        self.x_train = np.ones((3 * self.batch_size, 16), np.float32)
        self.y_train = np.zeros(3 * self.batch_size, np.int32)

    def create_model(self) -> None:
        import keras

        hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
        extra = [keras.layers.LayerNormalization(center=False, scale=False) for _ in range(16)]
        layers = [keras.layers.Dense(2048), *extra[:8], hidden[0], hidden[1], *extra[8:], hidden[2]]
        self.model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.SGD(0.001), loss)


async def peaks(micro_batches: int, rounds: int) -> list[int]:
    """Return the peak of the memory of the worker of each stage, in bytes."""
    workers: dict[int, int] = {}
    async with Cluster.local(2) as cluster:
        app = Deep(cluster)
        app.micro_batches, app.batch_size, app.master_epochs = micro_batches, PIECE * micro_batches, rounds

        def hear(event: Event) -> None:
            if isinstance(event, PartTrained):
                workers[event.slot] = event.worker

        app.subscribe(hear)
        await app.train_model()
        pids = {worker.id: (await worker.status()).executor_pid for worker in cluster.workers}
        return [memory_of(pids[worker])[1] for _, worker in sorted(workers.items())]


async def memory(rounds: int) -> None:
    """Print the table of memory after some rounds of three steps."""
    rows = [["micro-batches", "kept by stage 1, 2", "peak of stage 1 (MB)", "of stage 2 (MB)"]]
    peaks_of = {}
    for count in (4, 8, 32):
        peaks_of[count] = await peaks(count, rounds)
        kept_text = ", ".join(str(most_kept(stage, 2, count)) for stage in range(2))
        rows.append([str(count), kept_text, *(f"{peak / 1e6:.0f}" for peak in peaks_of[count])])
    worst = max(max(peak) / min(peak) for peak in zip(*peaks_of.values(), strict=True)) - 1
    print(f"{table(rows)}\n\n{PIECE} samples in a micro-batch; the largest difference is {worst:.1%}, the bar 5 %\n")


def most_kept(stage: int, count: int, micro_batches: int) -> int:
    """Return the largest number of micro-batches that a stage keeps at once."""
    count_kept = most = 0
    for stage_pass in passes(stage, count, micro_batches):
        count_kept += 1 if stage_pass.forward else -1
        most = max(most, count_kept)
    return most


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and steps: less than 3 minutes")
    parser.add_argument("--only", default=",".join(PARTS), help="some of speed, idle, memory")
    parser.add_argument("--stages", default="2,3,4", help="numbers of stages whose idle time is measured")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of the ways of speed")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps, repeats = options.steps or (3 if options.quick else STEPS), options.repeats or (3 if options.quick else 7)
    if options.way in CUTS:
        asyncio.run(parted(options.way, steps))
    elif options.way:
        alone(options.way, steps)
    else:
        parts = options.only.split(",")
        if unknown := set(parts) - set(PARTS):
            parser.error(f"unknown: {', '.join(unknown)}; choose of {', '.join(PARTS)}")
        if "speed" in parts:
            speed(repeats, steps, options.ways.split(","))
        if "idle" in parts:
            asyncio.run(idle([int(number) for number in options.stages.split(",")], steps))
        if "memory" in parts:
            asyncio.run(memory(2 if options.quick else 3))


if __name__ == "__main__":
    main()
