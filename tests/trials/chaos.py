"""Send many requests under many random faults, and check that every request has exactly one correct outcome.

    python -m tests.trials.chaos [--requests 20000] [--faults 500] [--workers 4] [--seed 0] [--scale 1] [--history FILE]

Each request appends ``start ID`` and ``end ID`` to its worker's log, a file that survives every process. Some requests
are idempotent and are tried again, some have a deadline, some wait, and some compute. Meanwhile the trial kills
executors and daemons (which restart), freezes and slows workers, cuts them off in one or both directions, breaks and
resets connections, cancels calls in bursts, and lets other masters try to connect. Faults follow from the seed and the
number of requests that have begun, not from a clock, so a run can be repeated. ``--scale`` shortens faults and time
limits.

The check reads the master's history and the workers' logs:

1. Every request has exactly one outcome. It comes before the request's deadline, or within 90 s if there is none.
2. A result belongs to its request, and the method of the request has started and ended.
3. A request that is not idempotent starts at most once, an idempotent one at most 3 times.
4. A request that ended with ``may_have_run=False`` never started.
5. Every error has a kind that a fault explains.
6. The epoch of a worker's lease never decreases, and no other master gets a worker of this master. After this master
   has lost a worker, another one may get it; then this master begins with a new lease.
7. At the end all workers answer, nothing runs, and no process remembers an open request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddlf.cluster.proxy import MAX_ATTEMPTS, ProxyWorker
from ddlf.errors import (
    ConnectError,
    DDLFError,
    ExecutorCrashed,
    LeaseError,
    RequestCancelled,
    RequestTimeout,
    WorkerLost,
)
from ddlf.testing import local_cluster
from ddlf.testing.cluster import FaultyCluster
from tests.trials.options import read_options

HANG_S = 90.0
LATE_S = 5.0
"""Seconds after its deadline in which a request may still end, on a machine with two cores and many processes."""
CLIENTS = 6
"""Number of clients for each worker. Each client has one open request at a time."""
AHEAD = 12
"""Requests may be ahead of the faults by at most this many faults, so that faults happen until the end."""
EXPECTED = (WorkerLost, ExecutorCrashed, ConnectError, RequestTimeout, RequestCancelled, LeaseError)
KINDS = (
    "kill_executor",
    "kill_daemon",
    "stop",
    "stop_executor",
    "partition",
    "one_way",
    "flap",
    "slow",
    "reset",
    "cancel",
    "second_master",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One planned request.

    Args:
        id: Its number, from 1.
        idempotent: Whether it may run more than once.
        timeout_s: Its deadline in seconds, or None.
        work: ``"compute"`` (blocks the executor), ``"wait"`` (a coroutine) or ``"hosted"`` (a hosted method that computes).
        seconds: The time that its method takes.
    """

    id: int
    idempotent: bool
    timeout_s: float | None
    work: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    Args:
        at: The fault happens when this number of requests has begun.
        worker: The number of the worker, from 1.
        kind: One of ``KINDS``.
        seconds: Its duration.
        number: The number of cancelled calls or of flaps, or the factor of slowness. For ``one_way``, an odd number
            stands for the direction to the master.
    """

    at: int
    worker: int
    kind: str
    seconds: float
    number: int


@dataclass(slots=True)
class Outcome:
    """The outcome of one request on the master.

    Args:
        id: The number of the request.
        worker: The number of the worker.
        kind: ``"result"``, ``"cancelled"``, ``"hung"`` or the name of the error's class.
        text: The message of the error.
        may_have_run: The attribute of the error; None if it has none.
        value: The result.
        began: The beginning of the request, in seconds since the begin of the run.
        ended: The end of the request, in seconds since the begin of the run.
    """

    id: int
    worker: int
    kind: str
    began: float
    ended: float
    text: str = ""
    may_have_run: bool | None = None
    value: Any = None


@dataclass(slots=True)
class History:
    """The history of a run.

    Args:
        calls: The requests by their numbers.
        outcomes: The outcomes in the order of their ends.
        starts: Number of starts of each request's method, from the workers' logs.
        ends: Number of ends of each request's method, from the workers' logs.
        notes: Other violations, as sentences.
        faults: The planned faults.
    """

    calls: dict[int, Call]
    outcomes: list[Outcome] = field(default_factory=list)
    starts: Counter[int] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write each fault and each outcome as a line of JSON."""
        lines = [asdict(line) for line in (*self.faults, *self.outcomes)]
        path.write_text("".join(f"{json.dumps(line, default=str)}\n" for line in lines))

    def read_logs(self, paths: Iterable[Path]) -> None:
        """Count the starts and ends in the logs of the workers."""
        for path in paths:
            for line in path.read_text().splitlines():
                action, id = line.split()
                (self.starts if action == "start" else self.ends)[int(id)] += 1

    def violations(self) -> list[str]:
        """Return a sentence for each broken promise."""
        sentences = list(self.notes)
        times = Counter(outcome.id for outcome in self.outcomes)
        sentences += [f"request {id} has {times[id]} outcomes" for id in self.calls if times[id] != 1]
        for outcome in self.outcomes:
            call, starts, ends = self.calls[outcome.id], self.starts[outcome.id], self.ends[outcome.id]
            detail = outcome.text.partition("\n")[0][:120] if outcome.text else outcome.value
            about = f"request {outcome.id} on worker {outcome.worker} ({outcome.kind}: {detail})"
            seconds = outcome.ended - outcome.began
            if outcome.kind == "hung" or seconds > (HANG_S if call.timeout_s is None else call.timeout_s + LATE_S):
                sentences.append(f"{about} took {seconds:.1f} s, its deadline was {call.timeout_s}")
            if outcome.kind == "result" and (outcome.value != outcome.id or not starts or not ends):
                sentences.append(f"{about} started {starts} and ended {ends} times")
            if starts > (MAX_ATTEMPTS if call.idempotent else 1):
                sentences.append(f"{about} started {starts} times, idempotent {call.idempotent}")
            if outcome.may_have_run is False and starts:
                sentences.append(f"{about} says that it cannot have run, but it started {starts} times")
            if outcome.kind not in ("result", "cancelled", "hung", *(kind.__name__ for kind in EXPECTED)):
                sentences.append(f"{about} is an error that no fault explains")
        return sentences


def make_plan(seed: int, requests: int, faults: int, workers: int, scale: float) -> tuple[list[Call], list[Fault]]:
    """Return random requests and faults, which depend only on the arguments."""
    chance = random.Random(seed)
    calls = [
        Call(
            id,
            idempotent=chance.random() < 0.5,
            timeout_s=round(chance.uniform(0.02, 6) * scale, 3) if chance.random() < 0.4 else None,
            work=chance.choice(("compute", "wait", "hosted")),
            seconds=round(chance.choice((0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.2) * scale)), 4),
        )
        for id in range(1, requests + 1)
    ]
    broken = []
    for number in range(faults):
        kind = chance.choice(KINDS)
        longest = 8 if kind in ("stop", "stop_executor", "partition", "one_way") else 2
        broken.append(
            Fault(
                at=number * requests // max(1, faults),
                worker=chance.randint(1, workers),
                kind=kind,
                seconds=round(chance.uniform(0.1, longest) * scale, 2),
                number=chance.randint(2, 8),
            )
        )
    return calls, broken


def compute(id: int, log: str, seconds: float) -> int:
    """Compute for some seconds, which blocks the executor."""
    import time

    with open(log, "ab", buffering=0) as file:
        file.write(f"start {id}\n".encode())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        file.write(f"end {id}\n".encode())
    return id


async def wait(id: int, log: str, seconds: float) -> int:
    """Wait for some seconds in a coroutine."""
    import asyncio

    with open(log, "ab", buffering=0) as file:  # noqa: ASYNC230
        file.write(f"start {id}\n".encode())
        await asyncio.sleep(seconds)
        file.write(f"end {id}\n".encode())
    return id


class Chaos:
    """One run of requests and faults.

    Args:
        cluster: A connected cluster with proxies.
        calls: The requests to make.
        faults: The faults that happen meanwhile.
        folder: The folder for the logs of the workers.
    """

    def __init__(self, cluster: FaultyCluster, calls: Sequence[Call], faults: Sequence[Fault], folder: Path) -> None:
        self._cluster = cluster
        self._calls = list(reversed(calls))
        self._faults = faults
        self._folder = folder
        self._began = time.monotonic()
        self._begun = 0  # number of begun requests
        self._broken = 0  # number of begun faults
        self._moved = asyncio.Condition()
        self._open: dict[int, dict[int, asyncio.Task[Any]]] = {worker.id: {} for worker in cluster.workers}
        self._epochs: dict[int, int] = {}
        self._locks = {worker.id: asyncio.Lock() for worker in cluster.workers}
        self.handovers = 0
        self.history = History({call.id: call for call in calls})

    async def run(self) -> History:
        """Make all requests under all faults, then check the workers, and return the history."""
        await self._cluster.add_method(compute, name="hosted")
        breaking = [asyncio.create_task(self._break(worker)) for worker in self._cluster.workers]
        clients = [asyncio.create_task(self._client(w)) for w in self._cluster.workers for _ in range(CLIENTS)]
        try:
            await asyncio.gather(*clients, *breaking)
        finally:
            for task in (*clients, *breaking):
                task.cancel()
        await self._look_afterwards()
        self.history.read_logs(self._folder.glob("*.log"))
        return self.history

    # -- requests ---------------------------------------------------------------------------------------------------

    async def _client(self, worker: ProxyWorker) -> None:
        """Send one request after another to one worker, and reconnect a lost worker."""
        while self._calls:
            async with self._moved:
                await self._moved.wait_for(self._may_begin)
                if not self._calls:
                    return
                call = self._calls.pop()
                self._begun += 1
                self._moved.notify_all()
            await self._call(worker, call)
            async with self._locks[worker.id]:
                if not worker.connected:
                    await self._connect_again(worker)

    def _may_begin(self) -> bool:
        per_fault = (self._begun + len(self._calls)) / max(1, len(self._faults))
        return not self._calls or self._begun <= (self._broken + AHEAD) * per_fault or self._broken == len(self._faults)

    async def _call(self, worker: ProxyWorker, call: Call) -> None:
        """Make one request and record its outcome."""
        began = time.monotonic()
        task = asyncio.create_task(self._ask(worker, call))
        self._open[worker.id][call.id] = task
        await asyncio.wait([task], timeout=HANG_S)
        del self._open[worker.id][call.id]
        outcome = Outcome(
            call.id, worker.id, "hung", round(began - self._began, 4), round(time.monotonic() - self._began, 4)
        )
        if not task.done():
            task.cancel()
        elif task.cancelled():
            outcome.kind = "cancelled"
        elif error := task.exception():
            outcome.kind, outcome.text = type(error).__name__, str(error)
            outcome.may_have_run = False if isinstance(error, ConnectError) else getattr(error, "may_have_run", None)
        else:
            outcome.kind, outcome.value = "result", task.result()
        self.history.outcomes.append(outcome)

    async def _ask(self, worker: ProxyWorker, call: Call) -> Any:
        view = self._cluster.options(timeout_s=call.timeout_s, idempotent=call.idempotent, workers=[worker])
        arguments = dict(id=call.id, log=str(self._folder / f"{worker.id}.log"), seconds=call.seconds)
        if call.work == "hosted":
            return await view.run_at(worker, "hosted", **arguments)
        (value,) = await view.run_method(compute if call.work == "compute" else wait, **arguments)
        return value

    async def _connect_again(self, worker: ProxyWorker) -> None:
        """Connect like a user. If another master had the worker meanwhile, get a new lease, as the error's hint says."""
        try:
            await worker.reconnect(30)
        except LeaseError:
            self.handovers += 1
            await worker.close()
            self._epochs.pop(worker.id, None)
            with contextlib.suppress(DDLFError):
                await worker.reconnect(30)
        except DDLFError:
            pass  # the next request reports the error
        self._note_epoch(worker)

    def _note_epoch(self, worker: ProxyWorker) -> None:
        before = self._epochs.get(worker.id, 0)
        if worker.epoch < before:
            self.history.notes.append(f"the epoch of worker {worker.id} went back from {before} to {worker.epoch}")
        self._epochs[worker.id] = worker.epoch

    # -- faults -----------------------------------------------------------------------------------------------------

    async def _break(self, worker: ProxyWorker) -> None:
        """Cause the faults of one worker, one after another."""
        for fault in [fault for fault in self._faults if fault.worker == worker.id]:
            async with self._moved:
                await self._moved.wait_for(lambda fault=fault: self._begun >= fault.at)  # type: ignore[misc]
                self._broken += 1
                self._moved.notify_all()
            await self._act(fault, worker)

    async def _act(self, fault: Fault, worker: ProxyWorker) -> None:
        machine = self._cluster.machine(fault.worker)
        assert machine.proxy is not None
        match fault.kind:
            case "kill_executor":
                machine.kill()
            case "kill_daemon":
                machine.kill("daemon")
                await asyncio.sleep(fault.seconds)
                await machine.restart()
            case "stop":
                await machine.hang(fault.seconds)
            case "stop_executor":
                await machine.hang(fault.seconds, "executor")
            case "partition":
                await machine.partition(fault.seconds)
            case "one_way":
                await machine.partition(fault.seconds, ("to_worker", "to_master")[fault.number % 2])
            case "flap":
                for _ in range(fault.number):
                    await machine.partition(fault.seconds / fault.number)
                    await asyncio.sleep(fault.seconds / fault.number)
            case "slow":
                await machine.slow(fault.number, fault.seconds)
            case "reset":
                machine.proxy.reset()
            case "cancel":
                for task in list(self._open[worker.id].values())[: fault.number]:
                    task.cancel()
            case "second_master":
                await self._try_to_get_in(worker)

    async def _try_to_get_in(self, worker: ProxyWorker) -> None:
        """Try to connect as a second master, which the worker must refuse while this master has it."""
        if not worker.connected:
            return
        other = ProxyWorker(worker.host, worker.port, worker._link.token)
        try:
            await other.connect_control(timeout_s=2)
        except (LeaseError, ConnectError, WorkerLost, RequestTimeout):
            return
        finally:
            await other.close()
        if worker.connected and worker.state == "alive":
            self.history.notes.append(f"a second master got worker {worker.id}, which the first one had")

    # -- afterwards -------------------------------------------------------------------------------------------------

    async def _look_afterwards(self) -> None:
        for machine in self._cluster.machines:
            machine.recover()
        for worker in self._cluster.workers:
            try:
                async with asyncio.timeout(HANG_S):
                    await self._connect_again(worker)
                    if await worker.run_code("6 * 7") != 42:
                        raise AssertionError
                    while (await worker.status()).busy:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)  # a request that has not started must not start now
            except (DDLFError, TimeoutError, AssertionError) as error:
                self.history.notes.append(f"worker {worker.id} is not usable afterwards: {error!r}")
            remembered = [
                len(channel.pending) for channel in (worker._link.control, worker._link.data) if channel is not None
            ]
            if any(remembered):
                self.history.notes.append(f"{sum(remembered)} requests to worker {worker.id} are still remembered")


async def run(seed: int, requests: int, faults: int, workers: int = 4, scale: float = 1.0) -> History:
    """Run requests and faults on new workers, and return the history."""
    calls, broken = make_plan(seed, requests, faults, workers, scale)
    with tempfile.TemporaryDirectory() as folder:
        async with local_cluster(workers, proxied=True, dead_after_s=4 * scale) as cluster:
            result = await Chaos(cluster, calls, broken, Path(folder)).run()
    result.faults = broken
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial, print its results, and return the number of violations."""
    options = read_options(__doc__, argv, requests=20_000, faults=500, workers=4, seed=0, scale=1.0, history=Path)
    print(
        f"chaos: {' '.join(f'--{name} {value}' for name, value in vars(options).items() if value is not None)}",
        flush=True,
    )
    began = time.monotonic()
    history = asyncio.run(run(options.seed, options.requests, options.faults, options.workers, options.scale))
    if options.history is not None:
        history.write(options.history)
    violations = history.violations()
    kinds = Counter(outcome.kind for outcome in history.outcomes)
    again = sum(count > 1 for count in history.starts.values())
    print(f"{len(history.outcomes):,} outcomes in {time.monotonic() - began:.0f} s: ", end="")
    print(", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))
    print(
        f"{sum(history.starts.values()):,} starts, {sum(history.ends.values()):,} ends, {again:,} started more than once"
    )
    for violation in violations[:50]:
        print(f"VIOLATION  {violation}")
    print(f"{len(violations)} violations")
    return len(violations)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
