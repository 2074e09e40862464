"""External trackers that a run can write to: TensorBoard and MLflow. Off by default. Run on threads of the master.

A tracker imports its package and connects to its server on its own thread. So a server that does not answer costs the
run nothing except the tracker's curves. ``WRITERS`` names all trackers.
"""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddlf import events as e
from ddlf.errors import ConfigError
from ddlf.events.record import RoundRecord, metrics
from ddlf.monitor.runs.background import Timed
from ddlf.monitor.runs.folder import How
from ddlf.monitor.runs.summary import without_secrets


class TensorBoard:
    """Writes a run's curves for TensorBoard into the run's folder. ``tensorboard --logdir runs`` shows them.

    Args:
        path: The run's folder.
        settings: Settings of the run, by name.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._folder = path / "tensorboard"
        self._file: Path | None = None
        self._scalars = Scalars()

    def write(self, batch: list[Timed]) -> None:
        """Write the numbers in a batch of events as scalars of TensorBoard."""
        # Not EventFileWriter of tensorboard.summary.writer, which imports all of TensorFlow to open a file.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            self._folder.mkdir(exist_ok=True)
            self._file = self._folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            events = [Event(wall_time=batch[0][0], file_version="brain.Event:2")]
        else:
            events = []
        for when, step, values in self._scalars.of(batch):
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            events.append(Event(wall_time=when, step=step, summary=Summary(value=scalars)))
        if events:
            with self._file.open("ab") as file:
                records = RecordWriter(file)
                for event in events:
                    records.write(event.SerializeToString())

    def end(self, how: How) -> None:
        """Do nothing: a file of curves has no end, and a test may still follow."""


class MLflow:
    """Writes a run's settings and curves to a run of MLflow at ``$MLFLOW_TRACKING_URI``. Its experiment is
    ``$MLFLOW_EXPERIMENT_NAME``, or is named like the app.

    Args:
        path: The run's folder. The MLflow run gets its name.
        settings: Settings of the run, by name.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._client: Any = None
        self._run = ""
        self._scalars = Scalars()

    def write(self, batch: list[Timed]) -> None:
        """Write the numbers in a batch of events as metrics of MLflow. The first call creates the MLflow run."""
        self._open(batch)
        from mlflow.entities import Metric

        values = [
            Metric(name, value, int(when * 1000), step)
            for when, step, values in self._scalars.of(batch)
            for name, value in values.items()
        ]
        # the maximum number of values that MLflow's server accepts in one call
        for first in range(0, len(values), 1000):
            self._client.log_batch(self._run, metrics=values[first : first + 1000])

    def _open(self, batch: list[Timed]) -> None:
        if self._run:
            return
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        app = next((event.app for _, event in batch if isinstance(event, e.RunBegan)), "ddlf")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or app
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=self._path.name, tags={"ddlf.folder": str(self._path)})
        self._run = run.info.run_id  # the run exists now, even if a later step fails
        self._client.log_batch(
            self._run, params=[Param(key, without_secrets(str(value))[:500]) for key, value in self._settings.items()]
        )

    def end(self, how: How) -> None:
        """Tell MLflow how the run ended."""
        if self._run:
            self._client.set_terminated(self._run, {"finished": "FINISHED", "failed": "FAILED"}.get(how, "KILLED"))


WRITERS: dict[str, tuple[type[Any], str]] = {"tensorboard": (TensorBoard, "tensorboard"), "mlflow": (MLflow, "mlflow")}
"""Class and required package of each tracker, by name."""


ALSO = ("seconds", "compute_s", "transfer_s", "wait_s", "staleness", "bytes_out", "bytes_back")
"""Fields of a record to log besides its metrics."""


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed, without importing them.

    Raises:
        ConfigError: A package is missing, or there is no destination.
    """
    for name in names:
        if importlib.util.find_spec(WRITERS[name][1]) is None:
            raise ConfigError(f"trackers names {name}, which is not installed", hint='pip install "ddlf[track]"')
    if (
        "mlflow" in names
        and not os.environ.get("MLFLOW_TRACKING_URI")
        and importlib.util.find_spec("sqlalchemy") is None
    ):
        raise ConfigError(
            "no MLflow server is set, and mlflow-skinny cannot store runs itself",
            hint="set MLFLOW_TRACKING_URI, or: pip install mlflow",
        )


class Scalars:
    """Finds the numbers in events to write to a tracker: the numbers of each record and of each test. A test belongs to
    the previous record.
    """

    def __init__(self) -> None:
        self._version = 0

    def of(self, batch: list[Timed]) -> Iterator[tuple[float, int, dict[str, float]]]:
        """Yield for each event with numbers its time, the number of commits so far (the x of curves), and its finite
        numbers by name.
        """
        for when, event in batch:
            values: dict[str, float] = {}
            match event:
                case e.Committed(record=record):
                    self._version, values = record.version, numbers(record)
                case e.Evaluated(metrics=measured):
                    values = {f"test_{name}": float(value) for name, value in measured.items()}
            if finite := {name: value for name, value in values.items() if math.isfinite(value)}:
                yield when, self._version, finite


def numbers(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record, by their names in ``app.history.history``."""
    return {name: float(value) for name, value in {**metrics(record), **{n: getattr(record, n) for n in ALSO}}.items()}
