"""Imports point down: a newcomer can read the packages from the bottom row of the picture up and never meets a surprise."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddlf"
MAX_LINES = 400
RESTS_ON = {
    "ddlf": {"ddlf"},
    "apps": {"ddlf", "apps"},
    "benchmarks": {"ddlf", "apps", "benchmarks"},
    "tests": {"ddlf", "apps", "tests"},
    "tests/benchmarks": {"ddlf", "apps", "benchmarks", "tests"},
    "tests/trials": {"ddlf", "apps", "benchmarks", "tests"},
}
"""What files of a tree import of this repository: trials and tests of benchmarks may use what measures, other tests need not."""
TREES = {tree for tree in RESTS_ON if "/" not in tree}
TEXT_COLUMN = 32
"""Where in a line of the picture names end and words begin."""
IO = {"asyncio", "socket", "threading", "subprocess", "time", "keras", "tensorflow"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def picture() -> list[set[str]]:
    """The rows of the one picture of the layers, from the bottom up; a line without a name is left out."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^## Layers.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block
    rows = [line[:TEXT_COLUMN].split() for line in block[1].splitlines() if not line.startswith(" ")]
    return [set(row) for row in reversed(rows)]


ROW = {name: number for number, names in enumerate(picture()) for name in names}


@functools.cache
def imports(path: Path) -> set[str]:
    """Everything a file imports, also inside functions and for type checks."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update({f"ddlf.{alias.name}" for alias in node.names} if node.module == "ddlf" else {node.module})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules_below(path: Path) -> set[str]:
    """Modules of this package that are needed to import a file; not those that functions import, nor those for type checks."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddlf."):
            found.update({str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names})
    return found


def test_the_picture_has_every_room_once():
    rooms = {home(path) for path in FILES}
    assert set(ROW) == rooms
    assert sum(len(row) for row in picture()) == len(rooms)


def test_a_file_imports_only_from_its_own_room_and_from_rows_below():
    above = {}
    for path in FILES:
        below = {name for name, row in ROW.items() if row < ROW[home(path)]} | {home(path)}
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("ddlf.")}
        above[str(path.relative_to(PACKAGE))] = rooms - below
    assert not {path: rooms for path, rooms in above.items() if rooms}


def test_the_pure_layers_do_no_input_and_output():
    pure = [path for path in FILES if home(path) in ("wire", "algorithms")]
    assert pure
    used = {str(path.relative_to(PACKAGE)): {name.split(".")[0] for name in imports(path)} & IO for path in pure}
    assert not {path: names for path, names in used.items() if names}


def test_what_shows_a_run_knows_its_events_alone_and_training_knows_nothing_of_that():
    shown = {name for path in FILES if home(path) == "observe" for name in imports(path) if name.startswith("ddlf")}
    assert {name.split(".")[1] for name in shown} <= {"events", "record", "observe"}
    kept = {
        name.split(".")[1]
        for path in FILES
        if home(path) == "runs"
        for name in imports(path)
        if name.startswith("ddlf.")
    }
    assert not kept & {"app", "cluster", "training", "roles"}
    trained = {name for path in FILES if home(path) == "training" for name in imports(path)}
    assert not [name for name in trained if name.startswith(("ddlf.observe", "ddlf.sinks", "ddlf.runs"))]


def test_no_module_needs_itself():
    """A circle of modules is two that are one, or one that is two."""
    name_of = {path: "ddlf." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES}
    needs = {name: modules_below(path) & set(name_of.values()) for path, name in name_of.items()}
    while free := [name for name, wanted in needs.items() if not wanted & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs


@pytest.mark.parametrize("tree", RESTS_ON)
def test_a_tree_imports_only_what_it_rests_on(tree):
    for path in (ROOT / tree).rglob("*.py"):
        if tree != "tests" or path.parent.name not in ("benchmarks", "trials"):
            assert {name.split(".")[0] for name in imports(path)} & TREES <= RESTS_ON[tree], path


def test_what_measures_and_what_tries_to_break_have_names_of_their_own():
    names = [path.stem for tree in ("benchmarks", "tests/trials") for path in (ROOT / tree).rglob("[!_]*.py")]
    assert len(names) == len(set(names))


def test_no_module_of_tests_imports_keras_at_its_top():
    """All processes that run tests import all modules, and most need no Keras."""
    kinds = "keras|tensorflow|jax"
    heavy = [path for path in FILES if re.search(rf"^(?:import|from) (?:{kinds})\b", path.read_text(), re.MULTILINE)]
    names = [re.escape(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in heavy]
    line = re.compile(rf"^(?:import|from) (?:{'|'.join([kinds, *names])})\b", re.MULTILINE)

    def has_it(text):  # also in none of the texts of programs that it has
        return line.search(text) and any(
            isinstance(node, ast.Import | ast.ImportFrom) and line.match(ast.unparse(node))
            for node in ast.parse(text).body
        )

    assert len(names) > 10
    assert [path for path in (ROOT / "tests").rglob("test_*.py") if has_it(path.read_text())] == []


def test_no_file_is_longer_than_can_be_read_at_once():
    long = {str(path.relative_to(ROOT)) for path in FILES if len(path.read_text().splitlines()) > MAX_LINES}
    assert not long, "divide it"
