"""Tests of tasks that srun or mpirun start together: the leading task, how other tasks find it, and the end."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cluster.launch import ranks
from ddlf.cluster.launch.keys import Keys, parse_keys
from ddlf.cluster.launch.launcher import Workers, installed
from ddlf.cluster.launch.ranks import Ranked, Ranks, check_one_task, mpi
from ddlf.cluster.launch.rendezvous import Meeting
from ddlf.cluster.launch.supervisor import Supervisor, WorkerStart
from ddlf.errors import ConfigError, ConnectError
from tests.patience import PATIENCE_S

TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
APP = """
def number(self):
    return self.id

async def main(cluster):
    print("workers", await cluster.run_method(number), flush=True)

if __name__ == "__main__":
    import ddlf

    ddlf.main(main)
"""


def test_task_of_both_kinds_of_mpi_is_read_from_the_environment():
    openmpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-pc-17@1"}
    assert mpi(openmpi) == Ranks("mpi", 1, 4, "prterun-pc-17@1")
    assert mpi({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "9"}) == Ranks("mpi", 3, 4, "9")
    with pytest.raises(ConfigError, match="mpirun did not start this process"):
        mpi({})


def test_job_of_mpich_is_named_by_its_process_manager():
    answers = {
        b"cmd=init pmi_version=1 pmi_subversion=1\n": b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2\n",
        b"cmd=get_my_kvsname\n": b"cmd=my_kvsname rc=0 kvsname=kvs_15681_0_1942367995_pc\n",
        b"cmd=finalize\n": b"cmd=finalize_ack rc=0\n",
    }
    requests = []
    task_end, manager_end = socket.socketpair()

    def manage():
        for _ in answers:
            requests.append(manager_end.recv(1000))
            manager_end.send(answers[requests[-1]])

    with task_end, manager_end:
        managing = threading.Thread(target=manage)
        managing.start()
        environment = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": str(task_end.fileno())}
        expected = Ranks("mpi", 1, 2, "kvs_15681_0_1942367995_pc")
        assert mpi(environment) == mpi(environment) == expected, "the second time without asking"
        managing.join(PATIENCE_S)
        ranks._name_by_pmi.cache_clear()
    assert requests == list(answers)


def test_option_of_the_launcher_is_checked(monkeypatch):
    for name, value in {**TASK, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert installed("slurm:start_timeout=20")._start_timeout_s == 20
    assert installed("slurm:workers=2..3").least == 2
    with pytest.raises(ConfigError, match="3 tasks run, but workers=4; leave it out, or start 4 tasks"):
        installed("slurm", Workers(4, 4))


def test_task_without_a_master_ends_after_the_timeout(tmp_path):
    launcher = Ranked(Keys(start_timeout=0.2), Ranks("slurm", 1, 2, "7.0.0"), tmp_path)
    with pytest.raises(
        ConnectError, match=r"rank 1 has not found the master within 0\.2 s: no file .*\.ddlf-slurm-7\.0\.0\.json"
    ):
        launcher.follower()()


def test_only_rank_0_is_the_master(tmp_path):
    assert Ranked(Keys(), Ranks("slurm", 0, 2, "7.0.0"), tmp_path).follower() is None
    with pytest.raises(ConfigError, match="this task has rank 1, and only rank 0 is the master"):
        asyncio.run(Ranked(Keys(), Ranks("slurm", 1, 2, "7.0.0"), tmp_path).start())


BY_DDLF = ("-m", "ddlf", "run", "app.py")
LAUNCHER = ("--launcher", "slurm:start_timeout=60")


@contextlib.contextmanager
def tasks(folder, count, *words, app=APP, **environment):
    """Run the app in ``count`` processes with the environment of srun."""
    (folder / "app.py").write_text(app)
    started = [
        subprocess.Popen(
            [sys.executable, *(words or (*BY_DDLF, *LAUNCHER))],
            cwd=folder,
            env={**os.environ, **TASK, "SLURM_STEP_NUM_TASKS": str(count), "SLURM_PROCID": str(rank), **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in reversed(range(count))
    ]
    try:
        yield started[::-1]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*BY_DDLF, *LAUNCHER), id="ddlf run"),
        pytest.param(("app.py", *LAUNCHER), id="a script", marks=pytest.mark.slow),
        pytest.param(BY_DDLF, id="a cluster file", marks=pytest.mark.slow),
    ],
)
def test_all_tasks_run_one_program_and_leave_nothing(words, tmp_path):
    if words == BY_DDLF:
        (tmp_path / "cluster.yaml").write_text('launcher: "slurm:start_timeout=60"\n')
    with tasks(tmp_path, 3, *words) as (leader, *followers):
        output, _ = leader.communicate(timeout=PATIENCE_S)
        assert "workers [1, 2, 3]" in output
        assert leader.returncode == 0
        for process in followers:
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_file_of_a_killed_run_is_ignored_when_a_new_run_replaces_it(tmp_path, monkeypatch):
    launcher = Ranked(Keys(start_timeout=PATIENCE_S), Ranks("mpi", 1, 2, "mpich"), tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        stale = f"127.0.0.1:{free.getsockname()[1]}"
    (point,) = launcher._points
    point.open(Meeting(stale, b"x" * 43))
    addresses = []

    class Seen(Supervisor):
        def run(self, is_over):
            addresses.append(self._command[self._command.index("--join") + 1])
            if len(addresses) == 1:  # while this worker looks for the old master, the new one writes its file
                point.open(Meeting("127.0.0.1:1", b"y" * 43))
                return 3
            return 0

    monkeypatch.setattr(ranks, "Supervisor", Seen)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    assert launcher.follower()() == 0
    assert addresses == [stale, "127.0.0.1:1"]


def test_several_tasks_without_their_launcher_are_refused(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    environment = {**os.environ, **TASK, "SLURM_PROCID": "1"}
    for chosen in ("--local 1", "--launcher command:{worker} --workers 2"):
        command = [sys.executable, "-m", "ddlf", "run", "app.py", *chosen.split()]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
        assert ended.returncode == 2
        message = "this is task 1 of 3, and each would train alone; use --launcher slurm, or start one task"
        assert message in ended.stderr
    check_one_task({**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    check_one_task({})


def test_notice_of_an_engine_reaches_the_worker_with_its_seconds(tmp_path):
    log = tmp_path / "heard"
    started = threading.Event()

    class Short(Supervisor):
        def start(self):
            code = (
                "import sys; lines = [sys.stdin.readline() for _ in range(2)]; open(sys.argv[1], 'w').write(lines[1])"
            )
            self._command = [sys.executable, "-c", code, str(log)]
            super().start()
            started.set()

    supervisor = Short(WorkerStart("127.0.0.1:1", 0, b"token"))
    running = threading.Thread(target=supervisor.run)
    running.start()
    assert started.wait(PATIENCE_S)
    supervisor.leave(PATIENCE_S)
    running.join(PATIENCE_S)
    assert log.read_text() == f"leave {PATIENCE_S:.1f}\n"


def test_page_starts_tasks_with_existing_launchers():
    page = (Path(__file__).parents[3] / "docs/howto/deploy.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith(("srun", "mpirun"))]
    assert len(commands) == 3
    parser = Parser()
    add_options(parser)
    for program, _, count, ddlf, run, app, *options in commands:
        assert (count, ddlf, run, app) == ("4", "ddlf", "run", "app.py")
        name, _, text = parser.parse_args(options).launcher.partition(":")
        assert {"srun": "slurm", "mpirun": "mpi"}[program] == name
        assert Keys.model_validate(parse_keys(text, name)).start_timeout in (60, 600)
    (command,) = (shlex.split(line) for line in page.splitlines() if "command:" in line)
    options = parser.parse_args(command[3:])
    assert len(installed(options.launcher, options.workers).addresses) == 4


def test_only_the_owner_may_read_the_file_of_the_run_and_no_command_line_has_the_token(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    with tasks(tmp_path, 2) as (leader, follower):
        (tmp_path / "app.py").write_text(APP.replace("print(", "input(), print("))
        never_set = threading.Event()
        while not (files := list(tmp_path.glob(".ddlf-slurm-*.json"))) and leader.poll() is None:
            never_set.wait(0.01)
        (file,) = files
        assert file.stat().st_mode & 0o777 == 0o600
        token = re.search(r'"token": "([^"]+)"', file.read_text())[1]
        for process in (leader, follower):
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid)
                for member in [family, *family.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        assert token not in " ".join(member.cmdline())
                        assert token not in str(member.environ())


@pytest.mark.slow
def test_file_of_the_run_has_no_token_any_more_when_all_tasks_have_joined(tmp_path):
    waiting = "    import asyncio\n    import pathlib\n\n    while not pathlib.Path('go').exists():\n        await asyncio.sleep(0.02)\n"
    with tasks(tmp_path, 2, app=APP.replace("\nif __name__", f"{waiting}\nif __name__")) as (leader, follower):
        while "workers [1, 2]" not in (line := leader.stdout.readline()):
            assert line, "the tasks have ended"
        (file,) = tmp_path.glob(".ddlf-slurm-*.json")
        assert (file.read_text(), file.stat().st_mode & 0o777) == ("{}", 0o600)
        (tmp_path / "go").touch()
        leader.communicate(timeout=PATIENCE_S)
        assert (leader.returncode, follower.wait(PATIENCE_S)) == (0, 0)
    assert not list(tmp_path.glob(".ddlf-slurm-*"))


@pytest.mark.slow
def test_tasks_end_when_the_process_that_started_them_is_killed(tmp_path):
    waiting = "    import asyncio\n\n    await asyncio.sleep(1000)\n"
    (tmp_path / "app.py").write_text(APP.replace("\nif __name__", f"{waiting}\nif __name__"))
    command = shlex.join([sys.executable, *BY_DDLF, *LAUNCHER])
    starts = [f"SLURM_PROCID={rank} {command} &" for rank in range(2)]
    with subprocess.Popen(
        ["sh", "-c", f"{' '.join(starts)} wait"],
        cwd=tmp_path,
        env={**os.environ, **TASK, "SLURM_STEP_NUM_TASKS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as engine:
        while "workers [1, 2]" not in (line := engine.stdout.readline()):
            assert line, "the tasks have ended"
        family = psutil.Process(engine.pid).children(recursive=True)
        engine.kill()
        _, remain = psutil.wait_procs(family, PATIENCE_S)
        assert remain == []
    assert list(tmp_path.glob(".*")) == []


def test_task_that_leads_ends_when_the_process_that_started_it_is_killed_during_the_import(tmp_path):
    (tmp_path / "app.py").write_text("import time; print('imported', flush=True); time.sleep(1000)")
    command = shlex.join([sys.executable, *BY_DDLF, *LAUNCHER])
    with subprocess.Popen(
        ["sh", "-c", f"{command} & wait"],
        cwd=tmp_path,
        env={**os.environ, **TASK, "SLURM_PROCID": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as engine:
        while "imported" not in (line := engine.stdout.readline()):
            assert line, "the task has ended"
        family = psutil.Process(engine.pid).children(recursive=True)
        engine.kill()
        _, remain = psutil.wait_procs(family, PATIENCE_S)
        for process in remain:
            process.kill()
        assert remain == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_process_notices_that_its_parent_has_ended_earlier(is_killed):
    program = "from ddlf.cluster.launch import ranks; input(); print(ranks.own_parent() == ranks.NO_PARENT, flush=True)"
    with subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; {shlex.join([sys.executable, '-c', program])} <&3 & echo begun; wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as engine:
        assert engine.stdout.readline() == "begun\n"
        if is_killed:
            engine.kill()
            engine.wait()
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == f"{is_killed}\n"


def test_killed_worker_is_started_again_and_the_task_ends_with_the_run():
    started = []

    class Short(Supervisor):
        def start(self):
            self._command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.read()"]
            super().start()
            started.append(self._process)

    supervisor = Short(WorkerStart("127.0.0.1:1", 0, b"token"))
    over = threading.Event()
    codes = []
    running = threading.Thread(target=lambda: codes.append(supervisor.run(over.is_set)))
    running.start()
    pause = threading.Event()
    while not started:
        pause.wait(0.01)
    started[0].send_signal(signal.SIGKILL)
    while len(started) < 2:
        pause.wait(0.01)
    over.set()
    running.join(PATIENCE_S)
    assert codes == [0]
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize("cores", [2, None])
def test_worker_whose_engine_gives_cores_does_not_inherit_the_engines_threads(monkeypatch, cores):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    inherited = Supervisor(WorkerStart("127.0.0.1:1", 0, b"token", cores))._inherited_environment()
    assert ("OMP_NUM_THREADS" in inherited) == ("MALLOC_TRIM_THRESHOLD_" in inherited) == (cores is None)
    assert inherited["CUDA_VISIBLE_DEVICES"] == "1"


def test_worker_that_ends_by_itself_ends_its_task_with_its_code():
    supervisor = Supervisor(WorkerStart("127.0.0.1:1", 0, b"token"))
    supervisor._command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    assert supervisor.run() == 3
    supervisor.start()
    assert supervisor._process.poll() == 3, "no worker starts after the end"


@pytest.mark.parametrize("ends", ["at once", "after it was asked to stop"])
def test_staying_worker_is_ended_only_on_request(ends):
    supervisor = Supervisor(WorkerStart("127.0.0.1:1", 0, b"token"))
    supervisor._command = [sys.executable, "-c", "import sys; print(*sys.stdin.readlines(), file=sys.stderr)"]
    supervisor.stay()
    if ends == "after it was asked to stop":
        supervisor.ask_to_stop()
        assert supervisor.run() == 0
        assert supervisor._process is None
        return
    reader, writer = os.pipe()
    supervisor._output = writer
    assert supervisor.run(lambda: True) == 0
    assert supervisor._process.poll() is None
    os.close(writer)
    supervisor._close_stdin()
    assert supervisor._process.wait(PATIENCE_S) == 0
    with open(reader) as output:
        assert output.read().split() == ["token", "stay", "1"]


def test_worker_is_started_again_after_a_sigterm_to_it_alone(tmp_path):
    file = tmp_path / "began"
    program = f"import sys, pathlib; file = pathlib.Path({str(file)!r})\nif file.exists(): sys.exit(3)\nfile.touch(); sys.exit(143)"
    supervisor = Supervisor(WorkerStart("127.0.0.1:1", 0, b"token"))
    supervisor._command = [sys.executable, "-c", program]
    assert supervisor.run() == 3, "the second worker ends the task"
