"""Tests of opening: nodes load data and build models in the right order before training begins."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ddlf.errors import AppError, LeaseError, NotPicklable
from ddlf.events import DataLoaded, PhaseBegan, PhaseEnded, Warned, WorkerReady
from ddlf.testing import FakeRun, in_process_cluster
from ddlf.testing.in_process import InProcessDaemon
from ddlf.training.crew.opening import Opening, _check_models
from ddlf.training.exchanges.carrier import Carrier
from ddlf.training.progress import WeightsRef
from ddlf.training.run import Run
from ddlf.training.slot.arithmetic import Arithmetic
from ddlf.training.slot.build import ModelReport
from ddlf.worker.source import Source
from tests.patience import PATIENCE_S
from tests.training.models import Blobs, Quick, blobs, equal

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Story(Quick):
    """An app whose nodes write their steps into a file."""

    log = ""

    def note(self, line):
        with open(self.log, "a") as file:
            file.write(f"{'worker' if hasattr(self, 'worker') else 'master'} {line}\n")


def lines_of_log(folder: Path) -> list[str]:
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

    app, loaded = Sized(small), []
    app.subscribe(lambda event: loaded.append(event) if isinstance(event, DataLoaded) else None)
    await app.train_sync(1)
    assert [(event.samples, event.shape) for event in loaded] == [(50, (8,))]


@pytest.mark.slow
async def test_attributes_of_init_travel_and_those_of_load_dataset_do_not(small, tmp_path):
    class Holder(Story):
        def __init__(self, cluster, log):
            super().__init__(cluster)
            self.log = log
            self._private = 3
            self.result = None

        def __setstate__(self, state):
            vars(self).update(state)
            self.worker = None
            self.note(" ".join(sorted(set(state) - {"log"})) + f" result={state['result']}")

        async def load_dataset(self):
            await super().load_dataset()
            self.result = "something"
            self.generator = (number for number in range(3))  # generators cannot be pickled
            assert self._private == 3

        async def create_model(self):
            await super().create_model()
            self.layers = self.model.layers

    app = Holder(small, str(tmp_path / "log"))
    await app.train_sync(1)
    await app.train_sync(1)
    assert app.result == "something"
    assert lines_of_log(tmp_path) == ["worker _private result result=None"] * 2
    app.result = "mine"
    app.extra = 1
    await app.load_dataset()
    del app.generator
    app.result = "mine"
    await app.train_sync(1)
    assert lines_of_log(tmp_path)[2:] == ["worker _private extra result result=mine"]


async def test_state_of_a_training_run_does_not_travel_in_the_next_run(small):
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
            end = time.monotonic() + PATIENCE_S
            while not hasattr(self, "worker") and "worker builds" not in lines_of_log(Path(self.log).parent):
                assert time.monotonic() < end, "the worker waits for the master"
                time.sleep(0.01)  # noqa: ASYNC251  a user's method that blocks the event loop

        async def create_model(self):
            self.note("builds")
            await super().create_model()

    await small.clean()  # otherwise the worker would first ask whether it has this data
    app = Blocking(small)
    app.log = str(tmp_path / "log")
    await app.prepare()
    assert sorted(lines_of_log(tmp_path)) == ["master builds", "master loads", "worker builds", "worker loads"]


async def test_an_app_that_cannot_be_sent_is_refused_before_anything_starts():
    app = Blobs(in_process_cluster(1))
    app.lock = threading.Lock()
    with pytest.raises(NotPicklable, match="lock"):
        await app.train_sync(1)
    assert not app.cluster.machines


@pytest.mark.slow
async def test_executors_that_die_while_they_load_or_build_change_no_bit(two_workers, tmp_path):
    class Dying(Story):
        samples = 52

        def die_once(self, number):
            marker = Path(self.log).parent / f"died-{number}"
            if hasattr(self, "worker") and self.worker.id == number and self.log and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        async def load_dataset(self):
            self.die_once(1)
            await super().load_dataset()

        async def create_model(self):
            self.die_once(2)
            await super().create_model()

        def on_event(self, event):
            self.events.append((event.kind, event.worker))

    weights, lost = [], []
    for log in (tmp_path / "log", ""):
        app = Dying(two_workers)
        app.log, app.events = str(log), []
        await app.train_sync(2)
        weights.append(app.model.get_weights())
        lost.append({event for event in app.events if event[0] == "lost"})
    assert lost == [{("lost", 1), ("lost", 2)}, set()]
    assert equal(*weights)


async def test_app_that_fails_on_one_worker_trains_on_the_others(two_workers):
    class Failing(Quick):
        async def load_dataset(self):
            await super().load_dataset()
            if hasattr(self, "worker") and self.worker.id == 2:
                raise FileNotFoundError("train.npz")

        def on_event(self, event):
            self.events.append(event)

    app = Failing(two_workers)
    app.samples, app.events = 53, []
    records = await app.train_sync(1)
    assert records[0].workers == (1, 1)
    (exclusion,) = [event for event in app.events if event.kind == "gone"]
    assert "FileNotFoundError: train.npz; it is excluded from this run" in exclusion.text
    assert "in load_dataset" in exclusion.text


@pytest.mark.slow
async def test_two_runs_at_once_need_separate_workers(two_workers):
    first, second = Quick(two_workers), Quick(two_workers)
    outcomes = await asyncio.gather(first.train_sync(2), second.train_sync(2), return_exceptions=True)
    assert len(outcomes[0]) == 2
    assert isinstance(outcomes[1], LeaseError)
    assert "is in another training run of this program; wait until" in str(outcomes[1])
    parts = [Quick(two_workers.options(workers=[number])) for number in (1, 2)]
    await asyncio.gather(*(part.train_sync(2) for part in parts))
    assert equal(*(part.model.get_weights() for part in parts))
    await second.train_sync(1)


async def test_training_app_refuses_a_second_training_and_continues(small):
    app, undisturbed = Quick(small), Quick(small)
    outcomes = await asyncio.gather(app.train_sync(2), app.train_sync(2), return_exceptions=True)
    assert isinstance(outcomes[1], LeaseError)
    await undisturbed.train_sync(2)
    assert equal(app.model.get_weights(), undisturbed.model.get_weights())


async def test_phases_before_and_after_training_are_reported_for_each_node(two_workers):
    app, received = Quick(two_workers), []
    app.subscribe(received.append)
    await app.train_sync(1)
    await app.evaluate_model()
    phases = [event for event in received if isinstance(event, PhaseBegan)]
    nodes = {(event.worker, event.what) for event in phases}
    master_phases, worker_phases = ("importing", "loading", "building"), ("importing", "sending", "loading", "building")
    assert {(0, phase) for phase in (*master_phases, "evaluating")} | {
        (n, phase) for n in (1, 2) for phase in worker_phases
    } <= nodes
    assert {event.phase for event in phases} == {event.phase for event in received if isinstance(event, PhaseEnded)}
    assert {(event.worker, event.name) for event in phases} == {(0, ""), (1, "worker 1"), (2, "worker 2")}
    assert [event.total for event in phases if event.what == "evaluating"] == [100]
    assert sorted(event.worker for event in received if isinstance(event, WorkerReady)) == [1, 2]


async def test_missing_or_too_few_labels_are_refused_with_one_sentence(small):
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


async def test_run_does_not_wait_at_its_end_for_a_silent_worker(monkeypatch):
    monkeypatch.setattr("ddlf.training.run.STOP_S", 0.1)
    async with in_process_cluster(2, proxied=True, dead_after_s=10_000) as cluster:
        run = Run.__new__(Run)
        run._cluster = cluster
        run.exchange = Carrier("run", 1, "float32", None, None)
        cluster.machine(2).cut_off()
        await asyncio.wait_for(run.stop_workers(), PATIENCE_S)


async def test_a_worker_frees_its_state_of_a_run_when_the_run_is_over(small):
    await Quick(small).train_sync(1)
    async with asyncio.timeout(PATIENCE_S):
        while await small.run_method(replicas) != [0]:
            pass


def replicas():
    import gc

    return sum(type(item).__name__ == "Replica" for item in gc.get_objects())


async def test_run_names_workers_with_other_source_of_ddlf_once(monkeypatch):
    async def other(self):
        return Source("0.1.0", "other")

    app, warned = Quick(None), []
    app.subscribe(lambda event: warned.append(event) if isinstance(event, Warned) else None)
    async with in_process_cluster(2) as app.cluster:
        await app.train_sync(1)
        assert warned == []
        monkeypatch.setattr(InProcessDaemon, "source", other)
        await app.train_sync(1)
        opening = Opening(app, "a run")
        for _ in range(2):  # a worker that returns is named only once
            await opening.compare_sources(app.cluster.workers[1:])
    first, again = warned
    names = [worker.name for worker in app.cluster.workers]
    assert first.why.startswith(f"{', '.join(names)} have other source of DDLF 0.1.0 than this machine: results may")
    assert again.why.startswith(f"{names[1]} has other source")


async def test_run_names_a_worker_that_does_not_know_the_question_for_its_source(monkeypatch):
    monkeypatch.setattr("ddlf.worker.daemon.SLOW", ())  # so that the daemon knows none of these commands
    app, warned = Quick(None), []
    app.subscribe(lambda event: warned.append(event.why) if isinstance(event, Warned) else None)
    async with in_process_cluster(1) as app.cluster:
        await app.connect()
        await Opening(app, "a run").compare_sources(app.cluster.workers)
    assert "worker 1" in warned[0]
    assert "has other source of DDLF" in warned[0]


async def test_returning_worker_gets_the_app_as_it_was_at_the_start():
    app = Blobs(None)
    opening = Opening(app, "a run")
    sent = opening._pickle(app)
    app.lock = threading.Lock()  # a user's on_round might set an attribute that cannot be sent
    assert opening._pickle(app) is sent


async def test_returning_worker_is_compared_while_weights_are_on_workers():
    app = FakeRun()
    app.run_context.weights = WeightsRef(like=[], group="weights")
    _check_models(app, {1: ModelReport.of(vars(app)["model"], {}, Arithmetic())})
    assert isinstance(app.run_context.weights, WeightsRef)
