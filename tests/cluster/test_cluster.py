"""Tests of all calls of the public interface, with real workers on this machine."""

import asyncio
import dataclasses
import datetime
import enum
import gc
import logging
import os
import signal
import time
import traceback
import weakref

import numpy as np
import pytest

import ddlf
from ddlf.cluster.cluster import Cluster
from ddlf.cluster.link import Link
from ddlf.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ExecutorCrashed,
    NotPicklable,
    RemoteError,
    RequestTimeout,
    ResultNotData,
    WorkerLost,
)
from ddlf.rpc.tokens import new_token
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("one_bare_template")]


async def calculate(self, a, b, c):
    return a + b - c


def plain(self, a, b):
    return self.id, a * b


def without_self(a, b=1):
    return a, b


async def async_without_self(a):
    await asyncio.sleep(0)
    return a


def worker_numbers(self):
    return self.id, self.N


def fail():
    raise ValueError("bad batch")


def fail_on_first(self):
    if self.id == 1:
        raise ValueError("bad batch")
    return self.id


# -- running functions --------------------------------------------------------------------------------------------------


async def test_the_same_arguments_go_to_all_workers(cluster):
    assert await cluster.run_method(calculate, a=10, b=8, c=2) == [16, 16]


async def test_any_name_can_be_a_keyword_argument(cluster):
    def names(**arguments):
        return sorted(arguments)

    keywords = dict.fromkeys(
        ("command", "self", "method", "worker", "request", "args", "kwargs", "name", "timeout_s"), 1
    )
    await cluster.add_method(names)
    assert await cluster.run_method(names, **keywords) == [sorted(keywords)] * 2
    assert await cluster.run("names", **keywords) == [sorted(keywords)] * 2
    assert await cluster.run_method(names, keywords, keywords) == [sorted(keywords)] * 2
    assert await cluster.run_at(1, "names", **keywords) == sorted(keywords)


async def test_each_of_the_first_workers_gets_its_own_arguments():
    async with Cluster.local(3) as three:
        assert await three.run_method(calculate, a=10, b=8, c=2) == [16, 16, 16]
        assert await three.run_method(calculate, dict(a=10, b=8, c=2), dict(a=100, b=80, c=20)) == [16, 160]
        assert await three.run_method(worker_numbers) == [(1, 3), (2, 3), (3, 3)]
        part = three.options(workers=[3, three.workers[0]])
        assert await part.run_method(worker_numbers) == [(3, 3), (1, 3)]
        assert part.N == 2


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (plain, dict(a=2, b=3), [(1, 6), (2, 6)]),
        (without_self, dict(a=2), [(2, 1)] * 2),
        (async_without_self, dict(a="x"), ["x"] * 2),
        (lambda a: a + 1, dict(a=1), [2] * 2),
        (lambda self, a: (self.id, a), dict(a=1), [(1, 1), (2, 1)]),
        (without_self, dict(a=None, b=(1, [2, {"three": {4}}])), [(None, (1, [2, {"three": {4}}]))] * 2),
    ],
)
async def test_plain_and_async_functions_with_and_without_self_run(cluster, function, arguments, expected):
    assert await cluster.run_method(function, **arguments) == expected


async def test_more_arguments_than_workers_are_an_error_that_names_both_numbers(cluster):
    with pytest.raises(ValueError, match="3 sets of arguments for 2 workers"):
        await cluster.run_method(calculate, {}, {}, {})
    with pytest.raises(ValueError, match="3 values for 2 workers"):
        await cluster.set_variable("v", each=[1, 2, 3])


async def test_wrong_kinds_of_arguments_are_refused_before_anything_is_sent(cluster):
    before = [worker.bytes_sent for worker in cluster.workers]
    with pytest.raises(ValueError, match="either the same arguments for all workers or one dict for each"):
        await cluster.run_method(calculate, dict(a=1), b=2)
    with pytest.raises(TypeError, match="one dict of them for each worker, not int"):
        await cluster.run_method(calculate, 5)
    with pytest.raises(TypeError, match="run_method takes a function, got a str"):
        await cluster.run_method("calculate")
    with pytest.raises(TypeError, match="run_method takes a function, got a str"):
        await cluster.workers[0].run_method("calculate")
    for host in (cluster, cluster.workers[0]):
        for not_callable in (None, "calculate"):
            with pytest.raises(TypeError, match="add_method takes a function, got a "):
                await host.add_method(not_callable, name="calculate")
    assert [worker.bytes_sent for worker in cluster.workers] == before


async def test_a_lambda_with_a_socket_in_its_closure_is_refused_with_the_path_to_it(cluster):
    import socket

    with socket.socket() as sock, pytest.raises(NotPicklable, match=r"variable 'sock' \(a socket.socket\)"):
        await cluster.run_method(lambda: sock)
    assert await cluster.run_method(without_self, a=1) == [(1, 1)] * 2


async def test_arrays_come_back_bit_for_bit(cluster):
    arrays = [np.arange(1_000_000, dtype=np.float32), np.float64(0.1), np.array([], np.int8), np.eye(3)[:, ::-1]]
    for answer in await cluster.run_method(async_without_self, a=arrays):
        assert [type(array) for array in answer] == [type(array) for array in arrays]
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(answer, arrays, strict=True))


# -- hosting ------------------------------------------------------------------------------------------------------------


async def test_a_hosted_method_runs_by_function_or_name_on_all_or_one_until_it_is_removed(cluster):
    await cluster.add_method(calculate)
    assert await cluster.run(calculate, a=1, b=2, c=3) == [0, 0]
    assert await cluster.run("calculate", dict(a=1, b=2, c=2)) == [1]
    assert await cluster.run_at(2, calculate, a=1, b=2, c=3) == 0
    assert await cluster.run_at(cluster.workers[1], "calculate", 1, 2, c=3) == 0
    assert await cluster.run_on(1, "calculate", a=5, b=0, c=0) == 5
    assert await cluster.methods() == [["calculate"]] * 2
    await cluster.remove_method(calculate)
    assert await cluster.methods() == [[]] * 2
    with pytest.raises(LookupError) as caught:
        await cluster.run(calculate, a=1, b=2, c=3)
    assert str(caught.value).count("no method 'calculate' here") == 1


async def test_a_redefined_function_is_sent_again(cluster):
    def scaled(x, by):
        return x * by

    old, (by_ten, by_two) = scaled, (dict(x=1, by=10), dict(x=1, by=2))
    await cluster.add_method(scaled)

    def scaled(x, by):
        return x * by * 100

    assert await cluster.run("scaled", **by_ten) == [10, 10]
    assert await cluster.run(scaled, by_ten, by_two) == [1000, 200]
    assert await cluster.run_at(1, old, **by_ten) == 10
    assert await cluster.run("scaled", **by_ten) == [10, 1000]
    assert await cluster.options(workers=[1]).run(scaled, **by_ten) == [1000]
    await cluster.workers[0].restart()
    assert await cluster.run("scaled", **by_ten) == [1000, 1000]


async def test_an_equal_function_is_not_sent_again(cluster):
    def make():
        def same(x):
            return bytes(x)

        return same

    await cluster.add_method(make())
    await cluster.run(make(), x=1)
    before = [worker.bytes_sent for worker in cluster.workers]
    await cluster.run(make(), x=1)
    assert all(worker.bytes_sent - sent < 200 for worker, sent in zip(cluster.workers, before, strict=True))


async def test_a_method_is_hosted_under_another_name_and_replaced_by_the_next_of_that_name(cluster):
    await cluster.add_method(lambda: 1, name="number")
    await cluster.add_method(lambda: 2, name="number")
    assert await cluster.run("number") == [2, 2]


async def test_an_unknown_method_or_worker_is_named_with_the_existing_ones(cluster):
    await cluster.add_method(calculate, name="train")
    with pytest.raises(LookupError, match=r"no method 'trian' here; it has: train \(did you mean 'train'\?\)"):
        await cluster.run_at(1, "trian")
    with pytest.raises(ConfigError, match="there is no worker 3; the cluster has workers 1 to 2"):
        await cluster.run_at(3, "train")


async def test_code_is_sent_once_and_later_calls_carry_its_hash(cluster):
    ballast = os.urandom(200_000)

    def heavy(a):
        return a + len(ballast) - len(ballast)

    worker = cluster.workers[0]
    before = worker.bytes_sent
    assert await worker.run_method(heavy, a=1) == 1
    first = worker.bytes_sent - before
    assert await worker.run_method(heavy, a=2) == 2
    second = worker.bytes_sent - before - first
    assert first > 200_000
    assert second < 1000


class Counted:
    """An object that arrives as a list with the number of times that it was pickled."""

    def __init__(self):
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return list, ((self.times,),)

    def __deepcopy__(self, memo):
        return self


async def test_an_object_that_goes_to_several_workers_is_pickled_once_for_all_of_them():
    async with Cluster.local(3) as three:
        first, second = Counted(), Counted()
        assert await three.run_method(without_self, a=first) == [([1], 1)] * 3
        assert await three.run_method(without_self, dict(a=second), dict(a=second, b=5), dict(a=0, b=second)) == [
            ([1], 1),
            ([1], 5),
            (0, [1]),
        ]
        await three.set_variable("counted", each=[first, first, second])
        assert await three.get_variable("counted") == [[2], [2], [2]]


async def test_an_object_that_changed_between_two_calls_arrives_changed(cluster):
    counted = Counted()
    assert [await cluster.run_method(without_self, a=counted) for _ in range(2)] == [[([n], 1)] * 2 for n in (1, 2)]


async def test_code_is_sent_again_to_an_executor_that_lost_it(cluster):
    worker = cluster.workers[0]
    assert await worker.run_method(without_self, a=1) == (1, 1)
    await worker.restart()
    assert await worker.run_method(without_self, a=2) == (2, 1)


async def test_code_that_one_master_sent_may_be_missing_for_another(cluster):
    assert await cluster.run_method(without_self, a=1) == [(1, 1)] * 2
    first = cluster.workers[0]
    guest = ddlf.ProxyWorker(first.host, first.port, first._link.token, guest=True)
    await guest.connect()
    assert await guest.run_method(without_self, a=2) == (2, 1)
    await guest.close()


# -- code and variables -------------------------------------------------------------------------------------------------


async def test_code_runs_on_all_workers_and_gives_its_last_value(cluster):
    assert await cluster.run_code("self.data['total'] = 1000") == [None, None]
    assert await cluster.run_code("self.data['total'] + self.id") == [1001, 1002]
    assert await cluster.run_code("import asyncio\nawait asyncio.sleep(0, self.N)") == [2, 2]


async def test_an_error_in_code_shows_its_line(cluster):
    with pytest.raises(ZeroDivisionError, match=r"line 2, in <module>\n    x / 0"):
        await cluster.workers[0].run_code("x = 1\nx / 0")
    with pytest.raises(RemoteError, match="SyntaxError"):
        await cluster.workers[0].run_code("x =")


async def test_variables_are_equal_on_all_workers_or_one_for_each(cluster):
    await cluster.set_variable("v", 7)
    assert await cluster.get_variable("v") == [7, 7]
    await cluster.set_variable("v", each=[1, np.arange(3)])
    assert [type(v) for v in await cluster.get_variable("v")] == [int, np.ndarray]
    assert await cluster.variables() == [{"v": "int"}, {"v": "ndarray"}]
    assert await cluster.run_method(read_variable) == [1, 3]
    await cluster.delete_variable("v")
    assert await cluster.variables() == [{}, {}]
    with pytest.raises(KeyError, match="no variable 'v' here"):
        await cluster.options(workers=[1]).get_variable("v")


def read_variable(self):
    v = self.variables["v"]
    return v if isinstance(v, int) else len(v)


async def test_none_is_a_value_of_a_variable(cluster):
    await cluster.set_variable("v", None)
    assert await cluster.get_variable("v") == [None, None]


async def test_clean_frees_data_model_and_variables_and_leaves_methods(cluster):
    await cluster.add_method(worker_numbers)
    await cluster.set_variable("v", 7)
    await cluster.run_code("self.data['x'] = 1; self.model = object(); self.x_train = [1]; self.anything = 1; name = 5")
    await cluster.clean()
    remains = "[hasattr(self, name) for name in ('model', 'x_train', 'anything')] + [self.data, len(self.datasets)]"
    assert await cluster.run_code(remains) == [[False, False, False, {}, 0]] * 2
    assert await cluster.variables() == [{}, {}]
    assert await cluster.run("worker_numbers") == [(1, 2), (2, 2)]


# -- errors -------------------------------------------------------------------------------------------------------------


async def test_an_error_has_the_workers_file_and_line_and_is_an_instance_of_the_builtin(cluster):
    with pytest.raises(ValueError, match="bad batch") as caught:
        await cluster.run_method(fail_on_first)
    error = caught.value
    assert isinstance(error, RemoteError)
    assert error.worker == f"worker 1 (127.0.0.1:{cluster.workers[0].port})"
    assert error.type_name == "ValueError"
    assert f'{__file__}", line {fail_on_first.__code__.co_firstlineno + 2}, in fail_on_first' in str(error)
    assert 'raise ValueError("bad batch")' in str(error)
    assert "ddlf/worker" not in str(error)


async def test_an_error_is_raised_after_all_workers_have_ended(cluster):
    with pytest.raises(ValueError, match="bad batch"):
        await cluster.run_method(first_fails_second_takes_long)
    assert await cluster.options(workers=[2]).run_code("self.done") == [True]


async def first_fails_second_takes_long(self):
    if self.id == 1:
        raise ValueError("bad batch")
    await asyncio.sleep(0.2)
    self.done = True


async def test_several_failures_are_raised_together_and_equal_texts_once(cluster):
    with pytest.raises(ValueError, match="bad batch") as caught:
        await cluster.run_method(fail)
    text = str(caught.value)
    assert text.startswith("2 of 2 workers failed\nworker 1 (")
    assert text.count("Traceback") == 1
    assert isinstance(caught.value, RemoteError)
    assert [isinstance(error, ValueError) for error in caught.value.others] == [True]
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 10


class NoData(Exception):
    def __init__(self, code):
        super().__init__("no data")
        self.code = code


@pytest.mark.parametrize("workers", [[1], [1, 2]])
async def test_an_error_of_one_or_several_workers_can_be_caught_by_its_class(cluster, workers):
    def refuse():
        raise NoData(404)

    with pytest.raises(NoData) as caught:
        await cluster.options(workers=workers).run_method(refuse)
    assert caught.value.code == 404
    assert caught.value.type is NoData


async def test_errors_can_be_results(cluster):
    tolerant = cluster.options(on_error="return")
    first, second = await tolerant.run_method(fail_on_first)
    assert isinstance(first, ValueError)
    assert second == 2
    with pytest.raises(ValueError, match="bad batch"):
        await cluster.run_method(fail_on_first)  # the view did not change the cluster


async def test_an_exception_with_unpicklable_content_arrives(cluster):
    with pytest.raises(RemoteError, match="broken in a special way") as caught:
        await cluster.workers[0].run_method(raise_with_lock)
    assert caught.value.type_name.endswith("Special")
    with pytest.raises(RemoteError, match="its text is unavailable"):
        await cluster.workers[0].run_method(raise_without_text)


def raise_with_lock():
    import threading

    class Special(Exception):
        def __init__(self):
            super().__init__("broken in a special way")
            self.lock = threading.Lock()

        def __reduce__(self):
            raise RuntimeError("never")

    raise Special


def raise_without_text():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("never")

    raise Silent


async def test_the_cause_of_an_error_arrives_too(cluster):
    with pytest.raises(RuntimeError, match="direct cause") as caught:
        await cluster.workers[0].run_method(raise_from)
    assert "KeyError: 'weights'" in str(caught.value)


def raise_from():
    try:
        {}["weights"]
    except KeyError as error:
        raise RuntimeError("no weights") from error


async def test_a_result_that_is_not_data_is_named_with_its_path(cluster):
    with pytest.raises(ResultNotData, match=r"\['model'\]\[1\]") as caught:
        await cluster.workers[0].run_method(return_an_object)
    assert "pickle_results=True" in str(caught.value)


def return_an_object():
    from collections import deque

    return {"model": [1, deque("x")]}


async def test_results_of_any_kind_arrive_if_the_master_allows_it():
    from collections import deque

    async with Cluster.local(1, pickle_results=True) as one_worker:
        assert await one_worker.run_method(return_an_object) == [{"model": [1, deque("x")]}]


@dataclasses.dataclass
class Finding:
    at: datetime.datetime
    names: np.ndarray


class Unknown(enum.Enum):
    A = 1


async def test_results_of_classes_that_both_sides_know_arrive_unchanged(cluster, monkeypatch):
    at = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)

    def find(at):
        return Finding(at + datetime.timedelta(1), np.array(["a", "bc"]))

    for finding in await cluster.run_method(find, at=at):
        assert type(finding) is Finding
        assert finding.at == at + datetime.timedelta(1)
        assert finding.names.tolist() == ["a", "bc"]
    unknown = Unknown.A
    monkeypatch.delitem(globals(), "Unknown")
    with pytest.raises(
        ResultNotData, match=r"worker 1 .*the result contains a .*Unknown, which is unknown on this side"
    ):
        await cluster.run_method(lambda: unknown)
    assert await cluster.run_code("1 + 1") == [2, 2], "over the same connections"


async def test_a_call_has_the_time_limit_of_its_view(cluster):
    hasty = cluster.options(timeout_s=0.2)
    with pytest.raises(RequestTimeout) as caught:
        await asyncio.wait_for(hasty.run_method(wait_indefinitely), PATIENCE_S)
    assert "'wait_indefinitely' did not end within 0.2 s" in str(caught.value)
    assert [type(error) for error in caught.value.others] == [RequestTimeout]
    assert await hasty.run_method(without_self, a=1) == [(1, 1)] * 2


async def wait_indefinitely():
    await asyncio.Event().wait()


async def test_a_cancelled_call_leaves_all_workers_usable(cluster):
    call = asyncio.ensure_future(cluster.run_method(wait_indefinitely))
    await cluster.ping()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.wait_for(cluster.run_method(without_self, a=1), PATIENCE_S) == [(1, 1)] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(on_error="ignore"), "on_error must be 'raise' or 'return', got 'ignore'"),
        (dict(timeout_s=-1), "timeout_s must be a number of seconds of 0 or more, got -1"),
        (dict(timeout_s="5"), "timeout_s must be a number of seconds of 0 or more, got '5'"),
        (dict(timeout_s=True), "timeout_s must be a number"),
        (dict(timeout_s=float("nan")), "timeout_s must be a number"),
        (dict(workers=[1, 1]), "the same worker is named twice"),
        (dict(workers=[0]), "there is no worker 0"),
    ],
)
async def test_impossible_options_are_refused(cluster, options, text):
    with pytest.raises(ConfigError, match=text):
        cluster.options(**options)


# -- connecting ---------------------------------------------------------------------------------------------------------


async def test_ping_and_status_answer_for_each_worker(cluster):
    assert all(0 < seconds < 1 for seconds in await cluster.ping())
    assert [status.executor for status in await cluster.status()] == ["ready", "ready"]


async def test_connect_and_close_can_be_called_again(start_worker, token_file):
    worker = start_worker()
    cluster = Cluster(["127.0.0.1"], worker.port, token_file=token_file)
    await cluster.close()
    assert await cluster.connect() is cluster
    await cluster.connect()
    assert await cluster.run_method(without_self, a=1) == [(1, 1)]
    await cluster.close()
    await cluster.close()
    async with cluster:
        assert await cluster.run_method(without_self, a=1) == [(1, 1)]


async def test_a_call_before_connect_or_after_close_is_an_error(token_file):
    cluster = Cluster(["127.0.0.1"], 9, token_file=token_file)
    with pytest.raises(WorkerLost, match="not connected yet; connect first"):
        await cluster.run_method(without_self, a=1)
    local = Cluster.local(2)
    with pytest.raises(WorkerLost) as caught:
        await local.run_method(without_self, a=1)
    assert str(caught.value).count("not connected yet; connect first") == 1
    async with local:
        pass
    with pytest.raises(WorkerLost) as caught:
        await local.run_method(without_self, a=1)
    assert str(caught.value).count("closed on this side; connect again") == 1


async def test_a_view_connects_and_closes_the_whole_cluster():
    cluster = Cluster.local(2)
    async with cluster.options(workers=[2]) as part:
        assert await part.run_method(worker_numbers) == [(2, 2)]
        assert await cluster.run_method(worker_numbers) == [(1, 2), (2, 2)]
    assert not any(worker.connected for worker in cluster.workers)


async def test_close_ends_open_calls_and_their_methods(start_worker, token_file):
    worker = start_worker()
    cluster = Cluster(["127.0.0.1"], worker.port, token_file=token_file)
    await cluster.connect()
    call = asyncio.ensure_future(cluster.run_code("while True: pass"))
    while not (await cluster.status())[0].busy:
        pass
    await cluster.close()
    with pytest.raises(WorkerLost, match="the connection was closed on this side"):
        await asyncio.wait_for(call, PATIENCE_S)
    async with cluster:
        assert await asyncio.wait_for(cluster.run_method(without_self, a=1), PATIENCE_S) == [(1, 1)]


async def test_silent_workers_are_listed_in_one_table_within_one_timeout(start_worker, token_file, monkeypatch):
    monkeypatch.setattr("ddlf.rpc.dial.HANDSHAKE_TIMEOUT_S", 1)
    worker = start_worker()
    silent = [await asyncio.start_server(say_nothing, "127.0.0.1", 0) for _ in range(30)]
    ports = [worker.port, 9, *(server.sockets[0].getsockname()[1] for server in silent)]
    cluster = Cluster(["127.0.0.1"] * 32, ports, token_file=token_file)
    begin = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        await cluster.connect()
    assert time.monotonic() - begin < 15
    head, *rows = str(caught.value).splitlines()
    assert head == "31 of 32 workers could not be reached:"
    assert [row.split()[:2] for row in rows] == [[str(n), f"127.0.0.1:{ports[n - 1]}"] for n in range(2, 33)]
    assert "connection refused" in rows[0]
    assert "no DDLF handshake" in rows[1]
    assert caught.value.exit_code == 3
    assert all(row.count("127.0.0.1") == 1 for row in rows)
    assert not any(member.connected for member in cluster.workers)
    for server in silent:
        server.close()


async def say_nothing(reader, writer):
    await reader.read()
    writer.close()


async def test_a_cluster_continues_with_the_least_number_of_workers(start_worker, token_file, caplog):
    worker = start_worker()
    cluster = Cluster(["127.0.0.1"] * 2, [9, worker.port], token_file=token_file, min_workers=1)
    with caplog.at_level(logging.WARNING):
        await cluster.connect()
        await cluster.connect()  # like a run with a cluster that is already connected
    assert caplog.text.count("1 of 2 workers could not be reached") == 1
    assert await cluster.run_method(worker_numbers) == [(1, 1)]
    await cluster.close()


async def test_a_failed_connect_keeps_open_connections(start_worker, token_file):
    first, second = start_worker(), start_worker()
    cluster = Cluster(["127.0.0.1"] * 2, [first.port, second.port], token_file=token_file)
    async with cluster:
        await cluster.run_code("kept = 1")
        second.end(signal.SIGKILL)
        with pytest.raises(ConnectError, match="1 of 2 workers could not be reached"):
            await cluster.connect()
        assert await cluster.workers[0].run_code("kept") == 1
        second = start_worker(port=second.port)
        await cluster.connect()
        assert await cluster.run_code("globals().get('kept')") == [1, None]


@pytest.mark.parametrize("part", ["executor", "daemon"])
async def test_a_worker_that_dies_during_the_connect_is_tried_again(start_worker, token_file, monkeypatch, part):
    started = [start_worker()]
    port = started[0].port
    usual, dialled = Link._dial_executor, []

    async def dial(self, timeout_s):
        dialled.append(self)
        if len(dialled) == 1 and part == "executor":
            os.kill((await self.status()).executor_pid, signal.SIGKILL)
        elif len(dialled) == 1:
            started[0].end(signal.SIGKILL)
            started.append(start_worker(port=port))
        return await usual(self, timeout_s)

    monkeypatch.setattr(Link, "_dial_executor", dial)
    async with Cluster(["127.0.0.1"], port, token_file=token_file) as cluster:
        assert await cluster.run_method(without_self, a=1) == [(1, 1)]


async def test_another_token_is_an_error_of_one_sentence_with_a_remedy(start_worker, tmp_path):
    worker = start_worker()
    other_token = tmp_path / "other-token"
    other_token.write_text(new_token())
    other_token.chmod(0o600)
    with pytest.raises(
        ConnectError, match="the worker has another token than this side; copy the same token file"
    ) as caught:
        await Cluster(["127.0.0.1"], worker.port, token_file=other_token).connect()
    assert caught.value.exit_code == AuthError.exit_code == 4


async def test_a_busy_worker_names_its_method(start_worker, token_file, monkeypatch):
    monkeypatch.setattr("ddlf.rpc.dial.HANDSHAKE_TIMEOUT_S", 0.5)
    worker = start_worker()
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as first:
        call = asyncio.ensure_future(first.run_code("import time; time.sleep(3600)"))
        while not (await first.status())[0].busy:
            pass
        with pytest.raises(
            ConnectError, match=r"busy with 'run_code' since \d+ s; wait, or end it with: ddlf stop --res"
        ):
            await ddlf.ProxyWorker("127.0.0.1", worker.port, first.workers[0]._link.token, guest=True).connect()
        call.cancel()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("localhost",),
            r"hosts must be a list of names or addresses, got the text 'localhost'; write \['localhost'\]",
        ),
        (([],), "a cluster needs at least one worker"),
        ((["127.0.0.1", "127.0.0.1"], [1]), "2 hosts but 1 ports"),
        (
            (["127.0.0.1:9411"],),
            r"without a port, got '127.0.0.1:9411'; pass ports separately, .*: Cluster\(\['127.0.0.1'\], \[9411\]\)",
        ),
        ((["127.0.0.1"], [0]), "a port must be 1-65535, got 0"),
        ((["127.0.0.1"], [True]), "a port must be 1-65535, got True"),
        ((["127.0.0.1"], ["9000"]), "a port must be 1-65535, got '9000'"),
        ((["127.0.0.1", "127.0.0.1"], 9000), "127.0.0.1:9000 is named twice"),
        ((["10.0.0.1"],), "no token for workers on other machines; run 'ddlf token new'"),
    ],
)
async def test_impossible_addresses_are_refused_at_once(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Cluster(*arguments)


@pytest.mark.parametrize("n", [0, -3, 10**9, True, 2.0, "2"])
async def test_an_impossible_number_of_local_workers_is_refused(n):
    with pytest.raises(ConfigError, match=f"the number of local workers must be 1-1024, got {n!r}"):
        Cluster.local(n)


async def test_shutdown_ends_the_workers(start_worker, token_file):
    worker = start_worker()
    async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
        await cluster.shutdown()
    assert worker.process.wait(PATIENCE_S) == 0


async def test_methods_and_variables_of_all_workers_are_restored_after_a_crash(cluster):
    def scaled(self, x):
        return x * self.variables["factor"] + self.variables["offset"]

    await cluster.add_method(scaled)
    await cluster.set_variable("factor", each=[1, 10])
    await cluster.set_variable("offset", 5)
    await cluster.set_variable("forgotten", 1)
    await cluster.delete_variable("forgotten")
    with pytest.raises(ExecutorCrashed):
        await cluster.workers[1].run_code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert await cluster.run(scaled, x=3) == [8, 35]
    assert [set(names) for names in await cluster.variables()] == [{"factor", "offset"}] * 2


async def test_later_changes_on_the_master_do_not_change_sent_values(cluster):
    factor, table, values = [2], np.arange(3), [{"n": 1}, {"n": 2}]

    def scaled(x):
        return x * factor[0]

    await cluster.add_method(scaled)
    await cluster.set_variable("table", table)
    await cluster.set_variable("own", each=values)
    await cluster.set_variable("view", memoryview(b"abc"))
    factor[0], table[0], values[1]["n"] = 9, 9, 9
    await cluster.workers[1].restart()
    assert await cluster.run("scaled", x=3) == [6, 6]
    assert [array.tolist() for array in await cluster.get_variable("table")] == [[0, 1, 2]] * 2
    assert await cluster.get_variable("own") == [{"n": 1}, {"n": 2}]
    assert await cluster.get_variable("view") == [b"abc"] * 2


async def test_an_added_worker_gets_the_methods_and_variables_of_the_cluster(start_worker):
    first, second = start_worker(), start_worker()
    async with Cluster(["127.0.0.1"], [first.port], token_file=first.token_file) as cluster:
        await cluster.set_variable("x", 7)
        added = await cluster.add("127.0.0.1", second.port)
        assert (added.id, cluster.N) == (2, 2)
        assert await cluster.get_variable("x") == [7, 7]
        with pytest.raises(ConfigError, match="already in the cluster"):
            await cluster.add("127.0.0.1", second.port)


async def test_a_worker_that_cannot_be_added_does_not_change_the_cluster(start_worker, free_port):
    first = start_worker()
    async with Cluster(["127.0.0.1"], [first.port], token_file=first.token_file) as cluster:
        with pytest.raises(ConnectError):
            await cluster.add("127.0.0.1", free_port)
        assert cluster.N == 1


async def test_a_closed_cluster_is_freed_without_garbage_collection(start_worker, token_file):
    worker = start_worker()
    gc.collect()
    gc.disable()
    try:
        async with Cluster(["127.0.0.1"], worker.port, token_file=token_file) as cluster:
            await cluster.add_method(calculate)
            await cluster.run("calculate", a=1, b=2, c=3)
            references = [weakref.ref(cluster), weakref.ref(cluster.workers[0])]
        del cluster
        await asyncio.sleep(0)  # ended tasks are freed
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
