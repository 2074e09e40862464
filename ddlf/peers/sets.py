"""The one layout of a set: on the wire, in the journal, and as a file. Pure.

It is a safetensors file: a u64 with the length of a JSON text, the text, then the bytes of all tensors. The layout of a
model is fixed. Wider types come first, then the order of the model. There is no metadata, and the text is padded with
spaces so that the data begins at a multiple of 8. So all sets of a model begin with the same bytes, and have the same
length. Each tensor begins at a multiple of its type's size, as views of typed arrays in a browser need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ddlf.algorithms.weights import is_float, is_float_type
from ddlf.errors import ConfigError
from ddlf.events.record import size
from ddlf.training.checkpoints.tensors import ML_TYPES, TYPES, dtype_of

Array = np.ndarray[Any, Any]
NAMES = {name: short for short, name in {**TYPES, **ML_TYPES}.items()}
"""The name of each type in a safetensors file."""
MOST_HEADER_BYTES = 10 * 2**20


class Layout:
    """The layout of the sets of one model.

    Args:
        tensors: For each tensor, in the order of the model: its name, such as ``dense/kernel``, its shape and its type.

    Attributes:
        names: Names of the tensors, in the order of the model.
        header: The first bytes of each set.
        bytes: Length of a set.

    Raises:
        ConfigError: A tensor has a type that safetensors files cannot contain, or the model has no weights.
    """

    def __init__(self, tensors: Sequence[tuple[str, tuple[int, ...], str]]) -> None:
        if not any(is_float_type(dtype_of(kind)) for _, _, kind in tensors):
            raise ConfigError("the model has no weights to train", hint="add a layer with weights")
        self.tensors = tuple((name, tuple(shape), kind) for name, shape, kind in tensors)
        self.names = [name for name, _, _ in tensors]
        for name, _, kind in self.tensors:
            if kind not in NAMES:
                raise ConfigError(f"the weight {name!r} has the type {kind}, which a set cannot contain")
        self._types = [dtype_of(kind) for _, _, kind in self.tensors]
        widths = [kind.itemsize for kind in self._types]
        table: dict[str, Any] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        at = 0
        for index in sorted(range(len(self.tensors)), key=lambda index: -widths[index]):
            name, shape, kind = self.tensors[index]
            end = at + widths[index] * prod(shape)
            table[name] = {"dtype": NAMES[kind], "shape": list(shape), "data_offsets": [at, end]}
            self._spans[index] = at, end
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self.header) + at

    @property
    def digest(self) -> str:
        """SHA-256 of the header: two sides with the same digest have the same layout."""
        return hashlib.sha256(self.header).hexdigest()

    def encode(self, weights: Sequence[Array]) -> bytes:
        """Return weights, in the order of the model, as the bytes of a set."""
        parts: list[bytes | memoryview] = [self.header]
        for index in self._spans:
            _, shape, kind = self.tensors[index]
            array = np.asarray(weights[index], order="C")
            if array.shape != shape or array.dtype.name != kind:
                actual = f"{array.dtype} {array.shape}"
                raise ConfigError(f"the weight {self.names[index]!r} is {actual}, and must be {kind} {shape}")
            parts.append(array.tobytes())
        return b"".join(parts)

    def decode(self, data: bytes) -> list[Array]:
        """Return the weights in a set, in the order of the model. The arrays cannot be written to.

        Args:
            data: Bytes that ``fault`` accepts.
        """
        begin = len(self.header)
        result = []
        for index, (_, shape, _) in enumerate(self.tensors):
            at, end = self._spans[index]
            result.append(np.frombuffer(memoryview(data)[begin + at : begin + end], self._types[index]).reshape(shape))
        return result

    def fault(self, data: bytes) -> str:
        """Return why these bytes are not a set of this model; empty if they are one."""
        if data[: len(self.header)] != self.header:
            return self._fault_of_header(data)
        if len(data) != self.bytes:
            return f"the set has {size(len(data))}, and a set of this model has {size(self.bytes)}"
        return ""

    def not_finite(self, weights: Sequence[Array]) -> str:
        """Return which weight has NaN or infinite values; empty if none has."""
        for name, weight in zip(self.names, weights, strict=True):
            if is_float(weight) and not (finite := np.isfinite(weight)).all():
                count = weight.size - int(np.count_nonzero(finite))
                return f"{count:,} of {weight.size:,} values of {name!r} are NaN or infinite"
        return ""

    def _fault_of_header(self, data: bytes) -> str:
        """Return the first difference between the header of a set and that of this model."""
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(len(data) - 8, MOST_HEADER_BYTES):
            return "the set is cut off, or is not in the safetensors format"
        names: list[str] = []

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            names.extend(name for name, value in items if isinstance(value, dict))
            return dict(items)

        try:
            table = json.loads(data[8 : 8 + length], object_pairs_hook=pairs)
        except (ValueError, RecursionError):
            return "the header of the set is not JSON"
        if not isinstance(table, dict):
            return "the header of the set is not a table"
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            return f"the set has {duplicates[0]!r} twice"
        expected = json.loads(self.header[8:])
        if missing := [name for name in expected if name not in table]:
            return f"the set has no {missing[0]!r}"
        if unexpected := [name for name in table if name not in expected]:
            return f"the set has {unexpected[0]!r}, which the model does not have"
        for name, entry in expected.items():
            actual = table[name]
            if not isinstance(actual, Mapping):
                return f"the set says nothing about {name!r}"
            for key in ("shape", "dtype"):
                if actual.get(key) != entry[key]:
                    return f"{name!r} has the {key} {actual.get(key)!s:.60}, and must have {entry[key]}"
        return "the header of the set is spelled in another way than that of the server"


def layout_of(weights: Mapping[str, Array]) -> Layout:
    """Return the layout of a model with these weights, by name and in the order of the model."""
    return Layout([(name, array.shape, array.dtype.name) for name, array in weights.items()])
