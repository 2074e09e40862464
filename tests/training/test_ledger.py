import numpy as np

from ddlf.training.progress import SampleLedger


def test_ledger_is_exact_when_each_sample_counts_once_an_epoch():
    ledger = SampleLedger(10)
    ledger.add(np.array([3, 1, 5], np.uint8), 2)
    assert not ledger.is_exact(2)
    ledger.add(np.array([0, 2, 4, 6, 7, 8, 9]), 2)
    assert ledger.is_exact(2)
    assert not ledger.is_exact(1)


def test_a_sample_that_counts_twice_is_seen():
    ledger = SampleLedger(3)
    ledger.add(np.array([0, 1, 1, 2]), 1)
    assert ledger.counts.tolist() == [1, 2, 1]
    assert not ledger.is_exact(1)


def test_counting_does_not_change_an_array_that_was_given_away():
    ledger = SampleLedger(2)
    before = ledger.counts
    ledger.add(np.array([0]), 1)
    assert before.tolist() == [0, 0]
