"""Infers the shapes, types and parameters that a model text omits. Pure.

Shapes and axis numbers exclude the batch. An unknown size is None; a shape with an unknown number of axes is None.
Inference goes from inputs to outputs and back until no shape changes (unification to a fixed point). A layer has its
written type, or the highest type of its inputs. Casts to higher types are inserted before the layer; a cast to a lower
type gives a warning.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.graph import Graph, ModelOutput, Node, Parameter, Shape, consumers
from ddlf.extras.text.language.operators import DTYPES, INTEGERS, OPERATORS, is_keras
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Number

Known = Shape | None
Rule = Callable[[Node, dict[str, Any], list[Known], Known], tuple[list[Known], Known]]
"""A rule of inference. It takes a node, its options, and the shapes of inputs and output, and refines these shapes."""
MAX_PARAMETERS = 10**10
HALF = ("float16", "bfloat16")
RANGES = {
    f"{sign}int{bits}": (-(2 ** (bits - 1)) * (not sign), 2 ** (bits - (not sign)) - 1)
    for sign in ("", "u")
    for bits in (4, 8, 32)
}
"""The smallest and the largest value of each integer type."""
UNCAST = ("free", "gather", "scatter", "split")
"""Kinds of operators whose inputs get no cast."""


# -- shapes ----------------------------------------------------------------------------------------------------------------


class Misfit(Exception):
    """Raised when two shapes differ that must be equal."""


def shown(shape: Known) -> str:
    """Return a shape in the notation of a model text."""
    return "?" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def unified(first: Known, second: Known) -> Known:
    """Merge the known sizes of two descriptions of a shape.

    Raises:
        Misfit: The descriptions contradict each other.
    """
    if first is None or second is None:
        return second if first is None else first
    if len(first) != len(second) or any(a != b for a, b in zip(first, second, strict=True) if None not in (a, b)):
        raise Misfit(f"the shapes {shown(first)} and {shown(second)} do not fit")
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the first one.

    Raises:
        Misfit: The axis does not exist.
    """
    if not -rank <= axis < rank:
        raise Misfit(f"there is no axis {axis} among {rank}")
    return axis % rank


def options_of(node: Node) -> dict[str, Any]:
    """Return the options of a node (a layer) as Python values, by name."""
    return {arg.key: plain(arg.value) for arg in node.options}


def infer(graph: Graph, problems: Problems) -> list[Known]:
    """Return the shape of each node, as far as it is known. Contradictions are added to ``problems``."""
    shapes = [node.declared_shape for node in graph.nodes]
    readers = consumers(graph.nodes)
    dead: set[int] = set()

    def follow(numbers: list[int]) -> None:
        waiting = deque(numbers)
        while waiting:
            number = waiting.popleft()
            node = graph.nodes[number]
            if node.operator == "input" or number in dead:
                continue
            before = [shapes[source] for source in node.inputs]
            try:
                ins, out = _rule(node)(node, options_of(node), before, shapes[number])
                new = {number: unified(shapes[number], out)}
                for item, shape in zip(node.inputs, ins, strict=True):
                    new[item] = unified(new.get(item, shapes[item]), shape)
            except Misfit as error:
                dead.add(number)
                problems.add(node.call, f"{node.operator}: {error}")
                continue
            for item, shape in new.items():
                if shape != shapes[item]:
                    shapes[item] = shape
                    waiting.extend([item, *readers.get(item, ())])

    follow(list(range(len(graph.nodes))))
    for head in graph.heads:
        try:
            shapes[head.node] = unified(shapes[head.node], head.declared_shape)
        except Misfit:
            if not problems:
                problems.add(
                    head.at,
                    f"the output has shape {shown(head.declared_shape)}, but its layer gives {shown(shapes[head.node])}",
                )
        else:
            follow([head.node, *readers.get(head.node, ())])
    return shapes


def _rule(node: Node) -> Rule:
    return _RULES[OPERATORS[node.operator].kind] if node.operator in OPERATORS else _keras


def _forward(rule: Callable[[Node, dict[str, Any], Shape], Known]) -> Rule:
    """Make an inference rule from a function that computes the output shape from the input shape. Such a rule does not
    work backwards."""
    return lambda node, options, ins, out: (ins, out if ins[0] is None else unified(out, rule(node, options, ins[0])))


def _infer_same(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    shape = unified(ins[0], out)
    if shape is not None and "axis" in options:
        axis_of(options["axis"], len(shape))
    return [shape], shape


def _residual(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    shape = out
    for tensor in ins:
        shape = unified(shape, tensor)
    return [shape] * len(ins), shape


def _binary(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if len(ins) == 1:
        return _infer_same(node, options, ins, out)
    if None in ins:
        return ins, out
    a, b = (tensor or () for tensor in ins)
    rank = max(len(a), len(b))
    sizes: list[int | None] = []
    for first, other in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if None not in (first, other) and first != other and 1 not in (first, other):
            raise Misfit(f"the shapes {shown(a)} and {shown(b)} do not fit")
        sizes.append(other if first == 1 else first)
    return ins, tuple(sizes)


def _matmul(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    if len(ins) > 1:  # a second layer is the other input
        other = ins[1]
        if before is None or other is None:
            return ins, out
        if len(before) < 2 or len(other) < 2 or (None not in (before[-1], other[-2]) and before[-1] != other[-2]):
            raise Misfit(f"{shown(before)} cannot be multiplied with {shown(other)}")
        return ins, (*before[:-1], other[-1])
    rank = len(before) if before is not None else len(out) if out is not None else None
    if rank is None:
        return ins, out
    if rank == 0:
        raise Misfit("a number without an axis cannot be multiplied with a matrix")
    before, out = unified(before, (None,) * rank), unified(out, (None,) * rank)
    assert before is not None
    assert out is not None
    lead = unified(before[:-1], out[:-1]) or ()
    return [(*lead, before[-1])], (*lead, out[-1])


def _pair(options: dict[str, Any], name: str, default: int, count: int = 2) -> list[int]:
    value = options.get(name, [default] * count)
    if len(value) != count:
        raise Misfit(f"{name} must have {count} numbers, got {len(value)}")
    return list(value)


def _window(options: dict[str, Any], layout: str, before: Shape) -> tuple[tuple[int | None, ...], int]:
    """Return the height and width of an image, and the axis of its channels."""
    if len(before) != 3:
        raise Misfit(f"an image has 3 axes, got {shown(before)}")
    first = options.get(layout, "nchw") == "nchw"
    return (before[1:], 0) if first else (before[:2], 2)


def _conv(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    if before is None:
        return ins, out
    space, axis = _window(options, "inputLayout", before)
    kernel = kernel_of(node, options, before, out)
    if kernel is None:
        return ins, out
    image = _slid(options, space, kernel, before, transposed="Transpose" in node.operator)
    channels = None if out is None or len(out) != 3 else out[axis]
    return ins, (channels, *image) if axis == 0 else (*image, channels)


def kernel_of(node: Node, options: dict[str, Any], before: Shape, out: Known) -> list[int] | None:
    """Return the height and width of a convolution's filter, from its option or from the shapes of input and output."""
    if "kernel" in options:
        return _pair(options, "kernel", 1)
    if out is None or len(out) != 3 or _pair(options, "strides", 1) != [1, 1] or "Transpose" in node.operator:
        return None
    axis = _window(options, "inputLayout", before)[1]
    after, pads = (out[1:] if axis == 0 else out[:2]), _pair(options, "padding", 0, 4)
    sizes = []
    for index, (size, out_size) in enumerate(zip(_window(options, "inputLayout", before)[0], after, strict=True)):
        if size is None or out_size is None:
            return None
        reach = size + pads[2 * index] + pads[2 * index + 1] - out_size
        dilation = _pair(options, "dilations", 1)[index]
        if reach < 0 or reach % dilation:
            raise Misfit(f"no filter makes {shown(out)} of {shown(before)}; write kernel=")
        sizes.append(reach // dilation + 1)
    return sizes


def _slid(
    options: dict[str, Any], space: Shape, kernel: list[int], shape: Shape, *, transposed: bool = False
) -> list[int | None]:
    """Return the height and width of the output when a window slides over an image."""
    pads, strides, dilations = (
        _pair(options, "padding", 0, 4),
        _pair(options, "strides", 1),
        _pair(options, "dilations", 1),
    )
    output_padding = _pair(options, "outputPadding", 0)
    sizes: list[int | None] = []
    for index, size in enumerate(space):
        extent, pad = (kernel[index] - 1) * dilations[index] + 1, pads[2 * index] + pads[2 * index + 1]
        if size is None:
            sizes.append(None)
        elif transposed:
            sizes.append((size - 1) * strides[index] + extent - pad + output_padding[index])
        else:
            sizes.append((size + pad - extent) // strides[index] + 1)
        if (sizes[-1] or 1) < 1:
            raise Misfit(f"a window of {kernel[0]} x {kernel[1]} is larger than {shown(shape)}")
    return sizes


@_forward
def _pool(node: Node, options: dict[str, Any], shape: Shape) -> Shape:
    space, axis = _window(options, "layout", shape)
    image: list[int | None] = [1, 1]
    if "windowDimensions" in options:
        image = _slid(options, space, _pair(options, "windowDimensions", 1), shape)
    return (shape[0], *image) if axis == 0 else (*image, shape[2])


@_forward
def _reduce(node: Node, options: dict[str, Any], shape: Shape) -> Shape:
    axes = [options.get("axis", 0)] if node.operator.startswith("arg") else options.get("axes", range(len(shape)))
    reduced = {axis_of(axis, len(shape)) for axis in axes}
    keep = options.get("keepDimensions")
    return tuple(1 if axis in reduced else size for axis, size in enumerate(shape) if keep or axis not in reduced)


def _concat(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    ranks = {len(tensor) for tensor in ins if tensor is not None}
    if not ranks:
        return ins, out
    if len(ranks) > 1:
        raise Misfit(f"{' and '.join(map(shown, ins))} have different numbers of axes")
    rank = ranks.pop()
    axis = axis_of(options.get("axis", 0), rank)
    common: Known = None if out is None else tuple(None if item == axis else size for item, size in enumerate(out))
    common = unified(common, (None,) * rank)
    for shape in ins:
        if shape is not None:
            common = unified(common, tuple(None if item == axis else size for item, size in enumerate(shape)))
    assert common is not None
    parts = [None if shape is None else shape[axis] for shape in ins]
    total = None if None in parts else sum(part or 0 for part in parts)
    inputs = [(*common[:axis], part, *common[axis + 1 :]) for part in parts]
    return list(inputs), (*common[:axis], total, *common[axis + 1 :])


def _count(shape: Known) -> int | None:
    count = 1
    for size in shape or ():
        if size is None:
            return None
        count *= size
    return None if shape is None else count


def _reshape(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before, after = _count(ins[0]), _count(out)
    if None not in (before, after) and before != after:
        raise Misfit(f"{shown(ins[0])} has {before:,} values, {shown(out)} has {after:,}")
    return ins, out


def _transpose(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    rank = len(before) if before is not None else len(out) if out is not None else None
    if rank is None:
        return ins, out
    order = options.get("permutation", list(reversed(range(rank))))
    if sorted(order) != list(range(rank)):
        raise Misfit(f"the permutation {order} is not of {rank} axes")
    if before is not None:
        out = unified(out, tuple(before[axis] for axis in order))
    assert out is not None
    back = unified(before, tuple(out[order.index(axis)] for axis in range(rank)))
    return [back], out


def _slice(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if "sizes" not in options or "starts" not in options:
        raise Misfit("slice needs starts= and sizes=")
    starts, sizes = options["starts"], options["sizes"]
    if ins[0] is not None:
        if not len(starts) == len(sizes) == len(ins[0]):
            raise Misfit(f"starts and sizes must have {len(ins[0])} numbers for {shown(ins[0])}")
        for start, size, axis_size in zip(starts, sizes, ins[0], strict=True):
            if start < 0 or (axis_size is not None and start + size > axis_size):
                raise Misfit(f"the slice from {starts} of {sizes} goes beyond {shown(ins[0])}")
    strides = options.get("strides", [1] * len(sizes))
    if len(strides) != len(sizes):
        raise Misfit(f"strides must have {len(sizes)} numbers, got {len(strides)}")
    return ins, tuple(-(-size // stride) for size, stride in zip(sizes, strides, strict=True))


@_forward
def _pad(node: Node, options: dict[str, Any], shape: Shape) -> Shape:
    begin, end = (_pair(options, key, 0, len(shape)) for key in ("beginningPadding", "endingPadding"))
    return tuple(None if size is None else size + a + b for size, a, b in zip(shape, begin, end, strict=True))


@_forward
def _tile(node: Node, options: dict[str, Any], shape: Shape) -> Shape:
    times = _pair(options, "repetitions", 1, len(shape))
    return tuple(None if size is None else size * factor for size, factor in zip(shape, times, strict=True))


@_forward
def _resample(node: Node, options: dict[str, Any], shape: Shape) -> Known:
    if "sizes" not in options and "scales" not in options:
        return None
    sizes = list(shape)
    axes = [axis_of(axis, len(sizes)) for axis in options.get("axes", [1, 2])]
    scales = _pair(options, "scales", 1, len(axes))
    for index, axis in enumerate(axes):
        size = sizes[axis]
        if "sizes" in options:
            sizes[axis] = _pair(options, "sizes", 1, len(axes))[index]
        elif size is not None:
            sizes[axis] = max(int(size * scales[index]), 1)
    return tuple(sizes)


def _recurrent(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    units = None if not out else out[-1]
    if node.operator.endswith("Cell"):
        return [unified(ins[0], (None,))], (units,)
    before = unified(ins[0], (None, None)) or ()
    return [before], (before[0], units) if options.get("returnSequence") else (units,)


def _attend(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    shape = unified(unified(ins[0], out), (None, None)) or ()
    heads, width = options.get("heads", 1), shape[-1]
    if width is not None and width % heads:
        raise Misfit(f"{heads} heads do not divide a width of {width}")
    return [shape, *(unified(tensor, (None, None)) for tensor in ins[1:])], shape


def _gather(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """Infer the shape of slices at the indices of a layer or at a number; for ``gatherElements``, of single values."""
    before = ins[0]
    indices: Known = () if len(ins) == 1 else ins[1]
    if before is None or indices is None:
        return ins, out
    if node.operator == "gatherND":
        return ins, unified(out, _nd(before, indices)[0])
    axis = axis_of(options.get("axis", 0), len(before))
    at, axis_size = node.operands[0] if node.operands else None, before[axis]
    if isinstance(at, Number) and axis_size is not None and not -axis_size <= at.value < axis_size:
        raise Misfit(f"there is no {at.written} among {axis_size}, counted from 0")
    if node.operator == "gather":
        return ins, unified(out, (*before[:axis], *indices, *before[axis + 1 :]))
    return [before, unified(indices, _shape_of_indices(before, axis))], unified(out, indices)


def _scatter(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """Infer the shapes of an input, and of the indices and values that are written to it: two layers in ``to``."""
    before, indices, updates = ins
    before = out = unified(before, out)
    if before is not None and node.operator == "scatterElements":
        axis = axis_of(options.get("axis", 0), len(before))
        indices = updates = unified(unified(indices, updates), _shape_of_indices(before, axis))
    elif before is not None and indices is not None:
        updates = unified(updates, _nd(before, indices)[0])
    return [before, indices, updates], out


def _split(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    """Infer the shape of one part of a split input."""
    splits, index = options.get("splits"), options.get("index", 0)
    if splits is None:
        raise Misfit("split needs splits=, how many parts or their sizes")
    if not 0 <= index < (splits if isinstance(splits, int) else len(splits)):
        raise Misfit(f"there is no part {index}, counted from 0, with splits={splits}")
    if ins[0] is None:
        return ins, out
    axis = axis_of(options.get("axis", 0), len(ins[0]))
    axis_size = ins[0][axis]
    if isinstance(splits, int):
        if axis_size is not None and axis_size % splits:
            raise Misfit(f"{axis_size} cannot be split into {splits} equal parts; write their sizes")
        part = None if axis_size is None else axis_size // splits
    else:
        if axis_size is not None and sum(splits) != axis_size:
            raise Misfit(f"the sizes {splits} are {sum(splits)} together, and {shown(ins[0])} has {axis_size}")
        part = splits[index]
    return ins, unified(out, (*ins[0][:axis], part, *ins[0][axis + 1 :]))


def _shape_of_indices(before: tuple[int | None, ...], axis: int) -> tuple[int | None, ...]:
    """Return the shape of indices of single values. It has the input's axes, with any size along one."""
    return tuple(None if item == axis else size for item, size in enumerate(before))


def _nd(before: tuple[int | None, ...], indices: tuple[int | None, ...]) -> tuple[Known, int]:
    """Return the shape of the values at indices; each row of indices selects a place in the first axes."""
    if not indices or indices[-1] is None:
        raise Misfit(f"indices have a last axis with a number for each axis that they go into, got {shown(indices)}")
    if indices[-1] > len(before):
        raise Misfit(f"indices of {indices[-1]} numbers go into {len(before)} axes of {shown(before)}")
    return (*indices[:-1], *before[indices[-1] :]), indices[-1]


def _free(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    return ins, out


def _keras(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    inferred = keras_layers.shape_of(node.operator, options, ins[0], ins[1:]) if is_keras(node.operator) else None
    return ins, unified(out, inferred)


_RULES: dict[str, Rule] = {
    "arg": _reduce, "attend": _attend, "binary": _binary, "cell": _recurrent, "concat": _concat, "conv": _conv,
    "convTranspose": _conv, "free": _free, "gather": _gather, "matmul": _matmul, "norm": _infer_same, "pad": _pad, "pool": _pool,
    "recurrent": _recurrent, "reduce": _reduce, "resample": _resample, "reshape": _reshape, "residual": _residual,
    "same": _infer_same, "scatter": _scatter, "slice": _slice, "split": _split, "tile": _tile, "transpose": _transpose,
    "where": _binary,
}  # fmt: skip
"""The rules by the operator's kind."""


# -- types -----------------------------------------------------------------------------------------------------------------


def highest(types: list[str]) -> str:
    """Return the smallest type that can contain all. Two different 16-bit types give float32."""
    result = set(types)
    return "float32" if result >= set(HALF) else min(result, key=DTYPES.index, default="float32")


def with_types(graph: Graph, problems: Problems) -> Graph:
    """Return the graph with the types of nodes, and with casts between them."""
    nodes: list[Node] = []
    numbers: dict[int, int] = {}
    casts: dict[tuple[int, str], int] = {}

    def cast(source: int, dtype: str, at: Node | ModelOutput, call: int) -> int:
        if nodes[source].dtype == dtype:
            return source
        if nodes[source].dtype not in DTYPES:
            problems.add(call, f"{nodes[source].dtype} is read by layers of Keras only")
            return source
        if _is_down(nodes[source].dtype, dtype):
            problems.warn(
                call,
                f"{nodes[source].dtype} becomes {dtype}, which loses precision; if you want this, write cast({dtype})",
            )
        if (source, dtype) not in casts:
            casts[source, dtype] = len(nodes)
            nodes.append(
                Node("cast", (source,), written=dtype, shape=nodes[source].shape, dtype=dtype, at=at.at, call=call)
            )
        return casts[source, dtype]

    for old, node in enumerate(graph.nodes):
        inputs = [numbers[source] for source in node.inputs]
        input_types = [nodes[entry].dtype for entry in inputs]
        if node.operator in OPERATORS and any(item not in DTYPES for item in input_types):
            problems.add(
                node.call, f"{node.operator} cannot read {', '.join(input_types)}, which layers of Keras can only"
            )
            input_types = ["float32"] * len(input_types)
        works, result = types_of(node, input_types)
        _fitting(node, input_types, problems)
        if works:
            inputs = [cast(entry, works, node, node.call) for entry in inputs]
        for operand in node.operands:
            if isinstance(operand, Number):
                _check(operand, works or result, problems)
        numbers[old] = len(nodes)
        nodes.append(replace(node, inputs=tuple(inputs), dtype=result))
    heads = []
    for head in graph.heads:
        end = numbers[head.node]
        heads.append(replace(head, node=cast(end, head.written, head, head.at) if head.written else end))
    return Graph(tuple(nodes), tuple(heads))


def types_of(node: Node, input_types: list[str]) -> tuple[str, str]:
    """Return the type in which a node computes, empty for any type, and the type of its output."""
    if node.operator in ("input", "cast"):
        return "", node.written
    if node.operator not in OPERATORS:
        return "", "float32"
    operator = OPERATORS[node.operator]
    if operator.kind in UNCAST or node.operator.endswith("quantizeLinear") or node.operator == "quantizeLinear":
        return "", node.written or operator.result or input_types[0]
    works = node.written if node.written and not operator.result else highest(input_types)
    if not node.written and ((operator.floats and works in RANGES) or (operator.wide and works in HALF)):
        works = "float32"
    return works, operator.result or works


def _fitting(node: Node, input_types: list[str], problems: Problems) -> None:
    """Check the types that must not be cast: indices, written values and quantized outputs."""
    if node.operator == "quantizeLinear" and node.written and node.written not in RANGES:
        problems.add(node.call, f"quantizeLinear makes whole numbers, such as int8, not {node.written}")
    kind = OPERATORS[node.operator].kind if node.operator in OPERATORS else ""
    if kind in ("gather", "scatter") and len(input_types) > 1 and input_types[1] not in RANGES:
        problems.add(
            node.call,
            f"{node.operator}: indices are whole numbers, got {input_types[1]}; write cast(int32) behind them",
        )
    if kind == "scatter" and len(input_types) > 2 and input_types[2] != input_types[0]:
        problems.add(
            node.call,
            f"{node.operator}: {input_types[2]} is written into {input_types[0]}; write cast({input_types[0]}) behind the values",
        )


def _is_down(before: str, after: str) -> bool:
    return DTYPES.index(after) > DTYPES.index(before) or {before, after} == set(HALF)


def _check(number: Number, dtype: str, problems: Problems) -> None:
    """Check whether a type can represent a number."""
    if dtype not in RANGES:
        return
    low, high = RANGES[dtype]
    if not isinstance(number.value, int):
        problems.add(
            number.at, f"{number.written} is not a valid {dtype}; write a whole number, or cast(float32) before"
        )
    elif not low <= number.value <= high:
        problems.add(number.at, f"{number.written} is not a valid {dtype}, which goes from {low:,} to {high:,}")


# -- parameters ------------------------------------------------------------------------------------------------------------


def with_parameters(graph: Graph, problems: Problems, models: Mapping[str, Graph] | None = None) -> Graph:
    """Return the graph with the parameters of nodes.

    Args:
        graph: The graph, with shapes and types.
        problems: Receives the parameters that cannot be inferred.
        models: The graphs of the models that the model text calls as layers.
    """
    used: Counter[str] = Counter()
    nodes: list[Node] = []
    models, shared = models or {}, set[str]()
    unknown = any(node.operator not in OPERATORS and node.shape is None for node in graph.nodes)
    count = 0
    for node in graph.nodes:
        parameters: list[Parameter] = []
        if node.share and node.share in shared:
            nodes.append(node)
            continue
        shared.add(node.share or (node.operator if node.operator in models else node.name))
        if node.operator in models:
            inner = [parameter for other in models[node.operator].nodes for parameter in other.parameters]
            parameters = [replace(item, name=f"{node.operator}.{item.name}") for item in inner]
            count += sum(item.count or 0 for item in parameters)
        if node.operator == "attend" and sum(isinstance(operand, str) for operand in node.operands) < 3:
            problems.add(
                node.call, "attend learns all of its three parameters: write names, and no number", derived=True
            )
        for base, shape in _shapes(node, [graph.nodes[source] for source in node.inputs]):
            used[base] += 1
            dtype = node.dtype if node.written or node.dtype in INTEGERS else "float32"
            parameter = Parameter(f"{base}{used[base]}", shape, "float32" if node.operator not in OPERATORS else dtype)
            count += parameter.count or 0
            if (
                parameter.count is None and not unknown and node.operator in OPERATORS
            ):  # Keras infers its own parameters
                problem = (
                    f"{parameter.name} has shape {shown(shape)}"
                    if shape
                    else f"the shape of {parameter.name} is not known"
                )
                how = "; write kernel= and shape=" if "conv" in node.operator else "; write shape="
                problems.add(node.call, f"{node.operator}: {problem}{how}", derived=True)
            parameters.append(parameter)
        if count > MAX_PARAMETERS:
            problems.add(node.call, f"the model has more than {MAX_PARAMETERS:,} parameters")
            break
        nodes.append(replace(node, parameters=tuple(parameters)))
    return Graph(tuple(nodes), graph.heads)


def _shapes(node: Node, inputs: list[Node]) -> list[tuple[str, Shape | None]]:
    """Return the name and shape of each parameter that an operator creates; the shape is None if it is unknown."""
    before = inputs[0].shape if inputs else None
    if node.operator == "input" or not (node.operator in OPERATORS or is_keras(node.operator)):
        return []
    if node.operator not in OPERATORS:
        result = keras_layers.parameters_of(node.operator, options_of(node), before)
        return [("kernel", None)] if result is None else list(result)
    names = [operand for operand in node.operands if isinstance(operand, str)]
    if not names:
        return []
    kind, options, out = OPERATORS[node.operator].kind, options_of(node), node.shape
    in_width, out_width = (shape[-1] if shape else None for shape in (before, out))
    rank_known = before is not None
    if kind == "attend" and len(names) == 3:
        source = inputs[-1].shape
        source_width = source[-1] if source else None
        sides: list[tuple[str, Shape]] = [
            (names[0], (in_width, in_width)),
            (names[1], (source_width, in_width)),
            (names[2], (source_width, in_width)),
            ("out", (in_width, in_width)),
        ]
        return [pair for name, shape in sides for pair in ((name, shape), (f"{name}_bias", (in_width,)))]
    if kind == "matmul":
        is_transposed = options.get("bTranspose")
        return list(
            zip(names, [(out_width, in_width) if is_transposed else (in_width, out_width), (out_width,)], strict=False)
        )
    if kind in ("conv", "convTranspose"):
        return list(zip(names, _filters(node, options, before, out), strict=False))
    if kind in ("recurrent", "cell"):
        gates = 4 if node.operator.startswith("lstm") else 3
        gate_width = None if out_width is None else gates * out_width
        return list(
            zip(names, [(gate_width, in_width), (gate_width, out_width), (gate_width,), (gate_width,)], strict=False)
        )
    if node.operator == "layerNormalization" and before is not None:
        fitting = [axis for axis in options.get("axes", [-1]) if -len(before) <= axis < len(before)]
        return [
            (name, tuple(before[axis] for axis in sorted(axis % len(before) for axis in fitting))) for name in names
        ]
    if kind in ("binary", "where", "same", "norm") and rank_known and before is not None:
        first = kind == "norm" and options.get("layout", "nchw") == "nchw"
        axis = options.get("axis", 0 if first else -1)
        fits = bool(before) and -len(before) <= axis < len(before)
        return [(name, ((before[axis],) if fits else ())) for name in names]
    return [(name, None) for name in names]


def _filters(node: Node, options: dict[str, object], before: Shape | None, out: Shape | None) -> list[Shape | None]:
    """Return the shapes of a filter and its bias."""
    if before is None or out is None or len(before) != 3 or len(out) != 3:
        return [None, None]
    axis = 0 if options.get("inputLayout", "nchw") == "nchw" else 2
    kernel: Sequence[int | None] = kernel_of(node, options, before, out) or (None, None)
    groups = options.get("groups", 1)
    in_channels = before[axis]
    channels = None if in_channels is None or not isinstance(groups, int) else in_channels // groups
    sizes = {"o": out[axis], "i": channels, "h": kernel[0], "w": kernel[1]}
    if "Transpose" in node.operator:  # a transposed filter contains a group's output channels
        out_channels = out[axis]
        sizes |= {
            "o": None if out_channels is None or not isinstance(groups, int) else out_channels // groups,
            "i": in_channels,
        }
    return [tuple(sizes[letter] for letter in str(options.get("filterLayout", "oihw"))), (out[axis],)]
