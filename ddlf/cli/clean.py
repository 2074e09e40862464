"""``ddlf clean``: free what earlier runs left on the workers. Runs on the master."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_cluster_options, named_cluster
from ddlf.cli.parsing import Command, Parser
from ddlf.cli.status import data_sets
from ddlf.errors import DDLFError, LeaseError, RequestTimeout
from ddlf.rpc.messages import Request

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker


def _options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--methods", action="store_true", help="also remove hosted methods")


async def clean_named(options: argparse.Namespace) -> int:
    """Clean the workers that the options name."""
    return await clean(named_cluster(options).workers, options)


async def clean(workers: list[ProxyWorker], options: argparse.Namespace) -> int:
    """Free data, models and variables of all workers, or of none if a run uses one of them.

    Args:
        workers: Not connected.
        options: ``methods``, whether hosted methods go too, and ``timeout``, in seconds for each worker.

    Raises:
        LeaseError: Some are in use; nothing was freed.
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


async def _take(worker: ProxyWorker, timeout_s: float) -> dict[str, Any] | DDLFError:
    """Lease the worker, so that nobody starts a run meanwhile; returns its status."""
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.status(timeout_s)
    except DDLFError as error:
        error.worker = ""
        return error


async def _clean(worker: ProxyWorker, status: dict[str, Any] | DDLFError, options: argparse.Namespace) -> Any:
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
        busy = status["busy"]
        what = f" with {busy['method']!r} since {busy['seconds']:.0f} s" if busy else ""
        return RequestTimeout(f"is busy{what}", hint="end that with: ddlf stop --restart")
    except DDLFError as error:
        error.worker = ""
        return error
    freed = [
        *data_sets(status),
        *([f"variables {', '.join(sorted(variables))}"] if variables else []),
        *([f"methods {', '.join(methods)}"] if methods else []),
    ]
    return f"freed: {'; '.join(freed)}" if freed else "nothing to free"


def _row(worker: ProxyWorker, text: str) -> str:
    return f"{worker.id:>3}  {worker.label:<21}  {text}"


CLEAN = Command(
    description="Free data, models and variables that earlier runs left on the workers.",
    examples=("ddlf clean -c cluster.yaml", "ddlf clean --methods          # hosted methods, too"),
    options=_options,
    run=clean_named,
)
