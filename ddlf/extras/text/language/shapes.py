"""Shapes that are not written: inferred forwards and backwards until nothing more follows. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from ddlf.extras.text.language import indexing, keras_layers
from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.graph import Graph, Node, Shape, consumers
from ddlf.extras.text.language.known import Known, Misfit, Rule, axis_of, shown, unified
from ddlf.extras.text.language.operators import OPERATORS, is_keras
from ddlf.extras.text.language.problems import Problems


def options_of(node: Node) -> dict[str, Any]:
    """A node's options as Python has them."""
    return {arg.key: plain(arg.value) for arg in node.options}


def infer(graph: Graph, problems: Problems) -> list[Known]:
    """Return the shape of each node, as far as it follows; what does not fit is told to ``problems``."""
    shapes = [node.wanted for node in graph.nodes]
    readers = consumers(graph.nodes)
    dead: set[int] = set()

    def follow(numbers: list[int]) -> None:
        waiting = deque(numbers)
        while waiting:
            number = waiting.popleft()
            node = graph.nodes[number]
            if node.operator == "input" or number in dead:
                continue
            before = [shapes[each] for each in node.inputs]
            try:
                ins, out = _rule(node)(node, options_of(node), before, shapes[number])
                new = {number: unified(shapes[number], out)}
                for each, shape in zip(node.inputs, ins, strict=True):
                    new[each] = unified(new.get(each, shapes[each]), shape)
            except Misfit as error:
                dead.add(number)
                problems.add(node.call, f"{node.operator}: {error}")
                continue
            for each, shape in new.items():
                if shape != shapes[each]:
                    shapes[each] = shape
                    waiting.extend([each, *readers.get(each, ())])

    follow(list(range(len(graph.nodes))))
    for head in graph.heads:
        try:
            shapes[head.node] = unified(shapes[head.node], head.wanted)
        except Misfit:
            if not problems:
                problems.add(
                    head.at,
                    f"the output has shape {shown(head.wanted)}, but what arrives has {shown(shapes[head.node])}",
                )
        else:
            follow([head.node, *readers.get(head.node, ())])
    return shapes


def _rule(node: Node) -> Rule:
    return _RULES[OPERATORS[node.operator].kind] if node.operator in OPERATORS else _keras


def _same(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    shape = unified(ins[0], out)
    if shape is not None and "axis" in options:
        axis_of(options["axis"], len(shape))
    return [shape], shape


def _residual(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    shape = out
    for each in ins:
        shape = unified(shape, each)
    return [shape] * len(ins), shape


def _binary(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if len(ins) == 1:
        return _same(node, options, ins, out)
    if None in ins:
        return ins, out
    a, b = (each or () for each in ins)
    rank = max(len(a), len(b))
    sizes: list[int | None] = []
    for one, other in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if None not in (one, other) and one != other and 1 not in (one, other):
            raise Misfit(f"the shapes {shown(a)} and {shown(b)} do not fit")
        sizes.append(other if one == 1 else one)
    return ins, tuple(sizes)


def _matmul(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    if len(ins) > 1:  # with a layer
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


def _pair(options: dict[str, Any], name: str, usual: int, count: int = 2) -> list[int]:
    value = options.get(name, [usual] * count)
    if len(value) != count:
        raise Misfit(f"{name} must have {count} numbers, got {len(value)}")
    return list(value)


def _window(options: dict[str, Any], layout: str, before: Shape) -> tuple[tuple[int | None, ...], int]:
    """Height and width, and the axis of the channels."""
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
    made = _slid(node, options, space, kernel, ins, transposed="Transpose" in node.operator)
    channels = None if out is None or len(out) != 3 else out[axis]
    return ins, (channels, *made) if axis == 0 else (*made, channels)


def kernel_of(node: Node, options: dict[str, Any], before: Shape, out: Known) -> list[int] | None:
    """Height and width of a filter: as written, or what is left between what goes in and what comes out."""
    if "kernel" in options:
        return _pair(options, "kernel", 1)
    if out is None or len(out) != 3 or _pair(options, "strides", 1) != [1, 1] or "Transpose" in node.operator:
        return None
    axis = _window(options, "inputLayout", before)[1]
    after, pads = (out[1:] if axis == 0 else out[:2]), _pair(options, "padding", 0, 4)
    sizes = []
    for index, (size, left) in enumerate(zip(_window(options, "inputLayout", before)[0], after, strict=True)):
        if size is None or left is None:
            return None
        room = size + pads[2 * index] + pads[2 * index + 1] - left
        dilation = _pair(options, "dilations", 1)[index]
        if room < 0 or room % dilation:
            raise Misfit(f"no filter makes {shown(out)} of {shown(before)}; write kernel=")
        sizes.append(room // dilation + 1)
    return sizes


def _slid(
    node: Node, options: dict[str, Any], space: Shape, kernel: list[int], ins: list[Known], *, transposed: bool = False
) -> list[int | None]:
    pads, strides, dilations = (
        _pair(options, "padding", 0, 4),
        _pair(options, "strides", 1),
        _pair(options, "dilations", 1),
    )
    extra = _pair(options, "outputPadding", 0)
    made: list[int | None] = []
    for index, size in enumerate(space):
        wide, pad = (kernel[index] - 1) * dilations[index] + 1, pads[2 * index] + pads[2 * index + 1]
        if size is None:
            made.append(None)
        elif transposed:
            made.append((size - 1) * strides[index] + wide - pad + extra[index])
        else:
            made.append((size + pad - wide) // strides[index] + 1)
        if (made[-1] or 1) < 1:
            raise Misfit(f"a window of {kernel[0]} x {kernel[1]} is larger than {shown(ins[0])}")
    return made


def _pool(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    if before is None:
        return ins, out
    space, axis = _window(options, "layout", before)
    if "windowDimensions" not in options:
        made: list[int | None] = [1, 1]
    else:
        made = _slid(node, options, space, _pair(options, "windowDimensions", 1), ins)
    return ins, (before[0], *made) if axis == 0 else (*made, before[2])


def _reduce(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    before = ins[0]
    if before is None:
        return ins, out
    axes = [options.get("axis", 0)] if node.operator.startswith("arg") else options.get("axes", range(len(before)))
    gone = {axis_of(each, len(before)) for each in axes}
    keep = options.get("keepDimensions")
    return ins, tuple(1 if axis in gone else size for axis, size in enumerate(before) if keep or axis not in gone)


def _concat(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    ranks = {len(each) for each in ins if each is not None}
    if not ranks:
        return ins, out
    if len(ranks) > 1:
        raise Misfit(f"{' and '.join(map(shown, ins))} have different numbers of axes")
    rank = ranks.pop()
    axis = axis_of(options.get("axis", 0), rank)
    rest: Known = None if out is None else tuple(None if each == axis else size for each, size in enumerate(out))
    rest = unified(rest, (None,) * rank)
    for shape in ins:
        if shape is not None:
            rest = unified(rest, tuple(None if each == axis else size for each, size in enumerate(shape)))
    assert rest is not None
    parts = [None if shape is None else shape[axis] for shape in ins]
    whole = None if None in parts else sum(part or 0 for part in parts)
    made = [(*rest[:axis], part, *rest[axis + 1 :]) for part in parts]
    return list(made), (*rest[:axis], whole, *rest[axis + 1 :])


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
        for start, size, whole in zip(starts, sizes, ins[0], strict=True):
            if start < 0 or (whole is not None and start + size > whole):
                raise Misfit(f"the slice from {starts} of {sizes} goes beyond {shown(ins[0])}")
    strides = options.get("strides", [1] * len(sizes))
    if len(strides) != len(sizes):
        raise Misfit(f"strides must have {len(sizes)} numbers, got {len(strides)}")
    return ins, tuple(-(-size // stride) for size, stride in zip(sizes, strides, strict=True))


def _pad(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if ins[0] is None:
        return ins, out
    begin, end = (_pair(options, key, 0, len(ins[0])) for key in ("beginningPadding", "endingPadding"))
    return ins, tuple(None if size is None else size + a + b for size, a, b in zip(ins[0], begin, end, strict=True))


def _tile(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if ins[0] is None:
        return ins, out
    times = _pair(options, "repetitions", 1, len(ins[0]))
    return ins, tuple(None if size is None else size * each for size, each in zip(ins[0], times, strict=True))


def _resample(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    if ins[0] is None or ("sizes" not in options and "scales" not in options):
        return ins, out
    made = list(ins[0])
    axes = [axis_of(each, len(made)) for each in options.get("axes", [1, 2])]
    scales = _pair(options, "scales", 1, len(axes))
    for index, axis in enumerate(axes):
        size = made[axis]
        if "sizes" in options:
            made[axis] = _pair(options, "sizes", 1, len(axes))[index]
        elif size is not None:
            made[axis] = max(int(size * scales[index]), 1)
    return ins, tuple(made)


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
    return [shape, *(unified(each, (None, None)) for each in ins[1:])], shape


def _free(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    return ins, out


def _keras(node: Node, options: dict[str, Any], ins: list[Known], out: Known) -> tuple[list[Known], Known]:
    known = keras_layers.shape_of(node.operator, options, ins[0], ins[1:]) if is_keras(node.operator) else None
    return ins, unified(out, known)


_RULES: dict[str, Rule] = {
    "same": _same, "norm": _same, "where": _binary, "binary": _binary, "residual": _residual, "matmul": _matmul,
    "conv": _conv, "convTranspose": _conv,
    "pool": _pool, "reduce": _reduce, "arg": _reduce, "concat": _concat, "reshape": _reshape, "transpose": _transpose, "slice": _slice, "pad": _pad,
    "tile": _tile, "resample": _resample, "recurrent": _recurrent, "cell": _recurrent, "attend": _attend, "free": _free,
    "gather": indexing.gather, "scatter": indexing.scatter, "split": indexing.split,
}  # fmt: skip
