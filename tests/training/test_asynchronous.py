"""Asynchronous training on real workers."""

import pytest

from ddlf.events import Replayed
from ddlf.testing import FaultPlan, local_cluster
from tests.training.models import Quick, app, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_one_slot_alone_equals_synchronous_training(two_workers):
    one = two_workers.options(workers=[1])
    runs = []
    for mode in ("sync", "async"):
        trained = app(one, Quick, mode=mode, master_epochs=3)
        await trained.train_model()
        runs.append(trained.model.get_weights())
    assert equal(*runs)


async def test_every_slot_does_its_rounds_and_every_update_is_applied_once(two_workers):
    trained = app(two_workers, Quick)
    records = await trained.train_async(master_epochs=6, worker_epochs=2)
    assert sorted((record.slot, record.round) for record in records) == [(s, r) for s in (1, 2) for r in (1, 2, 3)]
    assert [record.version for record in records] == [1, 2, 3, 4, 5, 6]
    assert sum(record.samples for record in records) == 3 * 203
    assert records[0].staleness == 0
    assert all(0 <= record.staleness < 6 for record in records)


async def test_it_learns(two_workers):
    trained = app(two_workers.options(workers=[1]), slots=2)  # Keras compiles for each worker
    records = await trained.train_async(master_epochs=10)
    assert records[-1].loss < 0.7 * records[0].loss
    assert (await trained.evaluate_model())["accuracy"] > 0.9


async def test_convergence_stops_all_slots_in_the_middle_of_their_rounds(two_workers):
    trained = app(two_workers)
    trained.is_convergent = lambda record: True
    # Without STOP a round would take minutes.
    trained.samples = 20_000
    records = await trained.train_async(master_epochs=3000, worker_epochs=1)
    assert len(records) == 1


async def test_an_app_that_raises_on_one_worker_ends_training_with_its_error(two_workers):
    class Failing(Quick):
        def train(self, weights, worker_epochs, batch_size):
            if self.worker.id == 2:
                raise RuntimeError("no luck here")
            return super().train(weights, worker_epochs, batch_size)

    with pytest.raises(RuntimeError, match="no luck here"):
        await Failing(two_workers).train_async()
    assert await two_workers.run_code("1 + 1") == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
async def test_each_replay_of_a_run_that_lost_a_worker_ends_with_the_same_bits(tmp_path):
    settings = dict(mode="async", optimizer="adam", dropout=0.3, master_epochs=4)
    async with local_cluster(2) as cluster:
        recorded = app(cluster, **settings, out=tmp_path)
        async with FaultPlan().kill(worker=2, at_round=2).on(recorded) as injection:
            await recorded.train_model()
        assert injection.done
        assert sum(record.recomputed for record in recorded.history) == 1
        (folder,) = tmp_path.iterdir()
        for _ in range(2):
            again = app(cluster, **settings, replay=folder)
            told = []
            again.subscribe(told.append)
            await again.train_model()
            assert equal(again.model.get_weights(), recorded.model.get_weights())
            assert [event.same for event in told if isinstance(event, Replayed)] == [True]
