"""Tests of Parquet, tar and TFRecord files as sources, and of the errors of unusable ones."""

import io
import struct
import tarfile
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ddlf.data.export import export
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import sizes_of, split
from ddlf.errors import ConfigError, DatasetError
from tests.data.archives import npy, write_tar


def all_of(source, at_once=3):
    """Return all samples. Check that a source that skips its first samples, like a resumed split, gives the same rest."""
    rows = np.concatenate(list(source.rows(at_once)))
    for first in range(1, min(len(rows), 6)):
        assert np.concatenate(list(source.rows(at_once, first))).tobytes() == rows[first:].tobytes()
    return rows


def png(value=1, size=(4, 3), mode="L"):
    file = io.BytesIO()
    Image.new(mode, size, value).save(file, "PNG")
    return file.getvalue()


def field(number, data):
    """Return a field of a protocol buffer with a text or another message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value):
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def example(**features):
    """Return a tf.train.Example with features of bytes, floats or integers."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif isinstance(value, float | list):
            feature = field(2, field(1, np.array(value, "<f4").tobytes()))
        else:
            feature = field(3, field(1, varint(value & 2**64 - 1)))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_records(path, records):
    """Write a TFRecord file in the format of TensorFlow's documentation."""

    def masked(data):
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    content = b""
    for data in records:
        length = struct.pack("<Q", len(data))
        content += length + masked(length) + data + masked(data)
    path.write_bytes(content)
    return path


def test_tar_source_has_sample_per_stem(tmp_path):
    members = [
        (f"a/{n:03}.{ending}", data) for n in range(5) for ending, data in (("png", png(n)), ("cls", b"%d\n" % n))
    ]
    for name in ("train.tar", "train.tar.gz"):
        source = open_source(write_tar(tmp_path / name, members))
        assert {name: (column.dtype, column.shape) for name, column in source.columns.items()} == {
            "x": ("uint8", (3, 4, 1)),
            "y": ("int64", ()),
        }
        rows = all_of(source)
        assert (rows["y"].tolist(), rows["x"][:, 0, 0, 0].tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    members = [
        (f"{n}.{ending}", npy(np.full(2, n, np.float32))) for n in range(3) for ending in ("left.npy", "right.npy")
    ]
    source = open_source(write_tar(tmp_path / "two.tar", members), columns="x['left']=left.npy,x['right']=right.npy")
    assert all_of(source)["x['right']"].tolist() == [[0, 0], [1, 1], [2, 2]]
    members = [(f"{n}.npy", npy(np.full(2, n, np.float32))) for n in range(3)]
    assert all_of(open_source(write_tar(tmp_path / "one.tar", members)))["x"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_folder_of_files_is_one_source(tmp_path):
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", [(f"{n}.cls", b"%d" % (10 * shard + n)) for n in range(3)])
    source = open_source(tmp_path)
    assert source.samples == 6
    assert all_of(source, 4)["y"].tolist() == [0, 1, 2, 10, 11, 12]


def test_tfrecord_source_has_features_of_examples(tmp_path):
    records = [example(image=png(n), label=n - 1, at=[n, 0.5], w=float(n)) for n in range(4)]
    path = write_records(tmp_path / "train.tfrecord-00000-of-00001", records)
    rows = all_of(open_source(path, columns="x=image,y=label,at,w"))
    assert (rows["x"].shape, rows["x"][2, 0, 0, 0], rows["y"].tolist()) == ((4, 3, 4, 1), 2, [-1, 0, 1, 2])
    assert (rows["at"][3].tolist(), rows["w"].tolist(), rows["w"].dtype) == ([3, 0.5], [0, 1, 2, 3], np.float32)
    unpacked = field(1, field(1, field(1, b"n") + field(2, field(3, varint(1 << 3) + varint(7)))))
    assert all_of(open_source(write_records(tmp_path / "one.tfrecord", [unpacked])))["n"].tolist() == [7]


def test_tfrecord_source_notices_every_flipped_byte(tmp_path):
    content = write_records(tmp_path / "a.tfrecord", [example(label=1), example(label=2)]).read_bytes()
    for at in range(len(content)):
        (tmp_path / "a.tfrecord").write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(DatasetError, match=r"record [01] of .*a.tfrecord is damaged"):
            open_source(tmp_path / "a.tfrecord")
        if at not in (0, len(content) // 2):
            (tmp_path / "a.tfrecord").write_bytes(content[:at])
            with pytest.raises(DatasetError, match=r"ends inside of record [01]"):
                open_source(tmp_path / "a.tfrecord")


def test_parquet_source_has_numbers_vectors_images_and_labels(tmp_path):
    table = pa.table(
        {
            "id": pa.array(range(5), pa.int32()),
            "v": [[n, n + 0.5] for n in range(5)],
            "m": pa.array([[[n, 1], [2, 3]] for n in range(5)], pa.list_(pa.list_(pa.int64(), 2), 2)),
            "image": [{"bytes": png(n), "path": ""} for n in range(5)],
            "kind": ["dog", "cat", "dog", "ant", "cat"],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    source = open_source(tmp_path / "t.parquet", label="kind")
    rows = all_of(source)
    assert source.classes == ["ant", "cat", "dog"]
    assert rows["y"].tolist() == [2, 1, 2, 0, 1]
    assert (rows["id"].tolist(), rows["id"].dtype, rows["v"][1].tolist()) == ([0, 1, 2, 3, 4], np.int32, [1, 1.5])
    assert (rows["m"][4].tolist(), rows["image"].shape) == ([[4, 1], [2, 3]], (5, 3, 4, 1))
    assert list(open_source(tmp_path / "t.parquet", columns="x=image,y=id").columns) == ["x", "y"]
    with pytest.raises(DatasetError, match="column 'kind' holds string, not numbers"):
        open_source(tmp_path / "t.parquet")


def test_data_set_is_source_of_another(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20), y=np.arange(20) * 2)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "one"), sizes_of(20, 1, files=3))
    split(open_source(tmp_path / "one"), Folder(tmp_path / "two"), sizes_of(20, 1, files=2), seed=5)
    rows = all_of(open_source(tmp_path / "two"))
    assert sorted(rows["x"].tolist()) == list(range(20))
    assert np.array_equal(rows["y"], 2 * rows["x"])


@pytest.mark.parametrize("ending", ["npz", "parquet", "tar", "tfrecord"])
def test_export_gives_same_data_set_again(tmp_path, ending):
    arrays = {
        "x": np.arange(240, dtype=np.float32).reshape(20, 3, 4),
        "y": np.arange(20) - 3,
        "w": np.arange(20, dtype=np.float32) / 7,
        "image": np.arange(120, dtype=np.uint8).reshape(20, 6),
        "far": np.arange(20, dtype=np.int64) * -(2**40),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    folder = Folder(tmp_path / "place")
    split(open_source(tmp_path / "a.npz"), folder, sizes_of(20, 1, files=3), shuffle=False)
    export(folder, folder.manifest(), tmp_path / f"b.{ending}")
    rows = all_of(open_source(tmp_path / f"b.{ending}"))
    for name, array in arrays.items():
        assert rows[name].dtype == array.dtype
        assert np.array_equal(rows[name].reshape(array.shape), array)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"a.npz", f"b.{ending}", "place"})


def test_export_refuses_unsupported_columns(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    folder = Folder(tmp_path / "place")
    split(open_source(tmp_path / "a.npz"), folder, [3])
    with pytest.raises(DatasetError, match=r"column x is float64, which a tf\.train\.Example cannot hold"):
        export(folder, folder.manifest(), tmp_path / "a.tfrecord")
    with pytest.raises(DatasetError, match=r"a\.h5 has an unknown format; name it \.npz, \.parquet, \.tar, \.tfrecord"):
        export(folder, folder.manifest(), tmp_path / "a.h5")
    with pytest.raises(DatasetError, match=r"s3:/bucket/a\.npz is a URL, but an export writes a file on this machine"):
        export(folder, folder.manifest(), Path("s3://bucket/a.npz"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "place"]


def link(kind):
    info = tarfile.TarInfo("0.png")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(link(tarfile.SYMTYPE), b"")], r"0\.png of .*a\.tar is a link"),
        ([(link(tarfile.LNKTYPE), b"")], "is a link"),
        ([(link(tarfile.CHRTYPE), b"")], "is not a plain file"),
        ([("../0.png", b"")], r"names \.\./0\.png, outside of it"),
        ([("/0.png", b"")], "names /0.png, outside of it"),
        ([("0", b"")], "0 of .*a.tar has no ending"),
        ([("0.cls", b"1"), ("0.cls", b"2")], "has 0.cls twice"),
        ([("0.cls", b"one")], r"0\.cls of .*a\.tar cannot be read"),
        ([("0.png", b"no image")], r"0\.png of .*a\.tar is not a readable image"),
        ([("0.png", png(mode="RGBA", value=(1, 2, 3, 4)))], "has transparent pixels"),
        ([("0.npy", npy(np.array([{}])))], r"0\.npy of .*a\.tar cannot be read"),
        ([("0.txt", b"words")], "txt is neither a number nor an image"),
        ([("0.cls", b"1"), ("1.png", png())], "1 of .*a.tar has no cls, but 0 of .*a.tar has"),
        (
            [("0.npy", npy(np.ones(2))), ("1.npy", npy(np.ones(3)))],
            r"is float64 of shape \(3,\), but that of 0 of .* \(2,\)",
        ),
        ([], "has no samples"),
    ],
)
def test_unusable_tar_file_is_refused_in_one_sentence(tmp_path, members, message):
    with pytest.raises(DatasetError, match=message):
        all_of(open_source(write_tar(tmp_path / "a.tar", members)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_damaged_source_file_is_named(tmp_path):
    content = write_tar(tmp_path / "a.tar", [("0.npy", npy(np.ones(1000)))]).read_bytes()
    (tmp_path / "a.tar").write_bytes(content[:1500])
    with pytest.raises(
        DatasetError, match=r"a\.tar (is not a readable tar file|ends too early)|0\.npy of .* ends too early"
    ):
        all_of(open_source(tmp_path / "a.tar"))
    (tmp_path / "b.tar").write_bytes(b"nothing of that kind" * 100)
    with pytest.raises(DatasetError, match="is not a readable tar file"):
        open_source(tmp_path / "b.tar")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nothing of that kind PAR1")
    with pytest.raises(DatasetError, match=r"the Parquet file .*c\.parquet cannot be read"):
        open_source(tmp_path / "c.parquet")
    write_records(tmp_path / "d.tfrecord", [b"\xff\xff\xff"])
    with pytest.raises(DatasetError, match=r"record 0 of .*d\.tfrecord is not a tf\.train\.Example"):
        all_of(open_source(tmp_path / "d.tfrecord"))
    write_records(tmp_path / "e.tfrecord", [])
    with pytest.raises(DatasetError, match="has no samples"):
        open_source(tmp_path / "e.tfrecord")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": pa.array([1, None])}, r"a\.parquet, row 1: column 'a' has no value"),
        ({"a": [[1], [1, 2]]}, "row 1: column 'a' has a list of 2 values, but 1 in the rows before"),
        ({"a": [b"x", b"y"]}, "column 'a' holds bytes that are not images"),
        ({"a": [png(), png(size=(2, 2))]}, "has images of several sizes"),
        ({"a": ["b", "c"]}, "column 'a' holds string, not numbers"),
        ({"a": pa.array([], pa.int64())}, "has no samples"),
    ],
)
def test_unusable_parquet_file_is_refused_in_one_sentence(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=message):
        all_of(open_source(tmp_path / "a.parquet"))


def test_parquet_labels_without_a_value_are_refused_by_row(tmp_path):
    for labels, message in (
        (["a", None, "b"], r"a\.parquet, row 1: column 'y' has no value"),
        (["a", "b", ""], r"a\.parquet: column 'y' has an empty text"),
    ):
        pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": labels}), tmp_path / "a.parquet", row_group_size=1)
        with pytest.raises(DatasetError, match=message):
            all_of(open_source(tmp_path / "a.parquet", label="y"))


def test_unusable_source_options_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    for options, message in {
        "label": ({"label": "b"}, "has no column 'b'; it has a"),
        "columns": ({"columns": "x=b"}, "has no column 'b'; it has a"),
        "part": ({"part": "test"}, "--part has no effect"),
    }.values():
        with pytest.raises(ConfigError, match=message):
            open_source(tmp_path / "a.parquet", **options)
    pq.write_table(pa.table({"b": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"b\.parquet has the columns b, but .*a\.parquet has a"):
        open_source(tmp_path)
