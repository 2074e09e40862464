"""A folder with mnist.npz, for tests that run what loads it; also where neither it nor a network is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def folder_with_mnist(stand_in: Path) -> Path:
    """The user's if it has it, else a new one with a stand-in."""
    data = Path(os.environ.get("DDLF_DATA", ""))
    return data if (data / "mnist.npz").is_file() else stand_in_for_mnist(stand_in)


def stand_in_for_mnist(folder: Path) -> Path:
    """Where MNIST is not at hand: scikit-learn's real digits, enlarged to its size and repeated to its number."""
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
