"""A model of Keras from a model as text: a layer for each node of the graph, named and connected as there. Runs where models are made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from ddlf.models.initial import initial_values
from ddlf.models.operator import Operator
from ddlf.notation.blocks import plain
from ddlf.notation.graph import Graph, Node
from ddlf.notation.learned import with_parameters
from ddlf.notation.model import Model
from ddlf.notation.operators import OPERATORS, is_keras
from ddlf.notation.problems import Problems
from ddlf.notation.shapes import infer, shown
from ddlf.notation.values import Call, Items, Number, Value

MISSING = {
    "gatherND": "its indices have no batch; use gather(to=) or gatherElements(to=)",
    "scatterElements": "what it writes to cannot be trained through",
    "scatterND": "what it writes to cannot be trained through",
}
"""Operators that can be checked and shown, and why no layer is made of them."""
USUAL = {("pool", "dilations"): [1, 1], ("convTranspose", "groups"): 1}
"""Options that no layer has yet, by the kind of the operator, and the one value that changes nothing."""
HOMES = ("layers", "initializers", "regularizers", "constraints", "quantizers", "dtype_policies")
"""Where in Keras a name with a capital is looked for."""


def build(model: Model, scaling: Mapping[str, Call] | None = None, initial: str = "") -> Any:
    """Return the model of Keras that a text describes, not compiled.

    One input is taken as an array, several as a dict by the names of their blocks; outputs likewise.

    Args:
        model: The text, as it was read.
        scaling: A layer of Keras behind some inputs, by the names of their blocks.
        initial: As ``initial_values`` has it written.

    Raises:
        NotationError: Keras refuses a layer; it has the place.
    """
    return _Building(model, scaling or {}, initial).model()


class _Building:
    def __init__(self, model: Model, scaling: Mapping[str, Call], initial: str) -> None:
        self.scaling, self.initial = scaling, initial
        self.problems = Problems(model.text, model.file)
        self.name = re.sub(r"\W", "_", model.file.rpartition("/")[2].partition(".")[0]) or "model"
        self.graph = model.graph
        self.taken = {node.name for node in model.graph.nodes if node.name}
        self.made: list[Any] = []
        self.given: dict[str, Any] = {}  # the inputs themselves, where a layer scales what comes in

    def model(self) -> Any:
        for number in range(len(self.graph.nodes)):
            self.made.append(self._output(number))
            self.problems.check()
        nodes, heads = self.graph.nodes, self.graph.heads
        inputs = {node.name: self.given[node.name] for node in nodes if node.operator == "input"}
        outputs = {head.name: self.made[head.node] for head in heads}
        for head in heads:
            self._hold(head.wanted, self.made[head.node], head.at, f"the output {head.name!r}")
        self.problems.check()
        first = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        return keras.Model(first, next(iter(outputs.values())) if len(outputs) == 1 else outputs, name=self.name)

    def _output(self, number: int) -> Any:
        """What comes out of a node; None after a problem."""
        node = self.graph.nodes[number]
        into = [self.made[each] for each in node.inputs]
        try:
            if node.operator == "input":
                given = self.given[node.name] = keras.Input(node.shape, dtype=node.dtype, name=node.name)
                return self._value(self.scaling[node.name])(given) if node.name in self.scaling else given
            layer = self._layer(node, number)
            if layer is None:
                return None
            made = layer(into) if is_keras(node.operator) and _takes_a_list(layer, len(into)) else layer(*into)
        except (TypeError, ValueError, NotImplementedError, KeyError, RuntimeError, AttributeError) as error:
            self.problems.add(node.call, f"{node.operator}: Keras says: {_first_sentence(error)}")
            return None
        if not isinstance(made, keras.KerasTensor):
            self.problems.add(node.call, f"{node.operator} gives several outputs, and a layer of a text has one")
            return None
        self._hold(node.wanted, made, node.call, node.operator)
        if is_keras(node.operator) and (node.shape is None or None in node.shape):
            self._know(number, tuple(made.shape[1:]))
        return made

    def _layer(self, node: Node, number: int) -> Any:
        if node.lrm != 1:
            self.problems.add(node.call, f"{node.operator}: lrm= cannot be trained yet; leave it out")
        elif node.dtype in ("int4", "uint4"):
            self.problems.add(node.call, f"{node.operator}: Keras has no type {node.dtype}, write int8 or uint8")
        elif node.operator in MISSING:
            self.problems.add(node.call, f"no layer can be made of {node.operator}: {MISSING[node.operator]}")
        if len(self.problems):
            return None
        name = node.name or self._free_name(node)
        options = {arg.key: self._value(arg.value) for arg in node.options}
        if is_keras(node.operator):
            return _found(node.operator)(**options, name=name)
        for key, value in options.items():
            if value != USUAL.get((OPERATORS[node.operator].kind, key), value):
                self.problems.add(node.call, f"no layer can be made of {node.operator} with {key}= yet; leave it out")
                return None
        if OPERATORS[node.operator].kind in ("reshape", "free"):
            if node.shape is None or None in node.shape:
                self.problems.add(node.call, f"{node.operator} needs shape=")
                return None
            options["shape"] = list(node.shape)
        numbers = [each.value if isinstance(each, Number) else None for each in node.operands]
        if OPERATORS[node.operator].kind == "attend":
            numbers = [None] * len(node.parameters)
        initial = initial_values(self.graph, number, self.initial)
        return Operator(
            OPERATORS[node.operator].name,
            numbers,
            options,
            [
                (each.name, list(each.shape or ()), each.dtype, first)
                for each, first in zip(node.parameters, initial, strict=True)
            ],
            [*(self.graph.nodes[each].dtype for each in node.inputs), node.dtype],
            name=name,
        )

    def _free_name(self, node: Node) -> str:
        """A name as Keras would give it, the same at each time."""
        base = str(keras.src.utils.naming.to_snake_case(node.operator.rpartition(">")[2]))
        name, count = base, 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name

    def _value(self, value: Value) -> Any:
        """An argument as Keras takes it: what has brackets is one of its objects."""
        if isinstance(value, Items):
            return [self._value(each) for each in value.values]
        if not isinstance(value, Call):
            return plain(value)
        return _found(value.name)(**{arg.key: self._value(arg.value) for arg in value.args})

    def _hold(self, wanted: Any, made: Any, at: int, what: str) -> None:
        """Tell if a shape is not the one that the text gives."""
        if wanted is not None and made is not None and tuple(made.shape[1:]) != tuple(wanted):
            self.problems.add(
                at, f"{what}: the text says {shown(tuple(wanted))}, and Keras gives {shown(tuple(made.shape[1:]))}"
            )

    def _know(self, number: int, shape: tuple[int | None, ...]) -> None:
        """Infer again what follows, with the shape that only Keras knew."""
        nodes = list(self.graph.nodes)
        nodes[number] = replace(nodes[number], wanted=shape, shape=shape)
        graph = Graph(tuple(replace(each, wanted=each.wanted or each.shape) for each in nodes), self.graph.heads)
        shapes = infer(graph, self.problems)
        known = tuple(replace(node, shape=shape) for node, shape in zip(nodes, shapes, strict=True))
        self.graph = with_parameters(Graph(known, graph.heads), self.problems)


def _found(name: str) -> Any:
    """The class of Keras, or of the user's own that is registered, with that name."""
    registered = keras.saving.get_registered_object(name)
    if registered is not None:
        return registered
    for home in HOMES:
        if (found := getattr(getattr(keras, home, None), name, None)) is not None:
            return found
    raise ValueError(
        f"there is no {name}; a layer of one's own is registered with keras.saving.register_keras_serializable"
    )


def _takes_a_list(layer: Any, count: int) -> bool:
    """Whether a layer takes several inputs as one list."""
    parameters = inspect.signature(layer.call).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return count > 1 and (len(named) < count or named[0] in ("inputs", "input"))


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error.args[0] if error.args else error).split())
    return re.split(r"(?<=[.!]) (?=[A-Z])| Arguments received by", text)[0][:300]
