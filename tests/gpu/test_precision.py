"""Tests of number formats on a real card: each one learns, weights stay float32, and TF32 is reported and can be off."""

from __future__ import annotations

import numpy as np
import pytest

from ddlf.events import ModelBuilt
from ddlf.testing import local_cluster
from tests.training.models import app

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
async def test_each_number_format_learns_on_a_card(precision):
    async with local_cluster(1) as cluster:
        trained = app(cluster, precision=precision, optimizer="adam", learning_rate=0.01, width=256, master_epochs=6)
        await trained.train_sync()
        assert trained.history[-1].metrics["accuracy"] > 0.9
        assert {array.dtype for array in trained.model.get_weights()} == {np.dtype("float32")}


async def test_tf32_is_reported_and_can_be_switched_off():
    async with local_cluster(1) as cluster:
        reported = {}
        for tf32 in ("on", "off"):
            trained, events = app(cluster, tf32=tf32, master_epochs=1), []
            trained.subscribe(events.append)
            await trained.train_sync()
            reported[tf32] = next(event.tf32 for event in events if isinstance(event, ModelBuilt))
        assert reported == {"on": "products and convolutions", "off": ""}
