"""Cuts a model into parts of known costs: ``Plan``. Runs on master and workers.

The plan follows from shapes alone, and is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ddlf.algorithms.pipeline import balanced, sizes
from ddlf.errors import ConfigError
from ddlf.events import ModelCut, PlannedPart
from ddlf.training.exchanges.split.cut import FILTERS, ROWS, Cut
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.images import UNEVEN
from ddlf.training.exchanges.split.layer_plan import is_convolution
from ddlf.training.exchanges.split.program import Program
from ddlf.training.exchanges.split.variables import deferred, name_all
from ddlf.training.exchanges.split.ways import Alike, Way
from ddlf.training.messages import Message

MOST_PARTS = 64
"""Largest number of parts that ``memory:`` tries."""
SHOWN = 3
"""Maximum number of names of layers in a row of the table."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The variables of an optimizer of a whole model, which exist nowhere.

    Args:
        paths: Path of each variable, in Keras's order.
        weight_of: For each variable, the index of its weight in ``model.weights``; None if it belongs to all weights.
        nbytes: Bytes of each variable.
    """

    paths: tuple[str, ...]
    weight_of: tuple[int | None, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of_model(cls, model: Any) -> OptimizerState:
        """Return the variables that the compiled optimizer would have for all weights of a model.

        Raises:
            ConfigError: Several variables have one name, so parts could not tell them apart.
        """
        from keras.src.optimizers.base_optimizer import BaseOptimizer

        config = model.optimizer.get_config()
        has_rate = hasattr(model.optimizer._learning_rate, "assign")
        optimizer = type(model.optimizer).from_config(config if has_rate else config | {"learning_rate": 1.0})

        def without_memory(add: Callable[..., Any]) -> Callable[..., Any]:
            def added(*args: Any, **options: Any) -> Any:
                with deferred():
                    return add(optimizer, *args, **options)

            return added

        # TensorFlow's own add_variable_from_reference reads the values of the weights. Single numbers are made as usual.
        usual = BaseOptimizer.add_variable, BaseOptimizer.add_variable_from_reference
        vars(optimizer).update(_var_key=id, **{add.__name__: without_memory(add) for add in usual})
        optimizer.build(model.trainable_variables)
        name_all(optimizer)
        trained = {id(weight) for weight in model.trainable_variables}
        prefixes = {
            f"{optimizer.name}/{weight.path.replace('/', '_')}_": index
            for index, weight in enumerate(model.weights)
            if id(weight) in trained
        }
        longest = sorted(prefixes, key=len, reverse=True)
        variables = [
            variable for variable in optimizer.variables if has_rate or variable is not optimizer._learning_rate
        ]
        paths = [variable.path for variable in variables]
        if len({*paths}) < len(paths):
            raise ConfigError(
                f"split does not support {type(optimizer).__name__}: several of its variables have the same name, so parts "
                "cannot tell them apart",
                hint="use another optimizer, such as Adam, or leave out split",
            )
        weight_numbers = [
            next((prefixes[prefix] for prefix in longest if path.startswith(prefix)), None) for path in paths
        ]
        return cls(tuple(paths), tuple(weight_numbers), tuple(map(bytes_of, variables)))


def bytes_of(variable: Any) -> int:
    """Return the bytes of a Keras variable."""
    kind = str(variable.dtype)
    return int(prod(variable.shape)) * (2 if kind == "bfloat16" else np.dtype(kind).itemsize)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: some calls that follow each other.

    Args:
        number: Number of the part, from 0. The second replica's parts follow the first one's.
        begin: Number of its first call.
        end: Number behind its last call.
        weights: Numbers of its weights in ``model.weights``.
        borrows: Numbers of the weights that it uses and another part owns, each with the number of its owner.
        lends: Numbers of its weights that other parts use, each with the numbers of these parts.
        inputs: Numbers of the inputs of the model that it reads.
        first: Numbers of the weights that no earlier part of its replica uses. It counts their regularization.
    """

    number: int
    begin: int
    end: int
    weights: tuple[int, ...]
    borrows: tuple[tuple[int, int], ...]
    lends: tuple[tuple[int, tuple[int, ...]], ...]
    inputs: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def all_weights(self) -> tuple[int, ...]:
        """The numbers of all weights that it has: its own, and the borrowed ones."""
        return (*self.weights, *(index for index, _ in self.borrows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments(Message):
    """How a model is cut: the arguments of ``Plan.at``, which workers receive."""

    ends: Sequence[int]
    batch_size: int
    micro_batches: int
    workers_of_stage: int
    replicas: int
    by_rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that is cut into parts.

    Args:
        graph: The calls of the model.
        parts: The parts, ordered by replica, by stage, and by worker of the stage. The last one of each replica has
            the loss.
        program: The work of the parts.
        optimizer: The variables of the optimizer.
        batch_size: Samples in a batch.
        micro_batches: M, the number of micro-batches of a whole batch.
        replicas: The number of copies of the model that train together.
    """

    graph: Graph
    parts: tuple[Part, ...]
    program: Program
    optimizer: OptimizerState
    batch_size: int
    micro_batches: int
    replicas: int = 1

    @classmethod
    def of(cls, graph: Graph, cut: Cut, batch_size: int, micro_batches: int, replicas: int = 1) -> Plan:
        """Return the plan for a model.

        Args:
            graph: The calls of the model.
            cut: The setting ``split``.
            batch_size: Samples in a batch.
            micro_batches: M, the number of micro-batches of a whole batch.
            replicas: The number of copies of the model.

        Raises:
            ConfigError: The model has too few layers, or lacks a layer that ``cut`` names.
        """
        optimizer = OptimizerState.of_model(graph.model)

        def with_rows(ends: Sequence[int], by_rows: int) -> Plan:
            program = Program.of(graph, ends, cut.within, by_rows)
            parts = _parts(ends, program, replicas)
            return cls(graph, parts, program, optimizer, batch_size, micro_batches, replicas)

        def planned(ends: Sequence[int]) -> Plan:
            convolutions = sum(is_convolution(call.operation) for call in graph.calls) if cut.within > 1 else 0
            first, last = convolutions * (cut.images == ROWS), convolutions * (cut.images != FILTERS)
            plans = (with_rows(ends, by_rows) for by_rows in range(first, last + 1))
            return min(plans, key=lambda plan: sum(map(plan.bytes_sent, plan.parts)))

        count = len(graph.calls)
        if cut.layers:
            return planned(_ends_by_name(graph, cut))
        if cut.parts > count:
            raise ConfigError(
                f"split={str(cut)!r} needs {cut.parts} layers, and the model {graph.model.name!r} has {count}",
                hint=f"use at most stages:{count}",
            )
        costs = [call.products for call in graph.calls]
        borders = [sum(bytes_of_tensor(graph, tensor) for tensor in graph.crossing(end)) for end in range(1, count)]
        if cut.parts:
            return planned(balanced(costs, borders, cut.parts))
        most, least = min(count, MOST_PARTS), 0
        for parts in range(1, most + 1):
            plan = planned(balanced(costs, borders, parts))
            needs = max(map(plan.memory, plan.parts))
            if needs <= cut.nbytes:
                return plan
            least = min(least or needs, needs)
        raise ConfigError(
            f"split={str(cut)!r} is too little: the largest part of {graph.model.name!r} needs {size(least)}, in up to {most} parts",
            hint="allow more memory, or use more micro_batches",
        )

    @classmethod
    def at(
        cls,
        graph: Graph,
        ends: Sequence[int],
        batch_size: int,
        micro_batches: int,
        workers_of_stage: int = 1,
        replicas: int = 1,
        by_rows: int = 0,
    ) -> Plan:
        """Return the plan whose stages end behind the calls with these numbers, as ``ends`` has them."""
        program = Program.of(graph, ends, workers_of_stage, by_rows)
        optimizer = OptimizerState.of_model(graph.model)
        parts = _parts(ends, program, replicas)
        return cls(graph, parts, program, optimizer, batch_size, micro_batches, replicas)

    @property
    def arguments(self) -> PlanArguments:
        """The arguments that ``of_arguments`` needs to make this plan from the same model."""
        return PlanArguments(
            ends=self.ends,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            workers_of_stage=self.program.workers,
            replicas=self.replicas,
            by_rows=self.program.by_rows,
        )

    @classmethod
    def of_arguments(cls, graph: Graph, arguments: PlanArguments) -> Plan:
        """Return the plan that another node has made from the same model."""
        return cls.at(
            graph,
            arguments.ends,
            arguments.batch_size,
            arguments.micro_batches,
            arguments.workers_of_stage,
            arguments.replicas,
            arguments.by_rows,
        )

    @property
    def ends(self) -> list[int]:
        """The numbers behind the last call of each stage."""
        return [part.end for part in self.parts[: self.parts_of_replica : self.program.workers]]

    @property
    def parts_of_replica(self) -> int:
        """The number of parts of each replica."""
        return len(self.parts) // self.replicas

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.parts_of_replica // self.program.workers

    def stage(self, part: int) -> int:
        """Return the stage of a part."""
        return part % self.parts_of_replica // self.program.workers

    def replica(self, part: int) -> int:
        """Return the replica of a part, from 0."""
        return part // self.parts_of_replica

    def piece(self, part: int, index: int | None, value: Any) -> Any:
        """Return a part's share of a weight, or of a variable of the optimizer that belongs to it.

        Args:
            part: Number of the part.
            index: Number of the weight in ``model.weights``; None for a variable that belongs to all weights.
            value: The whole value.
        """
        piece = None if index is None else self.program.pieces.get(index)
        return value if piece is None else piece.share_of(value, part % self.program.workers)

    def shape(self, part: int, index: int) -> tuple[int, ...]:
        """Return the shape of a part's share of a weight."""
        whole, piece = self.program.shapes[index], self.program.pieces.get(index)
        if piece is None:
            return whole
        shape = list(whole)
        shape[piece.axis] = len(piece.units[part % self.program.workers])
        return tuple(shape)

    def joined(self, index: int | None, values: Sequence[Any]) -> Any:
        """Return the whole value from the shares of the parts that own a weight, in their order."""
        piece = None if index is None else self.program.pieces.get(index)
        return values[0] if piece is None else piece.join(values)

    def writes(self, part: Part) -> list[int]:
        """Return the numbers of the variables of the optimizer that the whole model has from a part.

        Variables that belong to all weights, such as the number of steps, come from the first part that steps.
        """
        trained = {id(weight) for weight in self.graph.model.trainable_variables}
        weights = self.graph.model.weights
        stepping = (other for other in self.parts if any(id(weights[index]) in trained for index in other.weights))
        own_weights = {*part.weights, *((None,) if next(stepping, self.parts[0]) is part else ())}
        return [number for number, weight in enumerate(self.optimizer.weight_of) if weight in own_weights]

    def fraction(self, part: int, index: int | None) -> float:
        """Return the share of a weight that a part has, from 0 to 1."""
        piece = None if index is None else self.program.pieces.get(index)
        return 1.0 if piece is None else piece.fraction(part % self.program.workers)

    def share_of_call(self, part: int, call: int) -> float:
        """Return the share of a call that a part computes, from 0 to 1."""
        units = self.program.ways[call].counted
        return 1.0 if units is None else len(units[part % self.program.workers]) / sum(units.counts)

    def bytes_of_weights(self, part: Part) -> int:
        """Return the bytes of the weights that a part has, including the borrowed ones."""
        weights = self.graph.model.weights
        return sum(round(bytes_of(weights[index]) * self.fraction(part.number, index)) for index in part.all_weights)

    def bytes_of_optimizer(self, part: Part) -> int:
        """Return the bytes of a part's optimizer variables."""
        own_weights = {*part.weights, None}
        variables = zip(self.optimizer.weight_of, self.optimizer.nbytes, strict=True)
        return sum(round(nbytes * self.fraction(part.number, i)) for i, nbytes in variables if i in own_weights)

    def bytes_of_activations(self, part: Part) -> int:
        """Return the largest number of bytes of a part's activations, for s - i micro-batches."""
        micro_batches = min(self.stages - self.stage(part.number), self.micro_batches)
        samples = micro_batches * max(sizes(self.batch_size, self.micro_batches))
        calls = range(part.begin, part.end)
        return samples * sum(
            round(self.graph.calls[call].activations * self.share_of_call(part.number, call)) for call in calls
        )

    def products(self, part: Part) -> int:
        """Return about how many multiplications a part makes for one sample."""
        calls = range(part.begin, part.end)
        return sum(round(self.graph.calls[call].products * self.share_of_call(part.number, call)) for call in calls)

    def memory(self, part: Part) -> int:
        """Return about how many bytes a part needs: weights, their gradients, optimizer and activations."""
        return 2 * self.bytes_of_weights(part) + self.bytes_of_optimizer(part) + self.bytes_of_activations(part)

    def bytes_sent(self, part: Part) -> int:
        """Return the bytes that a part sends in a batch: activations, their gradients, and shared weights."""
        return self.bytes_of_values(part) + self.bytes_of_shared(part)

    def bytes_of_shared(self, part: Part) -> int:
        """Return the bytes of weights that several parts use: a part sends its gradients, and the owner new values."""
        weights = self.graph.model.weights
        trained = {id(weight) for weight in self.graph.model.trainable_variables}
        times = [(index, 1) for index, _ in part.borrows] + [(index, len(users)) for index, users in part.lends]
        shared = [(weights[index], self.fraction(part.number, index), n) for index, n in times]
        return sum(n * round(bytes_of(weight) * share) for weight, share, n in shared if id(weight) in trained)

    def bytes_of_values(self, part: Part) -> int:
        """Return the bytes of the values that a part sends in a batch: activations forward, and gradients back."""
        values, number = self.program.values, part.number % self.parts_of_replica
        forward = sum(value.nbytes * len(value.receivers) for value in values if value.part == number)
        back = sum(value.nbytes for value in values if number in value.receivers and value.differentiable)
        return self.batch_size * (forward + back)

    def check(self) -> None:
        """Raise an error if no layer is cut, for a layer that changes when it is called, and is in several stages, or for
        a value without samples that several parts need.

        Raises:
            ConfigError: Names the layer.
        """
        ways = zip(self.graph.calls, self.program.ways, strict=True)
        if self.program.workers > 1 and not any(call.weights and way.counted is not None for call, way in ways):
            whole = [f"{name}: {reason}" for name, _, _, reason in self.layers() if reason]
            raise ConfigError(
                f"split='within:{self.program.workers}' cuts no layer of the model {self.graph.model.name!r}"
                + f" ({'; '.join(whole[:SHOWN])})" * bool(whole),
                hint="use fewer parts, or split='stages:N', which cuts between layers",
            )
        mixing = {call.name for call in self.graph.mixing()}
        for value in self.program.values:
            if value.receivers and value.layer in mixing:
                raise ConfigError(
                    f"the layer {value.layer!r} returns a tensor without samples, which several parts need",
                    hint="choose a cut that has all its users in its part, with split='layers:NAME,...', or leave out split",
                )
        used: dict[int, tuple[str, int]] = {}
        for part in self.parts:
            for call in self.graph.calls[part.begin : part.end]:
                name, other = used.setdefault(id(call.operation), (call.name, self.stage(part.number)))
                layers = call.operation._flatten_layers() if hasattr(call.operation, "_flatten_layers") else ()
                changing = any(layer._non_trainable_variables for layer in layers)
                stage = self.stage(part.number)
                if other != stage and changing:
                    raise ConfigError(
                        f"the layer {name!r} changes when it is called, and is used in parts {other + 1} and {stage + 1}",
                        hint="choose a cut that has all its calls in one part, with split='layers:NAME,...'",
                    )

    def links(self) -> set[frozenset[int]]:
        """Return the pairs of parts whose workers call each other in a round, or when they write a checkpoint."""
        links, count = set[frozenset[int]](), self.parts_of_replica
        for part in self.parts:
            base, number = part.number - part.number % count, part.number % count
            values = (value for value in self.program.values if value.part == number)
            linked = {base + receiver for value in values for receiver in value.receivers}
            linked.update(owner for _, owner in part.borrows)
            linked.add(self.following(part.number))
            if self.program.pieces:  # they put the shares of weights together
                linked.update(base + other for other in range(count) if self.stage(other) == self.stage(number))
            if self.graph.model.optimizer.global_clipnorm and part.weights:
                linked.update(other.number for other in self.parts if other.weights)
            links.update(frozenset((part.number, other)) for other in linked - {part.number})
        return links

    def following(self, part: int) -> int:
        """Return the part whose worker keeps a copy of the state of another part.

        It is the next one of the same replica. Without another part, it is the same part of the next replica.
        """
        count = self.parts_of_replica
        if count == 1:
            return (part + 1) % len(self.parts)
        return part - part % count + (part + 1) % count

    def warning(self) -> str:
        """Return a sentence about layers that see single micro-batches; "" without any."""
        if self.micro_batches == 1:
            return ""
        layers = self.graph.model._flatten_layers()
        names = [f"{layer.name!r} normalizes" for layer in layers if "BatchNorm" in type(layer).__name__]
        names += [f"{call.name!r} mixes samples" for call in self.graph.mixing()]
        if not names:
            return ""
        samples = max(sizes(self.batch_size, self.micro_batches))
        return f"the layer {names[0]} over micro-batches of {samples} samples, not over batches of {self.batch_size}"

    def event(self) -> ModelCut:
        """Return the parts and their memory as an event, for displays."""
        parts = (
            PlannedPart(
                layers=tuple(call.name for call in self.graph.calls[part.begin : part.end]),
                weights=self.bytes_of_weights(part),
                optimizer=self.bytes_of_optimizer(part),
                activations=self.bytes_of_activations(part),
            )
            for part in self.parts
        )
        return ModelCut(parts=tuple(parts), micro_batches=self.micro_batches)

    def describe(self, slots: int = 1) -> str:
        """Return the number of parts and micro-batches, and the table, for people.

        Args:
            slots: Number of copies of the model in the run. Copies that do not wait for each other are not in the plan.
        """
        count = max(slots, self.replicas)
        replicas = f"{count} replicas of " * (count > 1)
        counted = f"{replicas}{self.parts_of_replica} parts, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        within = f"\n{self.table_of_layers()}" if self.program.workers > 1 else ""
        return f"{counted}\n{self.table()}{within}"

    def table(self) -> str:
        """Return the plan as a table for people."""
        head = ("part", "layers", "weights", "optimizer", "activations", "products", "sends a batch")
        rows: list[tuple[str, ...]] = [head]
        for part in self.parts[: self.parts_of_replica]:
            names = [call.name for call in self.graph.calls[part.begin : part.end]]
            shown = names if len(names) <= SHOWN else [names[0], "..", names[-1]]
            products = self.products(part)
            memory = map(
                size, (self.bytes_of_weights(part), self.bytes_of_optimizer(part), self.bytes_of_activations(part))
            )
            rows.append((str(part.number + 1), " ".join(shown), *memory, f"{products:,}", size(self.bytes_sent(part))))
        return aligned(rows, left={0, 1})

    def layers(self) -> list[tuple[str, str, float, str]]:
        """Return how each layer is cut within a stage.

        Returns:
            For each layer: its name; how it is cut, with the units of each worker; the largest share of its weights
            that a worker has; and why it, or a weight of it, stays whole, or why the share is large; "" without a reason.
        """
        rows: dict[str, tuple[str, str, float, str]] = {}
        weights = self.graph.model.weights
        for number, (call, way) in enumerate(zip(self.graph.calls, self.program.ways, strict=True)):
            parts = [part for part in self.parts[: self.parts_of_replica] if part.begin <= number < part.end]
            whole = sum(bytes_of(weights[index]) for index in call.weights)
            nbytes_of_parts = [
                sum(
                    bytes_of(weights[index]) * self.fraction(part.number, index)
                    for index in call.weights
                    if index in part.all_weights
                )
                for part in parts
            ]
            share = max(nbytes_of_parts) / whole if whole else 0.0
            rows.setdefault(call.name, (call.name, way.describe(), share, way.reason or _uneven(way, share)))
        return list(rows.values())

    def table_of_layers(self) -> str:
        """Return how each layer is cut within a stage, as a table for people."""
        rows: list[tuple[str, ...]] = [("layer", "cut by", "largest share", "why not smaller")]
        for name, cut, share, reason in self.layers():
            rows.append((name, cut, f"{100 * share:.1f} %" if share else "no weights", reason))
        return aligned(rows, left={0, 1, 3})


def aligned(rows: Sequence[tuple[str, ...]], left: set[int]) -> str:
    """Return rows as a table. Columns are aligned to the right, apart from the columns in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if number in left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _uneven(way: Way, share: float) -> str:
    """Return why a worker has much more of a layer than others; "" if it does not."""
    units = way.counted
    if units is None or share * len(units) <= UNEVEN or max(units.counts) * len(units) <= UNEVEN * sum(units.counts):
        return ""
    counted = "units" if way.name == Alike.name else way.name
    return f"{sum(units.counts)} {counted} do not divide evenly between {len(units)} parts"


def size(nbytes: int) -> str:
    """Return a number of bytes for people, such as ``1.5 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def bytes_of_tensor(graph: Graph, number: int) -> int:
    """Return the bytes of one of a graph's tensors for one sample."""
    from ddlf.training.exchanges.split.graph import bytes_of as bytes_of_symbol

    return bytes_of_symbol(graph.tensors[number])


def _parts(ends: Sequence[int], program: Program, replicas: int) -> tuple[Part, ...]:
    """Return the parts of stages that end behind these calls. The first part that uses a weight owns it."""
    workers, count = program.workers, len(program.uses)
    used_in: dict[tuple[int, int], list[int]] = {}  # a weight, and which share of it -> parts
    for part in range(count * replicas):
        for index in program.uses[part % count]:
            used_in.setdefault((index, part % workers if index in program.pieces else 0), []).append(part)
    all_parts = []
    for part in range(count * replicas):
        number, stage = part % count, part % count // workers
        weight_users = sorted((index, parts) for (index, _), parts in used_in.items() if part in parts)
        weights = tuple(index for index, parts in weight_users if parts[0] == part)
        borrows = tuple((index, parts[0]) for index, parts in weight_users if parts[0] != part)
        lends = tuple((index, tuple(parts[1:])) for index, parts in weight_users if parts[0] == part and len(parts) > 1)
        first = tuple(index for index, parts in weight_users if parts[0] % count == number)
        begin = ends[stage - 1] if stage else 0
        all_parts.append(Part(part, begin, ends[stage], weights, borrows, lends, program.inputs[number], first))
    return tuple(all_parts)


def _ends_by_name(graph: Graph, cut: Cut) -> list[int]:
    """Return the ends of the parts that begin with the layers that ``cut`` names.

    Raises:
        ConfigError: The model has no such layer, or the order is wrong.
    """
    names = [call.name for call in graph.calls]
    ends = []
    for name in cut.layers:
        if name not in names:
            raise ConfigError(
                f"split={str(cut)!r} names the layer {name!r}, which the model {graph.model.name!r} does not have",
                hint=f"it has {', '.join(dict.fromkeys(names))}",
            )
        ends.append(names.index(name))
    if 0 in ends:
        raise ConfigError(
            f"split={str(cut)!r} names {names[0]!r}, which is the first layer, so part 1 would be empty",
            hint="name the first layers of part 2 and of later parts",
        )
    if ends != sorted(set(ends)):
        raise ConfigError(
            f"split={str(cut)!r} does not name the layers in the order of the model",
            hint=f"write layers:{','.join(names[end] for end in sorted(set(ends)))}",
        )
    return [*ends, len(names)]
