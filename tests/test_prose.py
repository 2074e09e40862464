"""``scripts/prose.py`` finds the patterns of ``docs/contributing/style.md``. ``scripts/lint`` runs it on all files."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PHRASE = "goes on"
"""A phrase that the linter refuses. It is a constant because the linter also reads the strings of this file."""
PROSE = runpy.run_path(str(ROOT / "scripts/prose.py"))
PAIRS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", (ROOT / "docs/contributing/style.md").read_text(), re.M)


def rules_broken(text):
    return [finding.rule for finding in PROSE["findings_in"](PROSE["Text"]("page.md", 1, text))]


@pytest.mark.parametrize(("before", "after"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_linter_finds_the_left_column_of_the_style_page_only(before, after):
    assert rules_broken(before)
    assert rules_broken(after) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "The results differ from those of another run.",
        "The names of its own options.",
        "The address at which workers listen.",
        "The app is not trained, and nothing is lost.",
        "ddlf demo        train on two workers\n" + 20 * "ddlf up app.py   start workers\n",
    ],
)
def test_linter_accepts_usual_english(sentence):
    assert [rule for _, text in PROSE["_paragraphs"](sentence) for rule in rules_broken(text)] == []


@pytest.mark.parametrize(
    "sentence",
    [
        "It counts workers, those of this machine first.",
        "The worker has a folder of its own.",
        "It has nothing of use.",
    ],
)
def test_linter_finds_dialect_that_resembles_usual_english(sentence):
    assert rules_broken(sentence)


def test_linter_reads_docstrings_comments_messages_and_pages(tmp_path, monkeypatch):
    monkeypatch.setitem(PROSE["prose"].__globals__, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        f'"""The run {PHRASE} for now."""\n\nx = f"{{1}} {PHRASE} with the run"\n# it {PHRASE}\ny = "{PHRASE}"\n'
    )
    page = f"One\n\n```\nit {PHRASE}\n```\n\n| a | it {PHRASE} |\n|---|---|\n\n" + 6 * "line\n"
    (tmp_path / "b.md").write_text(page)
    findings = [
        (finding.line, finding.rule) for name in ("a.py", "b.md") for finding in PROSE["findings"](tmp_path / name)
    ]
    assert sorted(findings[:3]) == [(1, PHRASE), (3, PHRASE), (4, PHRASE)]
    assert findings[3:] == [(7, PHRASE), (15, "long paragraph")]


def test_linter_finds_names_that_say_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(PROSE["prose"].__globals__, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        "import os as held\n"
        "def told(slot, place=1):\n"
        "    for one in slot: self._found = [each for each in one]\n"
        "    try: index = why\n"
        "    except OSError as said: match index:\n"
        "        case [there, *others]: print(known, found=1)\n".replace("said: match", "said:\n     match")
    )
    findings = [(finding.line, finding.passage) for finding in PROSE["findings"](tmp_path / "a.py")]
    expected = {
        (1, "held"),
        (2, "told"),
        (2, "place"),
        (3, "one"),
        (3, "_found"),
        (3, "each"),
        (5, "said"),
        (7, "there"),
    }
    assert set(findings) == {*expected, (7, "others")}


def test_linter_reads_the_pages_and_all_python_files():
    read = {path.relative_to(ROOT).as_posix() for path in PROSE["files"]()}
    assert {"README.md", "docs/architecture.md", "ddlf/app.py", "apps/xor.py", "benchmarks/ours.py"} < read
    assert {"docs/reference/__main__.py", "tests/conftest.py"} < read
    assert not read & PROSE["QUOTES_BAD_ENGLISH"]


def test_update_lowers_a_number_and_raises_none(tmp_path, monkeypatch):
    baseline = tmp_path / "baseline.txt"
    baseline.write_text("# head\na 5\nb 1\nc 2\n")
    counted = {"a": 3, "b": 4}
    lower = PROSE["lowered"](PROSE["allowed"](baseline), Counter(counted))
    assert lower == {"a": 3, "b": 1}
