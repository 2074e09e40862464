"""Variables without memory: a worker builds the whole model, but makes the variables of its part only. Their names.

Runs in the executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unmade() -> Iterator[None]:
    """Let layers describe their weights without making them, while this context is open.

    Optimizers cannot begin where variables are deferred, so this is so only while a layer adds a weight.
    """
    import keras

    add_weight = keras.layers.Layer.add_weight

    def add(layer: Any, *args: Any, **options: Any) -> Any:
        with deferred():
            return add_weight(layer, *args, **options)

    keras.layers.Layer.add_weight = add
    try:
        yield
    finally:
        keras.layers.Layer.add_weight = add_weight


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let Keras give new variables a shape but no value, while this context is open.

    Keras would make them at the end of its next ``StatelessScope``, so they are taken off its list.
    """
    import keras
    from keras.src.backend.common import global_state

    listed = "uninitialized_variables"
    before = list(global_state.get_global_attribute(listed, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(listed, before)


def name_all(optimizer: Any) -> None:
    """Give each variable of an optimizer a path that is the same on all machines.

    Keras counts variables without a name, such as the one of Nadam. They get the name of their attribute.
    """
    import keras

    for name, value in vars(optimizer).items():
        if isinstance(value, keras.Variable) and not value.path.startswith(f"{optimizer.name}/"):
            value._path = f"{optimizer.name}/{name.strip('_')}"
