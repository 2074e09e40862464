"""The requirements of a script (PEP 723), and which workers lack them. Runs on the master."""

from __future__ import annotations

import asyncio
import inspect
import linecache
import re
import tomllib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddlf.errors import DDLFError, VersionError
from ddlf.worker.machine import unmet

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.proxy import ProxyWorker

ASK_S = 5.0


def needs_of(target: Any) -> list[str]:
    """The packages that the file of an app, its class or a function says it needs."""
    kind = target if inspect.isclass(target) or inspect.isfunction(target) else type(target)
    try:
        return needs_in("".join(linecache.getlines(inspect.getfile(kind))))
    except (TypeError, OSError):  # not from a file
        return []


def needs_in(source: str) -> list[str]:
    """The packages that a script says it needs, in a block of PEP 723; none if it has none that can be read."""
    block = re.search(r"^# /// script$\n((?:^#(?:| .*)$\n)+?)^# ///$", source, re.MULTILINE)
    lines = block[1].splitlines() if block else []
    try:
        needs = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)).get(
            "dependencies", []
        )
    except tomllib.TOMLDecodeError:
        return []
    return [str(need) for need in needs] if isinstance(needs, list) else []


async def check_needs(cluster: Cluster, target: Any, say: Callable[[str], None], *, here: bool) -> None:
    """Look for what the script says it needs, and say which workers lack it. One that cannot be asked is let alone.

    Args:
        cluster: Connected.
        target: An app, its class or a function.
        say: Takes lines.
        here: Whether the workers have the packages of this process, which started them.

    Raises:
        VersionError: None has it: there is nobody on whom the script could run.
    """
    needs = needs_of(target)
    if not needs:
        return

    async def missing(worker: ProxyWorker) -> str:
        try:
            return ", ".join((await worker.ask("machine", needs, timeout_s=ASK_S))["unmet"])
        except DDLFError:
            return ""

    if here:
        lacking = {"this machine": ", ".join(unmet(needs))}
    else:
        texts = await asyncio.gather(*map(missing, cluster.workers))
        lacking = {worker.name: text for worker, text in zip(cluster.workers, texts, strict=True)}
    rows = [f"{name} lacks requirements of the script: {text}" for name, text in lacking.items() if text]
    if len(rows) == len(lacking):
        raise VersionError("; ".join(rows), hint="install it, or leave it out of the block '# /// script'")
    for row in rows:
        say(f"missing   {row}")
