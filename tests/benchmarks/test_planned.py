"""Tests of the short form of ``benchmarks.planned``."""

import asyncio
import math

import pytest

from benchmarks import planned
from ddlf.extras.planner.probe import Budget


@pytest.mark.usefixtures("one_template")
def test_predictions_are_shown_beside_measured_rounds(few_digits, monkeypatch, capsys):
    room = iter((True,) * 5)  # without memory
    monkeypatch.setattr(Budget, "has_room", lambda budget, needed: next(room, False))
    monkeypatch.setattr("ddlf.extras.planner.planning.LEAST_S", math.inf)
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.01)
    monkeypatch.setattr(planned, "SAMPLES", 2_000)
    monkeypatch.setattr(planned, "WAYS", planned.WAYS[:1])
    monkeypatch.setenv("DDLF_DATA", str(few_digits))
    planned.main(["--settings", "2", "--repeats", "1", "--models", "mlp", "--budget", "600"])
    assert "2 settings: median error" in capsys.readouterr().out


def test_settings_are_drawn_by_their_seed():
    drawn = planned.drawn(48, list(planned.MODELS), 1)
    assert drawn == planned.drawn(48, list(planned.MODELS), 1) != planned.drawn(48, list(planned.MODELS), 2)
    assert {setting.slots for _, setting in drawn} == {1, 2}
    assert len(set(drawn)) == 48
    assert all(setting.samples <= planned.SAMPLES for _, setting in drawn)


@pytest.mark.parametrize(("app", "parameters"), [("mlp", 39_760), ("lstm", 81_674)])
def test_models_of_the_study_have_its_size(app, parameters, few_digits, monkeypatch):
    monkeypatch.setenv("DDLF_DATA", str(few_digits))
    study_app = planned.MODELS[app](None)
    asyncio.run(study_app.create_model())
    assert study_app.model.count_params() == parameters
