"""Run the short form of the stores trial: a web server, and all faults except stalls, which take long."""

import pytest

from tests.trials.stores import compare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


async def test_a_failing_store_changes_no_bit_and_serves_each_file_once(monkeypatch):
    for name in ("DDLF_CACHE", "DDLF_CACHE_SIZE"):
        monkeypatch.setenv(name, "")
    assert await compare("http", 0.3, files=8, epochs=2, kinds=("error", "throttle", "cut"))
