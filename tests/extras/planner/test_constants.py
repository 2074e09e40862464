"""Tests of measured times instead of the assumed 1 Gbit/s: in ``exchange="auto"``, and in the adviser's rule C12."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddlf.events import ExchangeChosen
from ddlf.extras.advice.rule import check_rules, find_rule
from ddlf.extras.advice.rules import RULES
from ddlf.extras.planner import measurement_files
from ddlf.extras.planner.constants import Constants, measured_rounds
from ddlf.extras.planner.measurement_files import Measurements, write
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.worker.status import ExecutorInfo
from tests.extras.advice.cases import ROUNDS, hidden
from tests.training.models import Quick
from tests.training.runs import events_of
from tests.training.test_sharded import trained

STAR, SHARDED = Way("sync", "star", "float32"), Way("sync", "sharded", "float32")
WHEN = 1767268800.0  # 2026-01-01, at noon in UTC


def measured(*exchanges):
    """Return measured rounds with steps of 10 ms and slow exchanges, which take longer for each slot."""
    return tuple(
        Measured(
            setting=Setting(way=way, slots=slots, batch=64, steps=steps),
            seconds=(steps * 0.01 + constant + per_slot * slots,) * 3,
        )
        for way, constant, per_slot in exchanges
        for slots in (1, 2)
        for steps in (1, 50)
    )


def test_the_times_of_an_app_come_from_its_plan(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(measurement_files, "state_folder", lambda: tmp_path)
    executor = ExecutorInfo(host="pc01", cores=2, python="3.12.1")
    cluster = SimpleNamespace(workers=[SimpleNamespace(executor=executor)] * 2)
    app = Quick(cluster)
    assert measured_rounds(app, None) is measured_rounds(app, cluster) is None
    write(app, Measurements(measured=measured((STAR, 0.1, 0.2)), samples=1000, budget_s=30.0, when=WHEN))
    times = measured_rounds(Quick(), cluster)
    assert times.step_s(64) == pytest.approx(0.01)
    assert times.exchange_s("sync", "star", "float32", 4) == pytest.approx(0.9)
    assert times.exchange_s("sync", "sharded", "float32", 4) is None
    assert times.origin == "as ddlf plan has measured on 2026-01-01"
    assert measured_rounds(Quick(), object()) is None
    assert "the measurements of the plan cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("exchanges", "exchange", "reason"),
    [
        ([(STAR, 0.1, 0.2)], "sharded", "takes about 0.6 s through the master and 0.18 s from worker to worker"),
        ([(STAR, 9.0, 0.01)], "star", "takes about 0.03 s through the master and 0.057 s"),
        ([(STAR, 0.1, 0.2), (SHARDED, 0.9, 0.0)], "star", "takes about 0.7 s through the master and 0.9 s"),
        ([(SHARDED, 0.9, 0.0)], "star", "at 1 Gbit/s, which is assumed: ddlf plan measures it"),
    ],
)
async def test_auto_uses_measured_times_and_reports_it(monkeypatch, exchanges, exchange, reason):
    constants = Constants(TimeModel(measured(*exchanges)), WHEN)
    monkeypatch.setattr("ddlf.extras.measured_rounds", lambda app, cluster: constants)
    run = await trained("auto", workers=3, slots=3, master_epochs=1)
    (chosen,) = events_of(run, ExchangeChosen)
    assert chosen.exchange == exchange
    assert reason in chosen.why
    assert ("as ddlf plan has measured on 2026-01-01" in chosen.why) == ("assumed" not in reason)


def test_the_rule_about_slow_workers_uses_measured_times():
    rule = find_rule(RULES, "C12", "")
    facts = replace(hidden(trained=3_000_000), **ROUNDS, workers=2)

    def messages(**values):
        return [advice.finding.message for advice in check_rules([rule], replace(facts, observations=values))[0]]

    assert messages(step_s=0.05) == []
    (message,) = messages(step_s=0.05, planned=(0.05, 99.0, "as ddlf plan has measured on 2026-01-01"))
    assert "which takes 99 s as ddlf plan has measured on 2026-01-01: one process" in message
    assert messages(step_s=1e-6, planned=(0.05, 0.01, "")) == []
