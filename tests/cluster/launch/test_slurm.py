"""Tests of the launcher for Slurm. Stand-ins replace the commands of Slurm; ``tests/engines`` has the real ones."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ddlf.cli.main import main
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Left, Workers, from_keys, installed
from ddlf.cluster.launch.ranks import Ranks, counts
from ddlf.cluster.launch.ranks import slurm as task
from ddlf.cluster.launch.slurm.array import Array
from ddlf.cluster.launch.slurm.commands import cause_in, clock
from ddlf.cluster.launch.slurm.keys import SlurmKeys
from ddlf.cluster.launch.slurm.launcher import choose
from ddlf.cluster.launch.slurm.render import array_script, job_options
from ddlf.cluster.launch.slurm.steps import Steps, seats
from ddlf.cluster.launch.slurm.tasks import Tasks
from ddlf.cluster.launch.supervisor import WorkerStart
from ddlf.errors import ConfigError, ConnectError, WorkerLost
from tests.patience import PATIENCE_S

TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
STAND_IN = Path(__file__).with_name("slurm_stand_in.py")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return the folder with the stand-ins for Slurm's commands, the first one in PATH.

    The stand-ins answer at once, and the launcher calls them more often than Slurm.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "srun", "scancel", "sinfo", "scontrol"):
        (folder / name).write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("ddlf.cluster.launch.slurm.array.LOOKS_S", (0.1, 10.0))
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    yield folder
    for path in folder.glob("job-*"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def number(self):
    return self.id


async def wait_until(condition):
    while not (value := condition()):  # noqa: ASYNC110 - Slurm has no event
        await asyncio.sleep(0.01)
    return value


async def back_again(cluster, index):
    """Wait until the worker was lost and has returned. Return the error of the loss."""
    error = None
    while True:
        try:
            await cluster.workers[index].run_method(number)
            if error is not None:
                return error
        except (WorkerLost, ConnectError) as lost:
            error = error or lost
            with contextlib.suppress(WorkerLost, ConnectError):
                await cluster.workers[index].reconnect()


def workers_of(place, folder):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if (
                "ddlf.cli.worker" in words
                and words[:1] == [sys.executable]
                and words[-2:] == ["--place", str(place)]
                and str(folder) in " ".join(words)
            ):
                yield process


# -- the choice of launcher -------------------------------------------------------------------------------------------


def test_task_of_slurm_is_read_from_its_step():
    assert task(TASK) == Ranks("slurm", 2, 3, "7.0.0")
    assert task({**TASK, "SLURM_RESTART_COUNT": "4"}).job == "7.0.4"


def test_task_knows_its_cpus():
    assert task({**TASK, "SLURM_CPUS_PER_TASK": "3"}).cores == 3
    on_node = {"SLURM_CPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"}
    assert task({**TASK, **on_node}).cores == 2
    assert task({**TASK, **on_node, "SLURM_NODEID": "2"}).cores == 8


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}])
def test_process_outside_of_a_task_of_slurm_learns_how_to_start(environment):
    with pytest.raises(ConfigError, match="srun did not start this process") as caught:
        task(environment)
    assert caught.value.hint == "start it with: srun --ntasks 4 ddlf run app.py --launcher slurm"


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        (TASK, Tasks),
        (ALLOCATION, Steps),
        ({**ALLOCATION, "SLURM_PROCID": "0"}, Steps),
        ({**ALLOCATION, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, Steps),
        ({**ALLOCATION, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "1"}, Steps),
        ({**TASK, "SLURM_PTY_PORT": "1"}, Tasks),
        ({}, Array),
    ],
    ids=["task", "salloc", "batch script", "shell on a node", "srun --pty", "tasks with a terminal", "login node"],
)
def test_place_of_the_command_chooses_the_launcher(environment, kind, slurm, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    workers = None if kind is Tasks else Workers(2, 2)
    assert type(choose({}, workers)) is kind
    assert type(installed("slurm", workers)) is kind


@pytest.mark.parametrize(
    ("environment", "key", "sentence"),
    [
        (TASK, "cores=2", "cores has no effect in a task of srun, which has its resources already; give it to srun"),
        (
            ALLOCATION,
            "partition=gpu",
            "partition has no effect in a job, which has its resources already; give it to salloc",
        ),
    ],
)
def test_key_without_effect_is_refused_by_name(environment, key, sentence, slurm, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence):
        installed(f"slurm:{key}")
    with pytest.raises(ConfigError, match=sentence):
        from_keys("slurm", dict([key.split("=")]))


def test_machine_without_commands_of_slurm_is_an_error(slurm, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ConfigError, match="Slurm's command sbatch is not on this machine, perhaps because this is a container"
    ):
        installed("slurm", Workers(2, 2))
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Slurm's command srun is not on this machine"):
        installed("slurm")


def test_array_needs_the_number_of_workers(slurm):
    with pytest.raises(ConfigError, match="launcher slurm needs the number of workers"):
        installed("slurm")


# -- resources of a place ---------------------------------------------------------------------------------------------


def test_short_lists_of_slurm():
    assert counts("2(x3),1") == [2, 2, 2, 1]
    assert counts("4") == [4]
    assert counts("") == []


def test_places_go_to_nodes_by_turns_as_long_as_there_are_cpus():
    assert seats([2, 2], 2, None) == [(0, 2), (1, 2)]
    assert seats([4, 1], 3, None) == [(0, 2), (1, 1), (0, 2)]
    assert seats([4, 2], 3, 2) == [(0, 2), (1, 2), (0, 2)]
    with pytest.raises(ConfigError, match=r"4 workers with 2 CPUs each do not fit .* 4, 2 CPUs .*; start 3 workers"):
        seats([4, 2], 4, 2)


def test_number_of_workers_comes_from_the_job():
    assert len(Steps(SlurmKeys(), ALLOCATION).addresses) == 2
    assert len(Steps(SlurmKeys(), {**ALLOCATION, "SLURM_NTASKS": "4"}).addresses) == 4
    assert len(Steps(SlurmKeys(workers="1..3"), ALLOCATION).addresses) == 3


def test_keys_become_options_of_sbatch():
    keys = SlurmKeys(
        cores=2,
        memory="1.5GiB",
        gpus=1,
        time="26h",
        partition="gpu",
        account="lab",
        qos="high",
        constraint="a100&ib",
        workers=2,
    )
    assert job_options(keys)[4:] == [
        *("--cpus-per-task=2", "--mem=1536M", "--gres=gpu:1", "--time=26:00:00", "--partition=gpu"),
        *("--account=lab", "--qos=high", "--constraint=a100&ib"),
    ]
    assert job_options(SlurmKeys()) == ["--nodes=1", "--ntasks=1", "--requeue", "--open-mode=append"]
    assert clock(90.5) == "00:01:31"


def test_script_has_the_environment_and_no_token():
    keys = SlurmKeys(env={"DATA": "/a b/'c'"}, python="/opt/py thon")
    script = array_script(keys, WorkerStart("10.0.0.1:5", None, b"secret"), Path("/shared/token"))
    assert "export DATA='/a b/'\"'\"'c'\"'\"''" in script
    assert "'/opt/py thon' -m ddlf.cli.worker --join 10.0.0.1:5" in script
    assert "secret" not in script


@pytest.mark.parametrize("name", ["A-B", "A B", "1A", "A;x", "\u00e9", ""])
def test_name_that_would_change_the_script_is_refused(slurm, name):
    with pytest.raises(ConfigError, match="launcher slurm: env must have names of environment variables"):
        from_keys("slurm", {"workers": 2, "env": {name: "x"}})


@pytest.mark.parametrize(
    "text", ["slurm:", "dask:", "spark:", "ray:", "ssh:hosts=pc01,"], ids=lambda text: text.partition(":")[0]
)
def test_token_is_refused_in_the_environment(slurm, text):
    with pytest.raises(ConfigError, match="env must not contain DDLF_TOKEN"):
        installed(f"{text}env.DDLF_TOKEN=x", Workers(2, 2))


# -- an array job -----------------------------------------------------------------------------------------------------


async def test_array_starts_workers_and_leaves_nothing(slurm, tmp_path, descendants):
    async with asyncio.timeout(PATIENCE_S):
        launcher = Array(SlurmKeys(workers=2, folder=tmp_path, partition="low"))
        async with Cluster(launcher) as cluster:
            assert await cluster.run_method(number) == [1, 2]
            (folder,) = tmp_path.glob(".ddlf-slurm-*")
            assert folder.stat().st_mode & 0o777 == 0o700
            (token,) = folder.glob(".ddlf-token-*")
            secret = token.read_text()
            assert token.stat().st_mode & 0o777 == 0o600
            assert secret not in (folder / "job.sh").read_text()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):  # it has ended
                    assert secret not in " ".join(process.cmdline())
                    assert secret not in str(process.environ())
        calls = (slurm / "calls").read_text().splitlines()
        (submitted,) = (line for line in calls if line.startswith("sbatch"))
        assert "--array=0-1" in submitted
        assert "--partition=low" in submitted
        assert calls[-1] == f"scancel --quiet --name={folder.name[1:]}"
        assert list(tmp_path.glob(".*")) == []


async def test_refused_job_is_the_error_with_slurms_line(slurm, tmp_path):
    (slurm / "refusal").write_text("sbatch: error: invalid partition specified: nope\n")
    with pytest.raises(ConnectError, match="sbatch refused the job: invalid partition specified: nope") as caught:
        await asyncio.wait_for(Cluster(Array(SlurmKeys(workers=2, folder=tmp_path))).connect(), PATIENCE_S)
    assert caught.value.exit_code == 3
    assert list(tmp_path.glob(".*")) == []


async def test_waiting_job_ends_at_the_timeout_with_slurms_reason(slurm, tmp_path):
    (slurm / "full").touch()
    launcher = Array(SlurmKeys(workers=1, folder=tmp_path, start_timeout=1.5))
    with pytest.raises(ConnectError, match="Slurm's job 7_0 is PENDING, reason Resources"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)


@pytest.mark.slow
async def test_killed_worker_starts_again_in_its_element(slurm, tmp_path, descendants):
    async with asyncio.timeout(PATIENCE_S), Cluster(Array(SlurmKeys(workers=2, folder=tmp_path))) as cluster:
        for process in workers_of(1, tmp_path):
            process.kill()
        await back_again(cluster, 1)
        assert await cluster.run_method(number) == [1, 2]
    assert (slurm / "calls").read_text().count("sbatch") == 1


@pytest.mark.slow
async def test_ended_element_is_submitted_again_and_named_with_the_state_of_slurm(slurm, tmp_path, descendants):
    launcher = Array(SlurmKeys(workers=2, folder=tmp_path))
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        (slurm / "said-7-1").write_text("TIMEOUT 0 n1 N/A None")
        os.killpg(int((slurm / "job-7-1").read_text()), signal.SIGKILL)
        await wait_until(lambda: launcher._lefts.get(1))
        assert launcher._lefts[1] == Left(Cause.TIME_LIMIT, "Slurm ended job 7_1 with TIMEOUT")
        await back_again(cluster, 1)
        assert await cluster.run_method(number) == [1, 2]
    assert len(re.findall("sbatch .*--array=1 .*--requeue", (slurm / "calls").read_text())) == 1


async def test_cancelled_element_is_not_submitted_again(slurm, tmp_path, descendants):
    launcher = Array(SlurmKeys(workers=2, folder=tmp_path))
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher):
        (slurm / "said-7-1").write_text("CANCELLED 0 n1 N/A None")
        os.killpg(int((slurm / "job-7-1").read_text()), signal.SIGKILL)
        launcher.gate._loop.call_soon_threadsafe(launcher._look_now.set)
        await wait_until(lambda: launcher._lefts.get(1))
        assert launcher._lefts[1].cause is Cause.CANCELLED
        assert 1 not in launcher._jobs
    assert (slurm / "calls").read_text().count("sbatch") == 1


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
            Left(
                Cause.PREEMPTED,
                "Slurm has queued job 7_0 again: n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION",
            ),
        ),
        ("", Left(Cause.NODE, "Slurm has queued job 7_0 again: NODE_FAIL, node n1 is down*, Not responding")),
    ],
    ids=["preempted", "node lost"],
)
async def test_element_that_slurm_queues_again_says_why_and_is_asked_to_start_soon(
    line, left, slurm, tmp_path, descendants, monkeypatch
):
    monkeypatch.setattr("ddlf.cluster.launch.slurm.array.PAUSE_S", 0.0)
    launcher = Array(SlurmKeys(workers=1, folder=tmp_path))
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher):
        (folder,) = tmp_path.glob(".ddlf-slurm-*")
        output = folder / "place-0.log"
        output.write_text(f"{output.read_text()}slurmstepd-n1: error: {line}\n")
        (slurm / "said-7-0").write_text("PENDING 1 none N/A BeginTime")
        await launcher.left(0)
        await wait_until(lambda: launcher._lefts.get(0))
        assert launcher._lefts[0] == left
        await wait_until(lambda: "scontrol update JobId=7_0 StartTime=now" in (slurm / "calls").read_text())
        (slurm / "said-7-0").unlink()


@pytest.mark.slow
async def test_missing_answer_of_slurm_is_reported_once(slurm, tmp_path, descendants, caplog):
    launcher = Array(SlurmKeys(workers=1, folder=tmp_path))
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        # The error is in a separate file, because a starting `squeue` would run a replaced program.
        (slurm / "new").write_text("slurm_load_jobs error: Unable to contact slurm controller")
        (slurm / "new").rename(slurm / "unreachable")
        for _ in range(2):
            await launcher.left(0)
        assert await cluster.run_method(number) == [1]
        (slurm / "unreachable").unlink()
        await launcher.left(0)
        await wait_until(lambda: "Slurm answers again" in caplog.text)
    message = "Slurm does not answer, and the run continues: Unable to contact slurm controller"
    assert caplog.text.count(message) == 1


@pytest.mark.slow
async def test_array_starts_again_after_it_was_closed(slurm, tmp_path, descendants):
    launcher = Array(SlurmKeys(workers=1, folder=tmp_path))
    cluster = Cluster(launcher)
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S), cluster:
            assert await cluster.run_method(number) == [1]
            await launcher.left(0)


async def test_job_that_is_just_submitted_is_cancelled_too(slurm, tmp_path):
    (slurm / "sbatch").write_text(
        f"""#!/bin/sh
touch {slurm}/begins
while [ ! -e {slurm}/go ]; do sleep 0.02; done
echo "sbatch ends" >> {slurm}/calls
echo 7
"""
    )
    cluster = Cluster(Array(SlurmKeys(workers=1, folder=tmp_path)))
    async with asyncio.timeout(PATIENCE_S):
        connecting = asyncio.create_task(cluster.connect())
        await wait_until((slurm / "begins").exists)
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=0.5)
        (slurm / "go").touch()
        await asyncio.gather(connecting, return_exceptions=True)
        await cluster.close()
        await wait_until(lambda: "sbatch ends" in (slurm / "calls").read_text())
        calls = (slurm / "calls").read_text().splitlines()
    assert calls.index("sbatch ends") < next(i for i, line in enumerate(calls) if line.startswith("scancel"))


async def test_job_that_its_partition_never_starts_ends_the_start(slurm, tmp_path):
    (slurm / "full").touch()
    connecting = asyncio.ensure_future(Cluster(Array(SlurmKeys(workers=1, folder=tmp_path))).connect())
    async with asyncio.timeout(PATIENCE_S):
        await wait_until((slurm / "said-7-0").exists)
        (slurm / "said-7-0").write_text("PENDING 0 none N/A PartitionTimeLimit")
        with pytest.raises(
            ConnectError, match="job 7_0, which is PENDING with reason PartitionTimeLimit; ask for what"
        ):
            await connecting


async def test_run_that_ends_before_its_guard_runs_leaves_no_token(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = asyncio.Event()

    async def never(*_, **__):
        loop.call_soon_threadsafe(started.set)
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("asyncio.create_subprocess_exec", never)
    launcher = Array(SlurmKeys(workers=Workers(1, 1), folder=tmp_path))
    connecting = asyncio.create_task(Cluster(launcher).connect())
    async with asyncio.timeout(PATIENCE_S):
        await started.wait()
        assert list(tmp_path.glob(".ddlf-slurm-*"))
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await launcher.stop()
    assert not list(tmp_path.glob(".ddlf-slurm-*"))


async def test_sbatch_that_does_not_end_is_killed(slurm, tmp_path, descendants, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.slurm.array.SUBMIT_S", 0.1)
    (slurm / "sbatch").write_text(f"#!/bin/sh\ntouch {slurm}/begins\nexec sleep 1000\n")
    cluster = Cluster(Array(SlurmKeys(workers=1, folder=tmp_path)))
    async with asyncio.timeout(PATIENCE_S):
        connecting = asyncio.create_task(cluster.connect())
        await wait_until((slurm / "begins").exists)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await cluster.close()
    assert descendants() == []


# -- steps ------------------------------------------------------------------------------------------------------------


async def test_steps_of_a_job_start_again_and_end(slurm, tmp_path, descendants, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "9")
    launcher = Steps(SlurmKeys(), ALLOCATION)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        calls = (slurm / "calls").read_text().splitlines()
        assert all(line.startswith("srun --nodes=1 --ntasks=1 --cpus-per-task=2 --exact") for line in calls)
        assert sorted(re.findall("--relative=.", " ".join(calls))) == ["--relative=0", "--relative=1"]
        assert launcher.tokens.primary.decode() not in " ".join(calls)
        steps = [process for process in psutil.Process().children() if str(slurm / "srun") in process.cmdline()]
        assert len(steps) == 2
        assert all("SLURM_NTASKS_PER_NODE" not in process.environ() for process in steps)
        for process in steps[1].children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end with the one before
                process.kill()
        await wait_until(lambda: launcher._lefts)
        (place,) = launcher._lefts
        assert launcher._lefts[place].cause is Cause.CRASH
        await back_again(cluster, place)
        assert await cluster.run_method(number) == [1, 2]


@pytest.mark.slow
async def test_step_without_its_worker_is_ended_and_starts_again(slurm, descendants, monkeypatch):
    monkeypatch.setattr("ddlf.cluster.launch.slurm.steps.GONE_S", 0.1)
    (slurm / "silent").touch()
    launcher = Steps(SlurmKeys(), ALLOCATION)
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        step = next(process for process in psutil.Process().children() if str(slurm / "srun") in process.cmdline())
        for process in step.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end with the one before
                process.kill()
        await wait_until(lambda: launcher._lefts)
        (slurm / "silent").unlink()
        ((place, left),) = launcher._lefts.items()
        assert left == Left(Cause.NODE, "its worker has ended, and srun still waits for it")
        await back_again(cluster, place)
        assert await cluster.run_method(number) == [1, 2]
        assert not step.is_running()
        overlapping = [line for line in (slurm / "calls").read_text().splitlines() if "--overlap" in line]
        assert len(overlapping) == 1, "Slurm gives the CPUs of that step to no other one"
        assert f"--job-name=ddlf-place-{place}" in overlapping[0]
    assert descendants() == []


async def test_step_that_slurm_refuses_fails_with_its_words(slurm, monkeypatch):
    (slurm / "refusal").write_text("srun: error: Unable to create step for job 7: Invalid job id specified\n")
    with pytest.raises(ConnectError, match="Unable to create step for job 7: Invalid job id specified"):
        await asyncio.wait_for(Cluster(Steps(SlurmKeys(), ALLOCATION)).connect(), PATIENCE_S)


def test_page_has_commands_that_are_accepted(slurm, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").touch()
    page = (Path(__file__).parents[3] / "docs/howto/deploy.md").read_text()
    (array,) = (shlex.split(line) for line in page.splitlines() if line.startswith("ddlf run") and "slurm:" in line)
    parser = Parser()
    add_options(parser)
    options = parser.parse_args(array[3:])
    launcher = installed(options.launcher, options.workers)
    assert isinstance(launcher, Array)
    assert (len(launcher.addresses), launcher.keys.time) == (4, 7200)
    renders = [shlex.split(line.partition("|")[0]) for line in page.splitlines() if line.startswith("ddlf slurm")]
    assert len(renders) == 2
    for render in renders:
        with pytest.raises(SystemExit) as ended:
            main(render[1:])
        assert ended.value.code == 0
        assert "#SBATCH --ntasks=4" in capsys.readouterr().out


async def test_folder_that_cannot_be_written_to_is_refused(slurm, tmp_path):
    launcher = Array(SlurmKeys(workers=1, folder=tmp_path / "missing"))
    with pytest.raises(ConfigError, match="missing cannot be written to; name a folder that the workers share"):
        await asyncio.wait_for(Cluster(launcher).connect(), PATIENCE_S)


async def test_check_asks_slurm_whether_it_would_take_the_job(slurm, tmp_path):
    facts = [check async for check in from_keys("slurm", {"workers": 2, "folder": str(tmp_path)}).check()]
    assert not any(check.do for check in facts)
    assert [check.fact for check in facts][:2] == [
        "slurm 1.0",
        "Slurm takes the job: Job 7 to start at noon on nodes n1",
    ]
    assert facts[-1].fact.startswith(f"the workers must share the folder {tmp_path}")
    assert "sbatch --test-only --array=0-1 --nodes=1 --ntasks=1" in (slurm / "calls").read_text()
    assert not list(slurm.glob("submitted-*"))


async def test_check_names_a_wrong_partition_and_the_refusal_of_slurm(slurm):
    *_, problem = [check async for check in from_keys("slurm", {"workers": 2, "partition": "gpu"}).check()]
    assert (problem.fact, problem.do) == ("Slurm has no partition gpu", "choose one with the key partition: low, high")
    (slurm / "refusal").write_text("sbatch: error: invalid account")
    problems = [check async for check in from_keys("slurm", {"workers": 2, "account": "x"}).check() if check.do]
    assert [problem.fact for problem in problems] == ["Slurm refuses the job: invalid account"]


async def test_check_in_a_job_prints_the_resources_of_each_worker(slurm, monkeypatch):
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    facts = [check.fact async for check in choose({}).check()]
    assert facts[0] == "slurm 1.0"
    assert facts[1] == "job 7 on its nodes: each worker gets 2 CPUs"


async def test_last_lines_of_the_output_are_in_the_error(slurm, tmp_path):
    keys = {"workers": 1, "folder": str(tmp_path), "python": "/no/python"}
    with pytest.raises(ConnectError, match=r"(?s)place 0: Slurm ended job 9_0 with COMPLETED:\n.*raise .*/no/python"):
        await asyncio.wait_for(Cluster(from_keys("slurm", keys)).connect(), PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("n2: task 0: Exited with exit code 143", Cause.NOTICE),
        ("n2: task 0: Exited with exit code 1", Cause.CRASH),
        ("STEP 7.1 ON n2 CANCELLED AT 2026-11-26T14:00:00 DUE TO PREEMPTION", Cause.PREEMPTED),
    ],
)
def test_cause_is_read_from_the_message_of_slurm(words, cause):
    assert cause_in(words) is cause
