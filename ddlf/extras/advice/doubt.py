"""Labels that models contradict which have not learnt them: cross-validation over the workers, and cleanlab on what it gives. Master and workers."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.data.trees import tree_map, tuples
from ddlf.errors import DDLFError
from ddlf.extras.advice.facts import Facts, Head

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster

FOLDS = 5
LEAST = 20
"""Samples of a class, on average, below which a fold teaches too little."""
SECONDS = 300.0
"""After which the training of a fold ends: what it has learnt until then has to do."""
SHOWN = 5


async def doubted(cluster: Cluster, pickled: bytes, facts: Facts) -> dict[str, Any]:
    """Labels that are likely wrong (confident learning, Northcutt et al., arXiv:1911.00068).

    The samples are dealt into 5 folds, each with its share of each class. A worker trains the app's model on four, for as long as the app says, and
    says of the fifth what it takes its samples for; cleanlab compares that with the labels.

    Args:
        cluster: Connected, or not yet.
        pickled: The app as it travels, without data and model.
        facts: Of the app.

    Returns:
        ``doubted``: ``count`` of how many (``of``), ``samples``, the most doubtful first, and of some of these the ``pairs`` of label and likely one;
        nothing where there are no classes to tell apart; ``left``: why it was not looked at.
    """
    head = _classes(facts)
    if head is None:
        return {}
    if importlib.util.find_spec("cleanlab") is None:
        return {"left": ("wrong labels are found by cleanlab, which is not installed: pip install 'ddlf[advise]'",)}
    is_new = cluster.loop is None
    try:
        await cluster.connect(modules=("keras",))
        found = await cluster.map(partial(held_out, pickled), range(FOLDS))
    except DDLFError as error:
        return {"left": (f"wrong labels were not looked for: {error.message}",)}
    finally:
        if is_new:
            await cluster.close()
    numbers, labels, values = (np.concatenate([one[part] for one in found]) for part in range(3))
    order = np.argsort(numbers)
    return {"doubted": await asyncio.to_thread(_compared, labels[order], _shares(values[order], head))}


def _classes(facts: Facts) -> Head | None:
    """The one output that tells classes apart, if there is one and enough samples."""
    if len(facts.heads) != 1 or facts.heads[0].loss not in ("cce", "sce", "bce") or facts.from_files:
        return None
    head, array = facts.heads[0], facts.array(facts.heads[0].target)
    labels = None if array is None or array.bad else array.labels
    if labels is None or labels.kind not in ("numbers", "one_hot") or len(head.shape) != 1:
        return None
    known = sorted(number for number, count in labels.counts.items() if count)
    units = max(2, head.units)
    fit = len(known) > 1 and known[0] >= 0 and known[-1] < units and facts.samples >= LEAST * len(known)
    return head if fit else None


async def held_out(pickled: bytes, fold: int) -> tuple[Any, Any, Any]:
    """Train on all folds but one, and say what comes out for that one. Runs on a worker.

    Returns:
        Numbers of its samples, their labels as numbers of classes, and the model's output, of shape (samples, units).
    """
    import keras

    from ddlf.data.parts import batches
    from ddlf.extras.advice.collect import build, load
    from ddlf.rpc.code import unpickle

    app: Any = unpickle(pickled)
    await load(app)
    await build(app)
    data = batches(app, "train")
    labels = numbers_of(data[1])
    mine = folds_of(labels) == fold
    end = time.monotonic() + SECONDS

    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        """Ends what takes too long."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if time.monotonic() > end:
                self.model.stop_training = True

    def some(which: Any) -> tuple[Any, ...]:
        return tuple(tree_map(lambda array: array[which], tuples(part)) for part in data)

    given = dict(zip(("x", "y", "sample_weight"), some(~mine), strict=False))
    app.model.fit(**given, batch_size=app.batch_size, epochs=app.master_epochs, verbose=0, callbacks=[Ends()])
    values = app.model.predict(some(mine)[0], batch_size=app.batch_size, verbose=0)
    return np.flatnonzero(mine), labels[mine], np.asarray(values, np.float64).reshape(int(mine.sum()), -1)


def numbers_of(y: Any) -> np.ndarray[Any, Any]:
    """Labels as numbers of classes: of shape (n,), from numbers or one-hot rows."""
    rows = np.asarray(y).reshape(len(y), -1)
    found: np.ndarray[Any, Any] = rows.argmax(axis=1) if rows.shape[1] > 1 else rows[:, 0].astype(np.int64)
    return found


def folds_of(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The fold of each sample: of each class the same share, by a fixed seed."""
    folds = np.empty(len(labels), np.int64)
    order = np.random.default_rng(17).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    folds[order] = np.arange(len(labels)) % FOLDS
    return folds


def _shares(values: np.ndarray[Any, Any], head: Head) -> np.ndarray[Any, Any]:
    """What comes out as probabilities of classes, rows that sum to 1."""
    if head.loss == "bce" and values.shape[1] == 1:
        one = 1 / (1 + np.exp(-values)) if head.logits else values
        values = np.concatenate([1 - one, one], axis=1)
    elif head.logits:
        values = np.exp(values - values.max(axis=1, keepdims=True))
    values = np.clip(values, 1e-9, None)
    found: np.ndarray[Any, Any] = values / values.sum(axis=1, keepdims=True)
    return found


def _compared(labels: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> dict[str, Any]:
    from cleanlab.filter import find_label_issues

    how = "low_self_confidence"  # of 2 % flipped labels this finds more than pruning by class or noise rate, and fewer others
    found = find_label_issues(labels, shares, filter_by=how, return_indices_ranked_by="self_confidence", n_jobs=1)
    likely = shares.argmax(axis=1)
    return {
        "count": len(found),
        "of": len(labels),
        "samples": tuple(int(number) for number in found),
        "pairs": tuple((int(number), int(labels[number]), int(likely[number])) for number in found[:SHOWN]),
    }
