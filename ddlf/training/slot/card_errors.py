"""Turns errors of frameworks about memory and determinism into errors of DDLF. Runs on master and workers."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ddlf.data.app_data import batches, data_set_of, has_own_train
from ddlf.data.trees import tree_map
from ddlf.errors import AppError, DDLFError, OutOfMemory
from ddlf.training.context import App
from ddlf.training.slot.distribution import indivisible
from ddlf.worker.assignment import cards_of_executor, memory_limit
from ddlf.worker.frameworks import framework

HALVINGS = 6
"""Maximum number of smaller batches to try after a batch did not fit. Each one compiles the step again."""
RANDOM_OPS = "random ops"


@contextlib.contextmanager
def explained(
    app: App, batch_size: Callable[[], int], fitted: Callable[[], int] = lambda: 0, *, evaluates: bool = False
) -> Iterator[None]:
    """Raise an error of DDLF instead of a framework's error about memory or determinism, in a ``with`` block.

    Args:
        app: The user's ``IApp``.
        batch_size: Returns the number of samples in a batch; 0 if it is unknown.
        fitted: Returns the largest batch that fitted; 0 if none did.
        evaluates: Whether the block evaluates the model.

    Raises:
        OutOfMemory: A batch does not fit into the memory.
        AppError: The app asks for equal bits, and an op has no way to compute them; or a batch cannot be divided among the
            cards of a worker.
    """
    try:
        yield
    except DDLFError:
        raise
    except Exception as error:
        backend = framework()
        if app.deterministic and (op := backend.op_without_determinism(error)):
            raise _lacks_determinism(op) from None
        if (parts := backend.indivisible(error)) is not None:
            raise indivisible(*parts) from None
        if not backend.is_full(error):
            raise
        peak = _peak()
        traceback.clear_frames(error.__traceback__)  # they keep the arrays of the failed step
        full = _full(batch_size(), fitted(), peak, evaluates)
        raise full from None


def _lacks_determinism(op: str) -> AppError:
    title = framework().title
    if op.casefold() == RANDOM_OPS:
        return AppError(
            f"deterministic=True: a random op of {title} has no seed", hint="give it a seed, or use keras.random"
        )
    return AppError(
        f"deterministic=True: {title} cannot compute {op} with equal bits in each run",
        hint="use another layer or op, or leave out deterministic",
    )


def _peak() -> int:
    with contextlib.suppress(Exception):  # a broken card
        return framework().peak()
    return 0


def _full(batch_size: int, fitted: int, peak: int, evaluates: bool) -> OutOfMemory:
    card = ", ".join(cards_of_executor())
    device = f"the card {card}" if card else "the card of this process" if framework().card() else "this machine"
    allocation = f"a batch of {batch_size:,} samples" if batch_size else "an array"
    took = f"; arrays took {_gb(peak)} at most" if peak else ""
    before = 0 < batch_size <= fitted
    most = f"; the largest batch that fitted has {fitted:,} samples" if fitted else ""
    most = ", though it fitted before" if before else most
    smaller = f"set batch_size={fitted}" if fitted and not before else "set a smaller batch_size"
    ways = ["see what else uses it with ddlf doctor"] * before + [smaller] * (not evaluates)
    ways += ["use precision='mixed_bfloat16'", *(["raise --gpu-memory"] if memory_limit() else [])]
    return OutOfMemory(
        f"{allocation} does not fit into the memory of {device}{' in an evaluation' * evaluates}{took}{most}",
        hint=" or ".join(ways),
        batch_size=batch_size,
        fitted=fitted,
        card=card,
        peak=peak,
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _first_samples(arrays: Any, count: int) -> Any:
    """Return the first samples of a tree of arrays."""
    return tree_map(lambda array: array[:count], arrays)


def largest_that_fits(app: App, model: Any, batch_size: int) -> int:
    """Halve a batch that did not fit until the model can train on it, and return its size; 0 if it is unknown.

    This changes the weights of the model.

    Args:
        app: The user's ``IApp``.
        model: Its Keras model.
        batch_size: Samples in the batch that did not fit.
    """
    if data_set_of(app, "train") is not None or has_own_train(app):
        return 0
    arrays = batches(app, "train")
    for _ in range(HALVINGS):
        batch_size //= 2
        if not batch_size:
            break
        try:
            model.train_on_batch(*_first_samples(arrays, batch_size))
        except Exception as error:
            if not framework().is_full(error):
                return 0
            traceback.clear_frames(error.__traceback__)
        else:
            return batch_size
    return 0
