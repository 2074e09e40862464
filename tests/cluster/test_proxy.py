"""Tests of the proxy of a worker on the master, which has the methods of the worker."""

import asyncio
import inspect

import pytest

from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppMissing, ConnectError, RemoteError, RequestTimeout, VersionError, WorkerLost
from ddlf.rpc.iworker import IWorker
from ddlf.rpc.messages import Request
from ddlf.rpc.tokens import new_token
from ddlf.worker.worker import Worker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")


def add(a, b):
    return a + b


@pytest.fixture
def worker(cluster):
    """Return the first of two workers."""
    return cluster.workers[0]


async def test_both_sides_of_a_worker_have_the_same_methods_with_the_same_parameters():
    for name in IWorker.__abstractmethods__:
        for side in (Worker, ProxyWorker):
            declared = list(inspect.signature(getattr(IWorker, name)).parameters)
            parameters = list(inspect.signature(getattr(side, name)).parameters)
            assert [p for p in parameters if p in declared] == declared, (side, name)


async def test_a_request_is_a_command_with_its_arguments(worker):
    assert await worker.rpc(Request("run_method", add, a=20, b=60)) == 80
    assert await worker.rpc(Request("run_method", add, 20, 60)) == 80
    with pytest.raises(ConnectionError, match="unknown command 'no_such'"):
        await worker.rpc(Request("no_such"))


async def test_every_call_of_a_worker_works_through_its_proxy(worker):
    await worker.add_method(add, name="plus")
    assert await worker.run("plus", 1, b=2) == 3
    assert await worker.run_method(add, 1, 2) == 3
    assert await worker.run_code("1 + 2") == 3
    await worker.remove_method("plus")
    with pytest.raises(LookupError):
        await worker.run("plus", 1, 2)


async def test_arguments_of_a_method_may_have_any_name(worker):
    names = dict(method=1, worker=2, request=3, timeout_s=4, command=5, name=6, id=7, function=8)
    assert await worker.run_method(lambda **kwargs: kwargs, **names) == names
    await worker.add_method(lambda **kwargs: kwargs, name="echo")
    assert await worker.run("echo", **names) == names


async def test_wrong_arguments_are_a_type_error_of_the_method(worker):
    with pytest.raises(TypeError, match=r"add\(\) missing 1 required positional argument: 'b'"):
        await worker.run_method(add, a=1)


async def test_calls_of_one_worker_are_answered_each_with_its_own_result(worker):
    assert await asyncio.gather(*(worker.run_method(add, a=n, b=n) for n in range(200))) == [2 * n for n in range(200)]


async def test_more_calls_than_a_worker_queues_are_all_answered(worker):
    assert sum(await asyncio.gather(*(worker.run_method(add, a=n, b=0) for n in range(3000)))) == sum(range(3000))


async def test_a_call_with_a_timeout_of_zero_ends_at_once(worker):
    with pytest.raises(RequestTimeout, match=r"'add' did not end within 0 s|its time limit ended before its turn came"):
        await worker.rpc(Request("run_method", add, a=1, b=2), timeout_s=0)
    assert await worker.run_method(add, a=1, b=2) == 3


async def test_bytes_are_counted_over_all_connections(worker):
    before = worker.bytes_sent, worker.bytes_received
    await worker.run_method(len, bytes(100_000))
    assert worker.bytes_sent - before[0] > 100_000
    await worker.restart()
    await worker.run_method(len, bytes(10))
    assert worker.bytes_sent - before[0] > 100_000
    assert worker.bytes_received > before[1]


async def test_a_proxy_shows_its_name_and_address(worker):
    assert repr(worker) == f"ProxyWorker(worker 1 (127.0.0.1:{worker.port}))"
    assert worker._link.token.decode() not in repr(worker) + repr(worker._link)
    assert worker.executor.pid == (await worker.status()).executor_pid


async def test_a_worker_with_another_python_is_refused_with_both_versions(worker, monkeypatch):
    monkeypatch.setattr("sys.version_info", FakeVersion())
    guest = ProxyWorker(worker.host, worker.port, worker._link.token, guest=True)
    with pytest.raises(VersionError, match=r"runs Python 3\.\d+\.\d+, the master .*: install 3\.99 on the worker"):
        await guest.connect()
    assert not guest.connected
    await guest.close()


class FakeVersion(tuple):
    major, minor = 3, 99

    def __new__(cls):
        return super().__new__(cls, (3, 99, 0, "final", 0))


async def test_another_program_is_recognised():
    async def web_server(reader, writer):
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))
        writer.close()

    server = await asyncio.start_server(web_server, "127.0.0.1", 0)
    worker = ProxyWorker("127.0.0.1", server.sockets[0].getsockname()[1], new_token().encode())
    with pytest.raises(ConnectError, match="another program listens there, not a DDLF worker; check the port"):
        await worker.connect()
    server.close()


@pytest.mark.parametrize(
    ("host", "text"),
    [("no-such-host.invalid", "the name 'no-such-host.invalid' cannot be resolved"), ("127.0.0.1", "start the worker")],
)
async def test_the_error_of_an_address_without_a_worker_says_what_to_do(host, text):
    with pytest.raises(ConnectError, match=text):
        await ProxyWorker(host, 9, new_token().encode()).connect()


async def test_nothing_is_started_before_connect(worker):
    unconnected = ProxyWorker(worker.host, worker.port, worker._link.token)
    with pytest.raises(WorkerLost, match="not connected yet; connect first") as caught:
        await unconnected.ping()
    assert not caught.value.may_have_run
    await unconnected.close()


async def test_a_message_that_is_too_large_is_refused_before_it_is_sent(start_worker, token_file):
    process = start_worker()
    worker = ProxyWorker(
        "127.0.0.1", process.port, token_file.read_text().strip().encode(), max_message_bytes=1_000_000
    )
    await worker.connect()
    with pytest.raises((ValueError, RemoteError), match=r"over the receiver's limit of 1,000,000"):
        await worker.run_method(lambda: bytes(2_000_000))
    assert await worker.run_method(len, bytes(2_000_000)) == 2_000_000
    await worker.close()


async def test_a_master_that_only_asks_the_daemon_needs_no_executor(start_worker, token_file):
    process = start_worker()
    worker = ProxyWorker("127.0.0.1", process.port, token_file.read_text().strip().encode())
    await worker.connect_control()
    assert (await worker.status()).executor == "ready"
    assert worker.bytes_sent == 0
    await worker.shutdown()
    assert process.process.wait(PATIENCE_S) == 0


class Adding:
    """A role that adds numbers."""

    def __init__(self, worker):
        pass

    async def add(self, a, b):
        return a + b

    async def close(self):
        pass


async def test_a_role_is_opened_called_and_closed_with_call(worker):
    role = ("a run", "adding")
    await worker.call(role, "open", Adding)
    assert await worker.call(role, "add", 1, 2, timeout_s=PATIENCE_S) == 3
    await worker.call(role, "close")
    with pytest.raises(AppMissing):
        await worker.call(role, "add", 1, 2)


async def test_the_error_of_an_unreachable_worker_ignores_a_try_that_ran_out_of_time(monkeypatch):
    tries = iter([True, False])

    async def connect():
        if next(tries):
            raise ConnectError("refused")
        await asyncio.Event().wait()

    worker = ProxyWorker("127.0.0.1", 1, token=new_token())
    monkeypatch.setattr(worker, "connect", connect)
    with pytest.raises(ConnectError, match=r"within 0\.5 s, the last try: refused; check"):
        await worker.reconnect(0.5)
