"""Tests of strategies and exchanges that a package adds to the registry: their own merge rule, and their help."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from ddlf.algorithms.merge import MERGE
from ddlf.cli.options import GROUPS, RUN
from ddlf.errors import ConfigError
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training import registry
from ddlf.training.exchanges.star import Star
from ddlf.training.registry import EXCHANGES, STRATEGIES, titles
from ddlf.training.strategy import Strategy


@dataclass(frozen=True)
class Middle(Star):
    """The master takes the median of the updates.

    More text.
    """

    name: ClassVar[str] = "middle"
    unused: ClassVar[dict[str, str]] = {"merge": "the master takes the median"}

    def merge_rule(self, chosen):
        assert str(chosen) == "mean"
        return MERGE.read("median")


@dataclass(frozen=True)
class Idle(Strategy):
    """Each slot waits."""

    name: ClassVar[str] = "idle"
    words: ClassVar[str] = "idle"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(EXCHANGES, "middle", Middle)
    monkeypatch.setitem(STRATEGIES, "idle", Idle)


async def test_an_exchange_can_merge_by_its_own_rule():
    weights = {}
    for name, settings in {"own": {"exchange": "middle"}, "median": {"merge": "median"}, "mean": {}}.items():
        run = FakeRun(FakeCluster(2), slots=3, master_epochs=2, **settings)
        await run.train_model()
        weights[name] = [w.tobytes() for w in run.model.get_weights()]
    assert weights["own"] == weights["median"] != weights["mean"]
    with pytest.raises(ConfigError, match=r"merge='trimmed:beta=0\.2' has no effect with exchange='middle'"):
        await FakeRun(FakeCluster(2), exchange="middle", merge="trimmed").train_model()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("middle", "The master takes the median of the updates. Choose it with --exchange middle."),
        ("idle", "Each slot waits. Choose it with --mode idle."),
        ("star", "Choose it with --exchange star."),
    ],
)
def test_help_of_a_strategy_or_exchange_without_settings_says_so(capsys, name, sentence):
    with pytest.raises(SystemExit) as ended:
        RUN.parser("ddlf run").parse_args(["app.py", "--help", name])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{name}: " in text
    assert f"{sentence} It has no further settings." in text


def test_help_of_every_strategy_and_exchange_exists():
    assert {*STRATEGIES, *EXCHANGES} <= {*RUN.parser("ddlf run").groups}


def test_reference_has_no_group_without_settings(monkeypatch):
    monkeypatch.setattr(registry, "KINDS_OF_GROUPS", (*registry.KINDS_OF_GROUPS, Idle))
    assert "idle" not in titles()
    assert {*titles()} <= {*GROUPS}
