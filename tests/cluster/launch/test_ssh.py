"""Tests of the launcher for ssh. A script replaces ssh, and runs the workers on this machine."""

import asyncio
import contextlib
import os
import sys

import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import Cause, Workers, from_keys, installed
from ddlf.cluster.launch.remote import Remote, explain
from ddlf.errors import ConfigError, ConnectError, WorkerLost
from tests.fake_ssh import fake_ssh, write_script
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def ssh(tmp_path, monkeypatch):
    fake_ssh(tmp_path, monkeypatch)


def launcher(*hosts, **keys):
    return from_keys("ssh", {"hosts": list(hosts), "python": sys.executable, **keys})


def number(self):
    return self.id


def cores(self):
    import os

    return os.environ["DDLF_CORES"], os.environ["GREETING"]


def processes(word):
    """Return the processes with this word in their command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in " ".join(process.cmdline()):
                yield process


async def test_hosts_get_workers_in_turns_that_end_with_the_run(descendants):
    ssh = launcher("pc01", "pc02", workers=3, cores=1, env={"GREETING": 'it\'s "good"'})
    assert ssh.names == ["pc01", "pc02", "pc01 (2)"]
    async with asyncio.timeout(PATIENCE_S), Cluster(ssh) as cluster:
        assert await cluster.run_method(number) == [1, 2, 3]
        assert await cluster.run_method(cores) == [("1", 'it\'s "good"')] * 3
        assert [worker.label for worker in cluster.workers] == ssh.names
        assert list(processes(ssh.tokens.primary.decode())) == []
        assert ssh.gate.host == "127.0.0.1"


def test_default_number_of_workers_is_the_number_of_hosts():
    assert len(installed("ssh:hosts=pc01,pc02").addresses) == 2
    launcher = installed("ssh:hosts=pc01,pc02", Workers(2, 5))
    assert ([host for host, _ in launcher.addresses], launcher.least) == (["pc01", "pc02", "pc01", "pc02", "pc01"], 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "launcher ssh needs the key 'hosts'"),
        ("hosts=", "hosts must name at least one host"),
        ("hosts=pc01,pc01", "hosts names pc01 twice; for more workers than hosts give their number"),
        ("hosts=-oProxyCommand=x", "hosts must be names that ssh knows, got '-oProxyCommand=x'"),
        ("hosts=r[0-1]n[3,5-7]", "hosts must be single names, because ssh expands no lists, got 'r[0-1]n[3'"),
        ("hosts=pc[01-04]", "hosts must be single names, because ssh expands no lists, got 'pc[01-04]'"),
        ("hosts=a b", "hosts must be names that ssh knows, got 'a b'"),
        ("hosts=pc01,python=$(x)", "python must be the path of a Python there"),
        ("hosts=pc01,network=ib0", "launcher ssh has no key 'network'"),
        ("hosts=pc01,env.A-B=c", "launcher ssh: env must have names of environment variables, got 'A-B'"),
        ("hosts=pc01,cores=0", "cores must be at least 1, got '0'"),
    ],
)
def test_keys_are_checked(text, sentence):
    with pytest.raises(ConfigError) as caught:
        installed(f"ssh:{text}")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("refused", "refused: ssh: connect to host refused port 22: Connection refused"),
        ("unknown", "unknown: ssh: Could not resolve hostname unknown: Name or service not known; check the name"),
        ("newkey", "newkey: its host key is unknown; connect once yourself and compare the key: ssh newkey"),
        ("changed", "changed: its host key has changed; if you trust the new key: ssh-keygen -R changed"),
        ("nokey", "nokey: ann@nokey: Permission denied (publickey,password); ssh must need no password here"),
        ("noforward", "remote port forwarding failed for listen port 0; allow it there: AllowTcpForwarding"),
    ],
)
async def test_words_of_ssh_are_in_the_error(host, sentence, descendants):
    with pytest.raises(ConnectError) as caught:
        await asyncio.wait_for(Cluster(launcher(host)).connect(), PATIENCE_S)
    assert str(caught.value).startswith("place 0: ")
    assert sentence in str(caught.value)


async def test_missing_python_is_named():
    with pytest.raises(ConnectError, match=r"pc01: /no/python cannot run there: .*not found; name another Python with"):
        await asyncio.wait_for(Cluster(launcher("pc01", python="/no/python")).connect(), PATIENCE_S)


async def test_old_python_is_named(tmp_path):
    write_script(tmp_path / "python", "#!/bin/sh\nexit 98\n")
    with pytest.raises(ConnectError, match=r"pc01: .*/python there is older than Python 3\.7"):
        await asyncio.wait_for(Cluster(launcher("pc01", python=str(tmp_path / "python"))).connect(), PATIENCE_S)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("__version__ = '9.9'", r"pc01: it has DDLF 9\.9, and the master has DDLF .*; install the same version"),
        ("raise ImportError", r"pc01: .* has no DDLF; install it there with 'ddlf up --install'"),
    ],
)
async def test_wrong_ddlf_gets_no_token(tmp_path, monkeypatch, text, sentence):
    (tmp_path / "ddlf.py").write_text(text)
    sent = []
    monkeypatch.setattr(Remote, "send", lambda remote, line, send=Remote.send: (sent.append(line), send(remote, line)))
    ssh = launcher("pc01", env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ConnectError, match=sentence):
        await asyncio.wait_for(Cluster(ssh).connect(), PATIENCE_S)
    assert len(sent) == 1
    assert ssh.tokens.primary not in sent[0]


def test_hosts_without_their_key_are_explained():
    with pytest.raises(ConfigError, match="'pc01' is not KEY=VALUE; as in: --launcher ssh:hosts=pc01,pc02"):
        installed("ssh:pc01,pc02")


async def test_run_begins_without_a_machine_that_it_does_not_need(descendants, caplog):
    async with asyncio.timeout(PATIENCE_S), Cluster(launcher("pc01", "unknown", workers="1..2")) as cluster:
        assert await cluster.run_method(number) == [1]
    assert "place 1 gets no worker any more: unknown: ssh: Could not resolve hostname" in caplog.text


@pytest.mark.slow
async def test_cluster_connects_again_when_machines_wait_for_their_login(monkeypatch, descendants):
    # so that one login waits, which binds a lock to its event loop
    monkeypatch.setattr("ddlf.cluster.launch.ssh.CONNECTING", 1)
    cluster = Cluster(launcher("pc01", "pc02"))
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S), cluster:
            assert await cluster.run_method(number) == [1, 2]


async def test_machine_that_does_not_answer_after_the_login_is_given_up(tmp_path, monkeypatch, descendants):
    monkeypatch.setattr(Remote.answer, "__defaults__", (0.2,))
    monkeypatch.setattr("ddlf.cluster.launch.engine.PAUSES_S", (0.01, 0.01))
    write_script(tmp_path / "python", "#!/bin/sh\nexec cat > /dev/null\n")
    with pytest.raises(ConnectError, match=r"place 0: pc01: it has not answered within 0\.2 s"):
        await asyncio.wait_for(Cluster(launcher("pc01", python=str(tmp_path / "python"))).connect(), PATIENCE_S)


async def test_ssh_that_never_forwards_a_port_is_ended(monkeypatch, descendants):
    monkeypatch.setattr(Remote.port, "__defaults__", (0.2,))
    monkeypatch.setattr("ddlf.cluster.launch.engine.PAUSES_S", (0.01, 0.01))
    with pytest.raises(
        ConnectError, match=r"place 0: silent: ssh has not forwarded a port there within 0\.2 s; to see .*: ssh -v"
    ) as caught:
        await asyncio.wait_for(Cluster(launcher("silent")).connect(), PATIENCE_S)
    assert "Permanently added" not in str(caught.value)


async def test_silent_machine_is_named_at_the_timeout(descendants):
    with pytest.raises(ConnectError, match=r"no worker joined at port \d+ within 0\.2 s: ssh connects to silent"):
        await asyncio.wait_for(Cluster(launcher("silent", start_timeout=0.2)).connect(), PATIENCE_S)


@pytest.mark.parametrize(
    ("killed", "words"),
    [
        pytest.param("exec sh -c", "its ssh client was ended by SIGKILL", id="ssh", marks=pytest.mark.slow),
        pytest.param("ddlf.cli.worker", "its worker was ended by SIGKILL", id="worker"),
    ],
)
async def test_killed_process_is_started_again(killed, words, descendants):
    ssh = launcher("pc01", "pc02")
    async with asyncio.timeout(PATIENCE_S), Cluster(ssh) as cluster:
        assert await cluster.run_method(number) == [1, 2]
        [client] = [p for p in psutil.Process().children() if "pc02" in ssh_arguments(p)]
        if killed == "ddlf.cli.worker":
            [client] = [p for p in client.children(recursive=True) if killed in p.cmdline()]
        client.kill()
        while (left := await ssh.left(1)) is None:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        assert (left.words, left.cause) == (f"pc02: {words}", Cause.CRASH)
        while True:
            with contextlib.suppress(WorkerLost, ConnectError):
                await cluster.workers[1].reconnect()
                assert await cluster.run_method(number) == [1, 2]
                break


def ssh_arguments(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


async def test_master_without_ssh_gets_an_error(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ConfigError, match="there is no ssh on this machine; install the OpenSSH client"):
        await Cluster(launcher("pc01")).connect()


def test_ends_of_ssh_are_explained():
    lost = explain("pc01", 255, ["Welcome", "Timeout, server pc01 not responding."])
    assert (lost.sentence, lost.is_final) == ("pc01: Timeout, server pc01 not responding.", False)
    assert explain("pc01", 255, []).sentence == "pc01: ssh lost the connection"
    through_jump_host = explain(
        "pc01", 255, ["ssh: connect to host gate port 22: Connection refused", "Connection closed by UNKNOWN"]
    )
    assert through_jump_host.sentence == "pc01: ssh: connect to host gate port 22: Connection refused"
    assert explain("pc01", 137, ["Killed"]).sentence == "pc01: its worker was ended by SIGKILL"
    assert explain("pc01", 3, ["a", "b"]).sentence == "pc01: its worker ended with exit code 3:\na\nb"


async def test_check_tries_each_host_and_its_connection_back():
    facts = [check async for check in launcher("pc01", "noforward", "nokey").check()]
    assert [bool(check.do) for check in facts] == [False, False, True, True]
    assert facts[1].fact.startswith("pc01: ")
    assert "has the same DDLF, and its connection leads back to this machine" in facts[1].fact
    assert facts[2].do == "allow it there: AllowTcpForwarding in sshd_config"
    assert "ssh must need no password here" in facts[3].do


async def test_check_names_a_host_with_another_ddlf(tmp_path, monkeypatch):
    (tmp_path / "ddlf.py").write_text("__version__ = '9.9'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = [check async for check in launcher("pc01").check() if check.do]
    assert check.fact.startswith("pc01: it has DDLF 9.9, and the master has DDLF")
