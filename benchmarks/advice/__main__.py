"""Measure which defects the adviser finds, and how often it is wrong: ``python -m benchmarks.advice``.

    python -m benchmarks.advice [--quick] [--out FILE] [--part 1/2] [--seconds S]

The benchmark puts each defect of ``defects`` into a healthy program, runs the adviser on it, and trains it with three
seeds. A defect is harmful if it loses more accuracy than the spread of the healthy program's seeds. The benchmark then
applies the changes of ``--diff``, and does the same again. At the end it runs the adviser on healthy programs.

All of this takes about fifteen minutes on two cores. The benchmark appends each record to FILE, and skips the records
that FILE already has. ``--quick`` runs the quick level on all defects, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.advice.corpus import DEFECTS
from benchmarks.advice.table import Record, report
from benchmarks.measure import ROOT


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick level alone, and no training")
    parser.add_argument("--only", default="", help="only kinds, programs and rules that match this expression")
    parser.add_argument("--what", choices=("defects", "healthy", "all"), default="all")
    parser.add_argument("--out", type=Path, help="file of records, a line each")
    parser.add_argument("--part", type=_part, help="the part of the work that this process does, such as 1/2")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no measurement after this time")
    parser.add_argument("--untrained", action="store_true", help="advise, apply the diffs, and train nothing")
    parser.add_argument("--again", action="store_true", help="advise all again; take results of training from FILE")
    parser.add_argument("--report", action="store_true", help="only print the report of FILE")
    return parser


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    return int(number) - 1, int(of)


def main(argv: Sequence[str] | None = None) -> list[Record]:
    """Run the benchmark, print the report, and return the records."""
    options = arguments().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.out or Path(folder) / "records.jsonl"
        if options.quick or options.part is not None:
            for record in _quickly(options, Path(folder)) if options.quick else _all(options, Path(folder)):
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        elif not options.report:
            _in_two_processes(options)
        marks = {("", "", record.kind, record.base, record.mark) for record in DEFECTS}
        # Only records of today's corpus count.
        records = [record for record in records_in(options.out) if not record.get("text") or _key(record) in marks]
    if options.part is None:
        print("\n".join(report(records)))
    return records


def records_in(path: Path) -> list[Record]:
    """Return the records of a file; for each defect and program the last one."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({_key(record): record for record in records}.values())


def _key(record: Record) -> tuple[str, ...]:
    return tuple(record.get(name, "") for name in ("programs", "whole", "kind", "base", "text"))


def _in_two_processes(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.advice", "--out", str(options.out), "--what", options.what]
    command += (
        ["--only", options.only]
        + ["--again"] * options.again
        + ["--untrained"] * options.untrained
        + ([] if options.seconds == float("inf") else ["--seconds", str(options.seconds)])
    )
    running = [subprocess.Popen([*command, "--part", f"{n}/2"], cwd=ROOT) for n in (1, 2)]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("a part of the benchmark failed")


def _quickly(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Run the quick level on each defect. Nothing is trained, so every defect counts as harmful."""
    from benchmarks.advice.trial import quickly

    number, parts = options.part or (0, 1)
    chosen = [defect for defect in DEFECTS if _is_meant(options, defect.kind, defect.base, *defect.rules)]
    yield from (quickly(defect, folder) for defect in chosen[number::parts])


def _is_meant(options: argparse.Namespace, *names: str) -> bool:
    return any(re.search(options.only, name) for name in names)


def _all(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Measure the defects and programs of one part that have no record yet."""
    from benchmarks.advice.trial import of_base, of_defect
    from benchmarks.advice.wholes import of_whole, programs

    number, parts = options.part
    end = time.monotonic() + options.seconds
    earlier = records_in(options.out)
    bases: dict[str, Any] = {record["programs"]: record for record in earlier if "programs" in record}
    done = {_key(record): record for record in earlier}
    chosen = [defect for defect in DEFECTS if _is_meant(options, defect.kind, defect.base, *defect.rules)]
    repeated: set[str] = set()
    chosen.sort(key=lambda defect: defect.base)
    for defect in chosen[len(chosen) * number // parts : len(chosen) * (number + 1) // parts]:
        before = done.get(("", "", defect.kind, defect.base, defect.mark))
        if (
            before and not options.again and (options.untrained or not before.get("untrained"))
        ) or options.what == "healthy":
            continue
        if time.monotonic() > end:
            return
        if defect.base not in bases or not (options.untrained or bases[defect.base]["scores"]):
            bases[defect.base] = of_base(defect.base, folder, None, not options.untrained)
            yield bases[defect.base]
        elif options.again and defect.base not in repeated:
            bases[defect.base] = of_base(defect.base, folder, bases[defect.base])
        repeated.add(defect.base)
        yield of_defect(defect, bases[defect.base], folder, before, not options.untrained)
    healthy = (
        [program for program in programs(folder) if _is_meant(options, *program[:2])]
        if options.what != "defects"
        else []
    )
    for whole in healthy[number::parts]:
        if ("", whole[1], "", "", "") in done and not options.again:
            continue
        if time.monotonic() > end:
            return
        yield of_whole(*whole, folder)


if __name__ == "__main__":
    main()
