"""Run the short form of the stores trial: a web server, and no faults that take as long as a stall."""

import pytest

from tests.trials.stores import compare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


async def test_a_store_that_fails_changes_no_bit_and_gives_each_file_once(monkeypatch):
    for name in ("DDLF_CACHE", "DDLF_CACHE_SIZE"):
        monkeypatch.setenv(name, "")
    assert await compare("http", 0.3, files=8, epochs=2, kinds=("error", "throttle", "cut"))
