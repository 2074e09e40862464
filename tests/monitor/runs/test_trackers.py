"""Tests of trackers: they receive the values of a run, and their failures do not harm it."""

import logging
import os
import struct
import subprocess
import sys

import pytest

from ddlf.errors import ConfigError
from ddlf.events import Evaluated, ModelSaved
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.recording import recorded
from ddlf.monitor.runs.trackers import WRITERS
from ddlf.settings.checks import TRACKERS
from ddlf.testing import FakeRun
from tests.patience import PATIENCE_S


def test_every_offered_tracker_exists():
    assert TRACKERS("trackers", ",".join(WRITERS)) == tuple(WRITERS)
    assert all(name in str(TRACKERS) for name in WRITERS)


def scalars(path):
    """Return the points of TensorBoard's file in the folder of a run: {(tag, step): value}."""
    from tensorboard.compat.proto.event_pb2 import Event

    (file,) = (path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # each record has the length, its checksum, the event, and its checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    return {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}


async def test_tensorboard_gets_the_curves_and_tensorflow_is_not_imported(tmp_path):
    app = FakeRun(out=tmp_path, trackers=["tensorboard"])
    was_there = "tensorflow" in sys.modules
    with recorded(app) as path:
        await app.train_model()
    assert ("tensorflow" in sys.modules) == was_there
    losses = [(step, value) for (tag, step), value in scalars(path).items() if tag == "loss"]
    assert losses == [(record.version, pytest.approx(record.loss)) for record in app.history]


async def test_a_test_after_the_end_is_tracked_with_the_last_round(tmp_path, caplog):
    app = FakeRun(out=tmp_path, trackers="tensorboard")
    with recorded(app) as path:
        await app.train_model()
        app.run_context.emit(Evaluated(metrics={"loss": 0.5}))
    app.run_context.emit(Evaluated(metrics={"accuracy": 0.75, "loss": float("nan")}))
    app.run_context.emit(ModelSaved(path="m.keras"))
    last = app.history[-1].version
    assert {key: value for key, value in scalars(path).items() if key[0].startswith("test")} == {
        ("test_loss", last): 0.5,
        ("test_accuracy", last): 0.75,
    }
    assert not caplog.messages


def test_csv_needs_no_tracker():
    with pytest.raises(ConfigError, match=r"got 'csv'; metrics.csv is in the folder of every run"):
        TRACKERS("log", "csv")


async def test_a_failing_tracker_does_not_affect_the_run_and_is_reported_once(tmp_path, monkeypatch, caplog):
    class Broken:
        def __init__(self, path, settings):
            pass

        def write(self, batch):
            raise ConnectionError("no server")

        def end(self, how):
            raise ConnectionError("still none")

    monkeypatch.setitem(WRITERS, "tensorboard", (Broken, "json"))
    app = FakeRun(out=tmp_path, trackers="tensorboard")
    with caplog.at_level(logging.WARNING), recorded(app) as path:
        await app.train_model()
    assert caplog.messages == ["the data for tensorboard cannot be written: no server; the run continues"]
    assert folder.read_state(path).state == "finished"


MLFLOW = """
import asyncio, sys
from ddlf.monitor.runs.recording import recorded
from ddlf.testing import FakeRun

app = FakeRun(out=sys.argv[1], trackers="mlflow", run_name="tracked")
with recorded(app):
    asyncio.run(app.train_model())
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("FakeRun").experiment_id])
print(run.info.run_name[16:], run.info.status, run.data.params["batch_size"])
print([metric.step for metric in client.get_metric_history(run.info.run_id, "loss")])
"""


@pytest.mark.slow
def test_mlflow_gets_a_run_with_settings_curves_and_its_end(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", MLFLOW, str(tmp_path / "runs")],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["tracked FINISHED 16", "[1, 2, 3, 4]"], ended.stderr
