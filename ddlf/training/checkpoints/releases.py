"""The account of a run's releases: a file that counts each release before it leaves. Runs on the master and on a server of peers.

Each line is a CRC-32 in hexadecimal, a space, and JSON. The first line has the terms of the account, each later one a release.
A line is on the disk before its release leaves. So after any end of the process, the account has each release that has left,
and at most one that has not. An incomplete last line is removed: its release has not left. Any other damage is an error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ddlf.errors import BudgetSpent, CheckpointMismatch, ConfigError
from ddlf.privacy.accountant import DELTA, Accountant, Cost, Noise, check_budget, check_delta, dp_accounting
from ddlf.training.checkpoints.durable import damaged, explained, replace, sync, write_new

RELEASES = "releases.log"
"""The file, in the folder of the run."""
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of an account. A resumed run has the same terms.

    Args:
        unit: The protected unit: a whole ``"peer"`` or private worker, or one ``"sample"``.
        clip: Most norm of an update, or of the gradient of a sample.
        delta: The probability that epsilon does not hold.

    Raises:
        ConfigError: A value is invalid.
    """

    unit: Literal["peer", "sample"]
    clip: float
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not (isfinite(self.clip) and self.clip > 0):
            raise ConfigError(f"clip must be a finite number above 0, got {self.clip}")
        check_delta(self.delta)


class ReleaseAccount:
    """The account of one run. One thread at a time uses it. ``begin`` and ``resume`` open it.

    Attributes:
        terms: The terms of the account.
        budget: Largest epsilon of a member; None for no limit.
        accountant: The epsilon of each member.
        last: The newest releases, as many as have no member twice.
    """

    def __init__(self, path: Path | None, terms: Terms, budget: float | None, size: int, releases: list[Cost]) -> None:
        dp_accounting()  # a run without it would fail at its first release
        self.terms = terms
        self.budget = budget
        self.accountant = Accountant(terms.delta, releases)
        self.last: list[Cost] = []
        for release in releases:
            self._note(release)
        self._path = path
        self._size = size

    @classmethod
    def begin(cls, folder: Path | None, terms: Terms, budget: float | None = None) -> ReleaseAccount:
        """Begin the account of a new run.

        Args:
            folder: The folder of the run; None for a run without files, which no other process can resume.
            terms: The terms of the account.
            budget: Largest epsilon of a member; None for no limit.

        Raises:
            CheckpointError: The disk refuses, or the folder already has an account.
            ConfigError: The budget is invalid, or dp-accounting is not installed.
        """
        check_budget(budget)
        if folder is None:
            return cls(None, terms, budget, 0, [])
        path, line = folder / RELEASES, _line({"format": FORMAT, **asdict(terms)})
        account = cls(path, terms, budget, len(line), [])
        with explained(folder, "begin the account of releases in", need=len(line)):
            write_new(path, line)
            sync(folder)
        return account

    @classmethod
    def resume(cls, folder: Path, terms: Terms, budget: float | None = None, *, least: int = 0) -> ReleaseAccount:
        """Continue the account of an earlier run.

        Args:
            folder: The folder of the run.
            terms: The terms, as before.
            budget: Largest epsilon of a member, which may differ from the earlier one; None for no limit.
            least: Number of releases that have surely left, such as the releases in a checkpoint.

        Raises:
            CheckpointError: The account is missing, damaged, or older than the checkpoint, or it has other terms.
            ConfigError: The budget is invalid, or dp-accounting is not installed.
        """
        check_budget(budget)
        path = folder / RELEASES
        if not path.exists():
            raise CheckpointMismatch(
                f"{path} is missing, so the earlier releases of this run cannot be counted",
                hint="put the file back, or begin a new run",
            )
        with explained(folder, "read the account of releases in"):
            lines, size = _read(path)
        if not lines:
            raise damaged(path, "the terms of the account", "no complete line")
        _check_terms(lines[0], terms)
        try:
            releases = [_release(data) for data in lines[1:]]
        except (KeyError, TypeError, ConfigError) as error:
            raise damaged(path, "releases of this version", str(error)) from error
        account = cls(path, terms, budget, size, releases)
        account.check_complete(least)
        if size < path.stat().st_size:
            with explained(folder, "repair the account of releases in"):
                os.truncate(path, size)
                sync(path)
        return account

    def check_complete(self, least: int) -> None:
        """Refuse an account that is older than the run.

        Args:
            least: Number of releases that have surely left.

        Raises:
            CheckpointMismatch: It has fewer releases.
        """
        if self.accountant.releases < least:
            raise CheckpointMismatch(
                f"{self._path} counts {self.accountant.releases:,} releases, and at least {least:,} have left",
                hint="put back the newest copy of the file, or begin a new run",
            )

    def continue_with(self, terms: Terms, budget: float | None) -> ReleaseAccount:
        """Return this account for the next run of the same process.

        Raises:
            CheckpointMismatch: The run has other terms.
            ConfigError: The budget is invalid.
        """
        check_budget(budget)
        _check_terms(asdict(self.terms), terms)
        self.budget = budget
        return self

    def spent(self, release: Cost) -> str:
        """Return why a release would exceed the budget; empty if it would not."""
        try:
            self.check(release)
        except BudgetSpent as error:
            return error.message
        return ""

    def check(self, release: Cost) -> None:
        """Refuse a release that would exceed the budget.

        Raises:
            BudgetSpent: Names the epsilon and the budget.
        """
        if self.budget is None:
            return
        if (after := self.accountant.after(release)) > self.budget:
            raise BudgetSpent(
                f"epsilon is {self.accountant.worst():.4g} at delta = {self.terms.delta:g}, and another release would make "
                f"it {after:.4g}, above the privacy budget of {self.budget:g}",
                hint="the model of the last release can be used; a new release needs a larger privacy_budget",
            )

    def count(self, release: Cost, *, has_left: bool = False) -> None:
        """Count a release. After the return, it may leave, also if the power is cut.

        Args:
            release: The release.
            has_left: Whether it has left already. Then it counts, even above the budget.

        Raises:
            BudgetSpent: It would exceed the budget.
            CheckpointError: The disk refuses.

        On failure:
            It is not counted, and must not leave.
        """
        if not has_left:
            self.check(release)
        if self._path is not None:
            self._append(self._path, release)
        self.accountant.add(release)
        self._note(release)

    def check_next(self) -> None:
        """Refuse to continue if releases like the last ones would exceed the budget.

        Raises:
            BudgetSpent: Names the epsilon and the budget.
        """
        for release in self.last:
            self.check(release)

    def copy_to(self, folder: Path) -> None:
        """Continue in another folder. The earlier folder keeps its account as it is.

        Raises:
            CheckpointError: The disk refuses.
        """
        if self._path is None or self._path.parent.resolve() == folder.resolve():
            return
        with explained(folder, "copy the account of releases to", need=self._size):
            replace(folder / RELEASES, self._path.read_bytes()[: self._size])
        self._path = folder / RELEASES

    def _note(self, release: Cost) -> None:
        members = set(release.members)
        repeated = [
            position for position, earlier in enumerate(self.last, 1) if not members.isdisjoint(earlier.members)
        ]
        self.last = [*self.last[max(repeated, default=0) :], release]

    def _append(self, path: Path, release: Cost) -> None:
        line = _line(
            {
                "members": list(release.members),
                "noise": release.noise.multiplier,
                "sampled": release.noise.sampled,
                "steps": release.steps,
            }
        )
        with explained(path.parent, "count a release in", need=len(line)):
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.ftruncate(file, self._size)  # the rest of a line that could not be written
                if os.pwrite(file, line, self._size) < len(line):
                    raise OSError(28, "No space left on device")
            finally:
                os.close(file)
            sync(path)
        self._size += len(line)


def _check_terms(earlier: Mapping[str, Any], terms: Terms) -> None:
    for name, value in asdict(terms).items():
        if earlier.get(name) != value:
            raise CheckpointMismatch(
                f"this run has {name} = {value}, and its earlier releases had {earlier.get(name)}",
                hint="use the earlier value, or begin a new run",
            )


def _line(data: dict[str, Any]) -> bytes:
    text = json.dumps(data).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of an account, and the size of its complete lines."""
    content, lines, size = path.read_bytes(), [], 0
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        crc, _, text = line[:-1].partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            raise damaged(path, "a line with its CRC-32", f"another line {number}")
        lines.append(json.loads(text))
        size += len(line)
    return lines, size


def _release(data: dict[str, Any]) -> Cost:
    noise = Noise(multiplier=data["noise"], sampled=data["sampled"])
    return Cost(members=tuple(data["members"]), noise=noise, steps=data["steps"])
