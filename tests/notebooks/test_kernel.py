"""Tests in a real Jupyter kernel: cells use a cluster, show results and errors, and work after an interrupt."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@dataclass
class Shown:
    """The output of a cell."""

    printed: str = ""
    html: str = ""
    value: str = ""
    error: str = ""
    lines: list[str] = field(default_factory=list)


class Cells:
    """A kernel that runs one cell after another."""

    def __init__(self, folder):
        from jupyter_client.manager import (
            start_new_kernel,
        )  # at the top, each process that collects tests would import it

        self.manager, self.client = start_new_kernel(cwd=str(folder))

    def begin(self, code):
        self.message, self.shown = self.client.execute(code), Shown()

    def hear(self):
        """Receive the next message, and return whether the cell has ended."""
        message = self.client.get_iopub_msg(timeout=PATIENCE_S)
        content, kind = message["content"], message["msg_type"]
        if message["parent_header"].get("msg_id") != self.message:
            return False
        if kind == "stream":
            self.shown.printed += content["text"]
        elif kind == "execute_result":
            self.shown.html = content["data"].get("text/html", "")
            self.shown.value = content["data"]["text/plain"]
        elif kind == "error":
            self.shown.lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"])).splitlines()
            self.shown.error = content["ename"]
        return kind == "status" and content["execution_state"] == "idle"

    def end(self):
        while not self.hear():
            pass
        return self.shown

    def __call__(self, code):
        self.begin(code)
        return self.end()

    def interrupted(self, code, after):
        """Run a cell, interrupt it when it has printed something, and wait for its end."""
        self.begin(code)
        while not re.search(after, self.shown.printed):
            assert not self.hear(), self.shown
        self.manager.interrupt_kernel()
        return self.end()

    @property
    def processes(self):
        """The running child processes of the kernel, except the resource tracker of Python's multiprocessing."""
        children = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """Return a function that runs a cell in a kernel. All tests of this file share the kernel."""
    cells = Cells(tmp_path_factory.mktemp("notebook"))
    yield cells
    cells.client.stop_channels()
    cells.manager.shutdown_kernel(now=True)


def test_calls_are_awaited_at_the_top_level_of_cells(cell):
    shown = cell("from ddlf import Cluster\ncluster = await Cluster.local(2).connect()\ncluster")
    assert shown.html.count("<tr>") == 3
    assert shown.html.count(">alive</td>") == 2
    assert cell("def step(x):\n    return x + 1\nawait cluster.run_method(step, x=1)").value == "[2, 2]"
    assert cell("async with Cluster.local(1) as other:\n    print(await other.run_code('6 * 7'))").printed == "[42]\n"
    assert ">alive</td>" in cell("cluster.workers[0]").html


def test_places_without_a_worker_are_named_in_the_cell_once(cell):
    setup = "from ddlf import Cluster, errors\nfrom ddlf.cluster.launch import gate\ngate.SAY_AFTER_S = 0.1\n"
    on = "Cluster.on('command', command='sleep 1000 # {worker}', workers=2, start_timeout=1)"
    shown = cell(f"{setup}try:\n    await {on}.connect()\nexcept errors.ConnectError:\n    print('over')")
    waits = "waiting for workers at places 0 and 1: its command runs, and no worker has come yet"
    assert sorted(shown.printed.splitlines()) == ["over", waits]


def test_workers_run_the_newest_definition_of_a_function(cell):
    cell("class Scale:\n    factor = 2\n\ndef scaled(x):\n    return Scale.factor * x")
    assert cell("await cluster.run_method(scaled, x=3)").value == "[6, 6]"
    cell("class Scale:\n    factor = 10")
    assert cell("await cluster.run_method(scaled, x=3)").value == "[30, 30]"
    cell("await cluster.add_method(scaled)\ndef scaled(x):\n    return -x")
    assert cell("await cluster.run(scaled, x=3)").value == "[-3, -3]"


def test_an_error_is_shown_with_the_cells_own_lines_of_both_sides(cell):
    cell("def divide(x):\n    return 1 / x")
    shown = cell("await cluster.run_method(divide, x=0)")
    assert shown.error == "RemoteError"
    assert "    await cluster.run_method(divide, x=0)" in shown.lines
    assert shown.lines[-2:] == ["    return 1 / x", "ZeroDivisionError: division by zero"]
    assert len(shown.lines) < 15, shown.lines
    assert not any("/ddlf/" in line or "site-packages" in line for line in shown.lines)


def test_main_runs_with_the_defaults_and_can_be_interrupted(cell):
    shown = cell("import ddlf\nasync def main(cluster):\n    print(await cluster.run_code('2 + 2'))\nddlf.main(main)")
    assert "[4, 4]\n" in shown.printed
    waiting = (
        "import asyncio\nasync def main(cluster):\n    print('now')\n    await asyncio.sleep(3600)\nddlf.main(main)"
    )
    before = len(cell.processes)
    assert cell.interrupted(waiting, after="now").error == "KeyboardInterrupt"
    assert len(cell.processes) == before
    assert cell("print('and on')").printed == "and on\n"


APP = """
import numpy as np
import ddlf

class App(ddlf.IApp):
    batch_size = 8

    async def load_dataset(self):
        self.x_train = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        self.y_train = self.x_train.sum(axis=1, keepdims=True)

    async def create_model(self):
        import keras
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")

app = App(cluster)
"""


def test_an_interrupt_ends_training_and_the_next_cell_continues_it(cell):
    assert cell(APP).error == ""
    shown = cell.interrupted("await app.train_sync(master_epochs=100_000)", after=r"round +\d+/")
    assert shown.error == "CancelledError"
    assert re.fullmatch(r"interrupted: training ended after round \d+; .* continues there", shown.lines[-1])
    assert len(shown.lines) == 1
    trained = int(cell("len(app.history)").value)
    assert trained >= 1
    shown = cell("await app.train_sync(master_epochs=2)\nlen(app.history)")
    assert (shown.error, shown.value) == ("", str(trained + 2))
    assert cell("class App(App):\n    master_epochs = 1\nawait App(cluster).train_model()").error == ""
    assert cell("await cluster.close()").error == ""
    deadline = time.monotonic() + PATIENCE_S
    while cell.processes and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cell.processes == []


def test_the_notebook_of_the_documentation_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs/tutorial/notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "a committed notebook has no outputs"
    client = NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    (tested,) = [cell for cell in notebook.cells if cell.source.startswith("await app.evaluate_model()")]
    accuracy = re.search(r"'accuracy': ([\d.]+)", tested.outputs[-1]["data"]["text/plain"])
    assert float(accuracy[1]) > 0.85
