"""Tests of data in a page: it reads NumPy's files exactly, fits them like a Python peer, and explains bad files."""

import json
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import DatasetError
from ddlf.extras.text.training.data import dataset
from ddlf.extras.text.training.notation import Notation
from ddlf.peers.classes import numbered
from tests.patience import PATIENCE_S

BROWSER = Path(__file__).parents[3] / "ddlf/peers/browser"
RANDOM = np.random.default_rng(0)
TEXT = "a:input shape=[{}];\na:output shape=[{}];\na:layers {}Dense(units={}{});\na:loss {};\n"
KERAS = {"SCE": "sparse_categorical_crossentropy", "CCE": "categorical_crossentropy", "MSE": "mean_squared_error"}


def results_of(*cases):
    """Run cases in Node, and return their results."""
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("data.js")), str(BROWSER)],
        input="\n".join(json.dumps(case) for case in cases),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def needs(shape, units, loss="SCE", classes=()):
    return {"input": list(shape), "output": [units], "units": units, "loss": KERAS[loss], "classes": list(classes)}


def test_the_page_reads_each_kind_of_array_that_numpy_writes(tmp_path):
    kinds = ("<f2", "<f4", "<f8", ">f4", "|i1", "|u1", "<i2", ">u2", "<i4", "<u4", "<i8", "<u8", "|b1")
    arrays = {
        f"a{n}": RANDOM.integers(0, 2 if kind == "|b1" else 100, (3, 2, 4)).astype(kind) for n, kind in enumerate(kinds)
    }
    arrays["fractions"] = np.array([0.1, -2.5e-7, 6e-8, 65504, np.inf, -np.inf], "<f2")
    arrays["fortran"] = np.asfortranarray(RANDOM.normal(size=(2, 3, 4)))
    arrays |= {
        "texts": np.array([["Katze", "ü€😀"]]),
        "bytes": np.array([b"cat", b"a"]),
        "one": np.float32(3),
        "none": np.zeros((0, 3)),
    }
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "a.npz", **arrays)
        (answer,) = results_of({"act": "arrays", "path": str(tmp_path / "a.npz")})
        assert list(answer["result"]) == list(arrays)
        for name, array in arrays.items():
            read = answer["result"][name]
            assert read["shape"] == list(array.shape), name
            values = array.astype(str) if array.dtype.kind in "SU" else array.astype(np.float64)
            data = [
                float(value.replace("Infinity", "inf")) if isinstance(value, str) and array.dtype.kind == "f" else value
                for value in read["data"]
            ]
            assert data == values.ravel().tolist(), name


CASES = {
    "class numbers": ((8, 8, 1), 4, "SCE", (), {"x": RANDOM.random((11, 8, 8)), "y": np.arange(11) % 4}),
    "a column of numbers": ((64,), 4, "SCE", (), {"x": RANDOM.random((11, 8, 8, 1)), "y": np.arange(11)[:, None] % 4}),
    "rows for classes": ((8, 8), 4, "SCE", (), {"x": RANDOM.random((11, 64)), "y": np.eye(4)[np.arange(11) % 4]}),
    "numbers for rows": ((6,), 4, "CCE", (), {"x": RANDOM.random((11, 6)), "y": np.arange(11) % 4}),
    "parts": (
        (6,), 4, "SCE", (),
        {"x_train": RANDOM.random((9, 6)), "y_train": np.arange(9) % 4, "x_test": RANDOM.random((3, 6)), "y_test": np.arange(3)},
    ),
    "texts": (
        (6,), 3, "SCE", ("dog", "cat", "bird"),
        {"x": RANDOM.random((7, 6)), "y": np.array(["cat", "dog", "bird", "cat", "dog", "cat", "cat"])},
    ),
    "bytes": ((4, 4, 3), 2, "CCE", (), {"x": RANDOM.integers(0, 256, (6, 4, 4, 3), np.uint8), "y": np.arange(6) % 2}),
    "a table": ((6,), 4, "SCE", (), {"data": np.c_[RANDOM.random((10, 6)), np.arange(10) % 4]}),
    "numbers to predict": ((6,), 1, "MSE", (), {"x": RANDOM.random((10, 6)), "y": RANDOM.random(10)}),
}  # fmt: skip


def test_the_page_and_a_python_peer_fit_arrays_alike(tmp_path):
    asks, expected = [], []
    for name, (shape, units, loss, classes, arrays) in CASES.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        flat = "Flatten(), " if len(shape) > 1 else ""
        softmax = ", activation=softmax" if units > 1 else ""
        text = Notation(TEXT.format(", ".join(map(str, shape)), units, flat, units, softmax, loss), "a.nnm")
        expected.append(dataset(numbered(arrays, classes, "a.npz"), "a.npz", text.parsed, text.loss))
        asks.append(
            {"act": "fitted", "path": str(path), "source": "a.npz", "needs": needs(shape, units, loss, classes)}
        )
    for name, (data, notes), answer in zip(CASES, expected, results_of(*asks), strict=True):
        assert answer.get("result"), (name, answer)
        fitted = answer["result"]
        assert fitted["notes"] == [note for note in notes if "texts" not in note], name
        for part in ("train", "test"):
            if f"x_{part}" not in data:
                assert fitted[part] is None, name
                continue
            for letter in "xy":
                page_array, expected_array = fitted[part][letter], data[f"{letter}_{part}"]
                assert page_array["shape"] == list(expected_array.shape), (name, part, letter)
                np.testing.assert_array_equal(
                    np.array(page_array["data"], np.float32), expected_array.ravel().astype(np.float32)
                )


def test_a_shard_that_arrives_in_pieces_is_read_whole(tmp_path):
    x, y = RANDOM.random((50, 6), np.float32), np.arange(50) % 3
    np.savez(tmp_path / "shard.npz", x_train=x, y_train=y)
    graph = {"inputs": [{"shape": [6]}], "losses": [{"kind": KERAS["SCE"]}], "output_shapes": [[3]]}
    case = {"act": "lent", "path": str(tmp_path / "shard.npz"), "bytes": 700, "served": {"graph": graph}}
    (shard,) = (answer["result"] for answer in results_of(case))
    np.testing.assert_array_equal(np.array(shard["x"]["data"], np.float32), x.ravel())
    assert shard["y"]["data"] == y.tolist()
    size = (tmp_path / "shard.npz").stat().st_size
    assert shard["asked"] == [["/shard/3", f"bytes={begin}-"] for begin in range(0, size, 700)]


def archive(**files):
    target = BytesIO()
    with zipfile.ZipFile(target, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(f"{name}.npy", content)
    return target.getvalue()


def saved(**arrays):
    target = BytesIO()
    np.savez(target, **arrays)
    return target.getvalue()


X, Y = np.zeros((10, 6), np.float32), np.arange(10) % 3
GOOD = saved(x=X, y=Y)
FLIPPED = bytearray(GOOD)
FLIPPED[300] ^= 1
BAD = {
    "cut off": (GOOD[:-40], "cannot be read: it is no .npz file, or it is cut off"),
    "empty": (b"", "cannot be read: it is no .npz file"),
    "a picture": (b"\x89PNG" * 20, "cannot be read: it is no .npz file"),
    "one bit flipped": (bytes(FLIPPED), "the array x is damaged"),
    "no array": (archive(), "it has no arrays"),
    "not an array": (archive(x=b"hello hello"), "no array of NumPy"),
    "objects": (saved(x=np.array([{}, []], object), y=Y), "Python objects"),
    "no x": (saved(y=Y, z=X), "has no x or x_train; it has y, z"),
    "no labels": (saved(x=X), "has no y"),
    "no samples": (saved(x=X[:0], y=Y[:0]), "has no samples in x"),
    "one sample": (saved(x=X[:1], y=Y[:1]), "has one sample"),
    "a single number": (saved(x=np.float32(1), y=Y), "a single number"),
    "other lengths": (saved(x=X, y=Y[:9]), "10 samples in x and 9 in y"),
    "another shape": (saved(x=np.zeros((10, 7)), y=Y), "samples of the shape [7], and the model wants [6]"),
    "NaN": (saved(x=np.full((10, 6), np.nan), y=Y), "not finite"),
    "a class too many": (saved(x=X, y=Y + 1), "labels from 1 to 3 in y, and the model has 3 classes"),
    "fractions": (saved(x=X, y=Y + 0.5), "whole numbers from 0 to 2"),
    "texts without names": (saved(x=X, y=Y.astype(str)), "the server has agreed on no names of classes"),
    "complex": (saved(x=X.astype(complex), y=Y), "values of the type c16"),
    "texts in x": (saved(x=X.astype(str), y=Y), "has texts in x"),
    "twice": (saved(x=X, y=Y, x_train=X, y_train=Y), "twice the training data"),
}


def test_bad_files_get_one_sentence_each(tmp_path):
    asks = []
    for name, (content, _) in BAD.items():
        (tmp_path / name).write_bytes(content)
        asks.append({"act": "fitted", "path": str(tmp_path / name), "source": "mine.npz", "needs": needs((6,), 3)})
    for (name, (_, reason)), answer in zip(BAD.items(), results_of(*asks), strict=True):
        assert reason in answer.get("refused", ""), (name, answer)
        assert answer["refused"].startswith("mine.npz"), name
        assert answer["hint"], name


def test_a_python_peer_refuses_the_same_arrays():
    text = Notation(TEXT.format("6", 3, "", 3, ", activation=softmax", "SCE"), "a.nnm")
    for name in (
        "no x",
        "no labels",
        "no samples",
        "one sample",
        "another shape",
        "a class too many",
        "other lengths",
        "twice",
    ):
        with np.load(BytesIO(BAD[name][0])) as archive, pytest.raises(DatasetError):
            dataset(dict(archive), "mine.npz", text.parsed, text.loss)


def test_labels_of_folders_follow_the_agreed_names():
    named = needs((8, 8), 2, classes=("cat", "dog"))
    labels = ["dog", "cat", "Dog", "0", None]
    answers = results_of(
        {"act": "numbers", "labels": labels, "needs": named},
        {"act": "numbers", "labels": ["0", "1", "2", "01", "cat", "-1"], "needs": needs((8, 8), 2)},
    )
    assert [answer["result"] for answer in answers] == [[1, 0, None, None, None], [0, 1, None, 1, None, None]]


def test_the_page_recognises_models_that_take_pictures():
    shapes = {
        (28, 28, 1): (28, 28, 1), (32, 48, 3): (32, 48, 3), (28, 28): (28, 28, 1), (784,): (28, 28, 1), (3072,): (32, 32, 3),
        (6,): None, (100, 2): None, (8, 8, 8): None, (4, 4, 4, 1): None,
    }  # fmt: skip
    answers = results_of(*({"act": "picture", "needs": needs(shape, 2)} for shape in shapes))
    for (shape, expected), answer in zip(shapes.items(), answers, strict=True):
        picture = None if expected is None else dict(zip(("height", "width", "channels"), expected, strict=True))
        assert answer["result"] == picture, shape


def test_the_size_of_a_picture_is_known_before_it_is_decoded():
    from PIL import Image

    asks, sizes = [], [(40, 30), (1000, 1)]
    for kind in ("PNG", "JPEG", "GIF", "BMP"):
        for size in sizes:
            Image.new("RGB", size).save(target := BytesIO(), kind)
            asks.append({"act": "size", "bytes": list(target.getvalue())})
    assert [tuple(answer["result"]) for answer in results_of(*asks)] == sizes * 4
    assert results_of({"act": "size", "bytes": []})[0]["result"] is None


def test_outputs_become_probabilities_for_any_last_layer():
    logits = RANDOM.normal(size=4) * 3
    soft = np.exp(logits) / np.exp(logits).sum()
    cases = (
        ([0.25, 0.75], 2, [0.25, 0.75]),
        (list(logits), 4, list(soft)),
        ([0.3], 2, [0.7, 0.3]),
        ([-3.0], 2, [0.952574, 0.047426]),
    )
    answers = results_of(*({"act": "probabilities", "values": values, "count": count} for values, count, _ in cases))
    for (_, _, expected), answer in zip(cases, answers, strict=True):
        np.testing.assert_allclose(answer["result"], expected, atol=1e-6)
