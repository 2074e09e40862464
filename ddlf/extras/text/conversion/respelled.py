"""The layer that holds an operator as the operator that a text has: the way back from ``build``. Runs where models are made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddlf.extras.text.conversion.arguments import Config
from ddlf.extras.text.language.graph import Node
from ddlf.extras.text.language.inference import types_of
from ddlf.extras.text.language.operators import INTEGERS, OPERATORS
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Value, Word

LAYER = "ddlf>Operator"
MADE_BY_SHAPE = ("matmul", "conv", "convTranspose", "recurrent", "cell", "reshape", "free")
"""Kinds of operators whose shape need not follow from what goes in."""


def is_operator(entry: Config) -> bool:
    """Whether a serialized layer holds an operator."""
    return entry.get("registered_name") == LAYER


def kind_of(entry: Config, *, operators: bool) -> str:
    """After what a layer is named that has no name of its own.

    Args:
        entry: It, as Keras serializes it.
        operators: Whether those that hold an operator are written as such.
    """
    if operators and is_operator(entry):
        return str(entry["config"]["operator"])
    return str(entry.get("registered_name") or entry["class_name"]).rpartition(">")[2]


def respelled(config: Config, shape: Sequence[int | None], to: Sequence[str], value: Callable[[Any], Value]) -> Call:
    """An operator with its operands and options.

    Args:
        config: Of the layer.
        shape: What comes out of it, without the batch.
        to: The blocks that it reads beside what comes in.
        value: Writes a value of an option.
    """
    name, types, parameters = config["operator"], config["types"], config["parameters"]
    operator = OPERATORS[name]
    args = [Arg("", each, 0) for each in _operands(operator.kind, config["operands"], parameters)]
    *into, out = types
    usual = types_of(Node(name), list(into))[1] if name != "cast" else ""
    weights = out if out in INTEGERS else "float32"
    if out != usual or any(dtype != weights for _, _, dtype, _ in parameters):
        args.append(Arg("", Word(out, 0), 0))
    options = {key: each for key, each in config["options"].items() if key != "shape"}
    args += [Arg(key, value(each), 0) for key, each in options.items()]
    if to:
        words = tuple(Word(each, 0) for each in to)
        args.append(Arg("to", words[0] if len(words) == 1 else Items(words, 0), 0))
    if operator.kind in MADE_BY_SHAPE and (parameters or operator.kind in ("reshape", "free")):
        sizes = tuple(Word("none", 0) if size is None else Number(str(size), 0) for size in shape)
        args.append(Arg("shape", Items(sizes, 0), 0))
    return Call(name, tuple(args), 0)


def _operands(kind: str, operands: Sequence[Any], parameters: Sequence[Sequence[Any]]) -> Iterator[Value]:
    names = iter(re.sub(r"\d+$", "", str(each[0])) for each in parameters)
    if kind == "attend":  # which has more parameters than operands
        yield from (Word(each, 0) for each in list(names)[:6:2])
        return
    for each in operands:
        yield Word(next(names), 0) if each is None else Number(repr(each), 0)


def initial_of_all(entries: Iterator[Config]) -> str:
    """The initializer that most matrices of operators have."""
    found = Counter(
        str(initial)
        for entry in entries
        if is_operator(entry)
        for _, shape, _, initial in entry["config"]["parameters"]
        if len(shape) > 1
    )
    return found.most_common(1)[0][0] if found else ""
