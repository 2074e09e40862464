"""Cuts a model into parts of known costs: ``Plan``. Runs on master and workers.

The plan follows from shapes alone, and is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ddlf.algorithms.pipeline import balanced, sizes
from ddlf.errors import ConfigError
from ddlf.events import ModelCut, PlannedPart
from ddlf.training.exchanges.split.cut import Cut
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.variables import deferred

MOST_PARTS = 64
"""Largest number of parts that ``memory:`` tries."""
SHOWN = 3
"""Maximum number of names of layers in a row of the table."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The variables of an optimizer of a whole model, which exist nowhere.

    Args:
        paths: Path of each variable, in Keras's order.
        of: For each variable, the number of the weight that it belongs to in ``model.weights``; None for all weights.
        nbytes: Bytes of each variable.
    """

    paths: tuple[str, ...]
    of: tuple[int | None, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of_model(cls, model: Any) -> OptimizerState:
        """Return the variables that the compiled optimizer would have for all weights of a model."""
        from keras.src.optimizers.base_optimizer import BaseOptimizer

        config = model.optimizer.get_config()
        has_rate = hasattr(model.optimizer._learning_rate, "assign")
        optimizer = type(model.optimizer).from_config(config if has_rate else config | {"learning_rate": 1.0})
        add = BaseOptimizer.add_variable_from_reference  # TensorFlow's own one reads the values of the weights
        vars(optimizer).update(_var_key=id, add_variable_from_reference=partial(add, optimizer))
        with deferred():
            optimizer.build(model.trainable_variables)
        trained = {id(weight) for weight in model.trainable_variables}
        prefixes = {
            f"{optimizer.name}/{weight.path.replace('/', '_')}_": place
            for place, weight in enumerate(model.weights)
            if id(weight) in trained
        }
        longest = sorted(prefixes, key=len, reverse=True)
        variables = [one for one in optimizer.variables if has_rate or one is not optimizer._learning_rate]
        paths = [variable.path for variable in variables]
        found = [next((prefixes[one] for one in longest if path.startswith(one)), None) for path in paths]
        return cls(tuple(paths), tuple(found), tuple(map(bytes_of, variables)))


def bytes_of(variable: Any) -> int:
    """Return the bytes of a Keras variable."""
    kind = str(variable.dtype)
    return int(prod(variable.shape)) * (2 if kind == "bfloat16" else np.dtype(kind).itemsize)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: some calls that follow each other.

    Args:
        number: Number of the part, from 0.
        begin: Number of its first call.
        end: Number behind its last call.
        weights: Numbers of its weights in ``model.weights``.
        takes: The tensors that it receives from other parts, each with the number of the part that computes it.
        gives: The tensors that it sends, each with the numbers of the parts that receive it.
        borrows: Numbers of the weights that it uses and another part owns, each with the number of its owner.
        lends: Numbers of its weights that other parts use, each with the numbers of these parts.
        inputs: Numbers of the inputs of the model that it reads.
    """

    number: int
    begin: int
    end: int
    weights: tuple[int, ...]
    takes: tuple[tuple[int, int], ...]
    gives: tuple[tuple[int, tuple[int, ...]], ...]
    borrows: tuple[tuple[int, int], ...]
    lends: tuple[tuple[int, tuple[int, ...]], ...]
    inputs: tuple[int, ...]

    @property
    def all_weights(self) -> tuple[int, ...]:
        """The numbers of all weights that it has: its own, and the borrowed ones."""
        return (*self.weights, *(place for place, _ in self.borrows))


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that is cut into parts.

    Args:
        graph: The calls of the model.
        parts: The parts, in order. The last one has the loss.
        optimizer: The variables of the optimizer.
        batch_size: Samples in a batch.
        micro_batches: M, the number of micro-batches of a whole batch.
    """

    graph: Graph
    parts: tuple[Part, ...]
    optimizer: OptimizerState
    batch_size: int
    micro_batches: int

    @classmethod
    def of(cls, graph: Graph, cut: Cut, batch_size: int, micro_batches: int) -> Plan:
        """Return the plan for a model.

        Args:
            graph: The calls of the model.
            cut: The setting ``split``.
            batch_size: Samples in a batch.
            micro_batches: M, the number of micro-batches of a whole batch.

        Raises:
            ConfigError: The model has too few layers, or lacks a layer that ``cut`` names.
        """
        optimizer = OptimizerState.of_model(graph.model)

        def planned(ends: Sequence[int]) -> Plan:
            return cls(graph, _parts(graph, ends), optimizer, batch_size, micro_batches)

        count = len(graph.calls)
        if cut.layers:
            return planned(_ends_by_name(graph, cut))
        if cut.parts > count:
            raise ConfigError(
                f"split={str(cut)!r} needs {cut.parts} layers, and the model {graph.model.name!r} has {count}",
                hint=f"use at most stages:{count}",
            )
        costs = [call.products for call in graph.calls]
        borders = [sum(bytes_of_tensor(graph, one) for one in graph.crossing(end)) for end in range(1, count)]
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
    def at(cls, graph: Graph, ends: Sequence[int], batch_size: int, micro_batches: int) -> Plan:
        """Return the plan whose parts end behind the calls with these numbers, as ``ends`` has them."""
        return cls(graph, _parts(graph, ends), OptimizerState.of_model(graph.model), batch_size, micro_batches)

    @property
    def ends(self) -> list[int]:
        """The numbers behind the last call of each part."""
        return [part.end for part in self.parts]

    def bytes_of_weights(self, part: Part) -> int:
        """Return the bytes of the weights that a part has, including the borrowed ones."""
        return sum(bytes_of(self.graph.model.weights[place]) for place in part.all_weights)

    def bytes_of_optimizer(self, part: Part) -> int:
        """Return the bytes of a part's optimizer variables."""
        mine = {*part.weights, None}
        return sum(nbytes for of, nbytes in zip(self.optimizer.of, self.optimizer.nbytes, strict=True) if of in mine)

    def bytes_of_activations(self, part: Part) -> int:
        """Return the largest number of bytes of a part's activations, for s - i micro-batches."""
        held = min(len(self.parts) - part.number, self.micro_batches)
        samples = held * max(sizes(self.batch_size, self.micro_batches))
        return samples * sum(call.activations for call in self.graph.calls[part.begin : part.end])

    def memory(self, part: Part) -> int:
        """Return about how many bytes a part needs: weights, their gradients, optimizer and activations."""
        return 2 * self.bytes_of_weights(part) + self.bytes_of_optimizer(part) + self.bytes_of_activations(part)

    def bytes_sent(self, part: Part) -> int:
        """Return the bytes that a part sends in a batch: activations forward, and gradients back."""
        forward = sum(bytes_of_tensor(self.graph, tensor) * len(to) for tensor, to in part.gives)
        back = sum(bytes_of_tensor(self.graph, tensor) for tensor, _ in part.takes)
        return self.batch_size * (forward + back)

    def check(self) -> None:
        """Raise an error for a layer that changes when it is called, and that several parts would have to change.

        Raises:
            ConfigError: Names the layer.
        """
        used: dict[int, tuple[str, int]] = {}
        for part in self.parts:
            for call in self.graph.calls[part.begin : part.end]:
                name, other = used.setdefault(id(call.operation), (call.name, part.number))
                layers = call.operation._flatten_layers() if hasattr(call.operation, "_flatten_layers") else ()
                changing = any(one._non_trainable_variables for one in layers)
                if other != part.number and changing:
                    raise ConfigError(
                        f"the layer {name!r} changes when it is called, and is used in parts {other + 1} and {part.number + 1}",
                        hint="choose a cut that has all its calls in one part, with split='layers:NAME,...'",
                    )

    def warning(self) -> str:
        """Return a sentence about layers that see single micro-batches; "" without any."""
        names = [layer.name for layer in self.graph.model._flatten_layers() if "BatchNorm" in type(layer).__name__]
        if not names or self.micro_batches == 1:
            return ""
        samples = max(sizes(self.batch_size, self.micro_batches))
        return f"the layer {names[0]!r} normalizes over micro-batches of {samples} samples, not over batches of {self.batch_size}"

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

    def told(self) -> str:
        """Return the number of parts and micro-batches, and the table, for people."""
        return f"{len(self.parts)} parts, {self.micro_batches} micro-batches\n{self.table()}"

    def table(self) -> str:
        """Return the plan as a table for people."""
        head = ("part", "layers", "weights", "optimizer", "activations", "products", "sends a batch")
        rows: list[tuple[str, ...]] = [head]
        for part in self.parts:
            names = [call.name for call in self.graph.calls[part.begin : part.end]]
            shown = names if len(names) <= SHOWN else [names[0], "..", names[-1]]
            products = sum(call.products for call in self.graph.calls[part.begin : part.end])
            found = map(
                size, (self.bytes_of_weights(part), self.bytes_of_optimizer(part), self.bytes_of_activations(part))
            )
            rows.append((str(part.number + 1), " ".join(shown), *found, f"{products:,}", size(self.bytes_sent(part))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if place < 2 else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


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


def _parts(graph: Graph, ends: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts of a graph that end behind these calls."""
    part_of = [
        number for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)) for _ in range(begin, end)
    ]
    made = {tensor: part_of[number] for tensor, number in graph.producers().items()}
    last = len(ends) - 1
    users: dict[int, set[int]] = {}
    for number, call in enumerate(graph.calls):
        for tensor in call.inputs:
            users.setdefault(tensor, set()).add(part_of[number])
    for tensor in graph.outputs:
        users.setdefault(tensor, set()).add(last)
    used_in: dict[int, set[int]] = {}
    for number, call in enumerate(graph.calls):
        for weight in call.weights:
            used_in.setdefault(weight, set()).add(part_of[number])
    owner = {weight: min(parts) for weight, parts in sorted(used_in.items())}
    found = []
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        takes = [
            (tensor, made[tensor])
            for tensor in sorted(users)
            if number in users[tensor] and made.get(tensor, number) != number
        ]
        gives = [
            (tensor, tuple(sorted(users[tensor] - {number})))
            for tensor in sorted(users)
            if made.get(tensor) == number and users[tensor] - {number}
        ]
        inputs = [tensor for tensor in graph.inputs if number in users.get(tensor, ())]
        weights = [weight for weight, part in owner.items() if part == number]
        borrows = [(weight, part) for weight, part in owner.items() if number in used_in[weight] - {part}]
        lends = [(weight, tuple(sorted(used_in[weight] - {number}))) for weight in weights if len(used_in[weight]) > 1]
        edges = (tuple(takes), tuple(gives), tuple(borrows), tuple(lends))
        found.append(Part(number, begin, end, tuple(weights), *edges, tuple(inputs)))
    return tuple(found)


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
    if not ends[0]:
        raise ConfigError(
            f"split={str(cut)!r} names {cut.layers[0]!r}, which is the first layer, so part 1 would be empty",
            hint="name the first layers of part 2 and of later parts",
        )
    if ends != sorted(set(ends)):
        raise ConfigError(
            f"split={str(cut)!r} does not name the layers in the order of the model",
            hint=f"write layers:{','.join(names[end] for end in sorted(set(ends)))}",
        )
    return [*ends, len(names)]
