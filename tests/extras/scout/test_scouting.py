"""Tests of searching a learning rate on real workers."""

import asyncio
import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError, DatasetError, LeaseError, RemoteError
from ddlf.extras.scout.scouting import scout
from ddlf.extras.scout.trials import RateFactor, highest_rate
from ddlf.training.slot.optimizers import read_optimizer
from tests.patience import PATIENCE_S
from tests.training.models import Blobs, Quick, app, blobs, compiled

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Loud(Blobs):
    """An app with hooks and callbacks that must not run.

    If ``crash`` is set, a worker crashes in its first trial of more than one batch.
    """

    callbacks = ("not a callback",)
    worker_callbacks = ("not a callback",)
    threads = 1
    crash = ""

    async def create_model(self):
        import keras

        await super().create_model()
        folder = Path(self.crash).parent
        self.callbacks = [keras.callbacks.CSVLogger(str(folder / "master.csv"))]
        self.worker_callbacks = [keras.callbacks.CSVLogger(str(folder / "worker.csv"))]

    def train(self, weights, worker_epochs, batch_size):
        if self.crash and len(self.indices) > batch_size and not Path(self.crash).exists():
            Path(self.crash).touch()
            os._exit(1)
        return super().train(weights, worker_epochs, batch_size)

    def on_round(self, record):
        raise AssertionError("a hook ran")

    is_convergent = on_event = on_round


def scores(scouted):
    """Return the answer without its time."""
    return dataclasses.replace(scouted, seconds=0.0)


@pytest.mark.slow
async def test_scores_have_the_same_bits_on_other_workers_and_after_a_loss(two_workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    searched = app(two_workers, Loud, crash=str(tmp_path / "crashed"))
    before = dict(vars(searched))
    scouted = await scout(searched, low=0.05, high=0.2, steps=40, say=messages.append)
    assert vars(searched).keys() - {"run_context"} == before.keys() - {"run_context"}
    assert [path.name for path in tmp_path.iterdir()] == ["crashed"]
    assert messages[0] == "2 rates, 1 start, 1 step each"
    assert scouted.trials == sum(int(line.split()[0]) * int(line.split()[2]) for line in messages)
    assert scouted.judged_by == "41 training samples, held out"
    assert scouted.verdict.own_rate == 0.05
    assert scouted.starts == (0, 1, 2)
    assert len({point.losses for point in scouted.curve.points}) == len(scouted.curve.points)
    assert json.loads(json.dumps(scouted.to_data()))["verdict"]["rate"] == scouted.verdict.rate
    alone = await scout(app(two_workers.options(workers=[2]), Loud), low=0.05, high=0.2, steps=40, say=messages.append)
    assert scores(alone) == scores(scouted)


class Slow(Blobs):
    """An app that keeps worker 2 in its first trial until worker 1 trains in a later rung."""

    threads = 1
    later = ""

    def train(self, weights, worker_epochs, batch_size):
        if self.later and self.worker.id == 1 and len(self.indices) > batch_size:
            Path(self.later).touch()
        elif self.later and self.worker.id == 2:
            end = time.monotonic() + PATIENCE_S
            while not Path(self.later).exists() and time.monotonic() < end:
                time.sleep(0.01)
        return super().train(weights, worker_epochs, batch_size)


@pytest.mark.slow
async def test_another_worker_repeats_the_trial_of_a_slow_one(two_workers, tmp_path):
    slow = app(two_workers, Slow, later=str(tmp_path / "later"))
    scouted = await scout(slow, low=0.05, high=0.2, steps=40)
    assert (tmp_path / "later").exists()
    usual = await scout(app(two_workers, Slow), low=0.05, high=0.2, steps=40)
    assert scores(usual) == scores(scouted)


async def test_workers_in_a_search_are_in_use(two_workers):
    begun = asyncio.Event()
    searching = asyncio.ensure_future(
        scout(app(two_workers), low=0.05, high=0.2, steps=40, say=lambda text: begun.set())
    )
    await begun.wait()
    with pytest.raises(LeaseError, match="is in another training run of this program"):
        await scout(app(two_workers))
    assert (await searching).verdict.own_rate == 0.05


async def test_a_rate_that_cannot_be_set_is_refused_before_the_first_trial(two_workers):
    messages: list[str] = []

    def refuse(rate):
        raise ConfigError(f"{rate:g} is set elsewhere")

    with pytest.raises(ConfigError, match=r"0\.05 is set elsewhere"):
        await scout(app(two_workers), low=0.05, high=0.2, steps=40, say=messages.append, check_own=refuse)
    assert messages == []


async def test_a_long_search_is_reported_after_its_first_rung(two_workers, monkeypatch):
    monkeypatch.setattr("ddlf.extras.scout.scouting.LONG_S", 0.0)
    messages: list[str] = []
    await scout(app(two_workers), low=0.05, high=0.2, say=messages.append)
    assert messages[0] == "2 rates, 1 start, 26 steps each"
    assert messages[1].startswith("about ")
    assert messages[1].endswith(" min in all; ddlf scout --steps N takes fewer steps, and less time")
    assert not any("about" in line for line in messages[2:])
    messages.clear()
    await scout(app(two_workers), low=0.05, high=0.2, steps=40, say=messages.append)
    assert not any("about" in line for line in messages)


@pytest.mark.parametrize("bounds", [{"low": 0.2, "high": 0.4}, {"high": 0.01}])
async def test_the_bounds_of_the_user_limit_the_answer(two_workers, bounds):
    scouted = await scout(app(two_workers), steps=200, **bounds)  # the rate of the app is 0.05
    low, high = scouted.bounds
    assert low <= scouted.verdict.low <= scouted.verdict.rate <= scouted.verdict.high <= high
    assert {point.rate for point in scouted.curve.points if not low <= point.rate <= high} == {0.05}
    assert not scouted.verdict.keeps


async def test_bounds_without_a_rate_that_learns_are_refused_although_the_apps_rate_learns(two_workers):
    with pytest.raises(ConfigError, match=r"no learning rate from 1e\+30 to 1e\+32 .* Yours, 0\.05, lowers it; search"):
        await scout(app(two_workers), low=1e30, high=1e32, steps=20)


class WithoutTest(Blobs):
    """An app without test data, with losses below 0. A larger value of its metric is better."""

    async def load_dataset(self):
        await super().load_dataset()
        del self.x_test, self.y_test

    async def create_model(self):
        import keras

        await super().create_model()
        self.model.compile(keras.optimizers.SGD(0.05), keras.losses.CosineSimilarity(), metrics=["cosine_similarity"])


async def test_a_search_needs_no_test_data_and_accepts_losses_below_zero(two_workers):
    scouted = await scout(app(two_workers, WithoutTest), low=0.01, high=1.0, steps=200)
    assert scouted.judged_by == "41 training samples, held out"
    least = min(point.loss for point in scouted.curve.longest)
    assert least < max(scouted.curve.first) < 0
    assert scouted.curve.point_of(scouted.verdict.best).loss == least


class Validated(Blobs):
    async def load_dataset(self):
        await super().load_dataset()
        self.x_val, self.y_val = blobs(50, seed=2)


async def test_validation_data_compare_rates_and_broken_starts_are_left_out(two_workers, monkeypatch):
    broken = iter(["", "70% of 'dense' is 0", "", ""])
    monkeypatch.setattr("ddlf.extras.scout.scouting.hooks", lambda name: [lambda app: lambda weights: next(broken)])
    scouted = await scout(app(two_workers, Validated), low=0.01, high=1.0, steps=50)
    assert scouted.judged_by == "validation data"
    assert scouted.starts == (0, 2, 3)
    assert scouted.broken == ((1, "70% of 'dense' is 0"),)
    monkeypatch.setattr(
        "ddlf.extras.scout.scouting.hooks", lambda name: [lambda app: lambda weights: "no unit is alive"]
    )
    with pytest.raises(AppError, match="each of 6 starts is broken, such as that of seed 0: no unit is alive"):
        await scout(app(two_workers, Validated))


async def test_a_check_of_starts_does_not_change_their_weights(two_workers, monkeypatch):
    def check(app):
        def change(weights):
            app.model.set_weights([array + 1 for array in weights])
            return ""

        return change

    searches = []
    for checks in ([], [check]):
        monkeypatch.setattr("ddlf.extras.scout.scouting.hooks", lambda name, checks=checks: checks)
        searches.append(await scout(app(two_workers, norm=True), low=0.05, high=0.2, steps=20))
    assert scores(searches[0]) == scores(searches[1])


class Undefined(Blobs):
    async def load_dataset(self):
        await super().load_dataset()
        self.x_train[:] = np.nan


class PartlyUndefined(Validated):
    async def load_dataset(self):
        await super().load_dataset()
        self.x_train[[7, 150], 1] = np.inf


class Overflowing(Blobs):
    async def create_model(self):
        await super().create_model()
        self.model.set_weights([np.full_like(array, np.nan) for array in self.model.get_weights()])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Undefined, {}, "x_train has NaN or an infinite value, first in sample 0"),
        (PartlyUndefined, {}, "x_train has NaN or an infinite value, first in sample 7, so no learning rate helps"),
        (Overflowing, {}, "the loss of the untrained model is nan, so no learning rate helps"),
        (Quick, {}, "a learning rate has no effect: train made no step with self.model.optimizer"),
        (Blobs, {"mode": "lbfgs"}, "with mode='lbfgs' no worker trains alone"),
        (Blobs, {"private": True}, "trials compare rates on the same samples"),
        (
            Blobs,
            {"learning_rate": 1e31},
            r"no learning rate from 1e\+30 to 1e\+32 lowers the loss of the untrained model, .*; training diverged with.* ddlf advise .*models\.py",
        ),
    ],
)
async def test_apps_without_a_rate_to_search_are_refused(two_workers, kind, settings, message):
    with pytest.raises((ConfigError, AppError, DatasetError, RemoteError), match=message):
        await scout(app(two_workers, kind, **settings), low=1e30, high=1e32, steps=20)


def _multi(keras):
    first, second = keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(lambda variable: first if "kernel" in variable.path else second)


OPTIMIZERS = {
    "number": lambda keras: keras.optimizers.SGD(0.1),
    "schedule": lambda keras: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "scaled loss": lambda keras: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "several": _multi,
}


class Optimized(Blobs):
    """An app with the optimizer of the given name."""

    kind = ""

    async def create_model(self):
        import keras

        self.model = compiled(optimizer=OPTIMIZERS[self.kind](keras))


@pytest.mark.parametrize(
    "name", ["number", "schedule", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scaled loss", "several"))]
)
async def test_the_highest_rate_of_each_kind_of_optimizer_is_searched(two_workers, name):
    scouted = await scout(app(two_workers, Optimized, kind=name), low=0.05, high=0.2, steps=30)
    assert scouted.verdict.own_rate == pytest.approx(0.1)
    assert scouted.is_scaled == (name in ("schedule", "several"))


@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_a_factor_multiplies_all_rates_of_a_model(name):
    import keras

    model = compiled(optimizer=OPTIMIZERS[name](keras))
    model.optimizer.build(model.trainable_variables)
    x, y = blobs(16)
    before = model.get_weights()
    assert highest_rate(model, 10) == pytest.approx(0.1)

    def moved(factor, warm=0):
        """Return the distance of one step from the first weights."""
        model.set_weights(before)
        for optimizer in getattr(model.optimizer, "optimizers", [model.optimizer]):
            getattr(optimizer, "inner_optimizer", optimizer)._iterations.assign(0)
        rates.set(factor, warm)
        model.train_on_batch(x, y)
        return [start - end for start, end in zip(before, model.get_weights(), strict=True)]

    variables = len(model.optimizer.variables)
    rates = RateFactor(model)
    assert len(read_optimizer(model)) == variables
    for factor, warm, times in ((2.0, 0, 2.0), (0.0, 0, 0.0), (1.0, 4, 0.25)):
        for full, scaled in zip(moved(1.0), moved(factor, warm), strict=True):
            np.testing.assert_allclose(times * full, scaled, rtol=1e-3, atol=1e-6)
