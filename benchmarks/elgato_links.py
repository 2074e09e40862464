"""Measure the models of ``benchmarks.elgato`` on slow links and with many workers, beside predictions from two of them.

    python -m benchmarks.elgato_links [--short] [--rates 10mbit,100mbit,1gbit] [--workers 1,2,4,8,16]

Each machine, and also the master's, is a network namespace with its own limited link (``benchmarks.network``; Linux,
root). Workers are real daemons and executors, and the master runs a real training, so all bytes travel. Only the
computation is made up: it takes the time of a step of one idle core, 2.1 ms and 5 us a sample for the MLP, 26 ms and 275
us for the LSTM, but no processor. Towers exchange after each step, and the other way after 20 steps.

The predictions are those of the planner, from the rounds of 1 and 2 workers on the same link. "times one worker"
compares an epoch with one worker that exchanges nothing. All of it probably takes 10 minutes; ``--short`` took 95 s on a
busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.distbelief import started, workers_of
from benchmarks.measure import table
from benchmarks.network import Network
from benchmarks.stand_in import StandIn, StandInRun
from ddlf import Cluster
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.extras.planner.probe import FIRST_ROUNDS, MOST_ROUNDS, Rounds
from ddlf.rpc.tokens import new_token
from ddlf.training.slot.task import Reply, Task

SAMPLES, BATCH = 50_000, 100
STAR = Way("sync", "star", "float32")
WAYS = {"towers": 1, "20 steps": 20}
"""Steps between two exchanges."""
PROBED = 2
"""Largest number of workers of a prediction."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model with made-up computing.

    Args:
        parameters: The number of its parameters.
        step_s: Seconds of a step, without its samples.
        sample_s: Seconds of a sample.
    """

    parameters: int
    step_s: float
    sample_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step_s + BATCH * self.sample_s

    @property
    def alone_s(self) -> float:
        """Seconds of an epoch of one worker that exchanges nothing."""
        return SAMPLES / BATCH * self.seconds


MODELS = {"mlp": Model(39_760, 2.1e-3, 5e-6), "lstm": Model(81_674, 26e-3, 275e-6)}


class Slow(StandIn):
    """A replica without a model: its update is random, and each step takes a fixed time.

    Args:
        worker: Its worker.
        run: Name of the run.
        sizes: Sizes of the model's tensors.
        seconds: Seconds of a step.
    """

    def __init__(self, worker: Any, run: str, sizes: Sequence[int], seconds: float) -> None:
        super().__init__(worker, run, sizes)
        self._seconds = seconds

    async def train(self, task: dict[str, Any]) -> dict[str, Any]:
        """See ``Replica``."""
        request = Task.from_message(task)
        computing = len(request.indices) / BATCH * self._seconds
        await asyncio.sleep(computing)
        reply: Reply = await self._worker.compute(self._carry, request)
        return replace(reply, compute_s=computing).to_message()


class SlowRun(StandInRun):
    """A run of these replicas."""

    seconds = 0.0

    @property
    def stand_in(self) -> tuple[Any, ...]:
        """See ``StandInRun``."""
        from benchmarks.elgato_links import Slow  # by a name that workers know, too

        return Slow, self.sizes, self.seconds


async def rounds_of(cluster: Cluster, model: Model, steps: int) -> Measured:
    """Return measured rounds of all workers of a cluster: five or more, for as long as the planner measures."""
    setting = Setting(way=STAR, slots=cluster.N, batch=BATCH, steps=steps)
    run = SlowRun(cluster, model.parameters, batch_size=BATCH, worker_steps=steps, master_epochs=1)
    run.samples, run.seconds = int(setting.samples) * (FIRST_ROUNDS + MOST_ROUNDS), model.seconds
    heard = Rounds(setting, run.stop_training)
    run.subscribe(heard.hear)
    await run.train_model()
    measured = heard.result()
    assert measured is not None
    return measured


async def measure(facts: dict[str, Any]) -> None:
    """Run the master, and print the seconds of the rounds of each setting."""
    async with Cluster(facts["hosts"], 9000, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        for name, way, workers in settings(facts["workers"]):
            some = cluster.options(workers=list(range(1, workers + 1)))
            measured = await rounds_of(some, MODELS[name], WAYS[way])
            print(
                json.dumps({"seconds": measured.seconds, "computing": measured.computing, "sent": measured.sent}),
                flush=True,
            )


def settings(workers: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Yield the model, the way and the number of workers of each setting, in the order of the measurements."""
    for name in MODELS:
        for way in WAYS:
            for count in workers:
                yield name, way, count


def epoch_s(setting: Setting, seconds: float) -> float:
    """Return the seconds of an epoch with rounds of so many seconds."""
    return SAMPLES / setting.samples * seconds


def rows(rate: str, workers: Sequence[int], measured: Sequence[Measured]) -> tuple[list[list[str]], list[str]]:
    """Return the lines of the table of one rate, and a sentence for each model and way about the best number of workers.

    Args:
        rate: The rate of each link.
        workers: Numbers of workers.
        measured: The rounds, in the order of ``settings``.
    """
    lines, sentences = list[list[str]](), list[str]()
    measured_of = dict(zip(settings(workers), measured, strict=True))
    for name, model in MODELS.items():
        probed = [
            measured_run for (of, _, count), measured_run in measured_of.items() if of == name and count <= PROBED
        ]
        time = TimeModel(probed)
        for way in WAYS:
            epochs, expected = dict[int, float](), dict[int, float]()
            for count in workers:
                measured_run = measured_of[name, way, count]
                prediction = time.predict(measured_run.setting)
                epochs[count] = epoch_s(measured_run.setting, measured_run.median)
                expected[count] = epoch_s(measured_run.setting, prediction.seconds)
                error = expected[count] / epochs[count] - 1.0
                lines.append(
                    [
                        *(rate, name, way, str(count), f"{1e3 * measured_run.median:.1f}", f"{epochs[count]:.1f}"),
                        f"{model.alone_s / epochs[count]:.2f}",
                        f"{expected[count]:.1f}" if count > PROBED else "-",
                        f"{error:+.0%}" if count > PROBED else "-",
                    ]
                )
            best, chosen = min(epochs, key=epochs.__getitem__), min(expected, key=expected.__getitem__)
            sentences.append(
                f"{rate}, {name}, {way}: {best} workers are fastest; the plan takes {chosen}, "
                f"{epochs[chosen] / epochs[best] - 1.0:.0%} slower"
            )
    return lines, sentences


HEAD = ["link", "model", "exchange", "workers", "ms/round", "s/epoch", "times one worker", "predicted", "error"]


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="100 Mbit/s; 1, 2 and 4 workers")
    parser.add_argument("--rates", type=lambda text: text.split(","))
    parser.add_argument("--workers", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.master is not None:
        asyncio.run(measure(options.master))
        return
    rates = options.rates or (["100mbit"] if options.short else ["10mbit", "100mbit", "1gbit"])
    workers = options.workers or ([1, 2, 4] if options.short else [1, 2, 4, 8, 16])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    lines, sentences = [HEAD], list[str]()
    for rate in rates:
        more, more_sentences = rows(rate, workers, list(on_links(rate, workers)))
        lines += more
        sentences += more_sentences
    print(table(lines))
    print("\n".join(sentences))


def on_links(rate: str, workers: Sequence[int]) -> Iterator[Measured]:
    """Yield the rounds of each setting on links with a rate."""
    token = new_token()
    with tempfile.TemporaryDirectory() as folder, Network(max(workers) + 1, rate) as network:
        arguments = json.dumps({"workers": workers, "hosts": network.addresses[1:]})
        command = network.on(0, sys.executable, "-m", "benchmarks.elgato_links", "--master", arguments)
        with (
            workers_of(network, token, tls=False, folder=Path(folder)),
            started([command], more={"DDLF_TOKEN": token}) as (master,),
        ):
            for (name, way, count), line in zip(settings(workers), master.stdout, strict=True):
                facts = json.loads(line)
                setting = Setting(way=STAR, slots=count, batch=BATCH, steps=WAYS[way])
                measured = Measured(setting=setting, **{key: tuple(facts[key]) for key in ("seconds", "computing")})
                print(f"{rate}, {name}, {way}, {count} workers: {1e3 * measured.median:.1f} ms a round", flush=True)
                yield replace(measured, sent=facts["sent"])


if __name__ == "__main__":
    main()
