"""``ddlf runs``, ``ddlf logs`` and ``ddlf report``: list, compare and remove runs, and show logs and reports.

They work on files only, also while a run continues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddlf.cli.parsing import Command, Parser, action, number
from ddlf.errors import ConfigError
from ddlf.events.facts import to_data
from ddlf.monitor.runs import folder, report, run_reader, table
from ddlf.monitor.runs.background import reason
from ddlf.monitor.runs.logs import Line, Reader
from ddlf.monitor.runs.run_reader import read
from ddlf.monitor.terminal.echo import harmless

DEFAULT_LAST = 20


def runs_folder(options: argparse.Namespace) -> Path:
    """Return the folder whose runs a command lists or changes: ``--out``, or the default."""
    return Path(options.out or folder.usual_out())


def add_out(parser: Parser) -> None:
    """Add the option that names the parent folder of the runs."""
    parser.add("--out", metavar="DIR", help="parent folder of the runs (default: $DDLF_RUN_DIR, ./runs)")


def add_run(parser: Parser) -> None:
    """Add the argument that names a run."""
    parser.add("run", nargs="?", default="last", metavar="[RUN]", help="the beginning of a run's name (default: last)")


def add_formats(parser: Parser) -> None:
    """Add the options for the format of a table."""
    exclusive = parser.add_mutually_exclusive_group()
    parser.add("--csv", action="store_true", help="print CSV", within=exclusive)
    parser.add("--latex", action="store_true", help="print LaTeX", within=exclusive)


def _options(parser: Parser) -> None:
    add_out(parser)
    parser.add("--last", type=number(1), metavar="N", help=f"number of runs to list (default: {DEFAULT_LAST})")
    parser.add("--all", action="store_true", help="list all runs")
    parser.add("--json", action="store_true", help="print JSON")


def _compare_options(parser: Parser) -> None:
    parser.add("runs", nargs="+", metavar="RUN...", help="the beginning of each run's name, or last")
    add_out(parser)
    add_formats(parser)


def _prune_options(parser: Parser) -> None:
    parser.add("--keep", type=number(0), required=True, metavar="N", help="number of runs to keep")
    add_out(parser)


def show(options: argparse.Namespace) -> int:
    """Run ``ddlf runs``: list the runs in a folder, newest first."""
    if options.all and options.last is not None:
        raise ConfigError("--last has no effect with --all", hint="leave one of them out")
    out = runs_folder(options)
    paths = folder.runs_in(out)
    rows = [_row(path) for path in (paths if options.all else paths[: options.last or DEFAULT_LAST])]
    if options.json:
        print(json.dumps(to_data(rows)))
        return 0
    if not rows:
        print(f"no runs in {str(out)!r} yet; ddlf run creates them")
        return 0
    restarts = ["restarts"] * any(row["restarts"] for row in rows)
    head = ["run", "state", *restarts, "began", "time", "rounds", "loss", "accuracy", "test"]
    print(table.as_text([head, *([_cell(row[name]) for name in head] for row in rows)]))
    if older := len(paths) - len(rows):
        print(f"{older} older runs; --all shows them")
    return 0


def _cell(value: Any) -> str:
    return "" if value is None else table.number(value) if isinstance(value, float) else str(value)


def _row(path: Path) -> dict[str, Any]:
    state, (last, ended) = folder.read_state(path), run_reader.end_of(path / folder.EVENTS)
    results = folder.read_json(path / folder.SUMMARY).get("results", {})
    record = last.get("record", {})
    metrics, test = record.get("metrics", {}), results.get("test") or record.get("test", {})
    now = time.time() if state.state == "running" else (state.ended or ended or state.began)
    counter = "round" if record.get("slot") is None else "version"
    return {
        "run": path.name,
        "state": state.state,
        "why": state.why,
        "restarts": state.restarts,
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began)),
        "seconds": round(now - state.began, 3),
        "time": report.duration(max(now - state.began, 0.0)),
        "rounds": f"{record[counter]}/{record['rounds']}" if counter == "round" and record else record.get(counter),
        "loss": _number(metrics.get("loss")),
        "accuracy": _number(next((value for name, value in metrics.items() if "acc" in name), None)),
        "test": _number(next((value for name, value in test.items() if "acc" in name), test.get("loss"))),
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare(options: argparse.Namespace) -> int:
    """Run ``ddlf runs compare``: show the results of runs side by side, and the settings in which they differ."""
    out = runs_folder(options)
    paths = [folder.find(out, name) for name in options.runs]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{' and '.join(options.runs)} name the same run", hint="list the runs with: ddlf runs")
    pasts = [run_reader.read(path) for path in paths]
    if not _print_table(table.run_rows(pasts), options):
        return 0
    if differing := _differing(pasts):
        print()
        print(table.as_text([["setting", *(run.path.name for run in pasts)], *differing]))
    else:
        print("\nno setting differs")
    return 0


def _print_table(rows: list[list[str]], options: argparse.Namespace) -> bool:
    """Print a table in the requested format. Return whether it is text, so that more text may follow."""
    if options.csv or options.latex:
        print(table.as_csv(rows) if options.csv else table.as_latex(rows), end="")
        return False
    print(table.as_text(rows))
    return True


def _differing(pasts: list[run_reader.Past]) -> list[list[str]]:
    names = dict.fromkeys(name for run in pasts for name in run.summary.get("settings", {}))
    rows = [[name, *(str(run.setting(name)) for run in pasts)] for name in names if name not in ("out", "run_name")]
    return [row for row in rows if len(set(row[1:])) > 1]


def prune(options: argparse.Namespace) -> int:
    """Run ``ddlf runs prune``: remove the folders of all runs except the newest ones. The exit code is 1 if one could
    not be removed.
    """
    removed, stay, failed = folder.prune(runs_folder(options), options.keep)
    for path in removed:
        print(f"removed   {path}")
    for path, cause in stay.items():
        print(f"kept      {path}: {cause}")
    for path, cause in failed.items():
        print(f"kept      {path}: it cannot be removed, {cause}")
    if not removed and not stay and not failed:
        print("nothing to remove")
    return 1 if failed else 0


RUNS = Command(
    description="List runs, newest first.",
    examples=(
        "ddlf runs",
        "ddlf runs compare last 20261122-11       # the beginning of a name is enough",
        "ddlf runs prune --keep 20",
    ),
    options=_options,
    run=show,
    actions={
        "compare": action(
            "show runs side by side",
            "Show the results of runs side by side, and the settings in which they differ.",
            _compare_options,
            compare,
            *("ddlf runs compare last 20261122-11", "ddlf runs compare A B C --latex > table.tex"),
        ),
        "prune": action(
            "remove old runs",
            "Remove the folders of all runs except the newest ones and the running ones.",
            _prune_options,
            prune,
            "ddlf runs prune --keep 20",
        ),
    },
)


POLL_S = 0.3
"""Seconds between two looks for new lines."""


def _logs_options(parser: Parser) -> None:
    add_run(parser)
    parser.add("-f", "--follow", action="store_true", help="keep printing until the run is over")
    parser.add("-n", "--last", type=number(1), metavar="N", help="print only the last N of the existing lines")
    parser.add("--worker", metavar="NAME", help="print only the lines of one worker")
    parser.add("--all", action="store_true", help="also what native code, other programs and the workers wrote")
    add_out(parser)


def show_logs(options: argparse.Namespace) -> int:
    """Run ``ddlf logs``: print the lines that user code has written on all workers or on one, with ``--follow`` until
    the run is over.
    """
    path = folder.find(runs_folder(options), options.run)
    reader = Reader(path, options.worker, everything=options.all)
    lines: Iterable[Line] = reader.new()
    printed = _print(lines if options.last is None else deque(lines, options.last))
    while options.follow:
        is_over = folder.read_state(path).state != "running"  # first, so that the lines before the end are read below
        printed += _print(reader.new())
        if is_over:
            break
        time.sleep(POLL_S)
    if not printed:
        advice = f"there are lines of {', '.join(reader.writers)}" if reader.writers else f"see {path / folder.LOGS}"
        print(f"{options.worker or 'the workers'} printed nothing in {path.name}; {advice}", file=sys.stderr)
    return 0


def _print(lines: Iterable[Line]) -> int:
    count, colours = 0, sys.stdout.isatty()
    for when, worker, text in lines:
        print(f"{when[11:19]} [{worker}] {harmless(text, colours=colours)}")
        count += 1
    sys.stdout.flush()
    return count


LOGS = Command(
    description="Print what user code printed on the workers in a run, ordered by time.",
    examples=(
        "ddlf logs                         # of the last run",
        "ddlf logs -f                      # keep printing until the run is over",
        "ddlf logs 20261122-1145 --worker pc02 -n 100",
        "ddlf logs --all                   # also what TensorFlow and the workers themselves wrote",
    ),
    options=_logs_options,
    run=show_logs,
)


def _report_options(parser: Parser) -> None:
    add_run(parser)
    add_out(parser)
    add_formats(parser)
    parser.add("--json", action="store_true", help="print all facts and tables of the report as JSON")
    parser.add("--workers", action="store_true", help="print the table of the workers")
    parser.add("--places", action="store_true", help="print the host and job of each worker, and when and why it left")
    parser.add("--open", action="store_true", help="open the report in the browser")


def make_report(options: argparse.Namespace) -> int:
    """Run ``ddlf report``: write the HTML report of a run again, and print its path and a table of the run."""
    tables = [name for name in ("json", "workers", "places") if getattr(options, name)]
    if len(tables) > 1 or (options.json and (options.csv or options.latex)):
        tables = [*tables, *(name for name in ("csv", "latex") if getattr(options, name))]
        raise ConfigError(f"--{tables[0]} and --{tables[1]} exclude each other", hint="leave one of them out")
    path = folder.find(runs_folder(options), options.run)
    failed = None
    try:
        past = report.write(path)
    except OSError as error:  # another user's run, or a full disk: the tables can be printed anyway
        past, failed = read(path), reason(error)
    if options.json:
        print(json.dumps(report.record_of(past)))
    elif _print_table(_asked_table(past, options), options) and failed is None:
        print(f"report    {path / folder.REPORT}")
    if failed is not None:
        older = "; the existing one is older" if (path / folder.REPORT).exists() else ""
        print(f"the report cannot be written: {failed}{older}", file=sys.stderr)
    if options.open and (path / folder.REPORT).exists():
        import webbrowser

        webbrowser.open((path / folder.REPORT).resolve().as_uri())
    return 0 if failed is None or options.csv or options.latex or options.json else 1


def _asked_table(run: run_reader.Past, options: argparse.Namespace) -> table.Rows:
    if options.places:
        return table.stay_rows(run)
    return table.worker_rows(run) if options.workers else table.run_rows([run])


REPORT = Command(
    description="Write the report of a run again, print where it is, and print the table of the run.",
    examples=(
        "ddlf report                       # of the last run",
        "ddlf report 20261122-1145 --open",
        "ddlf report --latex > table.tex",
        "ddlf report --places              # the host and job of each worker, and why it left",
    ),
    options=_report_options,
    run=make_report,
)
