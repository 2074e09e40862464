"""Run the short form of the soak trial, and test that it computes Theil and Sen's slope and detects leaks."""

import os

import numpy as np
import pytest

from tests.processes import command
from tests.trials import soak

SHORT = ["--calls", "200", "--cycles", "10", "--minutes", "0", "--warm-up", "5", "--transfers", "10", "--rounds", "4"]


def test_calls_and_transfers_leave_no_descriptor_thread_or_task():
    lines = command(
        "tests.trials.soak", *SHORT
    ).stdout.splitlines()  # this process may have threads of libraries of other tests
    for part in ("calls", "transfers", "rounds"):
        rows = [line for line in lines if line.startswith(f"| {part} ")]
        assert len(rows) == 3, lines
        # Libraries for training start their threads at some time in the first rounds.
        assert part == "rounds" or all(row.endswith(" - |") for row in rows), "\n".join(lines)


def test_slope_equals_that_of_scipy_and_ignores_one_step():
    from scipy.stats import theilslopes  # at the top, each process that collects this file would import it for a second

    watch = soak.Watch(os.getpid(), 40)
    watch.at = list(np.arange(40.0))
    noise = np.random.default_rng(0).normal(0, 1000, 40)
    watch.memory["master"] = [int(5000 * at + extra) for at, extra in zip(watch.at, noise, strict=True)]
    watch.memory["daemon"] = [0] * 39 + [10**9]
    slope, _ = watch.results("master")
    assert slope == pytest.approx(theilslopes(watch.memory["master"], watch.at).slope * 3600 / 2**20)
    assert watch.results("daemon") == (0, 0)


def test_leaks_are_found(monkeypatch, capsys):
    opened = []

    async def leak(workers, daemon, port, options):
        watch = soak.Watch(daemon, 1)
        watch.step()
        watch.count()
        opened.append(os.open(os.devnull, os.O_RDONLY))
        watch.count()
        return watch

    monkeypatch.setattr(soak, "PARTS", {"calls": leak})
    try:
        assert soak.main(SHORT) == 1
    finally:
        os.close(opened[0])
    assert "calls: 1 master descriptors more" in capsys.readouterr().out
