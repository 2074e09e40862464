"""Tests of data from a generator function: it is read like partition files, and wrong data is refused in one sentence."""

from types import SimpleNamespace

import numpy as np
import pytest

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data.app_data import check_data, take_made
from ddlf.data.stream import SampleStream
from ddlf.errors import AppError, ConfigError, DatasetError
from ddlf.training.progress import FileLedger

SIZES = [50, 30, 40]
X, Y = np.arange(120 * 3, dtype=np.float32).reshape(120, 3), np.arange(120)


def numbers(part, sizes=SIZES, batch=16):
    begin = sum(sizes[:part])
    for first in range(begin, begin + sizes[part], batch):
        rows = slice(first, min(first + batch, begin + sizes[part]))
        yield X[rows], Y[rows]


def read(data, portion, memory=10**6, before=None):
    stream = SampleStream(data, portion, 8, memory, before)
    chunks = list(stream)
    return stream, {name: np.concatenate([chunk[name] for chunk in chunks]) for name in data}


@pytest.mark.parametrize("shuffle", ["global", "window:2", "none"])
def test_generated_data_is_read_in_order_of_files(shuffle):
    data = ddlf.data.generated(numbers, SIZES)
    for portion in portions(SIZES, [70, 50], shuffle, seed=1, epoch=1):
        stream, columns = read(data, portion)
        assert np.array_equal(columns["y"], portion.ids(SIZES))
        assert np.array_equal(columns["x"], X[columns["y"]])
        second, _ = read(data, portion, before=stream)
        assert not second.files or shuffle == "none"


def test_nodes_compare_counts_shapes_and_labels_of_generated_data():
    def noisy(part):
        return ((np.random.default_rng().normal(size=x.shape).astype("f4"), y) for x, y in numbers(part))

    original = ddlf.data.generated(numbers, SIZES).manifest.content
    assert ddlf.data.generated(noisy, SIZES).manifest.content == original
    assert ddlf.data.generated(lambda part: ((x, y + 1) for x, y in numbers(part)), SIZES).manifest.content != original
    assert ddlf.data.generated(numbers, [50, 30]).manifest.content != original


def test_endless_data_continues_and_is_reported_inexact():
    def endless(part):
        number = 0
        while True:
            yield np.arange(number, number + 7)
            number += 7

    data = ddlf.data.generated(endless, 20, endless=True)
    epochs = [read(data, portions([20], [20], "none", seed=0, epoch=epoch)[0])[1]["x"].tolist() for epoch in range(2)]
    assert epochs == [list(range(20)), list(range(20, 40))]
    assert "endless is endless" in data.inexact
    ledger = FileLedger(20, data.manifest.sizes)
    ledger.inexact = data.inexact
    ledger.add(portions([20], [20], "none", seed=0, epoch=0)[0], 1)
    assert ledger.counts.tolist() == [1] * 20
    assert not ledger.is_exact(1)
    assert ledger.summary()["inexact"] == data.inexact
    assert not ledger.summary()["exact"]


def parts(*batches):
    return lambda part: iter(batches[part])


ROWS = np.zeros((4, 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (parts([ROWS], [ROWS]), "part 0 of .* yields 4 samples, not 8"),
        (parts([ROWS] * 2, []), "part 1 of .* yields nothing"),
        (parts([ROWS] * 2, [ROWS] * 3), "part 1 of .* yields more than 8 samples"),
        (parts([ROWS] * 2, [ROWS[:3]] * 3), "part 1 of .* yields more than 8 samples"),
        (
            parts([ROWS, ROWS[:, :1]], []),
            r"part 0 of .* has x of float64 \(1,\), but the first has x of float64 \(2,\)",
        ),
        (parts([(ROWS, ROWS), ROWS], []), r"part 0 of .* has x of float64 \(2,\), but the first has .*, y of float64"),
        (parts([ROWS, (ROWS, ROWS[:3])], []), "batch 1 of part 0 of .* x has 4 rows, y has 3 rows"),
        (parts([ROWS, "text"], []), r"batch 1 of part 0 of .* has no arrays of numbers for x \(a str\)"),
        (parts([ROWS, [[1], [2, 3]]], []), "batch 1 of part 0 of .* has no arrays of numbers"),
        (parts([ROWS, (ROWS,) * 4], []), "batch 1 of part 0 of .* is a tuple of 4"),
        (parts([ROWS, ROWS[:0]], []), "batch 1 of part 0 of .* x has 0 rows"),
        (parts([ROWS, ROWS]), "part 1 of .* cannot be made: IndexError"),
    ],
)
def test_generated_data_with_wrong_counts_is_named(function, message):
    data = ddlf.data.generated(function, [8, 8])
    with pytest.raises(DatasetError, match=message):
        read(data, portions([8, 8], [16], "none", seed=0, epoch=0)[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ddlf.data.generated(parts([]), 8), DatasetError, "part 0 of .* yields nothing"),
        (lambda: ddlf.data.generated(numbers, [8, 0]), AppError, "must be whole numbers > 0"),
        (lambda: ddlf.data.generated(numbers, []), AppError, "must be whole numbers > 0"),
        (lambda: ddlf.data.generated(numbers(0), 8), AppError, "is not a function"),
    ],
)
def test_unusable_generator_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_data_in_random_order_is_refused():
    chance = np.random.default_rng(0)
    with pytest.raises(DatasetError, match="has another order in each pass"):
        ddlf.data.generated(lambda part: [(X, chance.permutation(Y))], 120)


def test_generator_object_is_refused_with_hint():
    with pytest.raises(DatasetError, match="train_data is a generator, which can be read only once"):
        take_made(SimpleNamespace(train_data=numbers(0)))
    app = SimpleNamespace(train_data=[1, 2])
    take_made(app)
    with pytest.raises(AppError, match="train_data must be a data set of partition files, a PyDataset"):
        check_data(app)


@pytest.mark.parametrize(
    ("shuffle", "amount"), [("global", "all of it"), ("window:2", "2 of its parts"), ("none", "its largest part")]
)
def test_too_large_parts_are_refused(shuffle, amount):
    (portion,) = portions(SIZES, [120], shuffle, seed=0, epoch=0)
    with pytest.raises(ConfigError, match=rf"Then {amount} has to fit into half of data_memory: \d.* in 650 B"):
        read(ddlf.data.generated(numbers, SIZES), portion, 1300)
