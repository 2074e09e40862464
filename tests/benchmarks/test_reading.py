"""What is measured of partition files, in its shortest form: orders of batches, and a reader in a process of its own."""

import numpy as np

from benchmarks import reading, windows


def test_rank_correlation_is_that_of_scipy():
    values = np.random.default_rng(0).integers(0, 4, 100) + np.arange(100) // 30
    from scipy.stats import spearmanr  # its import takes a second of every process that collects this file

    assert abs(windows.correlation(values) - spearmanr(values, np.arange(100))[0]) < 1e-12


def test_mixed_files_have_all_labels_in_a_batch_and_others_as_many_as_their_window(tmp_path, monkeypatch):
    y = np.eye(10, dtype="f4")[np.random.default_rng(0).integers(0, 10, 1280)]
    monkeypatch.setattr(windows.ddlf, "load_mnist", lambda: ((y, y), (y, y)), raising=False)
    labels = windows.make(tmp_path, 1280, 20)
    found = {case: windows.order_of(case, tmp_path, labels) for case in windows.CASES}
    entropies = {case: entropy for case, (_, entropy, _) in found.items()}
    assert abs(entropies["split window:8"] - entropies["arrays"]) < 0.2
    assert entropies["arrays"] > entropies["as they lie window:8"] > entropies["as they lie window:1"]
    assert found["as they lie none"][2] > 0.9 > 0.3 > abs(found["split none"][2])
    assert found["split window:8"][0] > 4 > found["split window:1"][0]


def test_a_reader_goes_through_all_samples_in_a_process_of_its_own(tmp_path):
    options = reading.arguments().parse_args(["--repeats", "1"])
    reading.arrays(640, tmp_path / "arrays.npz")
    found = reading.compare(tmp_path / "arrays.npz", tmp_path / "files", reading.OURS[:1], options)
    assert min(found[reading.OURS[0]][0]) > 0
