"""Tests of the site of the documentation: it builds without warnings, is complete, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LOADED = re.compile(r"""<(?!a\b)[^>]*\b(?:src|href|action)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import""")
"""Matches addresses that a browser loads by itself. It does not match links that people follow."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(folder)]
    ended = subprocess.run(build, cwd=ROOT, text=True, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder


def test_every_page_is_in_the_site(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} >= pages
    named = (site / "index.html").read_text()
    assert [page for page in pages if f'href="{page}.html"' not in named and page.name != "index"] == []


def test_no_page_style_or_script_loads_anything_from_another_host(site):
    loaded = {
        os.path.relpath(path, site): LOADED.findall(path.read_text())
        for kind in ("html", "css")
        for path in site.rglob(f"*.{kind}")
    }
    assert len(loaded) > 15
    assert {name: hits for name, hits in loaded.items() if hits} == {}


def test_each_setting_event_error_and_class_can_be_linked_to(site):
    for page, anchor in (
        ("reference/settings", "batch-size"),
        ("reference/events", "workerlost"),
        ("reference/errors", "workerlost"),
        ("reference/rules", "merge"),
        ("reference/python", "ddlf.Cluster"),
    ):
        assert f'id="{anchor}"' in (site / f"{page}.html").read_text(), (page, anchor)
