"""Lease workers for a moment, to test or measure the connections between them, for ``ddlf doctor`` and ``ddlf bench``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from ddlf.cli.options import named_cluster
from ddlf.errors import LeaseError

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker


@contextlib.asynccontextmanager
async def taken(options: argparse.Namespace, which: Collection[int]) -> AsyncIterator[list[ProxyWorker]]:
    """Workers of a cluster, connected, and nobody else's meanwhile: only who has them may introduce them to each other.

    Args:
        options: Say which cluster, and how long a worker may take to answer.
        which: Their numbers.

    Raises:
        DDLFError: One is in use, or cannot be reached.
    """
    workers = [worker for worker in named_cluster(options).workers if worker.id in which]
    try:
        for found in await asyncio.gather(
            *(worker.connect(timeout_s=options.timeout) for worker in workers), return_exceptions=True
        ):
            if isinstance(found, LeaseError):  # it names options that only ddlf run has
                found.hint = "try again when that run is over"
            if isinstance(found, BaseException):
                raise found
        yield workers
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))


async def without_way(options: argparse.Namespace, which: Collection[int]) -> list[tuple[str, str, str]]:
    """Have workers try to reach each other.

    Args:
        options: As of ``taken``.
        which: Likewise.

    Returns:
        Of each pair without a way who calls, who is called, and what is wrong at each address.
    """
    from ddlf.cluster.introduce import introduced

    async with taken(options, which) as workers:
        found = await introduced(workers, secrets.token_hex(8))
    return [(caller.name, called.name, why) for caller, called, why in found]
