"""Tests of rounds with some batches (``worker_steps``): each epoch has every sample once, also with resumes and new slots."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.progress import Progress, SampleLedger, Span

BOTH = pytest.mark.parametrize("mode", ["sync", "async"])


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def progress_of(samples, slots, *, done=0, **more):
    progress = Progress(
        weights=[], ledger=SampleLedger(samples), states=[{} for _ in range(slots)], speeds=[None] * slots
    )
    progress.plan(more.pop("epochs", 2), 1, more=False, **more)
    progress.round = done
    return progress


def tasks_of(run):
    """Return all tasks of a run by round and slot."""
    tasks = [facts for worker in run.cluster.workers for name, facts, *_ in worker.asked if name == "train"]
    return sorted(tasks, key=lambda task: (task.round, task.slot))


def bits(run):
    records = [(r.round, r.rounds, r.slot, r.version, r.epochs, r.samples) for r in run.history]
    return [array.tobytes() for array in (*run.model.get_weights(), run.ledger.counts)], records


async def trained(workers=3, **settings):
    run = FakeRun(FakeCluster(workers), **{"master_epochs": 2, "worker_steps": 1, **settings})
    await run.train_model()
    return run


# --- the plan


def test_rounds_cut_epochs_into_disjoint_and_complete_parts():
    for samples, slots, portion in itertools.product((12, 13, 203), (1, 3, 4), (1, 16, 48, 500)):
        progress = progress_of(samples, slots, portion=portion)
        size = slots * portion
        assert progress.epochs == [1] * (2 * math.ceil(samples / size))
        spans = [progress.span(number) for number in range(len(progress.epochs))]
        for epoch in range(2):
            spans_of_epoch = [span for number, span in enumerate(spans) if progress.starts[number] == epoch]
            assert [index for span in spans_of_epoch for index in range(span.begin, span.end)] == list(range(samples))
            assert all(span.end - span.begin == size for span in spans_of_epoch[:-1])
            assert {span.order for span in spans_of_epoch} == {epoch}
        assert progress.planned_epochs == 2


def test_rounds_of_whole_epochs_have_all_samples():
    progress = progress_of(203, 3, epochs=3)
    assert [progress.span(number) for number in range(3)] == [Span(number, 0, 203) for number in range(3)]


def test_begun_epoch_ends_before_others_begin():
    begun = progress_of(100, 2, portion=10, done=3)
    begun.plan(2, 1, more=False, portion=10)
    assert len(begun.epochs) == 10
    begun.plan(2, 1, more=False, portion=25)  # the first epoch has 40 remaining samples
    assert [begun.span(number) for number in range(3, 6)] == [Span(0, 60, 100), Span(1, 0, 50), Span(1, 50, 100)]
    begun.plan(3, 2, more=False)
    assert [begun.span(number)[1:3] for number in range(3, 5)] == [(60, 100), (0, 100)]
    assert (begun.epochs[3:], begun.starts[3:]) == ([1, 2], [0, 1, 3])
    begun.plan(1, 1, more=True)  # the rest of the epoch, and another epoch
    assert (begun.epochs[3:], begun.planned_epochs) == ([1, 1], 2)
    begun.plan(1, 1, more=False)
    assert begun.epochs[3:] == [1]
    complete = progress_of(100, 2, portion=10, done=5)
    complete.plan(1, 1, more=False, portion=10)
    assert complete.is_complete


def test_added_slots_change_the_cut_of_later_epochs():
    progress = progress_of(100, 2, epochs=3, portion=10)
    progress.add_slots(5, 5)
    spans = [progress.span(number) for number in range(len(progress.epochs))]
    assert [span.end - span.begin for span in spans] == [20] * 5 + [50] * 4
    assert (progress.starts[-1], len(progress.states), len(progress.speeds)) == (3, 5, 5)


def test_a_checkpoint_within_an_epoch_has_its_position():
    progress = progress_of(100, 2, portion=10, done=3)
    progress.weights = [np.zeros(2)]
    stored = progress.to_checkpoint(["a"])
    assert stored.facts["epochs"] == [[3, 1, 20]]
    back = Progress.from_checkpoint(stored)
    back.plan(2, 1, more=False, portion=10)
    assert (back.epochs, back.starts, back.offsets) == (progress.epochs, progress.starts, progress.offsets)


# --- runs


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 100])
async def test_every_epoch_has_every_sample_once(mode, steps):
    run = await trained(mode=mode, worker_steps=steps)
    assert run.ledger.is_exact(2)
    rounds = 2 * math.ceil(203 / (3 * 16 * steps))
    assert {record.rounds for record in run.history} == {rounds}
    for number, tasks in itertools.groupby(tasks_of(run), key=lambda task: task.round):
        epoch, part = divmod(number, rounds // 2)
        order = shuffled(203, 0, epoch)[part * 48 * steps : (part + 1) * 48 * steps]
        expected = partition(order, equal_sizes(len(order), 3))
        for task, indices in zip(tasks, expected, strict=True):
            assert np.array_equal(task.indices, indices)
            assert (task.first_epoch, task.epochs) == (epoch, 1)


@BOTH
async def test_rounds_as_long_as_an_epoch_have_the_bits_of_the_default(mode):
    order = {"arrivals": [2, 1, 1, 2, 1, 2], "master_epochs": 3} if mode == "async" else {}
    uninterrupted = await trained(2, mode=mode, worker_steps=None, **order)
    assert bits(await trained(2, mode=mode, worker_steps=7, **order)) == bits(uninterrupted)


@BOTH
@pytest.mark.parametrize("more", [{}, {"codec": "topk:0.1", "weights_codec": "delta:int8"}], ids=["plain", "coded"])
async def test_first_slots_have_one_sample_each_when_few_samples_remain(mode, more):
    """A slot without tasks for some rounds keeps its state, also if it moves to another worker."""
    settings = {"mode": mode, "samples": 3 * 16 * 2 + 2, "master_epochs": 3, "slots": 3, "optimizer_state": "kept"}
    if mode == "async":
        settings["arrivals"] = [1, 2, 3, 3, 2, 1, 1, 2] * 3
    run = await trained(**settings, **more)
    assert run.ledger.is_exact(3)
    tails = [task for task in tasks_of(run) if task.round % 3 == 2]
    assert [(task.slot, len(task.indices)) for task in tails] == [(0, 1), (1, 1)] * 3
    moved = FakeRun(FakeCluster(3 if mode == "async" else 1), **{"worker_steps": 1, **settings}, **more)
    moved.cluster.workers.reverse()
    await moved.train_model()
    assert bits(moved) == bits(run)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_run_resumed_after_any_commit_ends_with_the_same_bits(mode, tmp_path):
    slots = 3 if mode == "sync" else 1
    settings = {"mode": mode, "slots": slots, "samples": 98, "codec": "int8"}
    count = {"sync": 6, "async": 14}[mode]
    settings |= {"arrivals": [1] * count} if mode == "async" else {}
    uninterrupted = await trained(slots, checkpoint=tmp_path / "whole", checkpoint_keep=100, **settings)
    assert len(uninterrupted.history) == count
    for number in range(1, count):
        if mode == "async":
            settings["arrivals"] = [1] * (count - number)
        source = tmp_path / "whole" / f"round-{number:06d}"
        resumed = await trained(slots, resume=source, checkpoint=tmp_path / f"from {number}", **settings)
        assert bits(resumed) == bits(uninterrupted)


@BOTH
async def test_training_stopped_within_an_epoch_ends_it_when_it_continues(mode):
    run = FakeRun(FakeCluster(2 if mode == "sync" else 1), mode=mode, worker_steps=1, master_epochs=2)
    run.on_round = lambda record: record.version == 3 and run.stop_training()
    await run.train_model()
    assert len(run.history) == 3
    run.on_round = lambda record: None
    await run.train_model()
    assert run.ledger.is_exact(3)
    run.worker_steps = None
    await run.train_model()
    assert run.ledger.is_exact(5)
    assert [record.samples for record in run.history][-2:] == [203, 203]


async def test_a_run_extended_to_more_epochs_equals_the_longer_run(tmp_path):
    uninterrupted = await trained(slots=3, master_epochs=4, checkpoint=tmp_path / "whole")
    await trained(slots=3, master_epochs=2, checkpoint=tmp_path / "short")
    longer = await trained(slots=3, master_epochs=4, resume=tmp_path / "short")
    assert [record.rounds for record in longer.history] == [10] * 10 + [20] * 10
    assert bits(longer)[0] == bits(uninterrupted)[0]


@BOTH
async def test_joining_workers_get_slots_when_an_epoch_begins(mode):
    cluster = FakeCluster(2)
    run = FakeRun(cluster, mode=mode, worker_steps=1, master_epochs=4)

    def on_round(record):
        if record.version == 2:
            cluster.workers.append(FakeWorker(3))

    run.on_round = on_round
    await run.train_model()
    assert run.ledger.is_exact(4)
    slots = {task.round: task.slots for task in tasks_of(run)}
    (first,) = [number for number in slots if slots[number] == 3 and slots.get(number - 1) == 2]
    assert first % 7 == 0  # 203 samples in rounds of 32
    assert [event.round for event in run.events if event.kind == "slots"] == [first + 1]


async def test_with_balance_parts_follow_speed_inside_each_round():
    class Slow(FakeWorker):
        def train(self, task):
            return dataclasses.replace(super().train(task), compute_s=len(task.indices) * 0.001 * self.id**2)

    cluster = FakeCluster(2)
    cluster.workers = [Slow(1), Slow(2)]
    run = FakeRun(cluster, worker_steps=4, balance="speed", batch_size=4, master_epochs=2)
    await run.train_model()
    assert run.ledger.is_exact(2)
    last = [len(task.indices) for task in tasks_of(run) if task.round == run.history[-1].round - 2]
    assert sum(last) == 32
    assert last[0] > 2 * last[1]


@BOTH
async def test_validation_data_is_evaluated_once_an_epoch(mode, monkeypatch):
    async def measured(function, app, weights, *more, **how):
        return {"val_loss": 1.0}

    monkeypatch.setattr("ddlf.training.reporter.measured", measured)
    run = FakeRun(FakeCluster(2), mode=mode, worker_steps=1, master_epochs=3)
    run.x_val = run.y_val = np.zeros((1, 1))
    await run.train_model()
    values = run.history.history["val_loss"]
    assert sum(value == value for value in values) == 3
    assert values[-1] == 1.0


# --- refusals


async def test_fewer_samples_than_slots_are_refused():
    with pytest.raises(ConfigError, match="2 samples cannot be split over 3 slots"):
        await trained(samples=2, slots=3)


async def test_a_run_is_not_resumed_with_rounds_of_another_length(tmp_path):
    await trained(checkpoint=tmp_path)
    with pytest.raises(CheckpointMismatch, match="worker_steps: 1 in the checkpoint, 2 now"):
        await trained(resume=tmp_path, worker_steps=2)


@pytest.mark.parametrize(("samples", "refused"), [(82, True), (85, False), (80, False)])
async def test_merge_is_refused_when_an_epoch_ends_with_too_few_slots(samples, refused):
    """Five slots have batches of 16. The last slots of an epoch have one sample each."""
    run = FakeRun(slots=5, worker_steps=1, batch_size=16, samples=samples, merge="krum", master_epochs=2)
    if refused:
        with pytest.raises(
            ConfigError, match="needs 5 slots, but the last round of an epoch has only samples for 2 slots"
        ):
            await run.train_model()
        assert all(not worker.asked for worker in run.cluster.workers)
    else:
        await run.train_model()
        assert run.ledger.is_exact(2)
