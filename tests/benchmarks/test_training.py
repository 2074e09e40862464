"""The benchmarks run, here with tiny settings. Their figures are not tested: those depend on the machine."""

import json

import numpy as np
import pytest

from benchmarks import compressors, paper, training
from benchmarks.baselines import spark
from benchmarks.measure import Spread, mean_and_deviation, run_child, table, turns
from benchmarks.workload import STEPS_PER_EXECUTION, Workload
from tests.patience import PATIENCE_S

TINY = ["--data", "digits", "--samples", "64", "--batch-size", "16", "--repeats", "1"]


def test_every_contender_has_its_turn_in_each_repeat_and_another_begins():
    assert list(turns(["a", "b", "c"], 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_a_spread_is_the_median_with_its_range():
    assert Spread.of([3.0, 1.0, 2.5]).text() == "2.50 (1.00-3.00)"
    assert Spread.of([2.0]).text() == "2.00"


def test_accuracy_of_several_seeds_is_given_as_mean_and_sample_deviation():
    assert mean_and_deviation([90.0, 92.0]) == "91.00 ± 1.41"
    assert mean_and_deviation([90.0]) == "90.00"


def test_a_table_is_markdown_with_figures_right_aligned():
    assert table([["name", "s"], ["a", "10.5"]]).splitlines() == [
        "| name |    s |",
        "|------|-----:|",
        "| a    | 10.5 |",
    ]


def test_ratios_compare_runs_of_the_same_repeat_only():
    runs = [
        {"name": name, "repeat": repeat, "seconds": seconds}
        for name, repeat, seconds in (("limit", 0, 2.0), ("sync", 0, 3.0), ("sync", 1, 9.0))
    ]
    assert training.ratios(runs, "sync", "limit") == [1.5]


def test_a_contender_that_fails_is_reported_with_what_it_wrote():
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        run_child("benchmarks.contender", "nobody", "{}", timeout_s=PATIENCE_S)


def test_training_is_measured_for_ddlf_the_published_algorithm_and_the_limit(tmp_path, capsys):
    file = tmp_path / "runs.json"
    short = [*TINY, "--workers", "1", "--rounds", "1", "--only", "limit,sync,published-sync,limit-1,sync-1"]
    training.main([*short, "--json", str(file)])
    runs = {run["name"]: run for run in json.loads(file.read_text())["runs"]}
    assert all(run["seconds"] > 0 and run["startup_s"] > 0 for run in runs.values())
    assert 0 <= runs["sync"]["accuracy"] <= 1
    assert runs["published-sync"]["bytes_out"] > runs["published-sync"]["bytes_back"] > 0
    printed = capsys.readouterr().out
    assert "% of limit." in printed
    assert "% of limit-1." in printed


@pytest.mark.parametrize("tuned", [False, True], ids=["usual", "tuned"])
def test_spark_trains_a_partition_with_arrays_as_usual_and_tuned_with_what_cannot_stall(monkeypatch, tuned):
    import keras

    seen, fit = [], keras.Model.fit
    monkeypatch.setattr(
        keras.Model,
        "fit",
        lambda model, data, *rest, **more: (seen.append((model, data)), fit(model, data, *rest, **more)),
    )
    monkeypatch.setattr(spark, "_models", {})
    workload = Workload(data="digits", samples=64, batch_size=16)
    app = workload.load()
    part = [(app.x_train, app.y_train)] if tuned else zip(app.x_train, app.y_train, strict=True)
    (update,) = spark._fit(workload.dump(), tuned, 0, iter(part), app.model.get_weights())
    assert any(array.any() for array in update)
    ((model, data),) = seen
    assert isinstance(data, np.ndarray) != tuned
    assert not tuned or not data.options().autotune.enabled
    assert model.steps_per_execution == (STEPS_PER_EXECUTION if tuned else 1)


def test_the_published_comparison_has_a_row_for_each_number_of_epochs(capsys):
    paper.main([*TINY, "--epochs", "1", "--worker-epochs", "1", "--systems", "plain"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 ")]
    assert len(rows) == 1


def test_every_compressor_is_measured_on_weights_and_updates(capsys):
    compressors.main(["--data", "digits", "--samples", "64", "--repeats", "1"])
    text = capsys.readouterr().out
    assert text.count("zlib + shuffle") == 2
    assert text.count("update, int8") >= 5


def test_a_byte_shuffle_can_be_undone():
    data = bytes(range(24))
    assert compressors.shuffled(data, 4)[:6] == bytes([0, 4, 8, 12, 16, 20])
    assert compressors.unshuffled(compressors.shuffled(data, 4), 4) == data
