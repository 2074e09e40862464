"""Tests that this version reads checkpoints and run folders of version 0.1, and continues their trainings."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ddlf import events
from ddlf.monitor.runs import run_reader
from tests.earlier.trainings import SLICED, TRAININGS, WHOLE, make

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEPT = Path(__file__).parent / "v0.1"
FAST = {"star", "sharded", "downpour"}
"""One training for each kind of checkpoint: the whole weights, slices of an exchange, and shards."""
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in TRAININGS]


def assert_near(name, actual, expected):
    """Fail if weights differ by more than rounding, which depends on the processor. Downpour also depends on timing."""
    for array, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(array, reference, rtol=1e-3, atol=0.3 if name == "downpour" else 1e-4)


async def resume(name, cluster, tmp_path, resume_from):
    """Continue from a checkpoint of version 0.1, and compare the weights with the final weights of version 0.1."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(KEPT / name / "checkpoints", folder)
    app = make(name, cluster, checkpoint=folder, resume=resume_from(folder), master_epochs=WHOLE)
    received = []
    app.subscribe(received.append)
    await app.train_model()
    with np.load(KEPT / name / "final.npz") as final:
        expected = [final[key] for key in final.files]
    actual = app.model.get_weights()
    assert len(actual) == len(expected)
    assert_near(name, actual, expected)
    assert not [event for event in received if isinstance(event, events.CheckpointDamaged)]
    return app


@pytest.mark.parametrize("name", EACH)
async def test_a_checkpoint_of_version_0_1_is_resumed_to_the_same_weights(name, two_workers, tmp_path):
    app = await resume(name, two_workers, tmp_path, lambda folder: "auto")
    assert app.ledger.is_exact(WHOLE)
    assert [record.version for record in app.history] == list(range(1, len(app.history) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICED)
async def test_slices_that_workers_of_version_0_1_wrote_are_resumed_to_the_same_weights(name, two_workers, tmp_path):
    shutil.copytree(KEPT / name / "checkpoints", tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "round-000003")
    app = make(name, two_workers, checkpoint=tmp_path / "new", resume=tmp_path / "old", master_epochs=WHOLE)
    await app.train_model()
    with np.load(KEPT / name / "final.npz") as final:
        expected = [final[key] for key in final.files]
    assert_near(name, app.model.get_weights(), expected)


@pytest.mark.parametrize("name", TRAININGS)
async def test_a_run_folder_of_version_0_1_is_read(name):
    run = run_reader.read(KEPT / name / "run")
    summary = json.loads((KEPT / name / "run" / "summary.json").read_text())
    assert summary["app"] == "Iris"
    assert run.setting("slots") == TRAININGS[name]["slots"]
    assert run.records
    assert all(np.isfinite(record.metrics["loss"]) for record in run.records)
