"""A folder with ``mnist.npz`` for tests of programs that load it. It works without a network."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def folder_with_mnist(stand_in: Path) -> Path:
    """Return the folder ``DDLF_DATA`` if it has MNIST; otherwise write a stand-in to a new folder, and return this one."""
    data = Path(os.environ.get("DDLF_DATA", ""))
    return data if (data / "mnist.npz").is_file() else stand_in_for_mnist(stand_in)


def stand_in_for_mnist(folder: Path) -> Path:
    """Write scikit-learn's digits in the format of MNIST to a new folder: 28 x 28 pixels, 60,000 training images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.pad(np.kron(digits.images * 15.9, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))).astype("uint8")
    test = np.arange(len(images)) % 5 == 0
    train = np.resize(np.flatnonzero(~test), 60_000)
    folder.mkdir()
    np.savez(
        folder / "mnist.npz",
        x_train=images[train],
        y_train=digits.target[train].astype("uint8"),
        x_test=images[test],
        y_test=digits.target[test].astype("uint8"),
    )
    return folder
