"""``ddlf advise``: its options and examples. Imports nothing of weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.options import add_parameters
from ddlf.cli.parsing import number, verb

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verb."""
    advise = verb(
        verbs,
        "advise",
        "ddlf.extras.advice.command:advise",
        "say what is likely to be wrong with an app",
        "Look at an app's data, labels, loss, model and settings for what is known to make training fail, and say what to do about it. "
        "Nothing of the app is changed, and no workers need be there. The exit code is 1 if something is found that is as bad as --fail-on says.",
        "ddlf advise app.py",
        "ddlf advise app.py --quick            # nothing is trained",
        "ddlf advise app.py --diff | patch -p0 # or --fix",
        "ddlf advise model.nnm --data digits",
        "ddlf advise --explain L02",
        "ddlf advise app.py --format sarif --fail-on warning    # for CI",
    )
    advise.add_argument(
        "app", type=Path, nargs="?", help="Python file with a subclass of ddlf.IApp, or the text of a model (.nnm)"
    )
    advise.add_argument("--target", metavar="NAME", help="the class that is meant, when the file has several")
    advise.add_argument("--data", metavar="NAME|FILE", help="what a text is to learn, where it does not say so")
    level = advise.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="look at settings, arrays and the model: train nothing")
    level.add_argument(
        "--cluster",
        action="store_true",
        help="also at what only shows on several machines, and at wrong labels, which takes five trainings",
    )
    advise.add_argument("--workers", type=number("workers", 1), metavar="N", help="how many there will be (default: 2)")
    advise.add_argument(
        "--limit",
        type=number("limit", 1),
        default=600,
        metavar="SECONDS",
        help="how long load_dataset and create_model may take, each (default: %(default)s)",
    )
    advise.add_argument("--explain", metavar="RULE", help="print all about a rule")
    shown = advise.add_mutually_exclusive_group()
    shown.add_argument(
        "--format", choices=("text", "json", "sarif"), default="text", help="%(choices)s", metavar="FORMAT"
    )
    shown.add_argument(
        "--diff", action="store_true", help="print the changes that would mend it, as patch -p0 takes them"
    )
    advise.add_argument("--fix", action="store_true", help="write these changes")
    advise.add_argument(
        "--fail-on",
        choices=("error", "warning", "note", "never"),
        default="error",
        metavar="LEVEL",
        help="what the exit code is 1 for: %(choices)s (default: %(default)s)",
    )
    add_parameters(advise)
    advise.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the whole traceback of an error"
    )
