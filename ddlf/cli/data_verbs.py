"""``ddlf data``: its actions, their options and examples. Imports nothing of weight."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli.parsing import Parser, addresses, examples_of, number, verb
from ddlf.errors import ConfigError
from ddlf.training.settings.checks import count_of_bytes as size_of

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs


def add(verbs: Verbs) -> None:
    """Add the verb."""
    data = verbs.add_parser(
        "data",
        help="make, check and show data sets of many files",
        description="Data sets as partition files in a folder, for data that is larger than memory.",
        epilog=examples_of("ddlf data split mnist.npz /shared/mnist", "ddlf data info /shared/mnist"),
    )
    actions = data.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    split = verb(
        actions,
        "split",
        "data:split",
        "write a source as partition files",
        "Write arrays (.npz, .npy, a folder of .npy), a table (.csv, .parquet), samples (.tar, .tfrecord) or images (a folder for each class) into a "
        "new folder as partition files with a manifest. The samples are mixed as a whole, however large the source is. What is broken off is "
        "no data set; the same command goes on with it, anew if the source or an option is another one.",
        "ddlf data split mnist.npz /shared/mnist                       # x_train, y_train as x, y",
        "ddlf data split mnist.npz /shared/mnist-test --part test",
        "ddlf data split photos /shared/photos --image-size 64x64 --files 12",
        "ddlf data split photos /shared/photos --ragged x                      # encoded, for ddlf.data.open(place, decode=...)",
        "ddlf data split table.csv /shared/table --label price --file-samples 100000",
        "ddlf data split shards /shared/shards --columns x=image,y=label        # a folder of .tar, .parquet or .tfrecord",
        "ddlf data split big.npz /shared/big --file-bytes 128MB --memory 2GB",
    )
    split.add_argument(
        "source", type=Path, metavar="SOURCE", help=".npz, .npy, .csv, .parquet, .tar, .tfrecord, or a folder"
    )
    split.add_argument("place", metavar="PLACE", help="folder or URL that is empty or not there yet")
    split.add_argument(
        "--shuffle",
        choices=("global", "none"),
        default="global",
        help="global or none (default: global)",
        metavar="HOW",
    )
    split.add_argument(
        "--stratify", default="", metavar="COLUMN", help="labels, of each of which all files have a share"
    )
    split.add_argument("--seed", type=number("seed", 0), metavar="N", help="of the shuffle (default: 0)")
    split.add_argument("--columns", default="", metavar="A,B=C", help="columns that are meant; new=old renames one")
    split.add_argument(
        "--part", choices=("train", "val", "test"), default="", metavar="NAME", help="arrays x_NAME, y_NAME, w_NAME"
    )
    split.add_argument("--label", default="", metavar="NAME", help="the table's column that is the label")
    split.add_argument("--image-size", default="", metavar="WxH", help="bring all images to one size")
    split.add_argument("--ragged", default="", metavar="A,B", help="columns of any length; images stay encoded")

    _add_hosts(split, "send each machine of these workers its files", required=False)

    send = verb(
        actions,
        "send",
        "data:send",
        "bring workers their files, onto their own disks",
        "Bring each machine of a cluster its part of a data set, to a folder of the same name there, over the connections to its workers: for "
        "machines that have no folder in common. Only what a machine lacks is sent; so the same command goes on with what was broken off.",
        "ddlf data send /data/mnist --hosts pc1:9000,pc2:9000,pc3:9000 --copies 2",
        "ddlf data send /data/mnist --config cluster.yaml --copies 2",
    )
    send.add_argument("place", metavar="PLACE", help="folder of the data set, from the root; all of it is here")
    _add_hosts(send, "addresses of workers", required=True)

    repartition = verb(
        actions,
        "repartition",
        "data:repartition",
        "write a data set into other files",
        "Write the samples of a data set into more or fewer partition files, in the same order, as its next version. The version before stays the "
        "one that there is until all is written, and its files stay for whoever reads them, until the next time. What is "
        "broken off goes on with the same command.",
        "ddlf data repartition /shared/mnist --files 7",
        "ddlf data repartition s3://bucket/photos --file-bytes 32MB --remove-old",
    )
    repartition.add_argument("place", metavar="PLACE", help="folder or URL of the data set")
    for action in (split, repartition):
        one = action.add_mutually_exclusive_group(required=action is repartition)
        one.add_argument("--files", type=number("files", 1), metavar="N", help="how many partition files")
        one.add_argument("--file-samples", type=number("file-samples", 1), metavar="N", help="at most so many in each")
        one.add_argument("--file-bytes", type=count_of_bytes, metavar="SIZE", help="at most so much (split: 64MB)")
        action.add_argument(
            "--memory", type=count_of_bytes, metavar="SIZE", help="to work in (default: a quarter of all)"
        )
    repartition.add_argument("--remove-old", action="store_true", help="remove the files of the version before")

    info = verb(
        actions,
        "info",
        "data:info",
        "what a data set has, and what a worker needs for it",
        "Show what the manifest of a data set says, and what one worker will need for it. The files are not read.",
        "ddlf data info /shared/mnist",
        "ddlf data info /shared/mnist --workers 8 --shuffle window:4",
    )
    info.add_argument("place", metavar="PLACE", help="folder or URL of the data set")
    info.add_argument("--workers", type=number("workers", 1), default=2, metavar="N", help="that train (default: 2)")
    info.add_argument("--shuffle", default="window:8", metavar="HOW", help="global, window:N, none (default: window:8)")
    info.add_argument("--json", action="store_true", help="print JSON")

    verify = verb(
        actions,
        "verify",
        "data:verify",
        "check every byte",
        "Read all files and compare them with the manifest. The exit code is 0 if all is whole.",
        "ddlf data verify /shared/mnist",
    )
    verify.add_argument("place", metavar="PLACE", help="folder or URL of the data set")

    export = verb(
        actions,
        "export",
        "data:export",
        "write all samples into one file",
        "Write all samples of a data set into one file, in the order of their ids: .npz, .parquet, .tar (as WebDataset has them) or .tfrecord.",
        "ddlf data export /shared/mnist mnist-again.npz",
    )
    export.add_argument("place", metavar="PLACE", help="folder or URL of the data set")
    export.add_argument("target", type=Path, metavar="TARGET", help="file that is not there yet")
    for action in (split, send, repartition, info, verify, export):
        action.add_argument(
            "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the traceback of an error"
        )


def _add_hosts(action: Parser, what: str, *, required: bool) -> None:
    one = action.add_mutually_exclusive_group(required=required)
    one.add_argument("-c", "--config", type=Path, metavar="PATH", help="cluster file")
    one.add_argument("--hosts", type=addresses, metavar="A:9000,B:9000", help=what)
    more = "on how many machines each file is to be (default: 1)"
    action.add_argument("--copies", type=number("copies", 1), metavar="N", default=1 if required else None, help=more)
    action.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    action.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")


def count_of_bytes(text: str) -> int:
    """An argparse type: a size such as ``64MB``, ``1.5 GiB`` or a number of bytes."""
    try:
        return size_of("it", text) or 0
    except ConfigError:
        raise argparse.ArgumentTypeError(f"not a size above 0: {text!r}; write it as 512MB or 2GB") from None
