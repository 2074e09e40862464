"""Tests of the files that a worker may get from the master: modules below the script's folder, and their data files."""

import os
import sys
import types

import pytest

from ddlf.cluster import sources
from ddlf.cluster.sources import Sources, script_folder


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "script"
    for name in (
        *(
            "flat.py",
            "pk/__init__.py",
            "pk/mod.py",
            "pk/data.txt",
            "pk/deep/more.txt",
            "pk/.env",
            "pk/__pycache__/x.pyc",
        ),
        *("ns/tool.py", "ns/table.csv", "both.py", "both/__init__.py", "plain.txt", "not-a-name.py", ".git/config.py"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "outside.py").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file.txt").write_text("secret")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "pk" / "link.txt").symlink_to(tmp_path / "outside.py")
    return root


def test_modules_are_found_in_the_same_way_as_in_python(folder):
    give = Sources(folder)
    assert give.answer("names", "") == ["both", "flat", "link", "linked", "ns", "pk"]
    for name, kind, file in (
        ("flat", "source", "flat.py"),
        ("pk", "package", "pk/__init__.py"),
        ("pk.mod", "source", "pk/mod.py"),
        ("both", "package", "both/__init__.py"),
        ("ns.tool", "source", "ns/tool.py"),
    ):
        assert give.answer("module", name) == {"kind": kind, "file": str(folder / file), "source": file.encode()}
    assert give.answer("module", "ns")["kind"] == "namespace"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "gone",
            "pk.gone",
            "flat.n",
            "link",
            "linked",
            "linked.file",
            "plain",
            "plain.txt",
            "not-a-name",
            ".git.config",
        ),
        *("", ".", "..", "../outside", "..outside", "/etc/passwd", "pk/mod", "pk..mod", "a\0b", "os", "ddlf"),
    ],
)
def test_nothing_else_is_given_as_a_module(folder, name):
    assert Sources(folder).answer("module", name) is None


def test_data_files_of_requested_packages_are_given(folder):
    give = Sources(folder)
    assert give.answer("files", "pk") is None
    assert give.answer("data", "pk", "data.txt") is None
    give.answer("module", "pk")
    assert give.answer("files", "pk") == ["data.txt", "deep/more.txt", "link.txt"]
    assert give.answer("data", "pk", "data.txt") == b"pk/data.txt"
    assert give.answer("data", "pk", "deep/more.txt") == b"pk/deep/more.txt"
    give.answer("module", "ns")
    assert give.answer("data", "ns", "table.csv") == b"ns/table.csv"


@pytest.mark.parametrize(
    "file",
    [
        *(
            "../flat.py",
            "../plain.txt",
            "mod.py",
            "link.txt",
            "/etc/passwd",
            ".env",
            "",
            ".",
            "gone.txt",
            "__pycache__/x.pyc",
        ),
        *("../../outside.py", "deep", "../linked/file.txt"),
    ],
)
def test_no_other_file_is_given_as_data(folder, file):
    give = Sources(folder)
    for name in ("pk", "linked"):
        give.answer("module", name)
        assert give.answer("data", name, file) is None


def test_other_questions_and_large_folders_have_no_answer(folder, monkeypatch):
    give = Sources(folder)
    give.answer("module", "pk")
    assert give.answer("else", "pk") is None
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    assert give.answer("files", "pk") is None
    assert len(give.answer("names", "")) <= 2
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 3)
    assert give.answer("data", "pk", "data.txt") is None


def test_the_folder_is_the_scripts_or_else_the_first_one_of_imports(folder, monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(folder / "flat.py"), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_folder() == folder
    main.__spec__ = object()  # like `python -m pk.mod`
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    assert script_folder() == folder.parent
    del main.__file__
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert script_folder() == folder
    for elsewhere in (os.path.dirname(pytest.__file__), "/", str(folder / "gone")):
        monkeypatch.setattr(sys, "path", [elsewhere])
        assert script_folder() is None
        assert Sources().answer("names", "") is None
