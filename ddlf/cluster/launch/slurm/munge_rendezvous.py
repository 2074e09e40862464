"""A meeting point for tasks of Slurm without a shared folder. MUNGE, which Slurm itself uses, keeps the token secret.

The master listens on one of a few ports of its node. The job's id chooses them, so the other tasks know them. The node is
the first one of the step. To each connection the master sends a credential of MUNGE, and reads nothing. The credential
contains the job's id, the gate's addresses and the token. MUNGE encrypts it, decodes it only for this user on nodes of
this cluster, and names the user who has made it. So a stranger who connects learns nothing. A stranger who listens on
the port is recognised, and so is another job of this user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Mapping

from ddlf.cluster.launch.rendezvous import Meeting, MeetingPoint
from ddlf.cluster.launch.slurm.commands import call

log = logging.getLogger(__name__)

FIRST_PORT = 20000
"""Linux gives ports from 32768 on to programs that ask for any port, so these are usually free."""
PORTS_OF_JOB = 8
JOBS = 1000
ANSWER_S = 3.0
"""Seconds to wait for a credential at one port."""
MUNGE_S = 10.0
PAUSE_S = 1.0
"""Seconds between two looks at the ports."""
MOST_BYTES = 64 * 1024
"""Longest credential that is read."""


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's short form, such as ``r0n3`` of ``r[0-1]n[3,5-7],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")


def ports_of(job: str) -> range:
    """Return the ports where the master of a job may listen. Two jobs on one node may have the same ones."""
    begin = FIRST_PORT + zlib.crc32(job.encode()) % JOBS * PORTS_OF_JOB
    return range(begin, begin + PORTS_OF_JOB)


def munged(job: str, environment: Mapping[str, str]) -> list[MeetingPoint]:
    """Return this meeting point, or none if all tasks run on one node, which has one folder."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    several = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1) > 1
    return [MungedPorts(first_host(nodes), job)] if several and nodes else []


class MungedPorts(MeetingPoint):
    """The ports of the node with the master.

    Args:
        host: Name of that node.
        job: A text that no other job on this cluster has.
    """

    def __init__(self, host: str, job: str) -> None:
        self._host = host
        self._job = job
        self._ports = ports_of(job)
        self._listener: socket.socket | None = None
        self._reason = "nobody has looked there"
        self._look_at = 0.0

    def open(self, meeting: Meeting) -> None:
        """Listen, if this node has MUNGE. Otherwise the tasks must share a folder, which a task without one says."""
        if shutil.which("munge") is None:
            return
        for port in self._ports:
            with contextlib.suppress(OSError):
                self._listener = _listen(port)
                break
        if self._listener is None:
            log.warning(
                "ports %d to %d are all in use, so tasks on other nodes need a shared folder", *self._end_ports()
            )
            return
        telling = threading.Thread(target=self._tell, args=(self._listener, meeting), name="ddlf-meeting", daemon=True)
        telling.start()

    def _tell(self, listener: socket.socket, meeting: Meeting) -> None:
        payload = meeting.encode(job=self._job)
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # it was closed
                return
            with sock, contextlib.suppress(OSError, subprocess.SubprocessError):
                sock.settimeout(ANSWER_S)
                # Each task gets its own: MUNGE decodes a credential only once on a node.
                sock.sendall(_munge("munge", f"--restrict-uid={os.geteuid()}", stdin=payload))

    def forget_facts(self) -> None:
        """Do nothing: no task can use the credential of another one."""

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which ends ``accept``
            listener.close()

    def find(self) -> Meeting | None:
        if time.monotonic() < self._look_at:
            return None
        try:
            return asyncio.run(self._look())
        finally:
            self._look_at = time.monotonic() + PAUSE_S

    async def _look(self) -> Meeting | None:
        if shutil.which("unmunge") is None:
            self._reason = "this node has no munge"
            return None
        host = await _address(self._host)
        answers = await asyncio.gather(*(self._ask(host, port) for port in self._ports), return_exceptions=True)
        credentials = [answer for answer in answers if isinstance(answer, bytes) and answer]
        unknown = any(isinstance(answer, socket.gaierror) for answer in answers)
        self._reason = "this name cannot be resolved" if unknown else "nobody answers there"
        for credential in credentials:
            meeting, self._reason = await asyncio.to_thread(self._read, credential)
            if meeting is not None:
                return meeting
        return None

    async def _ask(self, host: str, port: int) -> bytes:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                answer = b""
                while len(answer) < MOST_BYTES and (part := await reader.read(MOST_BYTES)):
                    answer += part
                return answer
            finally:
                writer.close()

    def _read(self, credential: bytes) -> tuple[Meeting | None, str]:
        """Return the facts in a credential of this user's job; None and the reason if it is another one."""
        try:
            output = _munge("unmunge", "--numeric", "--keys=UID", stdin=credential)
        except subprocess.CalledProcessError as error:
            return None, f"what answers there cannot be trusted ({error.stderr.decode(errors='replace').strip()})"
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"unmunge failed ({error})"
        metadata, _, payload = output.partition(b"\n\n")
        uid = re.fullmatch(rb"UID:\s*(\d+)\s*", metadata)
        if uid is None or int(uid[1]) != os.geteuid():
            return None, "a program of another user answers there"
        meeting = Meeting.decode(payload, job=self._job)
        return meeting, "" if meeting is not None else "another job of this user answers there"

    def is_over(self) -> bool:
        return False  # the master tells the worker at the gate

    def reason(self) -> str:
        return "no master at {}, ports {} to {}: {}".format(self._host, *self._end_ports(), self._reason)

    def _end_ports(self) -> tuple[int, int]:
        return self._ports[0], self._ports[-1]


async def _address(host: str) -> str:
    """Return the address of a node. Its name is enough where a name service knows it; otherwise Slurm knows more."""
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        if shutil.which("scontrol"):
            _, output, _ = await call("scontrol", "--oneliner", "show", "node", host)
            if match := re.search(r"\bNodeAddr=(\S+)", output):
                return match[1]
    return host


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _munge(*command: str, stdin: bytes) -> bytes:
    process = subprocess.run(command, input=stdin, capture_output=True, timeout=MUNGE_S, check=True)
    return process.stdout
