"""Defines the options of ``ddlf scout``, and runs it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.options import add_app_options, add_json
from ddlf.cli.parsing import Command, Parser
from ddlf.cli.parsing import number as whole
from ddlf.errors import AppError, ConfigError
from ddlf.extras.scout.curve import comparable, curve_lines, number, svg

if TYPE_CHECKING:
    from ddlf.extras.scout.comparisons import Comparison, Variant
    from ddlf.extras.scout.scouting import Scouted


def scout(options: argparse.Namespace) -> int:
    """Run ``ddlf scout``: print the learning rate and its curve, and return the exit code."""
    from ddlf.cli.options import check_short
    from ddlf.cli.run import check_before_import, execute
    from ddlf.cli.target import find_target

    def find() -> Any:
        check_before_import(options)
        return find_target(options.app, options.target, options)

    check_short(options, "ddlf scout, which only tries rates")
    options.ui = "none"
    return execute(find, options, then=_scout)


async def _scout(target: Any, options: argparse.Namespace, stop: object) -> int:
    from ddlf.app import IApp
    from ddlf.cli.results import columns, on_terminal
    from ddlf.cli.run import resolve_cluster
    from ddlf.cli.target import prepare_app
    from ddlf.cli.words import command_line
    from ddlf.events.record import fitted
    from ddlf.extras.scout.halving import grid
    from ddlf.extras.scout.scouting import HIGH, LOW
    from ddlf.extras.scout.scouting import scout as scouted
    from ddlf.extras.scout.write_rate import checked_place, place_of, write_rate

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(f"{target.__name__} is not an app, so it has no rate", hint="name a subclass of ddlf.IApp")
    grid(options.low or LOW, options.high or HIGH)  # what cannot be done is refused before anything starts
    if options.svg:
        _check_picture(options.svg)
    if options.write:
        place_of(options.app, options.app.read_bytes().decode(), target.__name__)
    cluster, described = resolve_cluster(options)
    app = prepare_app(target, cluster, options)
    out = sys.stderr if options.json else sys.stdout

    def check_own(optimizer_rate: float) -> None:
        if options.write:  # before the trials, because they take minutes
            checked_place(options.app, options.app.read_bytes().decode(), target.__name__, optimizer_rate)

    def note(text: str) -> None:
        if not options.quiet:
            print(fitted(text), file=out, flush=True)

    try:
        note(f"cluster   {described}")
        await app.connect()
        outcome = await scouted(
            app,
            low=options.low,
            high=options.high,
            steps=options.steps,
            also=options.also or (),
            say=lambda text: note(f"trials    {text}"),
            check_own=check_own,
        )
    finally:
        await app.close()
    rate = {"learning_rate": f"{outcome.verdict.rate:g}"}
    runs = command_line("ddlf run", options.app, options, parameters=rate) if _has_rate(app, outcome) else ""
    result = [*lines(outcome, columns()), *([f"run       {runs}"] if runs and not options.write else [])]
    result += [] if options.write else place_line(getattr(app, "learning_rate", None), outcome, options.app)
    print(json.dumps(outcome.to_data(), indent=2) if options.json else on_terminal(result), flush=True)
    if options.svg:
        options.svg.write_text(svg(outcome.curve, outcome.verdict, f"{target.__name__}: validation loss"))
        print(f"picture   {options.svg}", file=out)
    if options.write and outcome.doubt:
        print("written   no rate, because the answer is unclear", file=out)
    elif options.write and not outcome.keeps:
        assert outcome.verdict.own_rate is not None
        position = write_rate(options.app, target.__name__, outcome.verdict.own_rate, outcome.verdict.rate)
        print(f"written   {position}", file=out)
    return 0


def _check_picture(path: Path) -> None:
    """Refuse a path where no picture can be written.

    Raises:
        ConfigError: It is a folder or has another ending, or its folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"--svg {path} is a folder", hint="name a file, such as curve.svg")
    if path.suffix.lower() != ".svg":
        raise ConfigError(
            f"--svg {path}: the picture is SVG, whose files end in .svg", hint=f"--svg {path.with_suffix('.svg')}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--svg {path}: there is no folder {path.parent}", hint="make it, or name another file")


def _has_rate(app: Any, result: Scouted) -> bool:
    """Return whether the app's attribute ``learning_rate`` sets the rate of its optimizer, and should change."""
    rate, verdict = getattr(app, "learning_rate", None), result.verdict
    if not isinstance(rate, int | float) or verdict.own_rate is None or result.keeps:
        return False
    return math.isclose(rate, verdict.own_rate, rel_tol=1e-5)


def lines(result: Scouted, width: int | None = None) -> list[str]:
    """Return the result as lines to print.

    Args:
        result: The result.
        width: Columns of the terminal, which the curve fits; None without one.
    """
    verdict = result.verdict
    return [
        f"tried     {result.trials} trials with {result.steps:,} steps in {result.seconds:.0f} s, compared by {result.judged_by}",
        *curve_lines(result.curve, verdict, width),
        *costs(result),
        *own_rate_line(result),
        *bound_warning(result),
        *(line for comparison in result.also for line in lines_of(comparison, result.doubt)),
        *([SCALED] if result.is_scaled else []),
        f"rate      {rate_sentence(result)}",
    ]


def costs(result: Scouted) -> list[str]:
    """Return lines about the loss at half and double the rate."""
    from ddlf.extras.scout.halving import rounded

    verdict = result.verdict
    losses = comparable(result.curve, verdict.best)
    cost_lines = []
    for name, rate in (("half", rounded(verdict.rate / 2)), ("double", rounded(verdict.rate * 2))):
        if rate in losses:
            loss = f"a loss of {number(losses[rate])}" if math.isfinite(losses[rate]) else "no loss: it diverges"
            cost_lines.append(
                f"{name:<10}{number(rate)} gives {loss}, {number(verdict.rate)} gives {number(losses[verdict.rate])}"
            )
    return cost_lines


def own_rate_line(result: Scouted) -> list[str]:
    """Return a line about the user's rate if it is outside the user's bounds, where it cannot be the answer."""
    verdict, (low, high) = result.verdict, result.bounds
    if verdict.own_rate is None or low <= verdict.own_rate <= high:
        return []
    losses = comparable(result.curve, verdict.best)

    def loss(rate: float) -> str:
        return f"a loss of {number(losses[rate])}" if math.isfinite(losses[rate]) else "no loss: it diverges"

    own_rate, rate = verdict.own_rate, verdict.rate
    return [
        f"bounds    yours, {number(own_rate)}, is outside of your bounds, and was only tried for comparison: it gives {loss(own_rate)}, "
        f"{number(rate)} gives {loss(rate)}"
    ]


def bound_warning(result: Scouted) -> list[str]:
    """Return a line if the best rate is the first or last one between the user's bounds, which then decide the answer."""
    rates = [point.rate for point in result.curve.restricted_to(*result.bounds).points]
    best, (low, high) = result.verdict.best, result.bounds
    if result.doubt or len(rates) < 2:
        return []
    if best == rates[-1] and math.isfinite(high):
        end, other, option = "highest", "higher", f"--to {number(10 * high)}"
    elif best == rates[0] and low > 0:
        end, other, option = "lowest", "lower", f"--from {number(low / 10)}"
    else:
        return []
    return [
        f"bounds    the best rate, {number(best)}, is the {end} one between your bounds, so a {other} one may be better: {option}"
    ]


def place_line(set_rate: Any, result: Scouted, file: Path) -> list[str]:
    """Return a line about where to write the rate, if the app's attribute does not set it.

    Args:
        set_rate: The app's attribute ``learning_rate``; None if it has none.
        result: The result.
        file: The user's file.
    """
    own_rate = result.verdict.own_rate
    if result.keeps or own_rate is None:
        return []
    has_number = isinstance(set_rate, int | float) and not isinstance(set_rate, bool)
    if has_number and math.isclose(set_rate, own_rate, rel_tol=1e-5):
        return []
    if file.suffix == ".nnm":
        return ["place     the block train of the model text, where --write writes it"]
    if not has_number:
        return [
            "place     the optimizer in create_model; with learning_rate = NUMBER in the class, and self.learning_rate in "
            "create_model, --write, -p and --scout set it"
        ]
    return [
        f"place     the optimizer in create_model, which does not use learning_rate = {set_rate:g} of the class; with "
        "self.learning_rate there, --write, -p and --scout set it"
    ]


NAMES = {"batch": "batch_size", "warmup": "warmup", "seed": "seed"}
"""Settings of ``--also`` as an app calls them."""
SCALED = "scaled    the rate is the highest one of your schedule or optimizers; the other rates keep their ratio to it"
"""The line about a schedule or several optimizers."""


def lines_of(comparison: Comparison, doubt: str = "") -> list[str]:
    """Return lines about other values of a setting: which one to use and why, and the losses of all.

    Args:
        comparison: The answer.
        doubt: Why the trials do not decide; "" if they do.
    """
    present = comparison.present

    def row(variant: Variant) -> str:
        share = " of the run" if comparison.setting == "warmup" and variant.value else ""
        loss = f"loss {number(variant.loss)}" if math.isfinite(variant.loss) else "diverged"
        return f"{variant.value:g}{share} with rate {number(variant.rate)}: {loss}{' < yours' if variant == present else ''}"

    reason = (
        f"{NAMES[comparison.setting]} {present.value:g} stays, because the answer is unclear"
        if doubt
        else _reason(comparison)
    )
    return [f"also      {reason}", *(f"          {row(variant)}" for variant in (present, *comparison.variants))]


def _reason(comparison: Comparison) -> str:
    """Return the value of a setting to use, and the rule that chose it."""
    present, chosen, name = comparison.present, comparison.chosen, NAMES[comparison.setting]
    losses = [variant.loss for variant in (present, *comparison.variants)]
    if comparison.setting == "seed":
        seeds = f"{len(losses)} seed{'s' * (len(losses) != 1)}"
        return f"no seed: the losses of {seeds}, from {number(min(losses))} to {number(max(losses))}, differ by chance"
    least, other = min(losses), min(variant.loss for variant in comparison.variants)
    margin = f"the margin, {number(comparison.margin)}, a tenth of what yours has learnt"
    if chosen == present:
        by = f"is smaller than yours, {number(present.loss)}, by no more than {margin}"
        clause = by if other < present.loss else f"is not smaller than yours, {number(present.loss)}"
        larger = _larger(comparison) if comparison.setting == "batch" else ""
        return f"{name} {present.value:g} stays: the smallest other loss, {number(other)}, {clause}{larger}"
    use = f"{name} {chosen.value:g}{' of the run' if comparison.setting == 'warmup' else ''} with rate {number(chosen.rate)}"
    if chosen.loss - least <= comparison.tolerance and comparison.setting == "batch" and chosen.value > present.value:
        return (
            f"{use}: the largest batch whose loss, {number(chosen.loss)}, is above the smallest one, {number(least)}, by at "
            f"most {number(comparison.tolerance)}"
        )
    schedule = f": --schedule warmup:{chosen.value:g},constant" if comparison.setting == "warmup" else ""
    return f"{use}: its loss, {number(chosen.loss)}, is smaller than yours, {number(present.loss)}, by more than {margin}{schedule}"


def _larger(comparison: Comparison) -> str:
    """Return a clause about larger batches, for a batch that stays."""
    as_good = [
        variant
        for variant in comparison.variants
        if variant.value > comparison.present.value and variant.loss <= comparison.present.loss + comparison.tolerance
    ]
    if not as_good:
        return ", and no larger batch has a loss near it or yours"
    most = min(as_good, key=lambda variant: (-variant.value, variant.loss))
    return f"; {most.value:g} with rate {number(most.rate)} has about your loss, {number(most.loss)}, with fewer steps"


def rate_sentence(result: Scouted) -> str:
    """Return the learning rate, and what to do."""
    verdict = result.verdict
    flat = (
        f"flat from {number(verdict.low)} to {number(verdict.high)}" if verdict.low < verdict.high else "no flat part"
    )
    if result.doubt:
        advice = f"keep yours, {number(verdict.own_rate)}; " if verdict.own_rate is not None else ""
        return f"unclear: {advice}these trials chose {number(verdict.rate)}, but {result.doubt}"
    instead = f" instead of {number(verdict.own_rate)}" if verdict.own_rate is not None else ""
    rate = f"keep yours, {number(verdict.rate)}" if verdict.keeps else f"{number(verdict.rate)}{instead}"
    alternatives = [
        f"with {NAMES[comparison.setting]} {comparison.chosen.value:g} use {number(comparison.chosen.rate)}"
        for comparison in result.also
        if comparison.chosen != comparison.present
    ]
    return "; ".join([rate, flat, *alternatives])


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise argparse.ArgumentTypeError(f"must be a learning rate above 0, such as 1e-4, got {text!r}")
    return rate


def _compared_settings(text: str) -> list[str]:
    from ddlf.extras.scout.comparisons import COMPARED

    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in COMPARED]:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(COMPARED)}, got {unknown[0]!r}")
    return list(dict.fromkeys(words))


def _options(parser: Parser) -> None:
    parser.add("--from", dest="low", type=_rate, metavar="RATE", help="the lowest rate to try (default: 1e-5)")
    parser.add("--to", dest="high", type=_rate, metavar="RATE", help="the highest rate to try (default: 10)")
    parser.add(
        *("--steps",),
        type=whole(1),
        metavar="N",
        help="steps of all trials together (default: 15 % of the run, at least 3000)",
    )
    parser.add(
        "--also", type=_compared_settings, metavar="SETTING,..", help="also compare batch, warmup or seed at this rate"
    )
    parser.add("--write", action="store_true", help="write the rate into the app's class, or the train block of a text")
    parser.add("--svg", type=Path, metavar="PATH", help="write the curve to a picture")
    add_app_options(parser)
    add_json(parser)


SCOUT = Command(
    description="Find a learning rate for an app with short trials on its workers. All rates between two bounds begin; "
    "the better half continues with longer trials from more starts. The loss of validation data compares them. "
    "Callbacks do not run, and no file is written.",
    examples=(
        "ddlf scout app.py -c cluster.yaml",
        "ddlf scout app.py --local 2 --from 1e-4 --to 1",
        "ddlf scout app.py --local 2 --steps 5000 --svg curve.svg",
    ),
    options=_options,
    run=scout,
)
