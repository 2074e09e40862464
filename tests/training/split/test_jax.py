"""Tests of models in parts with JAX."""

from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.with_jax import check_with_jax


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_parts_cut_layers_and_image_rows_take_the_steps_of_whole_models_with_jax():
    cases = {
        "test_parts.py": "test_parts and skips",
        "test_images.py": "whole_images and padded-within:2",  # other cut layers, and 3 workers: tests/trials/test_layer_plan.py
    }
    check_with_jax(Path(__file__).parent, cases, 3)
