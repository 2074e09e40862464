"""The work of each part of a model as a list of ops, and the values that parts send each other: ``Program``.

The parts of a model are (stage, worker of the stage). Everything that a part computes is an ``Op`` with named values. A
value that another part made must be sent, and its gradient comes back: the sum over all parts that use it. So nothing
here depends on how a layer is cut, apart from these conversions between whole tensors and shares of units::

    own -> whole      each worker sends its share to the workers with a need for the whole tensor
    whole -> own      without messages
    addends -> own    each worker sends each other one its units; that one adds them up in the order of workers

If a worker needs other units than its share, such as rows at a border, it receives only the missing units.

The ops of a part form segments. A segment begins with all that it needs from others, and ends with all that others
need, so it is computed, and differentiated, at once. Its level is the number of values that must have been sent before,
one after another. A value is only sent to a later level, so parts never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.layer_plan import Chooser, is_convolution, is_elementwise, is_softmax, softmax_of
from ddlf.training.exchanges.split.statistics import LARGEST, TOTAL, Exchanged, Softmax
from ddlf.training.exchanges.split.units import Indices, Piece, Units, joined, same_units, take_indices
from ddlf.training.exchanges.split.ways import Alike, Way

WHOLE = "whole"
"""Kind of a whole tensor."""
OWN = "own"
"""Kind of a part's share of a tensor that is cut."""
SLICED = "sliced"
"""Kind of a part's share of a tensor that is whole, or cut in another way."""
ADDEND = "addend"
"""Kind of what one part adds to units of another one."""
BORDER = "border"
"""Kind of the units of a part that another one lacks."""
BEFORE = "before"
"""Kind of a part's share before an exchange of numbers."""


class Name(NamedTuple):
    """Names a value.

    Args:
        kind: Kind of the value.
        tensor: Number of the tensor in the graph; behind the last one, tensors before their activation.
        part: Number of the part that makes it.
        to: The part that it is for, or another number if a part has several values of this kind.
    """

    kind: str
    tensor: int
    part: int
    to: int = -1


MOST_VALUES = 1 << 23
"""A segment with several weights has at most this number of values in them."""

Compute = Callable[[Sequence[Any], bool], Sequence[Any]]
"""Computes values from others. The second argument says whether layers behave as in training."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One thing that a part computes.

    Args:
        part: Number of the part.
        takes: The values that it needs.
        gives: The values that it makes.
        compute: Computes these from those.
        weights: Numbers of the weights that it uses.
        call: Number of the call whose random states it uses; -1 without one.
    """

    part: int
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    compute: Compute
    weights: tuple[int, ...] = ()
    call: int = -1


@dataclass(frozen=True, slots=True)
class Value:
    """A value that travels between parts, or between segments of one part.

    Args:
        shape: Its shape for one sample.
        dtype: Its type.
        layer: Name of the layer that computes it.
        part: Number of the part that makes it.
        receivers: Numbers of the other parts that use it.
        differentiable: Whether it has a gradient.
    """

    shape: tuple[int | None, ...]
    dtype: str
    layer: str
    part: int
    receivers: tuple[int, ...]
    differentiable: bool

    @property
    def nbytes(self) -> int:
        """Its bytes for one sample. An unknown dimension counts 1."""
        itemsize = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return int(itemsize * prod(size or 1 for size in self.shape))


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of a part that are computed at once.

    Args:
        ops: The ops, in order.
        names: The name of each value of ``takes`` and ``gives``, by number.
        takes: Numbers of the values that it needs from other parts and earlier segments.
        receives: Numbers of the values that come from other parts, and that no earlier segment has needed.
        gives: Numbers of the values that other parts and later segments need.
        inputs: Numbers of the inputs of the model that it reads.
        has_loss: Whether it computes the loss.
    """

    ops: tuple[Op, ...]
    names: dict[int, Name]
    takes: tuple[int, ...]
    receives: tuple[int, ...]
    gives: tuple[int, ...]
    inputs: tuple[int, ...]
    has_loss: bool


@dataclass(frozen=True, slots=True)
class Program:
    """The work of all parts.

    Args:
        workers: The number of workers of each stage.
        by_rows: The number of convolutions, from the first one on, that are cut by image rows.
        values: The values that cross the border of a segment.
        segments: The segments of each part.
        ways: How each call is computed.
        pieces: How weights are cut, by number.
        inputs: For each part, the inputs of the model that it reads.
        uses: For each part, the weights that it uses.
        shapes: The shape of each whole weight.
    """

    workers: int
    by_rows: int
    values: tuple[Value, ...]
    segments: tuple[tuple[Segment, ...], ...]
    ways: tuple[Way, ...]
    pieces: dict[int, Piece]
    inputs: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, ends: Sequence[int], workers: int, by_rows: int = 0) -> Program:
        """Return what all parts of a model compute.

        Args:
            graph: The calls of the model.
            ends: For each stage, the number behind its last call.
            workers: The number of workers of each stage.
            by_rows: The number of convolutions, from the first one on, that are cut by image rows.
        """
        return _Builder(graph, ends, workers, by_rows).program()


@dataclass
class _Builder:
    """Makes the ops of all parts, then drops the ones without use for the loss.

    Args:
        graph, ends, workers, by_rows: Arguments of ``Program.of``.
        ops: The ops of all parts, in order.
        op_of: The op that makes each value.
        shapes: The shape for one sample, the type and the layer of each value.
        cut: The units of each tensor that the workers of its stage have; None for a whole tensor.
        stage_of: The stage that computes each tensor.
        holders: The parts that have each whole tensor.
        slicings: The cuts of values of the kind ``SLICED``. Their names have the index in this list.
        received: For a tensor and a part, the indices that the part has, and the values with these.
        statistic_shapes: The shape for one sample of the numbers that workers exchange about each tensor.
        lengths: Number of indices of each value of the kind ``BORDER``.
        ways: How each call is computed, in order.
        pieces: How weights are cut, by number.
        way_of: How each operation is computed, by its ``id``.
    """

    graph: Graph
    ends: Sequence[int]
    workers: int
    by_rows: int = 0
    ops: list[Op] = field(default_factory=list)
    op_of: dict[Name, Op] = field(default_factory=dict)
    shapes: dict[Name, tuple[tuple[int | None, ...], str, str]] = field(default_factory=dict)
    cut: dict[int, Units | None] = field(default_factory=dict)
    stage_of: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[int]] = field(default_factory=dict)
    slicings: list[Units] = field(default_factory=list)
    received: dict[tuple[int, int], list[tuple[Indices, Name]]] = field(default_factory=dict)
    statistic_shapes: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    lengths: dict[Name, int] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)
    pieces: dict[int, Piece] = field(default_factory=dict)
    way_of: dict[int, Way] = field(default_factory=dict)

    def program(self) -> Program:
        graph, begin = self.graph, 0
        for stage, end in enumerate(self.ends):
            for number in range(begin, end):
                self._add_call(stage, number)
            begin = end
        last = len(self.ends) * self.workers - 1
        outputs = tuple(self._bring_whole(tensor, last) for tensor in graph.outputs)
        loss = Op(last, outputs, (), lambda values, training: ())
        needed = self._needed(loss)
        return self._cut_segments([op for op in self.ops if op in needed] + [loss], last)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _add_call(self, stage: int, number: int) -> None:
        """Add the ops of a call."""
        import keras

        call = self.graph.calls[number]
        parts = [stage * self.workers + worker for worker in range(self.workers)]
        way = self._choose_way(stage, call, parts)
        self.ways.append(way)
        for index, weight in zip(call.weights, getattr(call.operation, "weights", []), strict=True):
            if id(weight) in way.pieces:
                self.pieces[index] = way.pieces[id(weight)]
        for tensor in call.outputs:
            self.stage_of[tensor] = stage
        function = way.activation(call.operation)
        tensor = call.outputs[0]
        if isinstance(way, Exchanged):
            self._add_exchange(number, way, call.inputs[0], tensor, call.operation, parts)
            return
        if isinstance(way, Alike) or not (way.adds or way.gives is not None):
            self._add_simple(number, way, parts)
            return
        separate_activation = None if is_elementwise(function, way.gives) else function
        result = tensor + len(self.graph.tensors) if separate_activation else tensor
        self.stage_of[result] = stage
        bias = way.bias(call.operation)
        index_of = dict(zip(map(id, getattr(call.operation, "weights", [])), call.weights, strict=True))
        variable = None if bias is None else index_of[id(bias)]
        fused_activation = None if separate_activation else function

        def finish(total: Any) -> Any:
            if variable is not None:
                total = keras.ops.add(total, self.graph.model.weights[variable])
            return fused_activation(total) if fused_activation else total

        biased = () if variable is None else (variable,)
        weights = tuple(index for index in call.weights if index != variable)
        if way.adds:
            self._add_sum(number, way, parts, result, finish, weights, biased)
        else:
            self.cut[result] = way.gives
            for worker, part in enumerate(parts):
                inputs = self._inputs(call, way, part)
                compute = self._make_compute(number, way, worker, finish)
                self._add(Op(part, inputs, (Name(OWN, result, part),), compute, (*weights, *biased), number), number)
        if separate_activation:
            self._add_activation(number, result, tensor, separate_activation, parts)

    def _choose_way(self, stage: int, call: Any, parts: Sequence[int]) -> Way:
        if self.workers == 1:
            return Way()
        earlier = self.way_of.get(id(call.operation))
        if earlier is not None and earlier.pieces:
            return earlier
        symbols = self.graph.tensors
        cut = [self.cut.get(tensor) for tensor in call.inputs]
        has_whole_inputs = all(Name(WHOLE, tensor, part) in self.op_of for tensor in call.inputs for part in parts)
        inputs, outputs = [symbols[tensor] for tensor in call.inputs], [symbols[tensor] for tensor in call.outputs]
        way = Chooser(call, inputs, outputs, cut, has_whole_inputs, self.workers, self._by_rows(call)).way()
        if isinstance(way, Softmax) and self._only_for_the_loss(call.outputs[0]):
            way = Way()
        if earlier is not None and way.pieces:
            way = Way("it is used several times, and its first use is not cut")
        if way.pieces and any(self._is_tied(call, index) for index in call.weights):
            way = Way("another layer uses its weights, too")
        self.way_of[id(call.operation)] = way
        return way

    def _is_tied(self, call: Any, index: int) -> bool:
        """Return whether another layer than that of a call uses a weight, by its number."""
        return any(index in other.weights for other in self.graph.calls if other.operation is not call.operation)

    def _by_rows(self, call: Any) -> bool:
        """Return whether a call belongs to the convolutions that are cut by image rows."""
        convolutions = [convolution for convolution in self.graph.calls if is_convolution(convolution.operation)]
        return any(convolution is call for convolution in convolutions[: self.by_rows])

    def _inputs(self, call: Any, way: Way, part: int) -> tuple[Name, ...]:
        if way.takes is None:
            return tuple(self._bring_whole(tensor, part) for tensor in call.inputs)
        return tuple(self._bring_units(tensor, part, way.takes) for tensor in call.inputs)

    def _make_compute(self, number: int, way: Way, worker: int, after: Callable[[Any], Any] | None = None) -> Compute:
        call, symbols = self.graph.calls[number], self.graph.tensors

        def compute(values: Sequence[Any], training: bool) -> Sequence[Any]:
            outputs = way.compute(call, [symbols[tensor] for tensor in call.inputs], values, worker, training)
            return [after(output) for output in outputs] if after else outputs

        return compute

    def _add_simple(self, number: int, way: Way, parts: Sequence[int]) -> None:
        """Add a call whose results are whole, or follow the units of its inputs."""
        call = self.graph.calls[number]
        kind = WHOLE if way.gives is None else OWN
        for tensor in call.outputs:
            self.cut[tensor] = way.gives
            self.holders[tensor] = list(parts) if way.gives is None else []
        for worker, part in enumerate(parts):
            gives = tuple(Name(kind, tensor, part) for tensor in call.outputs)
            inputs = self._inputs(call, way, part)
            self._add(Op(part, inputs, gives, self._make_compute(number, way, worker), call.weights, number), number)

    def _add_sum(
        self,
        number: int,
        way: Way,
        parts: Sequence[int],
        result: int,
        finish: Callable[[Any], Any],
        weights: tuple[int, ...],
        biased: tuple[int, ...],
    ) -> None:
        """Add a call whose results must be added up: by the units of each part, or where the whole sum is needed."""
        units = way.gives
        call = self.graph.calls[number]
        holders: Sequence[int] = parts
        is_used_once = sum(other.operation is call.operation for other in self.graph.calls) == 1
        if self._only_for_the_loss(call.outputs[0]) and (is_used_once or units is None):
            units, holders = None, parts[-1:]
            for index in biased:  # the bias is whole, where the sum is
                self.pieces.pop(index, None)
        self.cut[result], self.holders[result] = units, [] if units is not None else list(holders)
        for worker, part in enumerate(parts):
            inputs, compute = self._inputs(call, way, part), self._make_compute(number, way, worker)
            if units is None:
                gives: tuple[Name, ...] = (Name(ADDEND, result, part),)
                self._add(Op(part, inputs, gives, compute, weights, number), number)
                continue

            def split_sum(
                values: Sequence[Any], training: bool, compute: Compute = compute, units: Units = units
            ) -> Sequence[Any]:
                (total,) = compute(values, training)
                return [units.share_of(total, worker) for worker in range(len(units))]

            gives = tuple(Name(ADDEND, result, part, to) for to in parts)
            self._add(Op(part, inputs, gives, split_sum, weights, number), number)
        for part in holders:
            addends = tuple(Name(ADDEND, result, source, -1 if units is None else part) for source in parts)
            gives = (Name(WHOLE if units is None else OWN, result, part),)

            def add(values: Sequence[Any], training: bool) -> Sequence[Any]:
                return [finish(sum(values[1:], values[0]))]

            self._add(Op(part, addends, gives, add, biased), number)

    def _only_for_the_loss(self, tensor: int) -> bool:
        """Return whether a tensor is an output of the model of its last stage, and no call uses it."""
        last = len(self.ends) - 1
        used = any(tensor in call.inputs for call in self.graph.calls)
        return tensor in self.graph.outputs and not used and self.stage_of[tensor] == last

    def _add_activation(
        self, number: int, before: int, after: int, function: Callable[[Any], Any], parts: Sequence[int]
    ) -> None:
        """Add an activation that does not treat each unit alone."""
        units = self.cut[before]
        if units is not None and is_softmax(function) and not self._only_for_the_loss(after):
            count = len(self.graph.tensors)
            self._add_exchange(
                number, softmax_of(units, self.graph.tensors[before % count].shape), before, after, None, parts
            )
            return
        self.cut[after], holders = None, self.holders.get(before) or list(parts)
        self.holders[after] = list(holders)
        for part in holders:
            inputs = (self._bring_whole(before, part),)
            self._add(
                Op(part, inputs, (Name(WHOLE, after, part),), lambda values, training: [function(values[0])]), number
            )

    def _add_exchange(
        self, number: int, way: Exchanged, before: int, after: int, layer: Any, parts: Sequence[int]
    ) -> None:
        """Add a call that exchanges numbers of the units of all parts, not the units."""
        assert way.takes is not None
        self.cut[after], self.holders[after], self.statistic_shapes[after] = way.gives, [], way.shape
        shares, numbers = [self._bring_units(before, part, way.takes) for part in parts], tuple[Name, ...]()
        for step, kind in enumerate(way.kinds):
            next_shares = [Name(BEFORE, after, part, step) for part in parts]
            statistics = [Name(kind, after, part, step) for part in parts]
            for worker, part in enumerate(parts):

                def tell(
                    values: Sequence[Any], training: bool, step: int = step, worker: int = worker
                ) -> Sequence[Any]:
                    return way.tell(layer, step, values[0], values[1:], worker)

                self._add(Op(part, (shares[worker], *numbers), (next_shares[worker], statistics[worker]), tell), number)
            shares, numbers = next_shares, tuple(statistics)
        weights = () if layer is None else self.graph.calls[number].weights
        for worker, part in enumerate(parts):

            def finish(values: Sequence[Any], training: bool, worker: int = worker) -> Sequence[Any]:
                return [way.finish(layer, values[0], values[1:], worker, training)]

            call = -1 if layer is None else number
            self._add(Op(part, (shares[worker], *numbers), (Name(OWN, after, part),), finish, weights, call), number)

    # -- conversions --------------------------------------------------------------------------------------------------

    def _bring_whole(self, tensor: int, part: int) -> Name:
        """Return the name of a whole tensor at a part, and add the ops that bring it there."""
        name = Name(WHOLE, tensor, part)
        if name in self.op_of or tensor < len(self.graph.inputs):
            return name
        units = self.cut[tensor]
        if units is None:
            holders = self.holders[tensor]
            return Name(WHOLE, tensor, holders[part % len(holders)])
        total = np.arange(sum(units.counts))
        self._gather(tensor, part, total, name)
        return name

    def _bring_units(self, tensor: int, part: int, units: Units) -> Name:
        """Return the name of a part's units of a tensor, and add the ops that bring them there."""
        worker, tensor_units = part % self.workers, self.cut.get(tensor)
        if same_units(tensor_units, units):
            owner = self.stage_of[tensor] * self.workers + worker
            if owner != part:
                self._note_received(tensor, part, units[worker], Name(OWN, tensor, owner))
            return Name(OWN, tensor, owner)
        number = next((i for i, slicing in enumerate(self.slicings) if same_units(slicing, units)), len(self.slicings))
        if number == len(self.slicings):
            self.slicings.append(units)
        name = Name(SLICED, tensor, part, number)
        if name in self.op_of:
            return name
        if tensor_units is not None and tensor_units.axis == units.axis and Name(WHOLE, tensor, part) not in self.op_of:
            self._gather(tensor, part, units[worker], name)
            return name
        whole = self._bring_whole(tensor, part)
        self._add(Op(part, (whole,), (name,), lambda values, training: [units.share_of(values[0], worker)]), -1)
        return name

    def _gather(self, tensor: int, part: int, needed: Indices, name: Name) -> None:
        """Bring some indices of a tensor that is cut to a part. No value travels to a part twice."""
        units, first = self.cut[tensor], self.stage_of[tensor] * self.workers
        assert units is not None
        axis = units.axis
        if first <= part < first + self.workers:
            self._note_received(tensor, part, units[part - first], Name(OWN, tensor, part))
        received = self.received.setdefault((tensor, part), [])
        for worker, owned in enumerate(units):
            present = np.concatenate([piece for piece, _ in received]) if received else np.zeros(0, int)
            lacks = np.setdiff1d(np.intersect1d(needed, owned), present)
            if not len(lacks):
                continue
            if len(lacks) == len(owned):
                self._note_received(tensor, part, owned, Name(OWN, tensor, first + worker))
                continue
            positions = np.flatnonzero(np.isin(owned, lacks))
            border = Name(BORDER, tensor, first + worker, len(self.ops))

            def of_border(values: Sequence[Any], training: bool, positions: Indices = positions) -> Sequence[Any]:
                return [take_indices(values[0], positions, axis)]

            self.lengths[border] = len(lacks)
            self._add(Op(first + worker, (Name(OWN, tensor, first + worker),), (border,), of_border), -1)
            self._note_received(tensor, part, owned[positions], border)
        used = [(piece, source) for piece, source in received if np.isin(piece, needed).any()]
        indices = [piece for piece, _ in used]
        order = np.sort(np.concatenate(indices))
        chosen = np.searchsorted(order, needed)

        def assemble(values: Sequence[Any], training: bool) -> Sequence[Any]:
            gathered = joined(values, indices, axis)
            return [gathered if len(chosen) == len(order) else take_indices(gathered, chosen, axis)]

        self._add(Op(part, tuple(source for _, source in used), (name,), assemble), -1)

    def _note_received(self, tensor: int, part: int, indices: Indices, name: Name) -> None:
        """Note that a part has some indices of a tensor."""
        received = self.received.setdefault((tensor, part), [])
        if name not in [source for _, source in received]:
            received.append((indices, name))

    def _add(self, op: Op, number: int) -> None:
        self.ops.append(op)
        for name in op.gives:
            self.op_of[name] = op
            self.shapes[name] = self._shape(name, number)

    def _shape(self, name: Name, number: int) -> tuple[tuple[int | None, ...], str, str]:
        count = len(self.graph.tensors)
        symbol = self.graph.tensors[name.tensor % count]
        shape, units = tuple(symbol.shape[1:]), self.cut.get(name.tensor)
        if name.kind in (LARGEST, TOTAL):
            shape = self.statistic_shapes[name.tensor]
        elif name.kind in (OWN, BEFORE) and units is not None:
            shape = units.shape(shape, name.part % self.workers)
        elif name.kind == ADDEND and name.to >= 0 and units is not None:
            shape = units.shape(shape, name.to % self.workers)
        elif name.kind == SLICED:
            shape = self.slicings[name.to].shape(shape, name.part % self.workers)
        elif name.kind == BORDER and units is not None:
            shape = Units((np.arange(self.lengths[name]),), units.axis).shape(shape, 0)
        return shape, str(symbol.dtype), symbol._keras_history.operation.name

    # -- segments -----------------------------------------------------------------------------------------------------

    def _needed(self, loss: Op) -> set[Op]:
        """Return the ops that the loss needs."""
        needed, pending = {loss}, [loss]
        while pending:
            for name in pending.pop().takes:
                op = self.op_of.get(name)
                if op is not None and op not in needed:
                    needed.add(op)
                    pending.append(op)
        return needed

    def _cut_segments(self, ops: Sequence[Op], last: int) -> Program:
        parts = last + 1
        level: dict[Op, int] = {}
        for op in ops:
            producers = [self.op_of[name] for name in op.takes if name in self.op_of]
            level[op] = max(
                (
                    level[producer] + (producer.part != op.part and self._stage(producer) == self._stage(op))
                    for producer in producers
                ),
                default=0,
            )
        if ops:
            level[ops[-1]] = max(level[op] for op in ops if op.part == last)
        cut = self._number_segments(ops, level)
        segment_of = {op: (op.part, cut[op]) for op in ops}
        used: dict[Name, list[Op]] = {}
        for op in ops:
            for name in op.takes:
                if name in self.op_of and segment_of[self.op_of[name]] != segment_of[op]:
                    used.setdefault(name, []).append(op)
        names = [name for op in ops for name in op.gives if name in used]
        numbers = {name: number for number, name in enumerate(names)}
        values = tuple(self._value(name, used[name]) for name in names)
        segments = tuple(
            tuple(self._segments_of([op for op in ops if op.part == part], cut, numbers, used, ops[-1]))
            for part in range(parts)
        )
        inputs = tuple(tuple(sorted({i for segment in part for i in segment.inputs})) for part in segments)
        uses = tuple(
            tuple(dict.fromkeys(i for segment in part for op in segment.ops for i in op.weights)) for part in segments
        )
        shapes = tuple(tuple(map(int, weight.shape)) for weight in self.graph.model.weights)
        return Program(
            self.workers, self.by_rows, values, segments, tuple(self.ways), self.pieces, inputs, uses, shapes
        )

    def _number_segments(self, ops: Sequence[Op], level: dict[Op, int]) -> dict[Op, tuple[int, int]]:
        """Return the segment of each op: its level, and a number that grows after each ``MOST_VALUES`` of weights.

        The gradients of a segment's weights are there at the same time, so a segment has few large weights.
        """
        segment_of: dict[Op, tuple[int, int]] = {}
        filled: dict[tuple[int, int], tuple[int, int]] = {}
        for op in ops:
            number, values = filled.get((op.part, level[op]), (0, 0))
            more = sum(prod(self.graph.model.weights[index].shape) for index in op.weights) // self.workers
            if values and values + more > MOST_VALUES:
                number, values = number + 1, 0
            filled[op.part, level[op]] = number, values + more
            segment_of[op] = level[op], number
        return segment_of

    def _stage(self, op: Op) -> int:
        return op.part // self.workers

    def _value(self, name: Name, users: Sequence[Op]) -> Value:
        shape, dtype, layer = self.shapes[name]
        receivers = tuple(sorted({op.part for op in users} - {name.part}))
        differentiable = "float" in dtype and name.kind != LARGEST
        return Value(shape, dtype, layer, name.part, receivers, differentiable)

    def _segments_of(
        self,
        ops: Sequence[Op],
        cut: dict[Op, tuple[int, int]],
        numbers: dict[Name, int],
        used: dict[Name, list[Op]],
        loss: Op,
    ) -> Iterator[Segment]:
        earlier: set[int] = set()  # values that earlier segments have taken
        name_of = {number: name for name, number in numbers.items()}
        for key in sorted({cut[op] for op in ops}):
            own_ops = tuple(op for op in ops if cut[op] == key)
            produced = {name for op in own_ops for name in op.gives}
            takes = sorted(
                {numbers[name] for op in own_ops for name in op.takes if name in numbers and name not in produced}
            )
            gives = sorted(numbers[name] for name in produced if name in used)
            inputs = sorted({name.tensor for op in own_ops for name in op.takes if name not in self.op_of})
            names = {number: name_of[number] for number in (*takes, *gives)}
            receives = [i for i in takes if i not in earlier and name_of[i].part != own_ops[0].part]
            earlier.update(takes)
            yield Segment(
                own_ops, names, tuple(takes), tuple(receives), tuple(gives), tuple(inputs), has_loss=loss in own_ops
            )
