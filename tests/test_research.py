"""Tests of programs of researchers as plain Keras and as apps: equal metrics, and few different lines."""

import asyncio
import difflib
import runpy
from pathlib import Path

import numpy as np
import pytest

from ddlf.algorithms.partition import shuffled
from ddlf.training.slot.keras_model import reseed

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOLDER = Path(__file__).parents[1] / "apps" / "research"
PROGRAMS = sorted(path.stem.removesuffix("_keras") for path in FOLDER.glob("*_keras.py"))


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_app_differs_from_plain_keras_in_at_most_15_lines(name):
    plain, app = ((FOLDER / file).read_text().splitlines() for file in (f"{name}_keras.py", f"{name}.py"))
    changes = [
        line for line in difflib.unified_diff(plain, app, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
    ]
    assert 0 < len([line for line in changes if line[1:].strip()]) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
async def test_one_slot_gives_the_metrics_of_plain_keras_in_every_epoch(name, two_workers):
    parts = runpy.run_path(str(FOLDER / f"{name}.py"))
    (kind,) = [part for part in parts.values() if isinstance(part, type) and hasattr(part, "train_sync")]
    app = kind(two_workers.options(workers=[1]))
    app.verbose = False
    # The plain program runs on a worker, too: TensorFlow rounds differently with another number of threads.
    app.threads = two_workers.workers[1].executor.threads
    elsewhere = two_workers.options(workers=[2]).run_method(
        run_plainly, program=(FOLDER / f"{name}_keras.py").read_text()
    )
    records, (plain,) = await asyncio.gather(app.train_sync(), elsewhere)
    rate = plain.pop("learning_rate", None)  # which LearningRateScheduler adds
    assert {name for name in plain if name.startswith("val_")}
    assert len(records) == len(plain["loss"])
    for epoch, record in enumerate(records):
        metrics = dict(record.metrics)
        if rate is not None:
            assert metrics.pop("learning_rate") == rate[epoch]
        assert metrics == pytest.approx({key: values[epoch] for key, values in plain.items()}, abs=1e-6)


async def run_plainly(self, program):
    return await self.compute(metrics_of_plain_keras, program)


def metrics_of_plain_keras(program):
    """Return the metrics of ``fit`` in a plain Keras program that uses DDLF's order of samples and DDLF's random states."""
    import keras

    fit, metrics = keras.Model.fit, {}

    def in_order(model, x, y, batch_size, epochs, sample_weight=None, validation_data=None, callbacks=()):
        data = (x, y) if sample_weight is None else (x, y, sample_weight)
        samples = len(keras.tree.flatten(y)[0])

        class Batches(keras.utils.PyDataset):
            order = np.arange(samples)

            def __len__(self):
                return -(-samples // batch_size)

            def __getitem__(self, number):
                rows = self.order[number * batch_size : (number + 1) * batch_size]
                return keras.tree.map_structure(lambda array: array[rows], data)

        class Order(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                batches.order = shuffled(samples, 0, epoch)
                reseed(model, (0, epoch, 0))

        batches = Batches(workers=0)
        validation = dict(validation_data=validation_data, validation_batch_size=batch_size)
        history = fit(
            model, batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[Order(), *callbacks], **validation
        ).history
        for key, values in history.items():
            arrays = np.array(values, float)
            metrics.update(
                {key: arrays} if arrays.ndim == 1 else {f"{key}_{i}": arrays[:, i] for i in range(arrays.shape[1])}
            )

    keras.Model.fit = in_order
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    finally:
        keras.Model.fit = fit
    return metrics
