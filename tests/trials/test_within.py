"""Run the short form of the trial that compares cut layers with whole ones, with JAX: tests/training/split use TensorFlow."""

from tests.trials.within import main


def test_cut_layers_compute_what_whole_ones_compute_and_send_what_the_formula_says(capsys):
    result = main(["--backends", "jax", "--workers", "3", "--samples", "8"])
    table = capsys.readouterr().out
    assert result == 0, table
    assert table.count("\n") == 8
