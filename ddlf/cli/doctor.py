"""``ddlf doctor``: examine this machine and a cluster's workers, and suggest repairs. Runs on the master.

The command asks all workers at the same time, as a guest, so it disturbs no run. It does not measure the link to a
worker that is in use. It leases free workers for a moment, to test whether they reach each other.

If a launcher starts the workers of each run, its ``check`` asks the engine first. Then the command starts workers as a run
would, asks them, and ends them. So it also finds a wrong Python at a place, a folder that is not shared, and a firewall.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.findings import (
    FAST_MBS,
    LITTLE_CARD_MEMORY,
    Problem,
    check_problems,
    clock_problems,
    has_other_source,
    is_driver_old,
    joined,
    machine_problems,
    problem_of_error,
    problem_of_pair,
    speed_problems,
    version_problems,
)
from ddlf.cli.options import add_cluster_options, add_json, given_options, named_cluster, workers_range
from ddlf.cli.parsing import Command, Parser
from ddlf.cluster.config.addresses import DEFAULT_PORT, find_config
from ddlf.errors import ConfigError, ConnectError, DDLFError, LeaseError, ProtocolError
from ddlf.rpc.tokens import find_tokens
from ddlf.worker.card_check import Checked, check_card
from ddlf.worker.lost_cards import forget_lost
from ddlf.worker.machine import TENSORFLOWS, machine_facts

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.launch.launcher import Check, Launcher, Workers
    from ddlf.cluster.proxy import ProxyWorker
    from ddlf.worker.status import WorkerStatus

HERE = "this machine"
ROUND_TRIPS = 8
"""Number of small questions that compare the clocks. The fastest round trip gives the most exact difference."""
PIECE_BYTES = 64 * 1024
MOST_PIECES = 256
LONG_S = 3.0
"""After this time, the command prints which workers it waits for."""
START_S = 120.0
"""Longest time to wait for the workers of a launcher."""
REPAIR_CARD = (
    "run nvidia-smi, and look into dmesg for lines with NVRM; reinstall the framework if the message names a library"
)
TRIES = 3
ENOUGH_S = 0.2
"""How long a transfer takes at least, if it is not the longest: what is shorter says little."""


@dataclass(slots=True)
class Answer:
    """The results of examining one worker: its answers and measurements, or the error.

    Args:
        name: Name of the worker, for people.
        error: The error of the questions to this worker; None if it has answered.
        status: The worker's answer for ``ddlf status``; None without one.
        machine: Facts about the worker's machine, from ``ddlf.worker.machine.machine_facts``.
        round_trip_s: Fastest round trip of some small questions, in seconds.
        clock_s: Seconds by which the worker's clock is ahead of this machine's clock.
        there_mbs: Speed to the worker, in MB/s; None if it was not measured.
        back_mbs: Speed from the worker, in MB/s; None if it was not measured.
    """

    name: str
    error: DDLFError | None = None
    status: WorkerStatus | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    round_trip_s: float = 0.0
    clock_s: float = 0.0
    there_mbs: float | None = None
    back_mbs: float | None = None

    @property
    def is_free(self) -> bool:
        """Whether it has answered, and neither a master has it nor a method runs."""
        return self.error is None and self.status is not None and not (self.status.lease or self.status.busy)


@dataclass(slots=True)
class Diagnosis:
    """The facts about this machine and a cluster, and the findings.

    Args:
        machine: Facts about this machine, from ``ddlf.worker.machine.machine_facts``.
        token: Location and fingerprint of the token; empty without a token.
        cluster: Description of the examined cluster; empty without one.
        launcher: Name of the launcher that starts workers for each run; empty if workers run permanently.
        cards: The results of a matrix product on each card of this machine; None for a card that was not tried.
        checks: The facts that the launcher has found about its engine.
        answers: The results for each worker.
        findings: The problems and their repairs.
    """

    machine: dict[str, Any]
    token: str = ""
    cluster: str = ""
    launcher: str = ""
    cards: dict[str, Checked | None] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    findings: list[Problem] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 without findings, else the highest of the findings' exit codes."""
        return max((finding.exit_code for finding in self.findings), default=0)


def _options(parser: Parser) -> None:
    exclusive = add_cluster_options(parser)
    parser.add(
        "--launcher", metavar="NAME[:TEXT]", help="the engine that would start the workers of a run", within=exclusive
    )
    parser.add("--workers", type=workers_range, metavar="N", help="with --launcher: the number of workers")
    add_json(parser)


async def doctor(options: argparse.Namespace) -> int:
    """Run ``ddlf doctor``: examine this machine and the workers, print the facts and the findings, and return the exit
    code.
    """
    if (follow := _follower(options)) is not None:
        return follow()  # nothing else runs in this loop, and only the main thread may handle signals
    report = await examine(options, (lambda line: None) if options.json else (lambda line: print(line, flush=True)))
    if options.json:
        print(json.dumps(_data(report), indent=2))
        return report.exit_code
    print()
    for finding in report.findings:
        print(f"{finding.level:<8}  {', '.join(finding.where)}: {finding.what}\n     try  {finding.do}")
    if not report.findings:
        print("nothing found")
    return report.exit_code


async def examine(options: argparse.Namespace, say: Callable[[str], None] = lambda line: None) -> Diagnosis:
    """Examine this machine and the workers, and report each fact as soon as it is known."""
    this_machine = machine_facts([Path.cwd(), Path(tempfile.gettempdir())])
    report = Diagnosis(this_machine)
    say(f"here      {versions(this_machine)}\n          {size(this_machine)}")
    findings = [*machine_problems(this_machine, HERE), *await _examine_cards(report, say)]
    try:
        cluster = _cluster(options, report)
        if not report.launcher:
            say(f"token     {report.token or 'none; workers on other machines need one'}")
        if report.launcher:
            named = f"{report.cluster}: each run starts its workers with " if report.cluster else ""
            say(f"{'cluster' if named else 'launcher':<10}{named}{report.launcher}")
            findings += await _examine_launcher(_launcher(options), options, report, say)
        elif cluster is None:
            say("cluster   none named, so no worker is asked")
            findings += await _port_taken(options.timeout)
        else:
            say(f"cluster   {report.cluster} ({cluster.N} worker{'s' * (cluster.N != 1)})")
            await _examine_workers(cluster.workers, options.timeout, report, say)
            findings += await _examine_pairs(options, report, say)
    except DDLFError as error:
        findings.append(problem_of_error(error, HERE))
    for answer in report.answers:
        findings += answer_problems(this_machine, answer)
    speeds = {
        answer.name: (answer.there_mbs, answer.back_mbs)
        for answer in report.answers
        if answer.there_mbs is not None and answer.back_mbs is not None
    }
    report.findings = joined([*findings, *speed_problems(speeds)])
    return report


async def _examine_cards(report: Diagnosis, say: Callable[[str], None]) -> list[Problem]:
    """Compute a matrix product on each card of this machine that a worker could use, and return the problems."""
    gpus, backend = report.machine["gpus"], report.machine["keras_backend"]
    if gpus["cards"]:
        say(f"cards     driver {gpus['driver']}, for CUDA up to {gpus['cuda']}")
    elif gpus["build_cuda"] and not (gpus["problem"] or gpus["others"]):
        say(f"cards     none of NVIDIA found; {gpus['package']} could use one, with a driver")
    if gpus["others"]:
        say(f"cards     {gpus['others']}")
    usable = [
        card
        for card in gpus["cards"]
        if card["number"] in gpus["seen"]
        and (card["free"] >= LITTLE_CARD_MEMORY or card["lost"])
        and gpus["build_cuda"]
    ]
    checks = dict(zip((card["uuid"] for card in usable), await _checked(backend, usable), strict=True))
    problems = []
    for card in gpus["cards"]:
        checked = report.cards[card["number"]] = checks.get(card["uuid"])
        say(f"          {card_line(card, checked, backend, gpus)}")
        if checked is not None and not checked.problem and forget_lost(card["uuid"]):
            say(f"          it was left alone, because it {card['lost']}; it computes, so workers take it again")
            card["lost"] = ""
        if checked is not None and checked.problem and not is_driver_old(gpus):  # the driver has its own finding
            problems.append((f"{card['number']} ({card['name']})", checked.problem, checked.do or REPAIR_CARD))
    return [*check_problems(problems, HERE)]


async def _checked(backend: str, cards: list[dict[str, Any]]) -> list[Checked]:
    return await asyncio.gather(*(check_card(backend, card["uuid"]) for card in cards))


def card_line(card: dict[str, Any], checked: Checked | None, backend: str, gpus: dict[str, Any]) -> str:
    """Return a card, its memory and the result of its check, as one text to print."""
    parts = [
        f"{card['number']} ({card['name']})",
        "memory unknown" if card["lost"] else f"{card['free'] / 1e9:.1f} of {card['memory'] / 1e9:.1f} GB memory free",
    ]
    if card["processes"]:
        parts.append(f"used by process {', '.join(map(str, card['processes']))}")
    if checked is not None:
        rate = f"{checked.teraflops:.1f} TFLOP/s in a matrix product with {backend}"
        parts.append("fails, see below" if checked.problem else rate)
    elif card["number"] not in gpus["seen"]:
        parts.append(f"hidden by CUDA_VISIBLE_DEVICES={gpus['mask']}")
    else:
        parts.append("not tried, see below")
    return ", ".join(parts)


def _cluster(options: argparse.Namespace, report: Diagnosis) -> Cluster | None:
    """Return the cluster that the options name, if any. Add the facts about the token to the report.

    Raises:
        DDLFError: The file, its addresses or the token cannot be used.
    """
    path = None if options.hosts or options.launcher else find_config(options.config)
    token_file = options.token_file
    if path is not None:
        from ddlf.cluster.config.cluster_file import load_config

        config = load_config(options.config)
        token_file = token_file or config.security.token_file
        report.cluster = f"{f'{config.name}, ' if config.name else ''}{path}"
        report.launcher = config.launcher_name or ""
    elif options.hosts:
        report.cluster = "--hosts"
    elif options.launcher:
        report.launcher = options.launcher.partition(":")[0]
    if options.workers is not None and not options.launcher:
        raise ConfigError("--workers has no effect without --launcher", hint="leave it out")
    if report.launcher and (unused := given_options(options, ("token_file", "insecure_plaintext"))):
        raise ConfigError(
            f"{', '.join(unused)} has no effect with a launcher, which has its own token", hint="leave it out"
        )
    if tokens := find_tokens(token_file):
        report.token = f"{tokens.source}, fingerprint {tokens.fingerprint}"
    return named_cluster(options, guest=True) if report.cluster and not report.launcher else None


def _launcher(options: argparse.Namespace) -> Launcher:
    """Return the launcher that the options or the cluster file name. It has one worker if nothing names the number.

    Raises:
        DDLFError: There is no such launcher, or it cannot be used here.
    """
    from ddlf.cluster.config.cluster_file import load_config
    from ddlf.cluster.launch.launcher import Workers, WorkersMissing, installed

    def build(workers: Workers | None) -> Launcher:
        if options.launcher:
            return installed(options.launcher, workers)
        return load_config(options.config).new_launcher(workers)

    try:
        return build(options.workers)
    except WorkersMissing:
        return build(Workers(1, 1))


def _follower(options: argparse.Namespace) -> Callable[[], int] | None:
    """Return the work of this process if an engine has started this command several times, and this process is not the
    one that examines.
    """
    if not options.launcher:
        return None
    with contextlib.suppress(DDLFError):  # ``examine`` reports it
        return _launcher(options).follower()
    return None


async def _examine_launcher(
    launcher: Launcher, options: argparse.Namespace, report: Diagnosis, say: Callable[[str], None]
) -> list[Problem]:
    """Ask the engine of a launcher, start workers as a run would, ask them, and end them. Return the problems."""
    from ddlf.cluster.cluster import Cluster

    async for check in launcher.check():
        report.checks.append(check)
        say(f"          {check.fact}{', see below' * bool(check.do)}")
    findings = [
        Problem("error", (report.launcher,), check.fact, check.do, check.exit_code)
        for check in report.checks
        if check.do
    ]
    if findings:
        say("workers   none is started, because a run would fail")
        return findings
    cluster = Cluster(launcher, guest=True, echo=False)
    say(f"workers   {cluster.places} to start, for at most {START_S:g} s")
    begin = time.monotonic()
    try:
        async with asyncio.timeout(START_S):
            await launcher.start()
        say(f"          started within {time.monotonic() - begin:.1f} s")
        await _examine_workers(cluster.workers, options.timeout, report, say)
    except DDLFError as error:
        error.hint = error.hint or "correct that, and run this command again"
        findings.append(problem_of_error(error, report.launcher))
    except TimeoutError:
        reasons = await asyncio.gather(*(launcher.waits(index) for index in range(cluster.places)))
        explanation = "; ".join(dict.fromkeys(filter(None, reasons))) or "the engine does not say why"
        findings.append(
            Problem(
                "warning",
                (report.launcher,),
                f"its workers have not started within {START_S:g} s: {explanation}",
                "a run would wait longer; if the engine has no room now, run this command again later",
            )
        )
    finally:
        await launcher.stop()
    return findings


async def _port_taken(timeout_s: float) -> list[Problem]:
    """Return a problem if another program uses the default port of a worker on this machine; else an empty list.

    Call it only without a named cluster, because workers of other machines have their own ports.
    """
    from ddlf.cluster.proxy import ProxyWorker

    worker = ProxyWorker("127.0.0.1", DEFAULT_PORT, bytes(32), guest=True)
    try:
        await worker.connect_control(timeout_s=timeout_s)
    except ConnectError as error:
        if "refused" in error.message:
            return []
        do = f"start workers here with another one: ddlf-worker --port {DEFAULT_PORT + 1}"
        return [
            Problem("warning", (HERE,), f"another program has port {DEFAULT_PORT}, which ddlf-worker would take", do)
        ]
    except DDLFError:
        pass  # a worker, of whomever
    finally:
        await worker.close()
    return []


async def ask_workers(
    workers: list[ProxyWorker], timeout_s: float, say: Callable[[str], None], needs: Sequence[str] = ()
) -> list[Answer]:
    """Ask all workers at the same time for facts about them, and print the names of the workers that take long."""
    asking = {asyncio.create_task(ask_worker(worker, timeout_s, needs)): worker for worker in workers}
    _, late = await asyncio.wait(asking, timeout=LONG_S)
    if late:
        say(f"          waiting for {', '.join(worker.name for task, worker in asking.items() if task in late)}")
    return await asyncio.gather(*asking)


async def ask_worker(worker: ProxyWorker, timeout_s: float, needs: Sequence[str] = ()) -> Answer:
    """Connect to a worker, and ask for all facts that it can give without measurements. If the worker answers, it stays
    connected.
    """
    answer = Answer(worker.name)
    try:
        await worker.connect_control(timeout_s=timeout_s)
        answer.status = await worker.status(timeout_s)
        answer.machine = await worker.ask("machine", list(needs), timeout_s=timeout_s)
        for _ in range(ROUND_TRIPS):
            begin, before = time.perf_counter(), time.time()
            worker_time = (await worker.ask("probe", timeout_s=timeout_s))["time"]
            round_trip = time.perf_counter() - begin
            if not answer.round_trip_s or round_trip < answer.round_trip_s:
                answer.round_trip_s, answer.clock_s = round_trip, worker_time - before - round_trip / 2
    except DDLFError as error:
        answer.error = _for_a_line(error, worker)
    return answer


def _for_a_line(error: DDLFError, worker: ProxyWorker) -> DDLFError:
    """Return an error without the parts of its text that the printed line about the worker contains anyway."""
    if isinstance(error, ProtocolError) and "unknown control command" in error.message:
        error.message = "it runs an older DDLF, which cannot be asked what it has installed"
        error.hint = "install the same version of ddlf on both"
    error.worker = ""
    error.message = error.message.removeprefix(f"{worker.host}:{worker.port}: ")
    return error


async def _examine_workers(
    workers: list[ProxyWorker], timeout_s: float, report: Diagnosis, say: Callable[[str], None]
) -> None:
    """Ask all workers for facts about them at the same time, and add the answers to the report.

    Then measure the links one after another, because they share this machine's cable.
    """
    width = max(len(worker.name) for worker in workers)
    try:
        report.answers = await ask_workers(workers, timeout_s, say)
        for worker, answer in zip(workers, report.answers, strict=True):
            # A measurement would slow down a run on this worker.
            if answer.is_free:
                try:
                    answer.there_mbs = await _speed(worker, bytes(PIECE_BYTES), 0)
                    answer.back_mbs = await _speed(worker, b"", PIECE_BYTES)
                except DDLFError as error:
                    answer.error = _for_a_line(error, worker)
            say(f"          {answer.name:<{width}}  {_line(report.machine, answer)}")
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


async def _examine_pairs(options: argparse.Namespace, report: Diagnosis, say: Callable[[str], None]) -> list[Problem]:
    """Let free workers try to reach each other, and return the problems. They are leased to this command for this
    moment.
    """
    answers = enumerate(report.answers, 1)
    free = [n for n, answer in answers if answer.is_free]
    if len(free) < 2:
        return []
    try:
        unreachable = await unreachable_pairs(options, free)
    except DDLFError as error:  # a run has begun, or a worker was lost
        say(f"pairs     not tried: {error}")
        return []
    count = len(free) * (len(free) - 1)
    say(f"pairs     {count - len(unreachable)} of {count} ways from worker to worker work")
    return [problem_of_pair(*pair) for pair in unreachable]


async def _speed(worker: ProxyWorker, data: bytes, size: int) -> float:
    """Return the speed of a transfer in MB/s. A slow transfer is repeated, because a machine may have been busy."""
    best = 0.0
    for _ in range(TRIES):
        best = max(best, await _speed_once(worker, data, size))
        if best >= FAST_MBS:
            break
    return best


async def _speed_once(worker: ProxyWorker, data: bytes, size: int) -> float:
    """Measure the speed to a worker in MB/s once: send more and more pieces until they take long enough. A slow link
    needs only a few.
    """
    count = 1
    while True:
        begin = time.perf_counter()
        # There is no time limit: the aim is to find slow links, and heartbeats show that the worker lives.
        await asyncio.gather(*(worker.ask("probe", data, size, timeout_s=None) for _ in range(count)))
        seconds = time.perf_counter() - begin
        if seconds >= ENOUGH_S or count >= MOST_PIECES:
            return count * PIECE_BYTES / seconds / 1e6
        count *= 4


@contextlib.asynccontextmanager
async def leased(options: argparse.Namespace, numbers: Collection[int]) -> AsyncIterator[list[ProxyWorker]]:
    """Connect to workers and lease them, because only the lease holder may introduce workers to each other.

    Args:
        options: The options with the cluster and the time limit for a worker's answer.
        numbers: Numbers of the workers.

    Raises:
        DDLFError: A worker is in use, or cannot be reached.
    """
    workers = [worker for worker in named_cluster(options).workers if worker.id in numbers]
    try:
        for result in await asyncio.gather(
            *(worker.connect(timeout_s=options.timeout) for worker in workers), return_exceptions=True
        ):
            if isinstance(result, LeaseError):  # it names options that only ddlf run has
                result.hint = "try again when that run is over"
            if isinstance(result, BaseException):
                raise result
        yield workers
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


async def unreachable_pairs(options: argparse.Namespace, numbers: Collection[int]) -> list[tuple[str, str, str]]:
    """Let workers try to connect to each other, and return the pairs that fail.

    Args:
        options: The options with the cluster and the time limit for a worker's answer.
        numbers: Numbers of the workers.

    Returns:
        For each pair without a connection: the calling worker, the called worker, and the error at each address.
    """
    from ddlf.cluster.introduce import introduced

    async with leased(options, numbers) as workers:
        failed = await introduced(workers, secrets.token_hex(8))
    return [(caller.name, called.name, reason) for caller, called, reason in failed]


def answer_problems(this_machine: dict[str, Any], answer: Answer) -> Iterator[Problem]:
    """Yield the problems that a worker's answer shows, such as a wrong clock or other package versions than this
    machine's.
    """
    if answer.error is not None:
        yield problem_of_error(answer.error, answer.name)
    if answer.machine:
        yield from machine_problems(answer.machine, answer.name)
        yield from version_problems(this_machine, answer.machine, answer.name)
        yield from clock_problems(answer.clock_s, answer.name)


# -- what is printed ------------------------------------------------------------------------------------------------------


def _data(report: Diagnosis) -> dict[str, Any]:
    return {
        "machine": report.machine,
        "token": report.token,
        "cluster": report.cluster,
        "launcher": report.launcher,
        "cards": {number: checked and asdict(checked) for number, checked in report.cards.items()},
        "checks": [asdict(check) for check in report.checks],
        "workers": [asdict(answer) | {"error": answer.error and str(answer.error)} for answer in report.answers],
        "findings": [asdict(finding) for finding in report.findings],
    }


def _line(this_machine: dict[str, Any], answer: Answer) -> str:
    if not answer.machine:
        return "no answer, see below"
    parts = [f"{difference(this_machine, answer.machine)}; {size(answer.machine)}", f"clock {answer.clock_s:+.2f} s"]
    if answer.there_mbs is not None and answer.back_mbs is not None:
        parts.append(f"{answer.there_mbs:,.0f} MB/s there, {answer.back_mbs:,.0f} back")
    elif answer.status is not None and (lease := answer.status.lease):
        parts.append(f"in use by {lease.holder}")
    return "; ".join(parts)


def difference(this_machine: dict[str, Any], worker_machine: dict[str, Any]) -> str:
    """Return the versions on a worker's machine, or a note that they equal this machine's."""
    if versions(worker_machine) != versions(this_machine):
        return versions(worker_machine)
    return "the same versions" + ", other source of DDLF" * has_other_source(this_machine, worker_machine)


def versions(machine: dict[str, Any]) -> str:
    """Return the versions of DDLF, Python and the training packages on a machine as one text to print."""
    packages = machine["packages"]
    named = [
        f"{name} {packages[name]}" for name in ("keras", *TENSORFLOWS, "jax", "torch", "numpy") if name in packages
    ]
    return ", ".join([f"DDLF {machine['ddlf']}", f"Python {machine['python']}", *named])


def size(machine: dict[str, Any]) -> str:
    """Return the cores, cards, memory and disks of a machine as one text to print."""
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    free, total = machine["memory_free"], machine["memory"]
    memory = [f"{free / 1e9:.1f} of {total / 1e9:.1f} GB memory free"] if free and total else []
    disks = [f"{disk['free'] / 1e9:,.0f} GB disk free in {disk['folder']}" for disk in machine["disks"]]
    cards = [f"card {card['number']} ({card['name']})" for card in machine.get("gpus", {}).get("cards", ())]
    return ", ".join([cores, *cards, *memory, *disks])


DOCTOR = Command(
    description="Check this machine and the workers of a cluster, and say how to fix problems. No run is disturbed. "
    "If a launcher starts the workers of each run, this asks its engine, and starts and ends workers once. "
    "The exit code is 0 if no problem is found.",
    examples=(
        "ddlf doctor                       # this machine, and the workers of ./cluster.yaml",
        "ddlf doctor -c cluster.yaml --json",
        "ddlf doctor --hosts 10.0.0.11:9000",
        "ddlf doctor --launcher slurm:partition=gpu --workers 4",
    ),
    options=_options,
    run=doctor,
)
