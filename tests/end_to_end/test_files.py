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
def place(tmp_path):
    x, y = blobs(240)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), [80, 80, 80])
    return str(tmp_path / "place")


class OfFiles(Blobs):
    master_epochs = 3
    data_memory = "1MiB"
    place = ""

    async def load_dataset(self):
        self.train_data = ddlf.data.open(self.place)
        self.test_data = ddlf.data.open(self.place)


async def test_each_worker_opens_one_file_a_round_in_turn(place):
    found = {}
    async with local_cluster(3) as cluster:
        app = OfFiles(cluster)
        app.place, app.shuffle, app.evaluate_every = place, "window:1", 1
        app.subscribe(
            lambda event: isinstance(event, UpdateArrived) and found.update({(event.round, event.slot): event.files})
        )
        await app.train_sync()
        assert app.ledger.is_exact(3)
        whole, metrics = digest(app.model.get_weights()), await app.evaluate_model()
        assert metrics["accuracy"] > 0.5
        again = OfFiles(cluster)
        again.place, again.shuffle, again.evaluate_every, again.evaluate_on = place, "window:1", 1, "workers"
        asked = []
        again.subscribe(lambda event: isinstance(event, Warned) and asked.append(event.why))
        async with FaultPlan().kill(worker=2, at_round=2).on(again):
            await again.train_sync()
        assert digest(again.model.get_weights()) == whole
        assert again.ledger.is_exact(3)
        assert [record.test for record in again.history] == [record.test for record in app.history]
        assert not asked
        pushing = OfFiles(cluster)
        pushing.place, pushing.replicas, pushing.mode = place, 5, "downpour"
        await pushing.train_model()
        assert pushing.ledger.is_exact(3)
        assert (await pushing.evaluate_model())["accuracy"] > 0.5
    rounds = [[found[number, slot] for slot in (1, 2, 3)] for number in (1, 2, 3)]
    assert all(sorted(files for (files,) in opened) == [1, 2, 3] for opened in rounds)
    assert all(len({opened[slot] for opened in rounds}) == 3 for slot in range(3))


async def test_repartitioned_files_are_read_from_the_next_epoch_on(
    place,
):
    changes = []

    def repartition_once(record):
        if record.round == 1:
            repartition(Folder(place), PartitionedSource(Folder(place)), [48] * 5)

    async with local_cluster(3) as cluster:
        app = OfFiles(cluster)
        app.place, app.on_round = place, repartition_once
        app.subscribe(lambda event: isinstance(event, FilesChanged) and changes.append((event.round, event.files)))
        async with FaultPlan().kill(worker=2, at_round=3).on(app):
            await app.train_sync(master_epochs=4)
        assert app.ledger.is_exact(4)
    assert changes == [(2, 5)]


class OnOwnDisks(OfFiles):
    async def load_dataset(self):
        worker = getattr(self, "worker", None)
        self.train_data = ddlf.data.open(self.place if worker is None else f"{self.place}-{worker.id}")
        self.x_test, self.y_test = blobs(40, 1)


class Machine:
    """A worker with its own folder, as if it ran on another machine: its number is appended to each path."""

    def __init__(self, worker):
        self.worker = worker

    async def run_method(self, function, path, *arguments):
        return await self.worker.run_method(function, f"{path}-{self.worker.id}", *arguments)


async def test_workers_read_local_files_and_fetch_others_from_peers(place):
    async with local_cluster(3) as cluster:
        assert await spread.send(Folder(place), [Machine(worker) for worker in cluster.workers], 2) == [2, 2, 2]
        mine, found = spread.shares(Folder(place).manifest(), 3, 2), []

        def made(**settings):
            app = OnOwnDisks(cluster)
            vars(app).update(place=place, **settings)
            app.subscribe(lambda event: isinstance(event, UpdateArrived) and found.append((event.worker, event.files)))
            return app

        app = made()
        await app.train_sync()
        assert app.ledger.is_exact(3)
        assert len(found) == 9
        assert all({file - 1 for file in files} <= set(mine[worker - 1]) for worker, files in found)
        lost = made()
        async with FaultPlan().kill(worker=2, at_round=2).on(lost):
            await lost.train_sync()
        assert lost.ledger.is_exact(3)
        assert digest(lost.model.get_weights()) == digest(app.model.get_weights())
        for worker, file in ((2, 1), (3, 0), (3, 2)):
            os.unlink(f"{place}-{worker}/v0001/{file:05}.safetensors")
        found.clear()
        far = made()
        await far.train_sync()
        assert digest(far.model.get_weights()) == digest(app.model.get_weights())
        assert any(worker == 3 and files for worker, files in found)
        os.unlink(f"{place}-1/v0001/00001.safetensors")
        with pytest.raises(DatasetError, match=r"v0001/00001\.safetensors.* is on no worker"):
            await made().train_sync()


class OfParquet(OfFiles):
    async def load_dataset(self):
        columns = dict(x="features", y="label")
        self.train_data = ddlf.data.open(f"{self.place}/*.parquet", **columns)
        self.test_data = ddlf.data.open(f"{self.place}/*.parquet", **columns)


async def test_parquet_has_the_bits_of_partition_files_after_a_loss(place, tmp_path):
    (tmp_path / "parquet").mkdir()
    data = ddlf.data.open(place)
    width = data.columns["x"].shape[0]
    features = pa.FixedSizeListArray.from_arrays(pa.array(data["x"].reshape(-1)), width)
    columns = {"features": features, "label": pa.array(list(data["y"]))}
    pq.write_table(pa.table(columns), tmp_path / "parquet" / "a.parquet", row_group_size=80)
    async with local_cluster(2) as cluster:
        whole = OfFiles(cluster)
        whole.place, whole.round_samples = place, 80
        await whole.train_sync()
        app = OfParquet(cluster)
        app.place, app.round_samples = str(tmp_path / "parquet"), 80
        app.checkpoint, app.checkpoint_every = tmp_path / "run", 1
        async with FaultPlan().kill(worker=2, at_round=2).on(app):
            await app.train_sync(master_epochs=1)
        assert app.ledger.is_exact(1)
        resumed = OfParquet(cluster)
        resumed.place, resumed.round_samples = app.place, 80
        resumed.checkpoint, resumed.resume = tmp_path / "run", "auto"
        await resumed.train_sync()
        assert resumed.ledger.is_exact(3)
        assert digest(resumed.model.get_weights()) == digest(whole.model.get_weights())
        assert await resumed.evaluate_model() == await whole.evaluate_model()
