"""Tests of the tutorial that breaks an app: each change gives the answer that the tutorial prints."""

import re
from pathlib import Path

import pytest

from ddlf.extras.advice.advise import advise
from ddlf.extras.advice.report import lines
from tests.extras.advice.test_programs import app_in

PAGE = Path(__file__).parents[3] / "docs/tutorial/advice.md"
BLOCKS = re.findall(r"^```(python|diff|console)\n(.*?)^```", PAGE.read_text(), re.S | re.M)


def broken():
    """Return for each change the text of the app, the level of the advice, and the printed lines of the answer."""
    app, text, programs = BLOCKS[0][1], BLOCKS[0][1], []
    for kind, block in BLOCKS[1:]:
        if kind == "diff":
            old, new = (
                "".join(line[1:] + "\n" for line in block.splitlines() if line.startswith(sign)) for sign in "-+"
            )
            assert app.count(old) == 1, old
            text = app.replace(old, new)
        else:
            command, *shown = block.splitlines()
            assert command.startswith("$ ddlf advise digits.py")
            programs.append((text, "quick" if "--quick" in command else "batch", shown))
    return programs


async def answer_to(text, level):
    """Return the first line of each finding, and the last line of the answer."""
    *findings, end = lines(await advise(written(text), level), 0)
    return [line for line in findings if re.match(r"(error|warning|note) ", line)] + [end.partition(", by")[0]]


def written(text):
    path = Path("digits.py").resolve()
    path.write_text(text)
    return app_in(path)


def test_the_page_breaks_the_app_in_five_ways():
    assert len(BLOCKS) == 12
    assert len({text for text, _, _ in broken()}) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("text", "level", "shown"), broken(), ids=["works", *"12345"])
async def test_the_printed_answers_are_correct(text, level, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert await answer_to(text, level) == shown
