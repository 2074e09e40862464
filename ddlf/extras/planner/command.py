"""Defines the options of ``ddlf plan``, and runs it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_app_options, add_json
from ddlf.cli.parsing import Command, Parser
from ddlf.errors import AppError, ConfigError
from ddlf.events import RoundsPredicted
from ddlf.events.facts import to_data
from ddlf.events.sinks import from_json
from ddlf.extras.planner.units import bandwidth, duration, latency, memory, seconds

if TYPE_CHECKING:
    from ddlf.extras.planner.choice import Goal, Wish
    from ddlf.extras.planner.explain import Explained
    from ddlf.extras.planner.model import Link
    from ddlf.extras.planner.result import Plan

OF_PREDICTIONS = ("budget", "batches", "again", "goal", "deadline", "max_memory", "bandwidth", "latency")
"""Options without effect on ``--check``."""
SKIPPED = tuple(f'"event":"{name}"' for name in ("SlotStarted", "SlotFinished", "PhaseBegan", "WorkerWrote"))
"""Texts in lines of a run's events that explain nothing."""


def plan(options: argparse.Namespace) -> int:
    """Run ``ddlf plan``: print the predictions, and return the exit code."""
    from ddlf.cli.options import check_short
    from ddlf.cli.run import check_before_import, execute
    from ddlf.cli.target import find_target

    def find() -> Any:
        check_before_import(options)
        return find_target(options.app, options.target, options)

    if options.check is not None:
        return check(options)
    check_short(options, "ddlf plan, which only measures")
    options.ui = "none"
    return execute(find, options, then=_plan)


def check(options: argparse.Namespace) -> int:
    """Run ``ddlf plan --check RUN``: explain the rounds of a run, and return the exit code."""
    explanation = explained(options)
    print(json.dumps(to_data(explanation), indent=2) if options.json else "\n".join(explanation.lines))
    return 0


def explained(options: argparse.Namespace) -> Explained:
    """Explain the rounds of the run that the options name.

    Raises:
        ConfigError: There is no such run, it was not predicted or was too short, or an option has no effect.
    """
    from ddlf.cli.options import OF_A_CLUSTER, OF_AN_APP, given_options, has_or_have
    from ddlf.cli.runs import runs_folder
    from ddlf.extras.planner.explain import explain
    from ddlf.monitor.runs import folder, run_reader

    useless = (
        *OF_A_CLUSTER,
        *(name for name in OF_AN_APP if name != "out"),
        *OF_PREDICTIONS,
        "target",
        "dry_run",
        "ui",
    )
    if unused := [
        *([str(options.app)] * bool(options.app)),
        *given_options(options, useless),
        *["-p"] * bool(options.parameters),
    ]:
        raise ConfigError(
            f"{', '.join(unused)} {has_or_have(unused)} no effect with --check, which reads a run",
            hint=f"leave {'it' if len(unused) == 1 else 'them'} out",
        )
    path = folder.find(runs_folder(options), options.check)
    events = []
    for data in run_reader.lines(path / folder.EVENTS, SKIPPED):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # written by another version
            events.append((float(data["time"]), from_json(data)))
    explanation = explain(events, evaluates_there=_setting(path, "evaluate_on") == "workers")
    if explanation is not None:
        return explanation
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
    from ddlf.cli.results import columns, on_terminal
    from ddlf.cli.run import resolve_cluster
    from ddlf.cli.target import prepare_app
    from ddlf.events.record import fitted
    from ddlf.extras.planner.planning import plan as planned
    from ddlf.extras.planner.result import lines

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is not an app, so it cannot be planned", hint="name a subclass of ddlf.IApp")
    cluster, described = resolve_cluster(options)
    app = prepare_app(target, cluster, options)
    out = sys.stderr if options.json else sys.stdout

    def note(text: str) -> None:
        if not options.quiet:
            print(fitted(text), file=out, flush=True)

    try:
        note(f"cluster   {described}")
        await app.connect()
        plan = await planned(
            app,
            budget_s=options.budget,
            batches=options.batches or (),
            say=lambda text: note(f"probe     {text}"),
            again=options.again,
            wish=_wish(options),
            link=_link(options),
        )
    finally:
        await app.close()
    text = lines(plan, run_command(plan, options), longer_command(options), columns())
    print(json.dumps(plan.to_data(), indent=2) if options.json else on_terminal(text))
    return 1 if plan.is_beyond else 0


def _wish(options: argparse.Namespace) -> Wish:
    """Return what the best choice is. With a deadline, it is the cheapest one that meets it, unless the user says more."""
    from ddlf.extras.planner.choice import Wish

    goal: Goal = options.goal or ("time" if options.deadline is None else "cost")
    return Wish(goal=goal, deadline_s=options.deadline, max_memory=options.max_memory)


def _link(options: argparse.Namespace) -> Link | None:
    from ddlf.extras.planner.model import Link

    if options.bandwidth is None and options.latency is None:
        return None
    return Link(bandwidth=options.bandwidth, latency=options.latency or 0.0)


def run_command(plan: Plan, options: argparse.Namespace) -> str:
    """Return the command that trains as the best choice does, with the options of this call that change a run.

    It names a usual value if this call or the app has another one.
    """
    from ddlf.cli.words import command_line, given_names
    from ddlf.extras.planner.result import USUAL, settings_of

    settings, current = settings_of(plan.best), settings_of(plan.now)
    changed = {name for name, value in settings.items() if not value == USUAL.get(name) == current.get(name, value)}
    changed |= given_names(options, [*settings])
    settings_of_best = {"slots": settings.pop("slots"), "batch_size": plan.best.setting.batch, **settings}
    needed = {name: value for name, value in settings_of_best.items() if name in changed or name not in USUAL}
    return command_line("ddlf run", options.app, options, needed)


def longer_command(options: argparse.Namespace) -> str:
    """Return the command that measures longer, with all options of this call."""
    from ddlf.cli.words import command_line
    from ddlf.extras.planner.planning import BUDGET_S
    from ddlf.settings.checks import exact_size

    values = {
        "--batches": options.batches and ",".join(map(str, options.batches)),
        "--goal": options.goal,
        "--deadline": options.deadline and duration(options.deadline),
        "--max-memory": options.max_memory and exact_size(options.max_memory),
        "--bandwidth": options.bandwidth and f"{options.bandwidth * 8 / 1e6:.9g}mbit",
        "--latency": options.latency and f"{options.latency * 1e3:.9g}ms",
        "--budget": f"{2 * (options.budget or BUDGET_S):g}s",
    }
    words = [f"{name} {value}" for name, value in values.items() if value]
    return " ".join([command_line("ddlf plan", options.app, options), "--again", *words])


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
        help="time for all measurements, such as 30s or 2m (default: 60s, and up to 4m on slow machines)",
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
