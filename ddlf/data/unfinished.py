"""Notes about the finished files of an incomplete version, so that an interrupted writer can continue.

The notes are in a folder of the writer's machine. A note is written after its files are durable. A writer that
continues does not trust it, and compares hashes. Notes belong to a plan, which describes the source and the
result. A writer with another plan removes them.
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
    """A folder with notes, and with temporary files of the version that is being made.

    Args:
        folder: The folder; ``begin`` creates it.
        plan: Describes the source and the result, as texts by name. Without a plan, the work cannot be continued.

    Attributes:
        folder: The folder.
        goes_on: Whether the folder has work with the same plan.
        other: Names of the texts in which the found plan differs.
    """

    def __init__(self, folder: Path, plan: Mapping[str, str] | None = None) -> None:
        self.folder, self._plan = folder, dict(plan or {})
        there = _read(folder / PLAN)
        self.goes_on = bool(plan) and there == self._plan
        known = there if isinstance(there, dict) else {}
        self.other = [name for name, text in self._plan.items() if known and known.get(name) != text]

    def begin(self) -> None:
        """Create the folder, and write the plan."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._plan and not self.goes_on:
            _write(self.folder / PLAN, self._plan)

    def lasts(self, error: BaseException) -> bool:
        """Return whether the work can be continued after this error."""
        noted = any((self.folder / name).exists() for name in (FILES, HEAPS))
        return noted and (self.folder / PLAN).exists() and isinstance(error, KeyboardInterrupt | DatasetError)

    @contextlib.contextmanager
    def watched(self, say: Callable[[], None]) -> Iterator[None]:
        """Call ``say`` if the block fails and its work can be continued."""
        try:
            yield
        except BaseException as error:
            if self.lasts(error):
                say()
            raise

    def forget(self) -> None:
        """Remove the plan, so that no writer continues the work."""
        (self.folder / PLAN).unlink(missing_ok=True)

    def files(self) -> list[tuple[PartitionFile, str]]:
        """Return the finished partition files in order, each with its ``Place.mark``."""
        found = []
        with contextlib.suppress(OSError, ValueError, TypeError):  # the last line may be incomplete
            for line in (self.folder / FILES).read_text().splitlines():
                mark, facts = json.loads(line)
                found.append((PartitionFile(**facts), str(mark)))
        return found

    def add(self, files: Iterable[tuple[PartitionFile, str]], *, anew: bool = False) -> None:
        """Note finished partition files. ``anew`` replaces all earlier notes."""
        with open(self.folder / FILES, "w" if anew else "a") as file:
            file.writelines(json.dumps([mark, asdict(each)]) + "\n" for each, mark in files)
            file.flush()
            os.fsync(file.fileno())


class Heaps:
    """Samples on a disk, with a file for each heap.

    Files of an earlier call are used again if they have the noted hashes.

    Args:
        left: The folder of the heaps.
        buckets: Buckets of each heap.
        kind: Type of a sample with its bucket.

    Attributes:
        kind: Type of a sample with its bucket.
        samples: Number of samples that are durable on the disk.
        labels: Count of each label among them, for a stratified split.
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
        ]:  # after a complete pass, heaps may be gone already; the others are compared when they are read
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
        """Bytes of all samples on the heaps."""
        return sum(self._lengths)

    def throw(self, heap: int, rows: Rows) -> None:
        """Append samples to a heap."""
        with open(self._path(heap), "ab") as file:
            file.write(rows.data)
        self._hashes[heap].update(rows.data)
        self._lengths[heap] += rows.nbytes

    def note(self, samples: int, labels: Mapping[int, int], *, whole: bool) -> None:
        """Make all samples on the heaps durable, and write a note about them.

        Args:
            samples: Number of these samples.
            labels: Count of each label among them.
            whole: Whether these are all samples of the source.
        """
        for heap in range(len(self._lengths)):
            with contextlib.suppress(FileNotFoundError), open(self._path(heap), "rb") as file:
                os.fsync(file.fileno())
        self._noted = [each.hexdigest() for each in self._hashes]
        self.samples, self.labels = samples, dict(labels)
        facts = {"samples": samples, "whole": whole, "each": self._each, "labels": list(labels.items())}
        _write(self._folder / HEAPS, facts | {"lengths": self._lengths, "hashes": self._noted})

    def length(self, heap: int) -> int:
        """Return the number of samples on a heap."""
        return self._lengths[heap] // self.kind.itemsize

    def read(self, heap: int) -> Rows:
        """Return all samples of a heap.

        Raises:
            DatasetDamaged: The file differs from the thrown samples.
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
        """Remove the files of all heaps that end within the first ``samples`` samples."""
        for heap, end in enumerate(np.cumsum(self._lengths) // self.kind.itemsize):
            if end <= samples:
                self._path(heap).unlink(missing_ok=True)

    def _path(self, heap: int) -> Path:
        return self._folder / f"heap-{heap}"


def _read(path: Path) -> Any:
    """Return the content of a note; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, facts: Any) -> None:
    """Replace a note in one step."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
