"""Compare the best choice of ``ddlf plan`` and its verdict with measured choices, in 12 situations. Linux, root.

    python -m benchmarks.choices [--only 3] [--seed 1] [--repeats 3] [--budget 40] [--json FILE] [--short]

A situation is a model, a batch size, the local steps of a round, a link, and two machines. The situations are drawn before
the first measurement, and all are printed. Each machine is a network namespace with its own limited link
(``benchmarks.network``), and each worker has its own core. A slow worker is stopped for two thirds of the time. With
"one core", both workers and the master share a core.

In each situation, the app is planned once. Then all choices train for some rounds, in turns, beside ``fit`` on one machine
with a core. The truth is the median of the repeats. The choices are one and two workers, sync and async, star and
gradient, ``float32`` and ``int8``; with ``exchange="auto"`` also sharded, and with a slow worker also parts by speed. Bars:

- the choice of the plan is within 10 % of the best one in 8 of 10 situations, and never 5 % slower than one worker;
- the verdict is never wrong where the best choice is less than 0.85 or more than 1.15 times as fast as ``fit``, it is
  "unclear" at most twice, and with one core it is "no gain".

A plan that is refused counts as "unclear", and the app's own settings as its choice. A situation takes about 100 s on two
idle cores. ``--short`` measures the third situation with short rounds once, after a short plan: only choices in the
way of the app, beside the choice of the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.distbelief import PORT, started, workers_of
from benchmarks.measure import Spread, machine, table, turns
from benchmarks.network import Network, with_children
from benchmarks.planned import MODELS, SAMPLES
from benchmarks.workload import SINGLE_THREADED, batches
from ddlf import Cluster
from ddlf.errors import ConfigError
from ddlf.extras.planner import planning
from ddlf.extras.planner import probe as probing
from ddlf.extras.planner.choice import Length, Verdict, can_balance
from ddlf.extras.planner.model import Setting
from ddlf.extras.planner.planning import copy_of_app, plan, ways_of
from ddlf.extras.planner.probe import Budget, Probe, own_ways
from ddlf.rpc.tokens import new_token

WORKERS = 2
BATCHES = {"mlp": (50, 100, 200), "lstm": (50, 100), "cnn": (50, 100)}
STEPS = {"mlp": (40, 100, 240), "lstm": (2, 6, 12), "cnn": (4, 12, 30)}
"""Local steps of a round: rounds of 0.1 to 0.6 s, so that a situation does not take long."""
SLOWER, PERIOD_S = 3.0, 0.03
"""How many times as long a slow worker takes, and seconds between two of its stops."""
LEAST_ROUNDS, MEASURE_S, FIT_S = 3, 0.6, 0.4
"""Rounds of a measured choice, their seconds, and seconds of an epoch of ``fit``."""
HOPELESS = 1.5
"""Choices that take so many times as long as the best one in the first repeat are not repeated."""
SHORT, SHORT_STEPS = 4, 16
"""Measurements of a short plan after the first one, and local steps of a round."""
WITHIN, SLOWEST = 1.10, 1.05
WRONG_BELOW, WRONG_ABOVE, MOST_UNCLEAR = 0.85, 1.15, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A training to plan, and its machines.

    Args:
        model: A name in ``MODELS``.
        rate: The rate of each link.
        batch: b, the samples of a batch.
        steps: K, the batches of a slot in a round.
        exchange: ``"star"`` or ``"auto"``.
        slow: Number of the slow worker; 0 for none.
        one_core: Whether both workers and the master share a core.
    """

    model: str
    rate: str
    batch: int
    steps: int
    exchange: str
    slow: int = 0
    one_core: bool = False

    @property
    def machines(self) -> str:
        """The machines in words."""
        return "one core" if self.one_core else f"worker {self.slow} slow" if self.slow else "equal"

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        return [self.model, self.rate, self.machines, str(self.batch), str(self.steps), self.exchange]


def drawn(seed: int) -> list[Situation]:
    """Return 12 situations. Models, links and machines are fixed; the rest is drawn by a seed.

    The CNN is left out at 10 Mbit/s, where a round with two workers takes 7 s.
    """
    chance = random.Random(seed)

    def situation(model: str, rate: str, **machines: Any) -> Situation:
        return Situation(
            model=model,
            rate=rate,
            batch=chance.choice(BATCHES[model]),
            steps=chance.choice(STEPS[model]),
            exchange=chance.choice(("star", "star", "auto")),
            **machines,
        )

    links = [("mlp", "10mbit"), ("lstm", "10mbit")]
    links += [(model, rate) for rate in ("100mbit", "1gbit") for model in MODELS]
    situations = [situation(model, rate) for model, rate in links]
    situations += [situation(model, "1gbit", slow=chance.choice((1, 2))) for model in ("lstm", "cnn")]
    return situations + [situation(model, "1gbit", one_core=True) for model in ("mlp", "cnn")]


def label(setting: Setting) -> str:
    """Return a name of a choice."""
    return f"{setting.slots} {setting.description}, {setting.way.codec}"


def grid(app: Any, length: Length, *, is_slow: bool) -> list[Setting]:
    """Return the choices to measure, the first with one worker.

    One worker is measured only in the way of the app, and with another codec: the other ways take as long or longer with
    one worker.

    Args:
        app: The app.
        length: How long a round is.
        is_slow: Whether parts by speed are a choice.
    """
    own_way, settings = own_ways(app)[0], list[Setting]()
    for slots in range(1, WORKERS + 1):
        for way in ways_of(own_ways(app)):
            if slots == 1 and replace(way, codec=own_way.codec) != own_way:
                continue
            batch = app.batch_size
            settings.append(Setting(way=way, slots=slots, batch=batch, steps=length.steps_of(way, slots, batch)))
            if is_slow and can_balance(way, slots):
                settings.append(replace(settings[-1], balanced=True))
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The prediction of a plan, and the measurement.

    Args:
        situation: The situation.
        verdict: The plan's verdict.
        chosen: The choice of the plan.
        interval: How many times as fast as ``fit`` the choice is according to the plan, with the 80 % interval:
            low end, prediction, high end. None without a plan.
        predicted: Predicted seconds of an epoch of each choice; none of a choice that the plan does not know.
        seconds: Measured seconds of an epoch of each choice, in each repeat. The first choice is one worker.
        fit: Measured seconds of an epoch of ``fit``, in each repeat.
        spent_s: Seconds of the plan.
    """

    situation: Situation
    verdict: Verdict
    chosen: str
    interval: tuple[float, float, float] | None
    predicted: dict[str, float]
    seconds: dict[str, list[float]]
    fit: list[float]
    spent_s: float

    @property
    def best(self) -> str:
        """The fastest choice."""
        return min(self.seconds, key=self.median)

    def median(self, choice: str) -> float:
        """Return the measured seconds of an epoch of a choice."""
        return statistics.median(self.seconds[choice])

    @property
    def of_best(self) -> float:
        """How many times as long as the best choice the chosen one takes."""
        return self.median(self.chosen) / self.median(self.best)

    @property
    def of_one(self) -> float:
        """How many times as long as one worker the chosen one takes."""
        return self.median(self.chosen) / self.median(next(iter(self.seconds)))

    @property
    def factor(self) -> float:
        """How many times as fast as ``fit`` the best choice is."""
        return statistics.median(self.fit) / self.median(self.best)

    @property
    def is_wrong(self) -> bool:
        """Whether the verdict is clearly wrong."""
        no_gain = self.verdict == "no gain" and (self.factor > WRONG_ABOVE)
        return no_gain or (self.verdict == "pays off" and self.factor < WRONG_BELOW)

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        error = says = "-"
        if self.interval is not None:
            low, factor, high = self.interval
            error = f"{self.predicted[self.chosen] / self.median(self.chosen) - 1.0:+.0%}"
            says = f"{factor:.2f} ({low:.2f}-{high:.2f})"
        return [
            *(self.chosen, f"{self.median(self.chosen):.2f}", error),
            *(self.best, f"{self.of_best:.2f}", f"{self.of_one:.2f}"),
            *(self.verdict, says, f"{self.factor:.2f}"),
        ]

    def choices(self) -> list[list[str]]:
        """Return the cells of a table of all choices, the fastest first."""
        predicted = {name: f"{seconds:.2f}" for name, seconds in self.predicted.items()}
        names = sorted(self.seconds, key=self.median)
        return [[name, Spread.of(self.seconds[name]).text(), predicted.get(name, "-")] for name in names]


HEAD = ["model", "link", "machines", "batch", "steps", "exchange"]
FOUND = ["chosen", "s/epoch", "error", "best", "of best", "of one", "verdict", "says", "true factor"]


def bars(outcomes: Sequence[Outcome]) -> list[tuple[str, bool]]:
    """Return what the plan must show, and whether these outcomes show it."""
    near_best = sum(outcome.of_best <= WITHIN for outcome in outcomes)
    slower = max(outcome.of_one for outcome in outcomes)
    wrong = [outcome.situation.cells() for outcome in outcomes if outcome.is_wrong]
    unclear = sum(outcome.verdict == "unclear" for outcome in outcomes)
    of_one_core = [outcome.verdict for outcome in outcomes if outcome.situation.one_core]
    statements = [
        (
            f"the choice is within 10 % of the best one in {near_best} of {len(outcomes)}",
            near_best >= 0.8 * len(outcomes),
        ),
        (f"the choice takes at most {slower:.2f} times as long as one worker", slower <= SLOWEST),
        (f"{len(wrong)} verdicts are wrong: {wrong}", not wrong),
        (f"{unclear} verdicts are unclear", unclear <= MOST_UNCLEAR),
    ]
    if of_one_core:
        statements.append((f"with one core: {', '.join(of_one_core)}", {*of_one_core} == {"no gain"}))
    return statements


# -- on the master's machine ----------------------------------------------------------------------------------------------


async def master(facts: dict[str, Any]) -> None:
    """Plan, measure the choices in turns, and print the outcome."""
    situation = Situation(**facts["situation"])
    async with (
        Cluster(facts["hosts"], PORT, insecure_plaintext=True, connect_timeout_s=60) as cluster,
        fit_beside(situation) as fit_s,
    ):
        print("connected", flush=True)
        app = MODELS[situation.model](cluster)
        app.batch_size, app.worker_steps, app.exchange = situation.batch, situation.steps, situation.exchange
        if facts["short"]:
            room = iter((True,) * SHORT)
            Budget.has_room = lambda budget, needed: next(room, False)  # type: ignore[method-assign]
            probing.MEASURE_S = 0.01
        result, planning.LEAST_S = None, math.inf  # so memory takes no time of the budget
        try:
            result = await plan(app, facts["budget"], say=say, again=True)
        except ConfigError as error:
            say(f"no plan: {error}")
        probing.LEAST_ROUNDS, probing.MEASURE_S = LEAST_ROUNDS, min(MEASURE_S, probing.MEASURE_S)
        length = Length(samples=SAMPLES, steps=situation.steps)
        choices = grid(app, length, is_slow=situation.slow > 0)
        if facts["short"]:
            choices = [choice for choice in choices if choice.way == own_ways(app)[0]]
        settings = {label(choice): choice for choice in choices}
        now = next(choice for choice in settings.values() if choice.slots == WORKERS)
        chosen = now if result is None else result.best.setting
        settings.setdefault(label(chosen), chosen)
        begin = time.perf_counter()
        seconds, fit = await measured(app, settings, label(chosen), facts["repeats"], fit_s)
        say(f"measured in {time.perf_counter() - begin:.1f} s")
    predicted = (
        {} if result is None else {label(prediction.setting): prediction.epoch.seconds for prediction in result.choices}
    )
    outcome = Outcome(
        situation=situation,
        verdict="unclear" if result is None else result.verdict,
        chosen=label(chosen),
        interval=None if result is None else (result.best.low, result.best.factor, result.best.high),
        predicted={name: predicted[name] for name in settings if name in predicted},
        seconds=seconds,
        fit=fit,
        spent_s=0.0 if result is None else result.spent_s,
    )
    print(json.dumps(asdict(outcome)), flush=True)


def say(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)


async def measured(
    app: Any, settings: dict[str, Setting], chosen: str, repeats: int, fit_s: Callable[[], Awaitable[float]]
) -> tuple[dict[str, list[float]], list[float]]:
    """Train with all choices and with ``fit``, in turns.

    Args:
        app: The app, connected to its workers.
        settings: The choices, the first with one worker.
        chosen: The choice of the plan.
        repeats: How often.
        fit_s: Returns the seconds of an epoch of ``fit``.

    Returns:
        Seconds of an epoch of each choice, and of ``fit``, in each repeat.
    """
    probe, seconds, fit = Probe(copy_of_app(app)), dict[str, list[float]](), list[float]()
    probe.samples = SAMPLES
    for repeat, name in turns(["fit", *settings], repeats):
        if name == "fit":
            fit.append(await fit_s())
            continue
        setting, longest = settings[name], HOPELESS * min((times[0] for times in seconds.values()), default=0.0)
        if repeat and seconds[name][0] > longest and name not in (chosen, next(iter(settings))):
            continue
        probe.app.balance = "speed" if setting.balanced else "equal"
        rounds = await probe.rounds(setting)
        assert rounds is not None
        seconds.setdefault(name, []).append(SAMPLES / setting.samples * rounds.median)
    return {name: seconds[name] for name in settings}, fit


@contextlib.asynccontextmanager
async def fit_beside(situation: Situation) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Start a process with ``fit`` on a core; it computes only when asked for the seconds of an epoch."""
    words = ("taskset", "-c", "0", sys.executable, "-m", "benchmarks.choices")
    situation_text = json.dumps(asdict(situation))
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    child = await asyncio.create_subprocess_exec(*words, "--fit", situation_text, **pipes)
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout
    await stdout.readline()  # it has compiled

    async def seconds() -> float:
        stdin.write(b"\n")
        return float(await stdout.readline())

    try:
        yield seconds
    finally:
        stdin.close()
        await child.wait()


def fit(situation: Situation) -> None:
    """Train with ``fit`` alone on one thread. For each line of standard input, print the seconds of an epoch.

    A call of the compiled step trains as many batches as on a worker. Otherwise a worker without a cluster would be faster
    than ``fit``, and a gain would say nothing about a cluster.
    """
    os.environ.update(SINGLE_THREADED)
    app: Any = MODELS[situation.model]()
    asyncio.run(app.load_dataset())
    asyncio.run(app.create_model())
    import keras

    from ddlf.training.slot.keras_model import use_fast_steps

    use_fast_steps(app.model, (), app.model.steps_per_execution)
    ends = list[float]()

    class Note(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    def step_s(steps: int) -> float:
        """Return the seconds of a step of the second of two epochs."""
        count = min(steps * situation.batch, len(app.x_train))
        data = batches(app.x_train[:count], app.y_train[:count], situation.batch)
        app.model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[Note()])
        return (ends[-1] - ends[-2]) / (count / situation.batch)

    step_s(10)
    steps = max(10, round(FIT_S / step_s(10)))
    print(steps, flush=True)
    for _ in sys.stdin:
        print(step_s(steps) * len(app.x_train) / situation.batch, flush=True)


# -- the machines ---------------------------------------------------------------------------------------------------------


class Pinned(Network):
    """Machines that have one core each, or share one core. The master's machine has all cores.

    Args:
        rate: The rate of each link.
        one_core: Whether they share a core.
    """

    def __init__(self, rate: str, *, one_core: bool) -> None:
        super().__init__(1 + WORKERS, rate)
        self._one_core = one_core

    def on(self, machine: int, *command: str) -> list[str]:
        """See ``Network``."""
        if self._one_core:
            return super().on(machine, "taskset", "-c", "0", *command)
        return super().on(machine, *(("taskset", "-c", str(machine - 1)) if machine else ()), *command)


@contextlib.contextmanager
def slowed(daemon: int) -> Iterator[None]:
    """Let the processes below a worker's daemon run only part of the time."""
    ended = threading.Event()

    def send(number: signal.Signals) -> None:
        for process in with_children([daemon])[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def duty_cycle() -> None:
        while not ended.is_set():
            send(signal.SIGSTOP)
            ended.wait(PERIOD_S * (1 - 1 / SLOWER))
            send(signal.SIGCONT)
            ended.wait(PERIOD_S / SLOWER)

    thread = threading.Thread(target=duty_cycle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def outcome_of(situation: Situation, options: argparse.Namespace) -> Outcome:
    """Set a situation up, and return its outcome."""
    token = new_token()
    with (
        tempfile.TemporaryDirectory() as folder,
        Pinned(situation.rate, one_core=situation.one_core) as network,
        workers_of(network, token, tls=False, folder=Path(folder)) as daemons,
    ):
        facts = {"hosts": network.addresses[1:], "situation": asdict(situation), "short": options.short}
        facts |= {"budget": options.budget, "repeats": options.repeats}
        command = network.on(0, sys.executable, "-m", "benchmarks.choices", "--master", json.dumps(facts))
        with started([command], more={"DDLF_TOKEN": token, "XDG_STATE_HOME": folder}) as (child,):
            child.stdout.readline()  # it is connected
            with slowed(daemons[situation.slow - 1]) if situation.slow else contextlib.nullcontext():
                line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the master of {situation} ended without an outcome")
    outcome = json.loads(line)
    return Outcome(
        **{**outcome, "situation": situation, "interval": outcome["interval"] and tuple(outcome["interval"])}
    )


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: [int(number) for number in text.split(",")], help="such as 3 or 3,4"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of a plan, without memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line for each situation")
    parser.add_argument("--short", action="store_true", help="third situation, few choices, one repeat, short plan")
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--fit", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Run the command."""
    options = arguments().parse_args(argv)
    if options.fit is not None:
        fit(Situation(**options.fit))
        return []
    if options.master is not None:
        asyncio.run(master(options.master))
        return []
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    if options.short:
        options.only, options.repeats = options.only or [3], 1
    situations = drawn(options.seed)
    if options.short:
        situations = [replace(situation, steps=SHORT_STEPS) for situation in situations]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(
        table([["", *HEAD], *([str(number), *situation.cells()] for number, situation in enumerate(situations, 1))]),
        flush=True,
    )
    outcomes, failed = dict[int, Outcome](), 0
    for number in options.only or range(1, 1 + len(situations)):
        begin = time.perf_counter()
        try:
            outcomes[number] = outcome = outcome_of(situations[number - 1], options)
        except RuntimeError as error:  # the other situations are worth their time
            print(f"\n{number}: {error}", flush=True)
            failed += 1
            continue
        print(f"\n{number}: {' '.join(outcome.situation.cells())}, {time.perf_counter() - begin:.0f} s")
        print(f"fit {statistics.median(outcome.fit):.2f} s an epoch; measured and predicted seconds of the choices:")
        print(table([["choice", "measured", "predicted"], *outcome.choices()]), flush=True)
        if options.json:
            with options.json.open("a") as file:
                print(json.dumps(asdict(outcome)), file=file)
    print(f"\nmeasured in {(time.perf_counter() - begun) / 60:.1f} min")
    rows = [["", *HEAD[:5], *FOUND]]
    rows += [[str(number), *outcome.situation.cells()[:5], *outcome.cells()] for number, outcome in outcomes.items()]
    print("\n" + table(rows))
    for text, holds in bars(list(outcomes.values())) if outcomes else ():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
    if failed:
        sys.exit(f"{failed} situations have no outcome")
    return list(outcomes.values())


if __name__ == "__main__":
    main()
