"""What ``ddlf top`` draws: a pure function of what is known, and of the size of the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddlf.events.record import size
from ddlf.monitor.observe.phrases import duration, number, rate

COLORS = {"busy": "cyan", "idle": "green", "suspect": "yellow", "lost": "red", "gone": "red"}
BARS = "▁▂▃▄▅▆▇█"
TITLES = ("does", "rate", "updates", "memory", "cores", "sent", "received")
OF_A_RUN = ("rate", "updates")
LINES = 6
"""Of the log, if the workers leave so many rows."""
SPARK_COLUMNS = 40
SHORTEST_NAME = 8


def draw(known: dict[str, Any], columns: int, rows: int) -> RenderableType:
    """Draw it.

    Args:
        known: As ``ddlf.monitor.dashboard.viewer.watch`` yields it.
        columns: Columns of the terminal.
        rows: Rows of the terminal.
    """
    parts: list[RenderableType] = []
    if run := known["run"]:
        parts += _run(run, known, columns)
    else:
        parts.append(Text(f"{known['about'].get('cluster') or 'cluster'}: no run here", style="bold"))
    if known["held_s"]:
        parts.append(Text(f"the master has been busy for {known['held_s']:.0f} s and does not answer", style="yellow"))
    left = rows - len(parts) - 2  # the table's head, and a row for the cursor
    workers = len({one["worker"] for one in (*known["lanes"], *known["workers"])})
    parts += _workers(known, columns, left)
    lines = known["log"][-min(LINES, max(left - workers, 0)) :] if left > workers else []
    return Group(*parts, *(_line(one, columns) for one in lines))


def _run(run: dict[str, Any], known: dict[str, Any], columns: int) -> list[RenderableType]:
    ended = run["ended"] is not None
    phase = "stopping" if run["stopping"] and not ended else run["phase"]
    color = "red" if phase in ("failed", "cancelled") else "yellow" if phase in ("stopping", "preparing") else "green"
    one = f"round {run['round']} of {run['rounds']}" if run["mode"] == "sync" else f"update {run['version']}"
    times = [
        one,
        f"{run['done']:.0%}",
        f"{duration((run['ended'] or known['now']) - run['began'])} {'in all' if ended else 'so far'}",
    ]
    if run["left_s"] is not None:
        times.append(f"{duration(run['left_s'])} left")
    rest = f"  {', '.join(times)}"
    name = Text(run["app"], "bold")
    name.truncate(max(columns - len(phase) - len(rest) - 2, SHORTEST_NAME), overflow="ellipsis")
    head = Text.assemble(name, "  ", (phase, color), rest)
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
    if len(curve := [value for value in known["curves"].get("loss", []) if value is not None]) > 1:
        parts.append(Text.assemble("loss ", (spark(curve, min(SPARK_COLUMNS, columns - 6)), "cyan")))
    return [*parts, Text(run["why"].split("\n")[0], style="red")] if run["why"] else parts


def spark(values: list[float], columns: int) -> str:
    """A curve in one row: its newest values, or means of neighbours when there are more than columns."""
    step = max(1, -(-len(values) // columns))
    means = [sum(part) / len(part) for at in range(0, len(values), step) if (part := values[at : at + step])]
    low, high = min(means), max(means)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in means)


def _workers(known: dict[str, Any], columns: int, rows: int) -> list[RenderableType]:
    lanes = {lane["worker"]: lane for lane in known["lanes"]}
    asked = {worker["worker"]: worker for worker in known["workers"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", min_width=9, max_width=24)
    table.add_column("does", no_wrap=True, overflow="ellipsis", ratio=1)
    titles = [
        title
        for title in TITLES[: 2 if columns < 60 else 5 if columns < 100 else None]
        if known["run"] or title not in OF_A_RUN
    ]
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    numbers = sorted({*lanes, *asked})
    fits = numbers if len(numbers) <= max(rows, 1) else numbers[: max(rows - 1, 1)]
    for worker in fits:
        lane, facts = lanes.get(worker, {}), asked.get(worker, {})
        how, words = doing(lane, facts, known)
        cells = {
            "rate": rate(lane["rate"]) if lane.get("rate") else "",
            "updates": str(lane.get("updates") or ""),
            "memory": size(used) if (used := (facts.get("memory") or {}).get("used")) else "",
            "cores": str(facts.get("cores") or ""),
            "sent": size(facts["sent"]) if facts else "",
            "received": size(facts["received"]) if facts else "",
        }
        name = facts.get("name") or lane.get("name") or f"worker {worker}"
        table.add_row(Text(name, style=COLORS[how]), Text(words), *(cells[title] for title in titles[1:]))
    return [table, *([Text(f"and {len(numbers) - len(fits)} more", style="dim")] if len(fits) < len(numbers) else [])]


def doing(lane: dict[str, Any], worker: dict[str, Any], known: dict[str, Any]) -> tuple[str, str]:
    """Whether a worker is busy, idle, suspect, lost or gone, and in words what it does."""
    if lane.get("state") == "gone":
        return "gone", f"takes no part any more: {_first(lane['why'])}"
    if lane.get("state") == "lost" or worker.get("state") in ("dead", "missing"):
        why = _first(lane.get("why") or worker.get("why") or "")
        return "lost", f"lost: {why}" if why else "lost"
    if worker.get("state") == "suspect":
        return "suspect", f"silent for {worker['silent_s']:.0f} s"
    if lane.get("slot") and (known["run"] or {}).get("phase") == "training":
        loss = "" if lane["loss"] is None else f", loss {number(lane['loss'])}"
        return "busy", f"slot {lane['slot']}, round {lane['round']}, {lane['done']:.0%}{loss}"
    if lane.get("doing"):
        return "busy", lane["doing"]
    if busy := worker.get("busy"):
        return "busy", f"busy with {busy['method']!r} since {busy['seconds']:.1f} s"
    if worker.get("executor", "ready") != "ready":
        return "suspect", f"executor {worker['executor']}"
    lease = worker.get("lease")
    return "idle", f"idle, with {lease['holder']}" if lease and not known["run"] else "idle"


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _line(line: list[Any], columns: int) -> Text:
    _, level, who, text = line
    style = {"warn": "yellow", "stderr": "red"}.get(level, "dim")
    result = Text.assemble((f"{who}  " if who else "", "magenta"), (text, style))
    result.truncate(columns, overflow="ellipsis")
    return result
