"""Imports point down: a newcomer can read the packages from the bottom row of the picture up and never meets a surprise."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddlf"
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
IO = {"asyncio", "socket", "threading", "subprocess", "time", "keras", "tensorflow"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


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


def test_the_pure_layers_do_no_input_and_output():
    names = ("frame", "values", "standard", "messages", "handshake")
    pure = [path for path in FILES if home(path) == "algorithms"] + [PACKAGE / "rpc" / f"{name}.py" for name in names]
    used = {str(path.relative_to(PACKAGE)): {name.split(".")[0] for name in imports(path)} & IO for path in pure}
    assert len(used) > 30
    assert not {path: names for path, names in used.items() if names}


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
