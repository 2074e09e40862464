"""Tests of ``ddlf run --dry-run``, which prints the plan of a run without starting it."""

import re
import sys
from pathlib import Path

import pytest

from ddlf.cli import main
from ddlf.cli.main import parse
from ddlf.cli.run import run_target
from ddlf.cli.stopping import StopRequest
from ddlf.cli.target import check_needs, find_target, needs_in
from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, VersionError
from ddlf.privacy import visible
from ddlf.rpc.code import own_modules
from tests.cli.facts import machine
from tests.daemons import TOKEN, DaemonWithoutProcesses, connected
from tests.processes import command

APP = """
import ddlf
import beside

class App(ddlf.IApp):
    batch_size = 64

    def load_dataset(self):
        raise AssertionError("the data set was loaded")

    def create_model(self):
        from deeper import later

async def main(cluster, points=3):
    raise AssertionError("the function was called")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "beside.py").write_text("X = 1\n")
    (tmp_path / "deeper" / "__init__.py").write_text("")
    (tmp_path / "deeper" / "later.py").write_text("import math\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The modules of the tests are not installed, so without this each plan would read hundreds of files.
    monkeypatch.setattr(
        "ddlf.cli.dry_run.own_modules",
        lambda: [module for module in own_modules() if Path(module.__file__).is_relative_to(tmp_path)],
    )
    monkeypatch.setattr("ddlf.cli.dry_run.machine_facts", lambda folders=(), needs=(): machine())
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine())
    yield tmp_path
    for name in {*sys.modules} - before:  # the next test has other modules with these names
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


async def planned(*arguments, target="App"):
    _, options = parse(["run", "app.py", "--target", target, "--dry-run", *arguments])
    return await run_target(find_target(options.app, target, options), options, StopRequest())


@pytest.mark.slow
async def test_dry_run_prints_loaded_files_shipped_files_and_settings(folder, capsys):
    assert await planned("--seed", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "cluster   no cluster file: 2 workers on this machine"
    assert lines[1].startswith("          2 would be started, each with DDLF 0.1.0, Python 3.11.7, keras 3.15.1")
    assert lines[2] == "loads     class App of app.py"
    rows = [line[10:].split(maxsplit=2) for line in lines if line[:10].strip() in ("", "settings")]
    assert ["batch_size", "64", "class App"] in rows
    assert ["seed", "5", "--seed"] in rows
    assert " app.py  0.3 kB\n" in text
    assert " beside.py  0.0 kB\n" in text
    assert "          deeper/later.py  0.0 kB, when a function imports it" in text
    assert "unused.py" not in text
    assert lines[-1].startswith("done      --dry-run: nothing")


async def test_dry_run_prints_the_plan_and_is_refused_without_one(folder, capsys, monkeypatch):
    monkeypatch.setattr("ddlf.extras.planner.measurement_files.state_folder", lambda: folder)
    assert await planned() == 0
    assert (
        "plan      none yet, which would say whether these workers pay; make one: ddlf plan " in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="there is no plan of App with sync, float32, batch size 64"):
        await planned("--planned")
    assert await planned("--planned", "--listen", "127.0.0.1:9100", "--workers", "2") == 0
    assert "plan      unknown, because it belongs to the workers" in capsys.readouterr().out


async def test_dry_run_explains_who_sees_private_data(folder, capsys):
    (folder / "app.py").write_text(APP.replace("batch_size = 64", "private = True"))
    assert await planned("--peer", "http://127.0.0.1:8930/#code") == 0
    text = capsys.readouterr().out
    assert "what load_dataset loads, which only workers load, and create_model builds" in text
    rows = [re.split(r"  +", line[10:]) for line in text.partition("\nsees ")[2].splitlines()[1:6]]
    assert ["the master", "each single update, as it is", "none, unless its code reads them"] in rows
    assert ["another worker", "only the model, which merges all updates", "none"] in rows
    assert "          The master's code runs on the workers. The setting protects from mistakes" in text
    assert "          The run posts its weights as a peer, too" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "column"),
    [
        ("batch_size = 64", visible.PLAIN),
        ("private = True; update_clip = 1.0; noise_multiplier = 1.0", visible.PRIVATE_NOISED),
        (
            "private = True; update_clip = 1.0; noise_multiplier = 1.0; privacy_unit = 'sample'",
            visible.PRIVATE_SAMPLES,
        ),
    ],
)
async def test_dry_run_prints_the_column_of_its_settings(folder, capsys, settings, column):
    (folder / "app.py").write_text(APP.replace("batch_size = 64", settings))
    assert await planned() == 0
    text = capsys.readouterr().out
    rows = [tuple(re.split(r"  +", line[10:])) for line in text.partition("\nsees ")[2].splitlines()[1:6]]
    assert rows == [(row.party, row.updates, row.samples) for row in column.rows()]
    assert all(sentence in text for sentence in (visible.UPDATE, column.before, column.also, *column.remains))
    assert "as a peer" not in text


@pytest.mark.slow
async def test_dry_run_asks_workers_as_guest_and_prints_versions(folder, capsys, monkeypatch, free_port):
    daemon = DaemonWithoutProcesses(TOKEN)
    hosts = ("--hosts", f"127.0.0.1:{daemon.port}", "--token-file", "token")
    assert await planned(*hosts) == 0
    assert f"worker 1 (127.0.0.1:{daemon.port})  the same versions; 4 cores" in capsys.readouterr().out
    async with connected(daemon.port) as master:
        assert await planned(*hosts) == 3
        assert "in use by " in capsys.readouterr().out
        assert await planned(*hosts, "--takeover") == 0
        assert (await master.status()).lease.state == "alive"
    capsys.readouterr()
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders=(), needs=(): machine(python="3.12.0"))
    assert await planned(hosts[0], f"{hosts[1]},127.0.0.1:{free_port}", *hosts[2:]) == 3
    text = capsys.readouterr().out
    assert f"worker 2 (127.0.0.1:{free_port})  no answer, see below" in text
    assert "connection refused, nothing listens there" in text
    assert "Python 3.12.0 there, 3.11.7 here" in text
    await daemon.end()


async def test_dry_run_refuses_workers_with_other_cards_than_the_file_says(cards, folder, capsys):
    daemon = DaemonWithoutProcesses(TOKEN)  # it takes the first card
    for gpus, code in (("1", 2), ("0", 0), ("GPU-0", 0), ("GPU-1", 2)):
        (folder / "cluster.yaml").write_text(
            f"security: {{token_file: token}}\nworkers:\n  - {{host: 127.0.0.1, port: {daemon.port}, gpus: [{gpus}]}}\n"
        )
        assert await planned() == code
        text = capsys.readouterr().out
        assert (f"computes on 0 (Test Card), and cluster.yaml says --gpus {gpus}" in text) == (code != 0)
    await daemon.end()


async def test_dry_run_checks_script_requirements_here_and_on_each_worker(folder, capsys, monkeypatch):
    block = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["ddlf>=0.1", "pandas>=2"]\n# ///\n'
    (folder / "app.py").write_text(block + APP)
    requests = []

    def machine_facts(folders=(), needs=()):
        requests.append(list(needs))
        return machine(unmet=["pandas>=2 (not installed)"])

    monkeypatch.setattr("ddlf.cli.dry_run.machine_facts", machine_facts)
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", machine_facts)
    daemon = DaemonWithoutProcesses(TOKEN)
    assert await planned("--hosts", f"127.0.0.1:{daemon.port}", "--token-file", "token") == 4
    await daemon.end()
    text = capsys.readouterr().out
    assert requests == [["ddlf>=0.1", "pandas>=2"]] * 2
    assert (
        f"warning   this machine, worker 1 (127.0.0.1:{daemon.port}): needed, and not there: pandas>=2 (not installed)"
        in text
    )
    assert "try  python -m pip install 'pandas>=2'" in text


@pytest.mark.parametrize("text", ["", "# /// script\n# dependencies = 3\n# ///\n", "# /// script\n# [\n# ///\n"])
def test_script_without_a_valid_block_needs_nothing(text):
    assert needs_in(text) == []


@pytest.mark.parametrize("name", ["App", "main"])
async def test_run_names_workers_that_lack_requirements(folder, monkeypatch, name):
    (folder / "app.py").write_text('# /// script\n# dependencies = ["pandas>=2"]\n# ///\n' + APP)
    _, options = parse(["run", "app.py", "--target", name])
    target = find_target(options.app, name, options)
    answers = [["pandas>=2 (not installed)"], []]
    monkeypatch.setattr("ddlf.worker.machine.machine_facts", lambda folders, needs: {"unmet": answers.pop(0)})
    daemons, messages = [DaemonWithoutProcesses(TOKEN) for _ in range(2)], []
    async with Cluster(["127.0.0.1"] * 2, [daemon.port for daemon in daemons], token_file="token") as cluster:
        await check_needs(cluster, target, messages.append, local=False)
        (line,) = messages
        assert line.startswith("missing   worker ")
        assert line.endswith(" lacks requirements of the script: pandas>=2 (not installed)")
        answers += [["pandas>=2 (not installed)"]] * 2
        with pytest.raises(
            VersionError, match=r"worker 1 .* lacks .*; worker 2 .* lacks .*; install it, or leave it out"
        ):
            await check_needs(cluster, target, messages.append, local=False)
    for daemon in daemons:
        await daemon.end()


def test_run_is_refused_when_every_worker_lacks_requirements(tmp_path):
    block = '# /// script\n# dependencies = ["no-such-package>=2"]\n# ///\n'
    (tmp_path / "app.py").write_text(f"{block}async def main(cluster):\n    print('ran')\n")
    ended = command("ddlf.cli.main", "run", "app.py", "--local", "1", cwd=tmp_path)
    assert (ended.returncode, "ran" in ended.stdout) == (4, False)
    assert "error  this machine lacks requirements of the script: no-such-package>=2 (not installed)" in ended.stderr


async def test_dry_run_plans_a_function(folder, capsys):
    assert await planned(target="main") == 0
    text = capsys.readouterr().out
    assert "loads     function main of app.py" in text
    assert "\nsettings  " not in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--target", "App", "--mode", "async", "-p", "merge=median"), "merge='median' is for synchronous training"),
        (("--target", "App", "--checkpoint-every", "2"), "--checkpoint-every has no effect without --checkpoint DIR"),
        (("--target", "App", "--checkpoint-every", "2", "--out", "none"), "without --checkpoint DIR"),
        (("--target", "App", "-p", "checkpoint_keep=2"), "checkpoint_keep=2 has no effect without a folder"),
        (("--target", "App", "--mode", "downpour", "--replicas", "1"), "replicas=1 are fewer than the 2 slots"),
        (("--target", "App", "--converge", "target:val_acuracy,0.9"), "did you mean 'val_accuracy'?"),
        (
            ("--target", "App", "--worker-epochs", "1", "--worker-steps", "3"),
            "--worker-epochs has no effect with worker_steps=3",
        ),
        (("--target", "App", "-p", "verbose=3"), "-p verbose must be true or false, got '3'"),
        (("--target", "main", "--seed", "2"), "--seed has no effect on main(cluster), which is not an app"),
        (("--target", "App", "-p", "batch_sise=2"), "did you mean 'batch_size'?"),
    ],
)
def test_dry_run_has_the_error_messages_of_a_run(folder, capfd, arguments, sentence):
    errors = []
    for more in ((), ("--dry-run",)):
        with pytest.raises(SystemExit) as ended:
            main.main(["run", "app.py", *arguments, *more])
        assert ended.value.code == 2
        errors.append(capfd.readouterr().err)
    assert sentence in errors[0]
    assert errors[0] == errors[1]


def test_dry_run_names_the_cards_of_its_workers_or_refuses_them(cards, folder, capfd):
    with pytest.raises(SystemExit) as ended:
        main.main(["run", "app.py", "--local", "2", "--gpus", "0", "--dry-run"])
    assert ended.value.code == 0
    assert "cards     0 (Test Card), at most 7.7 GB for 2 workers. Two runs" in capfd.readouterr().out
    for options, sentence in (
        (["--gpus", "7"], "this machine has no card 7"),
        (["--gpus", "none", "--gpu-memory", "8GB"], "gpu_memory has no effect with gpus=none"),
    ):
        with pytest.raises(SystemExit) as ended:
            main.main(["run", "app.py", *options, "--dry-run"])
        assert ended.value.code == 2
        assert sentence in capfd.readouterr().err


def test_dry_run_refuses_a_script_that_runs_by_itself(folder, capfd):
    (folder / "script.py").write_text("import asyncio\nasync def work(): print('worked')\nasyncio.run(work())\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        main.main(["run", "script.py", "--dry-run"])
    out, err = capfd.readouterr()
    assert out == ""
    assert "--dry-run has no effect: script.py runs by itself" in err


def test_dry_run_starts_no_template(folder):
    from ddlf.cli.run import _will_train_here

    _, options = parse(["run", "app.py", "--dry-run"])
    assert not _will_train_here(options.app, options)
