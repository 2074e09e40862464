"""Tests of planned faults with a model that is split over workers, and with L-BFGS: the weights keep their bits."""

import pytest

from ddlf.testing import FaultPlan, local_cluster
from tests.end_to_end.test_lbfgs import Smooth
from tests.training.models import equal
from tests.training.split.test_split import Cut

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("one_template")]


async def trained(app, plan, **settings):
    vars(app).update(settings)
    async with plan.on(app) as injection:
        await app.train_model()
    assert len(injection.done) == len(plan.faults)
    return app


async def test_parts_that_are_slowed_cut_off_and_killed_change_no_bit():
    plan = (
        FaultPlan()
        .slow(slot=1, factor=3, seconds=1)
        .cut_link(slot=1, other=2, at_round=2, seconds=0.5)
        .kill(slot=2, at_round=3)
        .hang(slot=1, at_round=4, seconds=0.5)
    )
    async with local_cluster(2) as cluster:
        settings = dict(master_epochs=5, micro_batches=2, batch_size=64, evaluate_every=0)
        undisturbed = await trained(Cut(cluster), FaultPlan(), **settings)
        disturbed = await trained(Cut(cluster), plan, **settings)
    assert equal(disturbed.model.get_weights(), undisturbed.model.get_weights())
    assert disturbed.ledger.is_exact(5)


async def test_portions_of_slowed_cut_off_and_killed_workers_change_no_bit():
    plan = (
        FaultPlan()
        .slow(slot=1, factor=3, seconds=1)
        .cut_link(slot=1, other=2, at_round=2, seconds=0.5)  # before the kills: later, one worker may have both slots
        .kill_shard(shard=1, at_round=3)
        .kill(slot=2, at_round=4)
    )
    async with local_cluster(2) as cluster:
        settings = dict(master_epochs=5, slots=2, evaluate_every=0)
        undisturbed = await trained(Smooth(cluster), FaultPlan(), **settings)
        disturbed = await trained(Smooth(cluster), plan, **settings)
    assert equal(disturbed.model.get_weights(), undisturbed.model.get_weights())
    assert disturbed.ledger.is_exact(5)
