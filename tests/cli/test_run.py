"""Tests of ``ddlf run``: its target, options, exit codes and interruption."""

import contextlib
import getpass
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddlf.app import IApp
from ddlf.cli import main
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cli.run import _batches, _described_training, _slots, resolve_cluster
from ddlf.cli.target import find_target, function_arguments, prepare_app
from ddlf.cluster.launch.launcher import Workers
from ddlf.errors import AppError, ConfigError, ConnectError
from ddlf.rpc.tokens import new_token
from ddlf.training.registry import spec_of
from tests import warm
from tests.patience import PATIENCE_S
from tests.processes import command, without_waits

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def app(tmp_path, standing_workers):
    """Return a function that writes an app and runs it with ``ddlf run``, by default on a running worker."""
    worker, _ = standing_workers

    def write(source, name="app.py"):
        path = tmp_path / name
        path.write_text(source)
        return path

    def run(source, *arguments, name="app.py", **environment):
        path = write(source, name)
        arguments = arguments or run.where
        return command("ddlf.cli.main", "run", path, *arguments, env={**os.environ, **environment}, cwd=tmp_path)

    run.write = write
    run.where = ["--hosts", f"127.0.0.1:{worker.port}", "--token-file", str(worker.token_file)]
    return run


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Return a function that runs ``ddlf run`` in this process and gives its error text.

    The command must end with exit code 2, or the function's ``code``, before it starts a process or imports Keras.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("ddlf.cli.run._will_train_here", lambda path, options: False)  # it only makes the start faster
    before = set(sys.modules)

    def run(*arguments, command="run"):
        with pytest.raises(SystemExit, match=rf"^{run.code}$"):
            main.main([command, *arguments])
        out, err = capfd.readouterr()
        assert out == ""
        return err

    run.code = 2
    yield run
    assert not {"keras", "tensorflow"} & ({*sys.modules} - before)
    for name in {*sys.modules} - before:  # the next test has other modules with these names
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def options(*parameters, **values):
    """Return options as ``ddlf run`` parses them, with the given values."""
    parser = Parser()
    add_options(parser)
    parsed = parser.parse_args(["--local", "1", *(word for pair in parameters for word in ("-p", pair))])
    vars(parsed).update(values)
    return parsed


# -- the target ---------------------------------------------------------------------------------------------------------


def test_target_is_the_only_app_and_a_subclass_wins_over_its_base(app):
    path = app.write("import ddlf\nclass Base(ddlf.IApp): pass\nclass Mine(Base): pass\n", "one_app.py")
    assert find_target(path).__name__ == "Mine"


def test_target_is_async_main_without_an_app(app):
    assert find_target(app.write("async def main(cluster): pass\n", "one_main.py")).__name__ == "main"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1\n", "has nothing to run; write a subclass of ddlf.IApp, or an async function main"),
        ("def main(cluster): pass\n", r"is not async; write async def main\(cluster\), or run it with python"),
        ("from ddlf import IApp\n", "has nothing to run"),
        (
            "import ddlf\nclass A(ddlf.IApp): pass\nclass B(ddlf.IApp): pass\n",
            "has several apps: A, B; say which with --target, as in --target A",
        ),
    ],
)
def test_file_without_a_single_target_is_refused(app, source, sentence):
    with pytest.raises(AppError, match=sentence):
        find_target(app.write(source, f"refused_{abs(hash(source))}.py"))


def test_a_plain_keras_script_is_refused_before_it_trains(app):
    script = app.write("raise RuntimeError('trains')\nmodel.fit(x, y)\n", "plain_keras.py")
    with pytest.raises(AppError, match=r"has nothing to run; .*; ddlf new mine --template convert shows how"):
        find_target(script)


@pytest.mark.parametrize("source", ["import no_such_helper\n", "import asyncio\nmodel.fit(x, y)\n"])
def test_a_script_that_may_have_something_to_run_is_imported(app, source):
    with pytest.raises((NameError, ModuleNotFoundError)):
        find_target(app.write(source, f"maybe_{abs(hash(source))}.py"))


def test_app_can_import_modules_beside_it(app):
    app.write("value = 5\n", "beside_the_app.py")
    path = app.write("import beside_the_app\nasync def main(cluster): return beside_the_app.value\n", "imports_it.py")
    assert find_target(path).__name__ == "main"
    sys.path.remove(str(path.parent))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nofile.py", "there is no file 'nofile.py'"),
        (".", "there is no file '.' (it is a folder)"),
        ("lab", "there is no file 'lab' (it is a folder); did you mean 'lab/app.py'?"),
        ("lab/ap.py", "there is no file 'lab/ap.py'; did you mean 'lab/app.py'?"),
        (
            "notes.txt",
            "'notes.txt' is not a Python file or a model as text; give the .py file of an app, or a text that ends in .nnm",
        ),
    ],
)
def test_file_that_cannot_be_run_is_exit_code_2(refused, tmp_path, name, sentence):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "app.py").write_text("")
    assert refused(name, "--local", "1") == f"error  {sentence}\n"


# -- options ------------------------------------------------------------------------------------------------------------


class Settings(IApp):
    rate = 0.1
    layers = 2
    name = "small"
    shape = (1, 2)
    fast = False


async def function(cluster, points: int = 10, label: str = "x", free=None):
    """A function with parameters, for ``function_arguments``."""


def test_options_override_attributes_with_their_type():
    app = prepare_app(
        Settings, None, options("rate=1", "layers=3", "name=7", "shape=(3,)", "fast=True", batch_size=64, seed=5)
    )
    assert (app.rate, app.layers, app.name, app.shape, app.fast) == (1.0, 3, "7", (3,), True)
    assert isinstance(app.rate, float)
    assert (app.batch_size, app.seed, app.master_epochs) == (64, 5, IApp().master_epochs)
    assert (Settings.rate, Settings().batch_size) == (0.1, IApp().batch_size)


def test_setting_given_twice_is_refused():
    with pytest.raises(ConfigError, match="-p rate is given twice"):
        prepare_app(Settings, None, options("rate=1", "rate=2"))
    twice = options("schedule=cosine")
    twice.schedule = "linear"
    with pytest.raises(ConfigError, match="--schedule and -p schedule both set schedule; leave one"):
        prepare_app(Settings, None, twice)


def test_app_constructor_with_more_parameters_is_refused():
    class Wants(IApp):
        def __init__(self, cluster, rate):
            super().__init__(cluster)

    with pytest.raises(
        AppError, match=r"Wants cannot be made as Wants\(cluster\): missing a required argument: 'rate'"
    ):
        prepare_app(Wants, None, options())


@pytest.mark.parametrize(
    ("parameter", "sentence"),
    [
        ("rate", "-p takes KEY=VALUE, got 'rate'"),
        ("=5", "-p takes KEY=VALUE, got '=5'"),
        ("raet=1", "-p raet: Settings has no attribute 'raet', did you mean 'rate'?"),
        ("train=1", "-p train: Settings.train is not a setting; define it in the class"),
        ("_x=1", "-p _x: Settings has no attribute '_x'"),
        ("model=1", "-p model: Settings.model is not a setting; define it in the class"),
        ("modle=1", "-p modle: Settings has no attribute 'modle', did you mean 'mode'?"),
        ("layers=many", "-p layers must be a whole number, got 'many'"),
        ("layers=1.5", "-p layers must be a whole number, got '1.5'"),
        ("fast=1", "-p fast must be true or false, got '1'"),
        ("epochs=3", "-p epochs: Settings has no attribute 'epochs', did you mean 'master_epochs'?"),
    ],
)
def test_wrong_parameter_is_refused(parameter, sentence):
    with pytest.raises(ConfigError) as caught:
        prepare_app(Settings, None, options(parameter))
    assert str(caught.value).startswith(sentence)


def test_parameters_are_arguments_of_a_function():
    assert function_arguments(function, options("points=5", "label=5", "free=[1]")) == dict(
        points=5, label="5", free=[1]
    )
    with pytest.raises(ConfigError, match="-p pionts: function has no parameter 'pionts', did you mean 'points'"):
        function_arguments(function, options("pionts=1"))
    with pytest.raises(ConfigError, match="-p points must be a whole number, got 'x'"):
        function_arguments(function, options("points=x"))


@pytest.mark.parametrize("count", ["0", "-3", "1025", "x", "1e9"])
def test_wrong_number_of_workers_is_exit_code_2(app, refused, count):
    app.write("async def main(cluster): pass\n")
    assert "argument --local: " in refused("app.py", "--local", count)


# -- running ------------------------------------------------------------------------------------------------------------

ADD = """
import ddlf

def add(self, a, b):
    return self.id * 100 + a + b

async def main(cluster, a: int = 1):
    "Add."
    print(await cluster.run_method(add, a=a, b=2))

if __name__ == "__main__":
    ddlf.main(main)
"""


def test_file_runs_equally_with_ddlf_run_and_python(app, tmp_path):
    ended = app(ADD, "--local", "2", "-p", "a=5", "--quiet")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[107, 207]\n", "")
    script = subprocess.run(
        [sys.executable, "app.py", "--local", "2", "-p", "a=5", "--quiet"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (script.returncode, script.stdout, script.stderr) == (0, "[107, 207]\n", "")


def test_run_starts_two_workers_without_a_cluster_file(app, tmp_path):
    app.write(ADD)
    ended = command("ddlf.cli.main", "run", "app.py", cwd=tmp_path)
    assert without_waits(ended.stdout) == "cluster   no cluster file: 2 workers on this machine\n[103, 203]\n"


def test_run_uses_cluster_file_of_current_folder(app, standing_workers, tmp_path):
    worker, _ = standing_workers
    (tmp_path / "cluster.yaml").write_text(
        f"version: 1\nsecurity: {{token_file: {worker.token_file}}}\nworkers:\n  - 127.0.0.1:{worker.port}\n"
    )
    app.write(ADD)
    ended = command("ddlf.cli.main", "run", "app.py", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1] == "[103]"
    assert "cluster.yaml (1 worker)" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "in_file"),
    [
        (["--pickle-results", "--local", "1"], False),
        (["--pickle-results", "--hosts", "127.0.0.1:9"], False),
        (["--pickle-results"], False),
        ([], True),
    ],
    ids=str,
)
def test_pickle_results_applies_to_every_kind_of_cluster(arguments, in_file, tmp_path, monkeypatch, token_file):
    from ddlf.cli.options import add_options
    from ddlf.cli.parsing import Parser
    from ddlf.cli.run import resolve_cluster

    security = f"token_file: {token_file}" + (", pickle_results: true" if in_file else "")
    (tmp_path / "cluster.yaml").write_text(f"security: {{{security}}}\nworkers: [127.0.0.1:9]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDLF_TOKEN_FILE", str(token_file))
    add_options(parser := Parser())
    cluster, _ = resolve_cluster(parser.parse_args(arguments))
    assert [worker._link.session.pickle_results for worker in cluster.workers] == [True]


@pytest.mark.slow
def test_token_file_option_overrides_cluster_file(app, standing_workers, tmp_path):
    worker, _ = standing_workers
    (tmp_path / "cluster.yaml").write_text(
        f"version: 1\nsecurity: {{token_file: other}}\nworkers:\n  - 127.0.0.1:{worker.port}\n"
    )
    (tmp_path / "other").touch(mode=0o600)
    (tmp_path / "other").write_text(f"{new_token()}\n")
    app.write(ADD)
    for arguments in (("run", "app.py"), ("status",)):
        assert command("ddlf.cli.main", *arguments, cwd=tmp_path).returncode != 0
        ended = command("ddlf.cli.main", *arguments, "--token-file", str(worker.token_file), cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_unreachable_workers_are_exit_code_3_and_a_table(app, token_file):
    ended = app(ADD, "--hosts", "127.0.0.1:9,127.0.0.1:10", "--token-file", str(token_file))
    assert ended.returncode == 3
    assert ended.stderr.startswith("error  2 of 2 workers could not be reached:\n    1  127.0.0.1:9 ")
    assert "Traceback" not in ended.stderr


HOLD = """
import asyncio

async def main(cluster):
    print("mine", flush=True)
    await cluster.run_code("import asyncio; await asyncio.Event().wait()")
"""


@pytest.mark.slow
def test_used_worker_is_exit_code_3_and_takeover_gets_it(app):
    where = [*app.where, "--quiet"]
    hold = app.write(HOLD, "hold.py")
    first = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", "run", hold, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "mine\n"
    refused = app(ADD, *where)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert f"leased by {getpass.getuser()}@{platform.node()} pid {first.pid} (hold.py) since " in refused.stderr
    assert "wait for it with --wait, or take it with --takeover" in refused.stderr
    looked = command("ddlf.cli.main", "status", *where[:-1])
    assert "busy with 'run_code' for " in looked.stdout
    assert f"leased by {getpass.getuser()}@{platform.node()} pid {first.pid} (hold.py)" in looked.stdout
    assert app(ADD, *where, "--takeover").stdout == "[103]\n"
    _, words = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 3
    assert "was taken over by" in words
    assert "(app.py) at " in words
    assert "Traceback" not in words


FAIL = """
def fail(self):
    rate = 0
    return 1 / rate

async def main(cluster):
    await cluster.run_method(fail)
"""


def test_raising_method_is_exit_code_1_with_user_line(app, tmp_path):
    ended = app(FAIL)
    assert ended.returncode == 1
    assert f'File "{tmp_path}/app.py", line 4, in fail\n    return 1 / rate' in ended.stderr
    assert "ZeroDivisionError: division by zero" in ended.stderr
    assert "ddlf/cluster" not in ended.stderr
    assert "ddlf/cluster" in app(FAIL, *app.where, "--debug").stderr
    assert app(ADD).stdout.endswith("[103]\n")


def test_error_on_master_is_shown_with_traceback(app):
    ended = app("async def main(cluster):\n    [][0]\n")
    assert ended.returncode == 1
    assert 'app.py", line 2, in main' in ended.stderr
    assert "IndexError" in ended.stderr


@pytest.mark.parametrize("source", ["def broken(:\n", "import no_such_module_anywhere\n"])
def test_failing_import_is_shown_with_its_line(app, source):
    ended = app(source)
    assert ended.returncode == 1
    assert 'app.py", line 1' in ended.stderr


def test_exiting_app_keeps_its_exit_code(app):
    assert app("import sys\nsys.exit(7)\n").returncode == 7
    assert app("import sys\nasync def main(cluster):\n    sys.exit(7)\n").returncode == 7


def test_app_without_methods_is_exit_code_2(app):
    ended = app("import ddlf\nclass A(ddlf.IApp):\n    async def load_dataset(self): pass\n", *app.where, "-q")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error  A has no create_model; write one that sets self.model")


def test_wrong_options_start_nothing(app, own_folders):
    ended = app("import ddlf\nclass A(ddlf.IApp): pass\n", "--local", "1", "-p", "x=1")
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(
    ("start", "name", "more", "expected"),
    [
        ([], "calculate.py", [], ["[16, 16]", "[16, 160]", "[0, 0]", "0", "[0, 1]", "[401, 302]"]),
        (["-m", "ddlf.cli.main", "run"], "pi.py", ["-p", "points=100_000"], ["pi is about 3.1"]),
    ],
    ids=["python", "ddlf run"],
)
def test_example_apps_run_with_python_and_ddlf_run(start, name, more, expected, tmp_path):
    arguments = [*start, str(APPS / name), "--local", "2", *more]
    ended = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(text in ended.stdout for text in expected), ended.stdout


# -- interrupting -------------------------------------------------------------------------------------------------------

# The apps sleep for short times, because Python handles a signal that arrives just before a sleep only after it.
IMPORTING = """
import time
print("now", flush=True)
while True:
    time.sleep(0.1)
async def main(cluster): pass
"""
CONNECTED = """
import asyncio
async def main(cluster):
    print("now", flush=True)
    await asyncio.sleep(3600)
"""
WORKING = """
async def main(cluster):
    call = __import__("asyncio").ensure_future(cluster.run_code("import time; time.sleep(3600)"))
    while not all(status.busy for status in await cluster.status()):
        await __import__("asyncio").sleep(0.01)
    print("now", flush=True)
    await call
"""
CLOSING = """
import asyncio
async def main(cluster):
    try:
        await asyncio.sleep(3600)
    finally:
        print("tidied up", flush=True)
"""


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("importing", signal.SIGINT, 130),
        ("connected", signal.SIGINT, 130),
        ("working", signal.SIGTERM, 143),
        *(pytest.param(moment, signal.SIGINT, 130, marks=pytest.mark.slow) for moment in ("starting", "working")),
        pytest.param("importing", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_interrupt_ends_run_tidily_at_any_moment(app, tmp_path, own_folders, descendants, moment, number, code):
    source = {"importing": IMPORTING, "starting": CONNECTED, "connected": CONNECTED, "working": WORKING}[moment]
    path = app.write(source)
    before = set((own_folders / "tmp").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "ddlf.cli.main", "run", str(path), "--local", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    expected = "cluster" if moment == "starting" else "now"
    while expected not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors
    assert process.returncode in (code, -number if moment == "importing" else code)
    assert descendants() == []
    assert {path for path in (own_folders / "tmp").iterdir() if "pytest" not in path.name} <= before


@pytest.mark.parametrize("reaction", ["pass", "raise ImportError('no such module')", "raise SystemExit(3)"])
def test_interrupt_swallowed_by_import_ends_run(app, reaction):
    path = app.write(
        "import time\n"
        "try:\n    print('now', flush=True)\n    while True:\n        time.sleep(0.1)\n"
        f"except KeyboardInterrupt:\n    {reaction}\n"
        "async def main(cluster):\n    print('it continued', flush=True)\n"
    )
    process = warm.begin("ddlf.cli.main", "run", str(path), "--local", "1", "-q")
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors, process.returncode) == ("", "\nstopped\n", 130)


IN_A_FINALIZER = """
import time
class Slow:
    def __del__(self):
        print("now", flush=True)
        while True:
            time.sleep(0.1)
Slow()
async def main(cluster):
    print("it continued", flush=True)
"""


def test_interrupt_in_finalizer_ends_run_without_traceback(app):
    process = warm.begin("ddlf.cli.main", "run", str(app.write(IN_A_FINALIZER)), "--local", "1", "-q")
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors, process.returncode) == ("", "\nstopped\n", 130)


OWN_MODULES = """
import signal, sys
from ddlf.cli import main
from ddlf.settings.setting import Setting
Setting.__set_name__ = lambda *_: signal.raise_signal(signal.SIGINT)
sys.argv = ["ddlf", "run", "app.py"]
main.command()
"""


def test_interrupt_while_own_modules_are_imported_ends_the_command_silently():
    process = subprocess.run([sys.executable, "-c", OWN_MODULES], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (process.stdout, process.stderr, process.returncode) == ("", "", -signal.SIGINT)


IN_A_CLASS = """
class Descriptor:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt
async def main(cluster):
    class Own:
        part = Descriptor()
"""


def test_interrupt_that_python_turns_into_another_error_is_an_interrupt(app):
    process = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", "run", str(app.write(IN_A_CLASS)), *app.where, "-q"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (process.stdout, process.stderr, process.returncode) == ("", "\nstopped\n", 130)


BLOCKING = """
import time
async def main(cluster):
    for _ in range({times}):
        try:
            print("now", flush=True)
            time.sleep(3600)
        except KeyboardInterrupt:
            if {times} == 1:
                raise
    print("it continued", flush=True)
    await cluster.ping()
    print("and replied", flush=True)
"""


@pytest.mark.parametrize("times", [1, 3])
def test_interrupt_ends_code_that_blocks_event_loop(app, descendants, times):
    path = app.write(BLOCKING.format(times=times))
    process = warm.begin("ddlf.cli.main", "run", str(path), "--local", "1", "-q")
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert "and replied" not in output
    assert (errors, process.returncode) == ("\nstopped\n", 130)
    assert descendants() == []


@pytest.mark.parametrize("module", ["ddlf.cli.main", "ddlf.cli.worker"])
def test_interrupt_at_start_or_end_prints_nothing(module):
    code = (
        "import sys, time, atexit\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'argparse':\n"
        "            print('now', flush=True)\n"
        "            time.sleep(3600 if sys.argv[1] == 'importing' else 0)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "if sys.argv[1] == 'ending':\n"
        "    atexit.register(lambda: (print('ending', flush=True), time.sleep(3600)))\n"
        "moment, sys.argv[1:] = sys.argv[1], ['--help']\n"
        f"from {module} import command\n"
        "command()\n"
    )
    for moment, expected, times in (("importing", "now", 1), ("ending", "ending", 2)):
        process = subprocess.Popen(
            [sys.executable, "-c", code, moment], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while process.stdout.readline() != f"{expected}\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        if times == 2:  # the first signal does not disturb the cleanup of libraries at the end
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            for _ in range(PATIENCE_S):  # a busy machine may join two waiting signals into one
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                    break
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (errors, process.returncode) == ("", -signal.SIGINT)


def test_interrupted_app_can_clean_up(app):
    path = app.write(CLOSING.replace("    try:", "    print('now', flush=True)\n    try:"))
    process = warm.begin("ddlf.cli.main", "run", str(path), *app.where, "-q")
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors, process.returncode) == ("tidied up\n", "\nstopped\n", 130)


def test_closed_output_ends_run_without_traceback(app, descendants):
    path = app.write("async def main(cluster):\n    for _ in range(100_000):\n        print('line')\n")
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", "run", str(path), "--local", "1"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (ended.stderr, ended.returncode) == ("", 141)
    assert descendants() == []


# -- the choice of app or function, and options without effect -----------------------------------------------------------

SEVERAL = """
import ddlf
class A(ddlf.IApp): pass
class B(ddlf.IApp): pass
async def main(cluster): pass
async def other(cluster): pass
"""


def test_target_option_chooses_app_or_function(app, capsys):
    for name in ("A", "B", "main", "other"):
        assert find_target(app.write(SEVERAL, f"several_{name}.py"), name).__name__ == name
    with pytest.raises(AppError, match=r"--target mian: .* has no such app or async function, did you mean 'main'"):
        find_target(app.write(SEVERAL, "several_x.py"), "mian")
    assert capsys.readouterr().out == ""


def test_file_with_app_and_main_prints_which_runs(app, capsys):
    path = app.write("import ddlf\nclass A(ddlf.IApp): pass\nasync def main(cluster): pass\n", "with_both.py")
    assert find_target(path).__name__ == "A"
    assert capsys.readouterr().out == "target    A; for main(cluster), which is there too: --target main\n"


def test_target_is_argument_of_ddlf_main(app):
    source = "import ddlf\nclass A(ddlf.IApp): pass\nclass B(ddlf.IApp): pass\nddlf.main(A)\n"
    assert find_target(app.write(source, "says_which.py")).__name__ == "A"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--master-epochs", "3", "--save", "m.keras"],
            "--master-epochs, --save has no effect on main(cluster), which",
        ),
        (
            ["--resume", "auto"],
            "--resume has no effect on main(cluster), which is not an app; set its parameters wi",
        ),
        (["--evaluate-every", "0"], "--evaluate-every has no effect on main(cluster)"),
        (["--wait"], "--wait has no effect with --local"),
        (["--wait", "5", "--token-file", "x"], "--token-file, --wait has no effect with --local"),
    ],
)
def test_options_without_effect_are_refused_by_name(app, refused, arguments, sentence):
    app.write("async def main(cluster): pass\n")
    assert refused("app.py", "--local", "1", *arguments).startswith(f"error  {sentence}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mode", "nonsense"], "--mode: mode must be one of sync, "),
        (["--codec", "nonsense"], "--codec: unknown codec 'nonsense'; choose one of "),
        (["--resume", "nosuch"], "there is no folder "),
        (["--hosts", "a:9000", "--token-file", "none"], "token file none does not exist; make one with"),
        (["--listen", "9100"], "--listen needs the number of workers"),
        (["--config", "mode.yaml"], "mode.yaml:3:9: mode must be one of sync, "),
        (["--config", "key.yaml"], "key.yaml:1:1: key 'workers' is missing"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan", "scout"])
def test_options_that_need_no_app_are_checked_before_its_import(app, tmp_path, refused, command, arguments, sentence):
    if "--resume" in arguments and command != "run":
        sentence = "--resume has no effect on ddlf"
    app.write("print('imported')\nimport ddlf\nclass App(ddlf.IApp): pass\n")
    (tmp_path / "mode.yaml").write_text("workers: [a:9000]\nrun:\n  mode: nonsense\n")
    (tmp_path / "key.yaml").write_text("wrkers: [a:9000]\n")
    refused.code = 4 if arguments[0] == "--hosts" else 7 if sentence.startswith("there is no folder") else 2
    assert refused("app.py", *arguments, command=command).startswith(f"error  {sentence}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--wait"],
            "--wait has no effect without --hosts or a cluster file, which is not here; name it with --config",
        ),
        (["--token-file", "x"], "--token-file has no effect without --hosts or a cluster file"),
        (["--checkpoint-every", "3"], "--checkpoint-every has no effect without --checkpoint DIR; give it, too"),
        (
            ["--hosts", "a:9000", "--gpus", "0"],
            "--gpus has no effect without --local; in a cluster file it is a key of",
        ),
        (
            ["--launcher", "command:{worker}", "--workers", "1", "--wait", "5"],
            "--wait has no effect with --launcher, which starts workers for this run alone; leave it out",
        ),
        (["--local", "1", "--takeover"], "--takeover has no effect here: the workers are new ones, and there are no"),
    ],
)
def test_dependent_options_are_refused_alone(app, refused, arguments, sentence):
    app.write("import ddlf\nclass App(ddlf.IApp): pass\n")
    assert refused("app.py", *arguments).startswith(f"error  {sentence}")


def test_missing_parameter_value_is_named(app, refused):
    app.write("async def main(cluster, points): pass\n")
    message = refused("app.py", "--local", "1")
    assert message == "error  main(cluster) needs a value for points; give it with -p points=VALUE\n"


ALONE = """
import asyncio
import ddlf

async def main():
    print("ran", flush=True)

{call}
"""


@pytest.mark.parametrize(
    "call", ["asyncio.run(main())", "ddlf.run(main())", "", "if __name__ == '__main__':\n    asyncio.run(main())"]
)
def test_script_without_cluster_runs_once(app, call):
    ended = app(ALONE.format(call=call), "-q")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize("call", ["asyncio.run(main())", "ddlf.run(main())", ""])
def test_options_for_self_running_script_are_refused(app, refused, call):
    app.write(ALONE.format(call=call))
    message = refused("app.py", "--local", "3", "-p", "a=1")
    assert message.startswith("error  --local, -p has no effect")
    assert len(message.splitlines()) == 1


def test_missing_file_error_names_the_nearest_file(app, refused):
    app.write(ADD)
    assert refused("ap.py") == "error  there is no file 'ap.py'; did you mean 'app.py'?\n"


def test_unknown_parameter_error_lists_own_attributes():
    with pytest.raises(ConfigError) as refused:
        prepare_app(Settings, None, options("xyz=1"))
    assert str(refused.value) == "-p xyz: Settings has no attribute 'xyz'; its own are: fast, layers, name, rate, shape"
    bare = type("Bare", (IApp,), {})
    with pytest.raises(ConfigError, match=r"; write learning_rat = \.\.\. in the class to have it"):
        prepare_app(bare, None, options("learning_rat=1"))


def test_settings_are_options_and_cluster_file_keys(tmp_path):
    chosen = prepare_app(Settings, None, options(slots=3, evaluate_every=0, optimizer_state="fresh"))
    assert (chosen.slots, chosen.evaluate_every, chosen.optimizer_state) == (3, 0, "fresh")
    (tmp_path / "cluster.yaml").write_text(
        "workers: [127.0.0.1:9000]\nrun: {slots: 4, evaluate_every: 2, optimizer_state: fresh}\n"
    )
    parsed = options(slots=5)
    parsed.local, parsed.config = None, tmp_path / "cluster.yaml"
    chosen = prepare_app(Settings, None, parsed)
    assert (chosen.slots, chosen.evaluate_every, chosen.optimizer_state) == (5, 2, "fresh")


@pytest.mark.parametrize(
    ("source", "arguments", "environment", "sentence"),
    [
        ("codec = 'int9'", [], {}, "unknown codec 'int9'"),
        ("", ["--merge", "avg"], {}, "unknown merge 'avg'; choose one of mean, median, trimmed"),
        (
            "master_epoch = 3",
            [],
            {},
            "A.master_epoch is not a setting, so it would have no effect; did you mean master_epochs?",
        ),
        ("", ["--resume", "auto"], {}, "resume='auto' needs a folder of checkpoints"),
        ("", ["--save", "model.h5"], {}, "a model is saved as a .keras or .safetensors file, got 'model.h5'"),
        (
            "",
            ["--save", "missing/model.keras"],
            {},
            "the folder of 'missing/model.keras' does not exist; make it first",
        ),
        (
            "",
            [],
            {"KERAS_BACKEND": "jx"},
            "KERAS_BACKEND must be one of tensorflow, jax, torch, got 'jx', did you mean",
        ),
        ("", ["--checkpoint", "there"], {}, "there has checkpoints already, the newest of round 3"),
        (
            "",
            ["--checkpoint", "peers", "--resume", "auto"],
            {},
            "peers is the folder of a training by peers, and has no checkpoints; name another folder for checkpoints",
        ),
    ],
)
def test_wrong_values_are_refused_before_anything_is_connected(
    app, refused, tmp_path, monkeypatch, source, arguments, environment, sentence
):
    (tmp_path / "there" / "round-000003").mkdir(parents=True)
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "plan.json").write_text("{}")
    app.write(
        f"import ddlf\nclass A(ddlf.IApp):\n    {source or 'pass'}\n"
        "    async def load_dataset(self): pass\n    async def create_model(self): pass\n"
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = refused("app.py", "--hosts", "127.0.0.1:9", *arguments)  # no worker listens on this port
    assert re.match(rf"error  ([^:]*: )?{re.escape(sentence)}", message)
    assert len(message.splitlines()) == 1


async def test_wait_is_how_long_listen_waits_for_workers():
    listening = dict(local=None, listen=("127.0.0.1", 0), workers=Workers(1, 1))
    assert resolve_cluster(options(**listening))[0]._launcher._start_timeout_s == 600
    cluster, _ = resolve_cluster(options(**listening, wait=0.1))
    with pytest.raises(ConnectError, match=r"no worker joined at port \d+ within 0.1 s"):
        await cluster.connect()


@pytest.mark.parametrize(
    ("cores", "description"),
    [
        (2, "only 2 cores: more than 2 workers are not faster"),
        (1, "only 1 core: more than one worker is not faster"),
    ],
)
def test_run_says_that_more_workers_than_cores_are_not_faster(app, monkeypatch, cores, description):
    monkeypatch.setattr("ddlf.worker.machine.cores", lambda: cores)
    described = resolve_cluster(options(local=3))[1]
    assert described == f"3 workers on this machine, which has {description}"


def test_run_says_nothing_about_workers_that_have_a_core_each(app, monkeypatch):
    monkeypatch.setattr("ddlf.worker.machine.cores", lambda: 2)
    assert resolve_cluster(options(local=2))[1] == "2 workers on this machine"


# -- errors of the user's own code ---------------------------------------------------------------------------------------

BOLD = """
import asyncio
import numpy as np

def inner():
    np.reshape(np.ones(3), (2, 2))

async def main(cluster):
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("in \\x1b[1mbold\\x1b[0m type") from error
"""


def test_error_shows_user_lines_and_library_lines_with_v(app):
    ended = app(BOLD)
    assert ended.returncode == 1
    frames = [line.strip() for line in ended.stderr.splitlines() if line.startswith("  File ")]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["main", "inner", "main"]
    assert "cannot reshape array" in ended.stderr
    assert ended.stderr.endswith("RuntimeError: in bold type\n(-v also shows the lines of libraries)\n")
    errors = app(BOLD, *app.where, "-v").stderr
    assert "asyncio" in errors
    assert "fromnumeric.py" in errors


@pytest.mark.parametrize(
    ("slots", "workers", "shard_workers", "words"),
    [
        (None, 2, 0, "worker x 2 workers"),
        (2, 2, 0, "worker x 2 workers"),
        (2, 3, 0, "slot, 2 slots on 3 workers, 1 spare"),
        (8, 2, 0, "slot, 8 slots on 2 workers"),
        (1, 2, 0, "slot, 1 slot on 2 workers, 1 spare"),
        (None, 3, 1, "worker x 2 workers, 1 more holds the weights"),
        (4, 5, 2, "slot, 4 slots on 3 workers, 2 more hold the weights"),
    ],
)
def test_run_says_how_many_workers_are_spare(slots, workers, shard_workers, words):
    assert _slots(slots, workers, shard_workers) == words


@pytest.mark.parametrize(
    ("mode", "slots", "words"),
    [
        ("sync", None, "batch 32 per worker x 3 workers"),
        ("lbfgs", None, "3 slots on 3 workers"),
        ("lbfgs", 1, "1 slot on 3 workers"),
    ],
)
def test_run_omits_the_batch_of_lbfgs(mode, slots, words):
    run = IApp()
    run.mode = mode
    assert _batches(spec_of(run), slots, 3, "worker x 3 workers") == words


def test_run_that_resumes_says_that_the_checkpoint_has_the_slots(tmp_path):
    run, cluster = IApp(), SimpleNamespace(N=2, places=2)
    for resume, checkpoint, words in (
        (None, None, "per worker x 2 workers"),
        (tmp_path, None, "per slot, slots of the checkpoint on 2 workers"),
        ("auto", tmp_path / "new", "per worker x 2 workers"),
        ("auto", tmp_path, "per slot, slots of the checkpoint on 2 workers"),
    ):
        (tmp_path / "round-000004").mkdir(exist_ok=True)
        run.resume, run.checkpoint = resume, checkpoint
        assert words in _described_training(run, cluster)
    run.slots = 4
    assert "per slot, 4 slots on 2 workers" in _described_training(run, cluster)


IN_A_LIBRARY = """
def shape(self):
    import numpy as np
    np.reshape(np.ones(3), (2, 2))

async def main(cluster):
    await cluster.run_method(shape)
"""


def test_worker_error_is_printed_once_with_the_users_lines(app):
    ended = app(IN_A_LIBRARY)
    assert ended.returncode == 1
    assert ended.stderr.count("cannot reshape array") == 1
    assert "fromnumeric.py" not in ended.stderr
    assert ended.stderr.endswith("in shape\n    np.reshape(np.ones(3), (2, 2))\n")
    assert "fromnumeric.py" in app(IN_A_LIBRARY, *app.where, "-v").stderr
