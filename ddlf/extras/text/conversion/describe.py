"""Writes a Keras model as a model text. Each chain of layers between branches is one block. Runs where models are made.

The model text is parsed again and compared with the model, so that it describes the model completely. The key of a
tensor is its layer, the number of the layer's call, and its number among the call's tensors.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from ddlf.errors import NotationError
from ddlf.extras.text.conversion.build import build, takes_a_list
from ddlf.extras.text.conversion.objects import (
    CannotBeWritten,
    Config,
    Writer,
    as_installed,
    class_name,
    name_value,
    plainly,
)
from ddlf.extras.text.language.blocks import PLAIN, TRAIN
from ddlf.extras.text.language.expand import IT
from ddlf.extras.text.language.graph import Node
from ddlf.extras.text.language.inference import types_of
from ddlf.extras.text.language.model import read
from ddlf.extras.text.language.operators import INTEGERS, OPERATORS
from ddlf.extras.text.language.printer import format, spelled
from ddlf.extras.text.language.values import Arg, Call, Items, Number, String, Value, Word

Key = tuple[str, int, int]
"""The key of a tensor: its layer, the number of the call, and its number among the call's tensors."""
OPERATOR_LAYER = "ddlf>Operator"
SHAPED = ("matmul", "conv", "convTranspose", "recurrent", "cell", "reshape", "free")
"""Kinds of operators whose inputs may not determine the output shape."""
RESERVED = {*PLAIN, *OPERATORS, TRAIN, IT, "activation", "with"}


def describe(model: Any) -> str:
    """Write a Sequential or functional Keras model as a model text, without weights and the arguments of ``compile``.

    Args:
        model: The Keras model, which must have an input shape.

    Raises:
        CannotBeWritten: A text cannot contain a part of the model, which the error names.
    """
    with as_installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns about a lambda here; DDLF refuses it later
        entry = _serialized(model)
        styles = [_Style(), _Style(short=False)]
        if OPERATOR_LAYER in str(entry):
            initial = initial_of_all(layers_within(entry["config"]))
            styles = [_Style(operators=True), _Style(operators=True, initial=initial), *styles]
        for style in styles[:-1]:
            with contextlib.suppress(CannotComeBack):
                return _written(entry, model, style)
        return _written(entry, model, styles[-1])


class CannotComeBack(CannotBeWritten):
    """Building the text of a model gives a different model, so the model text does not describe it.

    What to do:
        Check the layer that the sentence names. Its config may lack an argument.
    """


@dataclass(frozen=True, slots=True)
class _Style:
    """The options for writing a Keras model as a model text.

    Attributes:
        short: Whether to leave out arguments that Keras adds itself.
        operators: Layers that hold an operator are written as the operator.
        initial: The initializer of the operators' weights, unless it follows from their activation.
    """

    short: bool = True
    operators: bool = False
    initial: str = ""


def _written(entry: Config, model: Any, style: _Style) -> str:
    """Return the text of a model, after checking that it gives an equal model."""
    text = _Text(Counter(names_within(entry["config"])), style)
    text.model(entry, model)
    try:
        written = format("".join(f"{line}\n" for line in text.lines()))
        restored = plainly(keras.saving.serialize_keras_object(build(read(written, custom_layers=text.custom_layers))))
    except NotationError as error:
        raise CannotComeBack(f"the text of the model {model.name!r} cannot be read: {error}") from error
    if restored != plainly(entry):
        raise CannotComeBack(
            f"the model {model.name!r} cannot be restored exactly: {first_difference(plainly(entry), restored)}"
        )
    return written


def _serialized(model: Any) -> Config:
    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        raise CannotBeWritten(f"a {kind} is not a Keras model")
    try:
        entry: Config = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CannotBeWritten(f"{model.name!r} ({kind}) cannot be serialized by Keras: {error}") from error
    if "layers" not in (entry["config"] or {}):
        raise CannotBeWritten(
            f"{model.name!r} is a subclassed model ({kind}), whose layers are in its code; write it as a functional model, with "
            "keras.Input and keras.Model(inputs, outputs)"
        )
    return entry


class _Text:
    """Writes a Keras model and its nested models as one model text. The described model comes first."""

    def __init__(self, names: Counter[str], style: _Style) -> None:
        self.names, self.style = names, style
        self.block_by_id: dict[int, str] = {}
        self.statements: list[list[str]] = []
        self.block_names = set(RESERVED)
        self.objects: dict[str, Any] = {}
        self.custom_layers: set[str] = set()
        self.writer = Writer(self._argument, lambda call: self.objects.get(call.name))

    def lines(self) -> Iterator[str]:
        for number, lines in enumerate(self.statements):
            yield from [""] * bool(number)
            yield from lines
        if self.style.initial:
            yield from ("", f"{TRAIN}:initial {self.style.initial};")

    def model(self, entry: Config, model: Any) -> str:
        """Write a model, unless it is written already, and return the name of its block in the text."""
        if id(model) in self.block_by_id:
            return self.block_by_id[id(model)]
        config = entry["config"]
        kind = class_name(entry, f"the model {config['name']!r}")
        block = self.free(str(config["name"]))
        lines: list[str] = []
        self.statements.append(lines)
        self.objects[block] = model
        self._record_layers(model, block)
        options = [] if config["name"] == block else [Arg("name", name_value(config["name"]), 0)]
        if config.get("trainable") is False:
            options.append(Arg("trainable", Word("false", 0), 0))
        dtype = config.get("dtype")
        if isinstance(dtype, dict) and dtype["config"].get("name") != "float32":
            options.append(Arg("dtype", self.writer.value(dtype, f"the model {config['name']!r}"), 0))
        written_keys = {"name", "trainable", "dtype", "layers", "input_layers", "output_layers", "build_input_shape"}
        label = f"the model {config['name']!r}"
        options += [Arg(key, self.writer.value(config[key], label), 0) for key in config if key not in written_keys]
        if "input_layers" in config:
            _Functional(self, config, model, block, lines, Call(kind, tuple(options), 0)).write()
        else:
            self._sequential(config, model, block, lines, Call(kind, tuple(options), 0))
        return block

    def _sequential(self, config: Config, model: Any, block: str, lines: list[str], call: Call) -> None:
        entries = config["layers"]
        if not entries or entries[0]["class_name"] != "InputLayer" or not model.built:
            raise CannotBeWritten(
                f"the model {config['name']!r} has no input shape yet; begin it with keras.Input, or call it once with data"
            )
        lines.append(f"{block}:model {spelled(call)}")
        lines.append(f"{block}:input {self.input(entries[0], block)}")
        layers = {entry["config"]["name"]: entry for entry in entries[1:]}
        blocks = {name: self.model(entry, model.get_layer(name)) for name, entry in layers.items() if is_model(entry)}
        kinds = [(name, self.kind(entry)) for name, entry in layers.items() if name not in blocks]
        explicit = unfree_names(kinds, {block, *blocks})
        calls = [
            Call(blocks[name], (), 0)
            if name in blocks
            else self.layer(entry, name if name in explicit else "", model.get_layer(name).output.shape)
            for name, entry in layers.items()
        ]
        if calls:
            lines.append(f"{block}:layers {', '.join(map(spelled, calls))}")
        lines.append(f"{block}:output shape={_shape(model.output_shape)}")
        lines[:] = [f"{line};" for line in lines]

    def _record_layers(self, model: Any, block: str) -> None:
        """Record which model each layer belongs to. A layer that belongs to two models cannot be written."""
        self.block_by_id[id(model)] = block
        for layer in model.layers:
            if not isinstance(layer, keras.Model) and self.block_by_id.setdefault(id(layer), block) != block:
                raise CannotBeWritten(
                    f"the layer {layer.name!r} is in two models, {self.block_by_id[id(layer)]!r} and {block!r}, and a text has it in "
                    "one; make a model of it, and call that in both"
                )

    def _argument(self, entry: Config) -> str:
        return self.model(entry, keras.saving.deserialize_keras_object(entry))

    def kind(self, entry: Config) -> str:
        """Return the base of Keras's automatic names for a layer, such as ``dense``."""
        return kind_of(entry, operators=self.style.operators)

    def is_operator(self, entry: Config) -> bool:
        """Return whether a layer is written as an operator of the notation, rather than as a Keras layer."""
        return self.style.operators and is_operator(entry)

    def layer(self, entry: Config, name: str, shape: Any, to: Sequence[str] = ()) -> Call:
        """Return a layer with its arguments as the model text shows it. Its name is included only if Keras would choose
        another one.
        """
        label = f"the layer {entry['config'].get('name', entry.get('name'))!r}"
        if self.is_operator(entry):
            call = respelled(entry["config"], shape[1:], to, lambda value: self.writer.value(value, label))
        else:
            call = self.writer.call(entry, label, is_named=True)
            self.custom_layers.add(call.name)
        return Call(call.name, (*call.args, *([Arg("name", name_value(name), 0)] * bool(name))), 0)

    def input(self, entry: Config, block: str) -> str:
        """Return the value of the statement that declares an input, with its type and shape."""
        config = entry["config"]
        value = "" if config["dtype"] == "float32" else f"{config['dtype']} "
        value += f"shape={_shape(config['batch_shape'])}"
        if config["batch_shape"][0] is not None:
            value += f" batch={config['batch_shape'][0]}"
        value += "".join(f" {key}=true" for key in ("sparse", "ragged", "optional") if config.get(key))
        return value + ("" if config["name"] == block else f" name={spelled(name_value(config['name']))}")

    def free(self, name: str) -> str:
        """Return a block name that is still unused in the model text, made from this name."""
        base = re.sub(r"\W", "_", name, flags=re.ASCII).lstrip("_0123456789") or "block"
        base = base[0].lower() + base[1:]
        unused, count = base, 1
        # No other layer may have a block's name, either.
        while unused in self.block_names or self.names[unused] > (unused == name):
            count += 1
            unused = f"{base}_{count}"
        self.block_names.add(unused)
        return unused


class _Functional:
    """Writes a functional Keras model as blocks of a model text, one for each chain of layers."""

    def __init__(self, text: _Text, config: Config, model: Any, block: str, lines: list[str], call: Call) -> None:
        self.text, self.config, self.model, self.block, self.lines, self.call = text, config, model, block, lines, call
        self.entries = {entry["name"]: entry for entry in config["layers"]}
        self.layers = {item.name: item for item in model.operations}
        self.models = {
            name: text.model(entry, self.layers[name]) for name, entry in self.entries.items() if is_model(entry)
        }
        self.outputs = dict(leaves(config["output_layers"], model.output, self.entries))
        self.chains = Chains(units_of(self.entries), self.outputs)
        self.blocks: dict[Key, str] = {}

    def write(self) -> None:
        inputs = [chain[0].layer for chain in self.chains if chain[0].is_input]
        is_single_input = len(inputs) == 1 and key_of(self.config["input_layers"], self.entries) is not None
        for chain in self.chains:
            self.blocks[chain[-1].key] = (
                self.block if is_single_input and chain[0].is_input else self.text.free(self._base(chain))
            )
        head = [*self.call.args]
        for key, structure in (("inputs", self.config["input_layers"]), ("outputs", self.config["output_layers"])):
            value = self._structure(structure)
            begins = {self.blocks[chain[-1].key] for chain in self.chains if chain[0].is_input}
            if value != Word(self.block, 0) or (key == "inputs" and self.block not in begins):
                head.append(Arg(key, value, 0))
        self.lines.append(f"{self.block}:model {spelled(Call(self.call.name, tuple(head), 0))};")
        explicit = self._explicit()
        for chain in self.chains:
            self._chain(chain, explicit)

    def _base(self, chain: list[Unit]) -> str:
        if chain[0].is_input:
            return chain[0].layer
        last = chain[-1]
        if last.tensor:
            return f"{last.layer}_part{last.tensor}"
        return f"{last.layer}_again" if last.call else last.layer

    def _explicit(self) -> set[str]:
        """Return the layers whose names the model text needs: other calls use them, or ``build`` would choose other
        names.
        """
        firsts = [unit for chain in self.chains for unit in chain if not (unit.is_input or unit.tensor or unit.call)]
        shared = {unit.layer for chain in self.chains for unit in chain if unit.call}
        block_names = {self.blocks[chain[-1].key] for chain in self.chains if chain[0].is_input}
        block_names |= set(self.models)
        order = [(unit.layer, self.text.kind(unit.entry)) for unit in firsts if unit.layer not in self.models]
        return unfree_names(order, block_names, {name for name in shared if name not in self.models})

    def _chain(self, chain: list[Unit], explicit: set[str]) -> None:
        block, calls = self.blocks[chain[-1].key], []
        if not chain[0].is_input:
            self.lines.append(f"{block}:from {self.blocks[chain[0].reads[0]]};")
        else:
            self.lines.append(f"{block}:input {self.text.input(chain[0].entry, block)};")
        for unit in chain:
            if unit.is_input:
                continue
            if unit.tensor:
                calls.append(Call("part", (Arg("", Number(str(unit.tensor), 0), 0),), 0))
                continue
            calls.append(self._call(unit, explicit))
        if calls:
            self.lines.append(f"{block}:layers {', '.join(map(spelled, calls))};")
        if chain[-1].key in self.outputs:
            self.lines.append(f"{block}:output shape={_shape(self.outputs[chain[-1].key].shape)};")

    def _call(self, unit: Unit, explicit: set[str]) -> Call:
        if unit.layer in self.models:
            call = Call(self.models[unit.layer], (), 0)
        elif unit.call:
            kind = class_name(unit.entry, f"the layer {unit.layer!r}")
            call = Call(kind, (Arg("share", name_value(unit.layer), 0),), 0)
        else:
            name, layer = unit.layer if unit.layer in explicit else "", self.layers[unit.layer]
            if self.text.is_operator(unit.entry) and not any(unit.kwargs.values()):
                to = [self.blocks[key] for arg in unit.args[1:] if (key := key_of(arg)) is not None]
                return self.text.layer(unit.entry, name, layer.output.shape, to)
            call = self.text.layer(unit.entry, name, ())
        return Call(call.name, (*call.args, *self._call_arguments(unit)), 0)

    def _call_arguments(self, unit: Unit) -> list[Arg]:
        """Return the arguments of a layer's call, except for the layer before it."""
        args, kwargs = unit.args, unit.kwargs
        if self.text.style.short:  # Keras adds a mask itself
            kwargs = {key: value for key, value in kwargs.items() if value is not None}
        if isinstance(self.layers[unit.layer], keras.layers.RNN) and kwargs == {"training": False, "mask": None}:
            kwargs = {}  # Keras records these for a call without arguments
        keys = [key_of(arg) for arg in args]
        if not kwargs and len(args) == 1 and isinstance(args[0], list) and len(args[0]) > 1:
            keys_of_list = [key_of(item) for item in args[0]]
            if None not in keys_of_list and takes_a_list(self.layers[unit.layer], len(keys_of_list)):
                return [self._to_argument(keys_of_list[1:])]
        elif not kwargs and None not in keys and not takes_a_list(self.layers[unit.layer], len(keys)):
            return [self._to_argument(keys[1:])] if len(keys) > 1 else []
        call_args = [Arg("", self._value(arg, unit), 0) for arg in args]
        call_args += [Arg(key, self._value(item, unit), 0) for key, item in kwargs.items()]
        return [Arg("call", Call("with", tuple(call_args), 0), 0)]

    def _to_argument(self, keys: list[Key | None]) -> Arg:
        words = [Word(self.blocks[key], 0) for key in keys if key is not None]
        return Arg("to", words[0] if len(words) == 1 else Items(tuple(words), 0), 0)

    def _value(self, value: Any, unit: Unit) -> Value:
        key = key_of(value)
        if key is not None:
            return Word(IT if key == unit.reads[0] else self.blocks[key], 0)
        if isinstance(value, list):
            return Items(tuple(self._value(item, unit) for item in value), 0)
        if isinstance(value, tuple):
            return Call("tuple", tuple(Arg("", self._value(item, unit), 0) for item in value), 0)
        if isinstance(value, dict) and "class_name" not in value:
            return Call("dict", tuple(Arg(str(name), self._value(item, unit), 0) for name, item in value.items()), 0)
        result = self.text.writer.value(value, f"the call of {unit.layer!r}")
        return String(result.name, 0) if isinstance(result, Word) and result.name not in PLAIN else result

    def _structure(self, value: Any) -> Value:
        """Return the names of the model's inputs or outputs in the model's structure: a single name, a list or a dict."""
        key = key_of(value, self.entries)
        if key is not None:
            return Word(self.blocks[self.chains.end[key]], 0)
        if isinstance(value, dict):
            return Call("dict", tuple(Arg(str(name), self._structure(item), 0) for name, item in value.items()), 0)
        inner = [self._structure(item) for item in value]
        return (
            Call("tuple", tuple(Arg("", item, 0) for item in inner), 0)
            if isinstance(value, tuple)
            else Items(tuple(inner), 0)
        )


def _shape(shape: Any) -> str:
    return f"[{', '.join('none' if size is None else str(size) for size in shape[1:])}]"


# -- chains --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Unit:
    """A call of a layer, an input, or one of several tensors that a call returns.

    Attributes:
        key: The tensor of its output.
        entry: The layer's config.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        reads: The tensors among the arguments, in their order.
    """

    key: Key
    entry: dict[str, Any]
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: list[Key] = field(default_factory=list)

    @property
    def layer(self) -> str:
        return self.key[0]

    @property
    def call(self) -> int:
        return self.key[1]

    @property
    def tensor(self) -> int:
        return self.key[2]

    @property
    def is_input(self) -> bool:
        return not self.reads


def key_of(value: Any, entries: dict[str, Any] | None = None) -> Key | None:
    """Return the key of the tensor that a config value refers to; None for other values.

    Args:
        value: A serialized tensor in the arguments of a call, or a list of layer, call and number in a model's inputs
            or outputs.
        entries: The layers; needed for the inputs and outputs of a model.
    """
    if entries is not None:
        if not (isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)):
            return None
        name, call, tensor = value
        # Keras counts the construction of a functional model as a call.
        counts_itself = "input_layers" in (entries[name]["config"] or {})
        return name, call - counts_itself, tensor
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        name, call, tensor = value["config"]["keras_history"]
        return name, call, tensor
    return None


def leaves(structure: Any, tensors: Any, entries: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yield the key of each output of a model, with the output's tensor."""
    key = key_of(structure, entries)
    if key is not None:
        yield key, tensors
    elif isinstance(structure, dict):
        for name, item in structure.items():
            yield from leaves(item, tensors[name], entries)
    else:
        for item, tensor in zip(structure, tensors, strict=True):
            yield from leaves(item, tensor, entries)


def units_of(entries: dict[str, Any]) -> dict[Key, Unit]:
    """Return the units (calls and inputs) of a model that return a tensor, by the tensor's key."""
    units: dict[Key, Unit] = {}
    for name, entry in entries.items():
        calls = entry["inbound_nodes"] or [{"args": [], "kwargs": {}}]
        for number, call in enumerate(calls):
            unit = Unit((name, number, 0), entry, list(call["args"]), dict(call["kwargs"]))
            unit.reads = [*_tensors(unit.args), *_tensors(unit.kwargs)]
            units[unit.key] = unit
    for unit in [*units.values()]:
        for key in unit.reads:
            if key[2]:
                units.setdefault(key, Unit(key, entries[key[0]], reads=[(*key[:2], 0)]))
    return units


def _tensors(value: Any) -> Iterator[Key]:
    key = key_of(value)
    if key is not None:
        yield key
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class Chains(list[list[Unit]]):
    """Groups the layers of a model into chains, which become blocks of a model text. A chain comes after the chains
    that it reads, and the calls of a layer keep their order.

    Args:
        units: All tensors; tensors that only an output needs are added.
        outputs: The tensors that are a model's outputs.

    Attributes:
        end: The last tensor of a chain, by each tensor in it.
    """

    def __init__(self, units: dict[Key, Unit], outputs: Any) -> None:
        for key in outputs:
            if key[2]:
                units.setdefault(key, Unit(key, units[*key[:2], 0].entry, reads=[(*key[:2], 0)]))
        orders = (order for cut in range(3) if (order := self._ordered(units, [*outputs], cut)) is not None)
        super().__init__(next(orders))
        self.end = {unit.key: chain[-1].key for chain in self for unit in chain}

    def _ordered(self, units: dict[Key, Unit], outputs: list[Key], cut: int) -> list[list[Unit]] | None:
        """Return the chains in order; None if calls of a layer in several chains have no consistent order.

        Args:
            units: The units that return a tensor.
            outputs: The output tensors.
            cut: Where to cut chains additionally: nowhere, at nodes with several inputs, or around layers with several
                calls. With the last value there is always an order: the original order of the calls.
        """
        uses = Counter(key for unit in units.values() for key in unit.reads)
        uses.update(outputs)
        shared = {key[0] for key in units if key[1]}
        follows: dict[Key, Key] = {}
        for unit in units.values():
            before = unit.reads[0] if unit.reads else None
            if before is None or uses[before] > 1 or before in outputs:
                continue
            if (cut and len({*unit.reads}) > 1) or (cut > 1 and {unit.layer, before[0]} & shared):
                continue
            follows[before] = unit.key
        followers = set(follows.values())
        chains: dict[Key, list[Unit]] = {}
        chain_of: dict[Key, Key] = {}
        for key in units:
            if key in followers:
                continue
            chain = [units[key]]
            while chain[-1].key in follows:
                chain.append(units[follows[chain[-1].key]])
            chains[key] = chain
            chain_of.update({unit.key: key for unit in chain})
        needs = {key: self._needs(key, chain, units, chain_of) for key, chain in chains.items()}
        order = _sorted(needs, [chain_of[key] for key in outputs])
        return None if order is None else [chains[key] for key in order]

    def _needs(self, key: Key, chain: list[Unit], units: dict[Key, Unit], chain_of: dict[Key, Key]) -> list[Key]:
        needs: dict[Key, None] = {}
        for unit in chain:
            if unit.call and not unit.tensor:
                needs[chain_of[unit.layer, unit.call - 1, 0]] = None
            needs.update(dict.fromkeys(chain_of[item] for item in unit.reads))
        needs.pop(key, None)
        return [*needs]


def _sorted(needs: dict[Key, list[Key]], outputs: list[Key]) -> list[Key] | None:
    """Return the chains in an order in which each one comes after the chains that it needs; None if they form a circle."""
    done: dict[Key, None] = {}
    inputs = [key for key, needed_keys in needs.items() if not needed_keys]
    for begin in [*outputs, *inputs, *needs]:
        open_: dict[Key, Iterator[Key]] = {}
        waiting = [begin]
        while waiting:
            key = waiting[-1]
            if key in done:
                waiting.pop()
                continue
            needed = next(open_.setdefault(key, iter(needs[key])), None)
            if needed is None:
                done[key] = None
                waiting.pop()
            elif needed in open_ and needed not in done:
                return None
            else:
                waiting.append(needed)
    return [*done]


# -- configs of Keras ----------------------------------------------------------------------------------------------------


def is_model(entry: Config) -> bool:
    """Return whether a layer is itself a model."""
    return isinstance(entry["config"], dict) and "layers" in entry["config"]


def names_within(config: Any) -> Iterator[str]:
    """Yield the names of all layers of a serialized model, also of the layers in nested models."""
    for entry in layers_within(config):
        yield str(entry["config"].get("name", entry.get("name")))


def layers_within(config: Any) -> Iterator[Config]:
    """Yield the configs of all layers of a serialized model, also of the layers in nested models."""
    if isinstance(config, dict):
        yield from config["layers"] if isinstance(config.get("layers"), list) else ()
        for item in config.values():
            yield from layers_within(item)
    elif isinstance(config, list | tuple):
        for item in config:
            yield from layers_within(item)


def unfree_names(layers: list[tuple[str, str]], taken_names: set[str], explicit: set[str] | None = None) -> set[str]:
    """Return the layer names that a model text must contain, because ``build`` would choose other names.

    Layers are in the order of the text, each with its kind.
    """
    explicit = set(explicit or ())
    while True:
        used, misnamed = {*taken_names, *explicit}, set()
        for name, kind in layers:
            if name in explicit:
                continue
            base = keras.src.utils.naming.to_snake_case(kind)
            free, count = base, 0
            while free in used:
                count += 1
                free = f"{base}_{count}"
            used.add(free)
            if free != name:
                misnamed.add(name)
        if not misnamed:
            return explicit
        explicit |= misnamed


def first_difference(first: Any, second: Any, path: str = "") -> str:
    """Return the path and values of the first difference between two configs."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *second]:
            if first.get(key) != second.get(key):
                at = (
                    f" of {first['name']!r}" if isinstance(first.get("name"), str) and not path.endswith(" of ") else ""
                )
                return first_difference(first.get(key), second.get(key), f"{key}{at}{', ' * bool(path)}{path}")
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for before, after in zip(first, second, strict=True):
            if before != after:
                return first_difference(before, after, path)
    return f"{path} is {str(first)[:80]}, and came back as {str(second)[:80]}"


# -- operators -----------------------------------------------------------------------------------------------------------


def is_operator(entry: Config) -> bool:
    """Return whether a serialized layer contains an operator."""
    return entry.get("registered_name") == OPERATOR_LAYER


def kind_of(entry: Config, *, operators: bool) -> str:
    """Return the base of Keras's automatic names for a layer, such as ``dense``.

    Args:
        entry: The layer as Keras serializes it.
        operators: Whether layers of operators are written as operators.
    """
    if operators and is_operator(entry):
        return str(entry["config"]["operator"])
    return str(entry.get("registered_name") or entry["class_name"]).rpartition(">")[2]


def respelled(config: Config, shape: Sequence[int | None], to: Sequence[str], value: Callable[[Any], Value]) -> Call:
    """Return an operator of the notation with its operands and options, from the config of its Keras layer.

    Args:
        config: The config of the layer.
        shape: The shape of its output, without the batch axis.
        to: The other blocks that the operator reads.
        value: The function that writes the value of an option.
    """
    name, types, parameters = config["operator"], config["types"], config["parameters"]
    operator = OPERATORS[name]
    args = [Arg("", item, 0) for item in _operands(operator.kind, config["operands"], parameters)]
    *input_types, output_type = types
    inferred = types_of(Node(name), list(input_types))[1] if name != "cast" else ""
    weights = output_type if output_type in INTEGERS else "float32"
    if output_type != inferred or any(dtype != weights for _, _, dtype, _ in parameters):
        args.append(Arg("", Word(output_type, 0), 0))
    options = {key: item for key, item in config["options"].items() if key != "shape"}
    args += [Arg(key, value(item), 0) for key, item in options.items()]
    if to:
        words = tuple(Word(item, 0) for item in to)
        args.append(Arg("to", words[0] if len(words) == 1 else Items(words, 0), 0))
    if operator.kind in SHAPED and (parameters or operator.kind in ("reshape", "free")):
        sizes = tuple(Word("none", 0) if size is None else Number(str(size), 0) for size in shape)
        args.append(Arg("shape", Items(sizes, 0), 0))
    return Call(name, tuple(args), 0)


def _operands(kind: str, operands: Sequence[Any], parameters: Sequence[Sequence[Any]]) -> Iterator[Value]:
    names = iter(re.sub(r"\d+$", "", str(parameter[0])) for parameter in parameters)
    if kind == "attend":  # attend has more parameters than operands
        yield from (Word(item, 0) for item in list(names)[:6:2])
        return
    for operand in operands:
        yield Word(next(names), 0) if operand is None else Number(repr(operand), 0)


def initial_of_all(entries: Iterator[Config]) -> str:
    """Return the most frequent initializer of the operators' matrices."""
    result = Counter(
        str(initial)
        for entry in entries
        if is_operator(entry)
        for _, shape, _, initial in entry["config"]["parameters"]
        if len(shape) > 1
    )
    return result.most_common(1)[0][0] if result else ""
