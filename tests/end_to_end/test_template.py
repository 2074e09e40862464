"""Training on executors that are forks of one process with Keras: to the same bits as on processes of their own."""

import hashlib
import os
import sys
from functools import partial

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.testing import local_cluster
from tests.training.models import Blobs

pytestmark = pytest.mark.asyncio(loop_scope="module")


def app_on(cluster):
    """With everything random that a model can have."""
    app = Blobs(cluster)
    app.dropout, app.norm, app.optimizer, app.master_epochs = 0.3, True, "adam", 4
    return app


def bits(app):
    digest = hashlib.sha256()
    for array in app.model.get_weights():
        digest.update(array.tobytes())
    return digest.hexdigest()


def origin():
    """Who forked this process, and what a new one has imported before it is asked for anything."""
    return os.getppid(), "tensorflow" in sys.modules or "jax" in sys.modules or "torch" in sys.modules


def kill_after_the_first(machine, record):
    if record.round == 1:
        machine.kill()


async def test_an_executor_that_is_killed_in_training_is_back_without_an_import_and_the_bits_are_the_same():
    results = []
    async with local_cluster(2) as cluster:
        second = cluster.machine(2)
        for kill in (False, True):
            app = app_on(cluster)
            if kill:
                app.on_round = partial(kill_after_the_first, second)
            await app.train_sync()
            results.append(bits(app))
        assert second.kill()  # also after the run
        (ours, _), (theirs, imported) = await cluster.options(idempotent=True).run_method(origin)
        assert ours == theirs
        assert imported
    assert results[0] == results[1]


@pytest.mark.slow
async def test_forks_train_to_the_bits_of_processes_of_their_own(monkeypatch):
    results = []
    for forked in (True, False):
        monkeypatch.setenv("DDLF_FORK", str(int(forked)))
        async with Cluster.local(2) as cluster:
            app = app_on(cluster)
            await app.train_sync()
            results.append(bits(app))
            parents = {parent for parent, _ in await cluster.run_method(origin)}
            daemons = {status["pid"] for status in await cluster.status()}
            assert (len(parents), parents == daemons) == ((1, False) if forked else (2, True))
    assert results[0] == results[1]
