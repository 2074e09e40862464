"""Tests of a schedule in fractions of the run, in Keras and in slots."""

import math

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training.samples.partitions import PlannedSteps
from ddlf.training.slot.optimizers import RunPosition, Steps
from tests.training.models import Blobs, app

PEAK = 0.1


class TestPlan:
    """The planned number of steps of a slot, for made-up runs."""

    @pytest.mark.parametrize("mode", ["sync", "async"])
    @pytest.mark.parametrize("slots", [1, 2, 4])
    @pytest.mark.parametrize("more", [{}, {"worker_epochs": 2}, {"worker_steps": 3}], ids=["round", "two", "steps"])
    async def test_each_slot_makes_its_planned_steps(self, mode, slots, more):
        run = FakeRun(FakeCluster(slots), mode=mode, slots=slots, master_epochs=4, batch_size=8, **more)
        await run.train_model()
        planned, trained = PlannedSteps(run.run_context.progress, 8), {}
        for worker in run.cluster.workers:
            for task in (task for name, task, *_ in worker.asked if name == "train"):
                trained.setdefault(task.slot, {})[task.round] = task.epochs * math.ceil(len(task.indices) / 8)
        assert sorted(trained) == list(range(slots))
        for slot, rounds in trained.items():
            before = 0
            for number in sorted(rounds):
                steps = planned.of_round(slot, number)
                assert steps == Steps(before, before + rounds[number], sum(rounds.values()), 4)
                before = steps.after

    async def test_slots_that_keep_their_samples_have_their_own_number_of_steps(self):
        run = FakeRun(FakeCluster(3), slots=3, master_epochs=2, batch_size=8, partition="power:1")
        await run.train_model()
        planned = PlannedSteps(run.run_context.progress, 8)
        sizes = np.bincount(run.run_context.progress.owners)
        assert len(set(sizes)) > 1
        assert [planned.of_round(slot, 0).total for slot in range(3)] == [2 * math.ceil(size / 8) for size in sizes]


class Scheduled(Blobs):
    """An app that reports the rate of the last step of each round."""

    schedule = "warmup:0.25,linear"
    learning_rate, master_epochs = PEAK, 4

    def train(self, weights, worker_epochs, batch_size):
        update, metrics = super().train(weights, worker_epochs, batch_size)
        optimizer = self.model.optimizer
        return update, {**metrics, "last_rate": float(optimizer._learning_rate(int(optimizer.iterations) - 1))}


class AllSteps(Scheduled):
    """The same app for the exchange of gradients, which does not use an own ``train`` method."""

    exchange, train = "gradient", Blobs.train


class Own(Blobs):
    async def create_model(self):
        import keras

        await super().create_model()
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        self.model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy")


RUNS = {
    "sync": {},
    "async": {"mode": "async"},
    "async-steps": {"mode": "async", "worker_steps": 3},
    "fresh": {"optimizer_state": "fresh"},
    "downpour": {"mode": "downpour"},
}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("name", "slots"), [("sync", 4), ("async", 4), ("async-steps", 2), ("fresh", 2), ("downpour", 2)]
)
async def test_the_last_step_of_each_slot_is_at_the_end(two_workers, name, slots):
    more = RUNS[name]
    records = await app(two_workers, Scheduled, slots=slots, **more).train_model()
    rates = [record.metrics["last_rate"] for record in records]
    assert 0.3 * PEAK < max(rates) <= PEAK * (1 + 1e-6)
    by_slot = {record.slot: record.metrics["last_rate"] for record in records}
    assert list(by_slot.values()) == pytest.approx([0] * len(by_slot), abs=1e-6)
    assert len(by_slot) == (1 if "mode" not in more else slots)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_with_gradients_averaged_every_step_the_master_reaches_the_end(two_workers):
    trained = app(two_workers, AllSteps, slots=2)
    records = await trained.train_model()
    optimizer = trained.model.optimizer
    assert int(optimizer.iterations) == len(records)
    rates = [float(optimizer._learning_rate(step)) for step in (len(records) // 4 - 1, len(records) - 1)]
    assert rates == pytest.approx([PEAK, 0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_other_settings_of_the_rate_are_refused(two_workers):
    with pytest.raises(
        AppError, match=r"schedule='cosine.*' sets the learning rate, but .* already has its own schedule"
    ):
        await app(two_workers, Own, schedule="cosine").train_model()


@pytest.mark.slow
def test_a_fit_has_the_rates_of_the_formula_and_is_saved():
    import keras

    from ddlf.extras.stabilisers import RunSchedule

    schedule = RunSchedule(5e-4, "warmup:0.05,cosine", steps=600, epochs=20)
    rates = [float(schedule(step)) for step in (0, 14, 314, 599)]
    assert rates == pytest.approx([1.6667e-5, 2.5e-4, 2.5e-4, 0], abs=1e-9)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert float(again(14)) == float(schedule(14))


@pytest.mark.slow
def test_plain_keras_without_a_length_of_training_is_an_error():
    from ddlf.extras.stabilisers import RunSchedule

    with pytest.raises(ConfigError, match=r"which plain Keras does not tell it; RunSchedule\(\.\.\., steps="):
        RunSchedule(0.1)(0)


@pytest.mark.slow
def test_a_round_of_other_steps_than_were_planned_is_stretched():
    import keras

    from ddlf.extras.stabilisers import RunSchedule

    optimizer = keras.optimizers.SGD(RunSchedule(1.0, "linear"))
    optimizer.build([])
    position = RunPosition.of(optimizer)
    optimizer._iterations.assign(7)  # the number of earlier steps does not matter
    position.set(Steps(10, 20, 40, 4), steps_made=5)
    assert [float(optimizer._learning_rate(7 + step)) for step in (0, 4)] == pytest.approx([1 - 12 / 40, 1 - 20 / 40])
