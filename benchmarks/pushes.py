"""Measure how many pushes a second limited links carry: Downpour SGD, beside PyTorch's RPC and Ray with one server each.

    python -m benchmarks.pushes [--ways downpour,torch,ray] [--parameters 1e7] [--workers 8] [--rate 200mbit] [--torch PYTHON] [--ray PYTHON]

Each machine is a network namespace (``benchmarks.network``). Replicas compute nothing: each repeatedly sends gradients
and receives the weights. The master of Downpour, or the single server of the others, is on its own machine. The bound
is the number of bytes that must pass a link. If each of K workers has a server, a push of every replica moves
``2 (K - 1) / K`` models over a link in each direction. A single server moves K models.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.distbelief import rate_of, started, workers_of
from benchmarks.measure import machine, some_of, table
from benchmarks.network import Network
from ddlf.rpc.tokens import new_token

WAYS = ("downpour", "torch", "ray")
START_S = 120.0
ANSWERS = """
import socket, sys, time
while socket.socket().connect_ex((sys.argv[1], 6379)):
    time.sleep(0.2)
"""
"""Code that waits for Ray's first node. Other nodes end without it."""
AGAIN = 'until "$0" "$@"; do sleep 1; done'
"""Ray ends a node that does not start within 30 s. With few processors, not all nodes start in that time."""
BASELINES = Path(__file__).parent / "baselines"
ROUNDS, PUSHES_A_ROUND = 3, 4
"""Rounds and pushes of a replica of Downpour. The first fetch of a round does not overlap a push, and the first and the last
round do not count.
"""


def bound(way: str, workers: int, parameters: int, rate: float) -> float:
    """Return the maximum number of pushes per second."""
    model_s = 4 * parameters / rate
    return workers / (2 * (workers - 1) / workers * model_s) if way == "downpour" else 1 / model_s


def downpour(network: Network, options: argparse.Namespace, folder: Path) -> float:
    """Return the pushes per second while all replicas push."""
    token, workers = new_token(), len(network.addresses) - 1
    facts = {
        "hosts": network.addresses[1:],
        "parameters": options.parameters,
        "rounds": ROUNDS,
    }
    command = network.on(0, sys.executable, "-m", "benchmarks.pushes", "--master", json.dumps(facts))
    with (
        workers_of(network, token, tls=False, folder=folder),
        started([command], more={"DDLF_TOKEN": token}) as (master,),
    ):
        times = [float(line) for line in master.stdout]
    times = times[workers - 1 : -workers]  # none has made its first round, or its last one
    return PUSHES_A_ROUND * (len(times) - 1) / (times[-1] - times[0])


async def train(facts: dict[str, Any]) -> None:
    """Run the master, and print the end of each slot's round."""
    from benchmarks.stand_in import StandInRun
    from ddlf import Cluster

    async def on_round(record: Any) -> None:
        print(time.monotonic(), flush=True)

    async with Cluster(facts["hosts"], 9000, insecure_plaintext=True, connect_timeout_s=60) as cluster:
        how: dict[str, Any] = {
            "mode": "downpour",
            "warm_start": 0,
            "push_rule": "sgd:rate=0.001",
            "staleness": "constant",
        }
        how |= {"batch_size": 1, "master_epochs": facts["rounds"], "samples": PUSHES_A_ROUND * cluster.N}
        run = StandInRun(cluster, facts["parameters"], **how)
        run.on_round = on_round  # type: ignore[method-assign]
        await run.train_model()


def torch(network: Network, options: argparse.Namespace, folder: Path) -> float:
    """Return the pushes per second of PyTorch's RPC."""
    world, first = len(network.addresses), network.addresses[0]

    def command(rank: int) -> list[str]:
        arguments = (str(rank), str(world), first, str(options.parameters), str(options.pushes))
        return network.on(rank, options.torch, str(BASELINES / "torch_server.py"), *arguments)

    environment = {"GLOO_SOCKET_IFNAME": "cable", "TP_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    with started([command(rank) for rank in range(world)], more=environment) as (server, *_):
        return 1 / statistics.mean(map(float, server.stdout.readline().split()))


def ray(network: Network, options: argparse.Namespace, folder: Path) -> float:
    """Return the pushes per second of Ray."""
    first, *worker_addresses = network.addresses
    program = str(Path(options.ray).parent / "ray")
    how = "--num-cpus 1 --object-store-memory 600000000 --disable-usage-stats --block"
    temporary_folder = f"--temp-dir {folder / 'ray'}"
    head = f"start --head --node-ip-address {first} --port 6379 --include-dashboard false {temporary_folder} {how}"
    nodes = [
        network.on(
            number,
            "sh",
            "-c",
            AGAIN,
            program,
            *f"start --address {first}:6379 --node-ip-address {address} {how}".split(),
        )
        for number, address in enumerate(worker_addresses, 1)
    ]
    output, secret = folder / "said", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with running([network.on(0, program, *head.split())], output, secret):
        subprocess.run(network.on(0, sys.executable, "-c", ANSWERS, first), check=True, timeout=START_S)
        with running(nodes, output, secret):
            arguments = (
                f"{first}:6379",
                first,
                str(len(worker_addresses)),
                str(options.parameters),
                str(options.pushes),
            )
            driver = network.on(0, options.ray, str(BASELINES / "ray_server.py"), *arguments)
            environment = {**os.environ, **secret}
            done = subprocess.run(driver, capture_output=True, text=True, timeout=options.timeout, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"Ray's driver failed: {done.stderr.strip()[-2000:]}\nIts nodes said: {output.read_text(errors='replace')[-2000:]}"
        )
    return 1 / statistics.mean(map(float, done.stdout.splitlines()[-1].split()))


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], output: Path, more: Mapping[str, str]) -> Iterator[None]:
    """Start processes with additional environment variables that write to a file. At the end, kill them and their descendants."""
    environment = {**os.environ, **more}
    with output.open("a") as file:
        processes = [
            subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            for command in commands
        ]
    try:
        yield
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=some_of(WAYS), default=["downpour"], help=", ".join(WAYS))
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=10_000_000, help="of the model")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", default="200mbit", help="of each link, in each direction (default: %(default)s)")
    parser.add_argument("--pushes", type=int, default=6, help="of each rank of the others")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that has torch")
    parser.add_argument("--ray", default=sys.executable, metavar="PYTHON", help="one that has Ray")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that Ray's driver may take")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--master", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.master is not None:
        asyncio.run(train(options.master))
        return {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking the machines away
    measure = {"downpour": downpour, "torch": torch, "ray": ray}
    rates_of: dict[str, list[float]] = {way: [] for way in options.ways}
    for _ in range(options.repeats):
        for way in options.ways:
            with tempfile.TemporaryDirectory() as folder, Network(options.workers + 1, options.rate) as network:
                rates_of[way].append(measure[way](network, options, Path(folder)))
            print(f"{way}: {rates_of[way][-1]:.2f} pushes a second", file=sys.stderr, flush=True)
    rows = [["way", "pushes a second", "bound", "Downpour is"]]
    for way, rates in rates_of.items():
        most = bound(way, options.workers, options.parameters, rate_of(options.rate))
        times = statistics.median(rates_of["downpour"]) / statistics.median(rates) if "downpour" in rates_of else 0.0
        rows.append([way, f"{statistics.median(rates):.2f}", f"{most:.2f}", f"{times:.1f}x" if times else "-"])
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "pushes": rates_of}, indent=2) + "\n")
    return rates_of


if __name__ == "__main__":
    main()
