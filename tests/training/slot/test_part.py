"""Tests of a new part of a slot's state: one class in the list is enough for worker, master, checkpoints and moves."""

import numpy as np
import pytest

from ddlf.algorithms.local_rules import Scaffold
from ddlf.errors import AppError, ConfigError, ProtocolError
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training import refusals
from ddlf.training.callbacks import checks
from ddlf.training.refusals import check_spec
from ddlf.training.registry import EXCHANGES, STRATEGIES, spec_of
from ddlf.training.slot import parts
from ddlf.training.slot.parts import PARTS, Kept, SlotPart, SlotPlan, SlotRound, kept_parts
from ddlf.training.slot.replica import Replica


class Rounds(SlotPart):
    """Counts the rounds of a slot, and adds the count to the first weight, so that the result depends on it."""

    name = "rounds"
    back = False

    def __init__(self, app, model):
        self.done = 0

    def begin(self, round: SlotRound, weights, left):
        self.done = int(left[0]) if left else 0
        return [weights[0] + np.float32(self.done), *weights[1:]]

    def end(self, round: SlotRound, update):
        return update, [np.asarray(self.done + 1)]

    @classmethod
    def retention(cls, plan):
        return Kept(back=cls.back)

    @classmethod
    def check(cls, left, like, worker):
        if left[0] < 1:
            raise ProtocolError("has counted wrongly", worker=worker)


@pytest.fixture(params=[True, False], ids=["back", "stays"])
def counted(request, monkeypatch):
    """Add a part to the list. It returns with each reply, or stays on the worker."""
    monkeypatch.setattr(Rounds, "back", request.param)
    for module in (parts, Replica):
        monkeypatch.setattr(module, "PARTS", (*parts.PARTS, Rounds))


def rounds(run):
    return [int(state["rounds"][0]) for state in run.run_context.progress.states]


async def trained(workers=2, **settings):
    run = FakeRun(FakeCluster(workers), slots=3, **{"master_epochs": 4, **settings})
    await run.train_model()
    return run


async def test_a_new_part_stays_with_its_slot_from_round_to_round(counted):
    run = await trained()
    assert rounds(run) == [4, 4, 4]


async def test_a_new_part_moves_with_its_slot_to_another_worker(counted):
    one_worker, two_workers = await trained(workers=1), await trained(workers=2)
    for a, b in zip(one_worker.model.get_weights(), two_workers.model.get_weights(), strict=True):
        assert np.array_equal(a, b)


async def test_a_new_part_is_in_checkpoints(counted, tmp_path):
    uninterrupted = await trained()
    await trained(master_epochs=2, checkpoint=tmp_path)
    resumed = await trained(checkpoint=tmp_path, resume="auto")
    assert rounds(resumed) == [4, 4, 4]
    assert np.array_equal(resumed.model.get_weights()[0], uninterrupted.model.get_weights()[0])


async def test_a_new_part_is_checked_when_it_returns(monkeypatch, counted):
    monkeypatch.setattr(Rounds, "end", lambda self, round, update: (update, [np.asarray(0)]))
    if Rounds.back:
        with pytest.raises(ProtocolError, match="has counted wrongly"):
            await trained()
    else:
        await trained()


class Average(Rounds):
    """A part that slots keep with any schedule. Strategies and exchanges that are older than it do not know it."""

    name = "average"
    setting = "schedule"

    @classmethod
    def retention(cls, plan):
        return Kept(back=True) if plan.spec.local.schedule else None


@pytest.mark.parametrize(
    ("settings", "context"),
    [({"mode": "downpour"}, "in Downpour training"), ({"exchange": "gradient"}, "with exchange='gradient'")],
)
def test_strategies_and_exchanges_refuse_a_new_part_that_they_do_not_use_by_its_setting(monkeypatch, settings, context):
    for module in (parts, refusals):
        monkeypatch.setattr(module, "PARTS", (*PARTS, Average))
    app = FakeRun(**settings)
    check_spec(spec_of(app))
    app.schedule = "cosine"
    message = f"schedule='cosine:least=0.0' has no effect {context}: slots do not keep the part 'average'"
    with pytest.raises(ConfigError, match=message):
        check_spec(spec_of(app))
    assert "average" not in kept_parts(SlotPlan(spec=spec_of(app)))
    assert "average" in kept_parts(SlotPlan(spec=spec_of(FakeRun(schedule="cosine"))))


@pytest.mark.parametrize("kind", [*STRATEGIES.values(), *EXCHANGES.values()])
def test_strategies_and_exchanges_name_only_parts_that_exist(kind):
    assert {*(kind.slot_parts or ())} <= {part.name for part in PARTS}


@pytest.mark.parametrize(
    ("part", "value", "keeps"),
    [
        (Average, None, False),
        (Average, "none", False),
        (Average, "cosine", True),
        (parts.Controls, "fedprox:mu=0.01", False),
        (parts.Controls, Scaffold(), True),
        (parts.OwnFragments, None, False),
        (parts.OwnFragments, "streaming", True),
        (parts.LocalBatchNorm, "recalibrated", False),
        (parts.LocalBatchNorm, "local", True),
    ],
)
def test_a_part_names_the_values_of_its_setting_with_which_slots_keep_it(part, value, keeps):
    assert part.kept_with(value) is keeps


def test_backup_and_restore_is_refused_with_the_setting_of_a_new_part(monkeypatch, tmp_path):
    import keras

    monkeypatch.setattr(checks, "PARTS", (*PARTS, Average))
    app = FakeRun(callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    checks.check(app)
    app.schedule = "cosine"
    with pytest.raises(AppError, match="only, but with schedule='cosine' each slot keeps more"):
        checks.check(app)
