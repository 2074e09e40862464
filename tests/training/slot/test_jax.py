"""Tests of slots with JAX."""

from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.with_jax import check_with_jax


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_local_rules_and_noise_for_samples_hold_with_jax():
    cases = {
        "test_local.py": "test_local and not tensorflow",
        "test_sample_noise.py": "equals_the_formula_in_numpy",
    }
    check_with_jax(Path(__file__).parent, cases, 9)
