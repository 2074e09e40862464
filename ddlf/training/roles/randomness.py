"""Random numbers that follow from a slot's seed, whoever carries the slot and whatever was done before. Runs on workers."""

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
"""Beginnings of the names of TensorFlow's operations that keep the seed that was set when the step was compiled."""

_functions: dict[str, bool] = {}
"""Which of TensorFlow's functions keep a seed. It makes one of each operation that runs by itself, too."""


def set_seed(seed: int) -> None:
    """As ``keras.utils.set_random_seed``, but for the time that this costs TensorFlow.

    ``tf.random.set_seed`` also forgets all that was made ready to run, so that what keeps a seed begins anew. To make the training step ready again
    took 0.06 to 0.15 s of each round of a small model, so that is done only where something does keep one.
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
        with contextlib.suppress(errors.NotFoundError):  # another thread has just let go of it
            _functions[name] = any(map(draws, context().get_function_def(name).node_def))
    if any(map(_functions.get, names)):
        keras.utils.set_random_seed(seed)
    else:
        global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
        random.seed(seed)
        np.random.seed(seed)
        context()._seed, context()._rng = seed, random.Random(seed)


def draws(node: Any) -> bool:
    """Whether an operation of a TensorFlow graph keeps a seed."""
    return bool(node.op.startswith(FROM_TRACING))


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that a slot's result does not depend on who carries it.

    Dropout and the like hold seed generators, which are variables but no weights, so they do not come with the weights. ``keras.random`` without a
    seed has one for all, which a compiled step goes on using: it is set anew, not made anew. ``tf.random`` without a seed has no such variable, see
    ``keeps_a_seed``.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    common = seed_generator.global_seed_generator()
    words = np.random.SeedSequence(seed).generate_state(2)
    set_seed(int(words[0]))
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, common)
    states = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    for number, state in enumerate([*states, common.state]):
        # 31 bits fit every type that a backend keeps the state in.
        words = np.random.SeedSequence([*seed, number]).generate_state(2) >> np.uint32(1)
        state.assign(words.astype(str(state.dtype)))


def keeps_a_seed(model: Any) -> bool:
    """Whether TensorFlow's compiled training step draws random numbers from a seed that it was compiled with."""
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
