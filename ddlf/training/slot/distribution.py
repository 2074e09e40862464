"""A model whose batches are shared by several cards of one worker. Runs on the thread of Keras, on master and workers.

With JAX, the app sets a distribution of Keras. With TensorFlow, it makes the model in a ``MirroredStrategy``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

from ddlf.errors import AppError, ConfigError


def forget_distribution() -> None:
    """End the distribution over cards that an earlier app has set on this thread (``keras.distribution``)."""
    import keras

    if keras.distribution.distribution() is not None:
        keras.distribution.set_distribution(None)


@contextlib.contextmanager
def own_distribution() -> Iterator[None]:
    """Let the distribution of Keras that is set in this context end with it. Then that of before holds again."""
    import keras

    before = keras.distribution.distribution()
    try:
        yield
    finally:
        if keras.distribution.distribution() is not before:
            keras.distribution.set_distribution(before)


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """Let each card compute whole batches in this context, whatever distribution of Keras the app has set.

    An evaluation so has any number of samples, and its bits are those of the master, whose thread has no distribution.
    """
    with own_distribution():
        forget_distribution()
        yield


class _NextKey:
    """A number that is another one whenever it is read."""

    def __init__(self) -> None:
        self._numbers = count(step=16)  # a strategy takes a few numbers from its first one

    def __get__(self, strategy: Any, kind: Any) -> int:
        return next(self._numbers)


def separate_strategies() -> None:
    """Let the next strategies of TensorFlow add gradients under numbers that no other has. Call it after Keras's import.

    TensorFlow 2.21 begins with the same numbers in each strategy of a process. The second app of a worker then fails if
    its model has other shapes, and so does each later one.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    kind = tf.distribute.MirroredStrategy
    if not isinstance(vars(kind).get("_collective_key_base"), _NextKey):
        kind._collective_key_base = _NextKey()


def strategy_of(model: Any) -> Any:
    """Return the strategy of TensorFlow in which a model was made; None without one."""
    return _chosen(getattr(model, "distribute_strategy", None))


def _chosen(strategy: Any) -> Any:
    """Return a strategy of TensorFlow; None for the default one, in which everything else is made."""
    return None if strategy is None or type(strategy).__name__.startswith("_Default") else strategy


def scope_of(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new variables get a copy on each card of the model."""
    strategy = strategy_of(model)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def copies_of(model: Any) -> int:
    """Return how many copies of a model step together in a strategy of TensorFlow, each with its part of a batch."""
    strategy = strategy_of(model)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def parts_of_batch(model: Any) -> int:
    """Return into how many parts the cards of this worker divide each batch of a model."""
    keras = sys.modules.get("keras")
    distribution = None if keras is None else keras.distribution.distribution()  # of JAX
    if distribution is None:
        return copies_of(model)
    mesh = distribution.device_mesh
    return int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])


def check_strategy(model: Any) -> None:
    """Refuse a strategy of TensorFlow that a worker cannot train in.

    Raises:
        AppError: The strategy spans machines or has no copy of the weights on each card; the model or its optimizer was
            made outside of it; or steps would be in one call or a condition, which Keras 3.15 cannot compile in a
            strategy.
    """
    strategy = strategy_of(model)
    _check_optimizer(model, strategy)
    if strategy is None:
        return
    kind = type(strategy).__name__
    if kind != "MirroredStrategy":
        raise AppError(
            f"the model {model.name!r} is made in a {kind} of TensorFlow, which does not fit the rounds of a worker",
            hint="use tf.distribute.MirroredStrategy, or no strategy: each card then gets its own worker",
        )
    if model.compiled and model.steps_per_execution > 1:
        raise AppError(
            f"steps_per_execution={model.steps_per_execution} does not work with the {kind} of the model {model.name!r}",
            hint="leave out steps_per_execution: Keras cannot put several steps of a strategy into one call",
        )


def _check_optimizer(model: Any, strategy: Any) -> None:
    """Refuse an optimizer that has another strategy than its model, or that Keras cannot compile in a strategy."""
    optimizer: Any = getattr(model, "optimizer", None)
    while getattr(optimizer, "inner_optimizer", None) is not None:
        optimizer = optimizer.inner_optimizer
    optimizer_strategy = _chosen(getattr(optimizer, "_distribution_strategy", None))
    if optimizer is not None and optimizer_strategy is not strategy:
        raise AppError(
            f"the model {model.name!r} and its optimizer are not made in the same strategy of TensorFlow",
            hint="make and compile the model in the scope of one strategy",
        )
    if strategy is not None and (getattr(optimizer, "gradient_accumulation_steps", None) or 1) > 1:
        raise AppError(
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} does not work with the strategy of the "
            f"model {model.name!r}: Keras cannot leave out steps of a strategy",
            hint="leave out gradient_accumulation_steps, and choose a larger batch_size",
        )
    if strategy is not None and getattr(model, "jit_compile", None) is True:
        raise AppError(
            f"jit_compile=True does not work with the strategy of the model {model.name!r}: XLA cannot read all copies of "
            "a weight",
            hint="leave out jit_compile",
        )


def build_by_first_parts(model: Any) -> None:
    """Let Keras build losses and metrics by the first card's part of a batch, if a model is in a strategy of TensorFlow.

    Keras 3.15 uses the mean of all parts, although only shapes matter. This fails for parts of unequal sizes, such as
    those of a test with an odd number of samples, and for labels that cannot be added. It also reads a batch in each
    ``fit`` and each evaluation, although everything is built after the first one.
    """
    if (strategy := strategy_of(model)) is None:
        return
    import keras

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        for _, _, batches in () if iterator is None or _is_all_built(model) else iterator:
            data_batch = keras.tree.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], next(batches)
            )
            break
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    vars(model)["_maybe_symbolic_build"] = build


def _is_all_built(model: Any) -> bool:
    parts = (model._compile_metrics, model._compile_loss, *model._flatten_layers())
    return all(part is None or part.built for part in parts)


def check_one_card(model: Any, setting: str) -> None:
    """Refuse a strategy of TensorFlow in a training that does not step by ``fit``: it would use one card only.

    Args:
        model: The model, built.
        setting: The training, as a setting.

    Raises:
        ConfigError: The model has copies on several cards.
    """
    if (copies := copies_of(model)) > 1:
        raise ConfigError(
            f"{setting} computes on one card, but the model {model.name!r} is made in a strategy for {copies} cards",
            hint="leave out the strategy, and start one worker for each card",
        )


def check_division(model: Any, samples: int, batch_size: int) -> None:
    """Refuse batches that several cards cannot divide equally.

    In a strategy of TensorFlow, their samples would get unequal weights. JAX raises an error after the batches before.

    Args:
        model: The model.
        samples: Number of samples in an epoch.
        batch_size: Samples in a batch; the last one may have less.

    Raises:
        AppError: A batch cannot be divided equally.
    """
    parts = parts_of_batch(model)
    for batch in (min(batch_size, samples), samples % batch_size):
        if batch % parts:
            raise indivisible(batch, parts)


def check_balance(model: Any, balance: str) -> None:
    """Refuse parts by speed for a model whose batches several cards share: they would end the run in a later round.

    Args:
        model: The model.
        balance: The setting of this name.

    Raises:
        AppError: The parts of slots may change to sizes that the cards cannot divide.
    """
    if balance == "speed" and (parts := parts_of_batch(model)) > 1:
        raise AppError(
            f"balance='speed' gives slots any number of samples, which {parts} cards of a worker cannot divide",
            hint="leave out balance, or start one worker for each card",
        )


def indivisible(samples: int, cards: int) -> AppError:
    """Return the error about a batch of some samples that cannot be divided equally among some cards."""
    return AppError(
        f"a batch of {samples} samples cannot be divided among {cards} cards",
        hint=f"let {cards} divide each batch, also the last one of a slot's epoch: choose the number of samples and batch_size",
    )
