"""``ddlf data``: data sets in partition files, for data that is larger than memory. Needs no cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddlf.algorithms.reading_order import SHUFFLE
from ddlf.cli.options import add_json, add_verbose, named_cluster
from ddlf.cli.parsing import Command, Parser, action, addresses, number
from ddlf.data import kind_at
from ddlf.data.export import Moved, damage
from ddlf.data.export import export as exported
from ddlf.data.location import DataLocation, Folder
from ddlf.data.manifest import Manifest
from ddlf.data.remote_folder import open_location
from ddlf.data.rows import SampleSource
from ddlf.data.sources import open_source, state_of
from ddlf.data.split import PartitionedSource, sizes_of
from ddlf.data.split import repartition as rewritten
from ddlf.data.split import split as written
from ddlf.data.spread import send as spread
from ddlf.data.spread import shares
from ddlf.errors import ConfigError, DatasetError
from ddlf.events.record import size
from ddlf.settings.checks import count_of_bytes
from ddlf.worker.machine import memory

DEFAULT_MEMORY = 2**30
EVERY_S = 0.2


def _split_options(parser: Parser) -> None:
    def column(*names: str, metavar: str, help: str) -> None:
        parser.add(*names, default="", metavar=metavar, help=help, group="samples")

    parser.add("source", type=Path, help=".npz, .npy, .csv, .parquet, .tar, .tfrecord, or a folder")
    parser.add("place", help="empty or new folder, or URL")
    parser.add("--shuffle", choices=("global", "none"), default="global", help="shuffle all samples (default: global)")
    column("--stratify", metavar="COLUMN", help="column with labels that are spread evenly over the files")
    parser.add("--seed", type=number(0), metavar="N", help="random seed of the shuffle (default: 0)")
    column("--columns", metavar="A,B=C", help="columns to use; new=old renames one")
    parser.add(
        *("--part",),
        choices=("train", "val", "test"),
        metavar="NAME",
        help="use the arrays x_NAME, y_NAME, w_NAME",
        group="samples",
    )
    column("--label", metavar="NAME", help="column of the table that is the label")
    column("--image-size", metavar="WxH", help="resize all images")
    column("--ragged", metavar="A,B", help="columns of variable length; images stay encoded")
    _add_sizes(parser, required=False)
    _add_workers(parser, "send the files to the machines of these workers", required=False)
    add_verbose(parser)


def _send_options(parser: Parser) -> None:
    parser.add("place", help="absolute path of the data set's folder, which is complete here")
    _add_workers(parser, "addresses of workers", required=True)
    add_verbose(parser)


def _repartition_options(parser: Parser) -> None:
    _add_place(parser)
    _add_sizes(parser, required=True)
    parser.add("--remove-old", action="store_true", help="remove the files of the previous version")
    add_verbose(parser)


def _info_options(parser: Parser) -> None:
    _add_place(parser)
    parser.add("--workers", type=number(1), default=2, metavar="N", help="number of workers (default: 2)")
    parser.add("--shuffle", default="window:8", metavar="RULE", help="global, window:N, none (default: window:8)")
    add_json(parser)
    add_verbose(parser)


def _verify_options(parser: Parser) -> None:
    _add_place(parser)
    add_verbose(parser)


def _export_options(parser: Parser) -> None:
    _add_place(parser)
    parser.add("target", type=Path, help="new file")
    add_verbose(parser)


def _add_place(parser: Parser) -> None:
    parser.add("place", help="folder or URL of the data set")


def _add_sizes(parser: Parser, *, required: bool) -> None:
    exclusive = parser.add_mutually_exclusive_group(required=required)

    def add(*names: str, within: Any = None, **more: Any) -> None:
        parser.add(*names, group="files", within=within, **more)

    add("--files", type=number(1), metavar="N", help="number of files", within=exclusive)
    add("--file-samples", type=number(1), metavar="N", help="maximum number of samples per file", within=exclusive)
    add("--file-bytes", type=_size, metavar="SIZE", help="maximum size of a file (split: 64MB)", within=exclusive)
    add("--memory", type=_size, metavar="SIZE", help="memory to work in (default: a quarter of the machine's)")


def _add_workers(parser: Parser, help: str, *, required: bool) -> None:
    exclusive = parser.add_mutually_exclusive_group(required=required)

    def add(*names: str, within: Any = None, **more: Any) -> None:
        parser.add(*names, group="workers", within=within, common=required, **more)

    add("-c", "--config", type=Path, metavar="PATH", help="cluster file that lists the workers", within=exclusive)
    add("--hosts", type=addresses, metavar="A:9000,B:9000", help=help, within=exclusive)
    copies = "number of machines that get each file (default: 1)"
    add("--copies", type=number(1), metavar="N", default=1 if required else None, help=copies)
    add("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    add("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")


def _size(text: str) -> int:
    """Parse a size such as ``64MB``, ``1.5 GiB`` or a number of bytes, as an argparse type."""
    try:
        return count_of_bytes("it", text) or 0
    except ConfigError:
        raise argparse.ArgumentTypeError(f"not a size above 0: {text!r}; write it as 512MB or 2GB") from None


def split(options: argparse.Namespace) -> int:
    """Run ``ddlf data split``: write a source, such as a folder of images, as a data set of partition files."""
    hosts = _hosts(options)
    location = _folder(options) if hosts else open_location(options.place)
    if options.shuffle == "none" and options.seed is not None:
        raise ConfigError("--seed has no effect with --shuffle none", hint="leave it out")
    if options.shuffle == "none" and options.stratify:
        raise ConfigError("--stratify has no effect with --shuffle none", hint="leave one of them out")
    if (
        options.source.is_dir()
        and isinstance(location, Folder)
        and location.path.resolve().is_relative_to(options.source.resolve())
    ):
        raise ConfigError(f"{location} is inside {options.source}", hint="write the data set somewhere else")
    source = open_source(
        options.source,
        columns=options.columns,
        part=options.part or "",
        label=options.label,
        image_size=options.image_size,
        ragged=options.ragged,
    )
    sizes = _sizes(source, options)
    if hosts and not (options.files or options.file_samples or options.file_bytes):
        sizes = sizes_of(source.samples, 1, files=min(-(-len(sizes) // hosts) * hosts, source.samples))
    began = time.monotonic()
    reading = (options.columns, options.part or "", options.label, options.image_size, options.ragged)
    with _line() as moved:
        manifest = written(
            source,
            location,
            sizes,
            shuffle=options.shuffle == "global",
            stratify=options.stratify,
            seed=options.seed or 0,
            memory=_cap(options),
            state=state_of(options.source, *reading),
            moved=moved,
            say=_say,
        )
    _print(location, manifest)
    print(f"took      {time.monotonic() - began:.1f} s")
    return _send(_folder(options), options) if hosts else 0


def send(options: argparse.Namespace) -> int:
    """Run ``ddlf data send``: send the files of a data set to the machines of the workers."""
    _hosts(options)
    return _send(_folder(options), options)


def _hosts(options: argparse.Namespace) -> int:
    """Return the number of machines that a data set is spread over; 0 if it is not spread.

    Raises:
        ConfigError: The options contradict each other.
    """
    if not (options.hosts or options.config):
        unused = [name for name in ("copies", "token_file", "insecure_plaintext") if getattr(options, name)]
        if unused:
            shown = unused[0].replace("_", "-")
            raise ConfigError(f"--{shown} has no effect without --hosts", hint="name the workers, or leave it out")
        return 0
    hosts = len(named_cluster(options).workers)
    if (options.copies or 1) > hosts:
        raise ConfigError(f"--copies {options.copies} needs as many machines, but there are {hosts}")
    return hosts


def _folder(options: argparse.Namespace) -> Folder:
    """Return the folder of the data set to send. It will have the same path on each machine."""
    location = open_location(options.place)
    if not isinstance(location, Folder):
        raise ConfigError(f"{location} is a store, which all machines reach: you need not send it")
    if not location.path.is_absolute():
        raise ConfigError(
            f"{location} is named from the folder where this runs, which other machines do not have",
            hint=f"name it from the root: {location.path.absolute()}",
        )
    return location


def _send(folder: Folder, options: argparse.Namespace) -> int:
    copies = options.copies or 1

    async def sent() -> None:
        async with named_cluster(options) as cluster:
            with _line("bytes") as moved:
                counts = await spread(folder, cluster.workers, copies, moved)
            assigned = shares(folder.manifest(), len(counts), copies)
            for worker, count, share in zip(cluster.workers, counts, assigned, strict=True):
                print(f"sent      {worker.name}: {count:,} of its {len(share):,} files, the others were there")

    asyncio.run(sent())
    return 0


def repartition(options: argparse.Namespace) -> int:
    """Run ``ddlf data repartition``: write the samples of a data set into files of other sizes."""
    location = open_location(options.place)
    source = PartitionedSource(location)
    sizes = _sizes(source, options)
    began = time.monotonic()
    with _line() as moved:
        manifest = rewritten(location, source, sizes, memory=_cap(options), moved=moved, say=_say)
    if options.remove_old:
        location.retire(source.manifest)
    _print(location, manifest)
    print(f"took      {time.monotonic() - began:.1f} s")
    return 0


def _sizes(source: SampleSource, options: argparse.Namespace) -> list[int]:
    return sizes_of(
        source.samples,
        sum(column.row_bytes for column in source.columns.values()),
        files=options.files or 0,
        file_samples=options.file_samples or 0,
        file_bytes=options.file_bytes or 0,
    )


def _cap(options: argparse.Namespace) -> int:
    return int(options.memory or (memory()[0] or 4 * DEFAULT_MEMORY) // 4)


def info(options: argparse.Namespace) -> int:
    """Run ``ddlf data info``: print the content of a data set and the memory and disk that a worker needs for it."""
    lines, facts = kind_at(options.place).described(options.place, SHUFFLE.read(options.shuffle), options.workers)
    if options.json and facts is None:
        raise ConfigError(f"there is no JSON about {options.place}, only text", hint="leave out --json")
    print(json.dumps(facts) if options.json else "\n".join(lines))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Run ``ddlf data verify``: check every byte of a data set. If anything is wrong, return the exit code of an
    unusable data set.
    """
    location = open_location(options.place)
    manifest = location.manifest()
    damaged = 0
    with _line() as moved:
        for error in damage(location, manifest, moved):
            damaged += 1
            print(f"damaged   {error.message}")
    print(
        f"{'whole' if not damaged else 'of':<9} {len(manifest.files):,} files, {manifest.samples:,} samples, {size(manifest.nbytes)}"
    )
    return DatasetError.exit_code if damaged else 0


def export(options: argparse.Namespace) -> int:
    """Run ``ddlf data export``: write all samples of a data set into one file."""
    location = open_location(options.place)
    target: Path = options.target
    manifest = location.manifest()
    with _line() as moved:
        exported(location, manifest, target, moved)
    print(f"wrote     {target}: {manifest.samples:,} samples, {size(target.stat().st_size)}")
    return 0


def _print(location: DataLocation, manifest: Manifest) -> None:
    print(f"place     {location}, version {manifest.version}, content {manifest.content}", *manifest.lines(), sep="\n")


def _say(label: str, text: str) -> None:
    if sys.stderr.isatty():  # a progress line may be visible
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
    print(f"{label:<9} {text}", flush=True)


@contextlib.contextmanager
def _line(unit: str = "samples") -> Iterator[Moved]:
    """Return a function that shows the progress in one line of a terminal."""
    shown, width = 0.0, 0

    def moved(label: str, done: int, total: int) -> None:
        nonlocal shown, width
        if not sys.stderr.isatty() or time.monotonic() - shown < EVERY_S:
            return
        shown = time.monotonic()
        text = f"{label:<9} {done:,} of {total:,} {unit}, {100 * done // total}%"
        width = max(width, len(text))
        sys.stderr.write(f"\r{text:<{width}}")
        sys.stderr.flush()

    try:
        yield moved
    finally:
        if width:
            sys.stderr.write(f"\r{'':<{width}}\r")
            sys.stderr.flush()


DATA = Command(
    description="Data sets in partition files, for data that is larger than memory.",
    examples=("ddlf data split mnist.npz /shared/mnist", "ddlf data info /shared/mnist"),
    actions={
        "split": action(
            "write a source as partition files",
            "Write arrays (.npz, .npy, a folder of .npy), a table (.csv, .parquet), samples (.tar, .tfrecord) or images "
            "(one folder per class) into a new folder, as partition files with a manifest. All samples are shuffled "
            "together, however large the source is. An interrupted write leaves no data set behind; run the same "
            "command again to continue. It starts over if the source or an option has changed.",
            _split_options,
            split,
            "ddlf data split mnist.npz /shared/mnist                       # x_train, y_train as x, y",
            "ddlf data split mnist.npz /shared/mnist-test --part test",
            "ddlf data split photos /shared/photos --image-size 64x64 --files 12",
            "ddlf data split photos /shared/photos --ragged x     # encoded, for ddlf.data.open(place, decode=...)",
            "ddlf data split table.csv /shared/table --label price --file-samples 100000",
            "ddlf data split shards /shared/shards --columns x=image,y=label    # a folder of .tar, .parquet, .tfrecord",
            "ddlf data split big.npz /shared/big --file-bytes 128MB --memory 2GB",
        ),
        "send": action(
            "copy its files to each worker's disk",
            "Copy to each machine of a cluster its part of a data set, into a folder of the same name, over the "
            "connections to its workers. For machines without a shared folder. Only missing files are sent, so the same "
            "command continues after an interruption.",
            _send_options,
            send,
            "ddlf data send /data/mnist --hosts pc1:9000,pc2:9000,pc3:9000 --copies 2",
            "ddlf data send /data/mnist --config cluster.yaml --copies 2",
        ),
        "repartition": action(
            "write a data set into more or fewer files",
            "Write the samples of a data set into more or fewer partition files, in the same order, as its next version. "
            "The previous version stays in use until all files are written, and its files stay for current readers "
            "until the next repartition. Run the same command again to continue after an interruption.",
            _repartition_options,
            repartition,
            "ddlf data repartition /shared/mnist --files 7",
            "ddlf data repartition s3://bucket/photos --file-bytes 32MB --remove-old",
        ),
        "info": action(
            "show its contents, and what a worker needs for it",
            "Show the manifest of a data set, and how much memory and disk a worker needs for it. Reads no data files.",
            _info_options,
            info,
            "ddlf data info /shared/mnist",
            "ddlf data info /shared/mnist --workers 8 --shuffle window:4",
        ),
        "verify": action(
            "check every byte",
            "Read all files and compare them with the manifest. The exit code is 0 if nothing is damaged.",
            _verify_options,
            verify,
            "ddlf data verify /shared/mnist",
        ),
        "export": action(
            "write all samples into one file",
            "Write all samples of a data set into one file, in the order of their ids: .npz, .parquet, .tar (as in "
            "WebDataset) or .tfrecord.",
            _export_options,
            export,
            "ddlf data export /shared/mnist mnist-again.npz",
        ),
    },
)
