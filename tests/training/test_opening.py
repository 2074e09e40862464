"""What nodes are given and in which order, before training can begin."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from ddlf.errors import AppError, NotPicklable
from ddlf.testing import in_process_cluster
from tests.training.models import Blobs, blobs

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Story(Blobs):
    """Writes down what each node does, in a file."""

    log = ""

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{'worker' if hasattr(self, 'worker') else 'master'} {what}\n")


def noted(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


@pytest.fixture(scope="module")
def small(two_workers):
    """One real worker."""
    return two_workers.options(workers=[1])


async def test_create_model_may_use_on_every_node_what_load_dataset_set(small):
    class Sized(Blobs):
        async def load_dataset(self):
            await asyncio.sleep(0)
            self.x_train, self.y_train = blobs(50)
            self.classes = self.y_train.shape[1]

        async def create_model(self):
            import keras

            self.model = keras.Sequential(
                [keras.Input(self.x_train.shape[1:]), keras.layers.Dense(self.classes, activation="softmax")]
            )
            self.model.compile("sgd", "categorical_crossentropy")

    await Sized(small).train_sync(1)


async def test_what_load_dataset_sets_here_never_travels_and_what_init_sets_does(small, tmp_path):
    class Holder(Story):
        def __init__(self, cluster, log):
            super().__init__(cluster)
            self.log = log
            self._private = 3
            self.found = None

        def __setstate__(self, state):
            vars(self).update(state)
            self.worker = None
            self.note(" ".join(sorted(set(state) - {"log"})) + f" found={state['found']}")

        async def load_dataset(self):
            await super().load_dataset()
            self.found = "something"
            self.generator = (number for number in range(3))  # which cannot be pickled
            assert self._private == 3

        async def create_model(self):
            await super().create_model()
            self.layers = self.model.layers

    app = Holder(small, str(tmp_path / "log"))
    await app.train_sync(1)
    await app.train_sync(1)
    assert app.found == "something"
    assert noted(tmp_path) == ["worker _private found found=None"] * 2
    app.found = "mine"
    app.extra = 1
    await app.load_dataset()
    del app.generator
    app.found = "mine"
    await app.train_sync(1)
    assert noted(tmp_path)[2:] == ["worker _private extra found found=mine"]


async def test_nothing_of_a_training_run_itself_travels_in_the_next_one(small):
    app = Blobs(small)
    before = set(app.__getstate__())
    await app.train_sync(1)
    assert set(app.__getstate__()) == before


async def test_the_workers_load_and_build_while_the_master_loads(small, tmp_path):
    class Blocking(Story):
        samples = 51

        async def load_dataset(self):
            self.note("loads")
            await super().load_dataset()
            end = time.monotonic() + 60
            while not hasattr(self, "worker") and "worker builds" not in noted(Path(self.log).parent):
                assert time.monotonic() < end, "the worker waits for the master"
                time.sleep(0.01)  # noqa: ASYNC251  a user's method that holds up the event loop

        async def create_model(self):
            self.note("builds")
            await super().create_model()

    await small.clean()  # or it would ask first whether this data is what it holds
    app = Blocking(small)
    app.log = str(tmp_path / "log")
    await app.prepare()
    assert sorted(noted(tmp_path)) == ["master builds", "master loads", "worker builds", "worker loads"]


async def test_an_app_that_cannot_be_sent_is_refused_before_anything_starts():
    app = Blobs(in_process_cluster(1))
    app.lock = threading.Lock()
    with pytest.raises(NotPicklable, match="lock"):
        await app.train_sync(1)
    assert not app.cluster.machines


async def test_data_without_labels_or_with_too_few_is_one_sentence(small):
    class Without(Blobs):
        async def load_dataset(self):
            await super().load_dataset()
            del self.y_train

    class Fewer(Blobs):
        async def load_dataset(self):
            await super().load_dataset()
            self.y_train = self.y_train[1:]

    for kind, sentence in ((Without, r"set no self\.y_train"), (Fewer, "x_train has 203 rows, y_train 202")):
        with pytest.raises(AppError, match=sentence):
            await kind(small).train_sync(1)
