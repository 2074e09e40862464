"""Defines the options of ``ddlf plan``, and runs it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_app_options, add_json
from ddlf.cli.parsing import Command, Parser
from ddlf.errors import AppError, ConfigError
from ddlf.events import RoundsPredicted
from ddlf.events.facts import to_data
from ddlf.events.record import size
from ddlf.events.sinks import from_json
from ddlf.settings.checks import count_of_bytes

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.extras.planner.choice import Goal, Wish
    from ddlf.extras.planner.explain import Explained
    from ddlf.extras.planner.model import Link
    from ddlf.extras.planner.planning import Plan

OF_PREDICTIONS = ("budget", "batches", "again", "goal", "deadline", "max_memory", "bandwidth", "latency")
"""Options without effect on ``--check``."""
SKIPPED = tuple(f'"event":"{name}"' for name in ("SlotStarted", "SlotFinished", "PhaseBegan", "WorkerWrote"))
"""Texts in lines of a run's events that explain nothing."""
LEFT = (2, 4)
"""Columns of words in the table; the others are numbers."""
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


BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BYTES = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}


def bandwidth(text: str) -> float:
    """Read a bandwidth, ``100mbit``, ``1gbit`` or ``12MB/s``, and return bytes per second.

    Raises:
        ArgumentTypeError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/]+)", text.strip().lower())
    unit = found[2] if found is not None else ""
    per_second = BITS.get(unit.removesuffix("/s"), 0.0) / 8 or BYTES.get(unit, 0.0)
    if found is None or not per_second or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a bandwidth such as 100mbit, 1gbit or 12MB/s, got {text!r}")
    return float(found[1]) * per_second


def latency(text: str) -> float:
    """Read a latency, ``5ms``, ``200us`` or ``1s``, and return seconds.

    Raises:
        ArgumentTypeError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a latency such as 5ms or 200us, got {text!r}")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def memory(text: str) -> int:
    """Read a number of bytes: ``4GB``, ``512MiB``.

    Raises:
        ArgumentTypeError: It is none.
    """
    found = None
    with contextlib.suppress(ConfigError):
        found = count_of_bytes("--max-memory", text)
    if found is None or text.strip()[-1:].isdigit():  # 4 bytes are a mistake
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 4GB, got {text!r}")
    return found


def plan(options: argparse.Namespace) -> int:
    """Run ``ddlf plan``: print the predictions, and return the exit code."""
    from ddlf.cli.options import check_short
    from ddlf.cli.run import execute
    from ddlf.cli.target import find_target

    if options.check is not None:
        return check(options)
    check_short(options, "ddlf plan, which only measures")
    options.ui = "none"
    return execute(lambda: find_target(options.app, options.target, options), options, then=_plan)


def check(options: argparse.Namespace) -> int:
    """Run ``ddlf plan --check RUN``: explain the rounds of a run, and return the exit code."""
    found = explained(options)
    print(json.dumps(to_data(found), indent=2) if options.json else "\n".join(found.lines))
    return 0


def explained(options: argparse.Namespace) -> Explained:
    """Explain the rounds of the run that the options name.

    Raises:
        ConfigError: There is no such run, it was not predicted or was too short, or an option has no effect.
    """
    from ddlf.cli.options import OF_A_CLUSTER, OF_AN_APP, given, have
    from ddlf.cli.runs import runs_folder
    from ddlf.extras.planner.explain import explain
    from ddlf.monitor.runs import folder, past

    others = (*OF_A_CLUSTER, *(name for name in OF_AN_APP if name != "out"), *OF_PREDICTIONS, "target", "dry_run", "ui")
    if unused := [
        *([str(options.app)] * bool(options.app)),
        *given(options, others),
        *["-p"] * bool(options.parameters),
    ]:
        raise ConfigError(
            f"{', '.join(unused)} {have(unused)} no effect with --check, which reads a run",
            hint=f"leave {'it' if len(unused) == 1 else 'them'} out",
        )
    path = folder.find(runs_folder(options), options.check)
    events = []
    for data in past.lines(path / folder.EVENTS, SKIPPED):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # written by another version
            events.append((float(data["time"]), from_json(data)))
    found = explain(events, evaluates_there=_setting(path, "evaluate_on") == "workers")
    if found is not None:
        return found
    if any(isinstance(event, RoundsPredicted) for _, event in events):
        raise ConfigError(
            f"{path.name} has too few rounds to compare: the first two of each slot and shorter last rounds of epochs do "
            "not count"
        )
    raise ConfigError(
        f"the rounds of {path.name} were not predicted",
        hint="plan first, for the same workers: ddlf plan APP; later runs of the app are compared",
    )


def _setting(path: Path, name: str) -> Any:
    """Return the value of a setting of a run; None if it is unknown."""
    from ddlf.monitor.runs import folder

    return folder.read_json(path / folder.SUMMARY).get("settings", {}).get(name, {}).get("value")


async def _plan(target: Any, options: argparse.Namespace, stop: object) -> int:
    from ddlf.app import IApp
    from ddlf.cli.run import resolve_cluster
    from ddlf.cli.target import prepare_app
    from ddlf.extras.planner.planning import BUDGET_S
    from ddlf.extras.planner.planning import plan as planned

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is not an app, so it cannot be planned", hint="name a subclass of ddlf.IApp")
    cluster, described = resolve_cluster(options)
    app = prepare_app(target, cluster, options)
    out = sys.stderr if options.json else sys.stdout

    def note(text: str) -> None:
        if not options.quiet:
            print(text, file=out, flush=True)

    try:
        note(f"cluster   {described}")
        await app.connect()
        found = await planned(
            app,
            budget_s=options.budget or BUDGET_S,
            batches=options.batches or (),
            say=lambda text: note(f"probe     {text}"),
            again=options.again,
            wish=_wish(app, options),
            link=_link(options),
        )
    finally:
        await app.close()
    print(json.dumps(found.to_data(), indent=2) if options.json else "\n".join(lines(found, command(found, options))))
    return 0


def _wish(app: IApp, options: argparse.Namespace) -> Wish:
    """Return what the best choice is. With a deadline, it is the cheapest one that meets it, unless the user says more."""
    from ddlf.extras.planner.choice import Wish

    goal: Goal = options.goal or ("time" if options.deadline is None else "cost")
    return Wish(goal=goal, epochs=app.master_epochs, deadline_s=options.deadline, max_memory=options.max_memory)


def _link(options: argparse.Namespace) -> Link | None:
    from ddlf.extras.planner.model import Link

    if options.bandwidth is None and options.latency is None:
        return None
    return Link(bandwidth=options.bandwidth, latency=options.latency or 0.0)


def lines(plan: Plan, run: str) -> list[str]:
    """Return the plan as lines to print.

    Args:
        plan: The plan.
        run: The command that trains as the best choice does.
    """
    from ddlf.extras.planner.planned import factor

    head = ["", "slots", "way", "batch", "codec", "s/epoch", "s/update"]
    rows = [[*head, *["memory"] * (plan.memory is not None), "of fit", "(80 %)"]]
    shown = [("best", plan.best), ("now", plan.now)]
    shown += [("", one) for one in plan.all if one not in (plan.best, plan.now)][:MOST_ROWS]
    for label, one in shown:
        setting = one.setting
        rows.append(
            [
                label,
                str(setting.slots),
                setting.how,
                str(setting.batch),
                setting.way.codec,
                number(one.epoch.seconds),
                number(one.update_s),
                *([] if one.memory is None else [size(round(one.memory.count))]),
                f"{factor(one.factor)}x",
                f"({factor(one.low)}-{factor(one.high)})" + ("" if one.epoch.within else " not measured"),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = ["<" if column in LEFT else ">" for column in range(len(widths) - 1)]
    table = [
        f"{row[0]:<10}"
        + "  ".join(f"{cell:{side}{width}}" for cell, side, width in list(zip(row, sides, widths, strict=False))[1:])
        + f"  {row[-1]}"
        for row in rows
    ]
    return [
        f"measured  {len(plan.measured)} settings in {plan.spent_s:.0f} s: a step takes {number(plan.step_s * 1e3)} ms, "
        f"an exchange {number(plan.exchange_s * 1e3)} ms; fit on one machine takes {number(plan.fit.seconds)} s an epoch",
        *unequal(plan),
        *assumed(plan),
        *table,
        *remembered(plan),
        *wished(plan),
        f"{plan.verdict}: {sentence(plan)}",
        f"run       {run}",
    ]


def unequal(plan: Plan) -> list[str]:
    """Return a line about the slowest worker; none if all are about equally fast."""
    if not plan.model.slowness:
        return []
    number_of_slowest, slowness = max(plan.model.slowness.items(), key=lambda one: one[1])
    host = plan.hosts.get(number_of_slowest, "")
    found = [f"slowest   worker {number_of_slowest}{f' on {host}' * bool(host)} ({1 / slowness:.2g}x)"]
    if (other := plan.in_other_order) is not None:
        found[0] += (
            f": if the cluster lists it last, {other.setting.slots} slot{'s' * (other.setting.slots != 1)} take "
            f"{number(other.epoch.seconds)} s an epoch"
        )
    return found


def assumed(plan: Plan) -> list[str]:
    """Return a line about the assumed link; none without one."""
    if (link := plan.model.link) is None:
        return []
    said = [f"{number(link.bandwidth * 8 / 1e6)} Mbit/s"] if link.bandwidth else []
    said += [f"{number(link.latency * 1e3)} ms more each way"] * bool(link.latency)
    return [f"assumed   {' and '.join(said)} at the master: this link was not measured"]


def remembered(plan: Plan) -> list[str]:
    """Return lines about memory; none if it was not measured."""
    if plan.memory is None:
        return []
    peaks, best = plan.memory.peaks, plan.best.memory
    assert best is not None
    parts = ", ".join(f"{name} {size(round(count))}" for name, count in plan.memory.parts.items() if count)
    master = f"; the master {size(peaks.master)}" if peaks.master else ""
    found = [
        f"memory    a worker needs {size(round(best.count))} ({size(round(best.low))} to {size(round(best.high))}): {parts},"
        f" and {size(round(plan.memory.sample))} for a sample of the batch{master}"
    ]
    if (limit := plan.wish.max_memory) is not None:
        fits = "fits into" if plan.wish.fits(plan.best) else "may not fit into"
        none = "" if plan.wish.fits(plan.best) else ", and no choice surely does"
        found.append(f"limit     batch {plan.best.setting.batch} {fits} {size(limit)}{none}")
    if (largest := plan.largest) is not None:
        where = f"into {size(largest.limit)} of worker {peaks.worker}"
        more = f"; not {', '.join(map(str, largest.failed))}" if largest.failed else ""
        how = "a process there trained with it" if largest.confirmed else "no time was left to confirm it"
        found.append(
            f"largest   batch {largest.batch:,} fits {where}: {how}{more}"
            if largest.batch
            else f"largest   no batch was found that fits {where}{more}"
        )
    return found


def wished(plan: Plan) -> list[str]:
    """Return lines about the cost and the deadline; none if nobody asked for them."""
    wish, best = plan.wish, plan.best
    found = []
    if wish.goal == "cost":
        found.append(
            f"cost      {number(best.cost)} worker-seconds an epoch; fit on one machine needs {number(plan.fit.seconds)}"
        )
    if wish.deadline_s is not None:
        whole = best.epoch.times(wish.epochs)
        what = f"{wish.epochs} epoch{'s' * (wish.epochs != 1)} take {number(whole.seconds)} s ({number(whole.low)}-{number(whole.high)})"
        which = "in time" if wish.meets(best) else "not surely in time, and no choice is"
        which = "not surely in time" if wish.goal == "time" and not wish.meets(best) else which
        found.append(f"deadline  {what} of {number(wish.deadline_s)} s: {which}")
    return found


def sentence(plan: Plan) -> str:
    """Return why the verdict is so."""
    from ddlf.extras.planner.planned import times

    best, one = plan.best, plan.best.setting.slots == 1
    slots, are = ("1 slot", "is") if one else (f"{best.setting.slots} slots", "are")
    fast = times(best)
    match plan.verdict:
        case "no gain" if plan.wish.goal == "cost":
            return f"{slots} {are} {fast}; several cost more worker-seconds." if one else f"{slots} {are} {fast}."
        case "pays off":
            return f"{slots} {are} {fast}."
        case "no gain":
            return f"no setting is faster than fit on one machine by 5 %; the best, {slots}, is {fast}."
        case _:
            return f"{slots} may be {fast}: measure longer (--again --budget 2m), or on idle machines."


def command(plan: Plan, options: argparse.Namespace) -> str:
    """Return the command that trains as the best choice does, with the options of this call that change a run.

    It names a usual value if this call or the app has another one.
    """
    from ddlf.cli.words import command_line, given_names
    from ddlf.extras.planner.planned import USUAL, settings_of

    found, own = settings_of(plan.best), settings_of(plan.now)
    named = {name for name, value in found.items() if not value == USUAL.get(name) == own.get(name, value)}
    named |= given_names(options, [*found])
    chosen = {"slots": found.pop("slots"), "batch_size": plan.best.setting.batch, **found}
    kept = {name: value for name, value in chosen.items() if name in named or name not in USUAL}
    return command_line("ddlf run", options.app, options, kept)


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
        metavar="TIME",
        help="time for all measurements, such as 30s or 2m (default: 60s)",
    )
    parser.add("--batches", type=sizes, metavar="N,N", help="further batch sizes to compare")
    parser.add("--again", action="store_true", help="measure again, even if there are kept measurements")
    parser.add(
        *("--goal",),
        choices=("time", "cost", "memory"),
        help="the best choice: the fastest, the one with the fewest worker-seconds (cost), or the one whose workers need "
        "the least memory (default: time)",
    )
    parser.add(
        *("--deadline",),
        type=seconds,
        metavar="TIME",
        help="the whole training must end within this time, such as 2h: choose the cheapest that does",
    )
    parser.add(
        *("--max-memory",),
        type=memory,
        metavar="SIZE",
        help="a worker may need so much memory, such as 4GB: choose only such settings, and find the largest batch",
    )
    parser.add("--bandwidth", type=bandwidth, metavar="RATE", help="assume such a link of the master: 100mbit, 1gbit")
    parser.add("--latency", type=latency, metavar="TIME", help="assume so much more time for a message, each way: 5ms")
    parser.add("--check", metavar="RUN", help="explain why the rounds of a run took longer than predicted")
    add_app_options(parser)
    add_json(parser)


PLAN = Command(
    description="Measure short rounds of an app on its workers, and predict how long an epoch takes with other numbers "
    "of slots, codecs and modes, with an interval. Callbacks do not run. The measurements are kept for later commands.",
    examples=(
        "ddlf plan app.py -c cluster.yaml",
        "ddlf plan app.py --local 2 --budget 30s",
        "ddlf plan app.py --hosts 10.0.0.11:9000,10.0.0.12:9000 --batches 128,256",
        "ddlf plan app.py -c cluster.yaml --bandwidth 100mbit --latency 5ms",
        "ddlf plan app.py -c cluster.yaml --max-memory 4GB",
        "ddlf plan --check last             # why a run took longer",
    ),
    options=_options,
    run=plan,
)
