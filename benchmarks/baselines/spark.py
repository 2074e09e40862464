"""PySpark with Keras in ``mapPartitions``, the usual way to train on a Spark cluster.

It needs ``pip install ddlf[bench]`` and Java 17.

In each round the driver broadcasts the weights, each task fits the model on one partition, and the driver averages the
updates that ``collect`` returns. The data is a cached RDD with the same partitions in all rounds, as is usual with
Spark. ``fit`` shuffles within a partition. Spark reuses the Python workers.

There are two forms. The usual form, which elephas also uses, has an RDD of samples. It builds the model in every task,
and passes arrays to ``fit``, which can stall at its end (see ``benchmarks.workload.batches``). ``tuned`` has one block
of arrays for each partition, and a compiled model that stays in the Python worker between tasks. Its ``tf.data``
pipeline does not stall, one call of the step trains several batches, and each worker has one thread.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.workload import SINGLE_THREADED, STEPS_PER_EXECUTION, Outcome, Weights, Workload, batches

_models: dict[str, Any] = {}
"""The models of a Python worker of Spark, by workload. They stay between tasks."""


def missing(**settings: Any) -> str | None:
    """Return why this cannot run here, or None."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "there is no Java"
    return None


def run(workload: Workload, *, tuned: bool, threads: int | None) -> Outcome:
    """Measure it.

    Args:
        workload: What to train.
        tuned: See the module.
        threads: 1 for single-threaded Python workers, None for TensorFlow's choice.
    """
    from pyspark.sql import SparkSession

    if threads == 1:
        os.environ.update(SINGLE_THREADED)  # inherited by the JVM and from it by the Python workers
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master(f"local[{workload.workers}]")
        .config("spark.python.worker.reuse", "true")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    context = session.sparkContext
    try:
        return _train(context, workload, tuned)
    finally:
        session.stop()
        # PySpark leaves the JVM to end when this process has; it would still be busy while the next contender is measured.
        context._gateway.shutdown()
        context._gateway.proc.stdin.close()
        context._gateway.proc.wait()


def _train(context: Any, workload: Workload, tuned: bool) -> Outcome:
    app = workload.load()
    order = np.random.default_rng(workload.seed).permutation(len(app.x_train))
    if tuned:
        parts = np.array_split(order, workload.workers)
        data = context.parallelize([(app.x_train[part], app.y_train[part]) for part in parts], workload.workers)
    else:
        data = context.parallelize(list(zip(app.x_train[order], app.y_train[order], strict=True)), workload.workers)
    data = data.cache()
    text = workload.dump()
    data.foreachPartition(lambda elements: _model(text, tuned) and sum(1 for _ in elements))
    weights: Weights = app.model.get_weights()
    snapshots = []

    ready = time.monotonic()
    for number in range(workload.rounds):
        broadcast = context.broadcast(weights)
        updates = data.mapPartitions(
            lambda part, sent=broadcast, number=number: _fit(text, tuned, number, part, sent.value)
        ).collect()
        weights = [w - np.mean(part, axis=0) for w, *part in zip(weights, *updates, strict=True)]
        broadcast.destroy()
        if workload.curve:
            snapshots.append((time.monotonic(), weights))
    end = time.monotonic()
    return Outcome(
        ready=ready,
        end=end,
        weights=weights,
        # They are as large in every round.
        bytes_out=workload.rounds * workload.workers * len(pickle.dumps(weights)),
        bytes_back=workload.rounds * sum(len(pickle.dumps(update)) for update in updates),
        snapshots=snapshots,
    )


def _model(text: str, tuned: bool) -> Any:
    """This Python worker's model."""
    if text not in _models:
        app = Workload.parse(text).app_class()()
        asyncio.run(app.create_model())
        if tuned:
            app.model.steps_per_execution = STEPS_PER_EXECUTION
        _models[text] = app.model
    return _models[text]


def _fit(text: str, tuned: bool, number: int, part: Iterator[Any], weights: Weights) -> Iterator[Weights]:
    """Train on a partition in the round of this number, from 0; yield its update."""
    workload = Workload.parse(text)
    if tuned:
        ((x, y),) = part
        model = _model(text, tuned)
        data = batches(x, y, workload.batch_size, shuffle_seed=workload.seed + number)
        model.set_weights(weights)
        model.fit(data, shuffle=False, epochs=workload.local_epochs, verbose=0)
    else:
        x, y = map(np.stack, zip(*part, strict=True))
        _models.clear()
        model = _model(text, tuned)
        model.set_weights(weights)
        model.fit(x, y, batch_size=workload.batch_size, epochs=workload.local_epochs, verbose=0)
    yield [before - after for before, after in zip(weights, model.get_weights(), strict=True)]
