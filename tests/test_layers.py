"""Tests of the imports between packages. The contracts of import-linter are in ``pyproject.toml``."""

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
"""The trees of this repository that the files of each tree may import."""
TREES = {tree for tree in RESTS_ON if "/" not in tree}
IO = {"asyncio", "socket", "threading", "subprocess", "time", "keras", "tensorflow"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the names of all imports of a file. Imports inside functions and for type checks count."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update({f"ddlf.{alias.name}" for alias in node.names} if node.module == "ddlf" else {node.module})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def modules_in(path: Path) -> set[str]:
    """Return the modules of this package that a file imports. ``from ddlf.a import b`` counts as ``ddlf.a`` and ``ddlf.a.b``.

    A package does not count if the import statement names it only as the parent of a module.
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
    """Check the layers, the core without optional parts, and parts and strategies that may not import each other."""
    linter = subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert linter.returncode == 0, linter.stdout + linter.stderr


def test_imports_have_no_cycles():
    """Imports inside functions and for type checks count. ``ddlf/__init__.py`` only lists public classes and does not count."""
    modules = {"ddlf." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    imported = {name: modules_in(path) & modules.keys() - {name} for name, path in modules.items()}
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
    for path in (ROOT / tree).rglob("*.py"):
        if tree != "tests" or path.parent.name not in ("benchmarks", "trials"):
            assert {name.split(".")[0] for name in imports(path)} & TREES <= RESTS_ON[tree], path


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
