"""Tests of the sources of a data set, and of the errors of unusable ones."""

import io
import os
import threading
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from ddlf.data.images import Decoder, on_all_cores
from ddlf.data.sources import open_source
from ddlf.errors import ConfigError, DatasetError


def all_of(source, at_once=7):
    return np.concatenate(list(source.rows(at_once)))


def test_keras_archive_gives_training_part_as_x_and_y(tmp_path):
    x, y = np.arange(20).reshape(10, 2), np.arange(10)
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    assert list(open_source(tmp_path / "a.npz").columns) == ["x", "y"]
    assert np.array_equal(all_of(open_source(tmp_path / "a.npz"))["x"], x)
    assert open_source(tmp_path / "a.npz", part="test").samples == 4
    assert list(open_source(tmp_path / "a.npz", columns="image=x_test,y_test").columns) == ["image", "y_test"]


def test_arrays_are_read_from_file_and_folder(tmp_path):
    np.save(tmp_path / "left.npy", np.arange(6, dtype=">i4").reshape(3, 2))
    np.save(tmp_path / "right.npy", np.array([True, False, True]))
    columns = all_of(open_source(tmp_path))
    assert columns["left"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert columns["right"].tolist() == [True, False, True]
    assert all_of(open_source(tmp_path / "left.npy"), 2)["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_table_has_labels_of_each_kind(tmp_path):
    (tmp_path / "t.csv").write_text("a,kind,b,n\n1,dog,2.5,1.5\n3,cat,4e1,2\n")
    source = open_source(tmp_path / "t.csv", label="n")
    assert source.columns["y"].dtype == "float32"
    (tmp_path / "t.csv").write_text("a,kind\n1,1_2\n3,1_1\n")
    assert open_source(tmp_path / "t.csv", label="kind").classes == ["1_1", "1_2"]
    (tmp_path / "t.csv").write_text('a,kind,b\n1,dog,2.5\n\n3,"cat",4e1\n')
    source = open_source(tmp_path / "t.csv", label="kind")
    rows = all_of(source, 1)
    assert source.classes == ["cat", "dog"]
    assert (rows["x"].tolist(), rows["y"].tolist(), rows["x"].dtype) == ([[1, 2.5], [3, 40]], [1, 0], np.float32)


def test_images_have_the_number_of_their_folder_as_label(tmp_path):
    for name, value in (("cats", 10), ("dogs", 20)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 3), (value, 0, 1)).save(tmp_path / name / "1.png")
    source = open_source(tmp_path)
    assert (source.classes, source.columns["x"].shape) == (["cats", "dogs"], (3, 4, 3))
    rows = all_of(source)
    assert (rows["y"].tolist(), rows["x"][1, 0, 0].tolist()) == ([0, 1], [20, 0, 1])
    Image.new("RGB", (8, 8)).save(tmp_path / "dogs" / "2.png")
    with pytest.raises(DatasetError, match=r"2\.png is 8x8 RGB, but .*1\.png is 4x3 RGB"):
        all_of(open_source(tmp_path))
    assert all_of(open_source(tmp_path, image_size="5x6"))["x"].shape == (3, 6, 5, 3)
    (tmp_path / "birds" / "small").mkdir(parents=True)
    with pytest.raises(DatasetError, match="birds has folders, but no images, so it is not a class"):
        open_source(tmp_path)


def test_empty_class_folder_keeps_the_numbers_of_other_classes(tmp_path):
    for name in ("ants", "bees", "cats"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "cats" / "1.png")
    source = open_source(tmp_path)
    assert (source.classes, all_of(source)["y"].tolist()) == (["ants", "bees", "cats"], [2])
    (tmp_path / "bees" / "1.heic").write_bytes(b"1")
    with pytest.raises(DatasetError, match=r"bees has 1 other files, but no images, so it is not a class"):
        open_source(tmp_path)


def saved(path, image, **more):
    image.save(path, **more)
    return path


def wide_png():
    """Return the PNG of an RGB image with 16 bits for each channel, which Pillow cannot write."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (4).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    body = zlib.compress((b"\0" + b"\1\2" * 12) * 3)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_images_of_other_modes_are_converted(tmp_path):
    colours = Image.new("RGB", (4, 3), (200, 100, 50))
    for number, image in enumerate([colours.convert("RGBA"), colours.convert("P", palette=Image.Palette.ADAPTIVE)]):
        pixels = Decoder().pixels(saved(tmp_path / f"{number}.png", image), "it")
        assert (pixels.dtype, pixels.shape, pixels[0, 0].tolist()) == (np.uint8, (3, 4, 3), [200, 100, 50])
    pixels = Decoder().pixels(saved(tmp_path / "la.png", colours.convert("LA")), "it")
    assert pixels.shape == (3, 4, 1)
    bits = Image.fromarray(np.array([[True, False]]))
    assert Decoder().pixels(saved(tmp_path / "1.png", bits), "it").ravel().tolist() == [255, 0]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_grey_images_of_16_bits_keep_them(tmp_path, ending):
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    path = saved(tmp_path / f"a.{ending}", Image.fromarray(values))
    assert np.array_equal(Decoder().pixels(path, "it")[..., 0], values)
    assert Decoder("2x2").pixels(path, "it").dtype == np.uint16
    (tmp_path / "set" / "a").mkdir(parents=True)
    path.rename(tmp_path / "set" / "a" / path.name)
    source = open_source(tmp_path / "set")
    assert source.columns["x"].dtype == "uint16"
    assert np.array_equal(all_of(source)["x"][0, ..., 0], values)
    Image.new("L", (4, 3)).save(tmp_path / "set" / "a" / "b.png")
    with pytest.raises(DatasetError, match=r"b\.png is 4x3 grey, but .* is 4x3 grey of 16 bits"):
        all_of(open_source(tmp_path / "set"))


def test_big_endian_images_of_16_bits_are_read_correctly(tmp_path):
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    image = Image.frombytes("I;16B", (4, 3), values.astype(">u2").tobytes())
    assert np.array_equal(Decoder().pixels(saved(tmp_path / "a.tif", image), "it")[..., 0], values)


def test_images_with_lossy_conversion_are_refused(tmp_path):
    glass = Image.new("RGBA", (4, 3), (1, 2, 3, 254))
    with pytest.raises(DatasetError, match=r"it has transparent pixels.*background"):
        Decoder().pixels(saved(tmp_path / "a.png", glass), "it")
    marked = Image.new("P", (4, 3))
    with pytest.raises(DatasetError, match="it has transparent pixels"):
        Decoder().pixels(saved(tmp_path / "b.png", marked, transparency=0), "it")
    with pytest.raises(DatasetError, match="it has 16 bits for each of 3 channels, but Pillow reads only 8"):
        Decoder().pixels(io.BytesIO(wide_png()), "it")


def test_integers_of_a_table_are_not_rounded(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,16777216\n2,0.1\n")
    assert open_source(tmp_path / "t.csv").columns["x"].dtype == "float32"
    (tmp_path / "t.csv").write_text("a,b\n1,16777217\n2,0.1\n")
    assert all_of(open_source(tmp_path / "t.csv"))["x"].tolist() == [[1, 16777217], [2, 0.1]]
    (tmp_path / "t.csv").write_text(f"a,b\n1,{2**53 + 1}\n")
    with pytest.raises(DatasetError, match=r"line 2 of .*: 9007199254740993 has more digits than float64 keeps"):
        open_source(tmp_path / "t.csv")


def header(claims, data=b""):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": claims})
    return file.getvalue() + data


def broken(tmp_path):
    """Return unusable files and folders, each with its error text and options."""

    def npz(name, **arrays):
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    def written(name, data):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    def image(name, picture):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / name)
        return (tmp_path / name).parents[1]

    twice = tmp_path / "twice.npz"
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("x.npy", header((1,), b"1"))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", header((1,), b"1"))
    return [
        (tmp_path / "nothing", "there is no", {}),
        (written("a.txt", b"1"), "has an unknown format", {}),
        (written("a.tsv", b"1"), "has an unknown format", {"label": "y"}),
        (npz("objects.npz", x=np.array([None, {}])), "holds Python objects, not numbers", {}),
        (npz("text.npz", x=np.array(["a"])), "not numbers; save .* as numpy.unique", {}),
        (npz("lengths.npz", x=np.zeros(3), y=np.zeros(2)), "x has 3 rows, y has 2 rows", {}),
        (npz("none.npz", x=np.zeros((0, 2))), "has no samples", {}),
        (npz("single.npz", x=np.float32(1)), "is a single number", {}),
        (npz("column.npz", x=np.asfortranarray(np.zeros((3, 2)))), "column by column", {}),
        (npz("zero.npz", x=np.zeros((3, 0))), r"rows of shape \(0,\)", {}),
        (npz("name.npz", **{"a b": np.zeros(3)}), "a column cannot be named 'a b'", {}),
        (written("huge.npy", header((10**12,))), "claims 1,000,000,000,000 bytes, but has 0", {}),
        (written("cut.npy", header((5,), b"1234")), "claims 5 bytes, but has 4", {}),
        (written("empty.npz", b""), "cannot be read", {}),
        (written("noise.npy", b"noise" * 10), "cannot be read", {}),
        (twice, "a duplicate", {}),
        (npz("part.npz", x=np.zeros(3)), "no array of test", {"part": "test"}),
        (npz("column2.npz", x=np.zeros(3)), "no array 'y'", {"columns": "y"}),
        (npz("column3.npz", x=np.zeros(3)), "one name twice", {"columns": "x,x"}),
        (npz("effect.npz", x=np.zeros(3)), "--label has no effect", {"label": "y"}),
        (written("ragged.csv", b"a,b\n1,2\n3\n"), "line 3 .* has 1 values, but there are 2 names", {}),
        (written("word.csv", b"a,b\n1,2\n3,x\n"), "line 3 .*'x' in the column 'b' is not a number; .* --label$", {}),
        (written("known.csv", b"a,b\n1,2\nx,3\n"), "line 3 .*'x' in the column 'a' .*; correct it$", {"label": "b"}),
        (written("gap.csv", b"a,b\n1,2\n,4\n"), "line 3 of .* has no a; fill the value, or leave the line out", {}),
        (written("names.csv", b"1,2\n3,4\n"), "has no names", {}),
        (written("head.csv", b"a,b\n"), "has no samples", {}),
        (written("label.csv", b"a,b\n1,2\n"), "no column 'c'", {"label": "c"}),
        (written("unlabelled.csv", b"a,b\n1,0\n2,\n3,1\n"), "line 3 of .* has no b", {"label": "b"}),
        (written("labels.csv", b"a,b,b\n1,2,2\n"), "has 2 columns 'b'", {"label": "b"}),
        (written("twice.csv", b"a,b,a\n1,2,2\n"), "has 2 columns 'a'; give each its own name", {"label": "b"}),
        (written("latin.csv", b"a,b\n\xe9,2\n"), "not a CSV file in UTF-8", {}),
        (written("pictures/a/1.png", b"no picture").parents[1], r"not a readable image \(of a format that", {}),
        (image("cmyk/a/1.jpg", Image.new("CMYK", (2, 2))), "is of mode CMYK", {}),
        (image("deep/a/1.tif", Image.new("F", (2, 2))), "is of mode F", {}),
        (written("large/a/1.pgm", b"P5 10001 10000 255\n").parents[1], "has 100,010,000 pixels", {}),
        (image("size/a/1.png", Image.new("L", (2, 2))), "must be width x height", {"image_size": "0x5"}),
        (image("folder/a/1.txt.png", Image.new("L", (2, 2))).parent / "deep" / "a", "neither a .npy file", {}),
    ]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_unusable_source_is_refused_in_one_sentence(tmp_path):
    for path, message, options in broken(tmp_path):
        with pytest.raises((ConfigError, DatasetError), match=message) as raised:
            for _ in open_source(path, **options).rows(2):
                pass
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("first", [0, 1, 3, 4])
def test_every_source_can_skip_first_samples(tmp_path, first):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(10).reshape(5, 2), y=np.arange(5))
    np.save(tmp_path / "b.npy", np.arange(5))
    (tmp_path / "c.csv").write_text("a,b\n1,2\n3,4\n\n5,6\n7,8\n9,10\n")
    for name in ("a.npz", "b.npy", "c.csv"):
        source = open_source(tmp_path / name)
        rows = np.concatenate(list(source.rows(2)))
        assert np.array_equal(np.concatenate(list(source.rows(2, first))), rows[first:])


def test_images_are_decoded_on_the_cores_of_the_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert len(set(on_all_cores(lambda _: threading.get_ident(), range(100)))) == 1
