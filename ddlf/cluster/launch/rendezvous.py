"""Where the tasks of one job meet: how each finds the master's addresses and the token of the run."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Meeting:
    """The facts that a task needs to join the master.

    Args:
        gates: Addresses of the gate, as ``ddlf-worker --join`` takes them.
        token: The token of the run.
    """

    gates: str
    token: bytes = field(repr=False)

    def encode(self, **further_facts: str) -> bytes:
        """Return the facts, and more of them, as JSON."""
        return json.dumps({"gates": self.gates, "token": self.token.decode(), **further_facts}).encode()

    @classmethod
    def decode(cls, data: bytes, **expected: str) -> Meeting | None:
        """Return the facts in some JSON; None if it is something else, or has not these other values."""
        with contextlib.suppress(ValueError, KeyError, AttributeError):
            facts = json.loads(data)
            if all(facts[name] == value for name, value in expected.items()):
                return cls(facts["gates"], facts["token"].encode())
        return None


class MeetingPoint(ABC):
    """A way for the master to tell the other tasks of its job the facts. Only this user can read them."""

    @abstractmethod
    def open(self, meeting: Meeting) -> None:
        """Begin to tell the facts. Runs on the master."""

    @abstractmethod
    def forget_facts(self) -> None:
        """Forget what can be forgotten, because each task has the facts now. Runs on the master."""

    @abstractmethod
    def close(self) -> None:
        """End this. Runs on the master."""

    @abstractmethod
    def find(self) -> Meeting | None:
        """Return the facts; None if the master has not begun, or cannot be found this way. Runs in the other tasks."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the master has ended the run, as far as this shows it. Runs in the other tasks."""

    @abstractmethod
    def reason(self) -> str:
        """Return why ``find`` has found nothing, for an error."""


class MeetingFile(MeetingPoint):
    """A file in a folder that all tasks share, which only its owner can read.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, meeting: Meeting) -> None:
        """Write the file, so that no task sees an incomplete one."""
        self._write(meeting.encode())

    def forget_facts(self) -> None:
        """Empty the file. If an engine kills all processes at once, it remains, and then without a token."""
        if self._path.exists():
            self._write(b"{}")

    def _write(self, data: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.name}.")  # mode 0600
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, self._path)

    def close(self) -> None:
        """Remove the file, so that no task waits for the master."""
        self._path.unlink(missing_ok=True)

    def find(self) -> Meeting | None:
        """Return the facts; None without a file that only this user can have written."""
        with (
            contextlib.suppress(OSError),
            open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file,
        ):
            facts = os.fstat(file.fileno())
            if facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
                return Meeting.decode(file.read())
        return None

    def is_over(self) -> bool:
        return not self._path.exists()

    def reason(self) -> str:
        return f"no file {self._path}"
