"""Tests of the measurements that are kept between commands."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.extras.planner import measurement_files
from ddlf.extras.planner.fingerprints import data_of, files_of
from ddlf.extras.planner.measurement_files import Measurements, path_of, read, write
from ddlf.extras.planner.model import Measured, Setting, Way
from ddlf.worker.status import ExecutorInfo
from tests.training.models import Quick

STAR, INT8 = Way("sync", "star", "float32"), Way("sync", "star", "int8")


def measured(way, batch, seconds=(0.1, 0.2), **more):
    setting = Setting(way=way, slots=2, batch=batch, steps=10)
    return Measured(setting=setting, seconds=seconds, computing=(0.05, 0.1), sent=8e3, **more)


KEPT = Measurements(
    measured=(measured(STAR, 64), measured(STAR, 128)), samples=1000, budget_s=30.0, batch_parts=2, when=1e9
)


@pytest.fixture(autouse=True)
def own_plans(monkeypatch, tmp_path):
    monkeypatch.setattr(measurement_files, "state_folder", lambda: tmp_path)


def an_app(kind=Quick, cores=2, host="pc01", **settings):
    workers = [SimpleNamespace(executor=ExecutorInfo(host=host, cores=cores, python="3.12.1"))] * 2
    app = kind(SimpleNamespace(workers=workers, N=2))
    for name, value in settings.items():
        setattr(app, name, value)
    return app


def test_measurements_are_read_again():
    assert read(an_app()) is None
    assert write(an_app(), KEPT)
    assert read(an_app()) == KEPT


def test_settings_that_are_compared_or_do_not_change_rounds_share_measurements():
    write(an_app(), KEPT)
    assert read(an_app(slots=1, batch_size=64, codec="int8", mode="async", master_epochs=9, out="elsewhere")) == KEPT


class Other(Quick):
    """An app of another class."""


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
    monkeypatch.setattr(measurement_files, "__version__", "9.9.9")
    assert read(an_app()) is None


def test_a_damaged_file_is_ignored():
    write(an_app(), KEPT)
    path_of(an_app()).write_text('{"measured": [{}]}')
    assert read(an_app()) is None


def test_an_app_without_a_source_file_or_with_a_missing_worker_is_not_kept():
    app = an_app(type("Typed", (Quick,), {"__module__": "typed_in"}))
    assert path_of(app) is None
    assert not write(app, KEPT)
    app = an_app()
    app.cluster.workers[0].executor = ExecutorInfo()
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
def test_measurements_are_reused_for_the_same_request(ways, batches, budget_s, answers):
    assert KEPT.answers(ways, batches, budget_s) == answers


def test_the_newest_runs_of_a_setting_replace_its_measurements():
    stored = KEPT
    for seconds in (1.0, 2.0, 3.0, 4.0):
        stored = stored.refined(measured(STAR, 64, (seconds,) * 3))
    assert [item.setting.batch for item in stored.measured] == [128, 64, 64, 64]
    assert [item.median for item in stored.measured[1:]] == [2.0, 3.0, 4.0]
    assert [item.weight for item in stored.measured] == [
        1.0,
        measurement_files.OF_A_RUN,
        measurement_files.OF_A_RUN,
        measurement_files.OF_A_RUN,
    ]
    write(an_app(), stored)
    assert read(an_app()) == stored
    for batch in range(1, 50):
        stored = stored.refined(measured(STAR, batch, (1.0,) * 999))
    assert len(stored.measured) == measurement_files.MOST_RUNS + 2  # two more: a short measurement and the newest run
    assert len(stored.measured[-1].seconds) == measurement_files.MOST_ROUNDS


def loaded(**arrays):
    app = an_app()
    app.run_context.created = {name: (array,) for name, array in arrays.items()}
    vars(app).update(arrays)
    return app


X, Y = np.arange(1000.0).reshape(500, 2), np.arange(500)


@pytest.mark.parametrize(
    "other",
    [
        {"x_train": X[:-1], "y_train": Y[:-1]},
        {"x_train": X.astype("float32"), "y_train": Y},
        {"x_train": X.reshape(500, 1, 2), "y_train": Y},
        {"x_train": X + 1, "y_train": Y},
        {"x_train": X, "y_train": Y[::-1]},
        {"x_train": {"a": X}, "y_train": Y},
        {"x_train": X, "y_train": Y, "w_train": Y},
    ],
)
def test_changed_data_are_noticed_when_they_are_loaded(other):
    same = loaded(x_train=X.copy(), y_train=Y.copy())
    write(an_app(), replace(KEPT, data=data_of(same)))
    assert read(an_app()) is not None  # the app has not loaded its data yet
    assert read(same) is not None
    assert read(loaded(**other)) is None


def test_a_changed_file_beside_the_app_is_noticed(monkeypatch, tmp_path):
    (tmp_path / "its_app.py").write_text("import its_helper\nimport ddlf\nclass Own(ddlf.IApp):\n    pass\n")
    (tmp_path / "its_helper.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    app = an_app(importlib.import_module("its_app").Own)
    files = files_of(app)
    assert {Path(file).name for file in files} == {"its_app.py", "its_helper.py"}
    write(app, replace(KEPT, files=files))
    assert read(app).files == files
    (tmp_path / "its_helper.py").write_text("x = 1")
    assert read(app) is None


def test_another_text_of_the_model_has_its_own_measurements(tmp_path):
    text = tmp_path / "a.nnm"
    text.write_text("one")
    write(an_app(notation=str(text)), KEPT)
    assert read(an_app(notation=str(text))) == KEPT
    text.write_text("two")
    assert read(an_app(notation=str(text))) is None
