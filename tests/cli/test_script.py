"""Tests of ``ddlf.run`` and ``ddlf.main`` in scripts and notebooks."""

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading

import pytest

import ddlf
from ddlf.cli.script import in_notebook, run
from tests.patience import PATIENCE_S
from tests.processes import without_waits


async def answer(value):
    await asyncio.sleep(0)
    return value


def test_run_returns_result_or_raises_error():
    assert run(answer(5)) == 5

    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run(fail())


def test_all_calls_share_one_background_loop():
    async def where():
        return asyncio.get_running_loop(), threading.current_thread()

    loop, thread = run(where())
    assert run(where()) == (loop, thread)
    assert thread is not threading.current_thread()


def test_run_works_inside_notebook_cell():
    async def cell():
        return run(answer(7))

    assert asyncio.run(cell()) == 7


def test_run_works_from_several_threads():
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(run(answer(n)))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(8))


def test_run_inside_its_coroutine_says_to_use_await():
    async def outer():
        return run(answer(1))

    with pytest.raises(RuntimeError, match=r"ddlf.run is for synchronous code; in a coroutine use await"):
        run(outer())


def test_run_refuses_other_objects():
    with pytest.raises(TypeError, match="coroutine"):
        run(5)


def test_cluster_opened_by_one_call_can_be_used_by_the_next():
    cluster = run(ddlf.Cluster.local(1).connect())
    variable = contextvars.ContextVar("unused")
    assert variable is not None
    assert run(cluster.run_method(lambda x: 2 * x, x=21)) == [42]
    run(cluster.close())


INTERRUPTED = """
import asyncio, sys, ddlf

async def work():
    async with ddlf.Cluster.local(1) as cluster:
        print("now", flush=True)
        try:
            await asyncio.sleep(3600)
        finally:
            print("cleaned up", flush=True)

try:
    ddlf.run(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_interrupt_waits_for_cleanup_of_coroutine(descendants):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors, process.returncode) == ("cleaned up\ninterrupted\n", "", 0)
    assert descendants() == []


def test_script_without_close_ends_silently_and_leaves_nothing(descendants):
    code = "import ddlf\ncluster = ddlf.run(ddlf.Cluster.local(1).connect())\nprint(ddlf.run(cluster.run_code('7')))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("[7]\n", "", 0)
    for process in descendants():
        process.wait(PATIENCE_S)


def test_main_gives_a_script_the_options_of_ddlf_run_and_its_description(tmp_path):
    (tmp_path / "app.py").write_text('import ddlf\nasync def main(cluster):\n    """Say hello."""\nddlf.main(main)\n')
    ended = subprocess.run(
        [sys.executable, "app.py", "--help"], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ)
    )
    assert "Say hello." in ended.stdout
    assert "--local N" in ended.stdout
    assert "--master-epochs N" in ended.stdout


SCRIPT = """
import asyncio, ddlf
async def main(cluster):
    try:
        print("now", flush=True)
        await asyncio.sleep(3600)
    finally:
        print("tidied up", flush=True)
ddlf.main(main)
"""


def test_interrupted_script_cleans_up_and_leaves_no_process(tmp_path, descendants):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, path, "--local", "1", "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (output, errors, process.returncode) == ("tidied up\n", "\nstopped\n", 130)
    assert descendants() == []


NOTEBOOK = """
import asyncio, builtins, sys
builtins.get_ipython = lambda: None
sys.argv = {argv}
import ddlf

async def main(cluster):
    print(await cluster.run_code("6 * 7"))

async def cell():  # IPython runs a cell inside its own event loop
    ddlf.main(main)
    print("and on")

asyncio.run(cell())
"""


def test_main_in_a_notebook_runs_with_the_defaults_and_returns(tmp_path):
    argv = ["/x/ipykernel_launcher.py", "-f", "/run/kernel-1.json"]
    ended = subprocess.run(
        [sys.executable, "-c", NOTEBOOK.format(argv=argv)], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert ended.stderr == ""
    expected = "cluster   no cluster file: 2 workers on this machine\n[42, 42]\nand on\n"
    assert without_waits(ended.stdout) == expected


def test_script_under_ipython_has_own_command_line(monkeypatch):
    import builtins

    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    for argv, notebook in (
        (["app.py", "--local", "2"], False),
        (["/x/ipykernel_launcher.py", "-f", "k"], True),
        (["/x/ipykernel/__main__.py", "-f", "k"], True),
        (["/bin/ipython"], True),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert in_notebook() is notebook


@pytest.mark.parametrize(
    ("target", "instead"),
    [
        (type("Mine", (ddlf.IApp,), {}), r"app = Mine\(cluster\), await app.train_model\(\)"),
        (answer, r"await answer\(cluster\)"),
    ],
)
def test_main_inside_event_loop_names_the_code_to_write(target, instead):
    async def service():
        ddlf.main(target)

    with pytest.raises(RuntimeError, match=rf"this code runs inside one; here write: {instead}$"):
        asyncio.run(service())
