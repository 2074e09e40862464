"""Fixtures that save most of the time of benchmarks with many processes: few images of MNIST, and fewer imports of Keras."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import elgato, measure, training
from tests.mnist import folder_with_mnist

KEPT = {"x_train": 4_000, "y_train": 4_000, "x_test": 500, "y_test": 500}
"""Largest number of rows of each array."""


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the first images of MNIST: a process needs half a second to load all of them."""
    folder = tmp_path_factory.mktemp("digits")
    with np.load(folder_with_mnist(folder / "stand-in") / "mnist.npz") as arrays:
        np.savez(folder / "mnist.npz", **{name: arrays[name][:rows] for name, rows in KEPT.items()})
    return folder


HERE = {"sync", "published-sync", "plain", "again", "--fit"}
"""First arguments of children that import Keras before they do anything else. Contender ``limit`` remains a child."""


def run_child(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Do the same as ``benchmarks.measure.run_child``, but run some children in this process, which has imported Keras."""
    if arguments[0] not in HERE:
        return usual_run_child(module, *arguments, timeout_s=timeout_s)
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", [module, *arguments]),
        contextlib.chdir(measure.ROOT),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return {**json.loads(output.getvalue().splitlines()[-1]), "others_cores": None}


usual_run_child = measure.run_child


@pytest.fixture
def few_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks run children in this process: an import of Keras takes longer than what most of them do."""
    for module in (measure, training, elgato):
        monkeypatch.setattr(module, "run_child", run_child)
