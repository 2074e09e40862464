"""Defines the options of ``ddlf plan``, and runs it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_app_options, add_json
from ddlf.cli.parsing import Command, Parser
from ddlf.errors import AppError, ConfigError
from ddlf.training.registry import option

if TYPE_CHECKING:
    from ddlf.extras.planner.choice import Choice
    from ddlf.extras.planner.planning import Plan

MOST_ROWS = 6
"""Predictions in the table beside the best and the present one."""


def seconds(text: str) -> float:
    """Read a duration: ``90``, ``90s``, ``2m`` or ``1h``.

    Raises:
        ArgumentTypeError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a duration such as 30s or 2m, got {text!r}")
    return float(found[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]


def plan(options: argparse.Namespace) -> int:
    """Run ``ddlf plan``: print the predictions, and return the exit code."""
    from ddlf.cli.run import execute
    from ddlf.cli.target import find_target

    if options.app is None:
        raise ConfigError("ddlf plan needs an app", hint="name its file: ddlf plan app.py")
    options.ui = options.ui or "none"
    return execute(lambda: find_target(options.app, options.target, options), options, then=_plan)


async def _plan(target: Any, options: argparse.Namespace, stop: object) -> int:
    from ddlf.app import IApp
    from ddlf.cli.run import resolve_cluster
    from ddlf.cli.target import prepare_app
    from ddlf.extras.planner.planning import plan as planned

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is not an app, so it cannot be planned", hint="name a subclass of ddlf.IApp")
    cluster, described = resolve_cluster(options)
    app = prepare_app(target, cluster, options)
    out = sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        print(f"probe     {text}", file=out, flush=True)

    try:
        print(f"cluster   {described}", file=out, flush=True)
        await app.connect()
        found = await planned(app, budget_s=options.budget, batches=options.batches or (), say=say, again=options.again)
    finally:
        await app.close()
    print(json.dumps(found.to_data(), indent=2) if options.json else "\n".join(lines(found, options.app)))
    return 0


def lines(plan: Plan, file: Path) -> list[str]:
    """Return the plan as lines to print."""
    rows = [("", "slots", "way", "batch", "codec", "s/epoch", "of fit", "(80 %)")]
    shown = [("best", plan.best), ("now", plan.now)]
    shown += [("", one) for one in plan.all if one not in (plan.best, plan.now)][:MOST_ROWS]
    for label, one in shown:
        setting = one.setting
        rows.append(
            (
                label,
                str(setting.slots),
                str(setting.way),
                str(setting.batch),
                setting.way.codec,
                number(one.epoch.seconds),
                f"{one.factor:.2f}x",
                f"({one.low:.2f}-{one.high:.2f})" + ("" if one.epoch.within else " not measured"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        f"{row[0]:<10}{row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]:<{widths[4]}}"
        f"  {row[5]:>{widths[5]}}  {row[6]:>{widths[6]}}  {row[7]}".rstrip()
        for row in rows
    ]
    return [
        f"measured  {len(plan.measured)} settings in {plan.spent_s:.0f} s: a step takes {number(plan.step_s * 1e3)} ms, "
        f"an exchange {number(plan.exchange_s * 1e3)} ms; fit on one machine takes {number(plan.fit.seconds)} s an epoch",
        *table,
        f"{plan.best.verdict}: {sentence(plan)}",
        f"run       {command(plan.best, file)}",
    ]


def sentence(plan: Plan) -> str:
    """Return why the verdict is so."""
    best = plan.best
    slots = f"{best.setting.slots} slot{'s' * (best.setting.slots != 1)}"
    times = f"{best.factor:.2f} times as fast as fit on one machine ({best.low:.2f} to {best.high:.2f})"
    match best.verdict:
        case "pays off":
            return f"{slots} are {times}."
        case "no gain":
            return f"no setting is faster than fit on one machine by 5 %; the best, {slots}, is {times}."
        case _:
            return f"{slots} may be {times}: measure longer (--budget 2m), or on idle machines."


def command(choice: Choice, file: Path) -> str:
    """Return the command that trains so."""
    setting, way = choice.setting, choice.setting.way
    words = [f"ddlf run {file}", f"{option('slots')} {setting.slots}", f"{option('batch_size')} {setting.batch}"]
    words += [f"--mode {way.mode}"] * (way.mode != "sync") + [f"--exchange {way.exchange}"] * (way.exchange != "star")
    words += [f"--codec {way.codec}"] * (way.codec != "float32")
    return " ".join(words)


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def sizes(text: str) -> list[int]:
    """Read batch sizes: ``64,128``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"must be batch sizes such as 64,128, got {text!r}")
    return [int(word) for word in words]


def _options(parser: Parser) -> None:
    parser.add(
        *("--budget",),
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="time for all measurements, such as 30s or 2m (default: 60s)",
    )
    parser.add("--batches", type=sizes, metavar="N,N", help="further batch sizes to compare")
    parser.add("--again", action="store_true", help="measure again, even if there are kept measurements")
    add_app_options(parser)
    add_json(parser)


PLAN = Command(
    description="Measure short rounds of an app on its workers, and predict how long an epoch takes with other numbers "
    "of slots, codecs and modes, with an interval. Callbacks do not run. The measurements are kept for later commands.",
    examples=(
        "ddlf plan app.py -c cluster.yaml",
        "ddlf plan app.py --local 2 --budget 30s",
        "ddlf plan app.py --hosts 10.0.0.11:9000,10.0.0.12:9000 --batches 128,256",
    ),
    options=_options,
    run=plan,
)
