"""The verbs that look at runs: their options and examples. Imports nothing of weight."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ddlf.cli.parsing import Parser, number, verb

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verbs."""
    runs = verb(
        verbs,
        "runs",
        "runs:show",
        "list runs, compare them, remove old ones",
        "List runs, newest first.",
        "ddlf runs",
        "ddlf runs compare last 20261122-11       # names by their beginning",
        "ddlf runs prune --keep 20",
    )
    _add_out(runs)
    runs.add_argument("--last", type=number("last", 1), metavar="N", help="how many (default: 20)")
    runs.add_argument("--all", action="store_true", help="all of them")
    runs.add_argument("--json", action="store_true", help="print JSON")
    actions = runs.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    compare = verb(
        actions,
        "compare",
        "runs:compare",
        "runs side by side",
        "Show what runs came to, side by side, and the settings in which they differ.",
        "ddlf runs compare last 20261122-11",
        "ddlf runs compare A B C --latex > table.tex",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="the beginning of a run's name, or last")
    _add_out(compare, default=argparse.SUPPRESS)
    _add_forms(compare)
    prune = verb(
        actions,
        "prune",
        "runs:prune",
        "remove old ones",
        "Remove the folders of all runs but the newest, and but those that go on.",
        "ddlf runs prune --keep 20",
    )
    prune.add_argument("--keep", type=number("keep", 0), required=True, metavar="N", help="how many stay")
    _add_out(prune, default=argparse.SUPPRESS)

    logs = verb(
        verbs,
        "logs",
        "logs:show",
        "what workers wrote in a run",
        "Print what user code wrote on the workers in a run, in the order of time.",
        "ddlf logs                         # of the last run",
        "ddlf logs -f                      # and what comes until it is over",
        "ddlf logs 20261122-1145 --worker pc02 -n 100",
    )
    logs.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="the beginning of a run's name (default: last)"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    logs.add_argument(
        "-n", "--last", type=number("last", 1), metavar="N", help="only the last N lines of those there are"
    )
    logs.add_argument("--worker", metavar="NAME", help="only this worker's")
    _add_out(logs)

    report = verb(
        verbs,
        "report",
        "report:make",
        "what a run came to, as a page and a table",
        "Write the report of a run anew, say where it is, and print the table of the run.",
        "ddlf report                       # of the last run",
        "ddlf report 20261122-1145 --open",
        "ddlf report --latex > table.tex",
    )
    report.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="the beginning of a run's name (default: last)"
    )
    _add_out(report)
    _add_forms(report)
    report.add_argument("--workers", action="store_true", help="the table of the workers")
    report.add_argument("--open", action="store_true", help="show it in the browser")


def _add_out(parser: Parser, **more: Any) -> None:
    parser.add_argument("--out", metavar="DIR", help="where the runs are (default: $DDLF_RUN_DIR, ./runs)", **more)


def _add_forms(parser: Parser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--csv", action="store_true", help="print CSV")
    one.add_argument("--latex", action="store_true", help="print LaTeX")
