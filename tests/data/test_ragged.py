"""Tests of rows of different lengths, encoded images, and an app's ``decode``: stored form and training samples."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data.export import export
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import PartitionedSource, repartition, split
from ddlf.data.stream import SampleStream
from ddlf.errors import ConfigError, DatasetError
from tests.data.archives import npy, write_tar

CHANCE = np.random.default_rng(1)
TEXTS = [CHANCE.integers(1, 99, length).astype(np.int64) for length in (3, 1, 0, 7, 2, 5, 4)]
PICTURES = [CHANCE.integers(0, 255, (8 + n, 6, 3), np.uint8) for n in range(6)]


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def streamed(data, sizes, shuffle="none"):
    (portion,) = portions(sizes, [sum(sizes)], shuffle, seed=1, epoch=0)
    chunks = list(SampleStream(data, portion, 2, 10**6))
    return portion.ids(sizes), {name: np.concatenate([chunk[name] for chunk in chunks]) for name in data}


@pytest.fixture
def texts(tmp_path):
    pq.write_table(pa.table({"x": [row.tolist() for row in TEXTS], "y": range(7)}), tmp_path / "a.parquet")
    split(open_source(tmp_path / "a.parquet", ragged="x"), Folder(tmp_path / "place"), [3, 4], shuffle=False)
    return tmp_path / "place"


def test_ragged_rows_are_stored_as_is_and_padded_on_reading(texts, tmp_path):
    data = ddlf.data.open(texts)
    assert data.manifest.columns["x"].shape == (7,)
    ids, read = streamed(data, [3, 4], "window:2")
    for number, row in zip(ids, read["x"], strict=True):
        assert row.tolist() == [*TEXTS[number], *[0] * (7 - len(TEXTS[number]))]
    assert np.array_equal(data["x"][ids], read["x"])
    tar = write_tar(tmp_path / "a.tar", [(f"{n}.npy", npy(row)) for n, row in enumerate(TEXTS)])
    split(open_source(tar, ragged="x"), Folder(tmp_path / "of tar"), [7], shuffle=False)
    assert np.array_equal(ddlf.data.open(tmp_path / "of tar")["x"], data["x"])


def test_ragged_rows_survive_shuffle_repartition_and_export(texts, tmp_path):
    repartition(Folder(texts), PartitionedSource(Folder(texts)), [2, 2, 3])
    data = ddlf.data.open(texts)
    assert [data.mapped(n)["x"][row].tolist() for n, size in enumerate([2, 2, 3]) for row in range(size)] == [
        row.tolist() for row in TEXTS
    ]
    for ending, more in ((".tar", {"ragged": "x"}), (".parquet", {"ragged": "x"}), (".tfrecord", {"ragged": "x"})):
        export(Folder(texts), data.manifest, tmp_path / f"again{ending}")
        split(open_source(tmp_path / f"again{ending}", **more), Folder(tmp_path / ending), [3, 4], memory=10**6)
        exported = ddlf.data.open(tmp_path / ending)
        assert sorted(zip(exported["y"].tolist(), exported["x"].tolist(), strict=True)) == sorted(
            zip(data["y"].tolist(), data["x"].tolist(), strict=True)
        )
    export(Folder(texts), data.manifest, tmp_path / "again.npz")
    assert np.array_equal(np.load(tmp_path / "again.npz")["x"], data["x"])


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_encoded_images_are_decoded_on_reading(tmp_path, kind):
    files = [encoded(pixels) for pixels in PICTURES]
    source, more = tmp_path / f"a.{kind}", {}
    if kind == "folder":
        for number, data in enumerate(files):
            (source / str(number)).mkdir(parents=True)
            (source / str(number) / "a.png").write_bytes(data)
    elif kind == "tar":
        write_tar(source, [m for n, data in enumerate(files) for m in ((f"{n}.png", data), (f"{n}.cls", b"%d" % n))])
    else:
        pq.write_table(pa.table({"x": files, "y": range(6)}), source)
    split(open_source(source, ragged="x", **more), Folder(tmp_path / "place"), [3, 3])

    def decode(sample):
        assert bytes(sample["x"]) == files[sample["y"]]
        pixels = ddlf.data.pixels(sample["x"])
        return {"x": {"top": pixels[0], "size": len(pixels)}, "y": sample["y"]}

    data = ddlf.data.open(tmp_path / "place", decode=decode)
    assert list(data) == ["x['top']", "x['size']", "y"]
    _, read = streamed(data, [3, 3], "window:1")
    assert sorted(read["y"]) == list(range(6))
    for number, top, size in zip(read["y"], read["x['top']"], read["x['size']"], strict=True):
        assert size == len(PICTURES[number])
        assert np.array_equal(top, PICTURES[number][0])
    assert np.array_equal(data["y"], streamed(data, [3, 3])[1]["y"])


def cmyk():
    file = io.BytesIO()
    Image.new("CMYK", (4, 4)).save(file, "JPEG")
    return file.getvalue()


def huge():
    data = encoded(np.zeros((1, 1, 3), np.uint8), "BMP")
    return data[:18] + (20_000).to_bytes(4, "little") * 2 + data[26:]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (encoded(PICTURES[0])[:60], "is not a readable image"),
        (encoded(np.zeros((4, 4, 4), np.uint8)), "has transparent pixels"),
        (cmyk(), "of mode CMYK, not grey"),
        (b"P6 0 0 255\n", "is not a readable image|has no pixels"),
        (huge(), "pixels"),
        (b"", "is not a readable image"),
    ],
    ids=["cut", "transparent", "CMYK", "0x0", "400 megapixels", "nothing"],
)
@pytest.mark.parametrize("ragged", ["", "x"])
def test_unusable_images_are_named_before_writing(tmp_path, image, message, ragged):
    tar = write_tar(tmp_path / "a.tar", [("0.png", encoded(PICTURES[0])), ("1.png", image)])
    with pytest.raises(DatasetError, match=rf"1\.png of .*({message})"):
        split(open_source(tar, ragged=ragged), Folder(tmp_path / "place"), [2])
    assert not (tmp_path / "place").exists()
    with pytest.raises(DatasetError, match=message):
        ddlf.data.pixels(image)


def test_failing_or_inconsistent_decode_names_sample(texts):
    def failing(sample):
        return {"x": sample["x"][1], "y": sample["y"]}

    with pytest.raises(DatasetError, match=r"decode cannot use sample 1 \(row 1 of .*00000\.safetensors\): IndexError"):
        streamed(ddlf.data.open(texts, decode=failing), [3, 4])
    with pytest.raises(DatasetError, match=r"decode makes x of int64 \(1,\) of sample 1 .* but x of int64 \(3,\)"):
        streamed(ddlf.data.open(texts, decode=lambda sample: {"x": sample["x"]}), [3, 4])
    with pytest.raises(DatasetError, match="a dict of arrays is wanted"):
        streamed(ddlf.data.open(texts, decode=lambda sample: sample["x"]), [3, 4])


def test_columns_of_equal_rows_are_refused_as_ragged(tmp_path):
    pq.write_table(pa.table({"x": [1, 2], "y": [[1], [2, 3]]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has no column 'z'"):
        open_source(tmp_path / "a.parquet", ragged="z")
    with pytest.raises(DatasetError, match="column 'x' holds int64, not rows of different lengths"):
        open_source(tmp_path / "a.parquet", columns="x", ragged="x")
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(ConfigError, match="--ragged has no effect"):
        open_source(tmp_path / "a.npz", ragged="x")
