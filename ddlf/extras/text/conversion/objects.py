"""Values of a text as Keras takes them: names as its classes, and what has brackets as objects. Runs where models are made.

Nothing is imported by name: a class is one of Keras's own, or one that was registered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.keras_layers import INNER
from ddlf.extras.text.language.values import Call, Items, Tensor, Value, Word

HOMES = (
    *("layers", "initializers", "regularizers", "constraints", "quantizers", "dtype_policies", "random"),
    *("optimizers", "optimizers.schedules", "metrics"),
)
"""The modules of Keras that have the classes of a text."""
Made = Callable[[Call], Any]


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Keras's defaults as they are where nobody changed them, so that what differs from them is written."""
    policy, layout = keras.config.dtype_policy(), keras.config.image_data_format()
    keras.config.set_dtype_policy("float32")
    keras.config.set_image_data_format("channels_last")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_image_data_format(layout)


def found(name: str) -> Any:
    """The class of Keras, or of the user's own that is registered, with that name.

    Raises:
        ValueError: There is none.
    """
    registered = keras.saving.get_registered_object(name)
    if registered is not None:
        return registered
    package, _, last = name.rpartition(">")
    for home in INNER:
        if home.endswith(f".{package}"):
            module: Any = functools.reduce(getattr, home.split("."), keras.src)
            made = getattr(module, last, None)
            if isinstance(made, type) and issubclass(made, keras.Operation):
                return made
    for home in HOMES:
        module = functools.reduce(getattr, home.split("."), keras)
        if (made := getattr(module, name, None)) is not None:
            return made
    raise ValueError(
        f"there is no {name}; a layer of one's own is registered with keras.saving.register_keras_serializable"
    )


def valued(value: Value, model: Made | None = None, tensors: Any = ()) -> Any:
    """A value as Keras takes it.

    Args:
        value: As the text has it.
        model: Gives the model of Keras that a block is; None if it is none.
        tensors: What the layer reads, where the value has tensors.

    Raises:
        ValueError: There is no such class.
    """
    if isinstance(value, Tensor):
        return tensors[value.index]
    if isinstance(value, Items):
        return [valued(each, model, tensors) for each in value.values]
    if isinstance(value, Word) and ">" in value.name:
        return keras.saving.get_registered_object(value.name) or value.name
    if not isinstance(value, Call):
        return plain(value)
    args = [valued(arg.value, model, tensors) for arg in value.args if not arg.key]
    options = {arg.key: valued(arg.value, model, tensors) for arg in value.args if arg.key}
    if value.name in PLAIN_CALLS:
        return PLAIN_CALLS[value.name](*args, **options)
    if model is not None and (made := model(value)) is not None:
        return made
    return found(value.name)(*args, **options)


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
"""What has brackets and is no class: values that Python has, and a text has no sign for."""
