"""Tests of ending methods of the user that hang or use too much memory, with a message."""

import threading
import time

import pytest

from ddlf.extras.advice.limits import doing, limit_error, time_limit
from tests.patience import PATIENCE_S
from tests.processes import command


def test_only_methods_that_take_too_long_or_too_much_memory_are_named():
    assert limit_error(0, clock=time.monotonic() + 10) is None
    with doing("create_model"):
        now = time.monotonic()
        assert limit_error(10, clock=now, memory=(100, 50)) is None
        assert "create_model has not ended within 10 s, at " in str(limit_error(10, clock=now + 11, memory=(100, 50)))
        assert "takes all memory: 0.1 of 100.0 GB are free" in str(limit_error(10, clock=now, memory=(10**11, 10**8)))
        assert limit_error(10, clock=now, memory=(None, None)) is None
    assert limit_error(0, clock=time.monotonic() + 10) is None


def test_the_limit_is_noticed_while_the_method_runs():
    has_ended, messages = threading.Event(), []

    def end(error):
        messages.append(str(error))
        has_ended.set()

    with time_limit(0, end), doing("load_dataset"):
        assert has_ended.wait(PATIENCE_S)
    assert "test_limits.py" in messages[0] or "load_dataset" in messages[0]


@pytest.mark.slow
def test_a_hanging_app_is_ended_with_a_message(tmp_path):
    path = tmp_path / "app.py"
    path.write_text(
        "import ddlf\n\nclass App(ddlf.IApp):\n    def load_dataset(self):\n        while True:\n            pass\n\n"
        "    def create_model(self):\n        pass\n"
    )
    ended = command("ddlf", "advise", str(path), "--limit", "1")
    assert ended.returncode not in (0, None)
    assert "load_dataset has not ended within 1 s, at" in ended.stderr
    assert "app.py:" in ended.stderr
