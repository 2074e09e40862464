"""Tests of attacks on real workers by a stranger who does not have the token."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import AuthError, ConnectError
from ddlf.rpc.dial import dial, open_socket
from ddlf.rpc.handshake import HELLO, PREAMBLE, PROOF_BYTES, Hello, Role
from ddlf.rpc.messages import Kind, Limits, dumps, encode_frame
from ddlf.rpc.stream import receive_exactly
from ddlf.rpc.tls import make_certificate
from ddlf.rpc.tokens import new_token
from tests.patience import PATIENCE_S
from tests.tls import Relay, far_apart

pytestmark = pytest.mark.usefixtures("new_processes")

ROOT = Path(__file__).parents[2]
# The daemon and the executor load this hook from ``sitecustomize``, which each Python imports at its start.
WATCH = """
import os, sys
def watch(event, arguments):
    if event.startswith("pickle.") or event in ("exec", "compile", "os.system", "subprocess.Popen"):
        if os.path.exists(FLAG):
            os.write(2, f"REACHED {event} {arguments}".encode())
sys.addaudithook(watch)
"""


async def say(port: int, data: bytes) -> bytes:
    """Send bytes to a worker, and return its answer up to the end of the connection."""
    sock = await open_socket("127.0.0.1", port)
    answer = b""
    with sock, contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(sock, data)
        async with asyncio.timeout(PATIENCE_S):
            while byte := await receive_exactly(sock, 1):
                answer += byte
    return answer


@pytest.mark.parametrize("role", list(Role))
async def test_code_that_is_sent_without_the_token_is_never_reached(start_worker, token_file, tmp_path, role):
    flag = tmp_path / "watching"
    (tmp_path / "sitecustomize.py").write_text(WATCH.replace("FLAG", repr(str(flag))))
    worker = start_worker(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}")
    log = next(worker.state_dir.glob("port-*/executor.log"))
    frames = encode_frame(Kind.REQUEST, 1, "run_code", dumps([["1 + 1"], {}]), limits=Limits())
    code, hello = b"".join(frames), Hello(role, os.urandom(32), 1000).encode()
    flag.touch()
    answers = [await say(worker.port, data) for data in (code, hello + code, hello + bytes(32) + code)]
    # No worker can join another worker, so it answers with its preamble only.
    length = PREAMBLE.size if role is Role.JOIN else HELLO.size + PROOF_BYTES + 1
    assert [len(answer) for answer in answers] == [0, length, length]
    assert "REACHED" not in worker.output + log.read_text()
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        assert await cluster.run_code("1 + 1") == [2]
    assert "REACHED exec" in log.read_text(), "a call with the token triggers the hook, so the hook works"


async def test_thousand_wrong_tokens_open_nothing(start_worker, token_file):
    worker = start_worker()
    limit = asyncio.Semaphore(8)

    async def guess():
        async with limit:
            with pytest.raises(AuthError, match="the worker has another token than this side"):
                await dial("127.0.0.1", worker.port, Role.CONTROL, new_token().encode(), max_message_bytes=1000)

    await asyncio.gather(*(guess() for _ in range(1000)))
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        assert await cluster.run_code("1 + 1") == [2]
    assert worker.output.count("token mismatch") == 1, "one line a minute"


async def test_session_between_machines_shows_neither_token_nor_data(start_worker, token_file, tmp_path):
    make_certificate(tmp_path / "c.pem")
    worker = start_worker("--tls-cert", str(tmp_path / "c.pem"), "--tls-key", str(tmp_path / "c.pem"))
    marker = "a secret that only the two ends may know"
    with far_apart():
        async with (
            Relay(worker.port) as relay,
            Cluster(["127.0.0.1"], relay.port, token_file=token_file) as cluster,
        ):
            await cluster.set_variable("marker", marker * 1000)
            assert await cluster.get_variable("marker") == [marker * 1000]
            (status,) = await cluster.status()
            assert (status.tls, status.insecure_plaintext) == (True, False)
    assert len(relay.heard) > 80_000
    for secret in (marker.encode(), token_file.read_bytes().strip(), b"set_variable", b"run_"):
        assert secret not in relay.heard


def test_token_from_the_environment_cannot_be_read_anywhere(tmp_path, own_folders):
    """Search arguments, environments, logs, state and core dumps of the daemon, the executor and a process of user code."""
    token = new_token()
    state = tmp_path / "state"
    script = f"""
import asyncio, os
os.environ["DDLF_TOKEN"] = {token!r}
from ddlf import Cluster

def start(self):
    import os, subprocess
    child = subprocess.Popen(["sleep", "60"])
    os.write(2, b"a line of the executor\\n")
    return child.pid

async def main():
    async with Cluster(["127.0.0.1"], PORT) as cluster:
        print(*await cluster.run_method(start))
        (status,) = await cluster.status()
        print(status.executor_pid)

asyncio.run(main())
"""
    daemon = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.worker", "--port", "0", "--state-dir", str(state), "--host", "127.0.0.1"],
        env={**os.environ, "DDLF_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ready = daemon.stdout.readline()
        port = re.search(r":(\d+),", ready).group(1)
        done = subprocess.run(
            [sys.executable, "-"],
            input=script.replace("PORT", port),
            text=True,
            capture_output=True,
            cwd=ROOT,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        child, executor = map(int, done.stdout.split())
        answer = asyncio.run(ask_with_another_token(int(port)))
        assert token not in answer
        for pid in (daemon.pid, executor, child):
            for name in ("cmdline", "environ"):
                shown = Path(f"/proc/{pid}/{name}").read_bytes()
                assert token.encode() not in shown, (pid, name)
            assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
        os.kill(executor, signal.SIGSEGV)  # its last output goes to the log
        psutil.Process(child).wait(PATIENCE_S)
    finally:
        daemon.terminate()
        output, _ = daemon.communicate(timeout=PATIENCE_S)
    written = [path for path in state.rglob("*") if path.is_file()]
    assert any(path.name == "executor.log" for path in written)
    for text in (output, ready, done.stdout, done.stderr, *(path.read_text(errors="replace") for path in written)):
        assert token not in text


async def ask_with_another_token(port: int) -> str:
    try:
        await dial("127.0.0.1", port, Role.CONTROL, b"x" * 43, max_message_bytes=1000)
    except AuthError as error:
        return str(error)
    raise AssertionError("it was let in")


async def test_what_a_worker_keeps_can_be_read_by_its_owner_only(start_worker):
    worker = start_worker("--host", "0.0.0.0")
    for path in (worker.state_dir / "certificate.pem", *worker.state_dir.glob("port-*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def comes_into(log: Path, text: str, timeout_s: float = PATIENCE_S) -> bool:
    """Return whether a text appears in a file within some seconds."""
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    return text in log.read_text()


async def test_a_worker_without_descriptors_says_so_once_and_recovers(start_worker, token_file):
    worker = start_worker()
    process = psutil.Process(worker.process.pid)
    in_use = process.num_fds()
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (in_use + 1, hard))
        waiting = [await asyncio.open_connection("127.0.0.1", worker.port) for _ in range(5)]
        assert await asyncio.to_thread(comes_into, worker.log, "cannot accept it: Too many open files")
        assert await cluster.run_code("1 + 1") == [2], "who is connected notices nothing"
        await asyncio.sleep(0.5)
        assert worker.output.count("Too many open files") == 1
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        for _, writer in waiting:
            writer.close()
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        assert await cluster.run_code("2 + 2") == [4]


@pytest.fixture
def worker_with_80_descriptors(token_file):
    """Return the port of a worker that can have 8 handshakes and 8 connections at a time."""
    read_fd, write_fd = os.pipe()
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)); sys.argv.pop(0)"
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{limited}; runpy.run_module('ddlf.cli.worker', run_name='__main__')"),
            *("ddlf-worker", "--port", "0", "--host", "127.0.0.1"),
            *("--token-file", str(token_file), "--ready-fd", str(write_fd)),
        ],
        pass_fds=(write_fd,),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(write_fd)
    with open(read_fd) as pipe:
        yield json.loads(pipe.readline())["port"]
    process.terminate()
    process.wait(PATIENCE_S)


async def test_a_connection_above_the_limit_is_refused_with_a_sentence(worker_with_80_descriptors, token_file):
    async def connect():
        token = token_file.read_bytes().strip()
        sock, _ = await dial("127.0.0.1", worker_with_80_descriptors, Role.CONTROL, token, max_message_bytes=1000)
        stack.enter_context(sock)
        return sock

    first_free = []
    with contextlib.ExitStack() as stack:
        first, *_ = [await connect() for _ in range(8)]
        with pytest.raises(ConnectError, match="the worker accepts no more connections; close other masters"):
            await connect()
        first.close()
        async with asyncio.timeout(PATIENCE_S):
            while not first_free:
                with contextlib.suppress(ConnectError):
                    first_free.append(await connect())


def test_package_excludes_versions_of_libraries_with_known_holes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["tensorflow"]]
    assert {"msgpack>=1.2.3", "keras>=3.14.1", "cryptography>=44.0.1"} <= set(requirements)
