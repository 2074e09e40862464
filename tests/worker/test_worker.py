"""Tests of the worker that methods see.

The ``Executor`` runs in this process. Tests call it directly or over a socket pair.
"""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from ddlf.errors import ProtocolError, RequestCancelled, RequestTimeout
from ddlf.rpc.code import CodeSender, load_result
from ddlf.rpc.connection import Connection
from ddlf.rpc.messages import Kind, Limits, Request, dumps, loads
from ddlf.worker.calls import Call, concurrent
from ddlf.worker.executor import Executor
from tests.patience import PATIENCE_S
from tests.sockets import socket_pair

LIMITS = Limits()


@pytest.fixture
def executor(tmp_path):
    """Return an executor without a daemon."""
    return Executor(tmp_path / "session", tmp_path / "persist")


@pytest.fixture
def worker(executor):
    """Return the worker that methods of the executor receive as ``self``."""
    return executor.worker


class OneRequest:
    """A session of one request, without a connection."""

    is_held_back = False
    is_guest = False
    peer = None

    def __init__(self, then=lambda: None):
        self.response = asyncio.get_running_loop().create_future()
        self.then = then

    def refusal(self):
        return None

    def answer(self, call, response):
        self.response.set_result(response)
        self.then()

    def keep_answers(self):
        pass

    def tell(self, call, facts):
        pass


async def ask(executor, request, timeout_s=None):
    loop = asyncio.get_running_loop()
    session = OneRequest()
    call = Call(-1, request, session, None if timeout_s is None else loop.time() + timeout_s)
    executor.calls.submit(call)
    try:
        return (await asyncio.shield(session.response)).unwrap()
    except asyncio.CancelledError:
        executor.calls.cancel(call)
        raise


class Master:
    """The other end of a worker's connection, frame by frame."""

    def __init__(self, sock):
        self.code = CodeSender()
        self.answers = {}
        self.closed = asyncio.Event()
        self.connection = Connection(sock, self._on_frame, lambda reason: self.closed.set(), limits=LIMITS)

    def _on_frame(self, frame):
        self.future(frame.id).set_result((frame.kind, loads(frame.buffers, load_result)))

    def future(self, id):
        return self.answers.setdefault(id, asyncio.get_running_loop().create_future())

    def send(self, id, command, *args, **kwargs):
        self.connection.send(Kind.REQUEST, id, command, dumps([list(args), kwargs], self.code.dump), None)

    def cancel(self, id):
        self.connection.send(Kind.CANCEL, id, "", [])

    async def answer(self, id):
        """Return the kind of an answer, and its value or the name of the error's type."""
        kind, value = await asyncio.wait_for(self.future(id), PATIENCE_S)
        return (kind, value) if kind == Kind.RESULT else (kind, value["chain"][0][0].rpartition(".")[2])


@pytest.fixture
async def master(executor):
    """Yield a master that is connected to ``executor``."""
    master_end, executor_end = socket_pair()
    serving = asyncio.create_task(executor.serve(executor_end, LIMITS, LIMITS))
    master = Master(master_end)
    yield master
    master.connection.close()
    await asyncio.wait_for(serving, PATIENCE_S)


async def run(executor, function, /, *args, **kwargs):
    return await ask(executor, Request("run_method", function, *args, **kwargs))


# -- calling ------------------------------------------------------------------------------------------------------------


async def test_plain_and_async_functions_run_with_and_without_the_worker(executor, worker):
    async def with_self(self, x):
        return self is worker, x

    async def without(x):
        return x

    assert await run(executor, with_self, 1) == (True, 1)
    assert await run(executor, without, x=2) == 2
    assert await run(executor, lambda self, x: self is worker, 1) is True
    assert await run(executor, lambda x: x, 3) == 3


async def test_attributes_of_self_stay_until_clean(executor, worker):
    def remember(self):
        self.anything = 7
        self.data["total"] = 1000

    await run(executor, remember)
    assert await run(executor, lambda self: (self.anything, self.data["total"])) == (7, 1000)
    await worker.clean()
    assert await run(executor, lambda self: (hasattr(self, "anything"), self.data)) == (False, {})


async def test_a_method_can_call_hosted_methods_and_functions_of_its_own_worker(executor, worker):
    async def outer(self):
        return await self.run("inner", 1) + await self.run_method(lambda x: x, 10)

    await worker.add_method(lambda self, x: x + 1, name="inner")
    assert await run(executor, outer) == 12


async def test_an_unknown_command_is_refused(executor):
    with pytest.raises(ProtocolError, match="unknown command 'handle'"):
        await ask(executor, Request("handle"))
    with pytest.raises(ProtocolError, match="run without a method"):
        await ask(executor, Request("run"))


async def test_a_method_that_raises_system_exit_does_not_end_the_worker(executor):
    def leave():
        raise SystemExit(3)

    async def leave_later():
        await asyncio.sleep(0)
        raise SystemExit(3)

    for function in (leave, leave_later):
        with pytest.raises(SystemExit):
            await run(executor, function)
    assert await run(executor, lambda: 1) == 1


# -- code ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("x = 5\nx * 2", 10),
        ("x = 5", None),
        ("", None),
        ("# nothing", None),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "slept"),
        ("async def f():\n    return 4\nawait f()", 4),
        ("self.id", 0),
        ("for n in range(3):\n    last = n\nlast", 2),
    ],
)
async def test_code_gives_the_value_of_its_last_expression(worker, code, value):
    assert await worker.run_code(code) == value


async def test_later_code_can_use_names_that_code_has_defined(worker):
    await worker.run_code("def f(x):\n    return x + 1")
    assert await worker.run_code("f(1)") == 2
    await worker.clean()
    with pytest.raises(NameError):
        await worker.run_code("f(1)")


# -- variables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1x", "class", "__builtins__", "😀", "", "a.b", 7, None])
async def test_a_name_that_is_not_an_identifier_is_refused_as_a_variable(worker, name):
    with pytest.raises(ValueError, match="is not a valid variable name"):
        await worker.set_variable(name, 1)


async def test_an_unknown_variable_is_a_key_error_with_the_nearest_name(worker):
    await worker.set_variable("weights", 1)
    with pytest.raises(KeyError, match="did you mean 'weights'"):
        await worker.get_variable("wieghts")
    with pytest.raises(KeyError, match="set are: weights"):
        await worker.delete_variable("zzz")


# -- turns --------------------------------------------------------------------------------------------------------------


async def test_methods_run_one_at_a_time_in_order_of_arrival(executor):
    log = []

    async def step(name):
        log.append(f"{name} begins")
        await asyncio.sleep(0)
        log.append(f"{name} ends")

    await asyncio.gather(*(run(executor, step, name) for name in "ab"))
    assert log == ["a begins", "a ends", "b begins", "b ends"]


async def test_a_concurrent_method_runs_beside_another_one(executor):
    opened = asyncio.Event()

    async def wait():
        await asyncio.wait_for(opened.wait(), PATIENCE_S)
        return "opened"

    waiting = asyncio.ensure_future(run(executor, wait))
    await asyncio.sleep(0)
    await run(executor, concurrent(lambda: opened.set()))
    assert await waiting == "opened"


async def test_plain_concurrent_functions_run_at_the_same_time(executor):
    barrier = threading.Barrier(3, timeout=PATIENCE_S)
    await asyncio.gather(*(run(executor, concurrent(lambda: barrier.wait())) for _ in range(3)))


async def test_results_and_errors_of_a_plain_concurrent_function_arrive_unchanged(executor, worker):
    async def later():
        return 5

    assert await run(executor, concurrent(lambda self: self.id)) == worker.id
    assert await run(executor, concurrent(lambda: later())) == 5
    for kind in (ValueError, SystemExit, KeyboardInterrupt):

        def fail(kind=kind):
            raise kind("no")

        with pytest.raises(kind):
            await run(executor, concurrent(fail))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run(executor, concurrent(lambda: next(iter(()))))


async def test_a_plain_concurrent_function_that_loops_ends_when_it_is_cancelled(executor):
    begun, ended = threading.Event(), threading.Event()

    @concurrent
    def loop():
        begun.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    running = asyncio.ensure_future(run(executor, loop))
    assert await asyncio.to_thread(begun.wait, 30)
    assert await run(executor, lambda: "others run") == "others run"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 30)


async def test_a_request_whose_time_is_over_before_its_turn_does_not_start(executor):
    gate = asyncio.Event()
    started = []
    first = asyncio.ensure_future(run(executor, lambda: gate.wait()))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(ask(executor, Request("run_method", lambda: started.append(1)), timeout_s=0))
    await asyncio.sleep(0)
    gate.set()
    await first
    with pytest.raises(RequestTimeout) as caught:
        await second
    assert not caught.value.may_have_run
    assert started == []


# -- over a connection --------------------------------------------------------------------------------------------------


async def test_a_waiting_request_that_is_cancelled_never_runs_and_the_next_one_does(worker, master):
    master.send(1, "run_code", "import asyncio\ngate = asyncio.Event()\nran = []")
    await master.answer(1)
    master.send(2, "run_method", wait_at_gate)
    master.send(3, "run_method", note_that_it_ran)
    master.cancel(3)
    assert await master.answer(3) == (Kind.ERROR, "RequestCancelled")
    worker._namespace["gate"].set()
    assert await master.answer(2) == (Kind.RESULT, True)
    master.send(4, "run_code", "ran")
    assert await master.answer(4) == (Kind.RESULT, [])


async def wait_at_gate(self):
    return await self._namespace["gate"].wait()


def note_that_it_ran(self):
    self._namespace["ran"].append(1)


async def wait_indefinitely():
    await asyncio.Event().wait()


def double(x):
    return 2 * x


async def test_requests_are_cancelled_when_their_connection_ends(executor):
    master_end, executor_end = socket_pair()
    serving = asyncio.create_task(executor.serve(executor_end, LIMITS, LIMITS))
    master = Master(master_end)
    master.send(1, "run_method", wait_indefinitely)
    master.send(2, "run_method", wait_indefinitely)
    master.connection.close()
    await asyncio.wait_for(serving, PATIENCE_S)
    assert await asyncio.wait_for(run(executor, lambda: "free"), PATIENCE_S) == "free"


async def test_a_cancel_of_an_unknown_request_is_ignored(master):
    master.cancel(77)
    master.send(1, "run_method", double, 1)
    assert await master.answer(1) == (Kind.RESULT, 2)


async def test_reusing_the_number_of_an_open_request_ends_the_connection(master):
    master.send(1, "run_method", wait_indefinitely)
    master.send(1, "run_method", wait_indefinitely)
    await asyncio.wait_for(master.closed.wait(), PATIENCE_S)


async def test_the_end_of_one_connection_does_not_end_another_one(executor, master):
    master_end, executor_end = socket_pair()
    serving = asyncio.create_task(executor.serve(executor_end, LIMITS, LIMITS))
    Master(master_end).connection.close()
    await asyncio.wait_for(serving, PATIENCE_S)
    master.send(1, "run_method", double, 3)
    assert await master.answer(1) == (Kind.RESULT, 6)


async def test_a_running_request_that_awaits_is_cancelled_in_place(master):
    master.send(1, "run_method", wait_indefinitely)
    master.send(2, "run_method", double, 4)
    master.cancel(1)
    assert await master.answer(1) == (Kind.ERROR, "RequestCancelled")
    assert await master.answer(2) == (Kind.RESULT, 8)


async def test_a_caller_can_cancel_its_call(executor):
    waiting = asyncio.ensure_future(ask(executor, Request("run_method", wait_indefinitely)))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError, RequestCancelled):
        await waiting
    assert await asyncio.wait_for(run(executor, lambda: "free"), PATIENCE_S) == "free"


async def test_a_new_request_does_not_overtake_a_waiting_one(executor):
    log = []
    late = Call(-1, Request("run_method", lambda: log.append("late")), OneRequest())

    async def first():
        await asyncio.sleep(0)

    executor.calls.submit(Call(-1, Request("run_method", first), OneRequest(lambda: executor.calls.submit(late))))
    await run(executor, lambda: log.append("waiting"))
    await run(executor, lambda: None)
    assert log == ["waiting", "late"]


@pytest.mark.parametrize("function", ["return_a_ring", "return_a_ring_later"])
async def test_a_result_that_cannot_be_encoded_is_an_error(master, function):
    master.send(1, "run_method", globals()[function])
    kind, _ = await master.answer(1)
    assert kind == Kind.ERROR
    master.send(2, "run_method", double, 1)
    assert await master.answer(2) == (Kind.RESULT, 2)


def return_a_ring():
    ring = []
    ring.append(ring)
    return ring


async def return_a_ring_later():
    await asyncio.sleep(0)
    return return_a_ring()


async def test_any_error_of_pickling_a_result_is_an_error(master):
    master.send(1, "connect", pickle_results=True)
    await master.answer(1)
    master.send(2, "run_method", return_an_object_that_raises)
    kind, _ = await master.answer(2)
    assert kind == Kind.ERROR


def return_an_object_that_raises():
    class Stubborn(dict):
        def items(self):
            raise RuntimeError("no items here")

        def __reduce__(self):
            raise RuntimeError("no pickle here")

    return Stubborn(a=1)


async def test_each_master_decides_whether_its_results_may_be_pickled(executor, master):
    master_end, executor_end = socket_pair()
    serving = asyncio.create_task(executor.serve(executor_end, LIMITS, LIMITS))
    second_master = Master(master_end)
    second_master.send(1, "connect", pickle_results=True)
    await second_master.answer(1)
    master.send(1, "connect", pickle_results=False)
    await master.answer(1)
    master.send(2, "run_method", return_an_object)
    assert await master.answer(2) == (Kind.ERROR, "ResultNotData")
    second_master.send(2, "run_method", return_an_object)
    assert (await second_master.answer(2))[0] == Kind.RESULT
    second_master.connection.close()
    await asyncio.wait_for(serving, PATIENCE_S)


def return_an_object():
    return object()


async def test_an_answer_contains_the_arrays_as_they_were_when_the_method_returned(executor, worker, master):
    worker.weights = np.zeros(16_000_000, np.float32)  # more than the kernel's buffers hold
    master.connection.pause_reading()
    master.send(1, "run_method", return_weights)
    master.send(2, "run_method", change_weights)
    changed = asyncio.ensure_future(run(executor, lambda: None))
    await changed
    master.connection.resume_reading()
    _, weights = await master.answer(1)
    await master.answer(2)
    assert worker.weights[0] == 1
    assert not weights.any()


def return_weights(self):
    return self.weights


def change_weights(self):
    self.weights += 1


# -- a master that does not read ----------------------------------------------------------------------------------------


@pytest.fixture
def small_queue(monkeypatch):
    monkeypatch.setattr("ddlf.worker.calls.MAX_QUEUED_BYTES", 1_000_000)


async def test_requests_of_a_master_that_does_not_read_wait_until_it_reads_and_then_all_run_in_order(
    executor, worker, master, small_queue
):
    await worker.add_method(
        lambda self, n: (self.data.setdefault("ran", []).append(n), bytes(1_000_000))[1], name="big"
    )

    async def beside(self, n):
        self.data["ran"].append(n)

    await worker.add_method(beside, concurrent=True)
    master.connection.pause_reading()
    for number in range(1, 11):
        master.send(number, "run", "beside" if number == 5 else "big", number)
    for _ in range(50):
        await asyncio.sleep(0)
    assert worker.data["ran"] in ([1], [1, 2])
    assert await run(executor, lambda: "others are served") == "others are served"
    master.connection.resume_reading()
    for number in range(1, 11):
        await master.answer(number)
    assert worker.data["ran"] == list(range(1, 11))


async def test_a_master_that_never_reads_loses_the_connection(
    executor, worker, master, small_queue, monkeypatch, capfd
):
    monkeypatch.setattr("ddlf.worker.calls.STALLED_AFTER_S", 0.1)
    master.connection.pause_reading()
    master.send(1, "run_code", "bytes(5_000_000)")
    await asyncio.sleep(0)
    (session,) = executor.sessions
    await asyncio.wait_for(session.closed, PATIENCE_S)
    assert "its master has read nothing for 0.1 s" in capfd.readouterr().err
