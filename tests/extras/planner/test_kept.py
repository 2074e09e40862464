"""Measurements that are kept between commands."""

from types import SimpleNamespace

import pytest

from ddlf.extras.planner import kept
from ddlf.extras.planner.kept import Kept, path_of, read, write
from ddlf.extras.planner.model import Measured, Setting, Way
from tests.training.models import Quick

STAR, INT8 = Way("sync", "star", "float32"), Way("sync", "star", "int8")


def measured(way, batch):
    setting = Setting(way=way, slots=2, batch=batch, steps=10)
    return Measured(setting=setting, seconds=(0.1, 0.2), computing=(0.05, 0.1), sent=8e3)


KEPT = Kept(measured=(measured(STAR, 64), measured(STAR, 128)), samples=1000, budget_s=30.0, when=1e9)


@pytest.fixture(autouse=True)
def own_plans(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "state_folder", lambda: tmp_path)


def an_app(kind=Quick, cores=2, host="pc01", **settings):
    workers = [SimpleNamespace(facts={"host": host, "cores": cores, "gpus": [], "python": "3.12.1"})] * 2
    app = kind(SimpleNamespace(workers=workers, N=2))
    for name, value in settings.items():
        setattr(app, name, value)
    return app


def test_measurements_are_read_again():
    assert read(an_app()) is None
    assert write(an_app(), KEPT)
    assert read(an_app()) == KEPT


def test_settings_that_are_compared_or_change_no_round_use_the_same_measurements():
    write(an_app(), KEPT)
    assert read(an_app(slots=1, batch_size=64, codec="int8", mode="async", master_epochs=9, out="elsewhere")) == KEPT


class Other(Quick):
    """Another app."""


@pytest.mark.parametrize(
    "other",
    [
        {"cores": 4},
        {"host": "pc02"},
        {"kind": Other},
        {"width": 64},
        {"optimizer_state": "fresh"},
        {"threads": 1},
    ],
)
def test_other_workers_apps_parameters_and_settings_have_their_own_measurements(other):
    write(an_app(), KEPT)
    assert read(an_app(**other)) is None


def test_another_version_has_its_own_measurements(monkeypatch):
    write(an_app(), KEPT)
    monkeypatch.setattr(kept, "__version__", "9.9.9")
    assert read(an_app()) is None


def test_a_damaged_file_counts_as_none():
    write(an_app(), KEPT)
    path_of(an_app()).write_text('{"measured": [{}]}')
    assert read(an_app()) is None


def test_an_app_without_a_source_file_or_with_a_missing_worker_is_not_kept():
    app = an_app(type("Typed", (Quick,), {"__module__": "typed_in"}))
    assert path_of(app) is None
    assert not write(app, KEPT)
    app = an_app()
    app.cluster.workers[0].facts = {}
    assert read(app) is None


@pytest.mark.parametrize(
    ("ways", "batches", "budget_s", "answers"),
    [
        ([STAR], [64], 60.0, True),
        ([STAR], [64, 128], 60.0, True),
        ([STAR], [64, 256], 30.0, False),
        ([INT8], [64], 30.0, False),
        ([STAR, INT8], [64], 30.0, True),  # a new plan would not have more time
        ([STAR, INT8], [64], 60.0, False),
    ],
)
def test_measurements_answer_what_they_measured(ways, batches, budget_s, answers):
    assert KEPT.answers(ways, batches, budget_s) == answers
