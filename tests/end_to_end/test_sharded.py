"""Tests of the sharded exchange with a Keras app on real workers: it has the bits of the star, and spares the master."""

import os
import signal

import pytest

from ddlf.algorithms.weights import digest
from ddlf.events import WorkerGone
from ddlf.testing import local_cluster
from tests.training.models import Blobs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("one_template")]

MOST = 64_000
"""Largest number of bytes through the master in a round, for each worker, without the indices of samples."""


class Wide(Blobs):
    """An app with a model much larger than the messages about it."""

    master_epochs, slots, width, norm, outer = 4, 3, 4000, True, "nesterov"


async def trained(cluster, exchange, **settings):
    app = Wide(cluster)
    received = []
    app.subscribe(received.append)
    vars(app).update(exchange=exchange, **settings)
    await app.train_sync()
    assert app.ledger.is_exact(app.master_epochs)
    return app, digest([*app.model.get_weights(), *app.run_context.progress.state["outer"]]), received


async def test_sharded_run_has_the_bits_of_the_star_also_after_a_kill_and_a_cut_link():
    async with local_cluster(3) as cluster:
        star, expected, _ = await trained(cluster, "star")
        model = sum(w.nbytes for w in star.model.get_weights())
        for workers in ([1], [1, 2, 3]):
            app, actual, _ = await trained(cluster.options(workers=workers), "sharded")
            assert actual == expected
            between = app.history[1]
            assert between.bytes_out + between.bytes_back < MOST * len(workers) < model

        async def kill(record):
            if record.round == 1:
                os.kill((await cluster.workers[1].status()).executor_pid, signal.SIGKILL)

        app, actual, _ = await trained(cluster, "sharded", on_round=kill)
        assert actual == expected
        assert sum(record.recomputed for record in app.history) == 1

        ways = [await cluster.between(1, 2), await cluster.between(2, 1)]

        def cut(record):
            if record.round == 2:
                for way in ways:
                    way.partition()

        app, actual, received = await trained(cluster, "sharded", on_round=cut)
        assert actual == expected
        (exclusion,) = [event for event in received if isinstance(event, WorkerGone)]
        assert "cannot reach worker" in exclusion.why
        assert "is left out" in exclusion.why
        assert max(record.bytes_out + record.bytes_back for record in app.history[1:3]) < 3 * MOST
