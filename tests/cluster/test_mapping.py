"""Tests of ``Cluster.map``, which calls a function for many items on free workers: results, order, errors, losses, end."""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

from ddlf import events
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.mapping import UNSENT
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import (
    ConfigError,
    ConnectError,
    ExecutorCrashed,
    NotPicklable,
    RemoteError,
    RequestTimeout,
    WorkerLost,
)
from ddlf.testing import in_process_cluster
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")


def double(x):
    return 2 * x


async def double_async(x):
    await asyncio.sleep(0)
    return 2 * x


def worker_id(self, x):
    return self.id


def pid(x):
    return os.getpid()


def even_only(x):
    if x % 2:
        raise ValueError(f"odd: {x}")
    return x


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x

    def __call__(self, x):
        return self.factor * x

    async def later(self, x):
        return self.factor * x


async def take(results, into):
    async for result in results:
        into.append(result)


async def test_all_results_have_the_order_of_the_items(cluster):
    assert await cluster.map(double, range(50)) == [2 * x for x in range(50)]


async def test_results_can_be_taken_one_by_one_in_order_or_as_completed(cluster):
    def wait(seconds):
        time.sleep(seconds)
        return seconds

    assert [x async for x in cluster.map(wait, [0.2, 0.0])] == [0.2, 0.0]
    assert [x async for x in cluster.map(wait, [0.2, 0.0], ordered=False)] == [0.0, 0.2]
    assert await cluster.map(wait, [0.2, 0.0], ordered=False) == [0.0, 0.2]


@pytest.mark.parametrize(
    "function",
    [double, double_async, lambda x: 2 * x, functools.partial(lambda factor, x: factor * x, 2), Scale(2),
     Scale(2).apply, Scale(2).later, functools.partial(double_async), lambda self, x: 2 * x],
)  # fmt: skip
@pytest.mark.parametrize("per_worker", [1, 3])
async def test_any_callable_can_be_mapped(cluster, function, per_worker):
    assert await cluster.options(per_worker=per_worker).map(function, [1, 2, 3]) == [2, 4, 6]


async def test_builtins_and_classes_can_be_mapped_too(cluster):
    assert await cluster.map(abs, [-1, 2]) == [1, 2]
    assert await cluster.map(complex, [1, 2], [3, 4]) == [1 + 3j, 2 + 4j]
    assert await cluster.map(np.sum, [np.ones(3), np.ones(4)]) == [3, 4]


async def test_several_iterables_are_taken_together_and_starmap_takes_tuples(cluster):
    assert await cluster.map(pow, [2, 3, 4], [5, 2]) == [32, 9]
    assert await cluster.starmap(pow, [(2, 5), (3, 2)]) == [32, 9]
    assert await cluster.starmap(lambda *arguments: len(arguments), [(), (1,), (1, 2)]) == [0, 1, 2]


async def test_a_map_may_have_no_item_or_one(cluster):
    assert await cluster.map(double, []) == []
    assert [x async for x in cluster.map(double, iter([]))] == []
    assert await cluster.map(double, [4]) == [8]


async def test_items_may_come_from_an_asynchronous_source(cluster):
    async def items():
        for x in range(5):
            await asyncio.sleep(0)
            yield x

    async def pairs():
        yield 2, 5

    assert await cluster.map(double, items()) == [0, 2, 4, 6, 8]
    assert await cluster.starmap(pow, pairs()) == [32]


async def test_items_of_an_endless_source_are_taken_only_as_results_are_taken(cluster):
    count = 0

    def endless():
        nonlocal count
        for count in itertools.count(1):  # noqa: B007
            yield np.zeros(1_000_000, np.uint8)

    results = aiter(cluster.map(len, endless()))
    assert await anext(results) == 1_000_000
    first = count
    for _ in range(200):
        assert await anext(results) == 1_000_000
    assert count - 201 <= 2 * 64 + UNSENT  # each item and each result has 1 MB
    await results.aclose()
    ended_at = count
    assert await cluster.map(double, [1]) == [2]
    assert first < ended_at == count


async def test_shared_data_of_all_items_is_sent_to_each_worker_once(cluster):
    shared = np.arange(1_000_000)
    before = sum(worker.bytes_sent for worker in cluster.workers)
    total = functools.partial(lambda shared, x: int(shared[x]), shared)
    assert await cluster.map(total, range(40)) == list(range(40))
    assert sum(worker.bytes_sent for worker in cluster.workers) - before < 2.5 * shared.nbytes
    assert await cluster.map(total, [7]) == [7]
    assert sum(worker.bytes_sent for worker in cluster.workers) - before < 2.5 * shared.nbytes


async def test_a_function_is_pickled_when_the_map_is_created(cluster):
    factor = [2]
    results = cluster.map(lambda x: factor[0] * x, [1, 2])
    factor[0] = 3
    assert await results == [2, 4]


async def test_a_map_that_is_never_awaited_warns_that_it_did_not_run(cluster):
    with pytest.warns(RuntimeWarning, match=r"<map of 'double'> was neither awaited nor iterated over: nothing ran"):
        cluster.map(double, [1])


async def test_a_map_uses_all_workers_or_the_named_ones(cluster):
    assert set(await cluster.map(pid, range(20))) == {worker.executor.pid for worker in cluster.workers}
    assert set(await cluster.options(workers=[2]).map(worker_id, range(5))) == {2}


async def test_two_maps_and_calls_beside_them_get_their_own_results(cluster):
    doubled, texts, of_workers = await asyncio.gather(
        cluster.map(double, range(100)), cluster.map(str, range(100)), cluster.run_method(double, x=1)
    )
    assert doubled == [2 * x for x in range(100)]
    assert texts == [str(x) for x in range(100)]
    assert of_workers == [2, 2]


async def test_items_run_at_the_same_time_on_a_worker_with_per_worker(cluster):
    def together(self, x):
        barrier = self.data.setdefault("barrier", threading.Barrier(3))
        return barrier.wait(PATIENCE_S) >= 0

    part = cluster.options(per_worker=3, workers=[1])
    assert await part.map(together, range(6)) == [True] * 6
    with pytest.raises(ConfigError, match="per_worker must be 1-1000, got 0"):
        cluster.options(per_worker=0)


# -- errors -------------------------------------------------------------------------------------------------------------


async def test_an_error_names_its_item_and_ends_the_map(cluster):
    with pytest.raises(ValueError, match=r"item 3 \(3\): ValueError: odd: 3") as caught:
        await cluster.map(even_only, [0, 2, 4, 3, 5, 6])
    assert isinstance(caught.value, RemoteError)
    assert caught.value.item_index == 3
    assert "even_only" in caught.value.remote_traceback
    assert "timed" not in caught.value.remote_traceback
    assert await cluster.map(even_only, [2]) == [2]


async def test_errors_can_be_returned_as_results(cluster):
    results = await cluster.options(on_error="return").map(even_only, range(4))
    assert [results[0], results[2]] == [0, 2]
    assert all(isinstance(error, ValueError) for error in (results[1], results[3]))
    assert [error.item_index for error in (results[1], results[3])] == [1, 3]


async def test_results_before_an_error_can_be_taken_one_by_one(cluster):
    results = []
    with pytest.raises(ValueError, match="odd: 3"):
        await take(cluster.map(even_only, [0, 2, 3, 4]), results)
    assert results == [0, 2]


async def test_an_error_of_the_source_is_raised_after_the_results_before_it(cluster):
    def source():
        yield 1
        raise LookupError("no more")

    results = []
    with pytest.raises(LookupError, match="no more"):
        await take(cluster.map(double, source()), results)
    assert results == [2]


async def test_an_item_that_cannot_be_sent_is_refused_with_its_path(cluster):
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match="variable 'lock'"):
        cluster.map(lambda x: lock, [1])
    with pytest.raises(NotPicklable, match=r"item 1 \(lock\)"):
        await cluster.map(id, [1, lock])
    with pytest.raises(TypeError, match=r"item 0 \(1\): a _thread.lock is not plain data; return"):
        await cluster.map(lambda x: threading.Lock(), [1])
    for wrong, text in (
        (("double", [1]), "takes a function, got a str"),
        ((double, 5), "got int"),
        ((double,), "no items"),
    ):
        with pytest.raises(TypeError, match=text):
            cluster.map(*wrong)


async def test_a_map_within_a_map_is_refused_by_a_sentence(cluster):
    with pytest.raises(NotPicklable, match=r"variable 'cluster' .*can neither use it nor start a map"):
        cluster.map(lambda x: cluster.map(double, [x]), [1])


async def test_a_map_of_a_closed_cluster_is_an_error():
    with pytest.raises(WorkerLost, match="not connected yet; connect first"):
        await Cluster.local(2).map(double, [1])
    with pytest.raises(WorkerLost, match="not connected yet; connect first"):
        await Cluster.local(1).submit(double, 1)


async def test_the_time_of_an_item_begins_when_it_runs(cluster):
    quick = cluster.options(timeout_s=1.0, workers=[1])
    assert await quick.map(time.sleep, [0.1] * 12) == [None] * 12
    with pytest.raises(RequestTimeout, match=r"item 1 \(100\): 'sleep' did not end within 1 s"):
        await quick.map(time.sleep, [0, 100])


# -- futures ------------------------------------------------------------------------------------------------------------


async def test_a_submitted_call_is_a_future(cluster):
    futures = [cluster.submit(pow, 2, x) for x in range(10)]
    assert sorted([await future for future in asyncio.as_completed(futures)]) == [2**x for x in range(10)]
    names = dict.fromkeys(("self", "function", "args", "command", "timeout_s", "ordered"), 1)
    assert await cluster.submit(dict, **names) == names
    with pytest.raises(ValueError, match="odd: 1"):
        await cluster.submit(even_only, 1)


async def test_cancelling_a_future_ends_only_its_call(cluster):
    part = cluster.options(workers=[1])
    futures = [part.submit(time.sleep, PATIENCE_S), part.submit(time.sleep, PATIENCE_S), part.submit(double, 4)]
    await asyncio.sleep(0.05)
    futures[1].cancel()
    futures[0].cancel()
    assert await futures[2] == 8
    assert futures[0].cancelled()
    assert futures[1].cancelled()


async def test_leaving_a_loop_over_results_ends_running_items(cluster):
    async for result in cluster.map(lambda x: time.sleep(PATIENCE_S * (x > 0)), range(100)):
        assert result is None
        break
    assert await asyncio.wait_for(cluster.map(double, range(10)), PATIENCE_S / 2) == [2 * x for x in range(10)]


async def test_cancelling_a_map_ends_running_items(cluster):
    task = asyncio.create_task(cluster.map(time.sleep, [PATIENCE_S] * 10)._gather())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(cluster.map(double, range(10)), PATIENCE_S / 2) == [2 * x for x in range(10)]


# -- progress -----------------------------------------------------------------------------------------------------------


async def test_a_map_reports_its_progress(cluster):
    emitted = []
    take_off = cluster.subscribe(emitted.append)
    part = cluster.options(on_error="return")
    await part.map(even_only, range(5))
    await part.map(time.sleep, iter([0.15] * 6))
    with contextlib.suppress(ValueError):
        await cluster.map(even_only, [1])
    async with contextlib.aclosing(aiter(cluster.map(double, [1, 2]))) as results:
        assert await anext(results) == 2
    take_off()
    maps = {}
    for event in emitted:
        if isinstance(event, events.MapEvent):
            maps.setdefault(event.map, []).append(event)
    first, second, third, fourth = maps.values()
    assert (first[0].function, first[0].items, first[0].workers, first[0].per_worker) == ("even_only", 5, 2, 1)
    assert (first[-1].how, first[-1].done, first[-1].failed) == ("complete", 3, 2)
    assert second[0].items is None
    assert any(isinstance(event, events.MapMoved) for event in second)
    assert 0.9 <= second[-1].compute_s <= 2 * second[-1].seconds
    assert (third[-1].how, third[-1].failed) == ("failed", 1)
    assert "odd: 1" in third[-1].why
    assert fourth[-1].how == "cancelled"


# -- losses -------------------------------------------------------------------------------------------------------------


async def nap(x):
    await asyncio.sleep(0.01)
    return x


async def test_every_item_has_one_result_when_a_worker_is_lost_and_items_may_run_twice():
    async with in_process_cluster(3) as cluster:
        results = []
        async for result in cluster.options(idempotent=True).map(nap, range(100)):
            results.append(result)
            if len(results) in (20, 40):
                assert cluster.machine(2).kill()
    assert results == list(range(100))


async def test_every_item_has_a_result_or_says_that_it_may_have_run(cluster):
    results = []
    async for result in cluster.options(on_error="return").map(nap, range(100)):
        results.append(result)
        if len(results) == 20:
            os.kill(cluster.workers[0].executor.pid, signal.SIGKILL)
    failed = [result for result in results if isinstance(result, ExecutorCrashed)]
    assert [result if isinstance(result, int) else result.item_index for result in results] == list(range(100))
    assert len(failed) <= 1  # waiting items go to another worker
    for error in failed:
        assert error.may_have_run
        assert "options(idempotent=True)" in error.hint


async def cut_off_after_five(cluster):
    async for result in cluster.options(idempotent=True).map(nap, itertools.count()):
        if result == 5:
            cluster.machine(1).cut_off()


async def test_waiting_items_end_with_the_reason_when_no_worker_returns(monkeypatch):
    monkeypatch.setattr("ddlf.cluster.dispatch.RECONNECT_S", 0.3)
    async with in_process_cluster(1, proxied=True, dead_after_s=0.5) as cluster:
        with pytest.raises((ConnectError, WorkerLost), match="item ") as caught:
            await asyncio.wait_for(cut_off_after_five(cluster), PATIENCE_S)
        assert "worker 1" in str(caught.value)
        cluster.machine(1).recover()
        await cluster.connect()
        assert await cluster.map(double, [1]) == [2]


async def test_an_item_that_crashes_every_executor_is_tried_three_times(cluster):
    def crash(x):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ExecutorCrashed, match=r"item 0 \(1\): .*SIGKILL.* \(tried 3 times\)") as caught:
        await cluster.options(idempotent=True).map(crash, [1])
    assert caught.value.attempts == 3
    errors = await cluster.options(on_error="return").map(crash, [1, 2, 3])
    assert [type(error) for error in errors] == [ExecutorCrashed] * 3
    assert await cluster.map(double, range(10)) == [2 * x for x in range(10)]


async def test_an_item_that_may_have_run_once_still_may_have_run_after_retries(monkeypatch):
    """The executors of its last two tries ended before they began the item."""
    ran = iter([True, False, False])

    async def crashed(worker, request, timeout_s=None):
        raise ExecutorCrashed("the executor was ended", may_have_run=next(ran))

    async with in_process_cluster(1) as cluster:
        monkeypatch.setattr(ProxyWorker, "rpc", crashed)
        (error,) = await cluster.options(idempotent=True, on_error="return").map(double, [1])
    assert (error.attempts, error.may_have_run) == (3, True)


async def test_a_worker_that_joins_during_a_map_gets_items_at_once():
    async with in_process_cluster(2) as cluster:
        all_workers = cluster.workers
        late = all_workers[1]
        cluster._members.present.remove(late)
        cluster._members.missing.append(late)
        numbers = set()
        async for number in cluster.map(who_waits, itertools.count()):
            numbers.add(number)
            if numbers == {1}:
                cluster.take_in(late)
            if numbers == {1, 2}:
                break


async def who_waits(self, x):
    await asyncio.sleep(0.01)
    return self.id


async def close_after_five(cluster):
    async for result in cluster.map(nap, itertools.count()):
        if result == 5:
            await cluster.close()


async def test_closing_the_cluster_ends_the_map():
    cluster = in_process_cluster(2)
    await cluster.connect()
    with pytest.raises(WorkerLost, match="closed"):
        await close_after_five(cluster)
    await cluster.connect()
    try:
        assert await cluster.map(double, [1]) == [2]
    finally:
        await cluster.close()
