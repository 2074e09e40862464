"""Run the short form of the trial of combinations of settings, and check that it finds other bits."""

import numpy as np
import pytest

from ddlf.testing import FakeWorker
from tests.trials import combinations


@pytest.mark.parametrize(("mode", "seeds"), [("sync", range(5, 11)), ("async", range(3)), ("downpour", range(3))])
def test_random_combinations_of_settings_keep_their_promises(mode, seeds):
    counts, problems = combinations.combinations(mode, seeds)
    assert problems == []
    assert counts["good"] > 0


def test_result_that_depends_on_the_worker_is_found(monkeypatch):
    def fit(worker, *arguments, usual=FakeWorker.fit):
        update, momentum = usual(worker, *arguments)
        return [update[0] + np.float32(worker.id == 1), *update[1:]], momentum

    monkeypatch.setattr(FakeWorker, "fit", fit)
    counts, problems = combinations.combinations("sync", range(5, 8))
    assert counts["bad"] == len(problems) > 0
