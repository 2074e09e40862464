"""Tests of the workers that hold the weights: which one evaluates, and which one is excluded after a failed link."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.data.app_data import content_of
from ddlf.errors import AppError, ConnectError, WorkerLost
from ddlf.testing import FakeRun
from ddlf.training.crew.opening import _check_models
from ddlf.training.exchanges.members import Members
from ddlf.training.progress import WeightsRef
from ddlf.training.slot.build import ModelReport

DATA = {"x_test": np.arange(6.0), "y_test": np.arange(6), "x_val": np.ones(3)}


def members_of(*proxies):
    crew = SimpleNamespace(member=lambda number: (proxies[number - 1], 0))
    cluster = SimpleNamespace(workers=[SimpleNamespace(id=number + 1) for number in range(len(proxies))])
    return Members("run", crew, cluster, [], "exchange")


class Proxy:
    """A worker that answers, or is lost."""

    def __init__(self, answer, calls):
        self.answer, self.calls = answer, calls

    async def call(self, role, *arguments):
        self.calls.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_first_reachable_worker_evaluates_the_masters_data():
    calls = []
    members = members_of(Proxy(WorkerLost("gone"), calls), Proxy({"loss": 2.0}, calls), Proxy({"loss": 3.0}, calls))
    app = SimpleNamespace(precision="float32", **DATA)
    assert await members.evaluated([(9, 0), (1, 0), (2, 0), (3, 0)], 7, app, "test", 64) == {"loss": 2.0}
    assert calls == [("evaluate", 7, "test", 64, content_of(app, "test"))] * 2
    assert calls[0][-1].keys() == {"x_test", "y_test"}


async def test_other_data_is_named_by_another_content():
    calls = []
    members = members_of(Proxy({"loss": 2.0}, calls))
    app = SimpleNamespace(precision="float32", **DATA)
    for data in (np.arange(6.0), np.arange(1.0, 7.0)):
        app.x_test = data
        await members.evaluated([(1, 0)], 7, app, "test")
    assert calls[0] != calls[1]


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
async def test_workers_that_compute_with_fewer_bits_do_not_evaluate(precision):
    calls = []
    app = SimpleNamespace(precision=precision, **DATA)
    assert await members_of(Proxy({"loss": 2.0}, calls)).evaluated([(1, 0)], 7, app, "val") is None
    assert calls == []


async def test_model_of_a_returning_worker_is_compared_without_the_weights():
    def report(weights):
        return ModelReport(weights=weights, optimizer={}, keras="", backend="")

    run = FakeRun()
    facts = [(name, list(array.shape), str(array.dtype)) for name, array in run.start.items()]
    run.run_context.weights = WeightsRef(like=[], group="weights")
    _check_models(run, {1: report(facts)})
    with pytest.raises(AppError, match=r"makes another model on worker 1 \(1 weights\) than on the master \(2\)"):
        _check_models(run, {1: report(facts[:1])})
    other_facts = [(name, shape, "float64") for name, shape, _ in facts]
    with pytest.raises(AppError, match=r"a weight of shape .*, float64\) than on the master \(a weight .*, float32\)"):
        _check_models(run, {1: report(other_facts)})
    assert isinstance(run.run_context.weights, WeightsRef)


async def test_evaluation_has_no_result_when_all_workers_are_lost():
    app = SimpleNamespace(precision="auto", **DATA)
    assert await members_of(Proxy(WorkerLost("gone"), [])).evaluated([(1, 0)], 7, app, "val") is None


# --- links between workers ------------------------------------------------------------------------------------------------


class Worker:
    """A worker whose daemon may answer."""

    def __init__(self, number):
        self.id, self.name, self.answers = number, f"worker {number}", True

    async def status(self):
        if not self.answers:
            raise WorkerLost("gone", worker=self.name)
        return {}


class Crew:
    """A stand-in for the crew. It records which workers it should exclude."""

    def __init__(self, count):
        self.workers = [Worker(number) for number in range(1, count + 1)]
        self.connected = {worker.id: worker for worker in self.workers}
        self.unmet, self.out, self.ended = [], [], []
        self.members = Members("run", self, self, [], "exchange")

    def member(self, number):
        return (self.connected[number], 0) if number in self.connected else None

    def exclude(self, worker, error):
        self.out.append((worker.id, str(error)))
        del self.connected[worker.id]

    def end(self, error):
        self.ended.append(error)

    def changed(self):
        pass

    async def introduced(self, workers, run, calls=None):
        pairs = ((self.workers[first - 1], self.workers[second - 1]) for first, second in self.unmet)
        return [(*pair, "127.0.0.1:1 refused") for pair in pairs if {*pair} <= {*workers}]


async def test_a_run_does_not_begin_when_two_workers_cannot_reach_each_other():
    crew = Crew(3)
    crew.unmet = [(1, 3)]
    with pytest.raises(ConnectError, match=r"worker 1 cannot reach worker 3: 127.0.0.1:1 refused") as caught:
        await crew.members.reach()
    for part in ("open the port", "exchange='star'", "ddlf doctor --pairs"):
        assert part in caught.value.hint
    assert crew.ended == [caught.value]
    assert crew.out == []


async def test_a_joining_worker_that_reaches_no_other_is_excluded():
    crew = Crew(3)
    joins = crew.connected.pop(3)
    await crew.members.reach()
    crew.connected[3], crew.unmet = joins, [(1, 3), (2, 3)]
    await crew.members.reach()
    assert [worker for worker, _ in crew.out] == [3]


async def test_one_of_two_workers_is_excluded_when_their_link_fails():
    crew = Crew(3)
    await crew.members.cut(2, 1, "no heartbeat for 4.0 s")
    await crew.members.cut(1, 2, "no heartbeat for 4.0 s")  # the second worker reports it, too
    ((worker, reason),) = crew.out
    assert worker == 2
    assert "worker 2 cannot reach worker 1 any more: no heartbeat for 4.0 s; worker 2 is left out" in reason
    assert "ddlf doctor --pairs" in reason


async def test_the_worker_with_the_most_failed_links_is_excluded():
    crew = Crew(4)
    crew.unmet = [(1, 3), (4, 1)]
    await crew.members.cut(1, 2, "no answer")
    assert [worker for worker, _ in crew.out] == [1]


@pytest.mark.parametrize("answers", [True, False])
async def test_silence_is_a_failed_link_only_if_the_master_reaches_both(answers):
    crew = Crew(3)
    crew.connected[2].answers = answers
    crew.members.silent(1, 2, "no heartbeat for 4.0 s")
    crew.members.silent(1, 9, "no heartbeat for 4.0 s")  # worker 9 has been lost in the meantime
    await asyncio.gather(*crew.members._searches)
    assert len(crew.out) == answers
    await crew.members.close()
