"""Converts values of a model text to Keras objects, and back. Runs where models are made.

This module imports nothing by name: a class is Keras's own or registered. To write an object, it creates one with few
    arguments, and adds the first differing argument until the configs are equal. A text therefore has the shortest form
    of an equal object.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ddlf.errors import NotationError
from ddlf.extras.text.language.blocks import PLAIN, plain
from ddlf.extras.text.language.expand import IT
from ddlf.extras.text.language.forms import FUNCTIONAL
from ddlf.extras.text.language.keras_layers import INNER
from ddlf.extras.text.language.syntax import MAX_ITEMS
from ddlf.extras.text.language.values import Arg, Call, Items, Number, String, Tensor, Value, Word

HOMES = (
    *("layers", "initializers", "regularizers", "constraints", "quantizers", "dtype_policies", "random"),
    *("optimizers", "optimizers.schedules", "metrics"),
)
"""The modules of Keras that have the classes of a text."""
Made = Callable[[Call], Any]


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Set Keras's global settings, such as the float type, to their defaults within this context. Arguments are
    compared with these defaults.
    """
    policy, layout = keras.config.dtype_policy(), keras.config.image_data_format()
    keras.config.set_dtype_policy("float32")
    keras.config.set_image_data_format("channels_last")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_image_data_format(layout)


def class_named(name: str) -> Any:
    """Return the Keras class or registered custom class with a name.

    Raises:
        ValueError: There is no such class.
    """
    registered = keras.saving.get_registered_object(name)
    if registered is not None:
        return registered
    package, _, last = name.rpartition(">")
    for home in INNER:
        if home.endswith(f".{package}"):
            module: Any = functools.reduce(getattr, home.split("."), keras.src)
            kind = getattr(module, last, None)
            if isinstance(kind, type) and issubclass(kind, keras.Operation):
                return kind
    for home in HOMES:
        module = functools.reduce(getattr, home.split("."), keras)
        if (kind := getattr(module, name, None)) is not None:
            return kind
    raise ValueError(f"there is no {name}; register a custom layer with keras.saving.register_keras_serializable")


def valued(value: Value, model: Made | None = None, tensors: Any = ()) -> Any:
    """Convert a value of a model text to a value for Keras.

    Args:
        value: The value in the text.
        model: Returns the Keras model that a block defines; None if the block defines none.
        tensors: The tensors that the layer reads, to insert into the value.

    Raises:
        ValueError: There is no such class.
    """
    if isinstance(value, Tensor):
        return tensors[value.index]
    if isinstance(value, Items):
        return [valued(item, model, tensors) for item in value.values]
    if isinstance(value, Word) and ">" in value.name:
        return keras.saving.get_registered_object(value.name) or value.name
    if not isinstance(value, Call):
        return plain(value)
    args = [valued(arg.value, model, tensors) for arg in value.args if not arg.key]
    options = {arg.key: valued(arg.value, model, tensors) for arg in value.args if arg.key}
    if value.name in PLAIN_CALLS:
        return PLAIN_CALLS[value.name](*args, **options)
    if model is not None and (block_model := model(value)) is not None:
        return block_model
    return class_named(value.name)(*args, **options)


def _array(values: Any, dtype: str) -> Any:
    import numpy as np

    return np.asarray(values, dtype)


def _tensor(values: Any, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(values, dtype)


def _dict(*pairs: Any, **options: Any) -> dict[Any, Any]:
    return dict(pairs) | options


PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "tuple": lambda *values: tuple(values),
    "slice": slice,
    "ellipsis": lambda: ...,
    "array": _array,
    "constant": _tensor,
    "number": float,
}
"""Calls that are not classes: Python values without a literal in a text."""

# -- back to a text ------------------------------------------------------------------------------------------------------


Config = dict[str, Any]
REFUSED = (TypeError, ValueError, NotImplementedError, AttributeError, KeyError, IndexError, OSError)
"""The exceptions that classes raise for a missing or wrong argument."""
LATER = ("build_config", "compile_config", "shared_object_id")


class CannotBeWritten(NotationError):
    """A model text cannot contain a part of a Keras model.

    What to do:
        Change the part that the sentence names: register your own class, or replace a function with a layer.
    """


def plainly(value: Any) -> Any:
    """Return a config as it is in a file: with lists for tuples, without Keras's entries for data and ``compile``."""
    return _without_later_keys(json.loads(json.dumps(value, default=str)))


def _without_later_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_later_keys(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_later_keys(item) for key, item in value.items() if key not in LATER}
    return value


def name_value(name: str) -> Value:
    """Return a name as a word of the notation if it is a valid word, else as a string in quotes."""
    simple = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*(>[A-Za-z][A-Za-z0-9_]*)?", name)
    return Word(name, 0) if simple and name not in PLAIN and name != IT else String(name, 0)


def class_name(entry: Config, label: str) -> str:
    """Return the name of an object's class in a model text.

    Raises:
        CannotBeWritten: The class is neither Keras's nor registered, or it runs code.
    """
    kind, module, registered = entry["class_name"], str(entry.get("module") or ""), entry.get("registered_name")
    if kind == "Lambda":
        raise CannotBeWritten(
            f"{label} is a Lambda, and a text cannot contain its function; write a custom layer, and register it with "
            "keras.saving.register_keras_serializable"
        )
    for home in INNER:
        if module == f"keras.src.{home}":
            return f"{home.rpartition('.')[2]}>{kind}"
    name = str(registered) if registered and ">" in str(registered) else str(kind)
    from_keras = module.partition(".")[0] == "keras"
    if from_keras and kind in ("Sequential", FUNCTIONAL):
        return str(kind)
    try:
        keras_class = class_named(name)
    except ValueError:
        keras_class = None
    if keras_class is None or not (from_keras or keras_class.__module__ == module):
        raise CannotBeWritten(
            f"{label} is a {kind} of {module or 'no module'}, which is not registered; register it with "
            "keras.saving.register_keras_serializable"
        )
    return name


class Writer:
    """Writes Keras objects in the notation of a model text.

    Args:
        model: Writes a model that is an argument, and returns its block's name.
        model_of: Returns the model that a block defines.
    """

    def __init__(self, model: Callable[[Config], str], model_of: Callable[[Call], Any]) -> None:
        self.model, self.model_of = model, model_of
        self.argument_cache: dict[str, tuple[Arg, ...]] = {}

    def call(self, entry: Config, label: str, *, is_named: bool = False) -> Call:
        """Return the text of an object with its arguments.

        Args:
            entry: The object as Keras serializes it.
            label: The description of the object in errors.
            is_named: Whether the caller writes the name.

        Raises:
            CannotBeWritten: No arguments create an equal object.
        """
        name = class_name(entry, label)
        config = dict(entry["config"] or {})
        key = f"{name} {json.dumps(config if not is_named else config | {'name': ''}, default=str)}"
        if key not in self.argument_cache or '"layers"' in key:  # each model in an argument is a new one
            self.argument_cache[key] = self._args(name, config, label, is_named)
        return Call(name, self.argument_cache[key], 0)

    def _args(self, name: str, config: Config, label: str, is_named: bool) -> tuple[Arg, ...]:
        kind, args = class_named(name), dict[str, Value]()
        expected = {key: plainly(value) for key, value in config.items()}
        parameters = inspect.signature(kind.__init__).parameters
        keys = [key for key in parameters if key in config] + [key for key in config if key not in parameters]
        fixed = {"name": config["name"]} if is_named and "name" in config else {}
        for key in keys:
            if key in parameters and parameters[key].default is inspect.Parameter.empty and key not in fixed:
                args[key] = self.value(config[key], label)
        if "name" in config and not fixed:  # Keras would choose another name each time
            args["name"] = self.value(config["name"], label)

        def differing(args: dict[str, Value]) -> list[str]:
            created = kind(**{key: valued(value, self.model_of) for key, value in args.items()}, **fixed)
            now = plainly(keras.saving.serialize_keras_object(created)["config"])
            return [key for key in keys if key not in now or now[key] != expected[key]]

        remaining = [key for key in keys if key not in args and key not in fixed]
        while True:
            try:
                differing_keys = differing(args)
            except REFUSED as error:
                differing_keys = remaining  # try again with another argument
                if not remaining:
                    raise CannotBeWritten(f"{label} ({name}) cannot be made from its config: {error}") from error
            if not differing_keys:
                break
            next_key = [item for item in differing_keys if item in remaining][:1]
            if not next_key:
                raise CannotBeWritten(f"{label} ({name}) cannot be restored with the same {', '.join(differing_keys)}")
            remaining.remove(next_key[0])
            args[next_key[0]] = self.value(config[next_key[0]], label)
        for key in [*args]:
            fewer_args = {other: value for other, value in args.items() if other != key}
            if not _differs(differing, fewer_args):
                args = fewer_args
                continue
            for short in self._shorter(config[key]):
                if not _differs(differing, args | {key: short}):
                    args[key] = short
                    break
        return tuple(Arg(key, value, 0) for key, value in args.items())

    def _shorter(self, value: Any) -> list[Value]:
        """Yield shorter forms of a value that Keras may accept, the shortest first."""
        if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
            first = value[0]
            inner = self._shorter(first) if isinstance(first, list | tuple) else []
            return [*inner, *([Number(repr(first), 0)] if type(first) in (int, float) else [])]
        if isinstance(value, dict) and value.get("class_name") == "DTypePolicy":
            return [Word(str(value["config"]["name"]), 0)]
        if isinstance(value, dict) and str(value.get("module")).startswith("keras.") and value.get("class_name"):
            snake = keras.src.utils.naming.to_snake_case(str(value["class_name"]))
            return [Word(str(snake), 0)]
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            return [Number(str(int(value)), 0)]
        return []

    def value(self, value: Any, label: str) -> Value:
        """Return the text of a config value.

        Raises:
            CannotBeWritten: The value is a function or an object that a model text cannot contain.
        """
        if value is None or isinstance(value, bool):
            return Word({None: "none", True: "true", False: "false"}[value], 0)
        if isinstance(value, int):
            return Number(str(value), 0)
        if isinstance(value, float):
            return _number(value)
        if isinstance(value, str):
            return self._text(value, label)
        if isinstance(value, list | tuple):
            if len(value) > MAX_ITEMS:
                raise CannotBeWritten(
                    f"{label} has a list of {len(value):,} values, and a text has {MAX_ITEMS:,} at most"
                )
            return Items(tuple(self.value(item, label) for item in value), 0)
        if isinstance(value, dict):
            return self._object(value, label)
        raise CannotBeWritten(f"{label} has a value of the type {type(value).__name__}, which a text cannot contain")

    def _text(self, value: str, label: str) -> Value:
        if any(letter == "\n" or unicodedata.category(letter) in ("Cc", "Cs") for letter in value):
            raise CannotBeWritten(
                f"{label} has a string with a line break or another character that a text cannot contain"
            )
        return name_value(value)

    def _object(self, value: Config, label: str) -> Value:
        kind = value.get("class_name")
        if value.keys() == {"value"} and isinstance(value["value"], list | tuple) and len(value["value"]) == 3:
            # Keras serializes a lambda as code, defaults and closure.
            return _function({"class_name": "__lambda__"}, label)
        if kind is None or "config" not in value:
            pairs = [self._pair(key, item, label) for key, item in value.items()]
            return Call("dict", tuple(pairs), 0)
        config = value["config"]
        if kind in ("function", "__lambda__"):
            return _function(value, label)
        if kind in ("__numpy__", "__tensor__"):
            values = self.value(config["value"], label)
            name = "array" if kind == "__numpy__" else "constant"
            return Call(name, (Arg("", values, 0), Arg("dtype", String(config["dtype"], 0), 0)), 0)
        if kind == "__slice__":
            ends = [self.value(config[key], label) for key in ("start", "stop", "step")]
            return Call("slice", tuple(Arg("", item, 0) for item in ends), 0)
        if kind == "__ellipsis__":
            return Call("ellipsis", (), 0)
        if kind.startswith("__"):
            raise CannotBeWritten(f"{label} has a {kind.strip('_')}, which a text cannot contain")
        if isinstance(config, dict) and "layers" in config:
            return Call(self.model(value), (), 0)
        return self.call(value, label)

    def _pair(self, key: Any, value: Any, label: str) -> Arg:
        if isinstance(key, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", key):
            return Arg(key, self.value(value, label), 0)
        return Arg("", Items((self.value(key, label), self.value(value, label)), 0), 0)


def _differs(differing: Callable[[dict[str, Value]], list[str]], args: dict[str, Value]) -> bool:
    """Return whether some arguments create an object that differs from the wanted one, or fail."""
    try:
        return bool(differing(args))
    except REFUSED:
        return True


def _number(value: float) -> Value:
    if value != value or value in (float("inf"), float("-inf")):
        return Call("number", (Arg("", String(repr(value), 0), 0),), 0)
    return Number(repr(value), 0)


def _function(value: Config, label: str) -> Value:
    """Return the name of a function as a model text contains it. The function must be Keras's own or registered."""
    name = str(value["config"]) if value["class_name"] == "function" else "a lambda"
    is_known = value["class_name"] == "function" and (
        str(value.get("module")).startswith("keras") or keras.saving.get_registered_object(name) is not None
    )
    if not is_known:
        raise CannotBeWritten(
            f"{label} has a function ({name}), which a text cannot contain; register it with "
            "keras.saving.register_keras_serializable"
        )
    return name_value(name)
