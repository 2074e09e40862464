"""The guide and the page of the API: what they show can be run, and what there is is shown."""

import ast
import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

import ddlf
from ddlf.cli import main, worker
from ddlf.config.models import ClusterConfig
from ddlf.settings import SETTINGS

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/guide.md", "docs/api.md")}


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
