"""A real Slurm on this machine: four nodes, each with two CPUs."""

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
NODES = ("n0", "n1", "n2", "n3")
CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=n[0-3] Default=YES MaxTime=60 PriorityTier=1 GraceTime=10
PartitionName=high Nodes=n[0-3] MaxTime=60 PriorityTier=10
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


class Lab:
    """A small cluster of Slurm.

    Args:
        folder: An empty folder that other users can read.
        environment: More variables for Slurm and its commands.
    """

    def __init__(self, folder, environment=None):
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }

    def call(self, *command, check=True):
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def start(self):
        munge = self.folder / "munge"
        munge.mkdir(mode=0o700)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        command = ["munged", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        command += [f"--{name}-file={munge}/{name}" for name in ("pid", "seed", "log")]
        subprocess.run([*command, "--force"], env=self.environment, check=True, capture_output=True)
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"
            for node, port in zip(NODES, ports, strict=True)
        )
        config = CONFIG.format(host=host, port=port, user=getpass.getuser(), folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(config)
        for name in ("ctld", *NODES):
            (self.folder / name).mkdir()
        self.call("slurmctld")
        for node in NODES:
            self.call("slurmd", "-N", node)
        wait_for(lambda: self.call("sinfo", "-hN", "-p", "low", "-o", "%T").split() == ["idle"] * 4)

    def stop(self):
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        for path in (*self.folder.glob("*.pid"), self.folder / "munge/pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)

    def jobs(self):
        """Return the state and the node of each element that has not ended, by place."""
        rows = self.call("squeue", "--noheader", "--array", "--format=%K %F %T %N").splitlines()
        return {int(row.split()[0]): row.split()[1:] for row in rows if row.split()[0].isdigit()}

    def kill_node(self, node):
        """Kill a node's slurmd, and all processes on this node."""
        processes = [psutil.Process(int((self.folder / f"{node}.pid").read_text()))]
        for process in psutil.process_iter():
            if self._is_on(process, node):
                parent = process.parent()
                processes += [*([parent] if parent is not None and "slurmstepd" in parent.name() else []), process]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_on(self, process, node):
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_here = environment.get("SLURM_CONF") == str(self.folder / "slurm.conf")
            return is_here and environment.get("SLURMD_NODENAME") == node
        return False


def wait_for(condition, seconds=PATIENCE_S):
    pause, end = threading.Event(), time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it has not happened"
        pause.wait(0.1)
    return value


def workers(lab, place=None):
    """Yield the daemons of workers in this cluster, at one place or at all places."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_worker = words[:1] == [sys.executable] and "ddlf.cli.worker" in words
            is_here = is_worker and process.environ().get("SLURM_CONF") == lab.environment["SLURM_CONF"]
            if is_here and (place is None or words[words.index("--place") + 1] == str(place)):
                yield process
