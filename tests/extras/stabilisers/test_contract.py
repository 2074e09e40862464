"""Tests of the properties that all stabilisers share.

One slot equals plain Keras and compiles once, an interrupted and moved run ends with the same bits, and files keep the
state. The optimizers have several stabilisers at once. tests/extras/stabilisers/test_golden.py tests each alone.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from ddlf.algorithms.encoding import decode_update
from ddlf.data.array_cache import ArrayCache
from ddlf.testing import FakeWorker
from ddlf.training.registry import SETTINGS
from ddlf.training.slot.replica import Replica
from tests.training.models import Blobs, app, blobs, equal
from tests.training.slot.replicas import task, traces

pytestmark = pytest.mark.slow
STEPS = 2 * 13
"""The steps of two epochs with 203 samples in batches of 16."""


def adam():
    import keras

    return keras.optimizers.Adam(0.01)


def scaled():
    """Return an optimizer with four wrappers and a schedule."""
    import keras

    from ddlf.extras.stabilisers import AGC, Multipliers, RollingClip, RunSchedule

    adam = keras.optimizers.Adam(RunSchedule(0.01, "warmup:0.5,cosine", steps=STEPS, epochs=2))
    slowed = Multipliers(adam, {"first": 0.5, "last/bias": 0.0})
    clipped = RollingClip(AGC(slowed), decay=0.5, warm=3, later=0.05)  # it clips about half of the later steps
    return keras.optimizers.LossScaleOptimizer(clipped, dynamic_growth_steps=5)


def unfreezing():
    from ddlf.extras.stabilisers import Rlion, Unfreezing

    return Unfreezing(Rlion(0.001), [{"first": 0.0}, {"first": 0.5}, {}], steps=STEPS)


KINDS = {make.__name__: make for make in (scaled, unfreezing)}


def model_with(kind):
    """Return the classifier of the blobs, with an optimizer."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "tanh", name="first"), layers.Dense(4, "softmax", name="last")]
    )
    model.compile(KINDS[kind](), "categorical_crossentropy")
    return model


def two_outputs():
    """Return a model with two outputs, a loss that has its own weights, and an optimizer with wrappers."""
    import keras

    from ddlf.extras.stabilisers import Uncertain

    entry = keras.Input((8,))
    hidden = keras.layers.Dense(16, "tanh", name="first")(entry)
    model = Uncertain(keras.Model(entry, {name: keras.layers.Dense(4, name=name)(hidden) for name in ("last", "far")}))
    model.compile(scaled(), "mse")
    return model


def masked():
    """Return a model with a loss that ignores every fourth label, and an optimizer that unfreezes a layer."""
    import keras

    from ddlf.extras.stabilisers import Masked

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh", name="first"), keras.layers.Dense(4)])
    model.compile(unfreezing(), Masked("mse", ignore=0))
    return model


MODELS = {make.__name__: make for make in (two_outputs, masked)}


class Stable(Blobs):
    kind = ""

    async def load_dataset(self):
        await super().load_dataset()
        if self.kind == "two_outputs":
            self.y_train = {"last": self.y_train, "far": 30 * self.y_train}
            del self.x_test, self.y_test

    async def create_model(self):
        self.model = MODELS[self.kind]() if self.kind in MODELS else model_with(self.kind)


def replica_of(kind):
    app = Stable()
    app.kind = kind
    replica = Replica(FakeWorker(2), app)
    replica.begin()
    replica.load_data({}, ArrayCache())
    replica.build()
    return replica


@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_of_one_slot_are_two_epochs_of_fit_and_one_trace_and_a_file_keeps_the_state(kind, tmp_path):
    import dataclasses

    import keras

    replica = replica_of(kind)
    weights = replica.app.model.get_weights()
    plain = model_with(kind)
    plain.set_weights(weights)
    x, y = blobs(203)
    for number in range(2):
        round_task = task(replica, weights=weights, round=number)
        round_task = dataclasses.replace(round_task, steps=(13 * number, 13 * (number + 1), STEPS, 2))
        update = decode_update(replica.carry(round_task).update, weights)
        weights = [w - u for w, u in zip(weights, update, strict=True)]
        if number == 0 and keras.backend.backend() == "tensorflow":
            traced = traces(replica.app.model)
    if keras.backend.backend() == "tensorflow":
        assert traces(replica.app.model) == traced
    plain.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    plain.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for model in (plain, loaded):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert equal(plain.get_weights(), loaded.get_weights())
    assert max(float(np.abs(a - b).max()) for a, b in zip(weights, plain.get_weights(), strict=True)) < 1e-6


class Cut(Stable):
    stop_at = None

    def on_round(self, record):
        if record.round == self.stop_at:
            self.stop_training()


def same_bits(left, right):
    return equal(left.model.get_weights(), right.model.get_weights()) and all(
        equal(*both) for both in zip(left.optimizers, right.optimizers, strict=True)
    )


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("kind", MODELS)
async def test_an_interrupted_run_with_moved_slots_ends_with_the_same_bits(two_workers, tmp_path, kind):
    uninterrupted = app(two_workers, Cut, kind=kind, slots=2, master_epochs=3)
    await uninterrupted.train_model()
    one_worker = two_workers.options(workers=[2])
    for stop_at in (1, None):
        settings = dict(kind=kind, slots=2, master_epochs=3, checkpoint=tmp_path, resume="auto", stop_at=stop_at)
        parts = app(one_worker, Cut, **settings)
        await parts.train_model()
    assert same_bits(parts, uninterrupted)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("kind", MODELS)
async def test_asynchronous_training_of_one_slot_continues_with_the_same_bits_on_another_worker(
    two_workers, tmp_path, kind
):
    """With several slots, the order of the updates depends on the speed of the workers. With one slot, it is always the same."""
    settings = dict(kind=kind, slots=1, master_epochs=3, mode="async")
    uninterrupted = app(two_workers.options(workers=[1]), Cut, **settings)
    await uninterrupted.train_model()
    for stop_at, worker in ((1, 1), (None, 2)):
        resuming = dict(checkpoint=tmp_path, resume="auto", stop_at=stop_at)
        parts = app(two_workers.options(workers=[worker]), Cut, **settings, **resuming)
        await parts.train_model()
    assert same_bits(parts, uninterrupted)


def test_the_table_of_stabilisers_names_existing_parts_of_keras_and_ddlf():
    import keras

    from ddlf.extras import stabilisers

    text = (Path(__file__).parents[3] / "docs/explanation/advice.md").read_text().partition("| Keras has it |")[2]
    rows = [line.split("|")[1:3] for line in text.splitlines()[2:] if line.startswith("|")]
    assert len(rows) > 10
    keras_modules = (keras.optimizers, keras.optimizers.schedules, keras.losses, keras.callbacks, keras)
    settings = {"schedule", "clip", "callbacks", "rate_decay"}
    assert settings <= set(SETTINGS)
    for kerass, ours in rows:
        for name in re.findall(r"`(?:schedules\.)?([A-Z]\w+)`", kerass):
            assert any(hasattr(module, name) for module in keras_modules), name
        for name in set(re.findall(r"`([A-Za-z_]+)(?:`|=)", ours)) - settings - {"lrm"}:
            assert hasattr(stabilisers, name), name
