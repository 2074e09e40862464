"""The limit of the comparison: bare ``fit`` on the same samples, in concurrent single-threaded processes without exchange.

Every process has its part of the data in memory before the measurement, and has traced its training step. Like in DDLF,
one call of the step trains several batches. So the benchmark only measures ``fit``, from a common start to the end of
the slowest process. A program that exchanges weights between rounds cannot be faster with the same ``fit``. Unlike the
times of the other contenders, this time does not contain the first trace. The note ``trace_s`` has the time of the
trace.
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
