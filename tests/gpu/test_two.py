"""Tests with two workers that share a card, each with a limit of its memory."""

from __future__ import annotations

import pytest

from ddlf.errors import DDLFError
from tests.gpu.apps import Greedy, accuracy, device_here, trained

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session")]


async def test_two_workers_compute_on_one_card(card, two):
    assert await two.run_method(device_here) == 2 * [{"mask": card.uuid, "kind": "gpu", "count": 1}]
    assert await accuracy(await trained(two)) > 0.9


async def test_allocation_over_the_limit_is_refused_and_workers_train_on(two):
    with pytest.raises(DDLFError, match=r"(?i)memory"):
        await trained(two, Greedy)
    assert await accuracy(await trained(two)) > 0.9


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange": "gradient", "worker_epochs": 1, "batch_size": 32},
        {"exchange": "sharded"},
        {"mode": "downpour", "master_epochs": 8},
        {"mode": "async"},
        {"optimizer_state": "averaged"},
    ],
    ids=["gradient", "sharded", "downpour", "async", "averaged"],
)
async def test_loop_learns_on_card(two, settings):
    assert await accuracy(await trained(two, **settings)) > 0.85
