"""Tests of the built-in data sets: their sources, their form, and errors of damaged or missing files."""

import sys
import types

import numpy as np
import pytest

import ddlf
from ddlf.data.datasets import fingerprint
from ddlf.errors import DatasetError

IMAGE = {"mnist": (28, 28), "cifar10": (32, 32, 3)}
TRAIN = {"mnist": 60_000, "cifar10": 50_000}


def arrays(name, train=None, test=10_000, value=None):
    """Return arrays in the form of Keras's downloads: uint8, and CIFAR's labels as a column."""
    random = np.random.default_rng(1)
    arrays_by_name = {}
    for split, count in (("train", train or TRAIN[name]), ("test", test)):
        pixels = (
            random.integers(0, 256, (1, *IMAGE[name]), np.uint8) if value is None else np.full((1, *IMAGE[name]), value)
        )
        arrays_by_name[f"x_{split}"] = np.broadcast_to(pixels.astype(np.uint8), (count, *IMAGE[name]))
        arrays_by_name[f"y_{split}"] = (
            (np.arange(count) % 10).astype(np.uint8).reshape((-1, 1) if name == "cifar10" else -1)
        )
    return arrays_by_name


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DDLF_DATA", raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.mkdir()
    monkeypatch.setenv("DDLF_DATA", str(path))
    return path


@pytest.fixture
def downloads(monkeypatch):
    """Replace Keras's download, and count its calls."""
    calls = []

    def load_data():
        calls.append(1)
        images = arrays("mnist", 100, 20)
        return (images["x_train"], images["y_train"]), (images["x_test"], images["y_test"])

    keras = types.SimpleNamespace(datasets=types.SimpleNamespace(mnist=types.SimpleNamespace(load_data=load_data)))
    monkeypatch.setitem(sys.modules, "keras", keras)
    return calls


@pytest.mark.parametrize(
    ("name", "load", "shape"),
    [("mnist", ddlf.load_mnist, (28, 28, 1)), ("cifar10", ddlf.load_cifar10, (32, 32, 3))],
)
def test_loaded_images_are_float32_with_one_hot_labels(folder, name, load, shape):
    raw = arrays(name, 500, 100)
    np.savez(folder / f"{name}.npz", **raw)
    (x_train, y_train), (x_test, y_test) = load()
    assert x_train.shape == (500, *shape)
    assert x_test.shape == (100, *shape)
    assert x_train.dtype == y_train.dtype == np.float32
    assert np.abs(x_train[0] - (raw["x_train"][0].reshape(shape) / 255 - 0.5)).max() < 1e-6
    assert -0.5 <= x_train[0].min() < x_train[0].max() <= 0.5
    assert y_train.shape == (500, 10)
    assert np.array_equal(y_test.argmax(1), raw["y_test"].reshape(-1))
    assert np.array_equal(y_test.sum(1), np.ones(100))


@pytest.mark.parametrize(("value", "scaled"), [(0, -0.5), (255, 0.5)])
def test_black_and_white_are_ends_of_range(folder, value, scaled):
    np.savez(folder / "mnist.npz", **arrays("mnist", 3, 2, value))
    assert ddlf.load_mnist()[0][0][0, 0, 0, 0] == np.float32(scaled)


def test_download_is_cached_on_disk(downloads, tmp_path):
    first = ddlf.load_mnist()
    assert len(downloads) == 1
    cached = ddlf.load_mnist()
    assert len(downloads) == 1
    assert np.array_equal(first[0][0], cached[0][0])
    assert np.array_equal(first[1][1], cached[1][1])
    assert sorted(path.name for path in (tmp_path / "cache/ddlf/datasets").iterdir()) == ["mnist.npz", "mnist.sha256"]


def test_changed_file_in_cache_is_not_used(downloads, tmp_path):
    ddlf.load_mnist()
    cached = tmp_path / "cache/ddlf/datasets/mnist.npz"
    damaged = bytearray(cached.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    cached.write_bytes(damaged)
    ddlf.load_mnist()
    assert len(downloads) == 2


def test_folder_has_priority_over_cache(downloads, folder):
    ddlf.load_mnist()
    np.savez(folder / "mnist.npz", **arrays("mnist", 7, 2))
    assert len(ddlf.load_mnist()[0][0]) == 7


def test_failed_download_says_where_to_put_file(monkeypatch):
    def load_data():
        raise Exception("URL fetch failure")

    keras = types.SimpleNamespace(datasets=types.SimpleNamespace(mnist=types.SimpleNamespace(load_data=load_data)))
    monkeypatch.setitem(sys.modules, "keras", keras)
    with pytest.raises(DatasetError, match=r"cannot be downloaded .*put mnist\.npz into a folder and set DDLF_DATA"):
        ddlf.load_mnist()


def pickled():
    return {**arrays("mnist", 3, 2), "y_train": np.array([object()] * 3)}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lambda: {"x_train": np.zeros(1)}, "has no array"),
        (lambda: {**arrays("mnist", 3, 2), "y_train": np.zeros(2, np.uint8)}, "x_train has 3 rows, y_train 2"),
        (pickled, "cannot be read"),
        (lambda: {**arrays("mnist", 3, 2), "x_train": np.zeros((3, 5, 5), np.uint8)}, "x_train holds images of shape"),
        (lambda: {**arrays("mnist", 3, 2), "y_train": np.array([0, 10, 2], np.uint8)}, "y_train holds labels"),
    ],
)
def test_wrong_content_is_named_with_file(folder, content, sentence):
    np.savez(folder / "mnist.npz", **content())
    with pytest.raises(DatasetError, match=sentence) as refused:
        ddlf.load_mnist()
    assert "mnist.npz" in str(refused.value)


@pytest.mark.parametrize("cut", [0, 10, 2500, -30])
def test_truncated_file_is_named(folder, cut):
    np.savez(folder / "whole.npz", **arrays("mnist", 3, 2))
    (folder / "mnist.npz").write_bytes((folder / "whole.npz").read_bytes()[:cut])
    with pytest.raises(DatasetError, match="cannot be read"):
        ddlf.load_mnist()


def test_missing_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLF_DATA", str(tmp_path / "none"))
    with pytest.raises(DatasetError, match="which is not a folder"):
        ddlf.load_mnist()


def test_fingerprint_differs_exactly_if_content_differs():
    x, y = np.arange(12.0).reshape(3, 4), np.arange(3)
    original = fingerprint(x, y)
    assert fingerprint(np.asfortranarray(x), y.copy()) == original
    changed = x.copy()
    changed[2, 3] = np.nextafter(changed[2, 3], 100)
    different = [
        fingerprint(changed, y),
        fingerprint(x[::-1], y),
        fingerprint(x.reshape(4, 3), y),
        fingerprint(x.astype("float32"), y),
        fingerprint([x], y),
        fingerprint({"x": x}, y),
        fingerprint(y, x),
    ]
    assert len({original, *different}) == 8


def test_fingerprint_refuses_other_objects():
    with pytest.raises(DatasetError, match=r"got a range; convert it in load_dataset"):
        fingerprint(range(3))


def test_digits_of_package_equal_scikit_learn(monkeypatch, tmp_path):
    from sklearn.datasets import load_digits

    monkeypatch.setenv("DDLF_DATA", str(tmp_path / "not there"))
    digits = load_digits()
    test = np.arange(1797) % 5 == 0
    x, y = (digits.images / 16 - 0.5).astype("float32")[..., None], np.eye(10, dtype="float32")[digits.target]
    for (images, labels), chosen in zip(ddlf.load_digits(), (~test, test), strict=True):
        assert (images.dtype, labels.dtype) == (np.float32, np.float32)
        assert np.array_equal(images, x[chosen])
        assert np.array_equal(labels, y[chosen])
