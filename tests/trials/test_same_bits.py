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


def test_who_carries_a_slot_and_how_often_it_is_trained_change_no_bit():
    few, many = run(ROOT, KERAS, NUMPY, workers=1), run(ROOT, KERAS, NUMPY, workers=2)
    lines, same = compared(few, many)
    assert same, lines
    assert len(lines) == len(KERAS) + len(NUMPY)


def test_what_differs_is_named():
    ours = {"sync": {"weights": "1" * 64, "ledger": "2" * 64}}
    lines, same = compared(ours, {"sync": {"weights": "1" * 64, "ledger": "3" * 64}})
    assert not same
    assert lines[0].endswith("OTHER ledger")
