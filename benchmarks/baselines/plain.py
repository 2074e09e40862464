"""Plain Keras without distribution: one process runs ``Model.fit`` on all cores."""

from __future__ import annotations

import time

from benchmarks.workload import STEPS_PER_EXECUTION, Outcome, Workload, batches


def run(workload: Workload, *, feed: str = "arrays") -> Outcome:
    """Measure it.

    Args:
        workload: What to train.
        feed: ``"arrays"`` gives NumPy arrays to ``fit``, as most users do, so it can stall at its end; ``"dataset"`` a ``tf.data`` pipeline without
            autotuning, which cannot, and several batches in one call of the step.
    """
    import keras

    app = workload.load()
    model = app.model
    outcome = Outcome(ready=time.monotonic(), end=0.0)

    class Snapshots(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            outcome.snapshots.append((time.monotonic(), model.get_weights()))

    callbacks = [Snapshots()] if workload.curve else []
    if feed == "arrays":
        model.fit(
            app.x_train,
            app.y_train,
            batch_size=workload.batch_size,
            epochs=workload.epochs,
            verbose=0,
            callbacks=callbacks,
        )
    else:
        model.steps_per_execution = STEPS_PER_EXECUTION
        data = batches(app.x_train, app.y_train, workload.batch_size, shuffle_seed=workload.seed)
        model.fit(data, shuffle=False, epochs=workload.epochs, verbose=0, callbacks=callbacks)
    outcome.end = time.monotonic()
    outcome.weights = model.get_weights()
    return outcome
