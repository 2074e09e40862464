"""A model whose batches are shared by several cards of one worker. Runs on the thread of Keras, on master and workers.

With JAX, the app sets a distribution of Keras. With TensorFlow, it makes the model in a ``MirroredStrategy``.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ddlf.errors import AppError


def forget_distribution() -> None:
    """End the distribution over cards that an earlier app has set on this thread (``keras.distribution``)."""
    import keras

    if keras.distribution.distribution() is not None:
        keras.distribution.set_distribution(None)


def strategy_of(model: Any) -> Any:
    """Return the strategy of TensorFlow in which a model was made; None without one."""
    strategy = getattr(model, "distribute_strategy", None)  # TensorFlow has a default strategy for all other models
    return None if strategy is None or type(strategy).__name__.startswith("_Default") else strategy


def scope_of(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new variables get a copy on each card of the model."""
    strategy = strategy_of(model)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def copies_of(model: Any) -> int:
    """Return how many copies of a model step together in a strategy of TensorFlow, each with its part of a batch."""
    strategy = strategy_of(model)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def check_strategy(model: Any) -> None:
    """Refuse a strategy of TensorFlow that a worker cannot train in.

    Raises:
        AppError: The strategy spans machines or has no copy of the weights on each card; or several steps would be one
            call, which Keras 3.15 cannot compile in a strategy.
    """
    if (strategy := strategy_of(model)) is None:
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


def check_one_card(model: Any, what: str) -> None:
    """Refuse a strategy of TensorFlow in a training that does not step by ``fit``: it would use one card only.

    Args:
        model: The model, built.
        what: The training, as a setting.

    Raises:
        AppError: The model has copies on several cards.
    """
    if (copies := copies_of(model)) > 1:
        raise AppError(
            f"{what} computes on one card, but the model {model.name!r} is made in a strategy for {copies} cards",
            hint="leave out the strategy, and start one worker for each card",
        )


def check_division(model: Any, samples: int, batch_size: int) -> None:
    """Refuse batches that a strategy of TensorFlow cannot divide equally: their samples would get unequal weights.

    JAX raises its own error.

    Args:
        model: The model.
        samples: Number of samples in an epoch.
        batch_size: Samples in a batch; the last one may have less.

    Raises:
        AppError: A batch cannot be divided equally.
    """
    copies = copies_of(model)
    for batch in (min(batch_size, samples), samples % batch_size):
        if batch % copies:
            raise indivisible(batch, copies)


def indivisible(samples: int, cards: int) -> AppError:
    """Return the error about a batch of some samples that cannot be divided equally among some cards."""
    return AppError(
        f"a batch of {samples} samples cannot be divided among {cards} cards",
        hint=f"let {cards} divide each batch, also the last one of a slot's epoch: choose the number of samples and batch_size",
    )
