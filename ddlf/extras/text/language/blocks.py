"""Checks the statements of each block of a model text, one by one. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.operators import (
    DTYPES,
    EVERYWHERE,
    FOREIGN,
    LOSSES,
    OPERATORS,
    PROPERTIES,
    SIZES,
    VALUES,
    WORDS,
    is_keras,
    loss_meant,
)
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.syntax import MAX_DIGITS, Parsed
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, String, Value, Word, walk

MAX_SIZE = 2**31 - 1
PLAIN = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
TRAIN = "train"
OF_INPUTS = ("batch", "sparse", "ragged", "optional", "name")
"""The options of an input, besides its type and shape."""
CODE = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper")
"""Layers that execute their own code."""


@dataclass(slots=True)
class Block:
    """A block of a model text: its name, layers and statements.

    Attributes:
        name: The block's name.
        at: The position of its first statement.
        statements: Its statements by property.
        calls: Its layers.
    """

    name: str
    at: int
    statements: dict[str, Statement] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_macro(self) -> bool:
        """Return whether the block is a macro: layers that other blocks insert by calling its name. Its first layer
        reads the layer before the call."""
        return not self.statements.keys() & {"input", "output", "from", "model"}

    @property
    def is_name_only(self) -> bool:
        """Return whether the block only defines a model, whose layers are in other blocks."""
        return "model" in self.statements and not self.statements.keys() & {"input", "output", "from", "layers"}


def plain(value: Value) -> Any:
    """Convert a value of a model text to a Python value. A call of a layer stays a ``Call``."""
    if isinstance(value, Number | String):
        return value.value
    if isinstance(value, Word):
        return PLAIN.get(value.name, value.name)
    return [plain(item) for item in value.values] if isinstance(value, Items) else value


def sizes(
    value: Value, key: str, problems: Problems, *, empty: bool = True, free: bool = False
) -> tuple[int | None, ...] | None:
    """Read a list of sizes, such as a shape. Return None after a mistake in it, which is added to ``problems``.

    Args:
        value: The list.
        key: The name of the list, for errors.
        problems: Collects the mistakes.
        empty: Whether the list may be empty.
        free: Whether a size may be ``none``, which accepts any size.
    """
    if not isinstance(value, Items):
        suggestion = f", did you mean '{key}=[{value.written}]'?" if isinstance(value, Number) else ""
        problems.add(value.at, f"{key} must be a list of sizes{suggestion or ', such as [28, 28]'}")
        return None
    if not value.values and not empty:
        problems.add(value.at, f"{key} has an empty shape; write sizes, such as [10]")
        return None
    for item in value.values:
        number = item.value if isinstance(item, Number) else None
        if free and item == Word("none", 0):
            continue
        if not isinstance(number, int) or not 1 <= number <= MAX_SIZE:
            shown = item.written if isinstance(item, Number) else getattr(item, "name", "a list")
            problems.add(item.at, f"a size must be a whole number from 1 to {MAX_SIZE:,}, got {shown[:MAX_DIGITS]}")
            return None
    return tuple(plain(item) for item in value.values)


class Blocks(dict[str, Block]):
    """All blocks of a model text, by name.

    Args:
        parsed: The parsed statements.
        problems: Collects the mistakes.
        custom_layers: The names of the user's own Keras layers.
    """

    def __init__(self, parsed: Parsed, problems: Problems, custom_layers: Collection[str] = ()) -> None:
        super().__init__()
        self.problems, self.custom_layers, self.broken = problems, custom_layers, parsed.broken
        self.train: dict[str, Statement] = {}
        for statement in parsed.statements:
            self._add(statement)
        self.option_keys = {arg.key for block in self.values() for call in block.calls for arg in call.args}
        self.called = {
            arg.value.name
            for block in self.values()
            for call in block.calls
            for arg in call.args
            if arg.key == "name" and isinstance(arg.value, Word)
        }
        self.free = {call.name for block in self.values() for call in block.calls if self.is_free(call.name)}
        for block in self.values():
            for call in block.calls:
                self._check(call)

    def _add(self, statement: Statement) -> None:
        name, property_ = statement.block.name, statement.property.name
        for number in (value for args in statement.items for arg in args for value in walk(arg)):
            if isinstance(number, Number) and (len(number.written) > MAX_DIGITS or not math.isfinite(number.value)):
                self.problems.add(number.at, f"{number.written[:12]}... is too large a number")
        block = self.setdefault(name, Block(name, statement.at)) if name != TRAIN else Block(TRAIN, statement.at)
        statements = self.train if name == TRAIN else block.statements
        if name != TRAIN and property_ not in PROPERTIES:
            if suggestion := self.problems.suggestion(name, [TRAIN]):
                self.problems.add(statement.at, f"there is no block {name!r} that has {property_!r}{suggestion}")
                return
            self.problems.add(
                statement.property.at,
                f"a block has no {property_!r}"
                + (self.problems.suggestion(property_, PROPERTIES) or f"; there are: {', '.join(PROPERTIES)}"),
            )
            return
        if property_ in statements:
            line = self.problems.line_and_column(statements[property_].at)[0]
            self.problems.add(statement.at, f"'{name}:{property_}' is given twice (first at line {line})")
            return
        statements[property_] = statement
        if not statement.items:
            self.problems.add(statement.property.at, f"'{name}:{property_}' has no value")
            return
        if len(block.statements) == 1 and (name in OPERATORS or is_keras(name)):
            kind = "an operator" if name in OPERATORS else "a layer of Keras, like each name with a capital letter"
            self.problems.add(statement.at, f"a block cannot be called {name!r}, which is {kind}")
        if name != TRAIN:
            self._value(block, property_, statement)

    def _value(self, block: Block, property_: str, statement: Statement) -> None:
        """Check the value of one statement of a block, which sets a property such as ``loss``."""
        if property_ == "layers":
            for args in statement.items:
                for arg in args[1:]:
                    self.problems.add(arg.at, "',' is missing before this layer")
                arg = args[0]
                if isinstance(arg.value, Call) and not arg.key:
                    block.calls.append(arg.value)
                elif isinstance(arg.value, Word) and not arg.key:
                    self.problems.add(arg.at, f"a layer has brackets, did you mean '{arg.value.name}()'?")
                else:
                    self.problems.add(arg.at, "a layer must stand here, such as relu()")
            return
        if len(statement.items) > 1:
            self.problems.add(statement.items[1][0].at, f"{property_!r} has one value, got {len(statement.items)}")
            return
        args = statement.items[0]
        if property_ in ("input", "output"):
            type_and_shape(args, property_, self.problems)
            return
        value = args[0].value
        if len(args) > 1 or args[0].key:
            self.problems.add(args[-1].at, f"{property_!r} has one value, without a key")
        elif property_ == "loss" and (not isinstance(value, Word) or value.name not in LOSSES):
            shown = value.name if isinstance(value, Word | Call) else "this"
            suggestion = self.problems.suggestion(loss_meant(shown), LOSSES) or f"; there are: {', '.join(LOSSES)}"
            self.problems.add(value.at, f"there is no loss {shown!r}{suggestion}")
        elif property_ in ("delta", "gamma", "alpha") and not isinstance(value, Number):
            self.problems.add(value.at, f"{property_} must be a number")
        elif property_ == "model":
            self._model(value)
        elif property_ == "from" and not isinstance(value, Word):
            self.problems.add(value.at, "'from' must name a block")
        elif property_ == "name" and not isinstance(value, Word | String):
            self.problems.add(value.at, "'name' must be a name")

    def _model(self, value: Value) -> None:
        """Check the value of a statement ``model``."""
        if not isinstance(value, Call):
            self.problems.add(value.at, "'model' is a class of models, such as Sequential() or Functional()")
            return
        if value.name not in ("Sequential", "Functional") and ">" not in value.name:
            suggestion = self.problems.suggestion(value.name, ["Sequential", "Functional"]) or "; write Functional()"
            self.problems.add(value.at, f"there is no model {value.name!r}{suggestion}")
        for arg in value.args:
            if not arg.key:
                self.problems.add(arg.at, "a model has options only, such as name= or inputs=")
            self.refuse_code(arg.value)

    def _check(self, call: Call) -> None:
        """Check a layer in its statement. The options that macros add are checked later."""
        keys: set[str] = set()
        for arg in call.args:
            if arg.key in keys:
                self.problems.add(arg.at, f"{arg.key!r} is given twice")
            keys |= {arg.key} - {""}
            self.refuse_code(arg.value)
        if is_keras(call.name):
            self._check_keras(call)
            return
        if call.name not in OPERATORS:
            for arg in call.args:
                if arg.key in EVERYWHERE:
                    self.value(arg)
        if call.name in OPERATORS:
            for arg in call.args:
                if arg.key:
                    self.option(call.name, arg)
        elif call.name not in self and call.name not in self.broken and not self.is_placeholder(call.name):
            keras = (
                self.problems.suggestion(call.name, keras_layers.arguments()) if call.name.casefold() == "dense" else ""
            )
            suggestion = keras or self.problems.suggestion(
                call.name, [*OPERATORS, *(block.name for block in self.values() if block.is_macro)]
            )
            self.problems.add(
                call.at,
                f"unknown operator {call.name!r}{suggestion or self.problems.suggestion(call.name, keras_layers.arguments())}",
            )

    def is_free(self, name: str) -> bool:
        """Return whether a name in a macro is only a placeholder, which an option of the macro's call must still
        replace by a layer.
        """
        is_known = name in OPERATORS or name in self or name in self.broken or is_keras(name)
        return not is_known and self.is_placeholder(name)

    def refuse_code(self, value: Value) -> None:
        """Refuse layers that execute their own code, also inside a value."""
        for call in walk(value):
            if isinstance(call, Call) and call.name.removeprefix("keras>") in CODE:
                self.problems.add(call.at, f"{call.name} is not allowed: a text never runs code")

    def is_placeholder(self, name: str) -> bool:
        """Return whether a layer's name is a placeholder for an option of a macro."""
        return name in self.option_keys or name == "activation"

    def _check_keras(self, call: Call) -> None:
        self.refuse_code(call)
        arguments = keras_layers.arguments().get(call.name)
        if arguments is None:
            if call.name not in self.custom_layers and call.name != "Lambda" and ">" not in call.name:
                close = self.problems.suggestion(call.name, keras_layers.arguments())
                lower = self.problems.suggestion(call.name, OPERATORS)
                if close or lower:
                    self.problems.add(call.at, f"Keras has no layer {call.name!r}{close or lower}")
            return
        valid_keys = (*arguments, *COMMON_OPTIONS)
        for arg in call.args:
            if not arg.key:
                self.problems.add(
                    arg.at,
                    f"{call.name} is a layer of Keras, whose arguments have keys, such as {(*arguments, 'name')[0]}=",
                )
            elif arg.key not in valid_keys and (suggestion := self.problems.suggestion(arg.key, valid_keys)):
                self.problems.add(arg.at, f"{call.name} has no argument {arg.key!r}{suggestion}")
            elif arg.key in EVERYWHERE or arg.key in keras_layers.COUNTS:
                self.value(arg)

    def option(self, name: str, arg: Arg, more_keys: Collection[str] = ()) -> bool:
        """Check an option of an operator, and return whether it is valid.

        Args:
            name: The operator.
            arg: The option.
            more_keys: Valid option names besides the operator's own.
        """
        operator = OPERATORS[name]
        valid_keys = (*operator.options, *EVERYWHERE)
        if arg.key not in valid_keys:
            suggestion = (
                self.problems.suggestion(arg.key, (*valid_keys, *more_keys)) or f"; it has {', '.join(valid_keys)}"
            )
            self.problems.add(arg.at, f"{name} has no option {arg.key!r}{suggestion}")
            return False
        return self.value(arg)

    def value(self, arg: Arg) -> bool:
        """Check the value of an option, and return whether it is valid."""
        key, value, before = arg.key, arg.value, len(self.problems)
        if key == "shapes":
            shapes = value.values if isinstance(value, Items) else ()
            if not shapes:
                self.problems.add(value.at, "shapes must be a list of shapes, such as [[128], [80]]")
            for item in shapes:
                if not isinstance(item, Items):
                    suggestion = f", did you mean '[{item.written}]'?" if isinstance(item, Number) else ", such as [10]"
                    self.problems.add(item.at, f"shapes has a list of sizes for each copy{suggestion}")
                else:
                    sizes(item, key, self.problems, empty=False)
        elif key in SIZES:
            sizes(value, key, self.problems, free=key == "shape")
        elif key in WORDS and (not isinstance(value, Word) or value.name not in WORDS[key]):
            suggestion = self.problems.suggestion(value.name, WORDS[key]) if isinstance(value, Word) else ""
            self.problems.add(value.at, f"{key} must be {' or '.join(WORDS[key])}{suggestion}")
        else:
            _check_value(arg, self.problems)
        return len(self.problems) == before


COMMON_OPTIONS = (*keras_layers.COMMON, *EVERYWHERE, "to", "call", "share")


def _check_value(arg: Arg, problems: Problems) -> None:
    requirement, fits = VALUES.get(arg.key, ("", lambda value: True))
    if arg.key == "name" and not isinstance(arg.value, Word | String):
        problems.add(arg.value.at, "name must be a name")
    elif not fits(plain(arg.value)):
        problems.add(arg.value.at, f"{arg.key} must be {requirement}")


def type_and_shape(
    args: tuple[Arg, ...], property_: str, problems: Problems
) -> tuple[str, tuple[int | None, ...] | None]:
    """Return the type and the shape that a text gives to an input or output.

    The type is empty if it is missing; the shape is None if it is wrong.
    """
    dtype, shape, has_shape = "", None, False
    for index, arg in enumerate(args):
        if not arg.key and arg.value == Word("shape", 0):
            behind = args[index + 1].at if index + 1 < len(args) else arg.at
            problems.add(behind, "'=' is missing behind 'shape', did you mean 'shape=['?")
            return dtype, None
        if arg.key == "shape":
            has_shape, shape = True, sizes(arg.value, "shape", problems, empty=property_ == "output", free=True)
        elif property_ == "input" and arg.key in OF_INPUTS:
            _check_value(arg, problems)
        elif arg.key:
            problems.add(
                arg.at, f"{property_!r} has no {arg.key!r}{problems.suggestion(arg.key, ['shape', *OF_INPUTS])}"
            )
            has_shape = True
        elif isinstance(arg.value, Word) and arg.value.name in (*DTYPES, *FOREIGN) and not dtype:
            dtype = arg.value.name
        elif isinstance(arg.value, Word):
            problems.add(
                arg.at,
                f"there is no type {arg.value.name!r}{problems.suggestion(arg.value.name, DTYPES) or '; there are: ' + ', '.join(DTYPES)}",
            )
        elif isinstance(arg.value, Items):
            problems.add(arg.at, f"{property_!r} has its shape with a key, did you mean 'shape=[...]'?")
            has_shape = True
        else:
            problems.add(arg.at, f"{property_!r} is a type and a shape, such as float32 shape=[28, 28, 1]")
            has_shape = True
    if not has_shape:
        problems.add(args[0].at, f"{property_!r} has no shape, write shape=[...]")
    return dtype, shape
