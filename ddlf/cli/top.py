"""``ddlf top``: show the state of a run, or of a cluster's workers, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ddlf.cli.options import add_cluster_options, named_cluster
from ddlf.cli.parsing import Command, Parser
from ddlf.cluster.config.addresses import find_config
from ddlf.errors import ConnectError
from ddlf.events.facts import from_data
from ddlf.events.record import size
from ddlf.monitor.card_use import short_reading
from ddlf.monitor.terminal.phrases import duration, number, rate
from ddlf.worker.card_watch import Reading

POLL_S = 1.0
ANSWER_S = 3.0
"""Seconds to wait for the state of the workers. A busy master does not ask them."""
COLORS = {"busy": "cyan", "idle": "green", "suspect": "yellow", "lost": "red", "gone": "red"}
BARS = "▁▂▃▄▅▆▇█"
TITLES = ("does", "rate", "updates", "memory", "cores", "sent", "received", "card")
OF_A_RUN = ("rate", "updates")
LINES = 6
"""Rows of the log, if the workers leave so many."""
SPARK_COLUMNS = 40
SHORTEST_NAME = 8


def _options(parser: Parser) -> None:
    add_cluster_options(parser)
    parser.add("--once", action="store_true", help="print the state once and exit")


async def top(options: argparse.Namespace) -> int:
    """Run ``ddlf top``: show the state of a run or a cluster until Ctrl-C or the end of the master. Show it once
    without a terminal, or with ``--once``.
    """
    async with contextlib.aclosing(_source(options)) as source:
        if options.once or not sys.stdout.isatty():
            begin = time.monotonic()
            async for state in source:
                if state["workers"] or time.monotonic() - begin > ANSWER_S:
                    _print(state)
                    break
        else:
            await _watch(source)
    return 0


async def _watch(source: AsyncIterator[dict[str, Any]]) -> None:
    console = Console(highlight=False, markup=False)
    state: dict[str, Any] = {}
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for state in source:
                live.update(draw(state, *console.size), refresh=True)
    except asyncio.CancelledError:
        pass  # Ctrl-C ends this command
    finally:
        if state:
            _print(state)


def _print(state: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    console.print(draw(state, console.width, 10_000))


def _source(options: argparse.Namespace) -> AsyncGenerator[dict[str, Any], None]:
    """Return a generator of states to show: of the user's newest run on this machine, or of a named cluster's daemons,
    which also answer without a run.
    """
    from ddlf.monitor.dashboard.address import open_pages
    from ddlf.monitor.dashboard.viewer import watch

    if not (options.config or options.hosts):
        if pages := open_pages():
            return watch(pages[0]["port"], pages[0]["url"].rpartition("#")[2])
        if find_config() is None:
            raise ConnectError(
                "no run of yours has a dashboard on this machine, and there is no cluster file here",
                hint="start a run with ddlf run APP --dashboard, or name a cluster: ddlf top -c cluster.yaml",
            )
    return _daemons(options)


async def _daemons(options: argparse.Namespace) -> AsyncGenerator[dict[str, Any], None]:
    """Ask the daemons of the workers for their state once a second, as a guest, so that no run is disturbed. Yield each
    state.
    """
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
            await asyncio.sleep(max(0.0, POLL_S - (time.monotonic() - begin)))
    finally:
        await cluster.close()


def draw(state: dict[str, Any], columns: int, rows: int) -> RenderableType:
    """Draw the state of a run for the terminal.

    Args:
        state: The state, as ``ddlf.monitor.dashboard.viewer.watch`` yields it.
        columns: Columns of the terminal.
        rows: Rows of the terminal.
    """
    parts: list[RenderableType] = []
    if run := state["run"]:
        parts += _run(run, state, columns)
    else:
        parts.append(Text(f"{state['about'].get('cluster') or 'cluster'}: no run here", style="bold"))
    if state["held_s"]:
        parts.append(Text(f"the master has been busy for {state['held_s']:.0f} s and does not answer", style="yellow"))
    remaining_rows = rows - len(parts) - 2  # the table's head, and a row for the cursor
    workers = len({row["worker"] for row in (*state["lanes"], *state["workers"])})
    parts += _workers(state, columns, remaining_rows)
    planned = run.get("parts", ()) if run else ()  # a master of 0.1 sends none
    if planned and remaining_rows > workers + len(planned):
        names = {lane["worker"]: lane["name"] for lane in state["lanes"]}
        parts += [_part(number, part, names, columns) for number, part in enumerate(planned, 1)]
        remaining_rows -= len(planned)
    lines = state["log"][-min(LINES, max(remaining_rows - workers, 0)) :] if remaining_rows > workers else []
    return Group(*parts, *(_line(row, columns) for row in lines))


def _run(run: dict[str, Any], state: dict[str, Any], columns: int) -> list[RenderableType]:
    ended = run["ended"] is not None
    phase = "stopping" if run["stopping"] and not ended else run["phase"]
    color = "red" if phase in ("failed", "cancelled") else "yellow" if phase in ("stopping", "preparing") else "green"
    position = f"round {run['round']} of {run['rounds']}" if run["in_rounds"] else f"update {run['version']}"
    times = [
        position,
        f"{run['done']:.0%}",
        f"{duration((run['ended'] or state['now']) - run['began'])} {'in all' if ended else 'so far'}",
    ]
    if run["left_s"] is not None:
        times.append(f"{duration(run['left_s'])} left")
    suffix = f"  {', '.join(times)}"
    name = Text(run["app"], "bold")
    name.truncate(max(columns - len(phase) - len(suffix) - 2, SHORTEST_NAME), overflow="ellipsis")
    head = Text.assemble(name, "  ", (phase, color), suffix)
    head.truncate(columns, overflow="ellipsis")
    width = max(columns - 1, 10)
    filled = round(run["done"] * width)
    bar = Text.assemble(("█" * filled, color), ("░" * (width - filled), "dim"))
    values = [f"{name} {'NaN' if value is None else number(value)}" for name, value in run["metrics"].items()]
    values += [rate(run["rate"])] * bool(run["rate"])
    values += [f"{size(run['bytes_out'])} out, {size(run['bytes_back'])} back"]
    values += [f"{run['lost']} lost"] * bool(run["lost"]) + [", ".join(run["doing"])] * bool(run["doing"])
    facts = Text("  ".join(values))
    facts.truncate(columns, overflow="ellipsis")
    parts: list[RenderableType] = [head, bar, facts]
    if len(curve := [value for value in state["curves"].get("loss", []) if value is not None]) > 1:
        parts.append(Text.assemble("loss ", (spark(curve, min(SPARK_COLUMNS, columns - 6)), "cyan")))
    return [*parts, Text(run["why"].split("\n")[0], style="red")] if run["why"] else parts


def spark(values: list[float], columns: int) -> str:
    """Draw values as a small curve in one row of text. If there are more values than columns, each column shows a mean."""
    step = max(1, -(-len(values) // columns))
    means = [sum(part) / len(part) for begin in range(0, len(values), step) if (part := values[begin : begin + step])]
    low, high = min(means), max(means)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in means)


def _workers(state: dict[str, Any], columns: int, rows: int) -> list[RenderableType]:
    lanes = {lane["worker"]: lane for lane in state["lanes"]}
    workers_of_cluster = {worker["worker"]: worker for worker in state["workers"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", min_width=9, max_width=24)
    table.add_column("does", no_wrap=True, overflow="ellipsis", ratio=1)
    fitting: tuple[str, ...] = TITLES[:2] if columns < 60 else TITLES[:5] if columns < 100 else TITLES
    if not any(map(cards_of, workers_of_cluster.values())):
        fitting = tuple(title for title in fitting if title != "card")
    elif 60 <= columns < 100:
        fitting = (*TITLES[:4], "card")  # a busy card says more than a number of cores
    titles = [title for title in fitting if state["run"] or title not in OF_A_RUN]
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    numbers = sorted({*lanes, *workers_of_cluster})
    fits = numbers if len(numbers) <= max(rows, 1) else numbers[: max(rows - 1, 1)]
    for worker in fits:
        lane, facts = lanes.get(worker, {}), workers_of_cluster.get(worker, {})
        status, words = activity_of(lane, facts, state)
        cells = {
            "rate": rate(lane["rate"]) if lane.get("rate") else "",
            "updates": str(lane.get("updates") or ""),
            "memory": size(used) if (used := (facts.get("memory") or {}).get("used")) else "",
            "card": "; ".join(map(short_reading, cards_of(facts))),
            "cores": str(facts.get("cores") or ""),
            "sent": size(facts["sent"]) if facts else "",
            "received": size(facts["received"]) if facts else "",
        }
        name = facts.get("name") or lane.get("name") or f"worker {worker}"
        table.add_row(Text(name, style=COLORS[status]), Text(words), *(cells[title] for title in titles[1:]))
    return [table, *([Text(f"and {len(numbers) - len(fits)} more", style="dim")] if len(fits) < len(numbers) else [])]


def cards_of(worker: dict[str, Any]) -> list[Reading]:
    """Return the readings of a worker's cards; empty without cards."""
    return [from_data(Reading, card) for card in worker.get("cards") or ()]


def _part(number: int, part: dict[str, Any], names: dict[int, str], columns: int) -> Text:
    """Draw a part of a model that spans workers."""
    facts = [f"part {number}", " ".join(part["layers"]), f"on {names[part['worker']]}" if part["worker"] else ""]
    facts += [size(part["nbytes"]), "" if part["idle"] is None else f"{part['idle']:.0%} idle"]
    result = Text("  ".join(filter(None, facts)), "dim")
    result.truncate(columns, overflow="ellipsis")
    return result


def activity_of(lane: dict[str, Any], worker: dict[str, Any], state: dict[str, Any]) -> tuple[str, str]:
    """Return the state of a worker (busy, idle, suspect, lost or gone) and its current work, in words."""
    if lane.get("state") == "gone":
        return "gone", f"excluded: {_first(lane['why'])}"
    if lane.get("state") == "lost" or worker.get("state") in ("dead", "missing"):
        reason = _first(lane.get("why") or worker.get("why") or "")
        return "lost", f"lost: {reason}" if reason else "lost"
    if worker.get("state") == "suspect":
        return "suspect", f"silent for {worker['silent_s']:.0f} s"
    if lane.get("slot") and (state["run"] or {}).get("phase") == "training":
        loss = "" if lane["loss"] is None else f", loss {number(lane['loss'])}"
        unit = "part" if state["run"].get("parts") else "slot"
        return "busy", f"{unit} {lane['slot']}, round {lane['round']}, {lane['done']:.0%}{loss}"
    if lane.get("doing"):
        return "busy", lane["doing"]
    if busy := worker.get("busy"):
        return "busy", f"busy with {busy['method']!r} for {busy['seconds']:.1f} s"
    if worker.get("executor", "ready") != "ready":
        return "suspect", f"executor {worker['executor']}"
    lease = worker.get("lease")
    return "idle", f"idle, with {lease['holder']}" if lease and not state["run"] else "idle"


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _line(line: list[Any], columns: int) -> Text:
    _, level, worker, text = line
    style = {"warn": "yellow", "stderr": "red"}.get(level, "dim")
    result = Text.assemble((f"{worker}  " if worker else "", "magenta"), (text, style))
    result.truncate(columns, overflow="ellipsis")
    return result


TOP = Command(
    description="Watch the newest run of yours on this machine that has a dashboard. Without one, or with the name of a "
    "cluster, watch its workers. Ctrl-C ends it.",
    examples=(
        "ddlf top                      # a run with a dashboard, else the workers of ./cluster.yaml",
        "ddlf top -c cluster.yaml",
        "ddlf top --once               # print the state once",
    ),
    options=_options,
    run=top,
)
