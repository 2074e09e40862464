"""Tests of asynchronous training on real workers."""

import pytest

from tests.training.models import Quick, app

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.slow
async def test_asynchronous_training_learns(two_workers):
    trained = app(two_workers.options(workers=[1]), slots=2)  # one worker, because Keras compiles on each
    records = await trained.train_async(master_epochs=10)
    assert records[-1].loss < 0.7 * records[0].loss
    assert (await trained.evaluate_model())["accuracy"] > 0.9


@pytest.mark.slow
async def test_convergence_stops_all_slots_in_the_middle_of_their_rounds(two_workers):
    trained = app(two_workers)
    trained.is_convergent = lambda record: True
    # Without a stop within the round, a round would take minutes.
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
