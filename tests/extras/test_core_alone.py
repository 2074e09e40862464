"""Tests of the core without its optional parts: a copy of the tree without them imports, trains and passes its tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.extras import BUILT_IN
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
# these tests train with each loop, merge rule and codec
CORE_TESTS = ("tests/contracts", "-k", "test_run_has_the_same_bits")
IMPORT_ALL = """
import importlib, pkgutil, sys
import ddlf
names = [module.name for module in pkgutil.walk_packages(ddlf.__path__, "ddlf.") if module.name != "ddlf.__main__"]
for name in names:
    importlib.import_module(name)
from ddlf.extras import installed
assert len(names) > 200, len(names)
assert installed() == (), installed()
assert not [name for name in sys.modules if name.startswith("ddlf.extras.")]
"""
APP = """
import keras, numpy as np
import ddlf

class App(ddlf.IApp):
    master_epochs = 2

    async def load_dataset(self):
        self.x_train = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
        self.y_train = self.x_train.sum(axis=1, keepdims=True)

    async def create_model(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
"""

SETTINGS = {
    "schedule": "cosine",
    "clip": "rolling",
    "multipliers": "freeze:0.5",
    "advice": "strict",
    "planned": True,
    "scout": True,
    "notation": "a.nnm",
}
REFUSED = f"""
import asyncio
import ddlf

class App(ddlf.IApp):
    async def load_dataset(self): ...
    async def create_model(self): ...

for name, value in {SETTINGS}.items():
    app = App(ddlf.Cluster.local(1))
    setattr(app, name, value)
    try:
        asyncio.run(app.train_model())
    except ddlf.DDLFError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Return a copy of the tree without the optional parts."""
    root = tmp_path_factory.mktemp("core")
    for name in ("ddlf", "tests", "apps"):
        shutil.copytree(
            ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "extras" if name == "tests" else "")
        )
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in BUILT_IN:
        shutil.rmtree(root / "ddlf" / "extras" / name)
    return root


def run(core, *arguments):
    """Run Python with the copy, and return the completed process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(core), os.environ["PYTHONPATH"]])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=core, env=environment, capture_output=True, text=True, timeout=10 * PATIENCE_S
    )


@pytest.mark.slow
def test_core_imports_every_module_without_parts(core):
    ended = run(core, "-c", IMPORT_ALL)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_core_passes_its_tests_without_parts(core):
    ended = run(core, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:anyio", "-q", *CORE_TESTS)
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.slow
def test_core_trains_on_two_workers_without_parts(core):
    (core / "app.py").write_text(APP)
    ended = run(core, "-m", "ddlf", "run", "app.py", "--local", "2", "--save", "model.keras")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (core / "model.keras").is_file()


def test_core_refuses_settings_whose_part_is_missing(core):
    ended = run(core, "-c", REFUSED)
    assert ended.returncode == 0, ended.stderr
    for name, value in SETTINGS.items():
        assert f"{name}={value!r} has no effect: the part of DDLF that implements it is not installed" in ended.stdout
        assert f"leave {name} out" in ended.stdout


def test_core_names_the_missing_part_that_a_user_requests(core):
    ended = run(core, "-c", "import ddlf; ddlf.load_notation")
    assert ended.stderr.splitlines()[-1].startswith("AttributeError: module 'ddlf' has no attribute 'load_notation'")
    (core / "model.nnm").write_text("x:input 2;")
    assert "a Python file" in run(core, "-m", "ddlf", "run", "model.nnm").stderr
    assert "unknown command 'advise'" in run(core, "-m", "ddlf", "advise", "app.py").stderr
