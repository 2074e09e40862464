"""``ddlf status`` and ``ddlf stop``: what daemons are asked and told, whoever has the workers. Runs on the master."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from ddlf.cli.clean import held
from ddlf.cli.options import named_cluster
from ddlf.cluster.claim import master_name
from ddlf.errors import DDLFError, LeaseError

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker


async def status(options: argparse.Namespace) -> int:
    """Ask each daemon; a worker whose executor is busy answers too."""
    workers = named_cluster(options, guest=True).workers
    answers = await asyncio.gather(*(ask(worker, "status", options.timeout) for worker in workers))
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "address": f"{worker.host}:{worker.port}",
                        **(answer if isinstance(answer, dict) else {"error": str(answer)}),
                    }
                    for worker, answer in zip(workers, answers, strict=True)
                ]
            )
        )
    else:
        for worker, answer in zip(workers, answers, strict=True):
            print(f"{worker.id:>3}  {worker.label:<21}  {describe(answer, worker.label)}")
    return max((getattr(answer, "exit_code", 0) for answer in answers), default=0)


def describe(answer: Any, label: str) -> str:
    if isinstance(answer, DDLFError):
        answer.worker = ""  # the line says which
        return f"unreachable: {str(answer).removeprefix(f'{label}: ')}"
    busy = answer["busy"]
    doing = f"busy with {busy['method']!r} since {busy['seconds']:.1f} s" if busy else "idle"
    state = doing if answer["executor"] == "ready" else f"executor {answer['executor']}"
    restarts = f", restarts {answer['restarts']}" if answer["restarts"] else ""
    lease = answer["lease"]
    restarts += f", leased by {lease['holder']} since {lease['since']}" if lease else ""
    methods = answer.get("methods") or []
    holds = [
        *held(answer),
        *shown(answer.get("shard")),
        *([f"{len(methods)} method{'s' * (len(methods) > 1)}"] if methods else []),
    ]
    restarts += f", holds {' and '.join(holds)}" if holds else ""
    plain = ", INSECURE PLAINTEXT" if answer["insecure_plaintext"] else ""
    return f"{state}; {answer['host']}, up {answer['uptime_s']:.0f} s, Python {answer['python']}{restarts}{plain}"


def shown(shard: dict[str, Any] | None) -> list[str]:
    """Which slice of a run's weights a worker keeps, in words."""
    if shard is None:
        return []
    share = f"values {shard['begin'] + 1:,} to {shard['end']:,} of {shard['of']:,}"
    shards, copies = shard.get("shards", 1), shard.get("copies", 0)  # of a daemon of 0.1.0 neither is there
    found = [f"a shard ({share}, version {shard['version']})"] if shards else []
    found += [f"{shards - 1} more shard{'s' * (shards > 2)}"] if shards > 1 else []
    found += [f"{'copies' if copies > 1 else 'a copy'} of {copies} other{'s' * (copies > 1)}"] if copies else []
    return [*found[:-1], f"{found[-1]} of run {shard['run']}"]


async def stop(options: argparse.Namespace) -> int:
    """End workers, or what they run: all of them, or none while one is in use."""
    workers = named_cluster(options, guest=True).workers
    used = {} if options.force else await _used(workers, options.timeout)
    for worker, who in used.items():
        print(f"{worker.id:>3}  {worker.label:<21}  in use by {who}")
    if used:
        done = "restarted" if options.restart else "stopped"
        raise LeaseError(
            f"{len(used)} of {len(workers)} workers are in use, so none was {done}", hint="--force ends those runs"
        )
    command = "restart" if options.restart else "shutdown"
    who = f"{master_name().partition(' pid ')[0]} (ddlf stop{' --restart' * options.restart})"
    answers = await asyncio.gather(
        *(ask(worker, command, options.timeout, who=who, force=options.force) for worker in workers)
    )
    for worker, answer in zip(workers, answers, strict=True):
        done = "restarted" if options.restart else "stopped"
        print(f"{worker.id:>3}  {worker.label:<21}  {answer if isinstance(answer, DDLFError) else done}")
    return max((getattr(answer, "exit_code", 0) for answer in answers), default=0)


async def _used(workers: list[ProxyWorker], timeout_s: float) -> dict[ProxyWorker, str]:
    """Those that a living master has, and who it is since when."""
    answers = await asyncio.gather(*(ask(worker, "status", timeout_s) for worker in workers))
    leases = [None if isinstance(answer, DDLFError) else answer["lease"] for answer in answers]
    return {
        worker: f"{lease['holder']} since {lease['since']}"
        for worker, lease in zip(workers, leases, strict=True)
        if lease and lease["state"] != "dead"
    }


async def ask(worker: ProxyWorker, command: str, timeout_s: float, **arguments: Any) -> Any:
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.ask(command, timeout_s=timeout_s, **arguments)
    except DDLFError as error:
        return error
    finally:
        await worker.close()
