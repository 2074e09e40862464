"""Runs of fake workers. Their weights differ in type, size and kind."""

import numpy as np

from ddlf.testing import FakeCluster, FakeRun

CHANCE = np.random.default_rng(2)
START = {
    "dense/kernel": CHANCE.normal(size=(50, 40)).astype("f4"),
    "dense/bias": CHANCE.normal(size=9).astype("f4"),
    "half": CHANCE.normal(size=5).astype("f2"),
    "norm/mean": CHANCE.normal(size=7).astype("f4"),
    "norm/steps": np.asarray(41, "i8"),
}
FROZEN = frozenset(["norm/mean", "norm/steps"])


def run_of(settings, workers=3, **more):
    run = FakeRun(FakeCluster(workers), slots=3, start=START, frozen=FROZEN, **{**settings, **more})
    run.event_log = []
    run.subscribe(run.event_log.append)
    return run


async def trained(*arguments, **more):
    run = run_of(*arguments, **more)
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    return run


def bits(run):
    """The weights and the outer state, with their types."""
    state = run.run_context.progress.state
    return [(a.dtype, a.tobytes()) for a in [*run.model.get_weights(), *(a for name in state for a in state[name])]]


def events_of(run, kind):
    """The events of a kind."""
    return [event for event in run.event_log if isinstance(event, kind)]
