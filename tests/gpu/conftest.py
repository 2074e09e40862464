"""Tests with a real card. They run only with ``scripts/test --gpu``, and fail without a card."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from ddlf import Cluster
from ddlf.worker.cards import Card
from tests.gpu.needs import first_card

collect_ignore_glob = [] if os.environ.get("DDLF_GPU") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def card(own_folders: Path) -> Iterator[Card]:
    """Return the first card of this machine. XLA uses all its optimizations, unlike in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
        yield first_card()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lone_worker(card: Card) -> AsyncIterator[Cluster]:
    """Return one worker that uses the card alone."""
    async with Cluster.local(1) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two(card: Card) -> AsyncIterator[Cluster]:
    """Return two workers that share the card, each with at most 4 GiB of its memory."""
    async with Cluster.local(2, gpus=[card.number], gpu_memory="4GiB") as cluster:
        yield cluster
