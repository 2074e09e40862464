"""Tests of sending code: once in full, then by its hash. An object that cannot be sent is named with its path."""

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import importlib
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import weakref
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddlf
from ddlf.errors import NotPicklable, ProtocolError
from ddlf.rpc import code
from ddlf.rpc.code import (
    CodeCache,
    CodeMissing,
    CodeSender,
    PickleOnce,
    dump_result,
    load_result,
    pickle_object,
    unpickle,
)
from ddlf.rpc.messages import Tag, dumps, loads
from tests.patience import PATIENCE_S

LOCK = threading.Lock()
NOISE = "n" * 10_000


def add(a, b):
    return a + b


def noisy():
    return len(NOISE)


class Model:
    size = 3

    def double(self):
        return 2 * self.size


# --- Content addresses -----------------------------------------------------------------------------------------------


def test_a_function_is_sent_once_and_then_by_32_bytes():
    sender, cache = CodeSender(), CodeCache()
    tag, first = sender.dump(noisy)
    assert tag is Tag.CODE
    assert len(first) > 10_000
    assert sender.dump(noisy) == (Tag.CODE, first[:32])
    assert hashlib.sha256(first[32:]).digest() == first[:32]
    assert cache.load(*[tag, first])() == 10_000
    assert cache.load(Tag.CODE, first[:32])() == 10_000


def test_the_second_call_of_a_function_costs_its_address_and_its_arguments_only():
    sender = CodeSender()
    first, second = (dumps([[noisy, 1, 2], {}], sender.dump)[0] for _ in range(2))
    assert len(first) > 10_000
    assert len(second) == 32 + len(b"\x92\x93\xc7\x20\x0a\x01\x02\x80")


def test_a_known_function_is_not_unpickled_again(monkeypatch):
    sender, cache = CodeSender(), CodeCache()
    full = sender.dump(add)
    loaded = cache.load(*full)
    monkeypatch.setattr(code, "unpickle", lambda data: pytest.fail("unpickled again"))
    assert cache.load(*full) is loaded
    assert cache.load(*sender.dump(add)) is loaded


def test_a_changed_function_is_sent_again(monkeypatch):
    sender, cache = CodeSender(), CodeCache()
    assert cache.load(*sender.dump(noisy))() == 10_000
    monkeypatch.setattr(sys.modules[__name__], "NOISE", "n")
    assert cache.load(*sender.dump(noisy))() == 1


def test_classes_are_sent_by_hash_too_but_other_objects_are_not():
    sender = CodeSender()
    assert [sender.dump(value)[0] for value in (Model, Model(), Model().double, functools.partial(add, 1))] == [
        Tag.CODE,
        Tag.OBJECT,
        Tag.OBJECT,
        Tag.OBJECT,
    ]
    assert CodeCache().load(*CodeSender().dump(Model))().double() == 6


def test_code_that_never_arrived_is_asked_for_and_then_sent_in_full():
    sender, cache = CodeSender(), CodeCache()
    sender.dump(add)  # lost on the way
    short = sender.dump(add)
    with pytest.raises(CodeMissing, match=f"code {short[1].hex()[:8]} is not in the cache"):
        cache.load(*short)
    sender.forget()
    assert cache.load(*sender.dump(add))(1, 2) == 3


def test_code_pickled_once_is_sent_in_full_on_each_connection():
    pickled_once, senders = PickleOnce(), (CodeSender(), CodeSender())
    full = [sender.dump(noisy, pickled_once) for sender in senders]
    assert full[0] == full[1]
    assert senders[0].dump(noisy, pickled_once) == (Tag.CODE, full[0][1][:32])
    assert full[0][1][32:] == pickled_once(noisy)


def test_a_new_object_at_the_address_of_a_freed_one_is_pickled_itself():
    pickled_once = PickleOnce()
    assert [unpickle(pickled_once(Model.double.__get__([number]))).__self__ for number in range(50)] == [
        [n] for n in range(50)
    ]


def test_the_cache_drops_the_least_recently_used_entry(monkeypatch):
    monkeypatch.setattr(code, "CACHE_ENTRIES", 2)
    cache = CodeCache()
    sent = [CodeSender().dump(function) for function in (add, noisy, Model)]
    for tag, data in (sent[0], sent[1], sent[0], sent[2]):
        cache.load(tag, data)
    cache.load(Tag.CODE, sent[0][1][:32])
    with pytest.raises(CodeMissing):
        cache.load(Tag.CODE, sent[1][1][:32])


def test_the_cache_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(code, "CACHE_BYTES", 15_000)
    cache = CodeCache()
    for number in range(5):
        cache.load(*CodeSender().dump(eval(f"lambda: {'n' * 9000!r} or {number}")))
        assert len(cache._loaded) == 1


def test_the_memory_of_a_sender_has_the_limit_of_the_cache(monkeypatch):
    monkeypatch.setattr(code, "CACHE_ENTRIES", 3)
    sender, cache = CodeSender(), CodeCache()
    functions = [eval(f"lambda: {number}") for number in range(5)]
    for function in functions:
        cache.load(*sender.dump(function))
    assert len(sender._sent) == len(cache._loaded) == 3
    assert len(sender.dump(functions[4])[1]) == code.HASH_BYTES
    assert cache.load(*sender.dump(functions[0]))() == 0, "sent in full again"


# --- Objects that cannot be sent -------------------------------------------------------------------------------------


def over_a_variable():
    inner = LOCK
    return lambda: inner


class Trainer:
    def __init__(self):
        self.steps = [1, {"lock": LOCK}]


class Slotted:
    __slots__ = ("handle",)

    def __init__(self):
        self.handle = LOCK


class Shared:
    lock = LOCK


class UsesLock:
    def train(self):
        with LOCK:
            return 1


def with_a_default(lock=LOCK):
    return lock


def with_a_function_inside():
    def inner():
        return LOCK

    return inner


def with_an_attribute():
    return None


with_an_attribute.lock = LOCK


class LeavesOut:
    def __init__(self):
        self.left_out, self.sent = LOCK, {"log": LOCK}

    def __getstate__(self):
        return {"sent": self.sent}


class Reduces:
    def __reduce__(self):
        return Reduces, (), {"x": LOCK}


class Unwilling:
    def __reduce__(self):
        raise ValueError("not me")


class Speechless:
    def __reduce__(self):
        raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})


UNSENDABLE = {
    "lambda over a global": (lambda: lambda: LOCK, "<lambda>.<locals>.<lambda> -> global 'LOCK' (a _thread.lock)"),
    "lambda over a variable": (over_a_variable, "<lambda> -> variable 'inner' (a _thread.lock)"),
    "attribute deep inside": (Trainer, "Trainer.steps[1]['lock'] (a _thread.lock)"),
    "attribute that is not left out": (LeavesOut, "LeavesOut.sent['log'] (a _thread.lock)"),
    "state": (Reduces, "Reduces.x (a _thread.lock)"),
    "method of an object": (lambda: Trainer().__init__, "__init__.__self__.steps[1]['lock'] (a _thread.lock)"),
    "slot": (Slotted, "Slotted.handle (a _thread.lock)"),
    "class attribute": (lambda: Shared, "Shared.lock (a _thread.lock)"),
    "global of a method": (UsesLock, "UsesLock -> class.train -> global 'LOCK' (a _thread.lock)"),
    "default": (lambda: with_a_default, "with_a_default -> a default (a _thread.lock)"),
    "global of an inner function": (lambda: with_a_function_inside, "with_a_function_inside -> global 'LOCK'"),
    "attribute of a function": (lambda: with_an_attribute, "with_an_attribute.lock (a _thread.lock)"),
    "partial": (lambda: functools.partial(add, LOCK), "partial.args[0] (a _thread.lock)"),
    "condition in a dict": (lambda: {"a": [threading.Condition()]}, "dict['a'][0]._lock (a _thread.RLock)"),
    "thread": (threading.Thread, "Thread._started._cond._lock (a _thread.lock)"),
    "generator": (lambda: (number for number in [1]), "generator (a builtins.generator)"),
    "weak reference": (lambda: weakref.ref(Model), "ReferenceType (a weakref.ReferenceType)"),
    "context": (contextvars.copy_context, "Context (a _contextvars.Context)"),
    "frame": (sys._getframe, "frame (a builtins.frame)"),
    "unwilling object": (
        Unwilling,
        f"Unwilling (a {__name__}.Unwilling) cannot be sent to a worker (ValueError: not me)",
    ),
    "cache": (
        lambda: functools.cache(lambda: LOCK),
        "_lru_cache_wrapper -> global 'LOCK' (a _thread.lock)",
    ),
    "error without text": (
        Speechless,
        f"Speechless (a {__name__}.Speechless) cannot be sent to a worker (Odd: no text)",
    ),
}


@pytest.mark.parametrize("case", UNSENDABLE)
def test_an_object_that_cannot_be_sent_is_named_with_its_path(case):
    make, path = UNSENDABLE[case]
    with pytest.raises(NotPicklable) as caught:
        pickle_object(make())
    assert path in str(caught.value)
    assert "cannot be sent to a worker (" in str(caught.value)
    assert str(caught.value).endswith("; create it inside the method, on the worker, or pass plain data instead")


def test_open_files_and_sockets_are_named_too():
    database = sqlite3.connect(":memory:")
    with socket.socket() as sock, tempfile.TemporaryFile("w") as file, contextlib.closing(database):
        for value, path in (
            (lambda: sock, "variable 'sock' (a socket.socket)"),
            ({"out": file}, "dict['out'] (a _io.TextIOWrapper)"),
            ([database], "list[0] (a sqlite3.Connection)"),
        ):
            with pytest.raises(NotPicklable) as caught:
                pickle_object(value)
            assert path in str(caught.value)


async def test_objects_of_the_event_loop_are_named():
    with pytest.raises(NotPicklable, match=r"list\[0\] \(a _asyncio\.Future\)"):
        pickle_object([asyncio.get_running_loop().create_future()])


# --- Code that cannot be loaded --------------------------------------------------------------------------------------


def test_truncated_code_is_refused_at_every_length():
    data = pickle_object(add)
    for length in range(len(data)):
        with pytest.raises(NotPicklable, match="cannot load code sent to Python"):
            unpickle(data[:length])


@given(st.binary(min_size=1, max_size=40))
def test_corrupt_code_is_refused(data):
    with pytest.raises(NotPicklable, match="cannot load code"):
        unpickle(b"\x80\x05" + bytes([0xFF]) + data)


def test_code_that_needs_a_missing_module_names_it():
    missing = __name__.replace("test_code", "test_gone")
    data = pickle.dumps(Model).replace(__name__.encode(), missing.encode())
    advice = "install tests on the worker, or keep it below the script's folder, so that it is sent to workers"
    with pytest.raises(NotPicklable, match=rf"No module named '{missing}'\); {advice}$"):
        unpickle(data)


def test_code_that_does_not_match_its_address_is_refused_before_it_is_unpickled(monkeypatch):
    tag, data = CodeSender().dump(add)
    monkeypatch.setattr(code, "unpickle", lambda data: pytest.fail("unpickled"))
    for position in (0, 31, 32, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(ProtocolError, match="code does not match its address"):
            CodeCache().load(tag, bytes(changed))


def test_a_worker_may_not_send_code_and_a_master_that_allows_objects_gets_them():
    value = loads(dumps([deque([1]), 1], dump_result), load_result)
    assert value == [deque([1]), 1]
    with pytest.raises(ProtocolError, match="a worker may not send code"):
        loads(dumps(add, CodeSender().dump), load_result)
    with pytest.raises(ProtocolError, match="pickled payload not allowed here"):
        loads(dumps([deque()], dump_result))


# --- Modules beside the script ---------------------------------------------------------------------------------------

SENDER = """
import sys, package.part, neighbour
from ddlf.rpc.code import pickle_object
from neighbour import Layer

def method(x):
    return neighbour.scale(x) + package.part.shift(x) + Layer().size

class Child(Layer):
    pass

sys.stdout.buffer.write(pickle_object([method, Child, neighbour.scale]))
"""
RECEIVER = """
import sys
from ddlf.rpc.code import unpickle
method, child, scale = unpickle(sys.stdin.buffer.read())
print(method(10), child().size, scale(1), "neighbour" in sys.modules)
"""


def run_python(source: Path, folder: Path, **more) -> bytes:
    environment = {"PYTHONPATH": str(Path(ddlf.__file__).parents[1]), "PATH": ""}
    return subprocess.run(
        [sys.executable, source],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        **more,
    ).stdout


def test_modules_beside_the_script_travel_by_value(tmp_path):
    sender, receiver = tmp_path / "mine", tmp_path / "theirs"
    (sender / "package").mkdir(parents=True)
    receiver.mkdir()
    (sender / "script.py").write_text(SENDER)
    (sender / "neighbour.py").write_text(
        "FACTOR = 3\ndef scale(x):\n    return FACTOR * x\nclass Layer:\n    size = 1000\n"
    )
    (sender / "package" / "__init__.py").write_text("")
    (sender / "package" / "part.py").write_text("def shift(x):\n    return x + 5\n")
    (receiver / "receive.py").write_text(RECEIVER)
    sent = run_python(sender / "script.py", sender)
    assert run_python(receiver / "receive.py", receiver, input=sent).decode().split() == ["1045", "1000", "3", "False"]


CACHED = """
import functools, sys, neighbour
from ddlf.rpc.code import pickle_object

@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

def method(n):
    return fib(n), neighbour.double(n), fib.cache_info().maxsize, fib.__module__

sys.stdout.buffer.write(pickle_object([method, fib, neighbour.double]))
"""
CACHED_RECEIVER = """
import sys
from ddlf.rpc.code import pickle_object, unpickle
method, fib, double = unpickle(pickle_object(unpickle(sys.stdin.buffer.read())))
print(*method(30), fib(30), double(4), method.__globals__["fib"].cache_info().misses)
"""


def test_functions_with_a_cache_travel_by_value(tmp_path):
    sender, receiver = tmp_path / "mine", tmp_path / "theirs"
    sender.mkdir()
    receiver.mkdir()
    (sender / "script.py").write_text(CACHED)
    (sender / "neighbour.py").write_text("import functools\n@functools.cache\ndef double(x):\n    return 2 * x\n")
    (receiver / "receive.py").write_text(CACHED_RECEIVER)
    sent = run_python(sender / "script.py", sender)
    answer = run_python(receiver / "receive.py", receiver, input=sent).decode().split()
    assert answer == ["832040", "60", "7", "__main__", "832040", "8", "31"]


def test_installed_modules_travel_by_name():
    assert unpickle(pickle_object(re._compile_repl)) is re._compile_repl  # a function with a cache
    assert b"numpy" in pickle_object(__import__("numpy").linalg.norm)
    assert len(pickle_object(__import__("numpy").linalg.norm)) < 100
    assert len(pickle_object(pickle_object)) < 100, (
        "DDLF's own functions are sent by name, too, wherever DDLF is installed"
    )


def test_a_module_imported_after_another_was_removed_travels_by_value(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_own", "second_own"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent("def f():\n    return 1\n"))
    first = __import__("first_own")
    pickle_object(first.f)
    del sys.modules["first_own"]
    second = __import__("second_own")
    try:
        data = pickle_object(second.f)
    finally:
        del sys.modules["second_own"]
    assert unpickle(data)() == 1


def test_a_function_can_be_sent_after_a_module_was_removed(tmp_path, monkeypatch):
    for name in ("goes_soon", "stays_last"):
        (tmp_path / f"{name}.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("goes_soon", "stays_last"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    pickle_object(sys.modules["stays_last"].f)
    del sys.modules["goes_soon"]
    assert unpickle(pickle_object(sys.modules["stays_last"].f))() == 1


def test_a_module_with_two_names_travels_by_value(tmp_path, monkeypatch):
    """In a process of ``multiprocessing``, the main module is ``__mp_main__`` and ``__main__``."""
    (tmp_path / "named_twice.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("named_twice")
    monkeypatch.setitem(sys.modules, "named_twice", module)
    monkeypatch.setitem(sys.modules, "its_other_name", module)
    data = pickle_object(module.f)
    monkeypatch.delitem(sys.modules, "named_twice")
    monkeypatch.delitem(sys.modules, "its_other_name")
    assert unpickle(data)() == 1


def test_only_new_modules_are_examined_again(monkeypatch):
    looked_at = []
    monkeypatch.setattr(code, "_scan", code._scan)
    monkeypatch.setattr(code, "_is_own", lambda name, module: looked_at.append(name))
    code.own_modules()
    for name in ("came_first", "came_second"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    looked_at.clear()
    code.own_modules()
    assert looked_at == ["came_first", "came_second"]
    code.own_modules()
    assert len(looked_at) == 2
    monkeypatch.delitem(sys.modules, "came_first")
    monkeypatch.setitem(sys.modules, "came_third", types.ModuleType("came_third"))
    code.own_modules()
    assert looked_at[-2:] == ["came_second", "came_third"]


def test_pickling_leaves_no_module_registered():
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    pickle_object(add)
    with pytest.raises(NotPicklable):
        pickle_object(LOCK)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_modules_are_listed_while_another_thread_imports(monkeypatch):
    """The list asks a module for its name, and another thread imports two modules and removes one meanwhile."""

    class Interrupted:
        def __getattr__(self, name):
            sys.modules["new"] = sys.modules["newer"] = sys
            sys.modules.pop("removed", None)
            raise AttributeError(name)

    monkeypatch.setattr(code, "_scan", (0, "", []))
    monkeypatch.setitem(sys.modules, "interrupted", Interrupted())
    monkeypatch.setitem(sys.modules, "removed", sys)
    try:
        code.own_modules()
        assert "new" in sys.modules
        assert "removed" not in sys.modules
    finally:
        for name in ("new", "newer"):
            sys.modules.pop(name, None)
