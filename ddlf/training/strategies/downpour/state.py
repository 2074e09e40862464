"""The whole state of a Downpour server as a value. Runs on both sides.

The master starts servers from such states. Backups, new owners and checkpoints receive them. A state is either a
``ServerState``, which has its values, or a ``StoredState``, whose values are in a slice of a checkpoint. The master
keeps the counters of all servers in the run's state, as small arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows, Slice, overlapped
from ddlf.algorithms.push_rules import Last
from ddlf.algorithms.weights import Tensor, Weights
from ddlf.training.checkpoints.slices import PUSHED, WEIGHTS, part_name, read_part
from ddlf.training.messages import Message

Ranges = tuple[Slice, Slice]
"""A server's ranges of the row of trained values and of the row of untrained values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(Message):
    """The settings of a server, which never change.

    Args:
        part: Its range of the row of trained values.
        rule: Push rule, as text.
        staleness: Rule for the weight of a push that was computed from old weights, as text.
        codec: Codec of trained values to replicas, as text.
        collects: Number of pushes in a step.
        every: Number of pushes between two updates of the backups.
    """

    part: Slice
    rule: str
    staleness: str
    codec: str = "float32"
    collects: int = 1
    every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters(Message):
    """The small numbers in a server's state.

    Args:
        version: Number of steps so far.
        received: Number of pushes so far.
        count: Number of pushes that wait for the next step, if several pushes make one step.
        factors: Sum of the weights of these pushes.
        last: Last push of each replica.
    """

    version: int = 0
    received: int = 0
    count: int = 0
    factors: float = 0.0
    last: Mapping[int, Last] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        last = [[replica, *push] for replica, push in sorted(self.last.items())]
        return {**Message.to_message(self), "last": last}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the numbers that a message contains."""
        last = {int(replica): Last(*map(int, push)) for replica, *push in message["last"]}
        return cls(**{**message, "last": last})

    @staticmethod
    def to_arrays(counters: Sequence[Counters]) -> Weights:
        """Return the counters of all servers as arrays, for a checkpoint."""
        last = [
            [shard, replica, *push] for shard, of in enumerate(counters) for replica, push in sorted(of.last.items())
        ]
        return [
            np.array([[of.version, of.received, of.count] for of in counters], np.int64),
            np.array([of.factors for of in counters], np.float64),
            np.array(last, np.int64).reshape(-1, 7),
        ]

    @classmethod
    def from_arrays(cls, arrays: Weights, shard: int) -> Self:
        """Return the counters of one server from the arrays of ``to_arrays``."""
        numbers, factors, last = arrays
        version, received, count = map(int, numbers[shard])
        pushes = {int(row[1]): Last(*map(int, row[2:])) for row in last if row[0] == shard}
        return cls(version=version, received=received, count=count, factors=float(factors[shard]), last=pushes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State(Message):
    """The common part of all states of a server.

    Args:
        settings: The settings of the server.
        counters: Its counters.
    """

    settings: ServerSettings
    counters: Counters = Counters()

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the state that a message contains."""
        settings, counters = message["settings"], message["counters"]
        parts = {
            "settings": ServerSettings.from_message(settings),
            "counters": Counters.from_message(counters),
        }
        return cls(**{**message, **parts})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgress:
    """How far a server is, which the master asks for again and again.

    Args:
        shard: Number of the server, from 0.
        version: Number of its steps so far.
        reached: For each replica, round and number of the last push that the server has.
    """

    shard: int
    version: int
    reached: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Summary:
    """The part of a state that the master needs if the values are written into a checkpoint.

    Args:
        counters: The counters of the server.
        rule_rows: Number of rows of the push rule's state.
    """

    counters: Counters
    rule_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState(_State):
    """The whole state of a server at one moment. Its arrays never change.

    Args:
        settings, counters: The settings and the counters of the server.
        weights: Its trained values.
        rest: Its untrained values that change during training.
        rule_rows: Arrays of the push rule's state. If pushes wait for the next step, their sum follows.
    """

    weights: Row
    rest: Row
    rule_rows: Sequence[Row] = ()

    def to_arrays(self, rows: Rows, part: Ranges, names: Sequence[str]) -> dict[str, Row]:
        """Return the values as named arrays, to be written as one slice (file) of a checkpoint.

        Args:
            rows: Layout of the model's weights.
            part: The server's ranges.
            names: Paths of the weights.
        """
        arrays = {}
        for span, row, indices in zip(part, (self.weights, self.rest), (rows.trained, rows.rest), strict=True):
            for i, low, values in rows.slices(span, row, indices):
                arrays[part_name(WEIGHTS, low, f"{i:04d} {names[i]}")] = values
        for number, row in enumerate(self.rule_rows):
            arrays[part_name(PUSHED, part[0][0], f"{number:04d}")] = row
        return arrays

    def summary(self) -> Summary:
        """Return the part that the master needs if the values are written into a checkpoint."""
        return Summary(self.counters, len(self.rule_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState(_State):
    """A server's state whose values are in a slice of a checkpoint, which ``ServerState.to_arrays`` made.

    Args:
        settings, counters: The settings and the counters of the server.
        rest: Its range of the row of untrained values.
        names: Paths of the weights.
        rule_rows: Number of rows of the push rule's state.
    """

    rest: Slice
    names: Sequence[str]
    rule_rows: int

    def loaded(self, rows: Rows, arrays: Mapping[str, Tensor]) -> ServerState:
        """Return the state with its values.

        Args:
            rows: Layout of the model's weights.
            arrays: Arrays of the server's slice of the checkpoint.

        Raises:
            CheckpointCorrupt: A part is missing, or has the wrong size.
        """

        def of(name: str, length: int) -> Tensor:
            return np.asarray(read_part(arrays, name, length), np.float32)

        def row(indices: Sequence[int], span: Slice) -> Row:
            values = [
                of(part_name(WEIGHTS, low, f"{indices[at]:04d} {self.names[indices[at]]}"), high - low)
                for at, low, high in overlapped([rows.like[i] for i in indices], span)
            ]
            return np.concatenate(values) if values else np.zeros(0, np.float32)

        begin, end = self.settings.part
        numbers = range(self.rule_rows)
        return ServerState(
            settings=self.settings,
            counters=self.counters,
            weights=row(rows.trained, (begin, end)),
            rest=row(rows.rest, self.rest),
            rule_rows=[of(part_name(PUSHED, begin, f"{number:04d}"), end - begin) for number in numbers],
        )
