"""Tests of groups of settings: on classes, on objects, as text, from other packages, and beside single settings."""

import pickle
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

import ddlf
from ddlf.algorithms.outer import Nesterov
from ddlf.errors import ConfigError
from ddlf.settings.checks import Number
from ddlf.settings.setting import Setting
from ddlf.testing import FakeRun
from ddlf.training import registry
from ddlf.training.registry import SETTINGS, spec_of, spread
from ddlf.training.strategy import Strategy

MODES = f"one of {', '.join(registry.STRATEGIES)}"


def test_a_class_takes_groups_and_reads_them_as_settings():
    class App(ddlf.IApp):
        train = ddlf.Downpour(replicas=16, fetch=2)
        data = ddlf.Data(batch_size=64)
        checkpoint = ddlf.Checkpoint("runs/a", every=4)

    app = App()
    assert (app.mode, app.replicas, app.n_fetch, app.batch_size) == ("downpour", 16, 2, 64)
    assert (app.checkpoint, app.checkpoint_every) == ("runs/a", 4)
    assert app.data == ddlf.Data(batch_size=64)
    assert callable(app.train)
    assert spec_of(app).train == ddlf.Downpour(replicas=16, fetch=2)


def test_groups_and_settings_by_name_make_the_same_spec():
    class Grouped(ddlf.IApp):
        mode = ddlf.Sync(merge="median", outer="nesterov:0.9")
        exchange = ddlf.Star(codec="int8")
        local = ddlf.Local(steps=3)

    class Flat(ddlf.IApp):
        merge, outer, codec, worker_steps = "median", "nesterov:0.9", "int8", 3

    assert spec_of(Grouped()) == spec_of(Flat())
    assert spec_of(Flat()).train.outer == Nesterov(learning_rate=0.9)


def test_a_subclass_sets_only_what_its_group_is_given():
    class Base(ddlf.IApp):
        data = ddlf.Data(batch_size=64, partition="power:1")

    class App(Base):
        data = ddlf.Data(batch_size=8)

    assert (App().batch_size, App().partition) == (8, spec_of(Base()).data.partition)


def test_an_object_takes_groups_and_texts():
    app = ddlf.IApp()
    app.mode = "downpour:16,fetch=2,rule=momentum:0.5,0.9"
    app.output = ddlf.Output(verbose=False)
    assert (app.mode, app.replicas, app.n_fetch, app.verbose) == ("downpour", 16, 2, False)
    assert str(app.push_rule).startswith("momentum:")


def test_an_attribute_of_the_user_stays_unchanged():
    app = ddlf.IApp()
    app.data = [1, 2]
    assert app.data == [1, 2]


def test_a_group_and_a_setting_that_disagree_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^batch_size=8, but data has batch_size=64 in App"):

        class App(ddlf.IApp):
            data = ddlf.Data(batch_size=64)
            batch_size = 8

    assert spread({"mode": "downpour:replicas=3", "replicas": 3}) == {"mode": "downpour", "replicas": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("downpour:replica=3", "downpour has no setting 'replica'; did you mean 'replicas'?"),
        ("downpour:replicas=3,replicas=4", "downpour: replicas is given twice"),
        ("downpor:replicas=3", f"mode must be {MODES}, got 'downpor'; did you mean 'downpour'?"),
        ("downpour:replicas=x", "replicas must be a whole number of 1 or more, or None"),
    ],
)
def test_a_text_without_a_group_is_refused_with_a_suggestion(text, message):
    with pytest.raises(ConfigError) as refused:
        ddlf.IApp().mode = text
    assert str(refused.value).startswith(message)


def test_a_group_checks_its_settings_when_it_is_made():
    with pytest.raises(ConfigError, match="did you mean 'median'"):
        ddlf.Sync(merge="medain")
    assert pickle.loads(pickle.dumps(ddlf.Sync(merge="median"))) == ddlf.Sync(merge="median")


def test_each_setting_has_exactly_one_place_in_a_run():
    names = [setting.name for group in spec_of(ddlf.IApp()).groups for setting in group.settings()]
    assert len(names) == len(set(names))
    assert set(names) | {"mode", "exchange"} <= set(SETTINGS)


def test_another_package_adds_a_strategy(monkeypatch):
    @dataclass(frozen=True)
    class Gossip(Strategy):
        name: ClassVar[str] = "gossip"
        words: ClassVar[str] = "gossip"
        neighbours: Setting[int, int] = Setting(2, SETTINGS["n_fetch"].accepts, "workers that each talks to")

    monkeypatch.setattr(
        registry, "outside", lambda group: {"gossip": SimpleNamespace(load=lambda: Gossip, dist=None, value="")}
    )
    app = ddlf.IApp()
    app.mode = "gossip:neighbours=3"
    assert spec_of(app).train == Gossip(neighbours=3)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (lambda: 1 / 0, "'gossip' of the package talk cannot be imported: ZeroDivisionError"),
        (lambda: ddlf.Star, "'gossip' of the package talk is talk:Gossip, which is not a subclass of StrategySettings"),
    ],
)
def test_a_strategy_that_cannot_be_loaded_is_refused_by_name(monkeypatch, loaded, message):
    entry = SimpleNamespace(load=loaded, dist=SimpleNamespace(name="talk"), value="talk:Gossip")
    monkeypatch.setattr(registry, "outside", lambda group: {"gossip": entry})
    app = ddlf.IApp()
    app.mode = "gossip"
    with pytest.raises(ConfigError, match=re.escape(message)):
        spec_of(app)


@pytest.mark.parametrize(
    ("attribute", "value", "mode"),
    [("train", "async", "async"), ("train", "downpour:fetch=3", "downpour"), ("mode", ddlf.Async, "async")],
)
def test_class_of_a_group_and_name_of_a_strategy_choose_its_defaults(attribute, value, mode):
    app = type("App", (ddlf.IApp,), {attribute: value})()
    assert app.mode == mode
    assert callable(app.train)
    app = ddlf.IApp()
    setattr(app, attribute, value)
    assert app.mode == mode
    assert callable(app.train)


def test_a_disagreement_shows_the_two_values():
    with pytest.raises(ConfigError) as refused:
        type("App", (ddlf.IApp,), {"data": ddlf.Data(batch_size=16, balance="speed"), "batch_size": 8})
    assert str(refused.value) == "batch_size=8, but data has batch_size=16 in App; leave out one of the two"


def test_an_app_has_few_public_attributes():
    assert len([name for name in dir(ddlf.IApp) if not name.startswith("_")]) <= 35


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("mode", ddlf.Star(), "exchange = ddlf.Star"),
        ("exchange", ddlf.Sync(), "mode = ddlf.Sync"),
        ("local", ddlf.Data(batch_size=8), "data = ddlf.Data"),
        ("train", ddlf.Local(), "local = ddlf.Local"),
        ("datta", ddlf.Data(batch_size=8), "data = ddlf.Data"),
    ],
)
def test_app_refuses_group_under_another_name(name, value, hint):
    with pytest.raises(ddlf.errors.ConfigError, match=f"{name} cannot be .*; write {hint}"):
        type("App", (ddlf.IApp,), {name: value})


@pytest.mark.parametrize(
    ("group", "name", "suggestion"),
    [
        (ddlf.Downpour, "n_fetch", "fetch"),
        (ddlf.Downpour, "replica", "replicas"),
        (ddlf.Data, "batchsize", "batch_size"),
    ],
)
def test_group_refuses_an_unknown_setting_and_suggests_a_known_one(group, name, suggestion):
    with pytest.raises(ConfigError, match=f"has no setting '{name}'; did you mean '{suggestion}'"):
        group(**{name: 3})


def test_group_as_text_suggests_the_setting_of_a_flat_name():
    with pytest.raises(ConfigError, match="downpour has no setting 'n_fetch'; did you mean 'fetch'"):
        ddlf.Downpour.of_text("n_fetch=3")


@pytest.mark.parametrize(
    ("check", "kind", "accepted", "refused"),
    [
        (Number(0, 1), "a number from 0 to 1", [0, 1, 0.5, np.float32(0.5)], [-0.1, 1.1]),
        (Number(0, below=1), "a number from 0 to less than 1", [0, 0.999], [1, np.float64(1)]),
        (Number(-1, below=0), "a number from -1 to less than 0", [-1], [0]),
        (Number(2.5, unit="seconds"), "a number of seconds, 2.5 or more", [2.5, 10**20], [2, 10**400]),
    ],
)
def test_a_number_is_checked_by_its_range(check, kind, accepted, refused):
    for value in accepted:
        assert (checked := check("it", value)) == value
        assert type(checked) is float
    for value in (*refused, True, None, "0.5", float("nan"), float("inf")):
        with pytest.raises(ConfigError) as error:
            check("it", value)
        assert str(error.value) == f"it must be {kind}, got {value!r}"


def test_a_text_of_a_setting_with_a_number_is_read_as_one():
    setting = Setting(0.5, Number(0, 1), "a part")
    assert (setting.read("0.25"), setting.read("1"), setting.read("much")) == (0.25, 1.0, "much")


def test_an_error_of_the_check_of_another_package_names_the_setting():
    setting = Setting(0.5, lambda name, value: float(value), "a part")
    with pytest.raises(ConfigError, match="part cannot be 'much': could not convert string to float: 'much'"):
        setting.check("part", "much")


def test_a_fake_run_takes_groups():
    app = FakeRun(exchange=ddlf.Sharded(codec="int8"), mode="sync:merge=median", local=ddlf.Local(steps=3))
    assert (app.exchange, str(app.codec), str(app.merge), app.worker_steps) == ("sharded", "int8", "median", 3)
    with pytest.raises(ConfigError, match=r"exchange cannot be ddlf.Sync\(...\)"):
        FakeRun(exchange=ddlf.Sync())
    with pytest.raises(ConfigError, match=r"exchange must be one of star, .*, got 'shard'; did you mean 'sharded'"):
        FakeRun(exchange="shard")
