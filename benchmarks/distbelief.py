"""Measure a round of the sharded exchange on limited links, beside the star and torch.

    python -m benchmarks.distbelief [--quick]
    python -m benchmarks.distbelief --parameters 1e6,1e7 --rate 50mbit --ways sharded,gloo --torch VENV/bin/python

Each machine, and also the master's, is a network namespace with its own link to one switch (``benchmarks.network``;
Linux, root). Workers are real daemons and executors, and the master runs a real training. Only the computation of
``fit`` is replaced (``benchmarks.stand_in``), so a round consists of its exchange. The bound is the number of bytes
that must pass a link, divided by its rate. For the sharded exchange these are ``2 (K - 1) / K`` models. For the master
of the star they are ``2 K`` models, because its weights go out before updates come back.

Two rounds of each training do not count: the first one, and the last one, which ends with the model on the master. Bytes are
counted by the kernel at the cables. The links are idle between rounds while the counters are read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Spread, busy_s, machine, some_of, table
from benchmarks.network import Network, computed_s, counted, resident
from ddlf.rpc.tokens import new_token

PORT = 9000
REST_S = 0.3
"""Pause between two rounds, until all sent bytes have arrived."""
IDLE_S = 4.0
"""Time after the first round in which the bytes of idle links are counted."""
END_S = 120.0
"""Longest time for a master to receive the model at the end."""
UNITS = {"mbit": 1e6, "gbit": 1e9}
WAYS = ("sharded", "star", "gloo", "ddp")
TORCH = ("gloo", "ddp")
GLOO = Path(__file__).parent / "baselines" / "gloo.py"


@dataclass(frozen=True, slots=True)
class Row:
    """The measurement of one way.

    Args:
        way: One of ``WAYS``.
        parameters: Number of parameters of the model.
        workers: K.
        tls: Whether the connections were encrypted.
        rate: Speed of a link in each direction, in bytes per second.
        seconds: Duration of each round.
        busiest: The most bytes that a worker's link carried in one direction, in each round.
        uneven: Largest difference of the sent bytes of two workers, as a share of the smallest count, in each round.
        master: Bytes through the master's link, both directions together, for each worker, in each round.
        cores: Busy cores of this machine during each round, of all processes.
        computed: Processor seconds of the processes of all machines except the master's, in each round.
        idle: Bytes per second and worker through the master's idle link: heartbeats and acknowledgements.
        intervals: Seconds over which ``master`` was counted, in each round.
        memory: Peak memory of a worker's process, and growth of the master's memory during these rounds.
    """

    way: str
    parameters: int
    workers: int
    tls: bool
    rate: float
    seconds: list[float]
    busiest: list[float]
    uneven: list[float]
    master: list[float]
    cores: list[float]
    computed: list[float]
    idle: float
    intervals: list[float]
    memory: tuple[float, float]

    @property
    def exchanged(self) -> float:
        """Bytes through the master's link in a round, for each worker, without the bytes of idle links."""
        of = [all - self.idle * s for all, s in zip(self.master, self.intervals, strict=True)]
        return Spread.of(of).median

    @property
    def bound_s(self) -> float:
        """Return the seconds that its bytes need on an idle link."""
        return self.least / self.rate

    @property
    def least(self) -> float:
        """Return the bytes that must pass the busiest link."""
        times = 2 * self.workers if self.way == "star" else 2 * (self.workers - 1) / self.workers
        return times * 4 * self.parameters


def rate_of(text: str) -> float:
    """Return the bytes per second of a rate in the notation of ``tc``."""
    for unit, bits in UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * bits / 8
    raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 200mbit")


# -- processes on machines ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], *, more: Mapping[str, str] | None = None, stderr: int | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that end when their standard input closes. The caller writes to them and reads from them."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(more or {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1)
    processes = [subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@contextlib.contextmanager
def workers_of(network: Network, token: str, *, tls: bool, folder: Path) -> Iterator[list[int]]:
    """Start a worker on each machine except the first. Yields the process ids of the daemons."""

    def command(number: int) -> list[str]:
        where = ("--host", network.addresses[number], "--port", str(PORT), "--state-dir", str(folder / str(number)))
        how = () if tls else ("--insecure-plaintext",)
        daemon = (sys.executable, "-m", "ddlf.cli.worker", "--exit-with-parent", "--ready-fd", "1", "--quiet")
        return network.on(number, *daemon, *where, *how)

    with started(
        [command(number) for number in range(1, len(network.addresses))], stderr=subprocess.DEVNULL
    ) as daemons:
        for daemon in daemons:
            print(token, file=daemon.stdin, flush=True)
        for daemon in daemons:
            if failure := json.loads(daemon.stdout.readline() or "{}").get("failure", "it ended"):
                raise RuntimeError(f"a worker could not be started: {failure}")
        yield [daemon.pid for daemon in daemons]


def measured(rounds: int, child: subprocess.Popen[str], processes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure the rounds of a process that prints the seconds of each round, and then waits for a line.

    Args:
        rounds: Number of rounds.
        child: The process that prints the rounds.
        processes: The id of a process on each machine, the master's first.

    Yields:
        For each round its seconds, the sent and received bytes of each machine, and the other arguments of ``row``.
    """
    before: dict[str, Any] = {}
    idle = 0.0
    for _ in range(rounds):
        line = child.stdout.readline()
        if not line:
            raise RuntimeError("it ended before its rounds were over")
        time.sleep(REST_S)
        after = usage(processes)
        if before:
            used = {name: after[name] - before[name] for name in ("at", "busy", "computed", "grown")}
            moved = [(s - a, r - b) for (s, r), (a, b) in zip(after["links"], before["links"], strict=True)]
            yield {**used, "idle": idle, "seconds": float(line), "moved": moved, "most": after["most"]}
        else:  # what goes over the links when nobody does anything
            time.sleep(IDLE_S)
            rested = usage(processes)
            moved = [sum(s) - sum(a) for s, a in zip(rested["links"], after["links"], strict=True)]
            idle = moved[0] / (rested["at"] - after["at"])
        before = usage(processes)
        print(file=child.stdin, flush=True)


def usage(processes: Sequence[int]) -> dict[str, Any]:
    """Return time, memory and bytes of all machines; the argument has the id of a process on each, the master's first."""
    memory = [resident(process) for process in processes]
    return {
        "at": time.monotonic(),
        "busy": busy_s() or 0.0,
        "computed": computed_s(processes[1:]),
        "links": counted(processes),
        "most": max(most for _, most in memory[1:]),
        "grown": memory[0][0],
    }


def row(way: str, parameters: int, rate: float, rounds: Sequence[dict[str, Any]], *, tls: bool) -> Row:
    """Return the row of one way from its rounds. The first machine is the master's."""
    workers = [record["moved"][1:] for record in rounds]
    sent = [[out for out, _ in machines] for machines in workers]
    return Row(
        way=way,
        parameters=parameters,
        workers=len(sent[0]),
        tls=tls,
        rate=rate,
        seconds=[record["seconds"] for record in rounds],
        busiest=[float(max(map(max, machines))) for machines in workers],
        uneven=[max(of) / min(of) - 1 for of in sent],
        master=[sum(record["moved"][0]) / len(sent[0]) for record in rounds],
        cores=[record["busy"] / record["at"] for record in rounds],
        computed=[record["computed"] for record in rounds],
        idle=rounds[0]["idle"] / len(sent[0]),
        intervals=[record["at"] for record in rounds],
        memory=(max(record["most"] for record in rounds), sum(record["grown"] for record in rounds)),
    )


def exchanged(
    way: str, network: Network, daemons: Sequence[int], options: argparse.Namespace, parameters: int, *, tls: bool
) -> Row:
    """Measure the rounds of a training."""
    rounds = 1 + (options.rounds if way == "sharded" else 1)
    facts = {"exchange": way, "hosts": network.addresses[1:], "parameters": parameters, "tls": tls}
    facts |= {"rounds": rounds + (way == "sharded"), "outer": options.outer, "codec": options.codec}
    command = network.on(0, sys.executable, "-m", "benchmarks.distbelief", "--master", json.dumps(facts))
    with started([command], more={"DDLF_TOKEN": options.token}) as (child,):
        records = list(measured(rounds, child, [child.pid, *daemons]))
    return row(way, parameters, rate_of(options.rate), records, tls=tls)


def reduced(way: str, network: Network, options: argparse.Namespace, parameters: int) -> Row:
    """Measure rounds of torch with gloo, with one rank per worker."""
    world, first = len(network.addresses) - 1, network.addresses[1]

    def command(rank: int) -> list[str]:
        arguments = (way, str(rank), str(world), first, str(parameters), str(options.rounds + 1))
        return network.on(rank + 1, options.torch, str(GLOO), *arguments)

    environment = {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    with (
        started([network.on(0, "cat")]) as (nobody,),
        started([command(rank) for rank in range(world)], more=environment) as ranks,
    ):
        records = list(measured(options.rounds + 1, ranks[0], [nobody.pid, *(rank.pid for rank in ranks)]))
    return row(way, parameters, rate_of(options.rate), records, tls=False)


# -- the master -----------------------------------------------------------------------------------------------------------


async def train(facts: dict[str, Any]) -> None:
    """Run the master: print the seconds of each round, and wait for a line after each."""
    from benchmarks.stand_in import StandInRun
    from ddlf import Cluster

    async def on_round(record: Any) -> None:
        print(record.seconds, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    async with Cluster(facts["hosts"], PORT, insecure_plaintext=not facts["tls"], connect_timeout_s=60) as cluster:
        rules = {name: facts[name] for name in ("exchange", "outer", "codec")} | {"optimizer_state": "fresh"}
        run = StandInRun(cluster, facts["parameters"], master_epochs=facts["rounds"], **rules)
        run.on_round = on_round  # type: ignore[method-assign]
        await run.train_model()


# -- what is shown --------------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Return bytes as text with a unit."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def report(rows: Sequence[Row]) -> str:
    """Return a table of all measurements."""
    head = ("way", "parameters", "TLS", "round", "bound", "x bound", "busiest link", "x least", "shards differ")
    lines = [[*head, "through the master, per worker", "without heartbeats", "cores busy", "computed", "memory"]]
    for row in rows:
        seconds, busiest = Spread.of(row.seconds), Spread.of(row.busiest).median
        resident_share, grown = (bytes / (4 * row.parameters) for bytes in row.memory)
        busiest = busiest if row.way != "star" else max(row.master) * row.workers / 2
        lines.append(
            [
                row.way,
                f"{row.parameters / 1e6:g} M",
                "yes" if row.tls else "no",
                f"{seconds.text()} s",
                f"{row.bound_s:.2f} s",
                f"{seconds.median / row.bound_s:.2f}",
                size(busiest),
                f"{busiest / (row.least / (2 if row.way == 'star' else 1)):.3f}",
                "-" if row.way == "star" else f"{Spread.of(row.uneven).median:.1%}",
                "-" if row.way in TORCH else size(Spread.of(row.master).median),
                "-" if row.way in TORCH else size(row.exchanged),
                f"{Spread.of(row.cores).median:.1f}",
                f"{Spread.of(row.computed).median:.2f} s",
                f"{resident_share:.1f} x model, master +{grown:.1f}",
            ]
        )
    return table(lines)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.distbelief", description=(__doc__ or "").partition("\n")[0]
    )
    result.add_argument("--workers", type=int, default=8)
    result.add_argument("--parameters", default="1e6,1e7,1e8", help="of the models (default: %(default)s)")
    result.add_argument("--rate", default="200mbit", help="of each link, in each direction (default: %(default)s)")
    result.add_argument("--ways", type=some_of(WAYS), default=["sharded", "star"], help=", ".join(WAYS))
    result.add_argument("--tls", type=some_of(("no", "yes")), default=["no", "yes"], help="no, yes, or no,yes")
    result.add_argument("--rounds", type=int, default=3, help="that are measured; of the star one")
    result.add_argument("--star-most", type=float, default=1e7, help="largest model of the star, whose rounds are long")
    result.add_argument("--outer", default="subtract", help="the outer optimizer")
    result.add_argument("--codec", default="float32", help="of updates")
    result.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="one that has torch, for gloo and ddp"
    )
    result.add_argument("--quick", action="store_true", help="1 and 10 M parameters, of the star 1 M; under 3 minutes")
    result.add_argument("--json", type=Path, metavar="FILE")
    result.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    return result


def main(argv: list[str] | None = None) -> list[Row]:
    """The command."""
    options = parser().parse_args(argv)
    if options.master is not None:
        asyncio.run(train(options.master))
        return []
    if options.quick:
        options.parameters, options.star_most, options.rounds = "1e6,1e7", 1e6, 2
    sizes, options.token, rows = [int(float(number)) for number in options.parameters.split(",")], new_token(), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    with tempfile.TemporaryDirectory() as folder, Network(options.workers + 1, options.rate) as network:
        for tls_text in options.tls:
            tls = tls_text == "yes"
            with workers_of(network, options.token, tls=tls, folder=Path(folder, tls_text)) as daemons:
                for parameters in sizes:
                    for way in options.ways:
                        if way == "sharded":
                            rows.append(exchanged(way, network, daemons, options, parameters, tls=tls))
                        elif way in TORCH and not tls:
                            rows.append(reduced(way, network, options, parameters))
                        elif way == "star" and not tls and parameters <= options.star_most:
                            rows.append(exchanged(way, network, daemons, options, parameters, tls=tls))
                        else:
                            continue
                        print(" ".join(report(rows[-1:]).splitlines()[-1].split()), file=sys.stderr, flush=True)
    print(report(rows))
    if options.json:
        result = {"machine": machine(), "rate": options.rate, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
