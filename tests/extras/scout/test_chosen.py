"""Tests of runs that first search their learning rate, without workers and with a made-up search."""

import dataclasses

import pytest

from ddlf.errors import ConfigError
from ddlf.events import Decided
from ddlf.extras.scout import chosen
from ddlf.extras.scout.verdict import judged
from tests.extras.scout.test_command import CURVE, FOUND
from tests.training.models import Quick


class Scouting(Quick):
    scout = True
    learning_rate = 0.05

    async def connect(self):
        """Do nothing, because there are no workers."""


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """Replace the search. It finds 0.1, or that the rate of the optimizer is as good, and runs once for an app."""
    searched = []

    async def search(app, say, check_own):
        assert app not in searched
        app_rate = app.__dict__.get("of_optimizer", app.learning_rate)
        check_own(app_rate)
        searched.append(app)
        say("2 rates")
        return dataclasses.replace(FOUND, verdict=judged(CURVE, app_rate), doubt=app.__dict__.get("doubt", ""))

    monkeypatch.setattr(chosen, "scout", search)
    return searched


def an_app(**settings):
    app = Scouting()
    vars(app).update(settings)
    return app


@pytest.mark.parametrize(
    ("app_rate", "rate", "reason"),
    [
        (
            0.05,
            0.1,
            "the best rate, instead of 0.05, flat from 0.1 to 0.2 (10 trials)",
        ),
        (0.1, 0.1, "flat from 0.1 to 0.2, the rate of the app stays"),
        (0.2, 0.1, "the best rate, instead of 0.2, flat from 0.1 to 0.2 (10 trials)"),
    ],
)
async def test_a_run_uses_the_found_rate_and_reports_it(app_rate, rate, reason):
    app, events = an_app(learning_rate=app_rate), []
    app.subscribe(events.append)
    await chosen.choose_settings(app)
    await chosen.choose_settings(app)  # the rate is already set
    assert app.learning_rate == rate
    (decided,) = (event for event in events if isinstance(event, Decided))
    assert (decided.key, decided.value, decided.rule) == ("learning_rate", f"{rate:g}", "scout")
    assert decided.why == reason
    with await chosen.watch_run(app):
        assert app.learning_rate == rate


async def test_an_unclear_answer_does_not_change_the_rate_and_trials_have_a_label():
    app, events, messages = an_app(doubt="only 1 sample compares the rates"), [], []
    app.subscribe(events.append)
    app.say = messages.append
    await chosen.choose_settings(app)
    assert app.learning_rate == 0.05
    (decided,) = (event for event in events if isinstance(event, Decided))
    assert decided.value == "0.05"
    assert decided.why == "unclear, the rate of the app stays: only 1 sample compares the rates"
    assert messages[0] == "trials    2 rates"


@pytest.mark.parametrize("settings", [{"scout": False}, {"private": True}])
async def test_other_runs_do_not_search(made_up, settings):
    await chosen.choose_settings(an_app(**settings))
    assert not made_up


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resume": "auto"}, "scout=True has no effect with resume"),
        ({"learning_rate": None}, "scout=True sets learning_rate, and Scouting has no such attribute with a number"),
        ({"of_optimizer": 0.01}, "learning_rate=0.05 of the app is not the rate of its optimizer, 0.01"),
    ],
)
async def test_runs_that_cannot_use_a_rate_are_refused_by_name(settings, message, made_up):
    app = an_app(**settings)
    with pytest.raises(ConfigError, match=message):
        await chosen.choose_settings(app)
    assert not made_up
    with pytest.raises(ConfigError, match="scout=True has no effect on this method; call train_model"):
        await chosen.watch_run(app)


@pytest.mark.parametrize("settings", [{"resume": "auto"}, {"learning_rate": None}])
async def test_a_dry_run_refuses_settings_that_a_run_refuses(settings):
    with pytest.raises(ConfigError, match="scout=True"):
        await an_app(**settings).run_context.check()
    await an_app().run_context.check()
