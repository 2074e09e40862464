"""A new part of a slot is one class in the list: worker, master, checkpoints and moves between workers then know it."""

import numpy as np
import pytest

from ddlf.errors import ProtocolError
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training.slot import parts
from ddlf.training.slot.parts import Kept, SlotPart, SlotRound
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
    def kept(cls, plan):
        return Kept(back=cls.back)

    @classmethod
    def check(cls, left, like, worker):
        if left[0] < 1:
            raise ProtocolError("has counted wrongly", worker=worker)


@pytest.fixture(params=[True, False], ids=["back", "stays"])
def counted(request, monkeypatch):
    """The parts with one more, which comes back with each reply or stays on the worker."""
    monkeypatch.setattr(Rounds, "back", request.param)
    for where in (parts, Replica):
        monkeypatch.setattr(where, "PARTS", (*parts.PARTS, Rounds))


def rounds(run):
    return [int(state["rounds"][0]) for state in run.run_context.progress.states]


async def trained(workers=2, **settings):
    run = FakeRun(FakeCluster(workers), slots=3, **{"master_epochs": 4, **settings})
    await run.train_model()
    return run


async def test_a_new_part_goes_with_its_slot_from_round_to_round(counted):
    run = await trained()
    assert rounds(run) == [4, 4, 4]


async def test_a_new_part_moves_with_its_slot_to_another_worker(counted):
    alone, among = await trained(workers=1), await trained(workers=2)
    for one, other in zip(alone.model.get_weights(), among.model.get_weights(), strict=True):
        assert np.array_equal(one, other)


async def test_a_new_part_is_in_checkpoints(counted, tmp_path):
    whole = await trained()
    await trained(master_epochs=2, checkpoint=tmp_path)
    resumed = await trained(checkpoint=tmp_path, resume="auto")
    assert rounds(resumed) == [4, 4, 4]
    assert np.array_equal(resumed.model.get_weights()[0], whole.model.get_weights()[0])


async def test_a_new_part_is_checked_when_it_comes_back(monkeypatch, counted):
    monkeypatch.setattr(Rounds, "end", lambda self, round, update: (update, [np.asarray(0)]))
    if Rounds.back:
        with pytest.raises(ProtocolError, match="has counted wrongly"):
            await trained()
    else:
        await trained()
