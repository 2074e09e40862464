"""The states of parts after a round, in temporary files: the weights and the optimizer of a part. Runs on both sides.

Each part keeps its state, and another worker keeps a copy. So a round can begin again after a loss, and a lost part
is made again. The files have no names, so the system frees them when the process ends. They take no memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ddlf.errors import AppMissing, ProtocolError
from ddlf.training.checkpoints.tensors import dtype_of

Layout = list[tuple[str, str, tuple[int, ...]]]
"""Name, type and shape of each array of a state. ``weight_name`` and ``optimizer_name`` make the names."""
ALIGNED = 64
"""Each array begins at a multiple of this number of bytes."""
PIECE_BYTES = 4 << 20
"""Bytes of a state that travel in one message."""


def weight_name(index: int) -> str:
    """Return the name of a weight in a state, by its number in ``model.weights``."""
    return f"weight {index}"


def optimizer_name(index: int) -> str:
    """Return the name of a variable of the optimizer in a state, by its number in ``OptimizerState.paths``."""
    return f"optimizer {index}"


class State:
    """The state of a part, in a file.

    Args:
        layout: Its arrays.

    Attributes:
        layout: The argument.
        nbytes: Size of the file.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = [(name, kind, tuple(shape)) for name, kind, shape in layout]
        self._spans: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        end = 0
        for name, kind, shape in self.layout:
            begin = -(-end // ALIGNED) * ALIGNED
            self._spans[name] = begin, dtype_of(kind), shape
            end = begin + dtype_of(kind).itemsize * prod(shape)
        self.nbytes = max(end, 1)
        self._file, path = tempfile.mkstemp(prefix="ddlf-part-")
        os.unlink(path)
        self._closing = weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, self.nbytes)

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def put(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Write an array."""
        begin, kind, shape = self._spans[name]
        if (values.dtype, values.shape) != (kind, shape):
            raise ProtocolError(f"{name} is {values.dtype} {values.shape} instead of {kind} {shape}")
        self.write(begin, np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def get(self, name: str) -> np.ndarray[Any, Any]:
        """Return an array, read from the file."""
        begin, kind, shape = self._spans[name]
        return self.read(begin, kind.itemsize * prod(shape)).view(kind).reshape(shape)

    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays. They read from the file when they are used, and cannot be changed."""
        data = mmap.mmap(self._file, self.nbytes, access=mmap.ACCESS_READ)
        return {
            name: np.frombuffer(data, kind, prod(shape), begin).reshape(shape)
            for name, (begin, kind, shape) in self._spans.items()
        }

    def span(self, name: str) -> tuple[int, int]:
        """Return where an array begins in the file, and its number of bytes."""
        begin, kind, shape = self._spans[name]
        return begin, kind.itemsize * prod(shape)

    def write(self, begin: int, values: np.ndarray[Any, Any]) -> None:
        """Write bytes, an array of uint8."""
        data = memoryview(values.data)
        while len(data):
            written = os.pwrite(self._file, data, begin)
            begin, data = begin + written, data[written:]

    def read(self, begin: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return bytes as an array of uint8."""
        values = np.empty(max(0, min(nbytes, self.nbytes - begin)), np.uint8)
        done, data = 0, memoryview(values.data)
        while done < len(values) and (more := os.preadv(self._file, [data[done:]], begin + done)):
            done += more
        return values

    def close(self) -> None:
        """Free the file. Views of it stay valid."""
        self._closing()


class StateFiles:
    """States of parts on one machine, by the number of the part and the version of the weights."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], State] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._states

    def put(self, part: int, version: int, state: State) -> None:
        """Keep a state, in place of an earlier one of the same part and version."""
        if (before := self._states.pop((part, version), None)) is not None:
            before.close()
        self._states[part, version] = state

    def of(self, part: int, version: int) -> State:
        """Return the state of a part.

        Raises:
            AppMissing: It is not here.
        """
        if (part, version) not in self._states:
            raise AppMissing(f"the state of part {part + 1} in version {version} of the weights is not here")
        return self._states[part, version]

    @property
    def parts(self) -> set[int]:
        """The numbers of the parts with a state here."""
        return {part for part, _ in list(self._states)}

    def drop_before(self, version: int) -> None:
        """Free all states of earlier versions."""
        for key in [stored for stored in self._states if stored[1] < version]:
            self._states.pop(key).close()

    def close(self) -> None:
        """Free all states."""
        self.drop_before(1 << 62)


def in_slice(state: Mapping[str, np.ndarray[Any, Any]], names: Mapping[str, str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of a state under their names in a slice of a checkpoint, where weights are flat."""
    return {
        stored: state[name].reshape(-1) if name.startswith("weight") else state[name] for name, stored in names.items()
    }


Ask = Callable[..., Awaitable[Any]]
"""Calls a verb of the replica that has a state: ``layout`` or ``piece``."""


async def fetched(ask: Ask, part: int, version: int, names: Collection[str] | None = None) -> State:
    """Return the state of a part, piece by piece from another machine.

    Args:
        ask: Calls a verb of the replica that has the state.
        part, version: The state.
        names: The arrays to fetch; None for all.
    """
    layout: Sequence[Any] = await ask("layout", part, version)
    remote = State([(str(name), str(kind), tuple(map(int, shape))) for name, kind, shape in layout])
    if names is None:
        await _copied(ask, part, version, remote, (0, remote.nbytes), 0)
        return remote
    state = State([entry for entry in remote.layout if entry[0] in names])
    for name, _, _ in state.layout:
        await _copied(ask, part, version, state, remote.span(name), state.span(name)[0])
    return state


async def _copied(ask: Ask, part: int, version: int, state: State, span: tuple[int, int], target: int) -> None:
    """Copy bytes of the state on another machine, from a span of bytes to an offset in another state."""
    begin, nbytes = span
    for offset in range(0, nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, nbytes - offset)
        piece = np.asarray(await ask("piece", part, version, begin + offset, count))
        if piece.dtype != np.uint8 or len(piece) != count:
            raise ProtocolError(f"a piece of part {part + 1} has {piece.nbytes} bytes")
        state.write(target + offset, piece)
