"""Run slow tests again with JAX. A process has one backend of Keras, so this takes another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def check_with_jax(folder: Path, cases: Mapping[str, str], count: int) -> None:
    """Run tests in one process with JAX, because importing it takes seconds.

    Args:
        folder: The folder of the tests.
        cases: The tests to run: for each file an expression for ``-k``, which begins with the name of the file.
        count: How many tests this selects.

    Raises:
        AssertionError: A test failed, or others were selected.
    """
    files = [str(folder / name) for name in cases]
    selection = ["-k", " or ".join(f"({words})" for words in cases.values()), *files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout
    assert f"{count} passed" in completed.stdout
