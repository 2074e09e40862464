"""Tests of ``ddlf doctor``. Daemons are real and run in this process; the facts of machines are invented."""

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from ddlf.cli import doctor as module
from ddlf.cli.doctor import doctor, examine
from ddlf.cli.main import parse
from ddlf.cluster.launch.launcher import OWN, Check, Launcher, WorkersMissing
from ddlf.cluster.launch.launcher import Workers as Count
from ddlf.errors import ConnectError
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import MAGIC, PREAMBLE, VERSION, Role
from ddlf.rpc.tokens import Tokens, new_token
from ddlf.testing.in_process import InProcessDaemon
from ddlf.testing.network import Fault, FaultProxy
from ddlf.worker import daemon as daemon_module
from ddlf.worker.card_check import Checked
from ddlf.worker.lost_cards import forget_lost, lost_cards, remember_lost
from tests.cli.facts import GB, card, machine, with_cards
from tests.daemons import TOKEN, DaemonWithoutProcesses, connected
from tests.patience import PATIENCE_S
from tests.processes import command
from tests.trials.machines import Link, inside
from tests.trials.workers import Workers

SSH = b"SSH-2.0-OpenSSH_9.2 and some more words\r\n"


@pytest.fixture(autouse=True)
def healthy_machine(tmp_path, monkeypatch):
    """Set up a healthy machine, with a token and without a cluster file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine())
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine())
    monkeypatch.setattr(module, "MOST_PIECES", 4)
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)


@pytest.fixture
async def daemons():
    both = [DaemonWithoutProcesses(TOKEN) for _ in range(2)]
    yield both
    for daemon in both:
        await daemon.end()


@contextlib.asynccontextmanager
async def speaking(answer):
    """Yield a port with a program that sends ``answer`` to each caller, and then closes the connection."""

    async def speak(reader, writer):
        writer.write(answer)
        await reader.read(PREAMBLE.size)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def options(*ports, timeout="30", more=()):
    hosts = ("--hosts", ",".join(f"127.0.0.1:{port}" for port in ports)) if ports else ()
    return parse(["doctor", *hosts, "--token-file", "token", "--timeout", timeout, *more])[1]


async def findings(*ports, **more):
    report = await examine(options(*ports, **more))
    assert report.exit_code == max((finding.exit_code for finding in report.findings), default=0)
    return report.findings


async def test_doctor_finds_nothing_in_a_healthy_cluster(daemons, capsys):
    assert await doctor(options(*(daemon.port for daemon in daemons))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("here      DDLF 0.1.0, Python 3.11.7, keras 3.15.1, tensorflow-cpu 2.21.0")
    assert "fingerprint" in lines[2]
    assert lines[3] == "cluster   --hosts (2 workers)"
    assert all(
        "the same versions; 4 cores, 8.0 of 16.0 GB memory free" in line and " MB/s" in line for line in lines[4:6]
    )
    assert lines[6:] == ["pairs     2 of 2 ways from worker to worker work", "", "nothing found"]
    assert TOKEN.decode() not in "".join(lines)


async def test_doctor_names_workers_with_other_source_of_the_same_version(daemons, monkeypatch, capsys):
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine(source="other"))
    assert await doctor(options(*(daemon.port for daemon in daemons))) == 1
    text = capsys.readouterr().out
    assert text.count("the same versions, other source of DDLF; 4 cores") == 2
    names = ", ".join(f"worker {n} (127.0.0.1:{daemon.port})" for n, daemon in enumerate(daemons, 1))
    assert f"warning   {names}: other source of DDLF 0.1.0 there than here: results may differ\n" in text
    assert text.count("start the worker again") == 1


async def test_doctor_names_workers_that_cannot_reach_each_other(daemons, free_port, monkeypatch):
    ports, addresses = [daemon.port for daemon in daemons], InProcessDaemon.addresses

    # No worker can reach the other one. If one of them could, both would use its connections.
    monkeypatch.setattr(InProcessDaemon, "addresses", lambda self: replace(addresses(self), port=free_port))
    finding, _ = await findings(*ports)
    assert finding.where == (f"worker 1 (127.0.0.1:{ports[0]})",)
    assert finding.what.startswith(f"it cannot reach worker 2 (127.0.0.1:{ports[1]}): ")
    assert "nothing listens there" in finding.what
    assert finding.exit_code == 1


async def test_doctor_skips_pairs_while_a_run_is_active(daemons, capsys):
    async with connected(daemons[1].port):
        assert await doctor(options(*(daemon.port for daemon in daemons))) == 0
    assert "pairs " not in capsys.readouterr().out


async def test_doctor_checks_only_this_machine_without_a_cluster(capsys, monkeypatch, free_port):
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port)
    assert await doctor(options()) == 0
    assert "cluster   none named, so no worker is asked\n\nnothing found\n" in capsys.readouterr().out


async def test_doctor_computes_on_each_card_that_can_be_used(monkeypatch, capsys, free_port):
    cards = [card(0), card(1, processes=[7]), card(2), card(3, free=GB // 2)]
    gpus = with_cards(*cards, seen=["0", "1", "3"], mask="0,1,3")
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine(gpus=gpus, keras_backend="jax"))
    results = {"GPU-0": Checked("Test Card", 51.2), "GPU-1": Checked(problem="jax cannot use it: no kernel image")}

    async def check(backend, uuid):
        assert backend == "jax"
        return results[uuid]

    monkeypatch.setattr(module, "check_card", check)
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port)
    assert await doctor(options()) == 1
    text = capsys.readouterr().out
    assert "cards     driver 580.159, for CUDA up to 13.0" in text
    assert "0 (Test Card), 15.0 of 16.0 GB memory free, 51.2 TFLOP/s in a matrix product with jax\n" in text
    assert "1 (Test Card), 15.0 of 16.0 GB memory free, used by process 7, fails, see below\n" in text
    assert "2 (Test Card), 15.0 of 16.0 GB memory free, hidden by CUDA_VISIBLE_DEVICES=0,1,3\n" in text
    assert "3 (Test Card), 0.5 of 16.0 GB memory free, not tried, see below\n" in text
    assert "this machine: the card 1 (Test Card): jax cannot use it: no kernel image" in text


@pytest.mark.parametrize(("cuda", "failures"), [("13.0", 1), ("11.4", 0)])
async def test_cards_that_fail_for_one_reason_have_one_finding(monkeypatch, capsys, free_port, cuda, failures):
    """An old driver explains the failures itself."""
    gpus = with_cards(card(0), card(1), cuda=cuda, build_cuda="12")
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine(gpus=gpus, keras_backend="jax"))

    async def check(backend, uuid):
        return Checked(problem="jax cannot use it: no kernel image")

    monkeypatch.setattr(module, "check_card", check)
    assert await doctor(parse(["doctor"])[1]) == 1
    text = capsys.readouterr().out
    assert text.count("this machine: the cards 0 (Test Card), 1 (Test Card): jax cannot use it") == failures
    assert text.count("no kernel image") == failures
    assert text.count("fails, see below") == 2
    assert text.count("install a driver for CUDA 12") == 1 - failures


async def test_doctor_lets_workers_take_a_repaired_card_again(monkeypatch, capsys, free_port):
    lost = "has fallen off the bus (Xid 79)"
    both = [card(0, lost=lost, free=0, memory=0), card(1, lost=lost, free=0, memory=0)]
    monkeypatch.setattr(
        module, "machine_facts", lambda folders=(): machine(gpus=with_cards(*both), keras_backend="jax")
    )

    async def check(backend, uuid):
        return Checked("Test Card", 51.2) if uuid == "GPU-0" else Checked(problem="jax cannot use it: no device")

    monkeypatch.setattr(module, "check_card", check)
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port)
    for uuid in ("GPU-0", "GPU-1"):
        remember_lost(uuid, lost)
    try:
        assert await doctor(options()) == 1
        assert [*lost_cards()] == ["GPU-1"]
    finally:
        forget_lost("GPU-1")
    text = capsys.readouterr().out
    assert (
        f"0 (Test Card), memory unknown, 51.2 TFLOP/s in a matrix product with jax\n          it was left alone, because it {lost}"
        in text
    )


async def test_doctor_names_unsupported_cards(monkeypatch, capsys, free_port):
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine(gpus=with_cards(others="AMD's (ROCm)")))
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port)
    assert await doctor(options()) == 0
    assert "cards     AMD's (ROCm)\n" in capsys.readouterr().out


async def test_doctor_says_that_a_framework_for_cards_has_none(monkeypatch, capsys, free_port):
    cards = with_cards(package="jax 0.10.2", build_cuda="12")
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine(gpus=cards))
    monkeypatch.setattr(module, "DEFAULT_PORT", free_port)
    assert await doctor(options()) == 0
    assert "cards     none of NVIDIA found; jax 0.10.2 could use one, with a driver\n" in capsys.readouterr().out


async def test_doctor_json_contains_all_facts(daemons, capsys, free_port):
    assert await doctor(options(daemons[0].port, free_port, more=["--json"])) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["machine"] == machine()
    assert [worker["machine"] for worker in report["workers"]] == [machine(), {}]
    assert report["workers"][0]["back_mbs"] > 0
    assert "connection refused" in report["workers"][1]["error"]
    assert [finding["level"] for finding in report["findings"]] == ["error"]


async def test_doctor_does_not_disturb_a_worker_in_use(daemons):
    port = daemons[0].port
    async with connected(port) as master:
        epoch = master.epoch
        report = await examine(options(port))
        (answer,) = report.answers
        assert report.findings == []
        assert answer.status.lease.state == "alive"
        assert answer.there_mbs is None
        assert answer.machine == machine()
        assert (await master.status()).lease.epoch == epoch
        assert await master.run_code("1 + 1") == 2


# -- the engine of a launcher ---------------------------------------------------------------------------------------------


class Engine(Launcher):
    """A launcher with running workers. A test chooses the answers of its engine."""

    ports = ()
    facts = (Check("Herd 1.0"),)
    error = None
    comes = True

    def __init__(self, text, workers=None):
        self.text, self.workers = text, workers
        self.tokens = Tokens((TOKEN,), source="a token of this run")
        self.addresses = [("127.0.0.1", port) for port in self.ports] or [("127.0.0.1", 1)]
        self.calls = []
        Engine.last = self

    @classmethod
    def from_text(cls, text, workers=None):
        if workers is None and "workers" not in text:
            raise WorkersMissing("launcher herd needs the number of workers")
        return cls(text, workers)

    @classmethod
    def from_keys(cls, values):
        return cls.from_text("", values.get("workers"))

    async def check(self):
        for fact in self.facts:
            yield fact

    async def start(self, modules=()):
        self.calls.append("start")
        if self.error is not None:
            raise self.error
        if not self.comes:
            await asyncio.Event().wait()
        return self.addresses

    async def waits(self, index):
        return "it grazes"

    async def stop(self):
        self.calls.append("stop")


@pytest.fixture
def herd(monkeypatch):
    """Register the launcher ``herd``; a test may change its class."""
    monkeypatch.setitem(OWN, "herd", "tests.cli.test_doctor:Engine")
    return lambda **how: [monkeypatch.setattr(Engine, name, value) for name, value in how.items()]


def of_herd(*more):
    return parse(["doctor", "--launcher", "herd", "--timeout", "30", *more])[1]


async def test_doctor_starts_workers_of_a_launcher_asks_them_and_ends_them(daemons, herd, capsys):
    herd(ports=[daemon.port for daemon in daemons])
    assert await doctor(of_herd("--workers", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:5] == ["launcher  herd", "          Herd 1.0", "workers   2 to start, for at most 120 s"]
    assert "worker 2" in lines[7]
    assert "the same versions" in lines[7]
    assert lines[-1] == "nothing found"
    assert (Engine.last.calls, Engine.last.workers) == (["start", "stop"], Count(2, 2))


async def test_doctor_starts_no_worker_after_a_problem_of_the_engine(herd, capsys):
    herd(facts=(Check("Herd 1.0"), Check("the herd has no dog", "buy one", 2)))
    assert await doctor(of_herd()) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "          the herd has no dog, see below" in lines
    assert lines[-2:] == ["error     herd: the herd has no dog", "     try  buy one"]
    assert (Engine.last.calls, Engine.last.workers) == ([], Count(1, 1))


async def test_doctor_reports_why_workers_of_a_launcher_do_not_start(herd):
    herd(error=ConnectError("place 0: No such file or directory: python9"))
    (finding,) = (await examine(of_herd())).findings
    assert (finding.where, finding.what, finding.exit_code) == (
        ("herd",),
        "place 0: No such file or directory: python9",
        ConnectError.exit_code,
    )
    assert finding.do == "correct that, and run this command again"
    assert Engine.last.calls == ["start", "stop"]


async def test_doctor_names_the_reason_of_a_waiting_engine_when_the_time_is_over(herd, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.01)
    herd(comes=False)
    (finding,) = (await examine(of_herd())).findings
    assert (finding.level, finding.what) == ("warning", "its workers have not started within 0.01 s: it grazes")
    assert Engine.last.calls == ["start", "stop"]


async def test_doctor_asks_the_launcher_of_a_cluster_file(daemons, herd, tmp_path, capsys):
    herd(ports=[daemons[0].port])
    (tmp_path / "cluster.yaml").write_text("launcher: {herd: {}}\n")
    assert await doctor(parse(["doctor", "--timeout", "30", "--json"])[1]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["launcher"], [check["fact"] for check in report["checks"]]) == ("herd", ["Herd 1.0"])
    assert len(report["workers"]) == 1


async def test_doctor_names_a_launcher_that_cannot_be_used(tmp_path):
    (tmp_path / "cluster.yaml").write_text("launcher: nobody\n")
    (finding,) = (await examine(parse(["doctor"])[1])).findings
    assert finding.what == "there is no launcher 'nobody'"


async def test_doctor_refuses_options_without_effect(herd):
    (finding,) = (await examine(parse(["doctor", "--workers", "2"])[1])).findings
    assert finding.what == "--workers has no effect without --launcher"
    (finding,) = (await examine(of_herd("--token-file", "token"))).findings
    assert finding.what.startswith("--token-file has no effect with a launcher")


# -- faults, each with its remedy -----------------------------------------------------------------------------------------


async def test_doctor_reports_a_closed_port(free_port):
    (finding,) = await findings(free_port)
    assert finding.what == "connection refused, nothing listens there"
    assert finding.do == f"start the worker there with: ddlf-worker --port {free_port}"
    assert (finding.level, finding.exit_code) == ("error", 3)
    assert finding.where == (f"worker 1 (127.0.0.1:{free_port})",)


async def test_doctor_reports_a_wrong_token():
    daemon = DaemonWithoutProcesses(new_token().encode())
    (finding,) = await findings(daemon.port)
    assert finding.what == "the worker has another token than this side"
    assert "copy the same token file to both machines" in finding.do
    assert finding.exit_code == 4
    await daemon.end()


async def test_doctor_reports_a_readable_token(tmp_path, free_port):
    (tmp_path / "token").chmod(0o644)
    (finding,) = await findings(free_port)
    assert finding.what == "token file token is readable by others (0644)"
    assert finding.do == "run 'chmod 600 token'"
    assert finding.exit_code == 4


async def test_doctor_reports_another_protocol():
    async with speaking(PREAMBLE.pack(MAGIC, 9, 0, Role.CONTROL, 0)) as port:
        (finding,) = await findings(port)
    this_side = ".".join(map(str, VERSION))
    assert f"the other side speaks protocol 9.0, this side {this_side}" in finding.what
    assert finding.do == "install the same version of ddlf on both"
    assert finding.exit_code == 4


async def test_doctor_reports_another_program_on_the_port():
    async with speaking(SSH) as port:
        (finding,) = await findings(port)
    assert finding.what == "another program listens there, not a DDLF worker"


async def test_doctor_reports_another_program_on_the_default_port(monkeypatch):
    async with speaking(SSH) as port:
        monkeypatch.setattr(module, "DEFAULT_PORT", port)
        (finding,) = await findings()
    assert finding.what == f"another program has port {port}, which ddlf-worker would take"
    assert finding.do.endswith(f"ddlf-worker --port {port + 1}")


async def test_doctor_accepts_a_worker_on_the_default_port(daemons, monkeypatch):
    monkeypatch.setattr(module, "DEFAULT_PORT", daemons[0].port)
    assert await findings() == []


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (dict(python="3.12.0"), "Python 3.12.0 there, 3.11.7 here"),
        (dict(ddlf="0.0.9"), "DDLF 0.0.9 there, 0.1.0 here"),
        (
            dict(packages={**machine()["packages"], "tensorflow": "2.21.0"}),
            "tensorflow 2.21.0 and tensorflow-cpu 2.21.0 are both",
        ),
        (dict(without_bytecode=["tensorflow"]), "there is no bytecode of tensorflow"),
        (dict(disks=[{"folder": "/tmp", "size": GB, "free": 1}]), "the disk of /tmp has 0.0 GB of 1.0 GB left"),
        (dict(memory_free=1), "0.0 GB of 16.0 GB memory is free"),
    ],
)
async def test_doctor_reports_problems_of_a_workers_machine(daemons, monkeypatch, facts, sentence):
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine(**facts))
    (finding,) = await findings(*(daemon.port for daemon in daemons))
    assert sentence in finding.what
    assert finding.where == tuple(f"worker {n} (127.0.0.1:{daemon.port})" for n, daemon in enumerate(daemons, 1))


async def test_doctor_reports_a_shared_problem_once(daemons, monkeypatch):
    monkeypatch.setattr(module, "machine_facts", lambda folders=(): machine(memory_free=1))
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine(memory_free=2))
    (finding,) = await findings(daemons[0].port)
    assert finding.where == ("this machine", f"worker 1 (127.0.0.1:{daemons[0].port})")


async def test_doctor_reports_a_wrong_clock(daemons, monkeypatch):
    class Clock:
        strftime, monotonic = time.strftime, time.monotonic

        @staticmethod
        def time():
            return time.time() + 37

    monkeypatch.setattr(daemon_module, "time", Clock)
    (finding,) = await findings(daemons[0].port)
    assert finding.what.startswith("its clock is 37 s ahead of this machine's")
    assert "timedatectl set-ntp true" in finding.do


async def test_doctor_reports_a_slow_link(daemons, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 1)
    async with FaultProxy("127.0.0.1", daemons[0].port) as proxy:
        proxy.set(Fault(bytes_per_s=2e6))
        (finding,) = await findings(proxy.port)
    assert finding.where == (f"worker 1 (127.0.0.1:{proxy.port})",)
    to, back = (float(part.split()[0]) for part in finding.what.split(", "))
    assert 0 < to < 4
    assert 0 < back < 4
    assert "check its cable" in finding.do


async def test_doctor_ignores_a_momentary_slowdown(daemons, monkeypatch):
    speeds = iter([0.2, 50.0, 500.0, 0.3, 0.4, 40.0])

    async def once(worker, data, size):
        return next(speeds)

    monkeypatch.setattr(module, "_speed_once", once)
    report = await examine(options(daemons[0].port))
    assert report.findings == []
    assert (report.answers[0].there_mbs, report.answers[0].back_mbs) == (500.0, 40.0)


async def test_doctor_reports_an_older_worker(daemons, monkeypatch):
    monkeypatch.setattr(daemon_module, "SLOW", tuple(name for name in daemon_module.SLOW if name != "machine"))
    (finding,) = await findings(daemons[0].port)
    assert finding.what == "it runs an older DDLF, which cannot be asked what it has installed"
    assert finding.do == "install the same version of ddlf on both"


async def test_doctor_names_slow_workers(daemons, monkeypatch):
    async def slow(host, port, timeout_s, **options):
        if port == daemons[1].port:
            await asyncio.wait_for(named.wait(), PATIENCE_S)
        return await reach(host, port, timeout_s, **options)

    def say(line):
        # On a busy machine, worker 1 may be late, too.
        if line.startswith("          waiting for ") and line.endswith(f"worker 2 (127.0.0.1:{daemons[1].port})"):
            named.set()

    named, reach = asyncio.Event(), dial.__globals__["connect_to"]
    monkeypatch.setattr(module, "LONG_S", 0.3)
    monkeypatch.setitem(dial.__globals__, "connect_to", slow)
    report = await examine(options(*(daemon.port for daemon in daemons)), say)
    assert report.findings == []
    assert named.is_set()


async def test_doctor_waits_once_for_all_dead_workers(daemons, monkeypatch):
    dialled = []

    async def silence(host, port, timeout_s, **options):
        dialled.append(port)
        if port == daemons[0].port:
            return await reach(host, port, timeout_s, **options)
        if len(dialled) == 6:
            all_dialled.set()
        await asyncio.wait_for(all_dialled.wait(), PATIENCE_S)  # the workers are dialled at the same time
        raise module.ConnectError("does not answer within 5 s", hint="check the address")

    all_dialled, reach = asyncio.Event(), dial.__globals__["connect_to"]
    monkeypatch.setitem(dial.__globals__, "connect_to", silence)
    ports = [daemons[0].port, 1, 2, 3, 4, 5]
    (finding,) = await findings(*ports)
    assert sorted(dialled) == sorted(ports)
    assert len(finding.where) == 5


async def test_doctor_reports_mistakes_in_the_cluster_file(tmp_path):
    (tmp_path / "cluster.yaml").write_text("workers: [127.0.0.1:99999]\n")
    (finding,) = await findings()
    assert finding.what == "cluster.yaml:1:11: port must be 1-65535, got 99999"
    assert finding.exit_code == 2


def limit(link, rate):
    """Limit the rate of a cable in both directions."""
    for end in (link.a, link.b):
        shape = f"dev cable root tbf rate {rate} burst 32kb latency 200ms".split()
        subprocess.run(["ip", "netns", "exec", end, "tc", "qdisc", "add", *shape], check=True)


@pytest.mark.slow
async def test_doctor_reports_a_slow_cable_between_two_machines(monkeypatch):
    monkeypatch.undo()
    with Link() as link, inside(link.a), Workers() as workers:
        _, port = workers.start(host=link.address_b, namespace=link.b)

        async def current_findings():
            hosts = ["--hosts", f"{link.address_b}:{port}", "--token-file", str(workers.token_file)]
            report = await examine(parse(["doctor", *hosts])[1])
            assert report.answers[0].error is None
            # the memory of the machine that runs the tests does not matter
            return [finding for finding in report.findings if "memory" not in finding.what]

        assert await current_findings() == []
        limit(link, "40mbit")
        (finding,) = await current_findings()
        to, back = (float(part.split()[0]) for part in finding.what.split(", "))
        assert 1 < to < 6
        assert 1 < back < 6
        assert "check its cable" in finding.do


@pytest.mark.slow
def test_doctor_has_findings_only_for_unhealthy_real_workers(start_worker, tmp_path):
    planted = tmp_path / "planted" / "tensorflow-9.9.9.dist-info"
    planted.mkdir(parents=True)
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 9.9.9\n")
    well, killed, odd = start_worker(), start_worker(), start_worker(PYTHONPATH=str(planted.parent))

    def examined(*workers):
        hosts = ",".join(f"127.0.0.1:{worker.port}" for worker in workers)
        ended = command("ddlf.cli.main", "doctor", "--hosts", hosts, "--token-file", well.token_file, "--json")
        # findings about the memory of the machine that runs the tests do not count
        findings = json.loads(ended.stdout)["findings"]
        return ended.returncode, [finding["what"] for finding in findings if "memory" not in finding["what"]]

    assert examined(well, killed) == (0, [])
    killed.end(signal.SIGKILL)
    assert examined(well, killed) == (3, ["connection refused, nothing listens there"])
    code, sentences = examined(well, odd)
    assert code == 1
    assert any(
        "tensorflow 9.9.9 and tensorflow-cpu" in sentence and "both installed" in sentence for sentence in sentences
    ), sentences
