"""Tests of the samples that each slot gets, round by round."""

import numpy as np
import pytest

from ddlf.algorithms.partition import shuffled
from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.events import DataPartitioned, SlotsChanged
from ddlf.testing import FakeCluster, FakeRun, FakeWorker

LABELS = np.arange(203) % 7


async def trained(workers=3, **settings):
    run = FakeRun(FakeCluster(workers), **{"partition": "dirichlet:0.5", "y_train": LABELS, **settings})
    run.event_log = []
    run.subscribe(run.event_log.append)
    await run.train_model()
    return run


def samples_of_slots(run):
    """Return for each slot the samples of its rounds."""
    samples = {}
    for worker in run.cluster.workers:
        for verb, *facts in worker.asked:
            if verb == "train":
                samples.setdefault(facts[0].slot, []).append(facts[0].indices.tolist())
    return samples


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("partition", ["dirichlet:0.5", "classes:2", "power:1"])
async def test_slot_keeps_its_samples_in_another_order_each_round(mode, partition):
    run = await trained(mode=mode, partition=partition)
    assert run.ledger.is_exact(run.master_epochs)
    for rounds in samples_of_slots(run).values():
        orders = [shuffled(203, 0, number).tolist() for number in range(run.master_epochs)]
        assert rounds == [[sample for sample in order if sample in set(rounds[0])] for order in orders]
        assert len({tuple(sorted(samples)) for samples in rounds}) == 1
        assert len({tuple(samples) for samples in rounds}) == run.master_epochs


async def test_samples_of_each_slot_are_reported_once_at_the_start():
    run = await trained()
    (partitioned,) = [event for event in run.event_log if isinstance(event, DataPartitioned)]
    assert partitioned.partition == "dirichlet:alpha=0.5"
    for slot, rounds in samples_of_slots(run).items():
        labels, counts = np.unique(LABELS[rounds[0]], return_counts=True)
        assert partitioned.samples[slot] == len(rounds[0])
        assert partitioned.labels[slot] == dict(zip(map(str, labels), counts.tolist(), strict=True))
    assert not [event for event in (await trained(partition="equal")).event_log if isinstance(event, DataPartitioned)]


async def test_joining_worker_gets_no_slot_when_all_samples_have_owners():
    class Growing(FakeRun):
        def on_round(self, record):
            if record.round == 1:
                worker = FakeWorker(self.cluster.N + 1)
                self.cluster.workers.append(worker)

    for partition, slots in (("equal", 3), ("power:1", 2)):
        run = Growing(FakeCluster(2), partition=partition)
        received = []
        run.subscribe(received.append)
        await run.train_model()
        assert run.history[-1].slots == slots
        assert run.ledger.is_exact(run.master_epochs)
        assert any(isinstance(event, SlotsChanged) for event in received) == (partition == "equal")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            dict(y_train=None),
            "partition 'dirichlet:alpha=0.5': it depends on labels, but the master has no y_train; set it in load_dataset",
        ),
        (dict(y_train=np.linspace(0, 1, 203)), "this partition needs whole numbers or one-hot rows as labels"),
        (dict(slots=204), "partition 'dirichlet:alpha=0.5': 203 samples cannot be split over 204 slots"),
        (
            dict(slots=204, partition="equal"),
            "203 samples cannot be split over 204 slots; train with at most 203 slots",
        ),
        (dict(slots=10**12, partition="equal"), f"203 samples cannot be split over {10**12} slots"),
        (dict(master_epochs=10**12), "1,000,000,000,000 epochs are more than the 5,000,000 rounds that a training can"),
        (dict(master_epochs=10**6, worker_steps=1, batch_size=1, partition="equal"), "1,000,000 epochs are more than"),
        (dict(partition="classes:100"), "partition 'classes:per_slot=100': 203 samples cannot be cut into 300 shares"),
    ],
)
async def test_impossible_rounds_and_parts_are_refused_before_a_folder_is_made(settings, sentence, tmp_path):
    with pytest.raises(ConfigError) as refused:
        await trained(**settings, checkpoint=tmp_path / "checkpoints")
    assert sentence in str(refused.value)
    assert not (tmp_path / "checkpoints").exists()


async def test_a_training_continues_only_with_its_partition(tmp_path):
    await trained(checkpoint=tmp_path, master_epochs=2)
    with pytest.raises(CheckpointMismatch, match=r"partition: 'dirichlet:alpha=0\.5' in the checkpoint, 'equal' now"):
        await trained(checkpoint=tmp_path, resume="auto", partition="equal")


async def test_averaged_optimizers_are_the_mean_by_samples_of_all_slots():
    facts = dict(partition="power:1", y_train=None, master_epochs=1)
    states = (await trained(**facts)).optimizers
    sizes = [len(rounds[0]) for _, rounds in sorted(samples_of_slots(await trained(**facts)).items())]
    for state in (await trained(**facts, optimizer_state="averaged")).optimizers:
        for index, array in enumerate(state):
            expected = sum(n * np.asarray(slot[index], "f8") for n, slot in zip(sizes, states, strict=True)) / sum(
                sizes
            )
            assert np.array_equal(array, expected.astype("f4"))


async def test_averaged_optimizers_of_float64_are_resumed_with_the_same_bits(tmp_path):
    """The sum of 3 equal float64 values may be rounded. The sum of float32 values never is."""
    facts = dict(optimizer_state="averaged", start={"kernel": np.random.default_rng(0).normal(size=(40, 30))})
    uninterrupted = await trained(partition="equal", **facts)
    await trained(partition="equal", **facts, checkpoint=tmp_path, master_epochs=2)
    resumed = await trained(partition="equal", **facts, checkpoint=tmp_path, resume="auto")
    assert len(resumed.history) == len(uninterrupted.history)
    assert np.array_equal(resumed.model.get_weights()[0], uninterrupted.model.get_weights()[0])


async def test_joining_slot_begins_with_the_mean_after_a_resume(tmp_path):
    async def grown(**settings):
        run = FakeRun(FakeCluster(3), optimizer_state="averaged", checkpoint=tmp_path, **settings)
        await run.train_model()
        return run

    before = FakeRun(FakeCluster(2), optimizer_state="averaged", checkpoint=tmp_path, master_epochs=2)
    await before.train_model()
    run = await grown(resume="auto")
    tasks = [facts[0] for worker in run.cluster.workers for verb, *facts in worker.asked if verb == "train"]
    begun = [{**(task.state or {}), **task.shared}["optimizer"] for task in tasks if task.round == 2]
    assert len(begun) == 3
    for state in begun:
        assert [array.tobytes() for array in state] == [array.tobytes() for array in before.optimizers[0]]
