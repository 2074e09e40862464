"""Tests of slots with JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_local_rules_and_noise_for_samples_hold_with_jax():
    """A process has one backend, so these tests need another process. They share it, because importing JAX takes seconds."""
    cases = {
        "test_local.py": "test_local and not tensorflow",
        "test_sample_noise.py": "equals_the_formula_in_numpy",
    }
    files = [str(Path(__file__).with_name(name)) for name in cases]
    selection = ["-k", " or ".join(f"({words})" for words in cases.values()), *files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    completed = subprocess.run(
        command, env={**os.environ, "KERAS_BACKEND": "jax"}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout
    assert "9 passed" in completed.stdout
