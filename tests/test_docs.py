"""Tutorial, guides and the page of the API: what they show runs, and what there is is shown."""

import ast
import inspect
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ddlf
from ddlf.algorithms.named import Family
from ddlf.cli import main, worker
from ddlf.config.models import ClusterConfig
from ddlf.settings import SETTINGS
from tests.test_readme import environment  # noqa: F401

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "docs/guide.md", "docs/api.md", "docs/tutorial.md")
PAGES = {
    name: (ROOT / name).read_text()
    for name in (*NAMES, *(f"docs/howto/{path.name}" for path in (ROOT / "docs/howto").iterdir()))
}


def blocks(page, language):
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], re.S | re.M) if kind == language]


def commands():
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("ddlf ", "ddlf-worker "))]


@pytest.mark.parametrize("line", commands())
def test_a_command_that_is_shown_has_options_that_there_are(line):
    words = shlex.split(line, comments=True)
    words = list(itertools.takewhile(lambda word: word not in (">", "&&", "|"), words))
    if words[1] == "help":
        words = ["ddlf", *words[2:], "--help"]
    parser = worker.parser() if words[0] == "ddlf-worker" else main.parser()
    if "--help" in words:
        with pytest.raises(SystemExit, match=r"^0$"):
            parser.parse_args(words[1:])
    else:
        assert parser.parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_what_is_shown_of_python_and_yaml_can_be_read(page):
    for block in blocks(page, "python"):
        compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for block in blocks(page, "yaml"):
        ClusterConfig.model_validate(yaml.safe_load(block))


def test_the_page_of_the_api_has_every_public_name_method_and_setting():
    page = PAGES["docs/api.md"]
    named = set(re.findall(r"\w+", page))
    methods = {
        name for cls in (ddlf.IApp, ddlf.Cluster) for name, value in vars(cls).items() if inspect.isfunction(value)
    }
    wanted = {name for name in (*ddlf.__all__, *methods, *SETTINGS, "model") if not name.startswith("_")}
    assert wanted - named == set()


def rows(page, heading):
    """The names in the first column of the tables below a heading."""
    part = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {name for cell in re.findall(r"^\| (`.*?) \|", part, re.M) for name in re.findall(r"`([\w-]+)`", cell)}


def test_the_page_of_the_algorithms_has_every_rule_and_its_files_and_tests():
    page = (ROOT / "docs/algorithms.md").read_text()
    families = runpy.run_path(str(ROOT / "docs/reference"))["FAMILIES"]
    wanted = {name: set(family.names) for name, (_, family) in families.items() if isinstance(family, Family)}
    assert {name: rows(page, name) for name in wanted} == wanted
    below = {path.name for path in [*(ROOT / "ddlf").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]}
    assert {file.rpartition("/")[2] for file in re.findall(r"`([\w/]+\.py)`", page)} <= below
    for name, (_, family) in families.items():
        if isinstance(family, Family):
            part = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
            homes = {type(family.read(rule)).__module__.rpartition(".")[2] + ".py" for rule in family.names}
            assert homes <= {file.rpartition("/")[2] for file in re.findall(r"`([\w/]+\.py)`", part)}, name


CELLS = """
import ast, asyncio, json, sys

async def main():
    for cell in json.load(sys.stdin):
        waiting = eval(compile(cell, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), globals())
        if waiting is not None:
            await waiting

asyncio.run(main())
"""
STEP = """
class MyError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code

def step():
    raise MyError(5)
"""


@pytest.mark.slow
def test_the_blocks_of_the_guide_run_one_after_the_other(tmp_path, environment):  # noqa: F811
    """As cells of a notebook would; every app that is defined is trained for an epoch."""
    *_, app, notebook = blocks("README.md", "python")
    cells = [app.partition("if __name__")[0], notebook, "await app.close()"]
    for block in blocks("docs/guide.md", "python"):
        defined = (
            [node.name for node in ast.parse(block).body if isinstance(node, ast.ClassDef)]
            if "await" not in block
            else []
        )
        cells += [STEP] * ("step" in block) + [block] + ["cluster = app.cluster"] * ("app = App(" in block)
        cells += [f"await {name}(app.cluster).train_sync(master_epochs=1)" for name in defined]
    ended = subprocess.run(
        [sys.executable, "-c", CELLS],
        input=json.dumps(cells),
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("test ") >= 2
    assert "5 (RemoteError" in ended.stdout


def written(page, folder):
    """Write the page's programs, whose first lines name them; returns its commands."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)[1]
        (folder / name).write_text(block)
    return [shlex.split(line) for block in blocks(page, "") for line in block.splitlines() if line.startswith("ddlf ")]


def run(folder, *command):
    words = (
        [sys.executable, "-m", "ddlf.cli.main", *command[1:]] if command[0] == "ddlf" else [sys.executable, *command]
    )
    ended = subprocess.run(words, cwd=folder, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(tmp_path):
    _, _, keep, on, unlucky = written("docs/tutorial.md", tmp_path)
    assert run(tmp_path, "hello.py").splitlines()[-1].count("process") == 2
    whole = run(tmp_path, *keep)
    assert "round 3/3" in whole
    disturbed = run(tmp_path, *unlucky)
    assert "lost " in disturbed
    assert disturbed.splitlines()[-1] == whole.splitlines()[-1]
    assert (tmp_path / "digits.keras").exists()
    more = run(tmp_path, *on)
    assert "resumed   after round 3" in more
    assert "round 5/5" in more


@pytest.mark.slow
def test_a_converted_script_trains_as_the_one_before(tmp_path):
    (command,) = written("docs/howto/convert.md", tmp_path)
    assert "val_loss" in run(tmp_path, "plain.py")
    assert "val_loss" in run(tmp_path, *command)
    assert (tmp_path / "model.keras").exists()
