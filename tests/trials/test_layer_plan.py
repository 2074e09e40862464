"""Run the short form of the trial that compares split layers with whole layers. It uses JAX, because ``tests/training/split``
uses TensorFlow.
"""

from tests.trials.layer_plan import main

CASES = ("Dense 784-512-10", "CNN by filters, valid", "CNN by rows, same", "transformer block")
"""Each kind of layer, each way to split a convolution, and both paddings."""


def test_split_layers_match_whole_layers_and_the_formula_of_bytes(capsys):
    result = main(["--backends", "jax", "--workers", "3", "--samples", "8", "--cases", *CASES])
    table = capsys.readouterr().out
    assert result == 0, table
    assert table.count("\n") == 2 + len(CASES)
