"""The bytes that ``docs/reference/protocol.md`` writes out by hand: the tests of ``wire`` use the very blocks that a reader sees."""

import re
from pathlib import Path

import pytest

PROTOCOL = Path(__file__).parents[2] / "docs/reference/protocol.md"


@pytest.fixture(scope="session")
def written_bytes() -> dict[str, bytes]:
    """The hex blocks by name: a fence says ``hex NAME``, and in each of its lines a comment begins with ``;``."""
    blocks = re.findall(r"^```hex ([\w-]+)\n(.*?)^```$", PROTOCOL.read_text(), re.DOTALL | re.MULTILINE)
    assert len({name for name, _ in blocks}) == len(blocks)
    return {name: bytes.fromhex("".join(line.partition(";")[0] for line in text.splitlines())) for name, text in blocks}


@pytest.fixture(scope="session")
def written_values() -> dict[str, bytes]:
    """The table of values: a Python expression and its bytes in each row, both in backticks."""
    rows = re.findall(r"^\| `([^`]+)` \| `([0-9a-f ]+)` \|", PROTOCOL.read_text(), re.MULTILINE)
    return {expression: bytes.fromhex(data) for expression, data in rows}
