"""Tests of runs that follow a plan, without workers: the cluster is a list of facts."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from ddlf.errors import ConfigError
from ddlf.events import Decided
from ddlf.extras.planner import measurement_files, watch
from ddlf.extras.planner.measurement_files import Measurements, write
from ddlf.extras.planner.model import Measured, Setting, Way
from ddlf.extras.planner.planned import check_settings, choose_settings, preview_plan
from ddlf.worker.status import ExecutorInfo
from tests.training.models import Quick

STAR, INT8, GRADIENT = Way("sync", "star", "float32"), Way("sync", "star", "int8"), Way("sync", "gradient", "float32")


@pytest.fixture(autouse=True)
def own_plans(monkeypatch, tmp_path):
    monkeypatch.setattr(measurement_files, "state_folder", lambda: tmp_path)


class Apart(Quick):
    codec = "float32"
    planned = True
    batch_size = 64

    async def connect(self):
        """Do nothing, because there are no workers."""


EXECUTOR = ExecutorInfo(host="pc01", cores=2, python="3.12.1")


def an_app(**settings):
    app = Apart(SimpleNamespace(workers=[SimpleNamespace(executor=EXECUTOR)] * 2, N=2))
    vars(app).update(settings)
    return app


def measured(way, slots, steps, exchange):
    """Return measured rounds with steps of 10 ms and this time of exchange for each slot."""
    setting = Setting(way=way, slots=slots, batch=64, steps=steps)
    return Measured(setting=setting, seconds=(steps * 0.01 + slots * exchange,) * 3)


def keep(wander=1.0, files=None, **exchanges):
    """Store a plan with these seconds for the exchange of a slot. Every third measurement takes longer by a factor."""
    ways = {"star": STAR, "int8": INT8, "gradient": GRADIENT}
    rounds = [
        measured(ways[name], slots, steps, exchange)
        for name, exchange in exchanges.items()
        for slots in (1, 2)
        for steps in ((1,) if name == "gradient" else (1, 50))
    ]
    rounds[::3] = [
        dataclasses.replace(item, seconds=tuple(wander * seconds for seconds in item.seconds)) for item in rounds[::3]
    ]
    assert write(an_app(), Measurements(measured=tuple(rounds), samples=64_000, budget_s=30.0, files=files or {}))


async def chosen(app):
    events = []
    app.subscribe(events.append)
    await choose_settings(app)
    return events


@pytest.mark.parametrize(
    ("exchanges", "settings", "decision"),
    [
        ({"star": 0.1, "int8": 0.05}, (2, "sync", "star", "int8"), "--slots 2 --codec int8"),
        ({"star": 0.1, "gradient": 1e-4}, (2, "sync", "gradient", "float32"), "--slots 2 --exchange gradient"),
        ({"star": 99.0}, (1, "sync", "star", "float32"), "--slots 1"),
    ],
)
async def test_the_best_choice_is_used_and_reported(exchanges, settings, decision):
    keep(**exchanges)
    app = an_app()
    (decided,) = await chosen(app)
    assert isinstance(decided, Decided)
    assert (app.slots, app.mode, app.exchange, app.codec) == settings
    assert (decided.key, decided.value, decided.rule) == ("run", decision, "planned")
    assert "times as fast as fit on one machine" in decided.why
    assert await chosen(app) == []
    keep(star=0.001)  # another plan does not change an app that has its settings
    assert await chosen(app) == []
    assert app.exchange == settings[2]


async def test_an_unclear_choice_is_not_used_and_reported():
    keep(star=0.1, int8=0.05, wander=2.0)
    app = an_app(mode="sync")
    (decided,) = await chosen(app)
    assert (app.slots, app.mode, app.codec) == (None, "sync", "float32")
    assert decided.value == "with its own settings"
    assert decided.why.startswith("--slots 2 --codec int8 is ")
    assert decided.why.endswith(", which is unclear: plan with more time (--budget 2m), or on idle machines")
    assert await chosen(app) == []


async def test_an_unclear_choice_that_is_certainly_faster_than_the_app_is_used(monkeypatch):
    keep(star=0.1, gradient=60.0, wander=2.0)
    monkeypatch.setattr(Apart, "exchange", "gradient")
    app = an_app()
    (decided,) = await chosen(app)
    assert (app.exchange, decided.value) == ("star", "--slots 1")
    assert decided.why.endswith("), unclear, but surely faster than your settings")


async def test_a_changed_file_is_named(tmp_path):
    (tmp_path / "helper.py").write_text("x = 1")
    keep(star=0.1, files={str(tmp_path / "helper.py"): "another hash"})
    with pytest.raises(ConfigError, match=r"helper.py has changed since the plan of Apart; plan again: ddlf plan \S+"):
        await chosen(an_app())


@pytest.mark.parametrize(
    ("exchanges", "settings", "printed"),
    [
        ({"star": 0.1, "int8": 0.05}, {}, r"--slots 2 --codec int8: 1\.\d+ times as fast as fit .*, pays off"),
        (
            {"star": 0.1, "int8": 0.05, "wander": 2.0},
            {},
            "with its own settings: --slots 2 --codec int8 is .*, which is unclear: plan with more time .*",
        ),
        ({"star": 0.1}, {"planned": False}, r"pays off: --slots 2 is .*\); --planned trains as the plan says"),
        (
            {},
            {"planned": False},
            r"none yet, which would say whether these workers pay; make one: ddlf plan \S+, or await app.plan\(\)",
        ),
        ({"star": 0.1}, {"planned": False, "mode": "downpour"}, ""),
        ({"star": 0.1}, {"private": True}, ""),
    ],
)
async def test_a_dry_run_prints_the_effect_of_the_plan(exchanges, settings, printed):
    if exchanges:
        keep(**exchanges)
    app = an_app(**settings)
    before = {name: value for name, value in vars(app).items() if name != "run_context"}
    assert re.fullmatch(printed, preview_plan(app, [EXECUTOR, EXECUTOR]))
    assert {name: value for name, value in vars(app).items() if name != "run_context"} == before


def test_a_dry_run_is_refused_like_the_run_if_the_workers_are_known():
    with pytest.raises(ConfigError, match="there is no plan of Apart"):
        preview_plan(an_app(), [EXECUTOR, EXECUTOR])
    assert preview_plan(an_app(), [EXECUTOR, ExecutorInfo()]).startswith("unknown, because it belongs to the workers")
    assert preview_plan(an_app(planned=False), [ExecutorInfo(), ExecutorInfo()]) == ""


@pytest.mark.parametrize(
    ("settings", "message"), [({"resume": "auto"}, "no effect with resume"), ({"mode": "downpour"}, "no model of time")]
)
async def test_settings_without_a_plan_are_refused_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        await an_app(**settings).run_context.check()
    await check_settings(an_app())


@pytest.mark.parametrize("settings", [{"planned": False}, {"private": True}])
async def test_an_app_without_a_planned_setting_or_common_data_keeps_its_settings(settings):
    keep(star=0.1, int8=0.01)
    app = an_app(**settings)
    assert await chosen(app) == []
    assert (app.slots, app.codec) == (None, "float32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 1}, "slots=1 contradicts planned=True, which takes slots=2; leave one of them out"),
        (
            {"batch_size": 32},
            r"there is no plan of Apart with sync, float32, batch size 32 for these .*; make one: ddlf plan \S+",
        ),
        (
            {"n": 2000, "text": "x" * 99},
            r"there is no plan of Apart with sync, float32, batch size 64, n=2000 for these workers; make one: ddlf plan \S+",
        ),
        ({"codec": "topk"}, "there is no plan of Apart with sync, topk, batch size 64"),
        ({"resume": "auto"}, "planned=True has no effect with resume"),
        ({"mode": "downpour"}, "no model of time for mode='downpour'"),
    ],
)
async def test_runs_that_cannot_be_planned_are_refused_by_name(settings, message):
    keep(star=0.1)
    with pytest.raises(ConfigError, match=message):
        await chosen(an_app(**settings))


async def test_a_run_without_a_plan_names_the_command_that_makes_one():
    app = an_app(n=2000)
    app.run_context.typed = ("--local", "2", "-p", "n=2000")
    with pytest.raises(ConfigError, match=r"ddlf plan \S+test_planned.py --local 2 -p n=2000$"):
        await chosen(app)


async def test_a_method_that_does_not_use_the_plan_is_refused():
    with pytest.raises(ConfigError, match="planned=True has no effect on this method; call train_model"):
        await watch.watch_run(an_app())
