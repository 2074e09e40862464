"""Writes a run's ``report.html``, a self-contained file, for runs of any length and any end. Runs on the master.

Each curve has at most ``MOST_POINTS`` points, which preserve the extremes. ``metrics.csv`` has all points.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from ddlf.events.facts import to_data
from ddlf.events.record import size
from ddlf.monitor.runs import folder, table
from ddlf.monitor.runs.past import Past, read

HERE = Path(__file__).parent / "static"
UPLOT = Path(__file__).parents[1] / "static"
MOST_POINTS = 800
MOST_CHARTS = 8
"""Maximum number of charts of metrics."""
MOST_FAULTS = 300
MOST_MARKS = 40
CAME = ("back", "joined")
MARKED = (*CAME, "lost", "gone", "rejected", "not finite")
"""Kinds of faults that curves mark. If a worker is lost and returns in one round, the loss is drawn on top."""
TABLES = "tables"

Points = tuple[list[int], list[float | None]]


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
    for name, rows in (("run", table.of_runs([past])), ("workers", table.of_workers(past))):
        folder.write_text(path / TABLES / f"{name}.csv", table.as_csv(rows))
        folder.write_text(path / TABLES / f"{name}.tex", table.as_latex(rows))
    folder.write_text(path / folder.REPORT, html(past))
    return past


def html(past: Past) -> str:
    """Return the page as HTML."""
    parts = {
        "TITLE": escape(past.path.name),
        "UPLOT_LICENSE": (UPLOT / "uPlot.LICENSE").read_text(encoding="utf-8").strip(),
        "UPLOT_CSS": (UPLOT / "uPlot.min.css").read_text(encoding="utf-8"),
        "UPLOT_JS": (UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "REPORT_CSS": (HERE / "report.css").read_text(encoding="utf-8"),
        "REPORT_JS": (HERE / "report.js").read_text(encoding="utf-8"),
        # JSON needs "<" only in texts, where it could end the script.
        "DATA": json.dumps(data_of(past), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    page = (HERE / "report.html").read_text(encoding="utf-8")
    head, *rest = page.split("{{")
    return head + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def data_of(past: Past) -> dict[str, Any]:
    """Return the content of the page as JSON data."""
    run, workers = table.of_runs([past]), table.of_workers(past)
    tables = [("Result", run), ("Workers", workers)]
    return {
        "name": past.path.name,
        "state": past.state.state,
        "why": past.state.why,
        "app": past.state.app,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(past.state.began)),
        "host": past.state.host,
        "source": _source(past),
        "goes_on_from": _goes_on_from(past),
        "tiles": [{"what": what, "value": value, "unit": unit} for what, value, unit in _tiles(past)],
        "charts": _charts(past),
        "workers": [to_data(share) for share in past.shares.values() if share.updates or share.lost],
        "staleness": sorted(Counter(record.staleness for record in past.records).items())
        if any(record.staleness for record in past.records)
        else [],
        "faults": _faults(past),
        "marks": _marks(past),
        "counts": dict(Counter(fault.kind for fault in past.faults)),
        "tables": [
            {"title": title, "rows": rows, "csv": table.as_csv(rows), "latex": table.as_latex(rows)}
            for title, rows in tables
            if rows is run or any(share.updates or share.lost for share in past.shares.values())
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
    return f"{where} at commit {git['commit'][:10]}{'' if git['clean'] else ', with changes that are in no commit'}".strip()


def _goes_on_from(past: Past) -> str:
    before = past.summary.get("goes_on_from")
    if not before:
        return ""
    where = before["checkpoints"] or "where the training before of this program ended"
    return f"goes on after {_what(past)} {before['version']}, from {where}"


def _what(past: Past) -> str:
    return "update" if past.records and past.records[-1].slot is not None else "round"


def _tiles(past: Past) -> list[tuple[str, str, str]]:
    """Return the most important numbers: name, value, unit."""
    newest, records = table.newest(past), past.records
    found = []
    for name in ("test_accuracy", "val_accuracy", "accuracy", "test_loss", "val_loss", "loss"):
        same = [key for key in newest if key == name or (name.endswith("accuracy") and _is_accuracy(key, name))]
        found += [(_words(key), table.number(newest[key]), "") for key in same[:1]]
    tiles = found[:3]
    if records:
        what = f"{_what(past)}s"
        most = records[-1].rounds if records[-1].slot is None else len(records)
        done = records[-1].round if records[-1].slot is None else records[-1].version
        tiles.append((what, f"{done:,}", f"of {most:,}" if records[-1].slot is None and done != most else ""))
        spent = max(past.times[-1] - past.times[0] + records[0].seconds, 1e-9)
        trained = sum(record.samples * record.epochs for record in records)
        rate = trained / spent
        tiles.append(("samples per second", f"{rate:,.0f}" if rate >= 100 else table.number(rate), ""))
    tiles.append(("time", duration(past.seconds), ""))
    if past.shares:
        tiles.append(("workers", f"{len(past.shares)}", ""))
        moved = sum(share.bytes_out + share.bytes_back for share in past.shares.values())
        amount, unit = size(moved).split()
        tiles.append(("moved", amount, unit))
    return tiles


def _is_accuracy(key: str, name: str) -> bool:
    prefix = name.removesuffix("accuracy")
    return "acc" in key and (key.startswith(prefix) if prefix else not key.startswith(("val_", "test_")))


def duration(seconds: float) -> str:
    """Return a time for people: ``"8.3 s"``, ``"4:07"``, ``"2:10:05"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _charts(past: Past) -> list[dict[str, Any]]:
    records = past.records
    if not records:
        return []
    x = [record.round if record.slot is None else record.version for record in records]
    groups: dict[str, dict[str, list[float | None]]] = {}
    for place, record in enumerate(records):
        for name, value in (*record.metrics.items(), *((f"test_{key}", value) for key, value in record.test.items())):
            base = name.removeprefix("val_").removeprefix("test_")
            groups.setdefault(base, {}).setdefault(name, [None] * len(records))[place] = value
    first = [base for base in groups if base == "loss"] + [base for base in groups if "acc" in base]
    order = [*dict.fromkeys([*first, *groups])][:MOST_CHARTS]
    charts: list[dict[str, Any]] = [
        {
            "title": base.replace("_", " "),
            "unit": "",
            "series": [_series(name, x, groups[base][name]) for name in groups[base]],
        }
        for base in order
    ]
    times = {"whole": "seconds", "computing": "compute_s", "transfer": "transfer_s", "waiting": "wait_s"}
    charts.append(_of_records(f"seconds per {_what(past)}", "s", x, records, times))
    rates = [record.samples * record.epochs / max(record.seconds, 1e-9) for record in records]
    title = "samples per second" + ", of a slot" * (_what(past) == "update")
    charts.append({"title": title, "unit": "/s", "series": [_series("samples", x, rates)]})
    moved = {"sent": "bytes_out", "received": "bytes_back"}
    charts.append(_of_records(f"bytes per {_what(past)}", "B", x, records, moved))
    if any(record.staleness for record in records):
        missed = _of_records("staleness", "", x, records, {"merges missed": "staleness"})
        charts.append({**missed, "dots": True})
    if any(record.error for record in records):
        charts.append(_of_records("error that the codec made", "", x, records, {"relative": "error"}))
    return [{**chart, "x": _what(past)} for chart in charts]


def _of_records(title: str, unit: str, x: list[int], records: list[Any], names: dict[str, str]) -> dict[str, Any]:
    series = [_series(name, x, [float(getattr(record, key)) for record in records]) for name, key in names.items()]
    return {"title": title, "unit": unit, "series": series}


def _series(name: str, x: list[int], values: Sequence[float | None]) -> dict[str, Any]:
    rounds, numbers = thinned(x, values)
    last = next((value for value in reversed(values) if value is not None), None)
    return {"name": _words(name), "x": rounds, "y": numbers, "last": to_data(last)}


def _words(name: str) -> str:
    return name.replace("val_", "validation_", 1 if name.startswith("val_") else 0).replace("_", " ")


def thinned(x: list[int], values: Sequence[float | None]) -> Points:
    """Return at most ``MOST_POINTS`` finite points of a curve: minimum and maximum of each group of neighbours."""
    points = [(place, value) for place, value in zip(x, values, strict=True) if value is not None and isfinite(value)]
    if len(points) > MOST_POINTS:
        buckets = MOST_POINTS // 2
        kept = []
        for number in range(buckets):
            bucket = points[number * len(points) // buckets : (number + 1) * len(points) // buckets]
            ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
            kept += sorted(ends)
        kept[0], kept[-1] = points[0], points[-1]
        points = kept
    return [place for place, _ in points], [float(f"{value:.6g}") for _, value in points]


def _faults(past: Past) -> list[dict[str, Any]]:
    """Return the faults. If there are many, return the first and the last ones, and the number between them."""
    shown = [
        {
            "at": duration(max(fault.time - past.state.began, 0.0)),
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
    """Return rounds and kinds of faults for the curves; none if they would hide the curves."""
    marks = [(fault.round, fault.kind) for fault in past.faults if fault.round and fault.kind in MARKED]
    return (
        []
        if len(marks) > MOST_MARKS or _what(past) == "update"
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
        rows.append(["ledger", f"{text}; SHA-256 of the counts {ledger['sha256'][:16]}"])
    if lost := summary.get("events_lost"):
        rows.append(["events that could not be written", f"{lost:,}"])
    return rows
