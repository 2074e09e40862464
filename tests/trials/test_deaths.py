"""Run the short form of the trial that kills workers at random moments of a run."""

import asyncio

import pytest

from tests.trials.deaths import deaths_in_process, deaths_of_processes


def test_workers_of_this_process_killed_at_any_moment_change_no_bit():
    outcome = asyncio.run(deaths_in_process(runs=2, seed=1, workers=2, rounds=2))
    assert outcome.problems == []
    assert outcome.killed


@pytest.mark.parametrize("how", ["local", "command"])
@pytest.mark.usefixtures("one_template")
def test_processes_killed_at_any_moment_change_no_bit(how):
    outcome = asyncio.run(deaths_of_processes(runs=1, seed=1, how=how, workers=2, rounds=2))
    assert outcome.problems == []
