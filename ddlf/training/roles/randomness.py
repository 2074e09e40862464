"""Random numbers that depend only on a slot's seed, on any worker and after any earlier work. Runs on workers."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np

FROM_TRACING = (
    "RandomStandardNormal",
    "RandomUniform",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoisson",
    "Multinomial",
)
"""Prefixes of TensorFlow operations that keep the seed that was set when the step was compiled."""

_functions: dict[str, bool] = {}
"""TensorFlow functions by name, and whether they keep a seed. Each operation that runs by itself has one, too."""


def set_seed(seed: int) -> None:
    """Set all seeds like ``keras.utils.set_random_seed``, but faster with TensorFlow.

    ``tf.random.set_seed`` also discards all prepared functions, so that functions with a seed restart. To prepare the
    training step again took 0.06 to 0.15 s in each round of a small model. So this happens only if a function does keep
    a seed.
    """
    import keras
    from keras.src.backend.common import global_state
    from keras.src.utils import rng_utils

    if keras.backend.backend() != "tensorflow":
        keras.utils.set_random_seed(seed)
        return
    from tensorflow import errors
    from tensorflow.python.eager.context import context

    names = context().list_function_names()
    for name in names - _functions.keys():
        with contextlib.suppress(errors.NotFoundError):  # another thread has just released it
            _functions[name] = any(map(draws, context().get_function_def(name).node_def))
    if any(map(_functions.get, names)):
        keras.utils.set_random_seed(seed)
    else:
        global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
        random.seed(seed)
        np.random.seed(seed)
        context()._seed, context()._rng = seed, random.Random(seed)


def draws(node: Any) -> bool:
    """Return whether an operation of a TensorFlow graph keeps a seed."""
    return bool(node.op.startswith(FROM_TRACING))


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that the result does not depend on the worker.

    Layers such as Dropout have seed generators. Their variables are not weights, so they do not travel with them.
    ``keras.random`` without a seed has one global generator, which compiled steps keep using: this function sets its
    state instead of replacing it. ``tf.random`` without a seed has no such variable; see ``keeps_a_seed``.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    common = seed_generator.global_seed_generator()
    words = np.random.SeedSequence(seed).generate_state(2)
    set_seed(int(words[0]))
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, common)
    states = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    for number, state in enumerate([*states, common.state]):
        # 31 bits fit every type of state in all backends.
        words = np.random.SeedSequence([*seed, number]).generate_state(2) >> np.uint32(1)
        state.assign(words.astype(str(state.dtype)))


def keeps_a_seed(model: Any) -> bool:
    """Return whether the compiled TensorFlow training step draws random numbers from its seed at compilation."""
    for cell in getattr(getattr(model, "train_function", None), "__closure__", None) or ():
        try:
            compiled: list[Any] = getattr(cell.cell_contents, "_list_all_concrete_functions", list)()
        except ValueError:  # an empty cell
            continue
        for concrete in compiled:
            graph = concrete.graph.as_graph_def()
            nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
            if any(map(draws, nodes)):
                return True
    return False
