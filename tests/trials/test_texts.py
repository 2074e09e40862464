"""Run the short form of the trial of generated model texts."""

import pytest

from tests.trials import texts


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_generated_texts_are_read_or_refused_with_a_position(count, capsys):
    assert texts.main(["--texts", str(count), "--seed", str(count)]) == 0, capsys.readouterr().out
