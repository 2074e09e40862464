"""Run the short forms of two trials: losses are detected soon, and busy workers are not declared dead."""

import json

import pytest

from tests.trials import detect, false_deaths

pytestmark = pytest.mark.usefixtures("one_template")


def test_losses_are_noticed_in_about_the_promised_time(tmp_path):
    """The limits are longer than in the trial, which needs a machine that does nothing else."""
    rows = detect.main(
        [
            *["--kills", "1", "--stops", "1", "--partitions", "3", "--dead-after", "1", "--json"],
            str(tmp_path / "rows.json"),
        ]
    )
    assert [row["what"] for row in rows if row["max_s"] > 20 * row["bar_s"]] == []
    assert {row["signal"] for row in rows if "of the executor" in row["what"]} == {"SIGKILL"}
    assert len(rows) == 6 + 4
    assert json.loads((tmp_path / "rows.json").read_text()) == rows


def test_busy_workers_and_blocked_master_are_not_dead(monkeypatch):
    monkeypatch.setattr(false_deaths, "HOLD_UP_EVERY_S", 1.5)
    (result,) = false_deaths.main(["--minutes", "0.1", "--dead-after", "1"])
    assert (result["deaths"], result["lost_requests"], result["leases_granted_anew"]) == (0, [], 0)
    assert result["rounds"] > 0
