"""Imports point down. The contracts are in ``pyproject.toml``, for import-linter."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

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


def modules_in(path: Path) -> set[str]:
    """The modules of this package that a file imports anywhere: for ``from ddlf.a import b`` both ``ddlf.a`` and ``ddlf.a.b``.

    A package that is only on the way to one of its modules is not among them.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddlf"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in names if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()}
            inside |= {name for name in names if (ROOT / name.replace(".", "/") / "__init__.py").exists()}
            found |= inside or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_pure_layers_do_no_input_and_output():
    names = ("messages", "handshake")
    pure = [path for path in FILES if home(path) == "algorithms"] + [PACKAGE / "rpc" / f"{name}.py" for name in names]
    used = {str(path.relative_to(PACKAGE)): {name.split(".")[0] for name in imports(path)} & IO for path in pure}
    assert len(used) > 20
    assert not {path: names for path, names in used.items() if names}


def test_imports_keep_the_contracts_of_pyproject():
    """Layers of rooms, a core without optional parts, parts and strategies that do not import each other."""
    linter = subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert linter.returncode == 0, linter.stdout + linter.stderr


def test_no_module_imports_itself_through_others():
    """Imports inside functions and for type checks count. ``ddlf/__init__.py`` names public classes and is left out."""
    modules = {"ddlf." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    imported = {name: modules_in(path) & modules.keys() - {name} for name, path in modules.items()}
    assert sum(map(len, imported.values())) > 500
    assert in_circles(imported) == set()
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


def in_circles(imported):
    """The modules that are on or between circles."""
    imported = dict(imported)
    while ends := [name for name, below in imported.items() if not below & imported.keys()]:
        for name in ends:
            del imported[name]
    while starts := imported.keys() - set().union(*imported.values()):
        for name in starts:
            del imported[name]
    return imported.keys()


@pytest.mark.parametrize("tree", RESTS_ON)
def test_a_tree_imports_only_what_it_rests_on(tree):
    for path in (ROOT / tree).rglob("*.py"):
        if tree != "tests" or path.parent.name not in ("benchmarks", "trials"):
            assert {name.split(".")[0] for name in imports(path)} & TREES <= RESTS_ON[tree], path


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
