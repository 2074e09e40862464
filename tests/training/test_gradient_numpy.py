"""Tests of the gradient exchange with the real replica and a model of NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from ddlf.testing import FakeCluster, FakeRun

RATE = 0.1


class Step:
    """A common step of plain SGD. It replaces the optimizer of a Keras model."""

    def plan(self, steps, epochs):
        self.steps = steps

    def init(self, weights):
        return [np.zeros(())]

    def update(self, state, weights, merged, trainable):
        after = [
            np.asarray(w - RATE * g, w.dtype) if trained else w
            for w, g, trained in zip(weights, merged, trainable, strict=True)
        ]
        return [state[0] + 1], after


@pytest.fixture
def step(monkeypatch):
    step = Step()
    gradient = "ddlf.training.exchanges.gradient.settings.Gradient"
    monkeypatch.setattr(f"{gradient}.step", lambda self, app: step)
    monkeypatch.setattr(f"{gradient}.check_app", lambda self, app: None)  # ``FakeRun`` overrides ``train``
    return step


async def trained(slots, batch_size):
    run = FakeRun(
        FakeCluster(2),
        exchange="gradient",
        slots=slots,
        batch_size=batch_size,
        worker_steps=1,
        master_epochs=1,
    )
    await run.train_model()
    return run


async def test_each_round_makes_one_step_along_the_gradient_of_all_samples(step):
    run = await trained(slots=2, batch_size=run_samples())
    w = [np.array(array) for array in run.start.values()]
    shift = (run.samples - 1) / 2 / run.samples
    for before, after, path in zip(w, run.model.get_weights(), run.start, strict=True):
        if path in run.frozen:
            assert np.array_equal(after, before)
        else:
            np.testing.assert_allclose(after, before - RATE * (0.1 * before + shift), rtol=1e-5, atol=1e-6)
    assert step.steps == 1


async def test_slots_do_not_change_the_steps_of_a_run(step):
    one_slot, two_slots = await trained(slots=1, batch_size=32), await trained(slots=2, batch_size=16)
    assert int(two_slots.run_context.progress.state["outer"][0]) == step.steps == len(two_slots.history) > 1
    for a, b in zip(one_slot.model.get_weights(), two_slots.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def run_samples():
    return FakeRun(FakeCluster(1)).samples
