"""Tests of partition files on disks of workers: slots go to workers with their files, and lost files are named."""

import numpy as np
import pytest

from ddlf.data.spread import shares
from ddlf.errors import ConfigError, ConnectError, DatasetError, WorkerLost
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.testing.fake_run import MadeUp
from ddlf.training.crew.schedule import Finished, Lost, Ready, Schedule, Start, Wanted
from ddlf.training.samples.files import check_all_present, unpacked_files

SIZES = (26, 25) * 4
"""204 samples."""


def run_of(copies, *, slots=4, workers=4, **settings):
    """Return a run whose workers have parts of its files, and for each task its remote rows and all its rows."""
    data = MadeUp(SIZES, hosts=workers)
    run = FakeRun(FakeCluster(workers), slots=slots, files=SIZES, train_data=data, master_epochs=5, **settings)
    have = shares(data.manifest, workers, copies)
    run.run_context.local_files = {
        number: np.isin(np.arange(len(SIZES)), is_local) for number, is_local in enumerate(have, 1)
    }
    far: list[tuple[int, int]] = []
    for worker in run.cluster.workers:

        def train(task, worker=worker):
            read = task.indices.stretches(data.manifest.sizes)
            rows = read[:, 2] - read[:, 1]
            far.append((int(rows[~run.run_context.local_files[worker.id][read[:, 0]]].sum()), int(rows.sum())))
            return FakeWorker.train(worker, task)

        worker.train = train
    return run, far


def bits(run):
    return [array.tobytes() for array in [*run.model.get_weights(), *(a for state in run.optimizers for a in state)]]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("copies", [1, 2])
async def test_each_slot_reads_local_files_when_slots_equal_workers(mode, copies):
    run, far = run_of(copies, mode=mode)
    await run.train_model()
    assert run.ledger.is_exact(5)
    assert sum(bytes_ for _, bytes_ in far) == 5 * 204
    assert not any(missing for missing, _ in far)


async def test_slot_of_a_lost_worker_goes_to_the_copy_with_the_same_bits():
    undisturbed, _ = run_of(2)
    await undisturbed.train_model()
    run, far = run_of(2)
    lost_worker = run.cluster.workers[1]

    def train(task, usual=lost_worker.train):
        if task.round < 2:
            return usual(task)
        lost_worker.lost = True
        raise WorkerLost("it was lost", worker=lost_worker.name)

    async def reconnect():
        raise ConnectError("nobody answers", worker=lost_worker.name)

    lost_worker.train, lost_worker.reconnect = train, reconnect
    await run.train_model()
    assert run.ledger.is_exact(5)
    assert bits(run) == bits(undisturbed)
    before = far[:8]
    assert sum(missing for missing, _ in before) <= 0.05 * sum(rows for _, rows in before)


async def test_error_names_files_lost_with_a_worker():
    run, _ = run_of(1, wait_for_workers_s=0.2)
    lost_worker = run.cluster.workers[1]

    def train(task):
        lost_worker.lost = True
        raise WorkerLost("it was lost", worker=lost_worker.name)

    async def reconnect():
        raise ConnectError("nobody answers", worker=lost_worker.name)

    lost_worker.train, lost_worker.reconnect = train, reconnect
    names = ", ".join(run.train_data.manifest.files[n].name for n in shares(run.train_data.manifest, 4, 1)[1])
    with pytest.raises(DatasetError, match="lost with worker 2") as raised:
        await run.train_model()
    only = [name for name in names.split(", ") if name in str(raised.value)]
    assert only
    assert "on no present worker" in str(raised.value)


async def test_a_worker_that_comes_back_in_time_brings_its_files_back():
    undisturbed, _ = run_of(1)
    await undisturbed.train_model()
    run, _ = run_of(1, wait_for_workers_s=30)
    lost_worker, tries = run.cluster.workers[1], []

    def train(task, usual=lost_worker.train):
        if task.round != 2 or tries:
            return usual(task)
        lost_worker.lost = True
        raise WorkerLost("it was lost", worker=lost_worker.name)

    async def reconnect():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectError("nobody answers", worker=lost_worker.name)
        lost_worker.lost = False

    lost_worker.train, lost_worker.reconnect = train, reconnect
    await run.train_model()
    assert len(tries) == 3
    assert bits(run) == bits(undisturbed)


def test_files_without_a_worker_are_named_before_round_one():
    data = MadeUp(SIZES, hosts=2)
    present = {
        1: unpacked_files(np.packbits([1, 1, 0, 0, 0, 1, 0, 1]).tobytes(), data),
        2: unpacked_files(np.packbits([0] * 8).tobytes(), data),
    }
    with pytest.raises(DatasetError, match=r"4 partition files of .*00002.*00003.*00004.*00006.* are on no worker"):
        check_all_present(data, present)
    check_all_present(data, present | {3: unpacked_files(None, data)})
    check_all_present(MadeUp(SIZES), present)


async def test_global_shuffle_is_refused_when_workers_have_some_files():
    run, _ = run_of(1, shuffle="global")
    with pytest.raises(
        ConfigError, match=r"shuffle='global' cannot be combined with .*each worker has some of the files"
    ):
        await run.train_model()


def test_as_many_slots_as_possible_go_to_workers_with_their_files():
    schedule = Schedule()
    for worker in (1, 2, 3):
        schedule.apply(Ready(worker))
    schedule.apply(Wanted(0, local_bytes={1: 10, 2: 10}))
    schedule.apply(Wanted(1, local_bytes={1: 10, 2: 3}))
    schedule.apply(Wanted(2, local_bytes={2: 10, 3: 9}))
    schedule.apply(Wanted(3, local_bytes={3: 10}))
    started = {action.slot: action.worker for action in schedule.plan(0)}
    assert started[3] == 3
    assert {started.get(0), started.get(1), started.get(2)} == {1, 2, None}
    waiting_slot = next(slot for slot in (0, 1, 2) if slot not in started)
    schedule.apply(Finished(3, 1.0))
    assert schedule.plan(1.0) == [Start(waiting_slot, 3)], "a worker does not stay idle to wait for a nearer slot"


def test_a_slot_goes_to_the_next_nearest_worker_if_the_nearest_is_lost():
    schedule = Schedule()
    for worker in (1, 2, 3):
        schedule.apply(Ready(worker))
    schedule.apply(Wanted(0, local_bytes={1: 1, 2: 10, 3: 5}))
    assert schedule.plan(0) == [Start(0, 2)]
    schedule.apply(Lost(2))
    assert schedule.plan(1) == [Start(0, 3)]
