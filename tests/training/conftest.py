"""Fixtures of the tests of training."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, shards and the master of a Downpour run wait milliseconds between two attempts."""
    for name in ("client.RETRY_S", "server.RETRY_S", "server.LONGEST_S", "master.LOOK_S"):
        monkeypatch.setattr(f"ddlf.training.strategies.downpour.{name}", 0.005)
    monkeypatch.setattr("ddlf.training.crew.recovery.RETRY_S", (0.02, 0.1))
