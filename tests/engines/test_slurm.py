"""Tests of the launcher for Slurm with a real Slurm: four nodes on this machine, each with two CPUs."""

import contextlib
import getpass
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.engines.slurm_cluster import Lab, wait_for, workers
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(6 * PATIENCE_S)
ROOT = Path(__file__).parents[2]
DDLF = (sys.executable, "-m", "ddlf", "run")
APP = """
import numpy as np
import ddlf

class App(ddlf.IApp):
    batch_size, master_epochs, seed, slots, threads = 32, 3, 3, 4, 1

    async def load_dataset(self):
        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(1024, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self):
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dropout(0.3), layers.Dense(2, "softmax")]
        )
        self.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
"""
CALLS = """
import asyncio

from ddlf.errors import DDLFError

def here(self):
    import os
    import time

    time.sleep(0.2)
    return self.id, os.environ.get("SLURMD_NODENAME"), os.environ.get("DDLF_CORES"), sorted(os.sched_getaffinity(0))

async def call(worker):
    try:
        return str(await worker.run_method(here))
    except DDLFError as error:
        try:
            await asyncio.wait_for(worker.reconnect(), 2)
        except (DDLFError, TimeoutError):
            pass
        return f"{getattr(error, 'cause', None)}: {error.message}"

async def main(cluster):
    told = None
    while True:
        said = await asyncio.gather(*map(call, cluster.workers))
        if said != told:
            print("said", " | ".join(said), flush=True)
            told = said
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("slurm"))
    lab.folder.chmod(0o755)
    for program in ("slurmctld", "slurmd", "munged", "sbatch"):
        assert shutil.which(program, path=lab.environment["PATH"]), f"{program} is missing: scripts/engines installs it"
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


class Run:
    """A run of ``ddlf``. A thread reads its output."""

    def __init__(self, lab, folder, *command):
        self.lines = []
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=lab.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self):
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self):
        return "".join(self.lines)

    def works(self, count):
        """Wait until all workers answer, and return the last answers."""

        def last_answers():
            assert self.process.poll() is None, self.output
            last = next((line for line in reversed(self.lines) if line.startswith("said")), "")
            return last if last.count("(") == count and "None:" not in last else ""

        return wait_for(last_answers)

    @property
    def master(self):
        """Return the process of the master, which is a child of salloc or the command itself."""
        first = psutil.Process(self.process.pid)
        return next(
            (process for process in (first, *first.children()) if process.cmdline()[:1] == [sys.executable]), first
        )

    def ended(self, number=None):
        """Send the master the signal, if one is given, wait for the end, and return the exit code."""
        if number is not None:
            with contextlib.suppress(psutil.Error):
                self.master.send_signal(number)
        code = self.process.wait(3 * PATIENCE_S)
        self._reading.join(PATIENCE_S)
        self.process.stdout.close()
        return code


@pytest.fixture
def run(lab, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "calls.py").write_text(CALLS)
    runs = []

    def start(*command):
        runs.append(Run(lab, tmp_path, *command))
        return runs[-1]

    yield start
    for attempt in runs:
        attempt.ended(signal.SIGTERM)
    wait_for(lambda: not lab.call("squeue", "--noheader"))


ARRAY = (*DDLF, "calls.py", "--workers", "3", "--launcher", "slurm:cores=2")


@pytest.mark.parametrize("ways", [pytest.param(["tasks"], marks=pytest.mark.short), ["steps", "array"]], ids=" ".join)
def test_same_bits_as_on_this_machine(ways, lab, run, tmp_path):
    train = (*DDLF, "app.py", "--no-dashboard", "--quiet")
    commands = {
        "local": (*train, "--local", "2"),
        "tasks": ("srun", "-N4", "-n4", *train, "--launcher", "slurm"),
        "steps": ("salloc", "-Q", "-N2", "-n3", *train, "--launcher", "slurm"),
        "array": (*train, "--launcher", "slurm", "--workers", "4"),
    }
    hashes = {}
    for name in ("local", *ways):
        command = commands[name]
        attempt = run(*command, "--save", f"{name}.safetensors")
        assert attempt.ended() == 0, attempt.output
        hashes[name] = hashlib.sha256((tmp_path / f"{name}.safetensors").read_bytes()).hexdigest()
    assert len(set(hashes.values())) == 1, hashes
    assert list(tmp_path.glob(".ddlf-*")) == []


def test_tasks_without_a_shared_folder_meet_and_two_jobs_are_distinguished(lab, run, tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("munge", "unmunge"):  # this cluster's munged has its own socket
        program = shutil.which(name)
        (commands / name).write_text(f'#!/bin/sh\nexec {program} --socket={lab.folder}/munge.socket "$@"\n')
        (commands / name).chmod(0o755)
    script = (
        f'export PATH={commands}:$PATH; cd "$(mktemp -d {tmp_path}/task-XXXXXX)" && cp {tmp_path}/app.py . && '
        f"exec {sys.executable} -m ddlf run app.py --no-dashboard --quiet --launcher slurm --save {tmp_path}/$0"
    )
    names = [f"{number}.safetensors" for number in range(2)]
    jobs = [run("srun", "-N2", "-n2", "-c1", "sh", "-c", script, name) for name in names]
    assert [job.ended() for job in jobs] == [0, 0], [job.output for job in jobs]
    local = run(*DDLF, "app.py", "--no-dashboard", "--quiet", "--local", "2", "--save", "local.safetensors")
    assert local.ended() == 0, local.output
    hashes = {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in (*names, "local.safetensors")}
    assert len(hashes) == 1
    assert len(list(tmp_path.glob("task-*"))) == 4
    assert list(tmp_path.glob("task-*/.ddlf-*")) == []


def test_tasks_without_shared_folder_and_munge_get_advice(lab, run, tmp_path):
    script = (
        f'cd "$(mktemp -d {tmp_path}/task-XXXXXX)" && cp {tmp_path}/app.py . && '
        f"PATH=/nonexistent exec {sys.executable} -m ddlf run app.py --launcher slurm:start_timeout=5"
    )
    attempt = run("srun", "-N2", "-n2", "sh", "-c", script)
    assert attempt.ended() == 3, attempt.output
    assert "rank 1 has not found the master within 5 s: no file" in attempt.output
    assert "no master at n0, ports" in attempt.output
    assert "this node has no munge" in attempt.output
    assert (
        "begin all tasks in a folder that they share; without one, the nodes need the commands munge" in attempt.output
    )


def test_lost_elements_are_replaced_and_the_reason_of_slurm_is_printed(lab, run):
    attempt = run(*ARRAY)
    answers = attempt.works(3)
    assert re.findall(r"\((\d), 'n\d', '2'", answers) == ["1", "2", "3"]

    for process in workers(lab, 1):
        process.kill()
    wait_for(lambda: "None: " in attempt.output)
    attempt.works(3)
    (job, *_) = lab.jobs()[2]

    lab.call("scontrol", "requeue", f"{job}_2")
    wait_for(
        lambda: re.search(rf"cancelled: Slurm .*{job}_2 again: n\d CANCELLED AT .* DUE TO JOB REQUEUE", attempt.output)
    )
    attempt.works(3)

    _, _, node = lab.jobs()[1]
    lab.call("srun", "-p", "high", "-w", node, "--exclusive", "true")
    wait_for(lambda: f"Slurm gave the node of job {job}_1 to another job (PREEMPTED)" in attempt.output)
    attempt.works(3)

    _, _, node = lab.jobs()[0]
    lab.kill_node(node)
    wait_for(lambda: f"place 0: Slurm has queued job {job}_0 again: NODE_FAIL, node {node} is down" in attempt.output)
    assert f"(1, '{node}'" not in attempt.works(3)
    lab.call("slurmd", "-N", node)

    lab.call("scancel", f"{job}_2")
    wait_for(lambda: f"place 2 gets no worker any more: Slurm ended job {job}_2 with CANCELLED" in attempt.output)
    assert attempt.ended(signal.SIGINT) == 130


@pytest.mark.short
def test_killed_step_starts_again_and_steps_do_not_share_cpus(lab, run):
    attempt = run("salloc", "-Q", "-N1", "-n2", *DDLF, "calls.py", "--launcher", "slurm")
    answers = attempt.works(2)
    first, second = (set(text.split(", ")) for text in re.findall(r"\[([\d, ]+)\]", answers))
    assert not first & second, "two workers on a node have the same CPU"
    for process in workers(lab, 1):
        process.kill()
    wait_for(lambda: re.search("place 1: .*Killed.*; starting it again", attempt.output))
    attempt.works(2)
    assert set(re.findall(r"\((\d),", attempt.works(2))) == {"1", "2"}
    lab.call("scancel", f"--user={getpass.getuser()}")
    wait_for(lambda: not list(workers(lab)), 35)
    assert attempt.ended(signal.SIGTERM)


def test_place_works_again_after_the_daemon_of_its_step_was_killed(lab, run):
    attempt = run("salloc", "-Q", "-N1", "-n2", *DDLF, "calls.py", "--launcher", "slurm")
    attempt.works(2)
    (worker,) = workers(lab, 1)
    worker.parent().kill()  # slurmstepd
    wait_for(lambda: "place 1: its worker has ended, and srun still waits for it" in attempt.output)
    attempt.works(2)
    assert attempt.ended(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("way", ["array", "steps"])
def test_end_of_the_master_leaves_nothing(way, number, lab, run, tmp_path):
    alloc = ("salloc", "-Q", "-N3", "-n3", *DDLF, "calls.py", "--launcher", "slurm")
    attempt = run(*(ARRAY if way == "array" else alloc))
    attempt.works(3)
    attempt.ended(number)
    wait_for(lambda: not lab.call("squeue", "--noheader") and not list(workers(lab)), 35)
    assert list(tmp_path.glob(".ddlf-*")) == []


def test_wrong_partition_and_too_much_memory_end_at_once_with_slurms_line(lab, run):
    for key, line in {
        "partition=nope": "invalid partition specified: nope",
        "memory=500GiB": "Memory specification can not be satisfied",
    }.items():
        attempt = run(*DDLF, "calls.py", "--workers", "2", "--launcher", f"slurm:{key}")
        assert attempt.ended() == 3
        assert f"sbatch refused the job: {line}" in attempt.output


def test_full_cluster_is_named_and_the_run_ends_at_the_timeout(lab, run):
    lab.call("sbatch", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    wait_for(lambda: "RUNNING" in lab.call("squeue", "-h", "-o", "%T"))
    attempt = run(*DDLF, "calls.py", "--workers", "2", "--launcher", "slurm:start_timeout=9")
    assert attempt.ended() == 3
    lab.call("scancel", f"--user={getpass.getuser()}")
    reason = r"is PENDING, reason (Resources|Priority)"
    assert re.search(rf"waiting for workers at place.*{reason}", attempt.output)
    assert re.search(rf"no worker joined .* within 9 s: .*{reason}", attempt.output)


def test_token_is_in_no_record_of_slurm(lab, run, tmp_path):
    attempt = run(*ARRAY)
    attempt.works(3)
    (file,) = tmp_path.glob(".ddlf-slurm-*/.ddlf-token-*")
    token = file.read_text()
    (job, *_) = lab.jobs()[0]
    records = [lab.call("scontrol", "show", "job", job), lab.call("scontrol", "write", "batch_script", job, "-")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            records += [" ".join(process.cmdline()), str(process.environ())]
    for path in (*lab.folder.rglob("*"), *tmp_path.rglob("*")):
        if path.is_file() and path != file:
            records.append(path.read_bytes().decode(errors="replace"))
    assert not any(token in record for record in records)


def test_doctor_asks_slurm_and_starts_workers(lab, run):
    attempt = run(*DDLF[:3], "doctor", "--launcher", "slurm:cores=2", "--workers", "2")
    assert attempt.ended() == 0
    assert "Slurm takes the job: Job" in attempt.output
    assert attempt.output.count("the same versions; 2 cores") == 2
    attempt = run(*DDLF[:3], "doctor", "--launcher", "slurm:partition=nope")
    assert attempt.ended() == 3
    assert "choose one with the key partition: low, high" in attempt.output


WAITS = """
    async def on_round(self, record):
        \"\"\"Wait in round 2 of the first start until there is a notice.\"\"\"
        again = pathlib.Path("again")
        while record.round == 2 and not again.exists():
            await asyncio.sleep(0.05)
            if self.run_context.stop:
                again.touch()
"""
RENDER = (sys.executable, "-m", "ddlf", "slurm", "render")
KEPT = "--checkpoint-every 1 --no-dashboard --out runs --save again.safetensors"


@pytest.mark.timeout(20 * PATIENCE_S)
@pytest.mark.parametrize("notice", ["requeue", "preemption", "time limit"])
def test_job_that_gets_a_notice_runs_again_in_the_same_folder(notice, lab, run, tmp_path):
    (tmp_path / "waits.py").write_text(APP.replace("\n", "\nimport asyncio\nimport pathlib\n", 1) + WAITS)
    options = ["waits.py", "--workers", "2", "--requeue", "--checkpoint", "kept", "--python", sys.executable]
    options += ["--time", "3m" if notice == "time limit" else "50m", "--notice", "30", "--partition", "low"]
    script = subprocess.run(
        [*RENDER, *options, "--options", KEPT], env=lab.environment, capture_output=True, check=True
    )
    (tmp_path / "job.sh").write_bytes(script.stdout)
    job = lab.call("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh")).strip()
    if notice != "time limit":
        wait_for((tmp_path / "kept" / "round-000002").exists, 6 * PATIENCE_S)
    if notice == "requeue":
        lab.call("scontrol", "requeue", job)
    elif notice == "preemption":
        lab.call("srun", "-p", "high", "-N4", "--exclusive", "true")
    wait_for(lambda: now(lab, job)[1] != "0", 6 * PATIENCE_S)
    start_now(lab, job)
    assert now(lab, job)[0] == "COMPLETED"
    (state,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/state.json"))
    assert (state["state"], str(state["restarts"])) == ("finished", now(lab, job)[1])
    attempt = run(*DDLF, "waits.py", "--local", "2", "--out", "none", "--save", "local.safetensors", "--no-dashboard")
    assert attempt.ended() == 0
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()


def now(lab, job):
    """Return the state of a job, and the number of its restarts."""
    facts = dict(re.findall(r"(\S+?)=(\S*)", lab.call("scontrol", "show", "job", "--oneliner", job)))
    return facts["JobState"], facts["Restarts"]


def start_now(lab, job):
    """Wait until a job has ended. If it waits for its time to restart, let it restart now."""

    def has_ended():
        if now(lab, job)[0] == "PENDING":
            lab.call("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        return now(lab, job)[0] not in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}

    wait_for(has_ended, 6 * PATIENCE_S)


def test_cancelled_job_stays_cancelled_and_a_job_that_cannot_come_again_is_refused(lab, run, tmp_path):
    attempt = run(
        "salloc", "-Q", "-N1", "-n1", *DDLF, "app.py", "--launcher", "slurm", "--requeue", "--checkpoint", "kept"
    )
    assert attempt.ended() == 2
    assert "which is not a batch job" in attempt.output
    attempt = run(*DDLF, "app.py", "--workers", "2", "--launcher", "slurm", "--requeue", "--checkpoint", "kept")
    assert attempt.ended() == 2
    assert "this command is in no job of Slurm" in attempt.output
