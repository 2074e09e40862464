"""Fixtures with the bytes that ``docs/reference/protocol.md`` shows, so that the tests compare the code with the document."""

import re
from pathlib import Path

import pytest

PROTOCOL = Path(__file__).parents[2] / "docs/reference/protocol.md"


@pytest.fixture(scope="session")
def written_bytes() -> dict[str, bytes]:
    """Return the hex blocks by name. A fence is marked ``hex NAME``; in each line a comment begins with ``;``."""
    blocks = re.findall(r"^```hex ([\w-]+)\n(.*?)^```$", PROTOCOL.read_text(), re.DOTALL | re.MULTILINE)
    assert len({name for name, _ in blocks}) == len(blocks)
    return {name: bytes.fromhex("".join(line.partition(";")[0] for line in text.splitlines())) for name, text in blocks}


@pytest.fixture(scope="session")
def written_values() -> dict[str, bytes]:
    """Return the table of values. Each row has a Python expression and its bytes, both in backticks."""
    rows = re.findall(r"^\| `([^`]+)` \| `([0-9a-f ]+)` \|", PROTOCOL.read_text(), re.MULTILINE)
    return {expression: bytes.fromhex(data) for expression, data in rows}
