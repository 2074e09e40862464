"""What is finished of a version that is being made, so that what is broken off can go on. Notes in a folder of the machine that makes it.

A note is written when what it tells of is on the disk for good, and is not believed: who goes on compares hashes. Notes are of one plan, which
says what is made of what; for any other they are nobody's, and are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.data.manifest import PartitionFile
from ddlf.data.rows import Rows
from ddlf.errors import DatasetDamaged, DatasetError

PLAN, FILES, HEAPS = "plan.json", "files.jsonl", "heaps.json"


class Unfinished:
    """A folder with such notes, and with what else is only needed until a version is made.

    Args:
        folder: It is made by ``begin``.
        plan: What is made of what, as texts by name; none for what nobody goes on with.

    Attributes:
        folder: As it was given.
        goes_on: Whether what is there is of the same plan.
        other: Names of what is different in the plan of what is there.
    """

    def __init__(self, folder: Path, plan: Mapping[str, str] | None = None) -> None:
        self.folder, self._plan = folder, dict(plan or {})
        there = _read(folder / PLAN)
        self.goes_on = bool(plan) and there == self._plan
        known = there if isinstance(there, dict) else {}
        self.other = [name for name, text in self._plan.items() if known and known.get(name) != text]

    def begin(self) -> None:
        """Make the folder, and say what is made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._plan and not self.goes_on:
            _write(self.folder / PLAN, self._plan)

    def lasts(self, error: BaseException) -> bool:
        """Whether it is worth to go on with, after this error."""
        noted = any((self.folder / name).exists() for name in (FILES, HEAPS))
        return noted and (self.folder / PLAN).exists() and isinstance(error, KeyboardInterrupt | DatasetError)

    @contextlib.contextmanager
    def watched(self, say: Callable[[], None]) -> Iterator[None]:
        """Around what is made: ``say`` is called where that is broken off and can go on."""
        try:
            yield
        except BaseException as error:
            if self.lasts(error):
                say()
            raise

    def forget(self) -> None:
        """Let nobody go on with it."""
        (self.folder / PLAN).unlink(missing_ok=True)

    def files(self) -> list[tuple[PartitionFile, str]]:
        """Partition files that were finished, in order, each with ``Place.mark`` of it."""
        found = []
        with contextlib.suppress(OSError, ValueError, TypeError):  # the last line may be half of one
            for line in (self.folder / FILES).read_text().splitlines():
                mark, facts = json.loads(line)
                found.append((PartitionFile(**facts), str(mark)))
        return found

    def add(self, files: Iterable[tuple[PartitionFile, str]], *, anew: bool = False) -> None:
        """Note finished partition files; ``anew`` in place of all that were noted."""
        with open(self.folder / FILES, "w" if anew else "a") as file:
            file.writelines(json.dumps([mark, asdict(each)]) + "\n" for each, mark in files)
            file.flush()
            os.fsync(file.fileno())


class Heaps:
    """Samples on a disk, a file for each heap that they are thrown on. What is there of an earlier call is taken over if it has the noted hashes.

    Args:
        left: Where they are.
        buckets: Buckets of each heap.
        kind: Type of a sample with its bucket.

    Attributes:
        kind: As it was given.
        samples: Samples that are on the disk for good.
        labels: Of each label how many of these have it, where that matters.
    """

    def __init__(self, left: Unfinished, buckets: Sequence[range], kind: np.dtype[Any]) -> None:
        self._folder, self.kind = left.folder, kind
        count, self._each = len(buckets), len(buckets[0])
        self.samples, self.labels = 0, dict[int, int]()
        self._lengths, self._hashes = [0] * count, [hashlib.sha256() for _ in range(count)]
        self._noted = [""] * count
        noted: Any = left.goes_on and _read(left.folder / HEAPS)
        same = noted and (noted["each"], len(noted["lengths"])) == (self._each, count)
        if not same or not self._take_over(noted):
            (left.folder / HEAPS).unlink(missing_ok=True)
            for path in left.folder.glob("heap-*"):
                path.unlink()

    def _take_over(self, noted: dict[str, Any]) -> bool:
        lengths, hashes = noted["lengths"], noted["hashes"]
        if not noted[
            "whole"
        ]:  # those of a pass that is over may be gone by now; others are compared when they are read
            found = [hashlib.sha256() for _ in lengths]
            for heap, length in enumerate(lengths):
                with contextlib.suppress(FileNotFoundError), open(self._path(heap), "r+b") as file:
                    while length > 0 and (data := file.read(min(length, 2**20))):
                        found[heap].update(data)
                        length -= len(data)
                    file.truncate(lengths[heap])
            if [each.hexdigest() for each in found] != hashes:
                return False
            self._hashes = found
        self._lengths, self._noted = lengths, hashes
        self.samples, self.labels = noted["samples"], dict(noted["labels"])
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all that was thrown."""
        return sum(self._lengths)

    def throw(self, heap: int, rows: Rows) -> None:
        """Put samples on a heap."""
        with open(self._path(heap), "ab") as file:
            file.write(rows.data)
        self._hashes[heap].update(rows.data)
        self._lengths[heap] += rows.nbytes

    def note(self, samples: int, labels: Mapping[int, int], *, whole: bool) -> None:
        """Have all that was thrown on the disk for good.

        Args:
            samples: How many that is.
            labels: Of each label how many.
            whole: Whether that is all.
        """
        for heap in range(len(self._lengths)):
            with contextlib.suppress(FileNotFoundError), open(self._path(heap), "rb") as file:
                os.fsync(file.fileno())
        self._noted = [each.hexdigest() for each in self._hashes]
        self.samples, self.labels = samples, dict(labels)
        facts = {"samples": samples, "whole": whole, "each": self._each, "labels": list(labels.items())}
        _write(self._folder / HEAPS, facts | {"lengths": self._lengths, "hashes": self._noted})

    def length(self, heap: int) -> int:
        """Samples of a heap."""
        return self._lengths[heap] // self.kind.itemsize

    def read(self, heap: int) -> Rows:
        """All samples of a heap.

        Raises:
            DatasetDamaged: They are not what was thrown.
        """
        path = self._path(heap)
        rows: Rows = np.fromfile(path, self.kind) if path.exists() else np.empty(0, self.kind)
        if hashlib.sha256(rows.data).hexdigest() != self._noted[heap]:
            (self._folder / HEAPS).unlink()
            raise DatasetDamaged(
                f"{path} is damaged, where samples are kept while a data set is made", hint="run it again"
            )
        return rows

    def remove(self, samples: int) -> None:
        """Give back the disk of the heaps that have none but the first so many samples in their order."""
        for heap, end in enumerate(np.cumsum(self._lengths) // self.kind.itemsize):
            if end <= samples:
                self._path(heap).unlink(missing_ok=True)

    def _path(self, heap: int) -> Path:
        return self._folder / f"heap-{heap}"


def _read(path: Path) -> Any:
    """What a note says; None where there is none, or half of one."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, facts: Any) -> None:
    """Write a note in place of what was there, in one step."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
