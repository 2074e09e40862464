"""Keras callbacks whose meaning changes when a round is a ``fit`` of its own. Runs where training runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PER_PART = "sees one worker's part only, and begins anew in each round"
OTHERWISE = {
    "EarlyStopping": "write is_convergent",
    "ReduceLROnPlateau": "give the optimizer a learning rate schedule",
    "ModelCheckpoint": "save in on_round, or set checkpoint",
    "BackupAndRestore": "set checkpoint",
    "CSVLogger": "write the records in on_round",
    "TensorBoard": "write the records in on_round",
    "RemoteMonitor": "send the records in on_round",
    "SwapEMAWeights": "the optimizer's averages take their place when the run ends",
}
"""Callbacks of Keras that would mislead, and what to do instead."""
OF_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def warnings(callbacks: Iterable[Any]) -> list[str]:
    """A sentence for each callback that means something else on a worker than in a ``fit`` of the whole run."""
    found = []
    for callback in callbacks:
        names = [kind.__name__ for kind in type(callback).__mro__]
        known = next((name for name in names if name in OTHERWISE), None)
        monitor = str(getattr(callback, "monitor", ""))
        if known is not None:
            found.append(f"{names[0]} {PER_PART}; instead, {OTHERWISE[known]}")
        elif monitor.startswith("val_"):
            found.append(f"{names[0]} looks at {monitor}, which is known on the master only; use on_round")
    return list(dict.fromkeys(found))


def look_at_batches(callbacks: Iterable[Any]) -> bool:
    """Whether one of them may look at single batches."""
    import keras

    plain = keras.callbacks.Callback
    return any(
        not isinstance(callback, plain)
        or any(
            name in vars(callback) or getattr(type(callback), name) is not getattr(plain, name) for name in OF_BATCHES
        )
        for callback in callbacks
    )
