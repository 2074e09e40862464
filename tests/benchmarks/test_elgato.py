"""Tests of the pure functions of ``benchmarks.elgato`` and its results, and of its smallest run."""

import math
import random

import pytest

from benchmarks import elgato, elgato_links
from benchmarks.elgato import updates
from benchmarks.elgato_results import WAYS, Run, bars, by_setting, rows, speed_ups
from ddlf.extras.planner.model import Measured, Predicted, Setting
from ddlf.extras.planner.probe import Budget


def timed(model, way, batch, seconds, *, repeat=0, computing=None):
    return Run(
        model=model,
        way=way,
        batch=batch,
        repeat=repeat,
        seconds=[9.0, seconds, seconds],
        accuracy=[0.5, 0.9],
        updates=updates(50_000, WAYS[way][1], batch),
        computing=computing,
    )


@pytest.mark.parametrize(
    ("workers", "batch", "count"),
    [(0, 100, 500), (1, 100, 500), (2, 100, 250), (2, 500, 50), (2, 1000, 25), (2, 2000, 13)],
)
def test_an_epoch_has_as_many_updates_as_the_study_says(workers, batch, count):
    assert updates(50_000, workers, batch) == count


def test_a_speed_up_is_the_median_of_ratios_within_a_repeat():
    runs = [timed("mlp", "one worker", 100, seconds, repeat=n) for n, seconds in enumerate((2.0, 4.0, 8.0))]
    runs += [timed("mlp", "towers", 100, seconds, repeat=n) for n, seconds in enumerate((4.0, 4.0))]
    random.Random(1).shuffle(runs)
    assert speed_ups(by_setting(runs), "mlp", 100, "towers", "one worker") == [0.5, 1.0]


def test_the_table_has_the_prediction_beside_the_measurement():
    settings = by_setting([timed("mlp", "one worker", 100, 2.0), timed("mlp", "towers", 100, 4.0, computing=1.0)])
    predictions = {("mlp", 100, "towers"): Predicted(seconds=5.0, low=4.5, high=5.5)}
    single, towers = rows(settings, predictions)[1:]
    assert single == ["mlp", "100", "one worker", "2.00", "-", "-", "-", "1.00", "-", "-", "500", "90.0"]
    assert towers == ["mlp", "100", "towers", "4.00", "5.00", "4.50-5.50", "+25%", "0.50", "-", "75 %", "250", "90.0"]


def test_the_bars_hold_for_good_runs_only():
    good = [timed("mlp", "one worker", batch, 2.0) for batch in (100, 500)]
    good += [timed("mlp", "towers", 100, 4.0, computing=0.8), timed("mlp", "towers", 500, 4.0, computing=2.0)]
    good += [timed("lstm", "one worker", batch, 30.0) for batch in (100, 500)]
    good += [timed("lstm", "towers", 100, 25.0, computing=20.0), timed("lstm", "towers", 500, 20.0, computing=19.0)]
    verdicts = bars(by_setting(good))
    assert len(verdicts) == 8
    assert all(holds for _, holds in verdicts)
    bad = [run for run in good if (run.model, run.way, run.batch) != ("lstm", "towers", 500)]
    bad.append(timed("lstm", "towers", 500, 24.0, computing=8.0))
    wrong = [text for text, holds in bars(by_setting(bad)) if not holds]
    assert [text.partition(":")[0] for text in wrong] == ["LSTM, S 500", "S 500", "LSTM"]


def test_panels_are_drawn(tmp_path):
    from benchmarks.elgato_plots import Panels

    runs = [timed(model, way, batch, 2.0, computing=1.0) for model in ("mlp",) for way in WAYS for batch in (100, 500)]
    predictions = {("mlp", 100, "towers"): Predicted(seconds=5.0, low=4.5, high=5.5)}
    paths = Panels(by_setting(runs), predictions, tmp_path / "new").write()
    assert len(paths) == 5
    assert all(path.read_text().startswith("<?xml") for path in paths)
    assert "two async" in paths[0].read_text()


def test_rounds_of_more_workers_are_predicted_from_two(monkeypatch):
    """A simulated round takes the time to compute and 10 ms for the bytes of each worker on the master's link."""
    workers = [1, 2, 4, 8]
    rounds = []
    for name, way, count in elgato_links.settings(workers):
        steps = elgato_links.WAYS[way]
        seconds = steps * elgato_links.MODELS[name].seconds + 0.005 + 0.01 * count
        setting = Setting(way=elgato_links.STAR, slots=count, batch=elgato_links.BATCH, steps=steps)
        rounds.append(Measured(setting=setting, seconds=(seconds,) * 3))
    lines, sentences = elgato_links.rows("100mbit", workers, rounds)
    assert [line[-1].lstrip("+-") for line in lines] == ["", "", "0%", "0%"] * 4
    assert len(sentences) == 4
    assert all(sentence.endswith("0% slower") for sentence in sentences)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.usefixtures("few_imports", "one_template")
def test_the_smallest_study_runs_and_continues(few_digits, monkeypatch, tmp_path, capsys):
    room = iter((True,) * 4)  # without memory
    monkeypatch.setattr(Budget, "has_room", lambda budget, needed: next(room, False))
    monkeypatch.setattr("ddlf.extras.planner.planning.LEAST_S", math.inf)
    monkeypatch.setenv("DDLF_DATA", str(few_digits))
    monkeypatch.setattr("ddlf.extras.planner.measurement_files.state_folder", lambda: tmp_path / "state")
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.01)
    words = [
        "--models",
        "mlp",
        "--batches",
        "100",
        "--ways",
        "fit,one worker,towers",
        "--samples",
        "2000",
        "--epochs",
        "2",
    ]
    words += ["--repeats", "1", "--budget", "600", "--json", str(tmp_path / "runs.json")]
    elgato.main(words)
    tables = [capsys.readouterr().out.partition("| model")[2]]
    assert "towers are slower than one worker: " in tables[0]
    monkeypatch.setattr(elgato, "train", None)  # the second call may not train again
    monkeypatch.setattr(elgato, "run_child", None)

    async def no_plan(*arguments):  # on a busy machine the first call may have refused to plan
        return {}

    monkeypatch.setattr(elgato, "plans_of", no_plan)
    elgato.main(words)
    tables.append(capsys.readouterr().out.partition("| model")[2])
    assert tables[0] == tables[1]
