"""Tests of hosting roles on a worker: they are opened, called, closed and freed."""

import asyncio
import gc
import weakref

import pytest

from ddlf.errors import AppMissing, ProtocolError
from ddlf.rpc.messages import Request
from ddlf.worker.calls import Hosting, concurrent
from ddlf.worker.executor import Executor
from tests.patience import PATIENCE_S
from tests.worker.test_worker import ask


class Counter:
    """A role that counts, and waits at a gate."""

    def __init__(self, worker, start=0):
        self.worker = worker
        self.count = start
        self.gate = asyncio.Event()
        self.me = self  # a reference cycle, like in models and apps
        self.ended = []

    async def add(self, number, times=1):
        self.count += number * times
        return self.count

    async def wait(self):
        await self.gate.wait()
        return "through"

    @concurrent
    async def open_gate(self):
        self.gate.set()

    def look(self):
        return self.count

    async def _hidden(self):
        return self.count

    async def close(self):
        self.ended.append(self.count)


@pytest.fixture
def executor(tmp_path):
    return Executor(tmp_path / "session", tmp_path / "persist")


async def call(executor, *args, **kwargs):
    return await asyncio.wait_for(ask(executor, Request("call", *args, **kwargs)), PATIENCE_S)


def record_roles(roles):
    def make(*args):
        roles.append(Counter(*args))
        return roles[-1]

    return make


async def test_a_role_is_made_with_its_worker_and_its_verbs_are_called(executor):
    roles = []
    await call(executor, "run", "counter", "open", record_roles(roles), 10)
    assert roles[0].worker is executor.worker
    assert await call(executor, "run", "counter", "add", 2, times=3) == 16


async def test_verbs_take_turns_with_methods_unless_they_are_concurrent(executor):
    await call(executor, "run", "counter", "open", Counter)
    waiting = asyncio.ensure_future(call(executor, "run", "counter", "wait"))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(call(executor, "run", "counter", "add", 1))
    await asyncio.sleep(0)
    assert executor.calls.running.method.name == "counter.wait"
    assert not behind.done()
    await call(executor, "run", "counter", "open_gate")
    assert await waiting == "through"
    assert await behind == 1


async def test_two_roles_of_one_run_are_independent(executor):
    await call(executor, "run", "one", "open", Counter, 1)
    await call(executor, "run", "two", "open", Counter, 2)
    assert [await call(executor, "run", name, "add", 0) for name in ("one", "two")] == [1, 2]


async def test_a_role_of_an_unknown_run_is_missing(executor):
    with pytest.raises(AppMissing, match="it hosts no counter of this run"):
        await call(executor, "run", "counter", "add", 1)
    await call(executor, "run", "counter", "open", Counter)
    for run, name in (("another", "counter"), ("run", "stage")):
        with pytest.raises(AppMissing):
            await call(executor, run, name, "add", 1)


@pytest.mark.parametrize("verb", ["look", "_hidden", "__init__", "nothing", "count"])
async def test_only_public_coroutines_of_a_role_are_verbs(executor, verb):
    await call(executor, "run", "counter", "open", Counter)
    with pytest.raises(ProtocolError, match=f"a counter has no verb '{verb}'"):
        await call(executor, "run", "counter", verb)


@pytest.mark.parametrize("arguments", [(), ("run",), ("run", "counter"), ([], "counter", "add"), ("run", "counter", 7)])
async def test_a_call_that_names_no_role_and_verb_is_an_error(executor, arguments):
    await call(executor, "run", "counter", "open", Counter)
    with pytest.raises((ProtocolError, AppMissing)):
        await call(executor, *arguments)


@pytest.mark.parametrize("ending", ["close", "another run", "another master", "the same once more", "clean"])
async def test_a_role_is_freed_when_it_ends(executor, ending, monkeypatch):
    monkeypatch.setattr("ddlf.worker.calls.FREE_AFTER_S", 0)
    roles = []
    await call(executor, "run", "counter", "open", record_roles(roles), 5)
    ended, role = roles[0].ended, weakref.ref(roles.pop())
    gc.collect()
    assert role() is not None
    if ending == "close":
        await call(executor, "run", "counter", "close")
    elif ending == "another master":
        executor._begin(b"another", False)
    elif ending == "clean":
        await ask(executor, Request("clean"))
    else:
        await call(executor, "run" if "same" in ending else "another", "counter", "open", Counter)
    async with asyncio.timeout(PATIENCE_S):
        while role() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert ended == [5]
    if ending in ("close", "another master", "clean"):
        with pytest.raises(AppMissing):
            await call(executor, "run", "counter", "add", 1)


async def test_closing_an_unknown_role_does_nothing(executor):
    await call(executor, "run", "counter", "close")


class Made:
    """A role that another role has created."""

    def __init__(self):
        self.closed = False

    async def work(self):
        return "worked"

    async def close(self):
        self.closed = True


async def test_roles_that_a_role_has_created_end_with_it():
    hosting, second, third = Hosting(None), Made(), Made()
    await hosting.open("run", "first", "open", lambda worker: Made())
    hosting.play("run", "second", second, of="first")
    hosting.play("run", "third", third, of="second")
    assert await hosting.find("run", "third", "work").function() == "worked"
    await hosting.close("run", "first", "close")
    for name in ("first", "second", "third"):
        with pytest.raises(AppMissing, match=f"it hosts no {name} of this run"):
            hosting.find("run", name, "work")
    await asyncio.sleep(0)
    assert second.closed
    assert third.closed


async def test_a_role_that_was_replaced_is_not_dropped():
    hosting, first, replacement = Hosting(None), Made(), Made()
    for role in (first, replacement):
        hosting.play("run", "second", role, of="first")
    hosting.drop("run", "second", first)
    assert await hosting.find("run", "second", "work").function() == "worked"
    hosting.drop("run", "second", replacement)
    with pytest.raises(AppMissing):
        hosting.find("run", "second", "work")
