"""Workers with Keras loaded, shared by all training tests: starting them takes longer than most tests."""

import pytest_asyncio

from ddlf import Cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def two_workers():
    async with Cluster.local(2) as cluster:
        yield cluster
