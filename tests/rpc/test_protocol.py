"""Tests that ``docs/reference/protocol.md`` has the same numbers and names as the code."""

import importlib
import re
from pathlib import Path

import pytest

from ddlf.rpc.messages import BIG_ENDIAN, DTYPES, Kind, Tag
from ddlf.worker.executor import Executor

TEXT = (Path(__file__).parents[2] / "docs/reference/protocol.md").read_text()


def section(title: str) -> str:
    """Return the text from a heading to the next one of any level."""
    return re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#)", TEXT, re.DOTALL | re.MULTILINE).group(1)


LIMITS = re.findall(r"^\| `([\w.]+)` \| ([\d.,]+) \|", section("5. Limits"), re.MULTILINE)


@pytest.mark.parametrize(("name", "written"), LIMITS)
def test_each_limit_of_the_document_equals_the_code(name, written):
    layer, file, *names = name.split(".")
    value = importlib.import_module(f"ddlf.{layer}.{file}")
    for part in names:
        value = getattr(value, part)
    assert value == float(written.replace(",", ""))


def test_the_document_has_limits():
    assert len(LIMITS) >= 15


def test_each_command_of_a_data_connection_is_in_the_document(tmp_path):
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section("Commands on a data connection"), re.MULTILINE)
    written = {name for row in rows for name in re.findall(r"\w+", row)}
    assert written == {*Executor(tmp_path, tmp_path).commands, "run", "run_method", "call", "greet"}


def test_each_tag_kind_and_element_type_has_its_number_in_the_document():
    tags = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", section("3. Value"), re.MULTILINE))
    assert sorted(map(int, (number for number in tags if tags[number] != "1"))) == sorted(Tag)
    kinds = re.findall(r"^\| (\d) \| ([A-Z]+) \|", section("4. Messages"), re.MULTILINE)
    assert [(int(number), name) for number, name in kinds] == [(kind.value, kind.name) for kind in Kind]
    assert f"| {' | '.join(DTYPES)} |" in TEXT
    assert f"{BIG_ENDIAN} is added when the bytes are big-endian" in TEXT
