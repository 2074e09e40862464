"""Random numbers that follow from a slot's seed, whoever carries the slot and whatever was done before. Runs on workers."""

from __future__ import annotations

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


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that a slot's result does not depend on who carries it.

    Dropout and the like hold seed generators, which are variables but no weights, so they do not come with the weights. ``keras.random`` without a
    seed has one for all, which a compiled step goes on using: it is set anew, not made anew. ``tf.random`` without a seed has no such variable, see
    ``keeps_a_seed``.
    """
    import keras
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    common = seed_generator.global_seed_generator()
    words = np.random.SeedSequence(seed).generate_state(2)
    keras.utils.set_random_seed(int(words[0]))
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
            if any(node.op.startswith(FROM_TRACING) for node in nodes):
                return True
    return False
