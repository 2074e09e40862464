"""Rules on real workers, in the short: what they promise in simulated runs holds there, too."""

import numpy as np
import pytest

from tests.training.models import Blobs, Quick, app, equal

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


class Turned(Quick):
    """Some slots send their update ten times as long and turned around."""

    slots = 10
    samples = 1000
    master_epochs = 6
    learning_rate = 0.1
    wrong: tuple[int, ...] = ()

    def train(self, weights, worker_epochs, batch_size):
        update, metrics = super().train(weights, worker_epochs, batch_size)
        factor = np.float32(-10 if self.replica._task.slot in self.wrong else 1)
        return [factor * array for array in update], metrics


async def test_with_a_fifth_of_the_slots_turned_around_robust_merges_train_as_without_and_the_mean_does_not(
    two_workers,
):
    found = {}
    for merge, wrong in [
        ("mean", ()),
        ("mean", (3, 8)),
        *((rule, (3, 8)) for rule in ("krum:2", "geometric")),
    ]:
        trained = app(two_workers, Turned, merge=merge, wrong=wrong)
        await trained.train_model()
        found[merge, wrong] = (await trained.evaluate_model())["accuracy"]
    clean = found.pop(("mean", ()))
    assert clean > 0.85
    assert found.pop(("mean", (3, 8))) < clean - 0.1
    assert min(found.values()) > clean - 0.02, found


async def test_fragments_and_optimizers_that_stay_are_the_same_bits_on_one_worker_and_on_two(two_workers):
    settings = {
        "slots": 2,
        "outer": "streaming:2,alpha=0.25",
        "optimizer": "adam",
        "optimizer_state": "stays",
        "worker_steps": 3,
        "width": 64,
        "codec": "int4-block",
        "weights_codec": "delta:int4-block",
    }
    one = app(two_workers.options(workers=[1]), Blobs, **settings)
    await one.train_model()
    two = app(two_workers, Blobs, **settings)
    await two.train_model()
    assert equal(one.model.get_weights(), two.model.get_weights())
    assert one.ledger.is_exact(one.master_epochs)
