"""Tests of the pages of the documentation: their examples run, and the API page names each public name."""

import ast
import contextlib
import inspect
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ddlf
from ddlf.cli import main, worker
from ddlf.cluster.config.cluster_file import ClusterConfig
from ddlf.training.registry import SETTINGS
from tests.commands import several
from tests.test_readme import environment  # noqa: F401

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "docs/reference/api.md", "docs/tutorial/first_training.md", "docs/tutorial/advice.md")
PAGES = {
    name: (ROOT / name).read_text()
    for name in (*NAMES, *(f"docs/howto/{path.name}" for path in (ROOT / "docs/howto").iterdir()))
}


def blocks(page, language):
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], re.S | re.M) if kind == language]


def commands():
    shown = [block for page in PAGES for language in ("", "console") for block in blocks(page, language)]
    lines = [line.removeprefix("$ ") for block in shown for line in block.splitlines()]
    return [line for line in lines if line.startswith(("ddlf ", "ddlf-worker "))]


@pytest.mark.parametrize("line", commands())
def test_commands_of_pages_have_valid_options(line):
    words = shlex.split(line, comments=True)
    words = list(itertools.takewhile(lambda word: word not in (">", "&&", "|"), words))
    if words[1] == "help":
        words = ["ddlf", *words[2:], "--help"]
    parse = worker.parser().parse_args if words[0] == "ddlf-worker" else main.parse
    if {"--help", "--help-all"} & {*words} or words == ["ddlf", "--version"]:
        with pytest.raises(SystemExit, match=r"^0$"):
            main.main(words[1:])
    else:
        assert parse(words[1:])


def programs_of_pages():
    """Yield the module and options of each ``python -m`` command on a page, which lets a reader check a figure."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for module, rest in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]+)([^`\n]*)", path.read_text()):
            yield pytest.param(module, re.findall(r"(?<!\S)--[\w-]+", rest), id=f"{path.name}-{module}{rest}")


@pytest.mark.parametrize(("module", "options"), list(programs_of_pages()))
def test_programs_of_pages_exist_and_have_their_options(module, options):
    path = ROOT / module.replace(".", "/")
    files = list(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py"), ROOT / "benchmarks/measure.py"]
    source = "".join(file.read_text() for file in files)
    assert "__main__" in source or (path / "__main__.py").exists()
    by_keyword = set(re.findall(r"(\w+)=", source)) if "read_options(" in source else set()
    missing = [option for option in options if f'"{option}"' not in source]
    assert [option for option in missing if option[2:].replace("-", "_") not in by_keyword] == []


@pytest.mark.parametrize("page", PAGES)
def test_python_and_yaml_blocks_of_pages_are_valid(page):
    for block in blocks(page, "python"):
        compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for block in blocks(page, "yaml"):
        ClusterConfig.model_validate(yaml.safe_load(block))


def test_the_page_of_the_api_has_every_public_name_method_and_setting():
    page = PAGES["docs/reference/api.md"]
    named = set(re.findall(r"\w+", page))
    methods = {
        name for cls in (ddlf.IApp, ddlf.Cluster) for name, value in vars(cls).items() if inspect.isfunction(value)
    }
    public_names = {name for name in (*ddlf.__all__, *methods, *SETTINGS, "model") if not name.startswith("_")}
    assert public_names - named == set()


def test_program_of_the_reference_uses_the_code_beside_it(tmp_path):
    (tmp_path / "ddlf").mkdir()
    (tmp_path / "ddlf/__init__.py").write_text("raise RuntimeError('another checkout')")
    code = f"import runpy; runpy.run_path({str(ROOT / 'docs/reference')!r}); import ddlf; print(ddlf.__file__)"
    other = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=other, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == f"{ROOT / 'ddlf/__init__.py'}\n", ended.stderr


CELLS = """
import ast, asyncio, json

async def main():
    with open("cells.json") as file:
        cells = json.load(file)
    for cell in cells:
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
def test_python_blocks_of_how_to_pages_run_in_order(tmp_path, environment):  # noqa: F811
    """Run the blocks of a page in order, like the cells of a notebook, and train each app for one epoch."""
    app, *_ = blocks("README.md", "python")
    cells = [app.partition("if __name__")[0]]
    pages = ("docs/howto/train.md", "docs/howto/watch.md", "docs/howto/calls.md")
    for block in [block.partition("if __name__")[0] for page in pages for block in blocks(page, "python")]:
        defined = (
            [node.name for node in ast.parse(block).body if isinstance(node, ast.ClassDef)]
            if "await" not in block
            else []
        )
        cells += [STEP] * ("step" in block) + [block] + ["cluster = app.cluster"] * ("app = App(" in block)
        cells += [f"await {name}(app.cluster).train_sync(master_epochs=1)" for name in defined]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    (tmp_path / "cells.py").write_text(CELLS)
    (printed,) = several([["cells.py"]], tmp_path, env=environment)
    assert "test " in printed
    assert "5 (RemoteError" in printed


def written(page, folder):
    """Write the programs of a page into a folder, and return its commands. The first line of a program has its file name."""
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
def test_commands_of_the_tutorial_run(tmp_path, standing_template):
    _, _, keep, on, unlucky, without_python = written("docs/tutorial/first_training.md", tmp_path)
    (text,) = blocks("docs/tutorial/first_training.md", "text")
    (tmp_path / "flowers.nnm").write_text(text)
    hello, trained, disturbed, more, flowers = several(
        [["hello.py"], keep, unlucky, on, without_python], tmp_path, standing_template
    )
    assert hello.splitlines()[-1].count("process") == 2
    assert "round 3/3" in trained
    assert "lost " in disturbed
    assert disturbed.splitlines()[-1] == trained.splitlines()[-1]
    assert (tmp_path / "digits.keras").exists()
    assert "resumed   after round 3" in more
    assert "round 5/5" in more
    assert "decided   flowers:loss SCE" in flowers


@pytest.mark.slow
def test_converted_script_trains_like_the_plain_one(tmp_path, standing_template):
    (command,) = written("docs/howto/convert.md", tmp_path)
    for output in several([["plain.py"], command], tmp_path, standing_template):
        assert "val_loss" in output
    assert (tmp_path / "model.keras").exists()


def joins(command):
    """Return the gates that a command of a worker dials."""
    return worker.parser().parse_args(command[1:]).join


@pytest.mark.slow
def test_commands_of_the_page_about_three_machines_run(tmp_path, monkeypatch, standing_template):
    """Run the commands of this page and of the page about troubles. Three ports of this machine stand for three machines."""
    page, ports = "docs/howto/three_machines.md", []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token, daemon, *more = [
        shlex.split(line) for block in blocks(page, "") for line in block.splitlines() if line.startswith("ddlf")
    ]
    joining = [command for command in more if command[0] == "ddlf-worker"]
    on_the_cluster = [command for command in more if command not in joining]
    assert [joins(command) for command in joining] == [(("10.0.0.5", 9100),)]
    assert "Copy it to each of the other machines" in run(tmp_path, *token)
    with contextlib.ExitStack() as workers:
        for _ in range(3):
            where = ["--host", "127.0.0.1", "--port", "0", "--template-fd", str(standing_template.fileno())]
            worker = subprocess.Popen(
                [sys.executable, "-m", "ddlf.cli.worker", *where],
                **dict(cwd=tmp_path, text=True, stdout=subprocess.PIPE, pass_fds=[standing_template.fileno()]),
            )
            workers.enter_context(worker)  # its end closes the pipe and waits for the process
            workers.callback(worker.terminate)
            ports.append(re.search(r"ready on 127.0.0.1:(\d+)", worker.stdout.readline())[1])
        (listed,) = blocks(page, "yaml")
        for number, port in enumerate(ports, 1):
            listed = listed.replace(f"10.0.0.1{number}, port: 9000", f"127.0.0.1, port: {port}")
        (tmp_path / "cluster.yaml").write_text(listed)
        run(tmp_path, "ddlf", "new", "lab")
        (tmp_path / "app.py").write_text((tmp_path / "lab" / "app.py").read_text())
        assert daemon == ["ddlf-worker", "--port", "9000"]
        doctor, bench, first, *other_runs = on_the_cluster
        # One training shows that the page is right. A dry run is enough for the other commands, and takes less time.
        other_commands = [*other_runs, *written("docs/howto/troubles.md", tmp_path)]
        dry = [[*command, *["--dry-run"] * (command[1] == "run")] for command in other_commands]
        looked, measured, trained, *planned = several(
            [doctor, bench, [*first, "--master-epochs", "2"], *dry], tmp_path, standing_template
        )
        assert "pc03" in looked
        assert measured.count("MB/s") == 6
        assert "round 1/1" in trained
        assert "test  " in trained
        assert (tmp_path / "model.keras").exists()
        for command, output in zip(other_commands, planned, strict=True):
            assert "lab" in output or "4 would join here" in output or command[1] != "run"


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def test_architecture_and_contributing_name_files_that_exist():
    page = ARCHITECTURE + (ROOT / "CONTRIBUTING.md").read_text()
    top = r"(?:ddlf|tests|apps|scripts|docs|benchmarks|\.ci)/[\w/.-]*"
    named = re.findall(rf"`({top}|[\w/]+/\w+\.py)`", page)
    assert len(named) > 80
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "ddlf" / name).exists()]
    assert [name for name in missing if "_build" not in name] == []


def test_architecture_names_a_registry_that_is_in_one_of_its_files():
    rows = [line for line in ARCHITECTURE.splitlines() if re.search(r"`[A-Z]{3,}`", line)]
    assert len(rows) > 8
    for row in rows:
        for registry in re.findall(r"`([A-Z]{3,})`", row):
            files = [ROOT / name for name in re.findall(r"`(ddlf/[\w/]+\.py)`", row)]
            assert any(re.search(rf"^{registry}\b", file.read_text(), re.M) for file in files), (registry, files)


def test_diagrams_have_at_most_eight_boxes_of_classes_that_exist_and_are_drawn_from_their_source():
    program = runpy.run_path(str(ROOT / "docs/pictures/diagrams.py"))
    source = "\n".join(path.read_text() for path in (ROOT / "ddlf").rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", source, re.M))
    titles = [box.title for diagram in program["DIAGRAMS"].values() for box in diagram.boxes]
    assert {name for title in titles for name in re.findall(r"\b[A-Z]\w+", title)} <= classes
    for name, diagram in program["DIAGRAMS"].items():
        assert len(diagram.boxes) <= 8
        assert (ROOT / f"docs/pictures/{name}.svg").read_text() == program["drawn"](diagram), name
