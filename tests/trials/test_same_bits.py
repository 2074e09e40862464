"""Run the short form of the same-bits trial: one version, with more and with fewer workers."""

from tests.trials.same_bits import ROOT, compared, run

KERAS = ("sync, int8, resumed",)
NUMPY = (
    "sync, int8",
    "sync, nesterov outside",
    "sync, median",
    "async, 3 slots",
    "async, top-k, resumed between checkpoints",
)


def test_the_number_of_workers_changes_no_bit():
    few, many = run(ROOT, KERAS, NUMPY, workers=(1, 2))
    lines, same = compared(few, many)
    assert same, lines
    assert len(lines) == len(KERAS) + len(NUMPY)


def test_differences_are_named():
    ours = {"sync": {"weights": "1" * 64, "ledger": "2" * 64}}
    lines, same = compared(ours, {"sync": {"weights": "1" * 64, "ledger": "3" * 64}})
    assert not same
    assert lines[0].endswith("OTHER ledger")
