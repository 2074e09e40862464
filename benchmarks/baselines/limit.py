"""The limit: the same samples through bare ``fit`` in as many concurrent single-threaded processes, with no exchange at all.

Every process holds its part of the data beforehand and has traced its training step, which takes several batches in one call as DDLF's does, so
only ``fit`` is timed, from a common start to the end of the slowest. Nothing that exchanges weights between rounds can be faster with the same
``fit``. Being strict, it differs from the other contenders' time by the first trace, which is given apart as the note ``trace_s``.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from typing import Any

import numpy as np

from benchmarks.workload import SINGLE_THREADED, STEPS_PER_EXECUTION, Outcome, Workload, batches


def run(workload: Workload, *, feed: str = "dataset", workers: int | None = None) -> Outcome:
    """Measure it.

    Args:
        workload: What to train.
        feed: ``"arrays"`` gives NumPy arrays to ``fit``, ``"dataset"`` a ``tf.data`` pipeline without autotuning.
        workers: Number of processes, instead of the workload's.
    """
    workload = dataclasses.replace(workload, workers=workers or workload.workers)
    os.environ.update(SINGLE_THREADED)  # inherited by the processes
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workload.workers)
    with context.Pool(workload.workers, _share_barrier, (barrier,)) as pool:
        parts = pool.starmap(_fit_part, [(workload, part, feed) for part in range(workload.workers)], chunksize=1)
    begins, ends, traces = zip(*parts, strict=True)
    return Outcome(ready=min(begins), end=max(ends), notes={"trace_s": max(traces)})


_barrier: Any = None


def _share_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _fit_part(workload: Workload, part: int, feed: str) -> tuple[float, float, float]:
    """Fit one part in this process.

    Returns:
        Begin and end of ``fit``, and what tracing took before, in seconds.
    """
    app = workload.load()
    x, y = (np.array_split(array, workload.workers)[part] for array in (app.x_train, app.y_train))
    initial = app.model.get_weights()
    app.model.steps_per_execution = STEPS_PER_EXECUTION

    def fit(count: int, epochs: int) -> None:
        if feed == "arrays":
            app.model.fit(x[:count], y[:count], batch_size=workload.batch_size, epochs=epochs, verbose=0)
        else:
            data = batches(x[:count], y[:count], workload.batch_size)
            app.model.fit(data, shuffle=False, epochs=epochs, verbose=0)

    begin = time.monotonic()
    fit(workload.batch_size, 1)
    traced = time.monotonic() - begin
    app.model.set_weights(initial)
    _barrier.wait()
    begin = time.monotonic()
    fit(len(x), workload.epochs)
    return begin, time.monotonic(), traced
