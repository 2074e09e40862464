"""Tests of the sharded exchange with a Keras app on real workers: it has the bits of the star, and spares the master."""

import os
import signal

import pytest

from ddlf import Cluster
from ddlf.algorithms.weights import digest
from ddlf.events import WorkerGone
from ddlf.testing import local_cluster
from tests.training.models import Blobs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("one_template")]

MOST = 64_000
"""Largest number of bytes through the master in a round, for each worker, without the indices of samples."""


class Wide(Blobs):
    """An app with a model much larger than the messages about it."""

    master_epochs, slots, width, norm, outer = 3, 3, 4000, True, "nesterov"


async def trained(cluster, exchange, **settings):
    app = Wide(cluster)
    vars(app).update(exchange=exchange, **settings)
    await app.train_sync()
    assert app.ledger.is_exact(app.master_epochs)
    return app, digest([*app.model.get_weights(), *app.run_context.progress.state["outer"]])


async def test_sharded_run_has_the_bits_of_the_star_also_after_a_kill():
    async with Cluster.local(3) as cluster:
        star, expected = await trained(cluster, "star")
        model = sum(w.nbytes for w in star.model.get_weights())
        for workers in ([1], [1, 2], [1, 2, 3]):
            app, actual = await trained(cluster.options(workers=workers), "sharded")
            assert actual == expected
            between = app.history[1]
            assert between.bytes_out + between.bytes_back < MOST * len(workers) < model

        async def kill(record):
            if record.round == 1:
                os.kill((await cluster.workers[1].status())["executor_pid"], signal.SIGKILL)

        app, actual = await trained(cluster, "sharded", on_round=kill)
        assert actual == expected
        assert sum(record.recomputed for record in app.history) == 1


async def test_worker_with_a_cut_link_is_left_out_without_changing_a_bit():
    async with local_cluster(3) as cluster:
        _, expected = await trained(cluster, "star", master_epochs=4)
        ways, events = [await cluster.between(1, 2), await cluster.between(2, 1)], []

        def cut(record):
            if record.round == 2:
                for way in ways:
                    way.partition()

        app = Wide(cluster)
        app.subscribe(events.append)
        vars(app).update(exchange="sharded", master_epochs=4, on_round=cut)
        await app.train_sync()
        assert digest([*app.model.get_weights(), *app.run_context.progress.state["outer"]]) == expected
        (exclusion,) = [event for event in events if isinstance(event, WorkerGone)]
        assert "cannot reach worker" in exclusion.why
        assert "is left out" in exclusion.why
        assert max(record.bytes_out + record.bytes_back for record in app.history[1:3]) < 3 * MOST
