"""Builds a Keras model from a model text, with a layer for each node of the graph. Runs where models are made."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from ddlf.errors import NotationError
from ddlf.extras import provided
from ddlf.extras.text.conversion.objects import PLAIN_CALLS, class_named, valued
from ddlf.extras.text.conversion.operator import Operator
from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.forms import FUNCTIONAL, Form
from ddlf.extras.text.language.graph import Graph, Node, consumers
from ddlf.extras.text.language.inference import infer, shown, with_parameters
from ddlf.extras.text.language.model import Model
from ddlf.extras.text.language.operators import OPERATORS, is_keras
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Call, Items, Number, Value, Word

SHAPED = ("reshape", "free")
"""Kinds of operators that need the shape of their output."""
ERRORS = (TypeError, ValueError, NotImplementedError, KeyError, RuntimeError, AttributeError)
"""The exceptions that Keras raises for wrong arguments or shapes."""
RELU_LIKE = ("relu", "leakyRelu", "prelu", "elu", "gelu", "hardSwish")
TRANSPARENT = (
    *("add", "identity", "cast", "batchNormalization", "batchNorm", "instanceNormalization", "layerNormalization"),
    *("dropout", "reshape"),
)
"""Operators that may stand between weights and their activation."""
BEFORE_RELU = 0.01
"""The initial bias before relu, so that no unit starts dead."""


def build(
    model: Model,
    scaling: Mapping[str, Call] | None = None,
    initial: str | None = None,
    positions: dict[str, int] | None = None,
) -> Any:
    """Return the Keras model that a model text describes, without compiling it.

    A model with one input takes an array. A model with several inputs takes a dict by the names of their blocks.
    Outputs have the same structure, unless a statement ``model`` defines another one.

    Args:
        model: The parsed text.
        scaling: Keras layers that scale some inputs, by the names of their blocks; by default those of the block
            ``train``.
        initial: The name of the initializer of weights; by default that of the block ``train``.
        positions: Receives the position of each layer in the text, by the layer's name.

    Raises:
        NotationError: Keras refuses a layer; the error has the layer's position.
    """
    inputs = sorted((node for node in model.graph.nodes if node.operator == "input"), key=lambda node: node.at)
    if scaling is None:
        scaling = scaling_of(_written(model, "scaling"), [node.name for node in inputs])
    initial = initial_of(_written(model, "initial")) if initial is None else initial
    building = _Building(model, model.form, model.graph, {}, scaling, initial)
    keras_model = building.model()
    if building.factors:
        keras_model = provided("multiplied", f"lrm= in {model.file}")(keras_model, building.factors)
    if positions is not None:
        positions.update(building.positions)
    return keras_model


def scaling_of(value: Value | None, inputs: Sequence[str]) -> dict[str, Call]:
    """Return the scaling layer of each input, from the model text's single layer or its list in the order of the
    inputs.
    """
    layers = value.values if isinstance(value, Items) else () if value is None else (value,)
    return {name: layer for name, layer in zip(inputs, layers, strict=False) if isinstance(layer, Call)}


def initial_of(value: Value | None) -> str:
    """Return the initializer of weights that a model text names; empty if the activation determines it."""
    return value.name if isinstance(value, Word) and value.name != "by_activation" else ""


def _written(model: Model, key: str) -> Value | None:
    statement = model.train.get(key)
    return statement.items[0][0].value if statement is not None and statement.items else None


class _Building:
    def __init__(
        self,
        model: Model,
        form: Form,
        graph: Graph,
        models: dict[str, Any],
        scaling: Mapping[str, Call] | None = None,
        initial: str = "",
    ) -> None:
        self.text, self.form, self.graph, self.models = model, form, graph, models
        self.scaling, self.initial = scaling or {}, initial
        self.problems = Problems(model.text, model.file)
        file = re.sub(r"\W", "_", model.file.rpartition("/")[2].partition(".")[0]) or "model"
        self.name = form.name or file
        self.reserved_names = {node.name for node in graph.nodes if node.name and not node.share}
        self.reserved_names |= {
            model.parts[node.operator][0].name for node in graph.nodes if node.operator in model.parts
        }
        self.used: set[str] = set()
        self.shared: dict[str, Any] = {}
        self.outputs: list[Any] = []
        self.factors: dict[str, float] = {}  # factors of the learning rate by layer name
        self.positions: dict[str, int] = {}
        self.raw_inputs: dict[str, Any] = {}  # the inputs before the layers that scale them

    def model(self) -> Any:
        if self.form.kind == "Sequential":
            return self._sequential()
        for number in range(len(self.graph.nodes)):
            self.outputs.append(self._output(number))
            self.problems.check()
        nodes, heads = self.graph.nodes, self.graph.heads
        inputs = {node.name: self.raw_inputs[node.name] for node in nodes if node.operator == "input"}
        for head in heads:
            self._hold(head.declared_shape, self.outputs[head.node], head.at, f"the output {head.name!r}")
        self.problems.check()
        outputs = {head.block: self.outputs[head.node] for head in heads}
        outputs_by_name = {head.name: self.outputs[head.node] for head in heads}
        first, last = (next(iter(item.values())) if len(item) == 1 else item for item in (inputs, outputs_by_name))
        if self.form.block:
            first = _structure(self.form.inputs, inputs, self.form.block)
            last = _structure(self.form.outputs, outputs, self.form.block)
        kind = keras.Model if self.form.kind == FUNCTIONAL else class_named(self.form.kind)
        return self._completed(lambda options: kind(first, last, name=self.name, **options))

    def _sequential(self) -> Any:
        """Build a Sequential model, in which each layer reads the previous one."""
        nodes = self.graph.nodes
        model = self._completed(lambda options: keras.Sequential(name=self.name, **options))
        for number, node in enumerate(nodes):
            if (
                node.inputs != ((number - 1,) if number else ())
                or node.call_arguments
                or node.share
                or node.operator == "part"
            ):
                self.problems.add(node.call, "a Sequential is one chain of layers; write Functional() instead")
            self.problems.check()
            layer = self._input(node) if node.operator == "input" else self._made_layer(number)
            self.problems.check()
            try:
                model.add(layer)
                if node.name in self.scaling and node.operator == "input":
                    model.add(valued(self.scaling[node.name]))
                if number:
                    self._learned(number, model.outputs[0])
            except ERRORS as error:
                self.problems.add(node.call, f"{node.operator}: Keras says: {_first_sentence(error)}")
            self.problems.check()
        for head in self.graph.heads:
            self._hold(head.declared_shape, model.outputs[0], head.at, f"the output {head.name!r}")
        self.problems.check()
        return model

    def _completed(self, make: Any) -> Any:
        """Return a built model with the options of its statement ``model`` in the model text, such as its name."""
        options = {arg.key: valued(arg.value, self._model) for arg in self.form.options}
        dtype = options.pop("dtype", None) if self.form.kind in ("Sequential", FUNCTIONAL) else None
        model = None
        try:
            model = make(options)
            if dtype is not None:
                model.dtype_policy = keras.dtype_policies.get(dtype)
        except ERRORS as error:
            self.problems.add(self.form.at, f"{self.form.kind}: Keras says: {_first_sentence(error)}")
        self.problems.check()
        return model

    def _model(self, call: Call | Node) -> Any:
        """Return the Keras model that a block defines. It is built only once; None if the block defines no model."""
        name = call.name if isinstance(call, Call) else call.operator
        if name in self.text.parts and name not in self.models:
            form, graph = self.text.parts[name]
            inner = _Building(self.text, form, graph, self.models, None, self.initial)
            self.models[name] = inner.model()
            self.factors |= inner.factors
            self.positions |= inner.positions
        return self.models.get(name)

    def _input(self, node: Node) -> Any:
        options = {arg.key: plain(arg.value) for arg in node.options}
        batch, name = options.pop("batch", None), options.pop("name", node.name)
        return keras.Input(node.declared_shape, batch_size=batch, dtype=node.dtype, name=name, **options)

    def _output(self, number: int) -> Any:
        """Return the output of a node, or None after a problem."""
        node = self.graph.nodes[number]
        inputs = [_first_tensor(self.outputs[source]) for source in node.inputs]
        try:
            if node.operator == "input":
                raw_input = self.raw_inputs[node.name] = self._input(node)
                return valued(self.scaling[node.name])(raw_input) if node.name in self.scaling else raw_input
            if node.operator == "part":
                return self._part(node)
            layer = self._made_layer(number)
            if layer is None:
                return None
            result = self._called(layer, node, inputs)
        except NotationError:
            raise
        except ERRORS as error:
            self.problems.add(node.call, f"{node.operator}: Keras says: {_first_sentence(error)}")
            return None
        flat = keras.tree.flatten(result)
        if not flat or not all(isinstance(array, keras.KerasTensor) for array in flat):
            self.problems.add(node.call, f"{node.operator} returns no tensor")
            return None
        self._learned(number, flat[0])
        return flat[0] if len(flat) == 1 else flat

    def _called(self, layer: Any, node: Node, inputs: list[Any]) -> Any:
        if node.call_arguments is not None:
            args = [valued(arg.value, self._model, inputs) for arg in node.call_arguments.args if not arg.key]
            return layer(
                *args,
                **{arg.key: valued(arg.value, self._model, inputs) for arg in node.call_arguments.args if arg.key},
            )
        return layer(inputs) if node.operator not in OPERATORS and takes_a_list(layer, len(inputs)) else layer(*inputs)

    def _part(self, node: Node) -> Any:
        tensors, index = self.outputs[node.inputs[0]], node.operands[0]
        assert isinstance(index, Number)
        count = len(tensors) if isinstance(tensors, list) else 1
        if index.value >= count:
            self.problems.add(node.call, f"there is no tensor {index.value} among {count}, counted from 0")
            return None
        return tensors[int(index.value)] if isinstance(tensors, list) else tensors

    def _learned(self, number: int, output: Any) -> None:
        """Compare a layer's output shape in Keras with the shape in the model text. If the text lacks it, infer the
        next shapes from it.
        """
        node = self.graph.nodes[number]
        self._hold(node.declared_shape, output, node.call, node.operator)
        if node.operator not in OPERATORS and (node.shape is None or None in node.shape):
            self._know(number, tuple(output.shape[1:]))

    def _made_layer(self, number: int) -> Any:
        """Create the Keras layer of a node of the graph; return None after a problem. Nodes that share a layer get the
        same object.
        """
        node = self.graph.nodes[number]
        if node.operator in self.text.parts:
            return self._model(node)
        if node.share in self.shared:
            return self.shared[node.share]
        try:
            layer = self._layer(node, number)
        except NotationError:  # the mistake is in a nested model
            raise
        except ERRORS as error:
            self.problems.add(node.call, f"{node.operator}: Keras says: {_first_sentence(error)}")
            return None
        if node.share or node.name:
            self.shared[node.share or node.name] = layer
        return layer

    def _layer(self, node: Node, number: int) -> Any:
        if node.dtype in ("int4", "uint4"):
            self.problems.add(node.call, f"{node.operator}: Keras has no type {node.dtype}, write int8 or uint8")
        if len(self.problems):
            return None
        name = node.share or node.name
        name = name if name and name not in self.used else self._free_name(node)
        self.used.add(name)
        self.positions[name] = node.call
        if node.lrm != 1:
            self.factors[name] = node.lrm
        options = {arg.key: valued(arg.value, self._model) for arg in node.options}
        if is_keras(node.operator):
            return class_named(node.operator)(**options, name=name)
        if OPERATORS[node.operator].kind in SHAPED:
            if node.shape is None or None in node.shape:
                self.problems.add(node.call, f"{node.operator} needs shape=")
                return None
            options["shape"] = list(node.shape)
        numbers = [operand.value if isinstance(operand, Number) else None for operand in node.operands]
        if OPERATORS[node.operator].kind == "attend":
            numbers = [None] * len(node.parameters)
        initial = initial_values(self.graph, number, self.initial)
        return Operator(
            OPERATORS[node.operator].name,
            numbers,
            options,
            [
                (item.name, list(item.shape or ()), item.dtype, first)
                for item, first in zip(node.parameters, initial, strict=True)
            ],
            [*(self.graph.nodes[source].dtype for source in node.inputs), node.dtype],
            name=name,
        )

    def _free_name(self, node: Node) -> str:
        """Return a layer name like Keras's automatic ones, such as ``dense_1``. It is the same each time that the text
        is built.
        """
        base = str(keras.src.utils.naming.to_snake_case(node.operator.rpartition(">")[2]))
        name, count = base, 0
        while name in self.reserved_names:
            count += 1
            name = f"{base}_{count}"
        self.reserved_names.add(name)
        return name

    def _hold(self, declared_shape: Any, output: Any, at: int, label: str) -> None:
        """Report a mistake if a shape in Keras differs from the shape in the model text."""
        if declared_shape is None or output is None:
            return
        result = tuple(output.shape[1:])
        if len(result) != len(declared_shape) or any(
            first not in (None, two) for first, two in zip(declared_shape, result, strict=True)
        ):
            self.problems.add(
                at,
                f"{label}: the text says {shown(tuple(declared_shape))}, but Keras gives {shown(tuple(output.shape[1:]))}",
            )

    def _know(self, number: int, shape: tuple[int | None, ...]) -> None:
        """Infer the shapes of the next layers again, after Keras has computed a shape that DDLF could not infer."""
        nodes = list(self.graph.nodes)
        nodes[number] = replace(nodes[number], declared_shape=shape, shape=shape)
        if all(node.operator not in OPERATORS for node in nodes[number + 1 :]):
            self.graph = Graph(tuple(nodes), self.graph.heads)  # Keras infers the remaining shapes itself
            return
        graph = Graph(
            tuple(replace(node, declared_shape=node.declared_shape or node.shape) for node in nodes), self.graph.heads
        )
        shapes = infer(graph, self.problems)
        known_nodes = tuple(replace(node, shape=shape) for node, shape in zip(nodes, shapes, strict=True))
        models = {name: graph for name, (_, graph) in self.text.parts.items()}
        self.graph = with_parameters(Graph(known_nodes, graph.heads), self.problems, models)


def _first_tensor(output: Any) -> Any:
    """Return the first tensor of a layer's output, if it is a list of tensors."""
    return output[0] if isinstance(output, list) else output


def _structure(value: Value | None, tensors: dict[str, Any], block: str) -> Any:
    """Return tensors in the structure that a model text passes to a model: one tensor, a list or a dict."""
    if isinstance(value, Items):
        return [_structure(item, tensors, block) for item in value.values]
    if isinstance(value, Call):
        make = PLAIN_CALLS.get(value.name, PLAIN_CALLS["tuple"])
        inner = [(arg.key, _structure(arg.value, tensors, block)) for arg in value.args]
        return make(*(item for key, item in inner if not key), **{key: item for key, item in inner if key})
    return _first_tensor(tensors[value.name if isinstance(value, Word) else block])


def takes_a_list(layer: Any, count: int) -> bool:
    """Return whether a layer takes several inputs as one list."""
    parameters = inspect.signature(layer.call).parameters.values()
    parameter_names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return count > 1 and (len(parameter_names) < count or parameter_names[0] in ("inputs", "input"))


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error.args[0] if error.args else error).split())
    return re.split(r"(?<=[.!]) (?=[A-Z])| Arguments received by", text)[0][:300]


# -- initial values: He before an activation that cuts off below 0 (arXiv:1502.01852), else Glorot -----------------------


def initial_values(graph: Graph, number: int, written: str = "") -> Sequence[str | float]:
    """Return the initial values of each parameter of a node: the name of a Keras initializer, or a number.

    Args:
        graph: The whole graph.
        number: The number of the node.
        written: The name of the initializer of weights; biases are then 0. Empty if the activation determines both.
    """
    node = graph.nodes[number]
    operator = OPERATORS[node.operator]
    if not node.parameters:
        return []
    follows = _activation(graph, number)
    weights = "he_uniform" if follows in RELU_LIKE else "glorot_uniform"
    bias = BEFORE_RELU if follows == "relu" else 0.0
    if operator.kind == "norm":
        initial = [0.0, 1.0, 1.0, 0.0] if operator.name == "batchNormalization" else [1.0, 0.0]
        return initial[: len(node.parameters)]
    if operator.name == "prelu":
        return [0.25]
    if operator.name in ("mul", "div", "pow", "quantizeLinear", "dequantizeLinear"):
        return [1.0, 0.0][: len(node.parameters)]
    if written:
        weights, bias = written, 0.0
    return [weights if len(parameter.shape or ()) > 1 else bias for parameter in node.parameters]


def _activation(graph: Graph, number: int) -> str:
    """Return the operator of the first layer after a node, such as ``relu``, which determines the node's initial
    weights. Sums, normalizations and reshapes are skipped.
    """
    readers = consumers(graph.nodes)
    while len(readers.get(number, ())) == 1:
        number = readers[number][0]
        if graph.nodes[number].operator not in TRANSPARENT:
            return graph.nodes[number].operator
    return ""
