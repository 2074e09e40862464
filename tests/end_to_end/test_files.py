"""Tests of training on partition files with real workers, which take turns with the files or read their own disks.

A lost worker changes no bit of the result.
"""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ddlf
import ddlf.data
from ddlf.algorithms.weights import digest
from ddlf.data import spread
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import PartitionedSource, repartition, split
from ddlf.errors import DatasetError
from ddlf.events import FilesChanged, UpdateArrived, Warned
from ddlf.testing import FaultPlan, local_cluster
from tests.training.models import Blobs, blobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


@pytest.fixture
def data_path(tmp_path):
    x, y = blobs(240)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "data"), [80, 80, 80])
    return str(tmp_path / "data")


class OfFiles(Blobs):
    master_epochs = 3
    data_memory = "1MiB"
    data_path = ""

    async def load_dataset(self):
        self.train_data = ddlf.data.open(self.data_path)
        self.test_data = ddlf.data.open(self.data_path)


async def test_each_worker_opens_one_file_a_round_in_turn(data_path):
    files_by_slot = {}
    async with local_cluster(3) as cluster:
        app = OfFiles(cluster)
        app.data_path, app.shuffle, app.evaluate_every = data_path, "window:1", 1
        app.subscribe(
            lambda event: (
                isinstance(event, UpdateArrived) and files_by_slot.update({(event.round, event.slot): event.files})
            )
        )
        await app.train_sync()
        assert app.ledger.is_exact(3)
        expected, metrics = digest(app.model.get_weights()), await app.evaluate_model()
        assert metrics["accuracy"] > 0.5
        again = OfFiles(cluster)
        again.data_path, again.shuffle, again.evaluate_every, again.evaluate_on = data_path, "window:1", 1, "workers"
        warnings = []
        again.subscribe(lambda event: isinstance(event, Warned) and warnings.append(event.why))
        async with FaultPlan().kill(worker=2, at_round=2).on(again):
            await again.train_sync()
        assert digest(again.model.get_weights()) == expected
        assert again.ledger.is_exact(3)
        assert [record.test for record in again.history] == [record.test for record in app.history]
        assert not warnings
        pushing = OfFiles(cluster)
        pushing.data_path, pushing.replicas, pushing.mode = data_path, 5, "downpour"
        await pushing.train_model()
        assert pushing.ledger.is_exact(3)
        assert (await pushing.evaluate_model())["accuracy"] > 0.5
    rounds = [[files_by_slot[number, slot] for slot in (1, 2, 3)] for number in (1, 2, 3)]
    assert all(sorted(files for (files,) in opened) == [1, 2, 3] for opened in rounds)
    assert all(len({opened[slot] for opened in rounds}) == 3 for slot in range(3))


async def test_repartitioned_files_are_read_from_the_next_epoch_on(data_path):
    changes = []

    def repartition_once(record):
        if record.round == 1:
            repartition(Folder(data_path), PartitionedSource(Folder(data_path)), [48] * 5)

    async with local_cluster(3) as cluster:
        app = OfFiles(cluster)
        app.data_path, app.on_round = data_path, repartition_once
        app.subscribe(lambda event: isinstance(event, FilesChanged) and changes.append((event.round, event.files)))
        async with FaultPlan().kill(worker=2, at_round=3).on(app):
            await app.train_sync(master_epochs=4)
        assert app.ledger.is_exact(4)
    assert changes == [(2, 5)]


class OnOwnDisks(OfFiles):
    async def load_dataset(self):
        worker = getattr(self, "worker", None)
        self.train_data = ddlf.data.open(self.data_path if worker is None else f"{self.data_path}-{worker.id}")
        self.x_test, self.y_test = blobs(40, 1)


class Machine:
    """A worker with its own folder, as if it ran on another machine: its number is appended to each path."""

    def __init__(self, worker):
        self.worker = worker

    async def run_method(self, function, path, *arguments):
        return await self.worker.run_method(function, f"{path}-{self.worker.id}", *arguments)


async def test_workers_read_local_files_and_fetch_others_from_peers(data_path):
    async with local_cluster(3) as cluster:
        assert await spread.send(Folder(data_path), [Machine(worker) for worker in cluster.workers], 2) == [2, 2, 2]
        shares, opened = spread.shares(Folder(data_path).manifest(), 3, 2), []

        def app_with(**settings):
            app = OnOwnDisks(cluster)
            vars(app).update(data_path=data_path, **settings)
            app.subscribe(lambda event: isinstance(event, UpdateArrived) and opened.append((event.worker, event.files)))
            return app

        app = app_with()
        await app.train_sync()
        assert app.ledger.is_exact(3)
        assert len(opened) == 9
        assert all({file - 1 for file in files} <= set(shares[worker - 1]) for worker, files in opened)
        lost = app_with()
        async with FaultPlan().kill(worker=2, at_round=2).on(lost):
            await lost.train_sync()
        assert lost.ledger.is_exact(3)
        assert digest(lost.model.get_weights()) == digest(app.model.get_weights())
        for worker, file in ((2, 1), (3, 0), (3, 2)):
            os.unlink(f"{data_path}-{worker}/v0001/{file:05}.safetensors")
        opened.clear()
        far = app_with()
        await far.train_sync()
        assert digest(far.model.get_weights()) == digest(app.model.get_weights())
        assert any(worker == 3 and files for worker, files in opened)
        os.unlink(f"{data_path}-1/v0001/00001.safetensors")
        with pytest.raises(DatasetError, match=r"v0001/00001\.safetensors.* is on no worker"):
            await app_with().train_sync()


class OfParquet(OfFiles):
    async def load_dataset(self):
        columns = dict(x="features", y="label")
        self.train_data = ddlf.data.open(f"{self.data_path}/*.parquet", **columns)
        self.test_data = ddlf.data.open(f"{self.data_path}/*.parquet", **columns)


async def test_parquet_has_the_bits_of_partition_files_after_a_loss(data_path, tmp_path):
    (tmp_path / "parquet").mkdir()
    data = ddlf.data.open(data_path)
    width = data.columns["x"].shape[0]
    features = pa.FixedSizeListArray.from_arrays(pa.array(data["x"].reshape(-1)), width)
    columns = {"features": features, "label": pa.array(list(data["y"]))}
    pq.write_table(pa.table(columns), tmp_path / "parquet" / "a.parquet", row_group_size=80)
    async with local_cluster(2) as cluster:
        of_files = OfFiles(cluster)
        of_files.data_path, of_files.round_samples = data_path, 80
        await of_files.train_sync()
        app = OfParquet(cluster)
        app.data_path, app.round_samples = str(tmp_path / "parquet"), 80
        app.checkpoint, app.checkpoint_every = tmp_path / "run", 1
        async with FaultPlan().kill(worker=2, at_round=2).on(app):
            await app.train_sync(master_epochs=1)
        assert app.ledger.is_exact(1)
        resumed = OfParquet(cluster)
        resumed.data_path, resumed.round_samples = app.data_path, 80
        resumed.checkpoint, resumed.resume = tmp_path / "run", "auto"
        await resumed.train_sync()
        assert resumed.ledger.is_exact(3)
        assert digest(resumed.model.get_weights()) == digest(of_files.model.get_weights())
        assert await resumed.evaluate_model() == await of_files.evaluate_model()
