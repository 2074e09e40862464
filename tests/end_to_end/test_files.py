"""Training on partition files with real workers: each opens its own file, in turn, and one that is lost changes no bit."""

import numpy as np
import pytest

import ddlf
import ddlf.data
from ddlf.algorithms.weights import digest
from ddlf.events import UpdateArrived
from ddlf.storage.place import Folder
from ddlf.storage.sources import open_source
from ddlf.storage.split import split
from ddlf.testing import FaultPlan, local_cluster
from tests.training.models import Blobs, blobs

pytestmark = pytest.mark.slow


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


async def test_three_workers_open_one_of_three_files_in_each_round_and_another_one_in_the_next(place):
    found = {}
    async with local_cluster(3) as cluster:
        app = OfFiles(cluster)
        app.place, app.shuffle = place, "window:1"
        app.subscribe(
            lambda event: isinstance(event, UpdateArrived) and found.update({(event.round, event.slot): event.files})
        )
        await app.train_sync()
        assert app.ledger.is_exact(3)
        whole, metrics = digest(app.model.get_weights()), await app.evaluate_model()
        assert metrics["accuracy"] > 0.5
        again = OfFiles(cluster)
        again.place, again.shuffle = place, "window:1"
        async with FaultPlan().kill(worker=2, at_round=2).on(again):
            await again.train_sync()
        assert digest(again.model.get_weights()) == whole
        assert again.ledger.is_exact(3)
    rounds = [[found[number, slot] for slot in (1, 2, 3)] for number in (1, 2, 3)]
    assert all(sorted(files for (files,) in opened) == [1, 2, 3] for opened in rounds)
    assert all(len({opened[slot] for opened in rounds}) == 3 for slot in range(3))
