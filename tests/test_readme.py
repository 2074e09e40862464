"""Tests of the examples of the README and of the first example of the page about calls: they run without changes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.commands import several

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/howto/calls.md")
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)]


@pytest.fixture
def environment(tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(
        folder / "mnist.npz",
        x_train=random.integers(0, 256, (300, 28, 28), np.uint8),
        y_train=random.integers(0, 10, 300, np.uint8),
        x_test=random.integers(0, 256, (50, 28, 28), np.uint8),
        y_test=random.integers(0, 10, 50, np.uint8),
    )
    return {**os.environ, "DDLF_DATA": str(folder)}


def block(word):
    return next(block for block in BLOCKS if word in block)


def run(tmp_path, environment, source, *arguments):
    script = tmp_path / "example.py"
    script.write_text(source)
    command = (sys.executable, script, *arguments)
    return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)


def test_the_remote_calls_print_what_the_comments_say(tmp_path, environment):
    result = run(tmp_path, environment, block("run_method"))
    expected = re.findall(r"print\(.*# (\[.*\])", block("run_method"))
    assert result.stdout.splitlines() == expected == ["[16, 16, 16]", "[16, 160]"], result.stderr


def test_the_map_prints_what_the_comment_says(tmp_path, environment):
    result = run(tmp_path, environment, block("ddlf.Pool"))
    assert ", ".join(result.stdout.split()) == re.search(r"# (\d.*)", block("ddlf.Pool"))[1] == "3, 12, 27", (
        result.stderr
    )


@pytest.mark.slow
def test_the_app_trains(tmp_path, environment):
    options = ("--local", "2", "--master-epochs", "2", "-p", "batch_size=64")
    (tmp_path / "example.py").write_text(block("class App"))
    (printed,) = several([["example.py", *options]], tmp_path, env=environment)
    assert "round 2/2" in printed
    assert "batch 64 per worker x 2 workers, seed 0" in printed
    assert 0 < float(re.search(r"^test .*accuracy (\S+)", printed, re.M)[1]) <= 1
