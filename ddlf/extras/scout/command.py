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
from ddlf.extras.scout.curve import comparable, number, shown, svg

if TYPE_CHECKING:
    from ddlf.extras.scout.comparisons import Also, Variant
    from ddlf.extras.scout.scouting import Scouted


def scout(options: argparse.Namespace) -> int:
    """Run ``ddlf scout``: print the learning rate and its curve, and return the exit code."""
    from ddlf.cli.options import check_short
    from ddlf.cli.run import execute
    from ddlf.cli.target import find_target

    check_short(options, "ddlf scout, which only tries rates")
    options.ui = "none"
    return execute(lambda: find_target(options.app, options.target, options), options, then=_scout)


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

    def check_own(own: float) -> None:
        if options.write:  # before the trials, because they take minutes
            checked_place(options.app, options.app.read_bytes().decode(), target.__name__, own)

    def note(text: str) -> None:
        if not options.quiet:
            print(fitted(text), file=out, flush=True)

    try:
        note(f"cluster   {described}")
        await app.connect()
        found = await scouted(
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
    rate = {"learning_rate": f"{found.verdict.rate:g}"}
    runs = command_line("ddlf run", options.app, options, parameters=rate) if _has_rate(app, found) else ""
    result = [*lines(found, columns()), *([f"run       {runs}"] if runs and not options.write else [])]
    result += [] if options.write else place_line(getattr(app, "learning_rate", None), found, options.app)
    print(json.dumps(found.to_data(), indent=2) if options.json else on_terminal(result), flush=True)
    if options.svg:
        options.svg.write_text(svg(found.curve, found.verdict, f"{target.__name__}: validation loss"))
        print(f"picture   {options.svg}", file=out)
    if options.write and found.doubt:
        print("written   no rate, because the answer is unclear", file=out)
    elif options.write and not found.keeps:
        assert found.verdict.own is not None
        place = write_rate(options.app, target.__name__, found.verdict.own, found.verdict.rate)
        print(f"written   {place}", file=out)
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


def _has_rate(app: Any, found: Scouted) -> bool:
    """Return whether the app's attribute ``learning_rate`` sets the rate of its optimizer, and should change."""
    rate, verdict = getattr(app, "learning_rate", None), found.verdict
    if not isinstance(rate, int | float) or verdict.own is None or found.keeps:
        return False
    return math.isclose(rate, verdict.own, rel_tol=1e-5)


def lines(found: Scouted, width: int | None = None) -> list[str]:
    """Return the result as lines to print.

    Args:
        found: The result.
        width: Columns of the terminal, which the curve fits; None without one.
    """
    verdict = found.verdict
    return [
        f"tried     {found.trials} trials with {found.steps:,} steps in {found.seconds:.0f} s, compared by {found.judged_by}",
        *shown(found.curve, verdict, width),
        *costs(found),
        *outside(found),
        *at_bound(found),
        *(line for one in found.also for line in lines_of(one, found.doubt)),
        *([SCALED] if found.is_scaled else []),
        f"rate      {sentence(found)}",
    ]


def costs(found: Scouted) -> list[str]:
    """Return lines about the loss at half and double the rate."""
    from ddlf.extras.scout.halving import rounded

    verdict = found.verdict
    losses = comparable(found.curve, verdict.best)
    result = []
    for name, rate in (("half", rounded(verdict.rate / 2)), ("double", rounded(verdict.rate * 2))):
        if rate in losses:
            loss = f"a loss of {number(losses[rate])}" if math.isfinite(losses[rate]) else "no loss: it diverges"
            result.append(
                f"{name:<10}{number(rate)} gives {loss}, {number(verdict.rate)} gives {number(losses[verdict.rate])}"
            )
    return result


def outside(found: Scouted) -> list[str]:
    """Return a line about the user's rate if it is outside the user's bounds, where it cannot be the answer."""
    verdict, (low, high) = found.verdict, found.bounds
    if verdict.own is None or low <= verdict.own <= high:
        return []
    losses = comparable(found.curve, verdict.best)

    def loss(rate: float) -> str:
        return f"a loss of {number(losses[rate])}" if math.isfinite(losses[rate]) else "no loss: it diverges"

    own, rate = verdict.own, verdict.rate
    return [
        f"bounds    yours, {number(own)}, is outside of your bounds, and was only tried for comparison: it gives {loss(own)}, "
        f"{number(rate)} gives {loss(rate)}"
    ]


def at_bound(found: Scouted) -> list[str]:
    """Return a line if the best rate is the first or last one between the user's bounds, which then decide the answer."""
    rates = [point.rate for point in found.curve.within(*found.bounds).points]
    best, (low, high) = found.verdict.best, found.bounds
    if found.doubt or len(rates) < 2:
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


def place_line(set_rate: Any, found: Scouted, file: Path) -> list[str]:
    """Return a line about where to write the rate, if the app's attribute does not set it.

    Args:
        set_rate: The app's attribute ``learning_rate``; None if it has none.
        found: The result.
        file: The user's file.
    """
    own = found.verdict.own
    if found.keeps or own is None:
        return []
    has_number = isinstance(set_rate, int | float) and not isinstance(set_rate, bool)
    if has_number and math.isclose(set_rate, own, rel_tol=1e-5):
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


def lines_of(found: Also, doubt: str = "") -> list[str]:
    """Return lines about other values of a setting: which one to use and why, and the losses of all.

    Args:
        found: The answer.
        doubt: Why the trials do not decide; "" if they do.
    """
    kept = found.kept

    def row(one: Variant) -> str:
        share = " of the run" if found.what == "warmup" and one.value else ""
        loss = f"loss {number(one.loss)}" if math.isfinite(one.loss) else "diverged"
        return f"{one.value:g}{share} with rate {number(one.rate)}: {loss}{' < yours' if one == kept else ''}"

    said = f"{NAMES[found.what]} {kept.value:g} stays, because the answer is unclear" if doubt else _reason(found)
    return [f"also      {said}", *(f"          {row(one)}" for one in (kept, *found.others))]


def _reason(found: Also) -> str:
    """Return the value of a setting to use, and the rule that chose it."""
    kept, chosen, name = found.kept, found.chosen, NAMES[found.what]
    losses = [one.loss for one in (kept, *found.others)]
    if found.what == "seed":
        seeds = f"{len(losses)} seed{'s' * (len(losses) != 1)}"
        return f"no seed: the losses of {seeds}, from {number(min(losses))} to {number(max(losses))}, differ by chance"
    least, other = min(losses), min(one.loss for one in found.others)
    margin = f"the margin, {number(found.margin)}, a tenth of what yours has learnt"
    if chosen == kept:
        by = f"is smaller than yours, {number(kept.loss)}, by no more than {margin}"
        why = by if other < kept.loss else f"is not smaller than yours, {number(kept.loss)}"
        larger = _larger(found) if found.what == "batch" else ""
        return f"{name} {kept.value:g} stays: the smallest other loss, {number(other)}, {why}{larger}"
    use = f"{name} {chosen.value:g}{' of the run' if found.what == 'warmup' else ''} with rate {number(chosen.rate)}"
    if chosen.loss - least <= found.near and found.what == "batch" and chosen.value > kept.value:
        return (
            f"{use}: the largest batch whose loss, {number(chosen.loss)}, is above the smallest one, {number(least)}, by at "
            f"most {number(found.near)}"
        )
    schedule = f": --schedule warmup:{chosen.value:g},constant" if found.what == "warmup" else ""
    return f"{use}: its loss, {number(chosen.loss)}, is smaller than yours, {number(kept.loss)}, by more than {margin}{schedule}"


def _larger(found: Also) -> str:
    """Return a clause about larger batches, for a batch that stays."""
    near = [one for one in found.others if one.value > found.kept.value and one.loss <= found.kept.loss + found.near]
    if not near:
        return ", and no larger batch has a loss near it or yours"
    most = min(near, key=lambda one: (-one.value, one.loss))
    return f"; {most.value:g} with rate {number(most.rate)} has about your loss, {number(most.loss)}, with fewer steps"


def sentence(found: Scouted) -> str:
    """Return the learning rate, and what to do."""
    verdict = found.verdict
    flat = (
        f"flat from {number(verdict.low)} to {number(verdict.high)}" if verdict.low < verdict.high else "no flat part"
    )
    if found.doubt:
        kept = f"keep yours, {number(verdict.own)}; " if verdict.own is not None else ""
        return f"unclear: {kept}these trials chose {number(verdict.rate)}, but {found.doubt}"
    instead = f" instead of {number(verdict.own)}" if verdict.own is not None else ""
    rate = f"keep yours, {number(verdict.rate)}" if verdict.keeps else f"{number(verdict.rate)}{instead}"
    others = [
        f"with {NAMES[one.what]} {one.chosen.value:g} use {number(one.chosen.rate)}"
        for one in found.also
        if one.chosen != one.kept
    ]
    return "; ".join([rate, flat, *others])


def _rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise argparse.ArgumentTypeError(f"must be a learning rate above 0, such as 1e-4, got {text!r}")
    return found


def _whats(text: str) -> list[str]:
    from ddlf.extras.scout.comparisons import WHATS

    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in WHATS]:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(WHATS)}, got {unknown[0]!r}")
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
    parser.add("--also", type=_whats, metavar="SETTING,..", help="also compare batch, warmup or seed at this rate")
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
