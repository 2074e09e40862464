"""Tests of the imports between packages. The contracts of import-linter are in ``pyproject.toml``."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
PACKAGE = ROOT / "ddlf"
RESTS_ON = {
    "ddlf": {"ddlf"},
    "apps": {"ddlf", "apps"},
    "benchmarks": {"ddlf", "apps", "benchmarks"},
    "tests": {"ddlf", "apps", "tests"},
    "tests/benchmarks": {"ddlf", "apps", "benchmarks", "tests"},
    "tests/trials": {"ddlf", "apps", "benchmarks", "tests"},
}
"""The trees of this repository that the files of each tree may import."""
TREES = {tree for tree in RESTS_ON if "/" not in tree}
IO = {"asyncio", "socket", "threading", "subprocess", "time", "keras", "tensorflow"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imports(path: Path) -> set[str]:
    """Return the names of all imports of a file. Imports inside functions and for type checks count."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update({f"ddlf.{alias.name}" for alias in node.names} if node.module == "ddlf" else {node.module})
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_pure_layers_do_no_input_and_output():
    names = ("messages", "handshake")
    pure = [path for path in FILES if home(path) == "algorithms"] + [PACKAGE / "rpc" / f"{name}.py" for name in names]
    used = {str(path.relative_to(PACKAGE)): {name.split(".")[0] for name in imports(path)} & IO for path in pure}
    assert len(used) > 20
    assert not {path: names for path, names in used.items() if names}


def test_imports_keep_the_contracts_of_pyproject():
    """Check the layers, the core without optional parts, and parts and strategies that may not import each other."""
    linter = subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert linter.returncode == 0, linter.stdout + linter.stderr


def test_imports_have_no_cycles():
    """Imports inside functions and for type checks count. ``ddlf/__init__.py`` only lists public classes and does not count."""
    graph = grimp.build_graph("ddlf", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) - {"ddlf"} for name in graph.modules - {"ddlf"}}
    assert sum(map(len, imported.values())) > 500
    assert in_cycles(imported) == set()
    assert in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


def in_cycles(imported):
    """Return the modules on a cycle of imports, or on a path between two cycles."""
    imported = dict(imported)
    while ends := [name for name, below in imported.items() if not below & imported.keys()]:
        for name in ends:
            del imported[name]
    while starts := imported.keys() - set().union(*imported.values()):
        for name in starts:
            del imported[name]
    return imported.keys()


@pytest.mark.parametrize("tree", RESTS_ON)
def test_a_tree_imports_only_its_allowed_trees(tree):
    forbidden = TREES - RESTS_ON[tree]
    line = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(forbidden)})\b", re.MULTILINE)
    for path in (ROOT / tree).rglob("*.py"):
        nearest = next(name for name in sorted(RESTS_ON, key=len, reverse=True) if (ROOT / name) in path.parents)
        if nearest == tree and forbidden and line.search(path.read_text()):  # it may be in the text of a program
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


def test_no_module_of_tests_imports_keras_at_its_top():
    """Each process that runs tests imports all test modules, and most of them do not need Keras."""
    kinds = "keras|tensorflow|jax"
    heavy = [path for path in FILES if re.search(rf"^(?:import|from) (?:{kinds})\b", path.read_text(), re.MULTILINE)]
    names = [re.escape(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in heavy]
    line = re.compile(rf"^(?:import|from) (?:{'|'.join([kinds, *names])})\b", re.MULTILINE)

    def has_it(text):  # texts of programs inside the module do not count
        return line.search(text) and any(
            isinstance(node, ast.Import | ast.ImportFrom) and line.match(ast.unparse(node))
            for node in ast.parse(text).body
        )

    assert len(names) > 10
    assert [path for path in (ROOT / "tests").rglob("test_*.py") if has_it(path.read_text())] == []
