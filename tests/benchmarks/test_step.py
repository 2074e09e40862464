"""What a step costs, in the shortest form: of each way its time and its bytes."""

import asyncio

import pytest

from benchmarks import step

pytestmark = pytest.mark.slow


def test_each_way_says_what_a_step_costs(capsys):
    said = "--data digits --samples 320 --batch-size 16 --epochs 2 --repeats 1"
    options = step.parser().parse_args([*said.split(), "--ways", "plain fit,updates each 10 steps,gradients"])
    found = asyncio.run(step.main(options))
    assert all(ms > 0 for ((ms, _),) in found.values())
    (_, nothing), (_, few), (_, each) = (steps[0] for steps in found.values())
    assert nothing == 0
    # A round is weights out and updates back, whether of ten steps or of one.
    assert 8 < each / few < 12
    assert "| gradients " in capsys.readouterr().out
