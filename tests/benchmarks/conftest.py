"""MNIST with few images, for benchmarks that load it in each of their processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
