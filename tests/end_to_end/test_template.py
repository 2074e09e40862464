"""Tests of executors that are forks of one process with Keras: they train to the same bits as separate processes.

``tests/training/`` kills such executors in runs, which end with the same bits.
"""

import hashlib
import os
import signal
import sys

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.training.roles import PRELOADED
from tests.training.models import Blobs

pytestmark = pytest.mark.asyncio(loop_scope="session")


def app_on(cluster):
    """Return an app whose model has each kind of randomness."""
    app = Blobs(cluster)
    app.dropout, app.norm, app.optimizer, app.master_epochs = 0.3, True, "adam", 2
    return app


def bits(app):
    digest = hashlib.sha256()
    for array in app.model.get_weights():
        digest.update(array.tobytes())
    return digest.hexdigest()


def origin():
    """Return the id of the parent process, and whether this process has imported a backend of Keras."""
    return os.getppid(), "tensorflow" in sys.modules or "jax" in sys.modules or "torch" in sys.modules


@pytest.mark.slow
async def test_killed_executors_return_without_an_import(standing_template, two_workers):
    assert await standing_template.preload(PRELOADED) == ""
    await two_workers.connect()  # an executor that an earlier test has killed may not have restarted yet
    killed = {worker.executor.pid for worker in two_workers.workers}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    (first, is_imported), (second, is_imported_too) = await two_workers.options(idempotent=True).run_method(origin)
    assert first == second
    assert is_imported
    assert is_imported_too
    assert not killed & {worker.executor.pid for worker in two_workers.workers}


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
async def test_forked_executors_train_to_the_bits_of_separate_processes(monkeypatch):
    results = []
    for forked in (True, False):
        if not forked:
            monkeypatch.setenv("DDLF_FORK", "0")
        async with Cluster.local(2) as cluster:
            app = app_on(cluster)
            await app.train_sync()
            results.append(bits(app))
            parents = {parent for parent, _ in await cluster.run_method(origin)}
            daemons = {status.pid for status in await cluster.status()}
            assert (len(parents), parents == daemons) == ((1, False) if forked else (2, True))
    assert results[0] == results[1]
