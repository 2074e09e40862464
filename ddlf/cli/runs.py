"""``ddlf runs``: which runs there are, two or more side by side, the old ones removed. Reads files only."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ddlf.cli.recording import runs_of
from ddlf.errors import ConfigError
from ddlf.events.facts import to_data
from ddlf.monitor.runs import folder, past, report, table

USUAL_LAST = 20


def show(options: argparse.Namespace) -> int:
    """List runs, newest first."""
    if options.all and options.last is not None:
        raise ConfigError("--last has no effect with --all", hint="leave one of them out")
    out = runs_of(options)
    paths = folder.runs_in(out)
    rows = [_row(path) for path in (paths if options.all else paths[: options.last or USUAL_LAST])]
    if options.json:
        print(json.dumps(to_data(rows)))
        return 0
    if not rows:
        print(f"no runs in {str(out)!r} yet; ddlf run makes them")
        return 0
    head = ["run", "state", "began", "time", "rounds", "loss", "accuracy", "test"]
    print(table.as_text([head, *([_cell(row[name]) for name in head] for row in rows)]))
    if more := len(paths) - len(rows):
        print(f"and {more} older; --all shows them")
    return 0


def _cell(value: Any) -> str:
    return "" if value is None else table.number(value) if isinstance(value, float) else str(value)


def _row(path: Path) -> dict[str, Any]:
    state, (last, ended) = folder.read_state(path), past.end_of(path / folder.EVENTS)
    found = folder.read_json(path / folder.SUMMARY).get("results", {})
    record = last.get("record", {})
    metrics, test = record.get("metrics", {}), found.get("test") or record.get("test", {})
    now = time.time() if state.state == "running" else (state.ended or ended or state.began)
    what = "round" if record.get("slot") is None else "version"
    return {
        "run": path.name,
        "state": state.state,
        "why": state.why,
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began)),
        "seconds": round(now - state.began, 3),
        "time": report.duration(max(now - state.began, 0.0)),
        "rounds": f"{record[what]}/{record['rounds']}" if what == "round" and record else record.get(what),
        "loss": _number(metrics.get("loss")),
        "accuracy": _number(next((value for name, value in metrics.items() if "acc" in name), None)),
        "test": _number(next((value for name, value in test.items() if "acc" in name), test.get("loss"))),
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare(options: argparse.Namespace) -> int:
    """Show runs side by side: what they came to, and the settings in which they differ."""
    _check_alone(options)
    out = runs_of(options)
    paths = [folder.find(out, name) for name in options.runs]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"{' and '.join(options.runs)} name the same run", hint="ddlf runs lists those that there are"
        )
    pasts = [past.read(path) for path in paths]
    rows = table.of_runs(pasts)
    if options.csv:
        print(table.as_csv(rows), end="")
    elif options.latex:
        print(table.as_latex(rows), end="")
    else:
        print(table.as_text(rows))
        if differing := _differing(pasts):
            print()
            print(table.as_text([["setting", *(one.path.name for one in pasts)], *differing]))
        else:
            print("\nno setting differs")
    return 0


def _differing(pasts: list[past.Past]) -> list[list[str]]:
    names = dict.fromkeys(name for one in pasts for name in one.summary.get("settings", {}))
    rows = [[name, *(str(one.setting(name)) for one in pasts)] for name in names if name not in ("out", "run_name")]
    return [row for row in rows if len(set(row[1:])) > 1]


def _check_alone(options: argparse.Namespace) -> None:
    """Refuse what stands before an action and is for the list of runs."""
    if unused := [f"--{name}" for name in ("last", "all", "json") if getattr(options, name) not in (None, False)]:
        raise ConfigError(f"{', '.join(unused)} has no effect with {options.action}", hint="leave it out")


def prune(options: argparse.Namespace) -> int:
    """Remove all but the newest runs. The exit code is 1 when one could not be removed."""
    _check_alone(options)
    removed, stay, failed = folder.prune(runs_of(options), options.keep)
    for path in removed:
        print(f"removed   {path}")
    for path, why in stay.items():
        print(f"kept      {path}: {why}")
    for path, why in failed.items():
        print(f"kept      {path}: it cannot be removed, {why}")
    if not removed and not stay and not failed:
        print("nothing to remove")
    return 1 if failed else 0
