"""Tests of the short form of ``benchmarks.plan_cost``."""

import dataclasses

import pytest

from benchmarks import plan_cost
from benchmarks.plan_cost import Cost, leaves_nothing, measured
from ddlf.extras.planner.probe import Budget
from tests.mnist import folder_with_mnist
from tests.patience import PATIENCE_S

ALONE = Cost(plans=(), sha256="a", memory=(100, 200), files=())
PLANNED = Cost(plans=(30.0, 0.1), sha256="a", memory=(104, 191), files=("state/ddlf/plans/1f.json",))


@pytest.mark.parametrize(
    "more",
    [
        {"sha256": "b"},
        {"memory": (106, 200)},
        {"memory": (100, 189)},
        {"files": ()},
        {"files": (*PLANNED.files, "here/model.keras")},
        {"files": ("tmp/x",)},
    ],
)
def test_each_trace_of_a_plan_is_noticed(more):
    assert leaves_nothing(PLANNED, ALONE)
    assert not leaves_nothing(dataclasses.replace(PLANNED, **more), ALONE)


async def test_a_training_after_a_plan_has_the_same_bits_and_memory_and_no_new_file(
    one_template, monkeypatch, tmp_path
):
    room = iter((True,) * 4)
    monkeypatch.setattr(Budget, "has_room", lambda budget, needed: next(room, False))
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.01)
    monkeypatch.setattr(plan_cost, "SAMPLES", 2_000)
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    alone = await measured("mlp", [])
    planned = await measured("mlp", [60 * PATIENCE_S] * 2)  # long enough for a slow machine
    assert leaves_nothing(planned, alone), (planned, alone)
