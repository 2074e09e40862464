"""Tests of the short form of ``benchmarks.plan_cost``."""

import contextlib
import dataclasses

import pytest

from benchmarks import plan_cost
from benchmarks.plan_cost import Cost, leaves_nothing, measured
from ddlf.errors import ConfigError
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
        {"memory": (100, 211)},
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
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.1)
    monkeypatch.setattr(plan_cost, "SAMPLES", 4_000)
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    alone = await measured("mlp", [])
    for _ in range(5):
        room = iter((True,) * 4)
        monkeypatch.setattr(Budget, "has_room", lambda budget, needed, room=room: next(room, False))
        with contextlib.suppress(ConfigError):  # on a busy machine, so few rounds may not show how long a step takes
            planned = await measured("mlp", [60 * PATIENCE_S] * 2)  # long enough for a slow machine
            break
    assert leaves_nothing(planned, alone), (planned, alone)
