"""Workers that exchange what no model has computed, as benchmarks have them: the real exchange, over real connections, in this process."""

import numpy as np
import pytest

from benchmarks.stand_in import StandInRun, tensors
from ddlf.testing import in_process_cluster


@pytest.mark.parametrize("exchange", ["sharded", "star"])
async def test_made_up_updates_are_merged_as_those_of_models_are(exchange):
    async with in_process_cluster(2) as cluster:
        run = StandInRun(cluster, 1000, exchange=exchange, master_epochs=3)
        await run.train_model()
    assert run.ledger.is_exact(3)
    assert len(run.history) == 3
    updates = [np.random.default_rng(number).normal(scale=1e-3, size=1 << 16).astype("f4") for number in (1, 2)]
    for weight, size in zip(run.model.get_weights(), tensors(1000), strict=True):
        assert weight.shape == (size,)
        np.testing.assert_allclose(weight, -3 * (updates[0][:size] + updates[1][:size]) / 2, atol=1e-8)
    assert sum(tensors(1000)) == 1000
