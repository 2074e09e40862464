"""Tests of Poisson batches: sizes, coins, and the cost of an epoch against dp-accounting."""

import numpy as np
import pytest

from ddlf.privacy.accountant import Accountant
from ddlf.privacy.poisson import PoissonBatches


def test_each_sample_enters_a_batch_by_its_own_coin():
    batches = PoissonBatches(samples=1000, batch_size=100)
    draws = [batches.draw() for _ in range(300)]
    sizes = [len(batch) for batch in draws]
    assert np.mean(sizes) == pytest.approx(100, abs=3)  # 5 standard errors: sqrt(90 / 300) is 0.55
    assert np.var(sizes) == pytest.approx(90, rel=0.45)  # the variance of a binomial distribution
    counts = np.bincount(np.concatenate(draws).astype(int), minlength=1000)
    assert np.var(counts) == pytest.approx(27, rel=0.25)  # the same holds for counts of each sample


def test_a_worker_with_few_samples_has_all_of_them_in_each_batch():
    batches = PoissonBatches(samples=50, batch_size=64)
    assert (batches.probability, batches.expected, batches.steps) == (1.0, 50, 1)
    np.testing.assert_array_equal(batches.draw(), np.arange(50))


def test_epsilon_of_epochs_equals_dp_accounting_by_hand():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = Accountant(1e-5)
    for _ in range(3):
        accountant.add(PoissonBatches(samples=1010, batch_size=100).cost("1", 1.2, 2))
    by_hand = PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(100 / 1010, dp_accounting.GaussianDpEvent(1.2))
    by_hand.compose(step, 3 * 2 * 11)
    assert accountant.epsilon("1") == pytest.approx(by_hand.get_epsilon(1e-5), abs=1e-3)
