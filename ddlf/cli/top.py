"""``ddlf top``: what the page shows, in a terminal; of a running master, or of the daemons of a cluster that has none."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ddlf.cli.options import named_cluster
from ddlf.cluster.config.addresses import find_config
from ddlf.errors import ConnectError

LOOK_S = 1.0
ANSWER_S = 3.0
"""How long it waits for what the workers say: a master that is busy does not ask them."""


async def top(options: argparse.Namespace) -> int:
    """Show it until Ctrl-C, or until the master ends; once, without a terminal or with ``--once``."""
    async with contextlib.aclosing(_source(options)) as source:
        if options.once or not sys.stdout.isatty():
            begin = time.monotonic()
            async for known in source:
                if known["workers"] or time.monotonic() - begin > ANSWER_S:
                    _print(known)
                    break
        else:
            await _watch(source)
    return 0


async def _watch(source: AsyncIterator[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.live import Live

    from ddlf.cli.picture import draw

    console = Console(highlight=False, markup=False)
    known: dict[str, Any] = {}
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for known in source:
                live.update(draw(known, *console.size), refresh=True)
    except asyncio.CancelledError:
        pass  # Ctrl-C is how this is left
    finally:
        if known:
            _print(known)


def _print(known: dict[str, Any]) -> None:
    from rich.console import Console

    from ddlf.cli.picture import draw

    console = Console(highlight=False, markup=False)
    console.print(draw(known, console.width, 10_000))


def _source(options: argparse.Namespace) -> AsyncGenerator[dict[str, Any], None]:
    """The newest run of this user on this machine, unless a cluster is named; without one the daemons of the cluster file."""
    from ddlf.monitor.dashboard.places import found
    from ddlf.monitor.dashboard.viewer import watch

    if not (options.config or options.hosts):
        if pages := found():
            return watch(pages[0]["port"], pages[0]["url"].rpartition("#")[2])
        if find_config() is None:
            raise ConnectError(
                "there is no run of yours with a dashboard on this machine, and no cluster file here",
                hint="start a run with ddlf run APP --dashboard, or name a cluster: ddlf top -c cluster.yaml",
            )
    return _daemons(options)


async def _daemons(options: argparse.Namespace) -> AsyncGenerator[dict[str, Any], None]:
    """Ask the daemons once a second, as a guest: whoever has the workers is not disturbed."""
    cluster = named_cluster(options, guest=True)
    try:
        while True:
            begin = time.monotonic()
            workers = await cluster.look()
            yield {
                "about": {"cluster": str(options.config or options.hosts or find_config())},
                "run": None,
                "lanes": [],
                "workers": workers,
                "curves": {},
                "log": [],
                "now": time.time(),
                "held_s": 0.0,
            }
            await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - begin)))
    finally:
        await cluster.close()
