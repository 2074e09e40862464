"""Tests of the number of threads that the workers of a run compute with: it is equal on all workers."""

import dataclasses

import pytest

import ddlf
from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.events import Warned
from ddlf.testing import FakeRun
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.crew.threads import chosen_threads, given_threads, unused_cores
from ddlf.worker.status import ExecutorInfo
from tests.training.models import equal


def executors(**machines):
    """Return executors. ``executors(a=(16, 2))`` stands for two workers on a machine with 16 cores."""
    return [ExecutorInfo(host=host, cores=cores) for host, (cores, workers) in machines.items() for _ in range(workers)]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_chosen_threads_do_not_depend_on_the_workers_of_a_machine(workers):
    assert chosen_threads(executors(a=(16, workers)), slots=4, expected_workers=workers) == 4


@pytest.mark.parametrize(
    ("machines", "slots", "threads"),
    [
        ({"a": (16, 1)}, 1, 16),
        ({"a": (2, 2)}, 2, 1),
        ({"a": (2, 4)}, 4, 1),
        ({"a": (16, 1), "b": (16, 1)}, 2, 16),
        ({"a": (16, 1), "b": (16, 1)}, 3, 8),
        ({"a": (16, 1), "b": (4, 1)}, 2, 4),
        ({"a": (16, 2), "b": (16, 1)}, 3, 8),
    ],
)
def test_chosen_threads_fit_the_smallest_machine(machines, slots, threads):
    workers = executors(**machines)
    assert chosen_threads(workers, slots, len(workers)) == threads


@pytest.mark.parametrize("present", [1, 2, 4])
def test_workers_with_their_own_cores_use_all_of_them_whichever_are_present(present):
    workers = [dataclasses.replace(worker, has_own_cores=True) for worker in executors(a=(4, present))]
    assert chosen_threads(workers, slots=4, expected_workers=4) == 4
    assert chosen_threads(workers, slots=8, expected_workers=4) == 2
    assert unused_cores(workers, 4) == ""
    assert "a has 4 cores for each" in unused_cores(workers, 2)


def test_unused_cores_are_reported_if_a_worker_could_use_more_threads():
    assert unused_cores(executors(a=(16, 2)), 8) == ""
    message = unused_cores(executors(a=(16, 1), b=(4, 1)), 4)
    assert message.startswith("each worker computes with 4 threads, though a has 16 cores for each")
    assert "--threads 16" in message


class Named(ddlf.IApp):
    cluster = None


def test_given_threads_of_app_and_cluster_that_differ_are_refused():
    app = Named(ddlf.Cluster.local(1, threads=2))
    assert given_threads(app) == 2
    app.threads = 2
    assert given_threads(app) == 2
    app.threads = 3
    with pytest.raises(ConfigError, match="threads=3 of the app and threads=2 of the cluster"):
        given_threads(app)


async def trained(folder, threads):
    app = FakeRun(checkpoint=folder)
    app.run_context.threads = threads  # as of workers that compute
    await app.train_sync(2)
    return app


async def test_given_threads_are_those_of_the_training_to_continue(tmp_path):
    app = await trained(tmp_path, 3)
    assert given_threads(app) == 3
    assert given_threads(app, fresh=True) is None
    (newest,) = tmp_path.glob("round-000002")
    for resumed in (
        FakeRun(checkpoint=tmp_path, resume="auto"),
        FakeRun(resume=tmp_path),
        FakeRun(resume=newest, checkpoint=tmp_path / "other"),
    ):
        assert given_threads(resumed) == 3
    assert given_threads(FakeRun(checkpoint=tmp_path / "none", resume="auto")) is None
    (newest / "manifest.json").write_text("{")
    assert given_threads(FakeRun(resume=tmp_path)) == 3  # of the checkpoint before


async def test_a_run_is_not_resumed_with_other_threads(tmp_path):
    await trained(tmp_path, 3)
    app = FakeRun(resume=tmp_path)
    app.run_context.threads = 2
    with pytest.raises(CheckpointMismatch, match="threads: 3 in the checkpoint, 2 now"):
        await app.train_sync(3)


async def test_a_checkpoint_without_threads_is_resumed_with_any(tmp_path):
    app = await trained(tmp_path, 3)
    settings = {name: value for name, value in app.run_context.progress.settings.items() if name != "threads"}
    app.run_context.progress = dataclasses.replace(app.run_context.progress, settings=settings)
    folder = tmp_path / "earlier"
    checkpoint = CheckpointFolder(tmp_path).newest()
    old_checkpoint = dataclasses.replace(checkpoint, facts={**checkpoint.facts, "settings": settings})
    with_folder = CheckpointFolder(folder)
    with_folder.open("earlier")
    with_folder.save(old_checkpoint)
    with_folder.close()
    resumed = FakeRun(resume=folder)
    resumed._threads = 2
    await resumed.train_sync(3)
    assert resumed.history[-1].round == 3


class Pictures(ddlf.IApp):
    """A convolution. Each thread sums a part of its gradient."""

    verbose = False
    batch_size = 16
    master_epochs = 1

    async def load_dataset(self):
        import numpy as np

        random = np.random.default_rng(0)
        self.x_train = random.normal(size=(64, 20, 20, 1)).astype("float32")
        self.y_train = random.integers(0, 4, 64)

    async def create_model(self):
        import keras

        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((20, 20, 1)), layers.Conv2D(16, 3), layers.Conv2D(16, 3), layers.Flatten(), layers.Dense(4)]
        )
        self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


async def weights_of(cluster, warned=None, **settings):
    app = Pictures(cluster)
    for name, value in {"slots": 2, **settings}.items():
        setattr(app, name, value)
    if warned is not None:
        app.subscribe(lambda event: warned.append(event.about) if isinstance(event, Warned) else None)
    await app.train_sync()
    return app.model.get_weights(), {worker.executor.threads for worker in cluster.workers}


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
async def test_bits_depend_on_threads_and_not_on_the_number_of_workers():
    warned = []
    async with ddlf.Cluster.local(1) as one_worker, ddlf.Cluster.local(2) as two_workers:
        cores = min(worker.executor.cores for worker in one_worker.workers)
        of_one, threads_of_one = await weights_of(one_worker, warned)
        of_two, threads_of_two = await weights_of(two_workers)
        assert threads_of_one == threads_of_two == {max(1, cores // 2)}
        assert ("threads" in warned) == (cores > 1)
        assert equal(of_one, of_two)
        # Executors that have computed with another number of threads restart.
        of_one, threads_of_one = await weights_of(one_worker, threads=3)
        of_two, threads_of_two = await weights_of(two_workers, threads=3)
        assert threads_of_one == threads_of_two == {3}
        assert equal(of_one, of_two)
