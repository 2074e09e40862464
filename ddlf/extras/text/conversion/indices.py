"""What takes and writes at indices, each sample at its own. Definitions are WebNN's (https://www.w3.org/TR/webnn/), without the batch.

What is written twice at one place is written in an order that is not defined.
"""

from __future__ import annotations

import math
from typing import Any

from keras import ops

from ddlf.extras.text.conversion.axes import behind_batch

Options = dict[str, Any]


def gather(into: list[Any], operands: list[Any], options: Options) -> Any:
    """Of each sample the slices at its own indices along an axis; with an operand the slice there."""
    axis = behind_batch(options.get("axis", 0))
    if len(into) == 1:
        return ops.take(into[0], ops.cast(operands[0], "int32"), axis=axis)
    x, indices = into[0], ops.cast(into[1], "int32")
    axis %= len(x.shape)
    x = ops.moveaxis(x, axis, 1)
    found = _taken(_table(x, 1), _flat(indices))
    found = ops.reshape(found, (-1, *indices.shape[1:], *x.shape[2:]))
    count = len(indices.shape) - 1
    rank = len(found.shape)
    before = list(range(1 + count, count + axis))
    return ops.transpose(found, (0, *before, *range(1, 1 + count), *range(count + axis, rank)))


def gather_elements(into: list[Any], operands: list[Any], options: Options) -> Any:
    """A value for each index along an axis."""
    return ops.take_along_axis(into[0], ops.cast(into[1], "int32"), axis=behind_batch(options.get("axis", 0)))


def gather_nd(into: list[Any], operands: list[Any], options: Options) -> Any:
    """What lies at each row of indices, which go into the first axes."""
    x, indices = into[0], ops.cast(into[1], "int32")
    depth = indices.shape[-1]
    found = _taken(_table(x, depth), _flat(_numbered(indices, x.shape[1:])))
    return ops.reshape(found, (-1, *indices.shape[1:-1], *x.shape[1 + depth :]))


def scatter_elements(into: list[Any], operands: list[Any], options: Options) -> Any:
    """What comes in, with a value written at each index along an axis."""
    x, indices, updates = into[0], ops.cast(into[1], "int32"), into[2]
    axis = behind_batch(options.get("axis", 0)) % len(x.shape)
    x, indices, updates = (ops.moveaxis(each, axis, -1) for each in (x, indices, updates))
    rows, rows_there, written = (ops.reshape(each, (-1, each.shape[-1])) for each in (x, indices, updates))
    found = _written(rows[..., None], rows_there, written[..., None])
    return ops.moveaxis(ops.reshape(found, (-1, *x.shape[1:])), -1, axis)


def scatter_nd(into: list[Any], operands: list[Any], options: Options) -> Any:
    """What comes in, with a slice written at each row of indices."""
    x, indices, updates = into[0], ops.cast(into[1], "int32"), into[2]
    table, there = _table(x, indices.shape[-1]), _flat(_numbered(indices, x.shape[1:]))
    written = ops.reshape(updates, (-1, there.shape[1], table.shape[2]))
    return ops.reshape(_written(table, there, written), (-1, *x.shape[1:]))


def _table(x: Any, depth: int) -> Any:
    """Of each sample a row for each place in its first axes."""
    return ops.reshape(x, (-1, math.prod(x.shape[1 : 1 + depth]), math.prod(x.shape[1 + depth :])))


def _flat(indices: Any) -> Any:
    return ops.reshape(indices, (-1, math.prod(indices.shape[1:])))


def _numbered(indices: Any, shape: Any) -> Any:
    """Rows of indices as the number of the place in a table."""
    strides = [math.prod(shape[axis + 1 : indices.shape[-1]]) for axis in range(indices.shape[-1])]
    return ops.sum(indices * ops.convert_to_tensor(strides, dtype="int32"), axis=-1)


def _taken(table: Any, indices: Any) -> Any:
    wide = ops.broadcast_to(indices[..., None], (ops.shape(table)[0], indices.shape[1], table.shape[2]))
    return ops.take_along_axis(table, wide, axis=1)


def _written(table: Any, indices: Any, values: Any) -> Any:
    samples = ops.cumsum(ops.ones_like(indices), axis=0) - 1
    places = ops.reshape(ops.stack([samples, indices], axis=-1), (-1, 2))
    return ops.scatter_update(table, places, ops.reshape(values, (-1, table.shape[2])))
