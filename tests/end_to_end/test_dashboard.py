"""Tests of a run with a dashboard: the line with its address, the commands that show the run, and the button that stops it."""

import asyncio
import contextlib
import os
import re
import sys
from subprocess import PIPE

import pytest
from websockets.asyncio.client import connect

from ddlf.monitor.dashboard.viewer import watch
from tests.patience import PATIENCE_S
from tests.processes import command

APP = """
import ddlf
import numpy as np

class App(ddlf.IApp):
    master_epochs, batch_size = 100_000, 16

    async def load_dataset(self):
        self.x_train = np.arange(96, dtype="float32").reshape(48, 2) / 96
        self.y_train = self.x_train.sum(axis=1, keepdims=True)

    async def create_model(self):
        import keras

        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
"""


@pytest.mark.slow
async def test_run_is_watched_and_ended_by_the_button_of_its_page(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    arguments = ("run", "app.py", "--local", "1", "--dashboard", "--save", "m.keras")
    environment = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ddlf.cli.main", *arguments), stdout=PIPE, stderr=PIPE, cwd=tmp_path, env=environment
    )
    async with asyncio.timeout(PATIENCE_S):
        while not (link := re.search(r"http://\S+", (await run.stdout.readline()).decode())):
            pass
        port, token = re.fullmatch(r"http://127.0.0.1:(\d+)/#(.*)", link[0]).groups()
        async with contextlib.aclosing(watch(int(port), token)) as views:
            async for view in views:
                if len(view["curves"].get("loss", [])) > 3 and view["workers"]:
                    break
        assert view["lanes"][0]["updates"] > 2
        shown = await asyncio.to_thread(command, "ddlf.cli.main", "top", "--once", cwd=tmp_path)
        assert shown.stdout.startswith("App  training  round ")
        shown = await asyncio.to_thread(command, "ddlf.cli.main", "dashboard", "--no-open", cwd=tmp_path)
        assert link[0] in shown.stdout
        async with connect(f"ws://127.0.0.1:{port}/live", subprotocols=["ddlf", token], proxy=None) as page:
            await page.send('{"stop": true}')
            async for _ in page:
                pass
        _, errors = await run.communicate()
    assert run.returncode == 130
    assert "stopping  after this round; then the model is saved in m.keras" in errors.decode()
    assert "stopped   after round " in errors.decode()
    assert (tmp_path / "m.keras").exists()
    ended = await asyncio.to_thread(command, "ddlf.cli.main", "dashboard", "--no-open", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (3, "")
