"""Tests of ``Pool``, for programs that are not async: it follows ``concurrent.futures`` and ``Cluster.map``."""

import asyncio
import concurrent.futures
import itertools
import os
import threading
import time

import joblib
import numpy as np
import pytest

import ddlf
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.pool.executor import Pool
from ddlf.errors import ConfigError, NotPicklable
from tests.patience import PATIENCE_S


def double(x):
    return 2 * x


def even_only(x):
    if x % 2:
        raise ValueError(f"odd: {x}")
    return x


@pytest.fixture(scope="module")
def pool(own_folders):
    with ddlf.Pool(2) as two_workers:
        yield two_workers


def test_a_pool_is_an_executor(pool):
    assert isinstance(pool, concurrent.futures.Executor)
    futures = [pool.submit(double, x) for x in range(10)]
    assert sorted(future.result() for future in concurrent.futures.as_completed(futures)) == list(range(0, 20, 2))
    done, pending = concurrent.futures.wait([pool.submit(even_only, 1), pool.submit(pow, 2, exp=3)])
    assert not pending
    assert sorted(str(f.exception())[-6:] if f.exception() else f.result() for f in done if not f.exception()) == [8]
    assert next(f for f in done if f.exception()).exception().type is ValueError


def test_results_arrive_in_order_or_as_completed(pool, tmp_path):
    def wait(gate):
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        return gate

    assert list(pool.map(double, range(100))) == [2 * x for x in range(100)]
    assert list(pool.map(pow, [2, 3], [5, 2])) == [32, 9]
    assert list(pool.starmap(pow, [(2, 5), (3, 2)])) == [32, 9]
    assert list(pool.map(double, [])) == []
    gate = str(tmp_path / "gate")
    results = pool.map(wait, [gate, ""], ordered=False)
    assert next(results) == ""
    (tmp_path / "gate").touch()
    assert list(results) == [gate]


def test_results_of_own_workers_may_be_objects(pool):
    assert list(pool.map(lambda x: lambda: x, [5]))[0]() == 5  # noqa: RUF015
    with pytest.raises(NotPicklable, match=r"lock \(a _thread.lock\) cannot be sent back as a result") as caught:
        pool.submit(threading.Lock).result()
    assert "(at " not in str(caught.value)
    assert caught.value.hint == "return plain data, such as the arguments of its constructor"


def test_chunksize_warns_that_it_has_no_effect(pool):
    with pytest.warns(UserWarning, match="chunksize has no effect"):
        assert list(pool.map(double, range(3), chunksize=2)) == [0, 2, 4]
    with pytest.raises(ValueError, match="chunksize must be 1 or more"):
        pool.map(double, range(3), chunksize=0)


def test_a_starmap_of_items_other_than_tuples_is_an_error(pool):
    with pytest.raises(TypeError, match="starmap takes items that are tuples of arguments, got 1"):
        list(pool.starmap(double, [1, 2]))


def test_a_map_of_a_map_takes_items_lazily(pool):
    assert list(itertools.islice(pool.map(double, pool.map(double, itertools.count())), 50)) == list(range(0, 200, 4))


def test_items_are_taken_lazily_by_the_thread_that_takes_results(pool):
    threads = []

    def endless():
        for x in itertools.count():
            threads.append(threading.current_thread())
            yield np.full(1_000_000, x % 100, np.uint8)

    results = pool.map(len, endless())
    assert threads == []
    assert [next(results) for _ in range(100)] == [1_000_000] * 100
    results.close()
    assert len(threads) < 300
    assert set(threads) == {threading.current_thread()}


def test_an_error_names_its_item_and_can_be_a_result(pool):
    with pytest.raises(ValueError, match=r"item 1 \(3\): ValueError: odd: 3"):
        list(pool.map(even_only, [2, 3]))
    results = list(pool.options(on_error="return").map(even_only, [2, 3]))
    assert results[0] == 2
    assert isinstance(results[1], ValueError)


def test_joblib_computes_on_the_workers_of_the_pool_and_raises_their_errors(pool):
    with joblib.parallel_config(backend=pool.joblib()):
        results = joblib.Parallel()(joblib.delayed(lambda x: (double(x), os.getpid()))(x) for x in range(30))
        assert [result for result, _ in results] == [2 * x for x in range(30)]
        assert {pid for _, pid in results} <= {worker.executor.pid for worker in pool.cluster.workers}
        with pytest.raises(ValueError, match="odd: 7"):
            joblib.Parallel(n_jobs=2)(joblib.delayed(even_only)(x) for x in (2, 7, 4))
        assert list(joblib.Parallel(return_as="generator")(joblib.delayed(double)(x) for x in (1, 2))) == [2, 4]
    assert list(pool.map(double, [1])) == [2]


def test_a_result_that_is_late_is_a_timeout(pool):
    for ordered in (True, False):
        with pytest.raises(TimeoutError):
            list(pool.map(time.sleep, [PATIENCE_S], timeout=0.1, ordered=ordered))
    assert list(pool.map(double, [1], timeout=PATIENCE_S)) == [2]


def test_a_future_that_is_cancelled_ends_its_call(pool):
    first = pool.options(workers=[1])
    running, waiting, last = first.submit(time.sleep, PATIENCE_S), first.submit(double, 1), first.submit(double, 2)
    time.sleep(0.1)
    assert waiting.cancel()
    assert running.cancel()
    assert last.result(PATIENCE_S) == 4
    with pytest.raises(concurrent.futures.CancelledError):
        running.result()


def test_a_pool_works_inside_a_running_event_loop(pool):
    async def main():
        assert list(pool.map(double, [1, 2])) == [2, 4]  # like in a cell of a notebook
        return await asyncio.get_running_loop().run_in_executor(pool, double, 4)

    assert asyncio.run(main()) == 8


def test_several_threads_may_use_a_pool(pool):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda n: sum(pool.map(double, range(n))), [10, 20, 30, 40])) == [90, 380, 870, 1560]


def test_a_pool_uses_a_connected_cluster_and_does_not_close_it(pool):
    with Pool(pool.cluster) as second_pool:
        assert list(second_pool.map(double, [1])) == [2]
    assert list(pool.map(double, [1])) == [2]
    with pytest.raises(ConfigError, match="threads has no effect on a cluster"):
        Pool(pool.cluster, threads=1)


def test_waiting_on_the_loop_of_the_cluster_is_refused():
    async def main():
        async with ddlf.testing.in_process_cluster(1) as cluster:
            second_pool = Pool(cluster)
            assert await asyncio.wrap_future(second_pool.submit(double, 4)) == 8
            with pytest.raises(RuntimeError, match="in a coroutine use await on the cluster itself"):
                list(second_pool.map(double, [1]))

    import ddlf.testing

    asyncio.run(main())


def test_leaving_a_pool_completes_open_work_and_refuses_new_work(tmp_path):
    with Pool(Cluster.local(1)) as left_pool:
        left_pool.map(lambda x: (tmp_path / str(x)).touch(), range(3))
        slow = left_pool.submit(time.sleep, 0.2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert slow.done()
    assert left_pool.cluster.loop is None
    for call in (lambda: left_pool.submit(double, 1), lambda: left_pool.map(double, [1])):
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            call()
    left_pool.shutdown()


def test_an_error_in_the_block_ends_running_work():
    began = []

    def fail():
        with Pool(1) as failing_pool:
            began.extend([failing_pool.submit(time.sleep, PATIENCE_S), failing_pool.map(double, [1])])
            raise KeyError("in the block")

    begin = time.monotonic()
    with pytest.raises(KeyError, match="in the block"):
        fail()
    assert time.monotonic() - begin < PATIENCE_S
    assert began[0].cancelled()
    with pytest.raises(RuntimeError):
        next(began[1])
