"""Tests that the examples of docs/howto/testing.md run, and that ``ddlf.testing`` imports only the names in use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddlf.testing
from tests.commands import several
from tests.processes import python

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/howto/testing.md").read_text(), re.S)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if "keras" in block else []) for n, block in enumerate(BLOCKS)],
)
def test_an_example_of_the_page_runs(tmp_path, number, request):
    source = BLOCKS[number]
    script = tmp_path / "test_example.py"
    script.write_text(source)
    runner = ("pytest", "-q", "-p", "no:cacheprovider") if "def test_" in source else ()
    if "keras" in source:
        (output,) = several([[*runner, script]], tmp_path, request.getfixturevalue("standing_template"))
    else:
        words = [sys.executable, *["-m"] * bool(runner), *runner, script]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        output = result.stdout
    says = "1 passed" if runner else "http://127.0.0.1:" if "FaultyStore" in source else "as expected: worker 1 "
    assert says in output


def test_public_names_are_imported_when_they_are_used():
    for name in ddlf.testing.__all__:
        assert getattr(ddlf.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ddlf.testing.Nothing
    assert dir(ddlf.testing) == ddlf.testing.__all__
    loaded = python(
        "import sys, ddlf.testing; print(*[m for m in sys.modules if m.startswith(('ddlf', 'numpy', 'psutil'))])"
    )
    assert set(loaded.split()) == {"ddlf", "ddlf.version", "ddlf.testing"}
