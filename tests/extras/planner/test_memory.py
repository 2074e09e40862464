"""Tests of the model of memory, the search for the largest batch, and child processes that die."""

import dataclasses
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.encoding import decode_update, encode_update
from ddlf.errors import ConfigError
from ddlf.extras.planner import child as children
from ddlf.extras.planner import planning
from ddlf.extras.planner.child import Child, ChildEnded, measure_batches, measure_here
from ddlf.extras.planner.choice import Choice, Wish
from ddlf.extras.planner.measurement_files import Measurements, read_file, write_file
from ddlf.extras.planner.memory import KEPT, Bytes, Largest, MemoryModel, Peak, Peaks, find_largest
from ddlf.extras.planner.memory_probe import Memory
from ddlf.extras.planner.model import Predicted, Setting, Way
from ddlf.extras.planner.probe import Budget
from ddlf.extras.planner.trial import Trial

MB = 10**6


def peak(batch, *earlier):
    """Return the memory of a process: 500 MB, 0.5 MB for each sample, and half of the memory of each earlier batch."""
    most = 500 * MB + (2 * batch + sum(earlier)) * MB // 4
    return Peak(batch=batch, most=most, earlier=earlier)


def peaks(*batches, loaded=0, weights=10 * MB):
    """Return the measurement of a worker with one process."""
    measured_peaks = tuple(peak(batch, *batches[:index]) for index, batch in enumerate(batches))
    facts = {"samples": 10_000, "framework": 300 * MB, "data": 150 * MB, "optimizer": 0}
    return Peaks(worker=1, loaded=loaded, weights=weights, batches=measured_peaks, **facts)


def test_memory_of_other_batches_is_predicted():
    model = MemoryModel(peaks(64, 128, 256))
    for batch in (1, 100, 2000):
        needed = model.predict(batch)
        assert needed.count == pytest.approx(500 * MB + batch * MB / 2)
        assert needed.low < needed.count < needed.high
    assert model.parts == pytest.approx({"framework": 300 * MB, "data": 150 * MB, "model": 50 * MB})
    assert model.sample == pytest.approx(MB / 2)
    assert model.predict(64, "sharded").count > model.predict(64, "gradient").count > model.predict(64).count


def test_a_second_process_has_no_memory_of_the_sizes_of_the_first_one():
    first, second = peaks(64, 128, 256), (peak(1000), peak(2000, 1000))
    model = MemoryModel(dataclasses.replace(first, batches=first.batches + second))
    assert model.predict(4000).count == pytest.approx(2500 * MB)


def test_loading_the_data_can_need_more_than_steps():
    model = MemoryModel(peaks(64, 128, loaded=900 * MB))
    assert model.predict(64).count == 900 * MB
    assert model.predict(2000).count == pytest.approx(1500 * MB)


def test_without_a_step_there_is_no_model():
    with pytest.raises(ConfigError, match="no step was measured"):
        MemoryModel(peaks())


@pytest.mark.parametrize("limit", [510 * MB, 700 * MB, 1000 * MB, 100_000 * MB])
def test_the_largest_batch_fits_and_the_next_one_may_not(limit):
    model = MemoryModel(peaks(64, 128, 256))
    batch = model.largest(limit)
    assert batch % 8 == 0
    assert not batch or model.predict(batch).high <= limit
    assert batch == 10_000 or model.predict(max(batch + 8, 1)).high > limit


def test_a_batch_that_does_not_fit_is_followed_by_smaller_ones():
    measured_peaks, tried = peaks(64, 128, 256), []

    def train(batch):
        tried.append(batch)
        return Peak(batch=batch, most=900 * MB) if batch < 300 else None

    largest, more = find_largest(measured_peaks, 1000 * MB, "star", train)
    assert largest == Largest(limit=1000 * MB, batch=tried[-1], confirmed=True, failed=tuple(tried[:-1]))
    assert len(tried) > 1
    assert tried == sorted(tried, reverse=True)
    assert more.batches == (*measured_peaks.batches, Peak(batch=tried[-1], most=900 * MB))
    assert find_largest(measured_peaks, 1000 * MB, "star", lambda batch: None)[0].batch == 0
    assert find_largest(measured_peaks, 400 * MB, "star", train) == (Largest(limit=400 * MB, batch=0), measured_peaks)


def test_a_larger_batch_follows_if_the_first_one_needs_less_than_predicted():
    """A sample needs 0.1 MB, but the memory of small batches grew by 2 MB for each sample."""
    measured_peaks = dataclasses.replace(peaks(), batches=(Peak(batch=8, most=500 * MB), Peak(batch=16, most=516 * MB)))
    tried = []

    def train(batch):
        tried.append(batch)
        return Peak(batch=batch, most=500 * MB + batch * MB // 10)

    largest, _ = find_largest(measured_peaks, 1000 * MB, "star", train)
    assert largest.confirmed
    assert tried == sorted(tried)
    assert largest.batch == tried[-1] > 3 * tried[0]


def test_without_time_the_largest_batch_is_not_confirmed():
    def train(batch):
        raise TimeoutError

    largest, _ = find_largest(peaks(64, 128), 1000 * MB, "star", train)
    assert largest.batch > 0
    assert not largest.confirmed


class Made:
    """A child process that needs 0.5 MB for each sample, keeps a part of it, and dies at a chosen batch."""

    def __init__(self, dies_at=10**9, sample=MB // 2, keeps=KEPT):
        self.dies_at, self.trained, self.sample, self.keeps = dies_at, [], sample, keeps
        self.has_ended = False
        names = ("samples", "framework", "data", "loaded", "weights", "optimizer")
        self.facts = {name: getattr(peaks(), name) for name in names}

    def train(self, batch, limit=None):
        if batch >= self.dies_at:
            self.has_ended = True
            raise ChildEnded("it was ended by SIGKILL")
        leaked = int(sum(self.trained) * self.keeps * self.sample)  # memory that earlier batches still hold
        measurement = Peak(batch=batch, most=500 * MB + batch * self.sample + leaked, earlier=tuple(self.trained))
        self.trained.append(batch)
        return 700 * MB, measurement


def train_made(batches, **more):
    """Measure made-up children. Return their peaks, and the batches of each child."""
    children = [Made(**more)]

    def child():
        if children[-1].has_ended:
            children.append(Made(**more))
        return children[-1]

    return measure_batches(child, 1, batches, time.monotonic() + 60), [process.trained for process in children]


def test_batches_become_larger_until_memory_grows():
    measured_peaks, trained = train_made([8], keeps=0.0)
    assert trained == [[8, 16, 256, 256 + 512 * 2**20 // (MB // 2)]]
    assert measured_peaks.batches[2] == Peak(batch=256, most=628 * MB, earlier=(8, 16))
    assert measured_peaks.loaded == 700 * MB


def test_large_samples_are_measured_with_three_batches():
    measured_peaks, trained = train_made([8], sample=50 * MB)
    assert trained == [[8, 16, 32]]
    assert MemoryModel(measured_peaks).sample == pytest.approx(50 * MB)


@pytest.mark.parametrize("keeps", [0.0, 0.35, 1.2])
def test_memory_of_earlier_batches_hardly_changes_the_bytes_of_a_sample(keeps):
    measured_peaks, _ = train_made([64], sample=MB // 3, keeps=keeps)
    assert MemoryModel(measured_peaks).predict(2000).count == pytest.approx(500 * MB + 2000 * MB // 3, rel=0.2)


def test_another_child_trains_a_smaller_batch_after_a_child_died():
    measured_peaks, trained = train_made([8], dies_at=100)
    assert [(item.batch, item.earlier) for item in measured_peaks.batches] == [
        (8, ()),
        (16, (8,)),
        (32, ()),
        (64, (32,)),
    ]
    assert trained == [[8, 16], [32, 64]]
    with pytest.raises(ChildEnded, match="SIGKILL"):
        train_made([8], dies_at=1)
    with pytest.raises(TimeoutError, match="too few batch sizes"):
        train_made([8], dies_at=20)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it was ended by SIGKILL"),
        ("raise SystemExit(3)", "it was ended by exit code 3"),
        ("import time; time.sleep(60)", "it needs too much time"),
    ],
)
def test_a_dead_child_is_named_without_ending_the_plan(monkeypatch, code, reason):
    monkeypatch.setattr(children, "PROGRAM", ("-c", code))
    links = list[Connection]()

    def link(handle):
        links.append(Connection(handle))
        return links[-1]

    monkeypatch.setattr(children, "Connection", link)
    request = {"worker": 1, "workers": 1, "batches": [8], "exchange": "star", "limit": None}
    seconds = 0.3 if "time" in reason else 300.0  # a busy machine starts a process slowly
    assert measure_here(b"no app", {**request, "format": None, "seconds": seconds}) == {"why": reason}
    assert [connection.closed for connection in links] == [True]


def test_the_child_holds_messages_like_a_worker(monkeypatch):
    """Without the messages, a network of 9 million weights needed 80 MB more than predicted."""

    class Replica:
        def carry(self, task):
            self.received = decode_update(task.weights["encoded"], weights)
            return SimpleNamespace(update=encode_update(CODEC.read("float32"), self.received, [False])[0])

    weights = [np.ones(100_000, np.float32)]
    trial = object.__new__(Trial)
    app = SimpleNamespace(x_train=np.ones((8, 1)), y_train=np.ones(8), codec="float32")
    trial.__dict__.update(_replica=Replica(), _weights=weights, _app=app, _steps=2, _round=0, _keep=())
    trial._carry(4)
    assert np.array_equal(trial._replica.received[0], weights[0])
    assert not np.shares_memory(trial._replica.received[0], weights[0])
    assert sum(map(len, trial._sent)) >= weights[0].nbytes


def test_an_error_of_the_app_is_named(monkeypatch):
    monkeypatch.setattr(children, "PROGRAM", ("-m", "ddlf.extras.planner.trial"))
    with pytest.raises(ChildEnded, match="NotPicklable"):
        Child(b"no app", {"worker": 1, "workers": 1, "format": None}, time.monotonic() + 60)


def test_memory_is_kept(tmp_path):
    largest = Largest(limit=10**9, batch=800, confirmed=True, failed=(1000,))
    stored = Measurements(measured=(), samples=100, budget_s=60.0, memory=peaks(64, 128), largest=largest)
    assert write_file(tmp_path / "plan.json", stored)
    assert read_file(tmp_path / "plan.json") == stored


def choice(slots, seconds, memory):
    epoch = Predicted(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds)
    setting = Setting(way=Way("sync", "star", "float32"), slots=slots, batch=64, steps=1)
    amount = Bytes(count=memory, low=0.9 * memory, high=1.1 * memory)
    return Choice(setting=setting, epoch=epoch, update_s=0.1, factor=1.0, low=1.0, high=1.0, memory=amount)


@pytest.mark.parametrize(
    ("wish", "slots"),
    [
        (Wish(), 3),
        (Wish(goal="memory"), 2),  # the faster choice of the two with the least memory
        (Wish(max_memory=990), 2),
        (Wish(max_memory=890), 2),  # this choice needs at most 880
        (Wish(goal="cost", max_memory=990), 1),
        (Wish(max_memory=500), 2),  # no choice fits
    ],
)
def test_the_best_choice_fits_into_the_memory(wish, slots):
    candidates = [choice(1, 4.0, 800), choice(2, 3.0, 800), choice(3, 1.9, 1000)]
    assert wish.best(candidates).setting.slots == slots
    assert wish.fits(wish.best(candidates)) == (wish.max_memory != 500)


def test_a_known_largest_batch_is_reused_only_for_the_same_limit():
    largest = Largest(limit=990, batch=8, confirmed=True)
    assert Wish(max_memory=990).is_answered(largest)
    assert not Wish(max_memory=991).is_answered(largest)
    assert not Wish(goal="memory").is_answered(largest)
    assert Wish(goal="memory").is_answered(dataclasses.replace(largest, of_machine=True))
    assert not Wish(max_memory=990).is_answered(None)


@pytest.mark.parametrize("before", [0, 700 * MB])
async def test_a_plan_with_kept_rounds_keeps_the_memory_of_the_master_because_it_has_not_trained(monkeypatch, before):
    async def measure(app, batches, exchange, seconds, *, limit, is_goal):
        assert (limit, is_goal) == (None, True)
        assert 0.0 < seconds <= 60.0
        return Memory(peaks=peaks(64, 128), largest=None)

    monkeypatch.setattr(planning, "memory_of", measure)
    monkeypatch.setattr(planning, "copy_of_app", lambda app: app)
    monkeypatch.setattr(planning, "write", lambda app, content: True)
    memory = dataclasses.replace(peaks(64), master=before) if before else None
    stored = Measurements(measured=(), samples=100, budget_s=60.0, memory=memory)
    more = await planning._with_memory(None, stored, [64], "star", Wish(goal="memory"), Budget(60.0), [].append)
    assert more.memory == dataclasses.replace(peaks(64, 128), master=before)


async def test_a_choice_by_memory_is_refused_if_the_time_is_too_short_to_measure_it(monkeypatch):
    async def none(*arguments, **options):
        return Memory(problem="it needs too much time")

    monkeypatch.setattr(planning, "memory_of", none)
    monkeypatch.setattr(planning, "copy_of_app", lambda app: app)
    stored, wish = Measurements(measured=(), samples=100, budget_s=8.0), Wish(max_memory=MB)
    with pytest.raises(ConfigError, match=r"could not be measured in .* s: it needs too much time.*--budget 16s"):
        await planning._with_memory(None, stored, [64], "star", wish, Budget(8.0), [].append)
