"""``ddlf stop``: stop the workers of a cluster, or what they are running. Runs on the master."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from ddlf.cli.options import add_cluster_options, named_cluster
from ddlf.cli.parsing import Command, Parser
from ddlf.cli.status import ask
from ddlf.cluster.link import master_name
from ddlf.errors import DDLFError, LeaseError

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker


def _options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--restart", action="store_true", help="keep the workers and stop only what they are running")
    parser.add("--force", action="store_true", help="also while a run uses the workers; that run then fails")


async def stop(options: argparse.Namespace) -> int:
    """Stop all workers, or what they run, or none of them if one is in use."""
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
    """Return the workers that a living master uses, and who it is since when."""
    answers = await asyncio.gather(*(ask(worker, "status", timeout_s) for worker in workers))
    leases = [None if isinstance(answer, DDLFError) else answer["lease"] for answer in answers]
    return {
        worker: f"{lease['holder']} since {lease['since']}"
        for worker, lease in zip(workers, leases, strict=True)
        if lease and lease["state"] != "dead"
    }


STOP = Command(
    description="Stop the workers of a cluster. It refuses while a run uses them.",
    examples=(
        "ddlf stop -c cluster.yaml",
        "ddlf stop --restart           # keep the workers, stop what they are running",
        "ddlf stop --restart --force   # even if it is somebody else's run",
    ),
    options=_options,
    run=stop,
)
