"""What ``ddlf plan`` prints and refuses, without workers."""

import dataclasses
from pathlib import Path

import pytest

from ddlf.cli.main import main
from ddlf.extras.planner.choice import Choice
from ddlf.extras.planner.command import lines
from ddlf.extras.planner.model import Measured, Predicted, Setting, TimeModel, Way
from ddlf.extras.planner.planning import Plan


def choice(slots, factor, seconds, way, *, within=True):
    epoch = Predicted(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds, within=within)
    setting = Setting(way=way, slots=slots, batch=64, steps=10)
    return Choice(setting=setting, epoch=epoch, factor=factor, low=0.9 * factor, high=1.1 * factor)


BEST = choice(6, 4.1, 1.9, Way("sync", "star", "int8"))
NOW = choice(8, 3.4, 2.3, Way("sync", "star", "float32"))
FAR = choice(16, 2.0, 4.0, Way("async", "star", "float32"), within=False)
PLAN = Plan(
    measured=(),
    model=TimeModel([Measured(setting=NOW.setting, seconds=(1.0,))]),
    spent_s=38.0,
    workers=8,
    samples=60_000,
    now=NOW,
    best=BEST,
    fit=Predicted(seconds=7.8, low=7.0, high=8.6),
    all=(BEST, NOW, FAR),
    step_s=0.00849,
    exchange_s=0.0683,
)


def test_a_plan_is_a_table_a_verdict_and_a_command():
    assert lines(PLAN, Path("app.py")) == [
        "measured  0 settings in 38 s: a step takes 8.49 ms, an exchange 68.3 ms; fit on one machine takes 7.8 s an epoch",
        "          slots  way    batch  codec    s/epoch  of fit  (80 %)",
        "best          6  sync      64  int8         1.9   4.10x  (3.69-4.51)",
        "now           8  sync      64  float32      2.3   3.40x  (3.06-3.74)",
        "             16  async     64  float32        4   2.00x  (1.80-2.20) not measured",
        "pays off: 6 slots are 4.10 times as fast as fit on one machine (3.69 to 4.51).",
        "run       ddlf run app.py --slots 6 --batch-size 64 --codec int8",
    ]


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (0.9, "no gain: no setting is faster than fit on one machine by 5 %; the best, 6 slots, is 0.90 times as fast"),
        (1.1, "unclear: 6 slots may be 1.10 times as fast"),
    ],
)
def test_a_verdict_says_what_to_do(factor, said):
    best = choice(6, factor, 1.9, BEST.setting.way)
    assert lines(dataclasses.replace(PLAN, best=best), Path("app.py"))[-2].startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "ddlf plan needs an app; name its file"),
        (("plan", "app.py", "--budget", "soon"), "must be a duration such as 30s or 2m, got 'soon'"),
        (("plan", "app.py", "--budget", "0"), "must be a duration such as 30s or 2m, got '0'"),
        (("plan", "app.py", "--batches", "64,x"), "must be batch sizes such as 64,128, got '64,x'"),
    ],
)
def test_wrong_options_are_named(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
