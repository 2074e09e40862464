"""Writes a run's ``report.html``: the dashboard's page with its state inside, for runs of any length and any end. Runs
on the master.

Each curve has at most about ``MOST_POINTS`` points, among them the minima and maxima. ``metrics.csv`` has all points.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from ddlf import events as e
from ddlf.events.facts import from_data, to_data
from ddlf.monitor.card_use import UseOfCard, as_text
from ddlf.monitor.dashboard.board import Received
from ddlf.monitor.dashboard.series import Column
from ddlf.monitor.runs import folder, table
from ddlf.monitor.runs.run_reader import Past, read
from ddlf.monitor.terminal.lines import compared

PAGE = Path(__file__).parents[1] / "dashboard" / "page"
SCRIPTS = ("format.js", "charts.js", "timeline.js", "record.js", "page.js")
"""Modules of the page, in the order of their imports."""
UPLOT = Path(__file__).parents[1] / "static"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MOST_POINTS = 800
MOST_FAULTS = 300
MOST_MARKS = 40
CAME = ("back", "joined")
MARKED = (*CAME, "lost", "gone", "rejected", "not finite")
"""Kinds of faults that curves mark. If a worker is lost and returns in one round, the loss is drawn on top."""
TABLES = "tables"


def write(path: Path) -> Past:
    """Write the report of a run, and its tables, into its folder.

    Returns:
        The run.

    Raises:
        ConfigError: The folder is not that of a run.
        OSError: The report cannot be written.
    """
    past = read(path)
    (path / TABLES).mkdir(exist_ok=True)
    tables = {"run": table.run_rows([past]), "workers": table.worker_rows(past), "places": table.stay_rows(past)}
    for name, rows in tables.items():
        folder.write_text(path / TABLES / f"{name}.csv", table.as_csv(rows))
        folder.write_text(path / TABLES / f"{name}.tex", table.as_latex(rows))
    folder.write_text(path / folder.REPORT, html(past))
    return past


def html(past: Past) -> str:
    """Return the dashboard's page with its files and the state of the run inside."""

    def source(name: str, folder: Path = PAGE) -> str:
        return (folder / name).read_text(encoding="utf-8")

    # JSON needs "<" only in texts, where it could end the script.
    state = json.dumps(state_of(past), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    modules = re.sub(r"^import .*\n|^export ", "", "".join(map(source, SCRIPTS)), flags=re.MULTILINE)
    files = f"""<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<style>
{source("uPlot.min.css", UPLOT)}
{source("page.css")}</style>
<script type="application/json" id="state">{state}</script>
<script>
/* uPlot
{source("uPlot.LICENSE", UPLOT).strip()}
*/
{source("uPlot.iife.min.js", UPLOT)}</script>
<script type="module">
{modules}</script>
"""
    before, after = re.split(r" *<!-- files.*<!-- end of files -->\n", source("index.html"), flags=re.DOTALL)
    icon = base64.b64encode((PAGE / "icon.svg").read_bytes()).decode()
    page = before.replace("<title>DDLF", f"<title>{escape(past.path.name)}") + files + after
    return page.replace('src="icon.svg"', f'src="data:image/svg+xml;base64,{icon}"')


def state_of(past: Past) -> dict[str, Any]:
    """Return the state that the report's page shows: the last message that a dashboard would send, and under
    ``"record"`` the facts that only a report has.
    """
    board, status = past.board, past.status
    if not board.state.how and status.state != "running":  # the events of a killed run do not contain its end
        outcome = "complete" if status.state == "finished" else status.state
        board.tell(e.RunEnded(run="", how=outcome, version=0, why=status.why), past.ended or status.began)
    for share in past.shares.values():
        if lane := board.state.lanes.get(share.worker):
            lane.name = share.name
    now = time.time() if status.state == "running" else status.began + past.seconds
    state = {**board.news(Received(), now), "now": now, "held_s": 0, "over": True, "record": record_of(past)}
    if series := state.get("series"):
        x, columns = thinned(series["x"], series["columns"])
        rounded = {
            name: [value if value is None else float(f"{value:.6g}") for value in column]
            for name, column in columns.items()
        }
        state["series"] = {"from": 0, "x": x, "columns": rounded}
    return state


def record_of(past: Past) -> dict[str, Any]:
    """Return the facts about a run that only the report shows, not the dashboard, as JSON data."""
    status = past.status
    workers = [share for share in past.shares.values() if share.updates or share.lost]
    portions, peers = table.portion_rows(past.board.state), table.peer_rows(past.board)
    tables = [
        ("Result", table.run_rows([past])),
        *([("Workers", table.worker_rows(past))] * bool(workers)),
        *([("Places", table.stay_rows(past))] * bool(past.stays)),
        *([("Portions", portions)] * (len(portions) > 1)),
        *([("Peers", peers)] * (len(peers) > 1)),
    ]
    staleness = Counter(record.staleness for record in past.records)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.began))
    about = [
        status.app,
        _source(past),
        f"began {began}",
        f"on {status.host}" if status.host else "",
        _resumed(past),
        f"started again {past.status.restarts} times" if past.status.restarts else "",
        "" if past.records else "no round was completed",
    ]
    return {
        "name": past.path.name,
        "state": status.state,
        "why": status.why,
        "about": about,
        "workers": [to_data(share) for share in workers],
        "places": [to_data(stay) for stay in past.stays],
        "staleness": sorted(staleness.items()) if any(staleness) else [],
        "faults": _faults(past),
        "marks": _marks(past),
        "counts": dict(Counter(fault.kind for fault in past.faults)),
        "tables": [
            {"title": title, "rows": rows, "csv": table.as_csv(rows), "latex": table.as_latex(rows)}
            for title, rows in tables
        ],
        "settings": [
            [name, str(row["value"]), row["origin"]] for name, row in past.summary.get("settings", {}).items()
        ],
        "environment": _environment(past),
    }


def _source(past: Past) -> str:
    git, source = past.summary.get("git"), past.summary.get("source") or ""
    where = Path(source).name if source else ""
    if not git:
        return where
    return f"{where} at commit {git['commit'][:10]}{'' if git['clean'] else ', with uncommitted changes'}".strip()


def _resumed(past: Past) -> str:
    before = past.summary.get("goes_on_from")
    if not before:
        return ""
    where = before["checkpoints"] or "the end of this program's previous training"
    return f"resumed after {_unit(past)} {before['version']}, from {where}"


def _unit(past: Past) -> str:
    return "update" if past.records and past.records[-1].slot is not None else "round"


def duration(seconds: float) -> str:
    """Return a time for people: ``"8.3 s"``, ``"4:07"``, ``"2:10:05"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def thinned(x: list[float], columns: dict[str, Column]) -> tuple[list[float], dict[str, Column]]:
    """Return at most about ``MOST_POINTS`` points of curves over a common x.

    Each group of neighbours keeps the points with the minimum and the maximum of each metric. The first and the last
    point stay, too. Curves of times and bytes, whose names begin with #, keep their values at these points.
    """
    if len(x) <= MOST_POINTS:
        return x, columns
    metrics = [column for name, column in columns.items() if not name.startswith("#")]
    groups = max(MOST_POINTS // (2 * max(len(metrics), 1)), 1)
    chosen = {0, len(x) - 1}
    for group in range(groups):
        begin, end = group * len(x) // groups, (group + 1) * len(x) // groups
        for column in metrics:
            if values := [(value, index) for index in range(begin, end) if (value := column[index]) is not None]:
                chosen |= {min(values)[1], max(values)[1]}
    order = sorted(chosen)
    return [x[index] for index in order], {name: [column[index] for index in order] for name, column in columns.items()}


def _faults(past: Past) -> list[dict[str, Any]]:
    """Return the faults of a run (its unusual events) for the report. If there are many, return the first and the last
    ones, and the number between them.
    """
    shown = [
        {
            "at": duration(max(fault.time - past.status.began, 0.0)),
            "round": fault.round,
            "kind": fault.kind,
            "text": fault.text,
        }
        for fault in past.faults
    ]
    if len(shown) <= MOST_FAULTS:
        return shown
    half = MOST_FAULTS // 2
    between = {
        "at": "",
        "round": 0,
        "kind": "",
        "text": f"and {len(shown) - 2 * half:,} more, which are in {folder.EVENTS}",
    }
    return [*shown[:half], between, *shown[-half:]]


def _marks(past: Past) -> list[tuple[int, str]]:
    """Return the round and kind of each fault, to mark it on the curves of the report; none if they would hide the
    curves.
    """
    marks = [(fault.round, fault.kind) for fault in past.faults if fault.round and fault.kind in MARKED]
    return (
        []
        if len(marks) > MOST_MARKS or _unit(past) == "update"
        else sorted(marks, key=lambda mark: mark[1] not in CAME)
    )


def _environment(past: Past) -> list[list[str]]:
    summary = past.summary
    rows = [[f"version of {name}", version] for name, version in summary.get("versions", {}).items()]
    rows += [
        [name, str(summary[name])]
        for name in ("platform", "cores", "folder", "model", "checkpoints")
        if summary.get(name)
    ]
    cards = [
        f"{worker['name']}: {', '.join(worker['gpus'])}" for worker in summary.get("workers", ()) if worker.get("gpus")
    ]
    rows += [["cards", "; ".join(cards)]] if cards else []
    uses = [from_data(UseOfCard, data) for data in summary.get("cards", ())]
    rows += [[f"use of card {use.card} by {use.worker}", as_text(use)] for use in uses]
    if command := summary.get("command"):
        rows.append(["command", " ".join(command)])
    if ledger := summary.get("ledger"):
        if "inexact" in ledger:
            text = ledger["inexact"]
        elif ledger["exact"]:
            text = f"each of {ledger['samples']:,} samples was trained on {ledger['least']:,} times"
        else:
            text = f"samples were trained on {ledger['least']:,} to {ledger['most']:,} times, {ledger['mean']:.4g} on average"
        if "skipped" in ledger:
            text += f"; damaged partition files were left out: {', '.join(map(str, ledger['skipped']))}"
        for number, slot in enumerate(ledger.get("slots", ()), 1):
            text += f"; slot {number} has {slot['samples']:,} samples of its worker"
            if slot["left_out"]:
                text += f", and {len(slot['left_out']):,} rounds were merged without it"
        rows.append(["ledger", f"{text}; SHA-256 of the counts {ledger['sha256'][:16]}"])
    if plan := _plan(past):
        rows.append(["plan", plan])
    if lost := summary.get("events_lost"):
        rows.append(["events that could not be written", f"{lost:,}"])
    return rows


def _plan(past: Past) -> str:
    """Return the rounds of a run beside their prediction, or how to get one; empty if such runs have no prediction."""
    if (measured := past.facts.get("RoundsMeasured")) is not None:
        return f"rounds take {compared(measured)}"
    source = past.summary.get("source")
    if not source or past.setting("mode") not in ("sync", "async") or past.setting("private"):
        return ""
    return (
        f"none; ddlf plan {Path(source).name} predicts the time of other settings, and says whether several workers pay"
    )
