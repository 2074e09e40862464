"""Tests of the ``ddlf`` command: its help, tokens, and commands about workers on other machines."""

import contextlib
import getpass
import json
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from ddlf.cli.bench import Way, slow, slow_pairs
from ddlf.cli.doctor import leased
from ddlf.cli.main import all_commands, main, parse
from ddlf.cli.workers import part_of_model, weights_held
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch.launcher import OWN
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import ConnectError, LeaseError
from ddlf.worker.activity import HeldPart, Shard
from tests.patience import PATIENCE_S
from tests.processes import command, is_listening, without_waits


def ddlf(*arguments, **environment):
    """Run the command, and check that it prints no traceback."""
    ended = command("ddlf.cli.main", *arguments, env={**os.environ, **environment})
    assert "Traceback" not in ended.stderr
    return ended


@pytest.fixture
def run_here(capsys):
    """Return a function that runs the command in this process. It is for output that needs no worker."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, out, err)

    return run


def named(*workers):
    """Return workers, and the options that name them."""
    hosts = ",".join(f"127.0.0.1:{worker.port}" for worker in workers)
    return workers, ["--hosts", hosts, "--token-file", str(workers[0].token_file)]


@pytest.fixture
def workers(start_worker):
    """Start two workers, which the test may end."""
    return named(start_worker(), start_worker())


@pytest.fixture
def standing(standing_workers):
    """Return two workers that several tests share, so a test must not end them."""
    return named(*standing_workers)


@pytest.fixture
def partly_reachable(standing, free_port):
    """Return one of the workers, with options that also name a port without a listener."""
    (first, _), _ = standing
    return first, ["--hosts", f"127.0.0.1:{first.port},127.0.0.1:{free_port}", "--token-file", str(first.token_file)]


def test_messages_show_worker_names_of_the_cluster_file(tmp_path, free_port):
    file, app = tmp_path / "cluster.yaml", tmp_path / "app.py"
    app.write_text("async def main(cluster): pass\n")
    file.write_text(
        f"name: lab\nworkers: [{{name: pc03, host: 127.0.0.1, port: {free_port}}}]\nrun: {{connect_timeout_s: 1}}\n"
    )
    ended = ddlf("status", "-c", file)
    assert ended.stdout.startswith("  1  pc03                   unreachable: 127.0.0.1:")
    assert ended.stdout.endswith("\nddlf up starts the workers of the cluster file that do not run\n")
    ended = ddlf("run", app, "-c", file)
    assert without_waits(ended.stdout) == f"cluster   lab, {file} (1 worker)\n"
    assert f"    1  pc03                   127.0.0.1:{free_port}: connection refused" in ended.stderr
    (worker,) = Cluster.from_config(file).workers
    assert worker.name == "worker 1 (pc03)"


@pytest.mark.parametrize("words", [("env",), ("plan", "app.py", "--local", "1"), ("scout", "app.py", "--local", "1")])
def test_command_fails_when_the_output_cannot_be_written(tmp_path, words):
    (tmp_path / "app.py").write_text("import ddlf\n\n\nclass App(ddlf.IApp):\n    batch_size = 8\n")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "ddlf", *words],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (ended.returncode, ended.stderr) == (1, "error  the output could not be written: No space left on device\n")


def test_python_m_ddlf_is_the_same_command():
    ended = command("ddlf", "--version")
    assert (ended.returncode, ended.stdout) == (0, ddlf("--version").stdout)
    assert command("ddlf", "runz").stderr.startswith("ddlf: unknown command 'runz', did you mean 'run'?")


def test_help_shows_first_steps_and_every_command(run_here):
    text = run_here("--help").stdout
    for word in (
        "run",
        "status",
        "bench",
        "stop",
        "clean",
        "token",
        "ddlf demo",
        "ddlf-worker --port 9000",
    ):
        assert word in text
    for name in ("run", "status", "bench", "stop", "clean", "token"):
        assert run_here(name, "--help").returncode == 0
    assert run_here("--version").stdout.startswith("ddlf 0.")
    assert json.loads(run_here("--schema").stdout)["title"] == "cluster.yaml of DDLF"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rnu"], "unknown command 'rnu', did you mean 'run'?"),
        (["xyz"], "unknown command 'xyz'; there are: run, "),
        (["-c", "x.yaml", "status"], "-c stands before the command; write: ddlf status -c ..."),
        (["stop", "--hosts", ""], "argument --hosts: names no worker, got ''"),
        (["run", "app.py", "--hosts", ","], "argument --hosts: names no worker, got ','"),
        (["run"], "the following arguments are required: APP"),
        (["run", "app.py", "--median"], "unknown option '--median', did you mean --merge median?"),
        (["run", "app.py", "--async"], "unknown option '--async', did you mean --mode async?"),
        (["token"], "an action is missing: new, paste, show"),
        (["token", "nwe"], "unknown action 'nwe', did you mean 'new'?"),
        (["run", "app.py", "--help", "downpuor"], "--help has no group 'downpuor', did you mean 'downpour'?"),
        (["train"], "unknown command 'train', did you mean 'ddlf run'?"),
        (["--hlep"], "unknown option '--hlep', did you mean --help?"),
        (["status", "--hosts", "a:1", "--config", "x"], "not allowed with argument"),
        (["status", "--timeout", "0"], "argument --timeout: must be 1 or more, got 0"),
        (["status", "--confgi", "x"], "unknown option '--confgi', did you mean --config?"),
        (["status", "--token", "x"], "tokens on the command line are visible to other users; use --token-file"),
        (["help", "WorkerLst"], "there is no help on 'WorkerLst', did you mean 'WorkerLost'?"),
        (["help", "rnu"], "there is no help on 'rnu', did you mean 'run'?"),
        (
            ["help", "nonsense"],
            "name a command of ddlf --help, an error such as WorkerLost, or options such as downpour",
        ),
        (["help", "downpour"], "'downpour' is a group of options: ddlf run --help downpour"),
        (["help", "train"], "did you mean 'ddlf run'?"),
        (["status", "--config", "nofile.yaml"], "nofile.yaml"),
        (["status", "--hosts", "127.0.0.1:99999"], "99999"),
        (["status", "--hosts", ","], "argument --hosts: names no worker"),
        (["status", "--hosts", "127.0.0.1:9,127.0.0.1:9"], "127.0.0.1:9 is named twice"),
        (["bench", "--pairs", "--hosts", "127.0.0.1:9"], "--pairs has no effect on one worker; name two or more"),
    ],
)
def test_wrong_command_line_is_one_sentence_and_exit_code_2(run_here, arguments, sentence):
    ended = run_here(*arguments)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) <= 3


def every_command():
    """Yield every command and action, with the words of its command line."""
    todo = [(f"ddlf {name}", entry.load()) for name, entry in all_commands().items()]
    for words, spec in todo:
        yield pytest.param(words, spec, id=words)
        todo += [(f"{words} {name}", action) for name, (_, action) in spec.actions.items()]


def test_help_lists_every_command_once_in_its_group(run_here):
    text = run_here("--help").stdout
    commands = all_commands()
    for title in {entry.group for entry in commands.values()}:
        group = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        names = [name for name, entry in commands.items() if entry.group == title]
        assert [line.split()[0] for line in group.splitlines()] == names


@pytest.mark.parametrize(("words", "spec"), list(every_command()))
def test_every_command_has_examples_that_can_be_parsed(words, spec):
    assert spec.examples
    assert spec.run or spec.actions
    for line in spec.examples:
        assert line.startswith(("ddlf ", "eval ", "ssh ")), line
        for part in re.findall(r"\bddlf \w[^|&;>)]*", line.split("#")[0]):
            assert parse(shlex.split(part)[1:])[0].run


@pytest.mark.parametrize(("words", "spec"), list(every_command()))
def test_every_help_fits_on_a_screen_and_in_80_columns(words, spec, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = spec.parser(words).format_help()
    assert len(text.splitlines()) <= 45, text
    options = text.partition("examples:")[0]
    assert [line for line in options.splitlines() if len(line) > 80] == []


def test_run_help_lists_twelve_options_and_help_all_lists_every_option(run_here):
    short, full = run_here("run", "--help").stdout, run_here("run", "--help-all").stdout
    parser = all_commands()["run"].load().parser("ddlf run")
    # one more is --help
    assert len([option for option in parser.options if option.is_common and option.names]) == 1 + 12
    for option in parser.options:
        for name in option.names[:2]:
            assert name in full
    assert "--softsync" not in short
    assert ", ".join(sorted(OWN)) in " ".join(full.split()), "all launchers"


def test_run_help_of_a_group_lists_its_options_only(run_here):
    text = run_here("run", "--help", "downpour").stdout
    assert "--softsync" in text
    assert "--merge" not in text
    assert (
        run_here("run", "--help", "app.py").stdout
        == run_here("run", "--help").stdout
        == run_here("run", "app.py", "-h").stdout
    )


def test_options_before_an_action_belong_to_it(run_here, tmp_path):
    assert (
        run_here("runs", "--out", tmp_path, "compare", "last").stderr
        == run_here("runs", "compare", "last", "--out", tmp_path).stderr
    )
    assert "unknown option '--last'" in run_here("runs", "--last", "3", "compare", "a").stderr


def test_help_explains_an_error_also_in_lower_case(run_here):
    assert run_here("help", "workerlost").stdout == run_here("help", "WorkerLost").stdout
    assert run_here("help", "WorkerLost").stdout.startswith("WorkerLost (")


def test_help_is_a_command_too(run_here):
    assert run_here("help").stdout == run_here("--help").stdout
    assert run_here("help", "run").stdout == run_here("run", "--help").stdout
    assert "did you mean 'run'" in run_here("help", "rnu").stderr
    assert "What to do:\n    Check the worker's terminal" in run_here("help", "WorkerLost").stdout


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [
        ("--epochs", "--master-epochs"),
        ("--num-workers=3", "--local"),
        ("--batch", "--batch-size"),
        ("--slotz", "--slots"),
    ],
)
def test_option_names_of_other_programs_are_understood(run_here, option, suggestion):
    assert f"did you mean {suggestion}?" in run_here("run", "a.py", option, "3").stderr


def test_help_is_printed_without_a_command(run_here):
    ended = run_here()
    assert ended.returncode == 2
    assert "first steps:" in ended.stdout


def test_mistakes_in_a_cluster_file_have_line_and_column(run_here, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("version: 1\nworkers:\n  - 127.0.0.1:99999\nwroker: 1\n")
    ended = run_here("status", "--config", path)
    assert ended.returncode == 2
    assert "3" in ended.stderr
    assert "wroker" in ended.stderr


# -- status and stop ----------------------------------------------------------------------------------------------------


def test_status_prints_each_worker_and_fails_when_one_is_unreachable(standing, partly_reachable):
    (first, second), options = standing
    ended = ddlf("status", *options)
    assert ended.returncode == 0
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == [
        ["1", f"127.0.0.1:{first.port}", "idle;"],
        ["2", f"127.0.0.1:{second.port}", "idle;"],
    ]
    _, options = partly_reachable
    ended = ddlf("status", *options)
    assert ended.returncode == 3
    assert "idle" in ended.stdout.splitlines()[0]
    assert "  unreachable: connection refused" in ended.stdout.splitlines()[1]


def test_status_prints_the_weights_that_a_worker_holds():
    shard = Shard(begin=10, end=1_250_000, of=10_000_000, version=7, run="3f2a")
    assert weights_held(shard) == ["a shard (values 11 to 1,250,000 of 10,000,000, version 7) of run 3f2a"]
    both = " and ".join(weights_held(replace(shard, shards=2, copies=1)))
    assert (
        both
        == "a shard (values 11 to 1,250,000 of 10,000,000, version 7) and 1 more shard and a copy of 1 other of run 3f2a"
    )
    assert weights_held(replace(shard, shards=0, copies=2)) == ["copies of 2 others of run 3f2a"]
    assert weights_held(None) == []


def test_status_prints_the_part_of_a_model_that_a_worker_has():
    part = HeldPart(number=2, of=3, nbytes=187_500_000, version=7, copies=0, run="3f2a")
    assert part_of_model(part) == ["part 2 of 3 of the model (187.5 MB, version 7) of run 3f2a"]
    (both,) = part_of_model(replace(part, copies=1))
    assert both == "part 2 of 3 of the model (187.5 MB, version 7) and a copy of 1 part of run 3f2a"
    assert part_of_model(replace(part, number=0, of=0, copies=2)) == ["copies of 2 parts of run 3f2a"]
    assert part_of_model(None) == []


def test_status_as_json_has_a_row_for_each_worker(partly_reachable):
    _, options = partly_reachable
    answers = json.loads(ddlf("status", "--json", *options).stdout)
    assert [answer["address"] for answer in answers] == options[1].split(",")
    assert answers[0]["executor"] == "ready"
    assert "connection refused" in answers[1]["error"]


def test_status_with_another_token_is_exit_code_4(standing, tmp_path):
    (first, _), _ = standing
    ddlf("token", "new", "--token-file", tmp_path / "other")
    ended = ddlf("status", "--hosts", f"127.0.0.1:{first.port}", "--token-file", tmp_path / "other")
    assert ended.returncode == 4
    assert "the worker has another token than this side" in ended.stdout


def test_stop_ends_the_workers(workers):
    both, options = workers
    ended = ddlf("stop", *options)
    assert ended.returncode == 0
    assert [line.split()[-1] for line in ended.stdout.splitlines()] == ["stopped", "stopped"]
    for worker in both:
        assert worker.process.wait(PATIENCE_S) == 0
        assert not is_listening(worker.port)
    again = ddlf("stop", *options)
    assert (again.returncode, "not running, because nothing listens there" in again.stdout) == (0, True)
    assert ddlf("stop", "--restart", *options).returncode == 3


LOOP = """
import asyncio
async def main(cluster):
    call = asyncio.ensure_future(cluster.run_code("import time; time.sleep(3600)"))
    while not all(status.busy for status in await cluster.status()):
        await asyncio.sleep(0.01)
    print("running", flush=True)
    await call
"""


@contextlib.contextmanager
def master(options, tmp_path):
    """Start a run on the workers that does not end by itself."""
    (tmp_path / "loop.py").write_text(LOOP)
    process = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", "run", str(tmp_path / "loop.py"), "--quiet", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "running\n"
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_stop_refuses_workers_in_use_and_names_the_user(standing, tmp_path):
    both, options = standing
    with master(options, tmp_path) as user:
        for more, done in ([], "stopped"), (["--restart"], "restarted"):
            ended = ddlf("stop", *more, *options)
            assert ended.returncode == 3
            me = f"in use by {getpass.getuser()}@{platform.node()} pid {user.pid} (loop.py) since "
            assert all(me in line for line in ended.stdout.splitlines())
            assert (
                ended.stderr
                == f"error  2 of 2 workers are in use, so none was {done}; --force ends those runs\nmore   ddlf help LeaseError\n"
            )
        assert all(worker.process.poll() is None for worker in both)
        assert ddlf("status", *options).stdout.count("busy with 'run_code'") == 2


@pytest.mark.slow
def test_stop_by_force_is_reported_with_its_user_to_master_and_worker(workers, tmp_path):
    both, options = workers
    me = f"{getpass.getuser()}@{platform.node()}"
    with master(options, tmp_path) as user:
        ended = ddlf("stop", "--restart", "--force", *options)
        assert (ended.returncode, ended.stdout.split()[-1]) == (0, "restarted"), ended
        _, errors = user.communicate(timeout=PATIENCE_S)
    assert user.returncode == 5
    culprit = f"{me} (ddlf stop --restart)"
    assert (
        f"the executor was restarted by {culprit} while it ran 'run_code'; ask that user whether they have finished"
        in errors
    )
    assert "dmesg" not in errors
    assert f"restarted by {culprit}, while {me} pid {user.pid}" in both[0].output
    assert all(worker.process.poll() is None for worker in both)
    with master(options, tmp_path) as user:  # the run may still be starting
        ended = ddlf("stop", "--force", *options)
        assert (ended.returncode, ended.stdout.split()[-1]) == (0, "stopped"), ended
        _, errors = user.communicate(timeout=PATIENCE_S)
    assert user.returncode == 5
    assert f"was stopped by {me} (ddlf stop); ask that user, and start the worker again" in errors
    assert [worker.process.wait(PATIENCE_S) for worker in both] == [0, 0]
    assert f"stopped by {me} (ddlf stop)" in both[0].output


@pytest.mark.slow
def test_run_with_wait_starts_when_the_other_run_ends(standing, tmp_path):
    _, options = standing
    (tmp_path / "quick.py").write_text("async def main(cluster):\n    print('mine')\n")
    command = [sys.executable, "-m", "ddlf.cli.main", "run", str(tmp_path / "quick.py"), *options]
    with master(options, tmp_path) as other:
        given_up = subprocess.run([*command, "--wait", "1"], capture_output=True, text=True)
        assert given_up.returncode == 3
        assert "waiting   2 of 2 workers are in use:\n" in given_up.stdout
        assert "retrying for 1 s; press Ctrl-C to stop" in given_up.stdout
        assert given_up.stderr.startswith("error  2 of 2 workers are in use:\n    1  127.0.0.1:")
        assert "could not be reached" not in given_up.stderr
        assert given_up.stdout.count("--wait") == 0
        assert given_up.stderr.count("--wait") == 1
        assert "wait longer: --wait alone waits indefinitely; or take them with --takeover" in given_up.stderr
        waiting = subprocess.Popen([*command, "--wait"], stdout=subprocess.PIPE, text=True)
        while "retrying; press Ctrl-C to stop" not in waiting.stdout.readline():
            assert waiting.poll() is None
        other.kill()
        assert waiting.communicate(timeout=PATIENCE_S)[0].endswith("mine\n")
        assert waiting.returncode == 0


# -- bench --------------------------------------------------------------------------------------------------------------


def test_bench_prints_latency_and_both_speeds_per_worker(partly_reachable):
    first, options = partly_reachable
    ended = ddlf("bench", "--megabytes", "1", *options)
    assert ended.returncode == 3
    line, lost = ended.stdout.splitlines()
    assert re.search(
        rf"1  127.0.0.1:{first.port} +call +[\d.]+ ms, p99 +[\d.]+ ms; to it +[\d,]+ MB/s, from it +[\d,]+ MB/s", line
    )
    assert "connection refused" in lost


def test_bench_as_json_has_positive_figures(partly_reachable):
    first, options = partly_reachable
    results = json.loads(ddlf("bench", "--megabytes", "1", "--json", *options).stdout)
    assert results[0].pop("address") == f"127.0.0.1:{first.port}"
    assert set(results[0]) == {"latency_s", "latency_p99_s", "there_mbs", "back_mbs"}
    assert all(value > 0 for value in results[0].values())


def test_bench_measures_pairs_of_workers_and_leaves_them_free(standing):
    _, options = standing
    results = json.loads(ddlf("bench", "--megabytes", "1", "--pairs", "--json", *options).stdout)
    assert len(results["workers"]) == 2
    (pair,) = results["pairs"]
    assert (pair.pop("from"), pair.pop("to")) == (1, 2)
    assert set(pair) == {"latency_s", "latency_p99_s", "there_mbs", "back_mbs"}
    assert all(value > 0 for value in pair.values())
    ended = ddlf("bench", "--megabytes", "1", "--pairs", *options)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"  1 - 2    call +[\d.]+ ms, .*; there +[\d,]+ MB/s, back +[\d,]+ MB/s", ended.stdout)


async def test_bench_error_about_used_workers_names_no_foreign_option(monkeypatch):
    async def connect(timeout_s):
        raise LeaseError("leased by ann@pc", hint="wait for it with --wait")

    workers = [SimpleNamespace(id=number, connect=connect, close=AsyncMock()) for number in (1, 2)]
    monkeypatch.setattr("ddlf.cli.doctor.named_cluster", lambda options: SimpleNamespace(workers=workers))
    with pytest.raises(LeaseError, match="leased by ann@pc; try again when that run is over"):
        async with leased(SimpleNamespace(timeout=5), [1, 2]):
            pytest.fail("it is somebody else's")


def test_bench_names_a_pair_that_is_much_slower_than_the_rest():
    first, second, third = (ProxyWorker("pc", port, b"token", id=port) for port in (1, 2, 3))
    ways = [Way(0.001, 0.002, 110, 112), Way(0.001, 0.002, 112, 11), Way(0.001, 0.002, 108, 109)]
    pairs = list(zip([first, first, second], [second, third, third], ways, strict=True))
    assert slow_pairs(pairs) == [
        "the way from worker 3 (pc:3) to worker 1 (pc:1) has 10% of the usual speed between workers"
    ]
    assert slow_pairs([*pairs[:2], (second, third, ConnectError("no way"))]) == []


def test_bench_names_a_direction_that_is_much_slower_than_the_rest():
    proxies = [ProxyWorker("pc", port, b"token", id=port) for port in (1, 2, 3)]
    ways = [Way(0.001, 0.002, 110, 110), Way(0.001, 0.002, 112, 11), Way(0.001, 0.002, 108, 109)]
    assert slow(proxies, ways) == [
        "the way from worker 2 (pc:2) has 10% of the usual speed: check its cable and its switch port"
    ]
    assert slow(proxies[:2], ways[:2]) == []


# -- tokens -------------------------------------------------------------------------------------------------------------


def test_token_is_created_once_and_never_overwritten(tmp_path):
    created = ddlf("token", "new", XDG_CONFIG_HOME=str(tmp_path))
    path = tmp_path / "ddlf" / "token"
    token = path.read_text().strip()
    assert created.returncode == 0
    assert str(path) in created.stdout
    assert "ssh HOST 'umask 077; mkdir -p " in created.stdout
    assert token not in created.stdout + created.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = ddlf("token", "show", XDG_CONFIG_HOME=str(tmp_path))
    assert shown.stdout == f"{token}\n"
    assert str(path) in shown.stderr
    again = ddlf("token", "new", XDG_CONFIG_HOME=str(tmp_path))
    assert again.returncode == 4
    assert "already holds a token, which is not overwritten" in again.stderr
    assert path.read_text().strip() == token


def test_printed_command_copies_the_token_for_its_owner_only(tmp_path):
    home, other_home = tmp_path / "a home", tmp_path / "another home"
    for folder in (home, other_home):
        folder.mkdir()
    no_xdg = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    created = command("ddlf.cli.main", "token", "new", env={**no_xdg, "HOME": str(home)})
    line = next(line for line in created.stdout.splitlines() if "ssh HOST" in line)
    # A shell with another home folder replaces ssh.
    line = line.replace("ssh HOST", f'env "HOME={other_home}" sh -c')
    subprocess.run(line, shell=True, check=True, env={**no_xdg, "HOME": str(home)})
    copied = other_home / ".config" / "ddlf" / "token"
    assert copied.read_text() == (home / ".config" / "ddlf" / "token").read_text()
    assert stat.S_IMODE(copied.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("pasted", "code", "sentence"),
    [
        (f"{'t' * 43}\n", 0, "The token is in "),
        ("short\n", 4, "the pasted text: token too short (5 characters), need at least 32; use 'ddlf token new'"),
        ("", 4, "the pasted text is empty"),
        ("two words\n", 4, "the pasted text is not a token"),
    ],
)
def test_token_paste_reads_standard_input(tmp_path, pasted, code, sentence):
    ended = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", "token", "paste", "--token-file", tmp_path / "token"],
        input=pasted,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, sentence in ended.stdout + ended.stderr) == (code, True), ended
    assert (tmp_path / "token").exists() == (code == 0)
    if code == 0:
        assert (tmp_path / "token").read_text() == pasted
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_token_show_fails_without_a_token(tmp_path):
    ended = ddlf("token", "show", XDG_CONFIG_HOME=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (4, "")
    assert ended.stderr == "error  there is no token; create one with: ddlf token new\nmore   ddlf help AuthError\n"


# -- output -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_closed_reader_causes_no_traceback(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode in (0, 141)


def test_closed_reader_of_status_causes_no_traceback(standing):
    _, options = standing
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", "status", *options], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (ended.stderr, ended.returncode) == ("", 141)


def test_advise_uses_the_settings_of_a_run(capfd, tmp_path, monkeypatch):
    def run_here(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code

    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("import ddlf\n\n\nclass App(ddlf.IApp):\n    pass\n")
    (tmp_path / "cluster.yaml").write_text("workers: [127.0.0.1:9000]\nrun: {slots: 2, partition: dirichlet}\n")
    assert run_here("advise", "app.py") == 2
    assert "cluster.yaml:2:17: partition is not a setting for this file" in capfd.readouterr().err
    assert run_here("advise", "app.py", "--explain", "L02") == 2
    assert "app.py has no effect with --explain" in capfd.readouterr().err
