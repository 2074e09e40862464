"""``ddlf status``: ask the daemons of a cluster what they do, whoever uses them. Runs on the master."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_cluster_options, add_json, named_cluster
from ddlf.cli.parsing import Command, Parser
from ddlf.errors import DDLFError

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker


def _options(parser: Parser) -> None:
    add_cluster_options(parser)
    add_json(parser)


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
    """Return what a worker does, in words.

    Args:
        answer: The answer of its daemon, or the error.
        label: Its address or name.
    """
    if isinstance(answer, DDLFError):
        answer.worker = ""  # the line says which
        return f"unreachable: {str(answer).removeprefix(f'{label}: ')}"
    busy = answer["busy"]
    doing = f"busy with {busy['method']!r} for {busy['seconds']:.1f} s" if busy else "idle"
    state = doing if answer["executor"] == "ready" else f"executor {answer['executor']}"
    restarts = f", restarts {answer['restarts']}" if answer["restarts"] else ""
    lease = answer["lease"]
    restarts += f", leased by {lease['holder']} since {lease['since']}" if lease else ""
    methods = answer.get("methods") or []
    holds = [
        *data_sets(answer),
        *weights_held(answer.get("shard")),
        *([f"{len(methods)} method{'s' * (len(methods) > 1)}"] if methods else []),
    ]
    restarts += f", holds {' and '.join(holds)}" if holds else ""
    plain = ", INSECURE PLAINTEXT" if answer["insecure_plaintext"] else ""
    return f"{state}; {answer['host']}, up {answer['uptime_s']:.0f} s, Python {answer['python']}{restarts}{plain}"


def data_sets(status: dict[str, Any]) -> list[str]:
    """Return the data sets that a worker holds, as a list of at most one text."""
    data = status.get("datasets") or {"count": 0, "bytes": 0}
    sets = "data set" if data["count"] == 1 else "data sets"
    return [f"{data['count']} {sets} of {data['bytes'] / 1e6:,.1f} MB"] if data["count"] else []


def weights_held(shard: dict[str, Any] | None) -> list[str]:
    """Return which part of a run's weights a worker holds, as a list of texts."""
    if shard is None:
        return []
    share = f"values {shard['begin'] + 1:,} to {shard['end']:,} of {shard['of']:,}"
    shards, copies = shard.get("shards", 1), shard.get("copies", 0)  # of a daemon of 0.1.0 neither is there
    found = [f"a shard ({share}, version {shard['version']})"] if shards else []
    found += [f"{shards - 1} more shard{'s' * (shards > 2)}"] if shards > 1 else []
    found += [f"{'copies' if copies > 1 else 'a copy'} of {copies} other{'s' * (copies > 1)}"] if copies else []
    return [*found[:-1], f"{found[-1]} of run {shard['run']}"]


async def ask(worker: ProxyWorker, command: str, timeout_s: float, **arguments: Any) -> Any:
    """Ask a daemon; returns its answer, or the error."""
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.ask(command, timeout_s=timeout_s, **arguments)
    except DDLFError as error:
        return error
    finally:
        await worker.close()


STATUS = Command(
    description="Show what the workers are doing.",
    examples=("ddlf status", "ddlf status -c cluster.yaml --json"),
    options=_options,
    run=status,
)
