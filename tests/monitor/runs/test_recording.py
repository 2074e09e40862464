"""Tests of writing the folder of a run during the run: it stays readable after any failure of the run or the disk."""

import asyncio
import csv
import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ddlf import IApp
from ddlf.cli.run import _connect
from ddlf.errors import ConfigError, ConnectError
from ddlf.events import CardRead, Committed, Evaluated, ModelSaved, SlotMoved, WorkerWrote
from ddlf.events.record import History
from ddlf.events.sinks import from_json
from ddlf.monitor.runs import folder, run_reader
from ddlf.monitor.runs.recording import FolderWriter, recorded
from ddlf.monitor.runs.summary import without_secrets
from ddlf.monitor.terminal.display import Display
from ddlf.testing import FakeRun, in_process_cluster
from tests.patience import PATIENCE_S


async def trained(app):
    """Train an app with a recording, and return the folder."""
    with recorded(app) as path:
        await app.train_model()
    return path


async def refused(app, *, later=False):
    """End a run with an error of a setting, before or after training."""
    with recorded(app):
        if later:
            await app.train_model()
        raise ConfigError("no plan")


def fake(out, **settings):
    return FakeRun(out=out, **settings)


async def test_a_folder_has_all_events_of_its_run(tmp_path):
    app, emitted = fake(tmp_path, run_name="first", slots=2), []
    app.subscribe(emitted.append)
    with recorded(app) as path:
        await app.train_model()
        # a momentary event, which is not recorded
        app.run_context.emit(SlotMoved(round=1, slot=1, worker=1, done=1, total=2, epoch=1))
    lines = [json.loads(line) for line in (path / folder.EVENTS).read_text().splitlines()]
    assert [from_json(line) for line in lines] == emitted[:-1]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert folder.read_state(path).state == "finished"
    assert path.name.endswith("-first")
    with (path / folder.METRICS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == app.history.history["loss"]
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    summary = folder.read_json(path / folder.SUMMARY)
    assert summary["settings"]["slots"] == {"value": 2, "origin": "FakeRun.__init__"}
    assert summary["settings"]["batch_size"] == {"value": 16, "origin": "class FakeRun"}
    assert summary["settings"]["codec"] == {"value": "float32", "origin": "default"}
    assert summary["versions"]["ddlf"]
    assert set(summary["git"]) == {"commit", "branch", "clean"}
    assert summary["ledger"] == {**summary["ledger"], "samples": 203, "least": 4, "most": 4, "exact": True}
    assert summary["results"]["loss"] == app.history[-1].loss
    assert (path / folder.REPORT).stat().st_size > 50_000
    assert run_reader.read(path).records == list(app.history)


async def test_use_of_cards_is_in_the_summary_and_the_report(tmp_path):
    app = fake(tmp_path)
    read = {"worker": 1, "name": "pc01", "card": "0 (H100)", "total": 80 * 10**9}
    with recorded(app) as path:
        await app.train_model()
        app.run_context.emit(CardRead(**read, memory=10**10, utilisation=80, watts=300.0, celsius=60))
        app.run_context.emit(CardRead(**read, memory=2 * 10**10, utilisation=90, watts=320.0, celsius=58))
        app.run_context.emit(CardRead(**{**read, "card": "1:0 (MIG 1g.10gb)"}, memory=10**9))
    first, second = folder.read_json(path / folder.SUMMARY)["cards"]
    assert first == {
        "worker": "pc01",
        "card": "0 (H100)",
        "readings": 2,
        "utilisation": 85.0,
        "watts": 310.0,
        "memory": 2 * 10**10,
        "total": 80 * 10**9,
        "celsius": 60,
    }
    assert (second["utilisation"], second["celsius"]) == (None, None)
    report = (path / folder.REPORT).read_text()
    assert '["use of card 0 (H100) by pc01","85 %, 20.0 of 80.0 GB, 310 W, 60 ' in report
    assert '["use of card 1:0 (MIG 1g.10gb) by pc01","1.0 of 80.0 GB"]' in report


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_retrained_rounds_replace_the_former_ones(tmp_path, size):
    app = fake(None)
    await app.train_model()
    first = app.history[0]
    order = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 12.0), (3, 13.0)]
    records = [replace(first, round=n, version=n, metrics=first.metrics | {"loss": loss}) for n, loss in order]
    writer = FolderWriter(app, tmp_path, {})
    for begin in range(0, len(records), size):
        writer.write([(1.0, Committed(record=record)) for record in records[begin : begin + size]])
    with (tmp_path / folder.METRICS).open(encoding="utf-8", newline="") as file:
        rows = [(int(row["version"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == [(1, 1.0), (2, 12.0), (3, 13.0)]
    assert [(row.version, row.metrics["loss"]) for row in run_reader.read(tmp_path).records] == rows


async def test_a_program_gets_no_folder_unless_it_asks_for_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (None, "none"):
        assert await trained(fake(out)) is None
    assert not list(tmp_path.iterdir())


async def test_an_app_that_asks_for_a_folder_gets_one_for_each_training(tmp_path, monkeypatch):
    async def train(app, mode, *arguments, fresh):
        app.run_context.emit(Evaluated(metrics={"loss": 1.0}))
        return History()

    class App(IApp):
        out = tmp_path

        async def load_dataset(self):
            pass

        async def create_model(self):
            pass

    monkeypatch.setattr("ddlf.training.start.train", train)
    app = App(object())
    await app.train_sync()
    await app.train_async()
    paths = folder.runs_in(tmp_path)
    assert len(paths) == 2
    assert [len((path / folder.EVENTS).read_text().splitlines()) for path in paths] == [1, 1]
    assert "run_context" not in app.__getstate__()


async def test_output_of_user_code_on_a_worker_is_in_a_separate_file(tmp_path):
    app = fake(tmp_path)
    with recorded(app) as path:
        await app.train_model()
        for number, name in enumerate(("pc 01", "worker 2", "pc 01")):
            app.run_context.emit(
                WorkerWrote(worker=1, name=name, stream="stdout", lines=(f"{number}: ä", "b"), dropped=1234 * number)
            )
    assert sorted(file.name for file in (path / "logs").iterdir()) == ["pc-01.log", "worker-2.log"]
    lines = [line[25:] for line in (path / "logs" / "pc-01.log").read_text().splitlines()]
    assert lines == ["0: ä", "b", "(2,468 lines came too fast and were dropped)", "2: ä", "b"]
    assert "WorkerWrote" not in (path / folder.EVENTS).read_text()


async def test_events_after_the_end_are_recorded_too(tmp_path):
    app = fake(tmp_path)
    path = await trained(app)
    app.run_context.emit(Evaluated(metrics={"loss": 0.5, "accuracy": 0.75}))
    app.run_context.emit(ModelSaved(path=str(tmp_path / "m.keras")))
    summary = folder.read_json(path / folder.SUMMARY)
    assert summary["results"]["test"] == {"loss": 0.5, "accuracy": 0.75}
    assert summary["model"] == str(tmp_path / "m.keras")
    assert run_reader.read(path).test == {"loss": 0.5, "accuracy": 0.75}
    assert "final test accuracy,0.75" in (path / "tables" / "run.csv").read_text()


async def test_a_nested_recording_uses_the_same_folder(tmp_path):
    app = fake(tmp_path)
    with recorded(app) as outer, recorded(app) as inner:
        await app.train_model()
        assert folder.read_state(outer).state == "running"
    assert outer == inner
    assert len(folder.runs_in(tmp_path)) == 1


@pytest.mark.parametrize("how", ["failed", "stopped", "cancelled"])
async def test_the_folder_has_the_kind_of_the_end(tmp_path, how):
    app = fake(tmp_path)

    def on_round(record):
        if how == "stopped":
            app.stop_training()
        elif how == "failed":
            raise ZeroDivisionError("in on_round")
        else:
            training.cancel()

    app.on_round = on_round
    training = asyncio.ensure_future(trained(app))
    await asyncio.gather(training, return_exceptions=True)
    (path,) = folder.runs_in(tmp_path)
    state = folder.read_state(path)
    assert state.state == ("failed" if how == "failed" else "stopped")
    assert state.why == ("ZeroDivisionError: in on_round" if how == "failed" else "")
    assert (path / folder.REPORT).exists()


async def test_a_run_that_is_refused_before_training_leaves_no_folder(tmp_path):
    app = fake(tmp_path)
    with pytest.raises(ConfigError):
        await refused(app)
    app.run_context.emit(ModelSaved(path="later"))  # this event is not recorded
    assert folder.runs_in(tmp_path) == []
    with pytest.raises(ConfigError):
        await refused(app, later=True)
    (path,) = folder.runs_in(tmp_path)
    assert folder.read_state(path).state == "failed"


@pytest.mark.parametrize("writes", [False, True])
async def test_a_run_without_a_worker_leaves_a_folder_only_if_workers_have_written(tmp_path, writes):
    app = fake(tmp_path)

    def begin():
        with recorded(app):
            if writes:
                app.run_context.emit(WorkerWrote(worker=1, name="pc01", stream="stderr", lines=("no disk",)))
            raise ConnectError("no worker joined")

    with pytest.raises(ConnectError):
        begin()
    assert [folder.read_state(path).state for path in folder.runs_in(tmp_path)] == ["failed"] * writes


async def test_two_runs_at_once_have_their_own_folders(tmp_path):
    apps = [fake(tmp_path, seed=seed) for seed in (1, 2)]
    paths = await asyncio.gather(*map(trained, apps))
    assert len(set(paths)) == 2
    assert [run_reader.read(path).records for path in paths] == [list(app.history) for app in apps]


async def test_a_resumed_run_names_the_run_that_it_continues(tmp_path):
    await fake(None, checkpoint=tmp_path / "c", master_epochs=2).train_model()
    path = await trained(fake(tmp_path / "runs", resume=tmp_path / "c", master_epochs=4))
    source = str(tmp_path / "c")
    assert folder.read_json(path / folder.SUMMARY)["goes_on_from"] == {"version": 2, "checkpoints": source}
    assert [record.round for record in run_reader.read(path).records] == [3, 4]
    assert "resumed after round 2, from" in (path / folder.REPORT).read_text()


async def test_a_run_whose_folder_cannot_be_created_is_refused_before_it_trains(tmp_path):
    (tmp_path / "file").write_text("")
    app = fake(tmp_path / "file" / "runs")
    with pytest.raises(ConfigError, match=r"there is no folder for this run: .*--out none"), recorded(app):
        await app.train_model()
    assert len(app.history) == 0


async def test_a_full_disk_never_ends_a_run_and_is_reported_once(tmp_path, caplog):
    app = fake(tmp_path, master_epochs=6)
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING), recorded(app) as path:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))  # no file may become larger; Python ignores SIGXFSZ
        try:
            await app.train_model()
            app.run_context.recording.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    assert len(app.history) == 6
    (warning,) = caplog.messages
    assert os.strerror(errno.EFBIG) in warning
    assert warning.endswith("the run continues")
    assert folder.read_state(path).state == "finished"
    assert folder.read_json(path / folder.SUMMARY)["events_lost"] > 0


async def test_events_after_a_full_disk_are_read_after_an_incomplete_line(tmp_path, monkeypatch):
    app = fake(tmp_path)
    path = await trained(app)
    writer = app.run_context.recording._writer
    append = writer._append

    def full(name, text):
        append(name, text[:20])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(writer, "_append", full)
    app.run_context.emit(Evaluated(metrics={"loss": 1.0}))
    monkeypatch.setattr(writer, "_append", append)
    app.run_context.emit(Evaluated(metrics={"loss": 2.0}))
    assert run_reader.read(path).test == {"loss": 2.0}
    assert len(run_reader.read(path).records) == 4


async def test_metrics_after_a_full_disk_have_a_head_and_whole_lines(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "full")

    app = fake(None, master_epochs=3)
    await app.train_model()
    writer, metrics = FolderWriter(app, tmp_path, {}), tmp_path / folder.METRICS
    first, *later = [[(1.0, Committed(record=record))] for record in app.history]
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_text", full)
        with pytest.raises(OSError, match="full"):
            writer.write(first)
    writer.write(later[0])
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 3, most))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            writer._append(folder.METRICS, "1,2,3,4\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    writer.write(later[1])
    with metrics.open(encoding="utf-8", newline="") as file:
        assert [int(row["version"]) for row in csv.DictReader(file)] == [2, 3]


async def test_a_run_that_ends_on_a_full_disk_does_not_look_killed(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    app = fake(tmp_path)
    with recorded(app) as path:
        await app.train_model()
        monkeypatch.setattr(folder, "write_text", full)
    assert folder.read_state(path).state == "finished"


@pytest.mark.parametrize(
    ("word", "recorded_word"),
    [
        ("api_key=abc", "api_key=***"),
        ("-pDB_PASSWORD=a=b\nc", "-pDB_PASSWORD=***"),
        ("wandb.token=x", "wandb.token=***"),
        ("--token-file=/etc/token", "--token-file=/etc/token"),
        ("monkey=3", "monkey=3"),
        ("tokens=512", "tokens=512"),
        ("db=postgres://me:pw@host/db", "db=postgres://me:***@host/db"),
        ("app.py", "app.py"),
    ],
)
def test_secrets_in_a_command_line_are_not_recorded(word, recorded_word):
    assert without_secrets(word) == recorded_word


async def test_the_folder_of_a_command_line_run_names_its_workers(tmp_path):
    app, cluster = fake(tmp_path), in_process_cluster(2)
    with recorded(app) as path:
        await _connect(cluster, None, Display(), app.run_context.emit, ())
        await cluster.close()
    events = [json.loads(line) for line in (path / folder.EVENTS).read_text().splitlines()]
    assert {event["worker"] for event in events if event["event"] == "WorkerConnected"} == {1, 2}


KILLED = """
import asyncio, sys
from ddlf.monitor.runs.recording import FolderWriter, recorded
from ddlf.testing import FakeRun

class App(FakeRun):
    out = sys.argv[1]
    master_epochs = 100000

    async def on_round(self, record):
        await asyncio.sleep(0.01)
        if record.round == 30:
            print("30", flush=True)

app = App()
with recorded(app):
    asyncio.run(app.train_model())
"""


def test_the_folder_of_a_run_that_was_killed_can_be_read_and_reported(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"30\n"
    (path,) = folder.runs_in(tmp_path)
    assert folder.read_state(path).state == "running"
    until = time.monotonic() + PATIENCE_S
    while not run_reader.end_of(path / folder.EVENTS)[0] and time.monotonic() < until:
        time.sleep(0.05)  # another process writes the file
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    process.stdout.close()
    with (path / folder.EVENTS).open("a") as file:
        file.write('{"time":1795348520.7,"event":"Commit')
    from ddlf.monitor.runs.report import write

    past_run = write(path)
    assert past_run.status.state == "stopped"
    assert len(past_run.records) > 0
    assert [record.round for record in past_run.records] == list(range(1, len(past_run.records) + 1))
    assert "was killed" in (path / folder.REPORT).read_text()


def test_trackers_need_a_folder_and_their_package(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="a run without a folder cannot be logged to tensorboard; name one with"):
        recorded(fake(None, trackers="tensorboard")).__enter__()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r'trackers names mlflow, which is not installed; pip install "ddlf\[track\]"'
    ):
        recorded(fake(tmp_path, trackers=["mlflow"])).__enter__()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else name)
    with pytest.raises(ConfigError, match=r"no MLflow server is set, .*; set MLFLOW_TRACKING_URI, or"):
        recorded(fake(tmp_path, trackers=["mlflow"])).__enter__()
    with pytest.raises(ConfigError, match="trackers must be 'tensorboard' or 'mlflow', got 'wandb'"):
        recorded(fake(tmp_path, trackers="wandb")).__enter__()
    assert not list(tmp_path.iterdir())
