"""Imports point down: a newcomer can read the packages from the bottom row up and never meets a surprise."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ddlf"
ROWS = [
    {"errors"},
    {"config", "timing", "tokens", "iworker"},
    {"algorithms", "wire"},
    {"net"},
    {"cluster", "worker", "launch"},
    {"training"},
    {"app"},
    {"cli", "script"},
    {"testing"},
]
ROW = {name: number for number, names in enumerate(ROWS) for name in names}
IO = {"asyncio", "socket", "threading", "subprocess", "time", "keras", "tensorflow"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imports(path: Path) -> set[str]:
    """Everything a file imports, also inside functions and for type checks."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module if node.module != "ddlf" else f"ddlf.{node.names[0].name}")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_own_row_and_those_below(path):
    below = {name for name, row in ROW.items() if row <= ROW[home(path)]}
    wanted = {name.split(".")[1] for name in imports(path) if name.startswith("ddlf.")} - {"__version__"}
    assert wanted <= below


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_pure_layers_do_no_input_and_output(path):
    if home(path) in ("wire", "algorithms"):
        assert not {name.split(".")[0] for name in imports(path)} & IO
    else:
        assert home(path) in ROW
