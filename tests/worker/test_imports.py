"""Tests of how a worker imports modules that exist only on the master."""

import asyncio
import hashlib
import importlib
import importlib.resources
import inspect
import sys
import threading

import pytest

from ddlf.cluster.sources import Sources
from ddlf.worker.imports import MasterFinder
from tests.daemons import connected
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pk_of_master").mkdir()
    (tmp_path / "pk_of_master" / "__init__.py").write_text("def f():\n    return 1  # the line\n")
    (tmp_path / "pk_of_master" / "a.txt").write_text("text")
    (tmp_path / "json.py").write_text("raise AssertionError")
    return tmp_path


@pytest.fixture
def finder(folder, monkeypatch):
    questions = []
    sources = Sources(folder)

    def ask(*question):
        questions.append(question[:2])
        return sources.answer(*question)

    turn = [1]
    finder = MasterFinder(ask, lambda: turn[0])
    finder.questions, finder.turn = questions, turn
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    yield finder
    finder.forget()


async def test_missing_modules_cost_one_question_a_turn(finder):
    for name in ("gone_one", "gone_two", "gone_three.x", "email.gone"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert finder.questions == [("names", "")]
    finder.turn[0] = 2
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gone_one")
    assert finder.questions == [("names", "")] * 2


async def test_installed_modules_are_not_requested_from_the_master(finder):
    sys.modules.pop("json.tool", None)
    importlib.import_module("json.tool")
    assert finder.questions == []


async def test_a_module_of_the_master_has_its_source_and_its_data(finder):
    module = importlib.import_module("pk_of_master")
    assert "# the line" in inspect.getsource(module.f)
    root = importlib.resources.files("pk_of_master")
    assert [file.name for file in root.iterdir()] == ["a.txt"]
    assert (root.is_dir(), root.name, (root / "a.txt").is_file(), (root / "b").is_file()) == (
        True,
        "pk_of_master",
        True,
        False,
    )
    assert (root / "a.txt").read_text() == "text"
    with pytest.raises(FileNotFoundError, match=r"pk_of_master has no data file 'b.txt' on the master"):
        (root / "b.txt").read_bytes()


async def test_a_disabled_finder_asks_nothing(finder):
    finder.enabled = lambda: False
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pk_of_master")
    assert finder.questions == []


def version():
    import changes_between_masters

    return changes_between_masters.VERSION


def guess():
    import guests_want_this

    return guests_want_this


async def test_the_next_master_has_its_own_modules_and_a_guest_none(running, tmp_path, monkeypatch):
    module = tmp_path / "changes_between_masters.py"
    (tmp_path / "guests_want_this.py").touch()
    monkeypatch.setattr("ddlf.cluster.sources.script_folder", lambda: tmp_path)
    monkeypatch.setattr("ddlf.rpc.code.own_modules", list)
    for number in (1, 2):
        module.write_text(f"VERSION = {number}")
        async with connected(running.port) as worker:
            assert await worker.run_method(version) == number
            module.write_text("VERSION = 9")
            assert await worker.run_method(version) == number, "it is imported already"
            async with connected(running.port, guest=True) as guest:
                with pytest.raises(ModuleNotFoundError, match="guests_want_this"):
                    await guest.run_method(guess)
    async with connected(running.port, guest=True) as guest:
        with pytest.raises(ModuleNotFoundError):
            await guest.run_method(guess)


async def test_a_large_data_file_arrives_whole_and_a_question_ends_with_its_master(running, tmp_path, monkeypatch):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "__init__.py").touch()
    (tmp_path / "large" / "data.bin").write_bytes(bytes(range(256)) * 4000)
    monkeypatch.setattr("ddlf.cluster.sources.script_folder", lambda: tmp_path)

    def read():
        import hashlib
        import importlib.resources

        return hashlib.sha256((importlib.resources.files("large") / "data.bin").read_bytes()).hexdigest()

    question_came, hangs = threading.Event(), threading.Event()

    def answer(*question):
        question_came.set()
        hangs.wait(PATIENCE_S)

    async with connected(running.port) as worker:
        assert await worker.run_method(read) == hashlib.sha256(bytes(range(256)) * 4000).hexdigest()
        monkeypatch.setattr(worker._link._sources, "answer", answer)
        waiting = asyncio.ensure_future(worker.run_method(version))
        assert await asyncio.to_thread(question_came.wait, PATIENCE_S)
    hangs.set()
    await asyncio.gather(waiting, return_exceptions=True)
    async with connected(running.port) as worker:
        assert await worker.run_code("1 + 1") == 2
