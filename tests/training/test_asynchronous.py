"""Asynchronous training on real workers."""

import pytest

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
