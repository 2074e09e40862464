"""``ddlf status``, ``ddlf stop`` and ``ddlf clean``: show, stop or clean the workers of a cluster.

Runs on the master.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_cluster_options, add_json, named_cluster
from ddlf.cli.parsing import Command, Parser
from ddlf.cli.runs import add_out, runs_folder
from ddlf.cluster.link import master_name
from ddlf.errors import ConfigError, ConnectError, DDLFError, LeaseError, RequestTimeout
from ddlf.events.facts import to_data
from ddlf.monitor.card_use import as_text
from ddlf.monitor.runs import folder, table
from ddlf.monitor.runs.run_reader import UNUSED, read
from ddlf.rpc.messages import Request

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker
    from ddlf.worker.activity import HeldPart, Shard
    from ddlf.worker.status import DataSets, WorkerStatus


def _status_options(parser: Parser) -> None:
    add_cluster_options(parser)
    add_json(parser)
    parser.add(
        "--run",
        nargs="?",
        const="last",
        metavar="RUN",
        help="show a run from its folder instead: where each worker is, parts of the model, portions (default: last)",
    )
    add_out(parser)


async def status(options: argparse.Namespace) -> int:
    """Run ``ddlf status``: ask the daemon of each worker for its state, and print it. A worker with a busy executor
    answers, too. With ``--run``, print the state of a run.
    """
    if options.run is not None:
        if options.hosts or options.config:
            raise ConfigError(
                f"--run and --{'hosts' if options.hosts else 'config'} exclude each other",
                hint="leave one of them out: a run is read from its folder, and no worker is asked",
            )
        return _status_of_run(folder.find(runs_folder(options), options.run), options)
    workers = named_cluster(options, guest=True).workers
    answers = await asyncio.gather(*(ask_status(worker, options.timeout) for worker in workers))
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "address": worker.address,
                        **({"error": str(answer)} if isinstance(answer, DDLFError) else to_data(answer)),
                    }
                    for worker, answer in zip(workers, answers, strict=True)
                ]
            )
        )
    else:
        for worker, answer in zip(workers, answers, strict=True):
            print(f"{worker.id:>3}  {worker.label:<21}  {describe(answer, worker.label)}")
        if not options.hosts and any(isinstance(answer, ConnectError) for answer in answers):
            print("ddlf up starts the workers of the cluster file that do not run")
    return max((getattr(answer, "exit_code", 0) for answer in answers), default=0)


def _status_of_run(path: Path, options: argparse.Namespace) -> int:
    past = read(path, UNUSED)
    state = past.board.state
    if options.json:
        facts = {
            "run": path.name,
            "state": past.status.state,
            "round": state.round,
            "rounds": state.rounds,
            "workers": [to_data(lane) for _, lane in sorted(state.lanes.items())],
            "parts": [to_data(part) for part in state.parts],
            "pass": None if state.passed is None else to_data(state.passed),
        }
        print(json.dumps(facts))
        return 0
    progress_text = f", round {state.round} of {state.rounds}" if state.round else ""
    print(f"{path.name}: {past.status.state}{progress_text}")
    if (passed := state.passed) is not None:
        step = f"step {passed.step:.4g}, loss {passed.loss:.6g}"
        gradient = f", gradient {state.metrics['gradient']:.4g}" if "gradient" in state.metrics else ""
        print(f"pass {passed.number} of iteration {passed.round}: {step}{gradient}")
    for rows in (table.place_rows(state), table.part_rows(state), table.portion_rows(state)):
        if len(rows) > 1:
            print(f"\n{table.as_text(rows)}")
    return 0


def describe(answer: WorkerStatus | DDLFError, label: str) -> str:
    """Return the current work of a worker, in words.

    Args:
        answer: The answer of its daemon, or the error.
        label: Its address or name.
    """
    if isinstance(answer, DDLFError):
        answer.worker = ""  # the line says which
        return f"unreachable: {str(answer).removeprefix(f'{label}: ')}"
    busy, lease, methods = answer.busy, answer.lease, answer.methods
    doing = f"busy with {busy.method!r} for {busy.seconds:.1f} s" if busy else "idle"
    state = doing if answer.executor == "ready" else f"executor {answer.executor}"
    details = f", restarts {answer.restarts}" if answer.restarts else ""
    details += f", leased by {lease.holder} since {lease.since}" if lease else ""
    holds = [
        *data_sets(answer.datasets),
        *weights_held(answer.shard),
        *part_of_model(answer.part),
        *([f"{len(methods)} method{'s' * (len(methods) > 1)}"] if methods else []),
    ]
    details += f", holds {' and '.join(holds)}" if holds else ""
    details += f", on card {', '.join(answer.gpus)}" if answer.gpus else ""
    readings = [f"{card.number}: {as_text(card)}" for card in answer.cards]
    details += f" ({'; '.join(readings)})" if readings else ""
    plain = ", INSECURE PLAINTEXT" if answer.insecure_plaintext else ""
    return f"{state}; {answer.host}, up {answer.uptime_s:.0f} s, Python {answer.python}{details}{plain}"


def data_sets(data: DataSets) -> list[str]:
    """Return the number and size of the data sets that a worker has in memory, as a list of at most one text to print."""
    sets = "data set" if data.count == 1 else "data sets"
    return [f"{data.count} {sets} of {data.bytes / 1e6:,.1f} MB"] if data.count else []


def weights_held(shard: Shard | None) -> list[str]:
    """Return the part of a run's weights that a worker keeps as a server, as a list of texts to print."""
    if shard is None:
        return []
    share = f"values {shard.begin + 1:,} to {shard.end:,} of {shard.of:,}"
    shards, copies = shard.shards, shard.copies
    parts = [f"a shard ({share}, version {shard.version})"] if shards else []
    parts += [f"{shards - 1} more shard{'s' * (shards > 2)}"] if shards > 1 else []
    parts += [f"{'copies' if copies > 1 else 'a copy'} of {copies} other{'s' * (copies > 1)}"] if copies else []
    return [*parts[:-1], f"{parts[-1]} of run {shard.run}"]


def part_of_model(part: HeldPart | None) -> list[str]:
    """Return the part of a model that a worker has, as a list of texts to print."""
    if part is None:
        return []
    number, copies, of_run = part.number, part.copies, f"of run {part.run}"
    size, version = f"{part.nbytes / 1e6:,.1f} MB", part.version
    own_part = [f"part {number} of {part.of} of the model ({size}, version {version})"] if number else []
    backups = [f"{'copies' if copies > 1 else 'a copy'} of {copies} part{'s' * (copies > 1)}"] if copies else []
    return [f"{' and '.join([*own_part, *backups])} {of_run}"]


async def ask_status(worker: ProxyWorker, timeout_s: float) -> WorkerStatus | DDLFError:
    """Ask the daemon of a worker for its state, and return the state or the error."""
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.status(timeout_s)
    except DDLFError as error:
        return error
    finally:
        await worker.close()


async def ask(worker: ProxyWorker, command: str, timeout_s: float, **arguments: Any) -> Any:
    """Send a command to the daemon of a worker, and return its answer or the error."""
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.ask(command, timeout_s=timeout_s, **arguments)
    except DDLFError as error:
        return error
    finally:
        await worker.close()


STATUS = Command(
    description="Show what the workers are doing. With --run, show the state of a run.",
    examples=(
        "ddlf status",
        "ddlf status -c cluster.yaml --json",
        "ddlf status --run             # the last run here: hosts and jobs of its workers, parts, portions",
    ),
    options=_status_options,
    run=status,
)


def _stop_options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--restart", action="store_true", help="keep the workers and stop only their work")
    parser.add("--force", action="store_true", help="also while a run uses the workers; that run then fails")


async def stop(options: argparse.Namespace) -> int:
    """Run ``ddlf stop``: stop all workers or only their executors. If one is in use, stop none of them."""
    workers = named_cluster(options, guest=True).workers
    used = {} if options.force else await in_use(workers, options.timeout)
    for worker, holder in used.items():
        print(f"{worker.id:>3}  {worker.label:<21}  in use by {holder}")
    if used:
        done = "restarted" if options.restart else "stopped"
        raise LeaseError(
            f"{len(used)} of {len(workers)} workers are in use, so none was {done}", hint="--force ends those runs"
        )
    command = "restart" if options.restart else "shutdown"
    holder = f"{master_name().partition(' pid ')[0]} (ddlf stop{' --restart' * options.restart})"
    answers = await asyncio.gather(
        *(ask(worker, command, options.timeout, who=holder, force=options.force) for worker in workers)
    )
    exit_code = 0
    for worker, answer in zip(workers, answers, strict=True):
        outcome = "restarted" if options.restart else "stopped"
        if isinstance(answer, ConnectError) and "refused" in answer.message and not options.restart:
            outcome = "not running, because nothing listens there"
        elif isinstance(answer, DDLFError):
            outcome, exit_code = str(answer), max(exit_code, answer.exit_code)
        print(f"{worker.id:>3}  {worker.label:<21}  {outcome}")
    return exit_code


async def in_use(workers: list[ProxyWorker], timeout_s: float) -> dict[ProxyWorker, str]:
    """Return the workers that another living master uses, each with the master's name and the time of its lease, as
    text.
    """
    answers = await asyncio.gather(*(ask_status(worker, timeout_s) for worker in workers))
    leases = [None if isinstance(answer, DDLFError) else answer.lease for answer in answers]
    return {
        worker: f"{lease.holder} since {lease.since}"
        for worker, lease in zip(workers, leases, strict=True)
        if lease and lease.state != "dead"
    }


STOP = Command(
    description="Stop the workers of a cluster. It refuses while a run uses them.",
    examples=(
        "ddlf stop -c cluster.yaml",
        "ddlf stop --restart           # keep the workers, stop their work",
        "ddlf stop --restart --force   # even if it is somebody else's run",
    ),
    options=_stop_options,
    run=stop,
)


def _clean_options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--methods", action="store_true", help="also remove hosted methods")


async def clean_named(options: argparse.Namespace) -> int:
    """Run ``ddlf clean``: free data, models and variables on the workers that the options name."""
    return await clean(named_cluster(options).workers, options)


async def clean(workers: list[ProxyWorker], options: argparse.Namespace) -> int:
    """Free data, models and variables on all workers; on none of them if a run uses one.

    Args:
        workers: The workers, not connected.
        options: ``methods``, whether hosted methods are removed, too, and ``timeout``, in seconds for each worker.

    Raises:
        LeaseError: Some workers are in use. Nothing was freed.
    """
    outcomes = await asyncio.gather(*(_take(worker, options.timeout) for worker in workers))
    try:
        used = [outcome for outcome in outcomes if isinstance(outcome, LeaseError)]
        if used:
            for worker, outcome in zip(workers, outcomes, strict=True):
                if isinstance(outcome, LeaseError):
                    print(_row(worker, outcome.message))
            raise LeaseError(
                f"{len(used)} of {len(workers)} workers are in use, so none was cleaned",
                hint="wait for the runs, or end them with: ddlf stop --restart --force",
            )
        ended = await asyncio.gather(
            *(_clean(worker, outcome, options) for worker, outcome in zip(workers, outcomes, strict=True))
        )
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
    for worker, text in zip(workers, ended, strict=True):
        print(_row(worker, str(text)))
    return max((getattr(text, "exit_code", 0) for text in ended), default=0)


async def _take(worker: ProxyWorker, timeout_s: float) -> WorkerStatus | DDLFError:
    """Lease a worker, so that no run starts on it meanwhile. Return its status, or the error."""
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.status(timeout_s)
    except DDLFError as error:
        error.worker = ""
        return error


async def _clean(worker: ProxyWorker, status: WorkerStatus | DDLFError, options: argparse.Namespace) -> Any:
    if isinstance(status, DDLFError):
        return status
    try:
        await worker.connect(timeout_s=options.timeout)
        variables = await worker.rpc(Request("list_variables"), options.timeout)
        await worker.rpc(Request("clean"), options.timeout)
        methods = await worker.rpc(Request("list_methods"), options.timeout) if options.methods else []
        for name in methods:
            await worker.rpc(Request("remove_method", name), options.timeout)
    except RequestTimeout:
        busy = status.busy
        call = f" with {busy.method!r} since {busy.seconds:.0f} s" if busy else ""
        return RequestTimeout(f"is busy{call}", hint="end that with: ddlf stop --restart")
    except DDLFError as error:
        error.worker = ""
        return error
    freed = [
        *data_sets(status.datasets),
        *([f"variables {', '.join(sorted(variables))}"] if variables else []),
        *([f"methods {', '.join(methods)}"] if methods else []),
    ]
    return f"freed: {'; '.join(freed)}" if freed else "nothing to free"


def _row(worker: ProxyWorker, text: str) -> str:
    return f"{worker.id:>3}  {worker.label:<21}  {text}"


CLEAN = Command(
    description="Free data, models and variables that earlier runs left on the workers.",
    examples=("ddlf clean -c cluster.yaml", "ddlf clean --methods          # hosted methods, too"),
    options=_clean_options,
    run=clean_named,
)
