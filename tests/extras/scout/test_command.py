"""Tests of the output and the refusals of ``ddlf scout``, without workers."""

import dataclasses
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ddlf.cli.main import main
from ddlf.cli.results import on_terminal
from ddlf.extras.scout.command import bound_warning, lines, own_rate_line, place_line
from ddlf.extras.scout.comparisons import Comparison, Variant
from ddlf.extras.scout.curve import comparable, svg
from ddlf.extras.scout.halving import Curve, Point
from ddlf.extras.scout.scouting import Scouted
from ddlf.extras.scout.verdict import doubt, judged

CURVE = Curve(
    first=(2.3, 2.3),
    points=(
        Point(rate=0.01, steps=10, losses=(2.3,), least=1.0),
        Point(rate=0.05, steps=20, losses=(1.3, 1.3)),
        Point(rate=0.1, steps=20, losses=(0.3, 0.5)),
        Point(rate=0.2, steps=20, losses=(0.6, 0.4)),
        Point(rate=1.0, steps=10, losses=(float("inf"),), least=1.0),
    ),
)
FOUND = Scouted(
    verdict=judged(CURVE, 0.05),
    curve=CURVE,
    starts=(0, 1),
    broken=(),
    judged_by="validation data",
    is_scaled=False,
    trials=10,
    steps=160,
    seconds=3.2,
)


def scout(*words):
    """Run the command, and return its exit code."""
    try:
        return main(["scout", *words])
    except SystemExit as end:
        return int(end.code or 0)


def test_the_curve_the_costs_and_the_rate_are_printed():
    assert lines(FOUND) == [
        "tried     10 trials with 160 steps in 3 s, compared by validation data",
        "rate      steps  starts   loss",
        "0.01         10       1    2.3  ########################################",
        "0.05         20       2    1.3  ################### < yours",
        "0.1          20       2    0.4  # < best, flat",
        "0.2          20       2    0.5  ## < flat",
        "1            10       1      -  diverged",
        "half      0.05 gives a loss of 1.3, 0.1 gives 0.4",
        "double    0.2 gives a loss of 0.5, 0.1 gives 0.4",
        "rate      0.1 instead of 0.05; flat from 0.1 to 0.2",
    ]


def test_a_rate_that_is_as_good_is_kept():
    scouted = dataclasses.replace(FOUND, verdict=judged(CURVE, 0.1), is_scaled=True)
    assert lines(scouted)[-2:] == [
        "scaled    the rate is the highest one of your schedule or optimizers; the other rates keep their ratio to it",
        "rate      keep yours, 0.1; flat from 0.1 to 0.2",
    ]


def test_a_rate_outside_the_bounds_is_compared_and_named():
    scouted = dataclasses.replace(FOUND, bounds=(0.1, 0.2), verdict=judged(CURVE.restricted_to(0.1, 0.2), 0.05))
    assert lines(scouted)[-3:] == [
        "bounds    yours, 0.05, is outside of your bounds, and was only tried for comparison: it gives a loss of 1.3, 0.1 "
        "gives a loss of 0.4",
        "bounds    the best rate, 0.1, is the lowest one between your bounds, so a lower one may be better: --from 0.01",
        "rate      0.1 instead of 0.05; flat from 0.1 to 0.2",
    ]
    assert not own_rate_line(dataclasses.replace(FOUND, bounds=(0.05, 0.2)))
    assert not own_rate_line(FOUND)


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ((0.01, 0.1), "0.1, is the highest one between your bounds, so a higher one may be better: --to 1"),
        ((0.1, 1.0), "0.1, is the lowest one between your bounds, so a lower one may be better: --from 0.01"),
        ((0.01, 0.2), ""),
        ((0.0, math.inf), ""),
    ],
)
def test_a_best_rate_at_a_bound_of_the_user_is_named(bounds, sentence):
    scouted = dataclasses.replace(FOUND, bounds=bounds, verdict=judged(CURVE.restricted_to(*bounds), 0.05))
    assert bound_warning(scouted) == ([f"bounds    the best rate, {sentence}"] if sentence else [])
    assert [*bound_warning(scouted)] == [line for line in lines(scouted) if line.startswith("bounds    the best rate")]
    assert not bound_warning(dataclasses.replace(scouted, doubt="1 sample"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_lines_fit_a_terminal_except_a_command(monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    printed = on_terminal([*lines(FOUND, width), f"run       {'long ' * 60}"]).split("\n")
    assert max(map(len, printed[:-1])) <= width
    assert max(line.count("#") for line in printed) == min(40, width - 51)
    assert len(printed[-1]) > width


def test_the_place_of_the_rate_is_named_if_no_attribute_sets_it():
    file = Path("app.py")
    (line,) = place_line(None, FOUND, file)
    assert line.startswith("place     the optimizer in create_model; with learning_rate = NUMBER in the class")
    (line,) = place_line(0.5, FOUND, file)
    assert "which does not use learning_rate = 0.5 of the class" in line
    assert place_line(None, FOUND, Path("m.nnm")) == [
        "place     the block train of the model text, where --write writes it"
    ]
    assert place_line(0.05, FOUND, file) == place_line(0.05, FOUND, Path("m.nnm")) == []
    assert place_line(None, dataclasses.replace(FOUND, doubt="1 sample"), file) == []


def also_of(setting, own_value, *other_values, chosen=0):
    """Return an answer about a setting, from values with a rate and a loss each."""
    every = [Variant(value=value, rate=rate, losses=(loss,)) for value, rate, loss in (own_value, *other_values)]
    return Comparison(
        setting=setting, present=every[0], variants=tuple(every[1:]), chosen=every[chosen], margin=0.5, tolerance=0.01
    )


def test_names_in_the_json_stay_the_same():
    data = dataclasses.replace(FOUND, also=(also_of("batch", (16, 0.1, 0.5), (32, 0.2, 0.4)),)).to_data()
    assert data["verdict"]["own"] == 0.05
    assert list(data["also"][0]) == ["what", "kept", "others", "chosen", "margin", "near"]


@pytest.mark.parametrize(
    ("answer", "expected", "rate"),
    [
        (
            also_of("batch", (32, 0.01, 0.268), (16, 0.01, 0.104), (128, 0.04, 0.266)),
            [
                "batch_size 32 stays: the smallest other loss, 0.104, is smaller than yours, 0.268, by no more than the margin, 0.5, a tenth "
                "of what yours has learnt; 128 with rate 0.04 has about your loss, 0.266, with fewer steps",
                "32 with rate 0.01: loss 0.268 < yours",
                "16 with rate 0.01: loss 0.104",
                "128 with rate 0.04: loss 0.266",
            ],
            "",
        ),
        (
            also_of("batch", (32, 0.01, 0.268), (64, 0.02, 0.3)),
            [
                "batch_size 32 stays: the smallest other loss, 0.3, is not smaller than yours, 0.268, and no larger batch has "
                "a loss near it or yours",
                "32 with rate 0.01: loss 0.268 < yours",
                "64 with rate 0.02: loss 0.3",
            ],
            "",
        ),
        (
            also_of("batch", (32, 0.01, 0.268), (64, 0.02, 0.27), chosen=1),
            [
                "batch_size 64 with rate 0.02: the largest batch whose loss, 0.27, is above the smallest one, 0.268, by at "
                "most 0.01",
                "32 with rate 0.01: loss 0.268 < yours",
                "64 with rate 0.02: loss 0.27",
            ],
            "; with batch_size 64 use 0.02",
        ),
        (
            also_of("warmup", (0, 0.01, 0.9), (0.1, 0.04, 0.2), (0.3, 0.04, math.inf), chosen=1),
            [
                "warmup 0.1 of the run with rate 0.04: its loss, 0.2, is smaller than yours, 0.9, by more than the margin, 0.5, a tenth "
                "of what yours has learnt: --schedule warmup:0.1,constant",
                "0 with rate 0.01: loss 0.9 < yours",
                "0.1 of the run with rate 0.04: loss 0.2",
                "0.3 of the run with rate 0.04: diverged",
            ],
            "; with warmup 0.1 use 0.04",
        ),
        (
            also_of("warmup", (0, 0.01, 0.1), (0.1, 0.04, 0.2)),
            [
                "warmup 0 stays: the smallest other loss, 0.2, is not smaller than yours, 0.1",
                "0 with rate 0.01: loss 0.1 < yours",
                "0.1 of the run with rate 0.04: loss 0.2",
            ],
            "",
        ),
        (
            also_of("seed", (0, 0.01, 0.2), (1, 0.01, 0.162)),
            [
                "no seed: the losses of 2 seeds, from 0.162 to 0.2, differ by chance",
                "0 with rate 0.01: loss 0.2 < yours",
                "1 with rate 0.01: loss 0.162",
            ],
            "",
        ),
    ],
)
def test_other_settings_are_compared_by_a_printed_rule(answer, expected, rate):
    scouted = dataclasses.replace(FOUND, also=(answer,))
    printed = lines(scouted)
    assert printed[-len(expected) - 1 : -1] == [
        f"also      {expected[0]}",
        *(f"          {row}" for row in expected[1:]),
    ]
    assert printed[-1] == f"rate      0.1 instead of 0.05; flat from 0.1 to 0.2{rate}"
    unclear = lines(dataclasses.replace(scouted, doubt="1 sample"))
    assert unclear[-len(expected) - 1].endswith("stays, because the answer is unclear")
    assert "use" not in unclear[-1]


def test_an_unclear_answer_keeps_the_rate_with_the_reason():
    scouted = dataclasses.replace(FOUND, doubt="only 1 sample compares the rates")
    assert lines(scouted)[-1] == (
        "rate      unclear: keep yours, 0.05; these trials chose 0.1, but only 1 sample compares the rates"
    )
    assert scouted.keeps
    assert not FOUND.keeps


@pytest.mark.parametrize(
    ("samples", "steps", "run_steps", "losses", "reason"),
    [
        (20, 10, 100, (0.3, 0.5), ""),
        (1, 10, 100, (0.3, 0.5), "only 1 sample compares the rates, and 20 are the least: set x_val and y_val"),
        (19, 10, 100, (0.3, 0.5), "only 19 samples compare the rates"),
        (20, 9, 100, (0.3, 0.5), "the longest trials have 9 steps, and 10 are the least: search with more --steps"),
        (20, 1, 2, (0.3, 0.5), "the longest trials have 1 step, and 2 are the least"),
        (20, 9, 9, (0.3, 0.5), ""),  # the run is not longer than the trials
        (20, 10, 100, (0.1, 2.3), "from 2 starts, the loss fell by 1.1 with a standard deviation of 1.6"),
        (20, 10, 100, (0.1,), ""),
    ],
)
def test_losses_that_cannot_decide_are_named(samples, steps, run_steps, losses, reason):
    curve = Curve(first=(2.3,) * len(losses), points=(Point(rate=0.1, steps=steps, losses=losses),))
    sentence = doubt(curve, samples, run_steps)
    assert sentence.startswith(reason)
    assert bool(sentence) == bool(reason)


def test_infinite_losses_are_null_in_json():
    assert FOUND.to_data()["curve"]["points"][-1]["losses"] == [None]
    assert FOUND.to_data()["curve"]["points"][-1]["loss"] is None


STARTS_DIFFER = Curve(
    first=(6.3, 5.42, 4.2),
    points=(
        Point(rate=1e-5, steps=10, losses=(6.3,)),
        Point(rate=1e-4, steps=20, losses=(6.25, 5.40, 4.19)),
        Point(rate=3.2e-4, steps=20, losses=(6.20, 5.38)),
        Point(rate=0.01, steps=20, losses=(0.1, 0.2, 0.1)),
        Point(rate=0.032, steps=10, losses=(0.4,)),
    ),
)


def test_losses_of_rates_from_different_numbers_of_starts_can_be_compared():
    losses = comparable(STARTS_DIFFER, 0.01)
    assert sum(STARTS_DIFFER.first) / 3 == pytest.approx(losses[1e-5])  # the model has learnt nothing at this rate
    assert losses[1e-4] == STARTS_DIFFER.point_of(1e-4).loss
    assert losses[0.01] < losses[0.032] < losses[3.2e-4] < losses[1e-4] < losses[1e-5]
    scouted = dataclasses.replace(FOUND, curve=STARTS_DIFFER, verdict=judged(STARTS_DIFFER, 1e-4))
    data = scouted.to_data()["curve"]["points"]
    assert [point["loss"] for point in data] == list(losses.values())
    assert data[2]["losses"] == [6.20, 5.38]
    assert any(line.startswith("0.00032      20       2   5.24  ###") for line in lines(scouted))
    (picture,) = (
        child for child in ElementTree.fromstring(svg(scouted.curve, scouted.verdict, "")) if "points" in child.attrib
    )
    heights = [float(point.partition(",")[2]) for point in picture.attrib["points"].split()]
    assert heights == sorted(heights[:4]) + heights[4:]


def test_equal_rates_from_different_starts_have_no_hump():
    starts = (9.5, 13.1, 5.8)
    points = [
        Point(rate=2.0**exponent, steps=9, losses=starts[:tried]) for exponent, tried in enumerate((1, 1, 2, 2, 3))
    ]
    best = Point(rate=64.0, steps=9, losses=(9.4, 13.2, 5.7))  # the model has learnt nothing from two starts
    curve = Curve(first=starts, points=(*points, best))
    losses = comparable(curve, 64.0)
    assert [losses[point.rate] for point in points] == pytest.approx([sum(starts) / 3] * 5, abs=0.05)


def test_the_picture_has_a_dot_for_each_finite_loss():
    picture = ElementTree.fromstring(svg(CURVE, FOUND.verdict, "A & B"))
    shapes = [child.tag.rpartition("}")[2] for child in picture]
    assert shapes.count("circle") == 4
    assert picture[0].text == "A & B"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "ddlf scout needs an app; name its file: ddlf scout app.py"),
        (("app.py", "--save", "m.keras"), "--save has no effect on ddlf scout, which only tries rates; leave it out"),
        (("app.py", "--planned"), "--planned has no effect on ddlf scout"),
        (("app.py", "--ui", "json"), "--ui has no effect on ddlf scout, which only tries rates; leave it out"),
        (("app.py", "--out", "runs"), "--out has no effect on ddlf scout, which only tries rates; leave it out"),
        (("app.py", "--from", "0"), "must be a learning rate above 0, such as 1e-4, got '0'"),
        (("app.py", "--also", "rate"), "must be some of batch, warmup, seed, got 'rate'"),
    ],
)
def test_wrong_options_are_refused(words, message, capsys):
    assert scout(*words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--svg", "missing/curve.svg"), "--svg missing/curve.svg: there is no folder missing"),
        (("--svg", "."), "--svg . is a folder; name a file, such as curve.svg"),
        (("--svg", "x.png"), "--svg x.png: the picture is SVG, whose files end in .svg; --svg x.svg"),
        (("--write",), "Plain in app.py has no line learning_rate = NUMBER to write the rate to"),
    ],
)
def test_a_result_without_a_place_is_refused_before_the_search(words, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = "".join(f"    async def {name}(self): ...\n" for name in ("load_dataset", "create_model"))
    (tmp_path / "app.py").write_text(f"import ddlf\nclass Plain(ddlf.IApp):\n{methods}")
    assert scout("app.py", "--local", "1", *words) == 2
    printed = capfd.readouterr()
    assert message in " ".join(printed.err.split())
    assert "cluster" not in printed.out
