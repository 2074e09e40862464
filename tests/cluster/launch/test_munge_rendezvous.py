"""Tests of tasks of Slurm without a shared folder. Stand-ins replace the programs of MUNGE; ``tests/engines`` has real ones."""

import asyncio
import contextlib
import os
import socket

import pytest

from ddlf.cluster.launch.rendezvous import Meeting, MeetingFile
from ddlf.cluster.launch.slurm import munge_rendezvous
from ddlf.cluster.launch.slurm.munge_rendezvous import MungedPorts, first_host, ports_of

JOB = f"{os.getpid()}.0.0"
OTHER_JOB = f"{os.getpid()}.1.0"
MEETING = Meeting("10.0.0.1:5", b"the token of this run")
MUNGE = """#!/bin/sh
[ "$1" = "--restrict-uid=$(id -u)" ] || exit 1
printf 'UID:          %s\\n\\n' "${USER_OF_MASTER:-$(id -u)}"
exec cat
"""
UNMUNGE = """#!/bin/sh
[ "$*" = "--numeric --keys=UID" ] || exit 1
read -r uid
case "$uid" in
    UID:*) printf '%s\\n' "$uid"; exec cat;;
esac
echo "unmunge: Error: Invalid credential format" >&2
exit 4
"""


@pytest.fixture(autouse=True)
def munge(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(munge_rendezvous, "PAUSE_S", 0.0)
    return folder


@contextlib.contextmanager
def opened(job, meeting=MEETING):
    point = MungedPorts("127.0.0.1", job)
    point.open(meeting)
    try:
        yield point
    finally:
        point.close()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0"),
        ("n[3,5-7]", "n3"),
        ("n[001-010],login", "n001"),
        ("r[0-1]n[3,5-7],login[1-2]", "r0n3"),
        ("gpu-a[2]b-x[10-12]y,z", "gpu-a2b-x10y"),
    ],
)
def test_first_host_of_a_list_is_found(nodes, host):
    assert first_host(nodes) == host


def test_only_steps_on_several_nodes_use_ports():
    nodes = {"SLURM_STEP_NODELIST": "n[0-1]", "SLURM_JOB_NODELIST": "m[0-3]"}
    (point,) = munge_rendezvous.munged(JOB, {**nodes, "SLURM_STEP_NUM_NODES": "2"})
    assert point.reason().startswith(f"no master at n0, ports {ports_of(JOB)[0]} to {ports_of(JOB)[-1]}")
    assert munge_rendezvous.munged(JOB, {**nodes, "SLURM_STEP_NUM_NODES": "1"}) == []


def test_task_finds_the_master_of_its_job_only_before_the_end():
    task = MungedPorts("127.0.0.1", JOB)
    assert task.find() is None
    with opened(JOB):
        assert task.find() == task.find() == MEETING
    assert task.find() is None
    assert task.reason().endswith("nobody answers there")


def test_two_jobs_with_the_same_ports_are_distinguished(monkeypatch):
    ports = ports_of(JOB)
    monkeypatch.setattr(munge_rendezvous, "ports_of", lambda job: ports)
    other_meeting = Meeting("10.0.0.2:5", b"another token")
    with opened(OTHER_JOB, other_meeting):
        task = MungedPorts("127.0.0.1", JOB)
        assert task.find() is None
        assert task.reason().endswith("another job of this user answers there")
        with opened(JOB):
            assert task.find() == MEETING
            assert MungedPorts("127.0.0.1", OTHER_JOB).find() == other_meeting


def test_master_of_another_user_is_not_trusted(monkeypatch):
    monkeypatch.setenv("USER_OF_MASTER", str(os.geteuid() + 1))
    with opened(JOB):
        task = MungedPorts("127.0.0.1", JOB)
        assert task.find() is None
        assert task.reason().endswith("a program of another user answers there")


def test_other_program_at_the_port_is_named():
    with socket.create_server(("127.0.0.1", ports_of(JOB)[0])) as server:
        task = MungedPorts("127.0.0.1", JOB)

        async def answer():
            looking = asyncio.create_task(task._look())
            sock, _ = await asyncio.to_thread(server.accept)
            with sock:
                sock.sendall(b"220 mail.example ESMTP\r\n")
            return await looking

        assert asyncio.run(answer()) is None
    assert task.reason().endswith("what answers there cannot be trusted (unmunge: Error: Invalid credential format)")


def test_node_without_munge_is_an_error(munge, monkeypatch):
    monkeypatch.setenv("PATH", str(munge.parent))
    with opened(JOB) as point:
        assert point._listener is None
        assert point.find() is None
    assert point.reason().endswith("this node has no munge")


def test_master_without_a_free_port_logs_a_warning(caplog):
    with contextlib.ExitStack() as stack:
        for port in ports_of(JOB):
            stack.enter_context(socket.create_server(("", port)))
        stack.enter_context(opened(JOB))
    assert "are all in use, so tasks on other nodes need a shared folder" in caplog.text


def test_no_text_contains_the_token():
    assert "token of this run" not in repr(MEETING)


def test_file_with_other_rights_is_not_trusted(tmp_path):
    point = MeetingFile(tmp_path / "meeting.json")
    point.open(MEETING)
    assert point.find() == MEETING
    assert not point.is_over()
    (tmp_path / "meeting.json").chmod(0o640)
    assert point.find() is None
    point.close()
    assert point.is_over()
