"""``ddlf check``: compare the training of an app with one slot to plain Keras."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

from ddlf.app import IApp
from ddlf.cli.options import add_json, add_options, add_parameters, add_target, add_verbose
from ddlf.cli.parsing import Command, Parser, number
from ddlf.cli.plain_keras import Compared, compare
from ddlf.cli.run import execute
from ddlf.cli.stopping import StopRequest
from ddlf.cli.target import find_target, prepare_app
from ddlf.errors import AppError
from ddlf.events.facts import to_data
from ddlf.monitor.ui import attached, opened


def _options(parser: Parser) -> None:
    parser.add("app", type=Path, help="Python file with a subclass of ddlf.IApp")
    parser.add("--batches", type=number(1), default=20, metavar="N", help="batches to compare (default: 20)")
    add_target(parser)
    add_parameters(parser)
    add_json(parser)
    add_verbose(parser)


def check(options: argparse.Namespace) -> int:
    """Run ``ddlf check``: compare the app to plain Keras, print the result, and return the exit code: 0 if they agree."""
    of_run = Parser()
    add_options(of_run)
    settings = of_run.parse_args(["--local", "1", "--out", "none"])
    for name, value in vars(options).items():
        setattr(settings, name, value)
    if options.json:
        settings.ui = "none"
    return execute(lambda: find_target(options.app, options.target), settings, then=_check)


async def _check(target: Any, options: argparse.Namespace, stop: StopRequest) -> int:
    from ddlf.cluster.cluster import Cluster

    if not (inspect.isclass(target) and issubclass(target, IApp)):
        raise AppError(
            f"{target.__name__} is not an app, so there is nothing to compare", hint="check a subclass of ddlf.IApp"
        )
    app = prepare_app(target, Cluster.local(1), options)
    with opened(options.ui or "plain") as display, attached(app, display):
        try:
            compared = await compare(app, options.batches)
        finally:
            await app.close()
    if options.json:
        print(json.dumps(to_data(compared), indent=2))
    else:
        print("\n".join(lines(type(app).__name__, compared)))
    return 0 if compared.differs is None else 1


def lines(name: str, compared: Compared) -> list[str]:
    """Return the result of the comparison with plain Keras as lines to print.

    Args:
        name: The name of the app's class.
        compared: The result of the comparison.
    """
    length = f"{compared.batches} batch{'es' * (compared.batches != 1)} of {compared.batch_size} samples"
    if (differs := compared.differs) is None:
        agreement = (
            "the same bits as" if compared.same_bits else f"equal to rounding (at most {compared.most:.1e} apart) to"
        )
        return [f"agrees    {name}, with one slot, over {length}: {agreement} plain Keras"]
    element = f" {list(differs.element)}" if differs.element else ""
    count_text = f"; {differs.tensors} tensors differ, at most by {differs.most:.2g}" if differs.tensors > 1 else ""
    return [
        f"differs   {name}, with one slot, from batch {differs.batch} on, of {length}",
        f"where     {differs.tensor}{element}: {differs.expected:.9g} with plain Keras, {differs.actual:.9g} with the app{count_text}",
        f"cause     {differs.cause}",
    ]


CHECK = Command(
    description="Train an app with one slot on one local worker, and plain Keras on the same samples in the same order "
    "with the same seeds, and say whether they agree. If not, print the first batch and weight that differ and the "
    "likely cause. The exit code is 0 if they agree.",
    examples=(
        "ddlf check app.py",
        "ddlf check app.py --batches 100 -p learning_rate=0.05",
        "ddlf check app.py --json",
    ),
    options=_options,
    run=check,
)
