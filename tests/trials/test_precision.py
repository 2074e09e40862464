"""Run the short form of the trial of mixed precision."""

from tests.trials.precision import FORMATS, lower, rows


def test_each_format_learns():
    results = rows(["dense"], [0], 2, samples=1000, tested=1000)
    assert [format for _, format, _ in results] == list(FORMATS)
    assert not lower(results, 0.05)
    assert min(accuracy for *_, (accuracy,) in results) > 0.5


def test_lower_accuracy_is_found():
    results = [("cnn", "float32", [0.98, 0.97]), ("cnn", "mixed_float16", [0.97, 0.965])]
    assert lower(results) == ["cnn with mixed_float16 is 0.75% below float32"]
