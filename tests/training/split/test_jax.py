"""Tests of models in parts with JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_parts_cut_layers_and_image_rows_take_the_steps_of_whole_models_with_jax():
    """A process has one backend, so these tests need another process. They share it, because they compile the same functions."""
    cases = {
        "test_parts.py": "test_parts and skips",
        "test_images.py": "whole_images and padded-within:2",  # other cut layers, and 3 workers: tests/trials/test_layer_plan.py
    }
    files = [str(Path(__file__).with_name(name)) for name in cases]
    selection = ["-k", " or ".join(f"({words})" for words in cases.values()), *files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    completed = subprocess.run(
        command, env={**os.environ, "KERAS_BACKEND": "jax"}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout
    assert "3 passed" in completed.stdout
