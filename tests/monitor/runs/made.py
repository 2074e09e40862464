"""Write folders of invented runs, so that tests need no training."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

from ddlf import IApp
from ddlf import events as e
from ddlf.events.record import RoundRecord
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.background import Timed
from ddlf.monitor.runs.recording import FolderWriter
from ddlf.worker.status import ExecutorInfo

BEGAN = 1_700_000_000.0


def record(number: int, rounds: int = 10, **facts: object) -> RoundRecord:
    """Return the record of a round of two workers that takes 2 s."""
    basic = dict(
        round=number, rounds=rounds, version=number, epochs=1, samples=1000, seconds=2.0, compute_s=1.5, transfer_s=0.25,
        merge_s=0.01, wait_s=0.125, bytes_out=3_000_000, bytes_back=1_000_000, slots=2, workers=(1, 2),
        metrics={"loss": 1 / number, "accuracy": 1 - 1 / (number + 1)},
    )  # fmt: skip
    return RoundRecord(**{**basic, **facts})


def events_of(rounds: int, **facts: object) -> list[Timed]:
    """Return the timed events of a run. Worker 1 computes for 1.5 s of each round, worker 2 for 0.75 s."""
    events: list[Timed] = [
        (BEGAN, e.RunBegan(run="1", app="App", mode="sync", epochs=rounds, worker_epochs=1, batch_size=8, seed=3)),
        (BEGAN, e.TrainingBegan(mode="sync", samples=1000, slots=2, fixed=False, workers=2)),
    ]
    for number in range(1, rounds + 1):
        end = BEGAN + 2.0 * number
        for worker, compute_s in ((2, 0.75), (1, 1.5)):
            cost = dict(
                samples=500, epochs=1, compute_s=compute_s, transfer_s=0.25, bytes_out=1_500_000, bytes_back=500_000
            )
            position = dict(round=number, slot=worker, worker=worker)
            events.append((end - 0.25 - (1.5 - compute_s), e.UpdateArrived(**position, **cost)))
        events.append((end, e.Committed(record=record(number, rounds, **facts))))
    return events


def run(out: Path, name: str, events: list[Timed], how: str = "finished", reason: str = "") -> Path:
    """Write the folder of an ended run, and return its path."""
    app = IApp(
        SimpleNamespace(
            workers=[
                SimpleNamespace(id=n, name=f"worker {n} (pc{n})", executor=ExecutorInfo(host=f"pc{n}", cores=2, pid=7))
                for n in (1, 2)
            ]
        )
    )
    path = folder.make(out, name)
    writer = FolderWriter(app, path, {})
    writer.write(events)
    writer.end(how, reason, 0)
    return path


def finite(values: list[float]) -> bool:
    """Return whether all values are finite."""
    return all(math.isfinite(value) for value in values)
