"""The options that ``ddlf run`` and an app's own script share, and which of them fit together."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.parsing import Parser, addresses, number
from ddlf.errors import ConfigError

if TYPE_CHECKING:
    from ddlf.app import IApp

SETTINGS = (
    "mode",
    "master_epochs",
    "worker_epochs",
    "batch_size",
    "seed",
    "slots",
    "precision",
    "balance",
    "optimizer_state",
    "codec",
    "weights_codec",
    "merge",
    "update_policy",
    "evaluate_every",
    "checkpoint",
    "checkpoint_every",
    "resume",
)
"""Options that set the app's attribute of the same name."""
OF_AN_APP = (*SETTINGS, "save")
OF_A_CLUSTER = ("config", "local", "hosts", "token_file", "insecure_plaintext", "takeover", "wait", "pickle_results")


def add_options(parser: Parser) -> None:
    """The options that ``ddlf run`` and an app's own script share."""
    where = parser.add_argument_group("cluster (default: $DDLF_CONFIG, ./cluster.yaml, else 2 workers on this machine)")
    one = where.add_mutually_exclusive_group()
    one.add_argument("-c", "--config", type=Path, metavar="PATH", help="cluster file")
    one.add_argument("--local", type=number("local", 1, 1024), metavar="N", help="start N workers on this machine")
    one.add_argument("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of workers")
    where.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    where.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    where.add_argument("--takeover", action="store_true", help="take workers and checkpoints from another master")
    where.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="for workers that another run uses; --wait alone: for ever"
    )
    parser.may_stand_alone["--wait"] = "for-ever"
    where.add_argument(
        "--pickle-results",
        action="store_true",
        help="take results that are no plain data, too: a worker could then run code here",
    )
    train = parser.add_argument_group("training (defaults are attributes of the app)")
    train.add_argument(
        "--mode",
        choices=("sync", "async"),
        help="sync: the updates of all are merged once a round; async: each when it comes, nobody waits",
    )
    train.add_argument("--master-epochs", type=number("epochs", 1), metavar="N", help="local epochs of the whole run")
    train.add_argument("--worker-epochs", type=number("epochs", 1), metavar="N", help="local epochs in a round")
    train.add_argument(
        "--batch-size", type=number("batch size", 1), metavar="N", help="samples in a batch, of each worker"
    )
    train.add_argument(
        "--seed",
        type=number("seed", 0, 2**32 - 1),
        metavar="N",
        help="of first weights, order of samples and all else by chance: equal seeds, equal results (default: 0)",
    )
    train.add_argument(
        "--slots",
        type=number("slots", 1),
        metavar="N",
        help="parts of each round, which any worker can compute (default: as many as workers); workers more than "
        "that are in reserve",
    )
    train.add_argument(
        "--precision",
        choices=("auto", "float32", "mixed_bfloat16", "mixed_float16"),
        help="of computation on the workers; auto: float32, and a line when bfloat16 would be faster there",
    )
    train.add_argument("--balance", choices=("equal", "speed"), help="parts of the data equal, or as workers are fast")
    train.add_argument(
        "--optimizer-state",
        choices=("kept", "fresh"),
        help="kept: each slot's optimizer goes on from round to round; fresh: it begins anew in each, which sends less",
    )
    train.add_argument(
        "--codec", metavar="NAME", help="of updates: float32, float16, bfloat16, int8, int8-block, topk:0.01"
    )
    train.add_argument("--weights-codec", metavar="NAME", help="of weights: float32, float16, bfloat16, delta:CODEC")
    train.add_argument("--merge", metavar="RULE", help="of updates: mean, median, trimmed:0.2")
    train.add_argument("--update-policy", choices=("stop", "reject", "clip"), help="for an update that looks wrong")
    train.add_argument(
        "--evaluate-every",
        type=number("rounds", 0),
        metavar="N",
        help="evaluate the test data after every N rounds; 0: at the end only",
    )
    train.add_argument("--checkpoint", type=Path, metavar="DIR", help="write a checkpoint there after every round")
    train.add_argument(
        "--checkpoint-every", type=number("rounds", 1), metavar="N", help="only after every N rounds, and at the end"
    )
    train.add_argument(
        "--resume",
        metavar="auto|DIR",
        help="go on from the newest checkpoint: in --checkpoint, if there is one, or in DIR",
    )
    train.add_argument("--save", type=Path, metavar="PATH", help="save the trained model as a .keras file")
    parser.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an attribute of the app; may be repeated",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print the results only")
    parser.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the whole traceback of an error"
    )


def _seconds(text: str) -> float:
    if text == "for-ever":
        return math.inf
    seconds: int = number("seconds", 1)(text)
    return seconds


def given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of some options that were given, as they are written."""

    def is_given(name: str) -> bool:
        value: Any = getattr(options, name)
        return value is not None and value is not False

    return [f"--{name.replace('_', '-')}" for name in names if is_given(name)]


def check_cluster_options(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect on the cluster that the others name.

    Raises:
        ConfigError: The text names them.
    """
    if _new_workers(options):
        unused = given(options, ("token_file", "insecure_plaintext", "wait"))
        if unused and options.local:
            raise ConfigError(
                f"{', '.join(unused)} has no effect with --local",
                hint="its workers are new ones, and this process's own",
            )
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} has no effect without --hosts or a cluster file, which is not here",
                hint="name it with --config PATH",
            )
    elif options.insecure_plaintext and not options.hosts:
        raise ConfigError(
            "--insecure-plaintext has no effect without --hosts",
            hint="in a cluster file it is insecure_plaintext under security",
        )


def check_app_options(options: argparse.Namespace, app: IApp) -> None:
    """Refuse options that would have no effect on the app as it is set.

    Raises:
        ConfigError: The text names them.
    """
    if app.checkpoint is None and app.resume is None and options.checkpoint_every is not None:
        raise ConfigError("--checkpoint-every has no effect without --checkpoint DIR", hint="give it, too")
    if options.takeover and app.checkpoint is None and app.resume is None and _new_workers(options):
        raise ConfigError(
            "--takeover has no effect here: the workers are new ones, and there are no checkpoints",
            hint="leave it out",
        )


def _new_workers(options: argparse.Namespace) -> bool:
    """Whether a run starts its workers itself."""
    from ddlf.config import find_config

    return bool(options.local) or not (options.hosts or find_config(options.config))
