"""Values that travel to a worker, or between workers, as plain data. Runs on both sides.

Workers accept only plain data from each other (``ddlf.worker.peers``), so a value travels as a dict of its fields. Only
``to_message`` and ``from_message`` know these names. Arrays are not copied. A small answer of a worker to the master
needs no message, because ``ddlf.rpc.messages`` sends dataclasses in results as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Message:
    """The base of dataclasses whose values travel as messages."""

    def to_message(self) -> dict[str, Any]:
        """Return the value as plain data for the network."""
        return {
            name: value.to_message() if isinstance(value := getattr(self, name), Message) else value
            for name in self.__dataclass_fields__
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the value that a message contains."""
        return cls(**message)
