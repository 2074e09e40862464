"""Tests of ``ddlf run --requeue``: an engine runs the command again, and it continues in the same folder."""

import asyncio
import csv
import json
import os
import socket
import stat
from types import SimpleNamespace

import pytest

from ddlf import Cluster
from ddlf.cli.main import main
from ddlf.cli.run import requeue_of
from ddlf.cluster.launch.launcher import Requeue, installed
from ddlf.cluster.launch.slurm.requeue import requeue
from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder, run_reader
from ddlf.monitor.runs.recording import recorded
from ddlf.testing import FakeRun

JOB = "job 7 of Slurm"


class Ends(Exception):
    """An error that ends a run in the middle."""


def run_of(tmp_path, **settings):
    return FakeRun(slots=2, out=tmp_path / "runs", checkpoint=tmp_path / "kept", resume="auto", **settings)


async def start(tmp_path, until=None, error=asyncio.CancelledError, job=JOB, **settings):
    """Start the command. It ends with an error after a round, or is complete."""
    app = run_of(tmp_path, **settings)

    def on_round(record):
        if record.round == until:
            raise error

    app.on_round = on_round
    try:
        with recorded(app, job=job) as path:
            await app.train_model()
    except error:
        pass
    return app, path


def bits(app):
    return [array.tobytes() for array in app.model.get_weights()]


def rows(path):
    with (path / folder.METRICS).open(newline="") as file:
        return [int(row["round"]) for row in csv.DictReader(file)]


async def test_second_start_continues_in_the_same_folder_with_the_same_bits(tmp_path):
    undisturbed = FakeRun(slots=2, out="none")
    await undisturbed.train_model()
    _, first = await start(tmp_path, until=2)
    began = folder.read_state(first).began
    app, second = await start(tmp_path)
    assert second == first
    assert bits(app) == bits(undisturbed)
    state = folder.read_state(first)
    assert (state.state, state.restarts, state.began) == ("finished", 1, began)
    assert rows(first) == [1, 2, 3, 4]
    assert [record.round for record in run_reader.read(first).records] == [1, 2, 3, 4]
    assert "goes_on_from" not in run_reader.read(first).summary


async def test_rounds_without_a_checkpoint_of_a_killed_process_count_once(tmp_path):
    _, path = await start(tmp_path, until=3, checkpoint_every=2)
    (newest,) = (tmp_path / "kept").glob("round-000003")  # like a process that was killed before its last checkpoint
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    with (path / folder.EVENTS).open("a") as file:
        file.write('{"time": 1, "event": "Comm')
    state = json.loads((path / folder.STATE).read_text())
    (path / folder.STATE).write_text(json.dumps({**state, "state": "running", "pid": 1, "started": "never"}))
    _, again = await start(tmp_path)
    assert again == path
    assert rows(path) == [1, 2, 3, 4]
    run = run_reader.read(path)
    assert [record.round for record in run.records] == [1, 2, 3, 4]
    assert [fault.kind for fault in run.faults] == ["restarted"]
    assert run.board.state.how == "complete"


async def test_finished_run_and_run_that_still_runs_get_another_folder(tmp_path):
    _, first = await start(tmp_path)
    _, second = await start(tmp_path, master_epochs=5)
    assert second != first
    state = json.loads((second / folder.STATE).read_text())
    running = {**state, "state": "running", "host": "elsewhere"}
    (second / folder.STATE).write_text(json.dumps({**running, "job": "job 8 of Slurm"}))
    assert folder.unfinished(tmp_path / "runs", str(tmp_path / "kept"), JOB) is None
    (second / folder.STATE).write_text(json.dumps(running))
    assert folder.unfinished(tmp_path / "runs", str(tmp_path / "kept"), JOB) == (second, True)
    assert folder.unfinished(tmp_path / "runs", str(tmp_path / "other"), JOB) is None


async def test_run_whose_machine_was_lost_continues_elsewhere(tmp_path):
    _, path = await start(tmp_path, until=2)
    state = json.loads((path / folder.STATE).read_text())
    (path / folder.STATE).write_text(json.dumps({**state, "state": "running", "host": "elsewhere"}))
    from ddlf.training.checkpoints.checkpoint import CheckpointFolder

    lost = CheckpointFolder(tmp_path / "kept")
    lost.open("the lost master")  # this process must take the lost master for a running one
    app, again = await start(tmp_path)
    assert again == path
    assert app.takeover
    assert folder.read_state(path).restarts == 1


async def test_restarts_are_shown(tmp_path, capsys):
    await start(tmp_path, until=2)
    _, path = await start(tmp_path)
    with pytest.raises(SystemExit):
        main(["runs", "--out", str(tmp_path / "runs")])
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split()[2], row.split()[2]) == ("restarts", "1")
    with pytest.raises(SystemExit):
        main(["runs", "--json", "--out", str(tmp_path / "runs")])
    assert json.loads(capsys.readouterr().out)[0]["restarts"] == 1
    assert "started again 1 times" in (path / folder.REPORT).read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "--requeue needs a folder of checkpoints, because the next start continues from them; add --checkpoint DIR",
        ),
        (
            {"checkpoint": "a", "resume": "b"},
            "--requeue continues from the run's own checkpoints, but resume='b' names",
        ),
        ({"checkpoint": "a"}, "--requeue has no effect here: no engine has started this command"),
    ],
)
def test_impossible_requeue_is_refused(settings, message):
    app = FakeRun(**settings)
    with pytest.raises(ConfigError) as refused:
        requeue_of(app, Cluster.local(2))
    assert str(refused.value).startswith(message)


def test_run_resumes_by_itself():
    app = FakeRun(checkpoint="a")
    request = Requeue(JOB, lambda: None)
    assert requeue_of(app, SimpleNamespace(requeue=lambda: request)) is request
    assert app.resume == "auto"


@pytest.mark.parametrize("text", ["dask", "ssh:hosts=a", "command:sh -c '{worker}'"])
def test_launchers_whose_engine_does_not_run_the_command_again_say_so(text):
    name = text.partition(":")[0]
    with pytest.raises(ConfigError, match=f"--launcher {name}, which starts workers again, but not this command"):
        installed(text, None if name == "ssh" else 2).requeue()


def test_pod_restarts_by_itself(monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setenv("DDLF_TOKEN", "t" * 32)
    request = installed("k8s:gate=app-0.app:9100", 2).requeue()
    assert request.job == f"pod {socket.gethostname()} of Kubernetes"
    request.ask()


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Install a stand-in for ``scontrol``, which prints given facts and records its calls."""
    calls = tmp_path / "calls"
    calls.touch()

    def say(**facts):
        facts = {"JobState": "RUNNING", "BatchFlag": 1, "Requeue": 1, **facts}
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        script = tmp_path / "scontrol"
        script.write_text(f'#!/bin/sh\nif [ "$1" = show ]; then echo "JobId=7 {line}"; else echo "$*" >> {calls}; fi\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return calls

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return say


def test_slurm_is_asked_about_this_job_or_element(scontrol):
    calls = scontrol()
    request = requeue({"SLURM_JOB_ID": "7"})
    assert request.job == JOB
    request.ask()
    requeue({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}).ask()
    assert calls.read_text().splitlines() == [
        *("requeue 7", "update JobId=7 StartTime=now+5"),
        *("requeue 5_2", "update JobId=5_2 StartTime=now+5"),
    ]


def test_job_that_is_cancelled_or_requeued_already_is_left_to_slurm(scontrol, capsys):
    calls = scontrol()
    request = requeue({"SLURM_JOB_ID": "7"})
    scontrol(JobState="CANCELLED")
    request.ask()
    assert calls.read_text() == ""
    assert capsys.readouterr().err == "requeue   left to Slurm: its job 7 is CANCELLED\n"


def test_jobs_that_slurm_cannot_run_again_are_refused(scontrol, monkeypatch):
    for facts, message in (
        ({"BatchFlag": 0}, "--requeue has no effect in Slurm's job 7, which is not a batch job"),
        ({"Requeue": 0}, "--requeue needs a job that Slurm may queue again, but job 7 may not"),
    ):
        scontrol(**facts)
        with pytest.raises(ConfigError, match=message):
            requeue({"SLURM_JOB_ID": "7"})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="--requeue needs Slurm's command scontrol, which is not on this machine"):
        requeue({"SLURM_JOB_ID": "7"})
