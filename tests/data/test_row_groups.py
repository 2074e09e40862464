"""Tests of training directly from Parquet files: columns, order, memory, cache and refusals."""

import io
import os

import fsspec
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.cli.main import main
from ddlf.data.stream import SampleStream
from ddlf.errors import AppError, ConfigError, DatasetDamaged, DatasetError
from ddlf.testing import FaultyStore

ROWS, GROUP = 200, 25


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DDLF_CACHE_SIZE", "50MB")


def png(value, mode="RGB", size=(4, 3)):
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (value, value, value)).convert(mode).save(file, "PNG")
    return file.getvalue()


def table(ids):
    ids = np.asarray(ids)
    return pa.table(
        {
            "id": ids,
            "f0": ids.astype("float32"),
            "f1": (2 * ids).astype("float32"),
            "big": ids.astype("float64") / 4,
            "vector": [[float(n), 1.0] for n in ids],
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3).astype("int16")), 3),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(
                np.arange(4 * len(ids), dtype="float32").reshape(len(ids), 2, 2)
            ),
            "image": [{"bytes": png(int(n) % 256), "path": f"{n}.png"} for n in ids],
            "label": [("cat", "dog")[n % 2] for n in ids],
            "ragged": [[1.5] * (int(n) % 3) for n in ids],
        }
    )


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "set"
    path.mkdir()
    for number, ids in enumerate(np.array_split(np.arange(ROWS), 2)):
        pq.write_table(table(ids), path / f"part-{number}.parquet", row_group_size=GROUP)
    (path / "_metadata.parquet").write_bytes(b"not data")
    return path


def read(data, *, shuffle="window:2", memory=10**6, slots=2):
    """Return all samples of an epoch, slot by slot."""
    shares = [len(part) for part in np.array_split(np.arange(data.manifest.samples), slots)]
    parts = portions(data.manifest.sizes, shares, shuffle, seed=3, epoch=1)
    chunks = [chunk for part in parts for chunk in SampleStream(data, part, 8, memory)]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in data.columns}


def test_row_groups_are_units_in_the_order_of_names_and_keep_types(folder):
    data = ddlf.data.open(folder, x=["f0", "f1"], y="id", w="big")
    assert [file.name for file in data.manifest.files] == [f"part-{n}.parquet#{g}" for n in range(2) for g in range(4)]
    assert [file.first for file in data.manifest.files] == list(range(0, ROWS, GROUP))
    assert {name: (column.dtype, column.shape) for name, column in data.columns.items()} == {
        "x": ("float32", (2,)),
        "y": ("int64", ()),
        "w": ("float64", ()),
    }
    assert np.array_equal(data["x"], np.stack([np.arange(ROWS), 2 * np.arange(ROWS)], axis=1))


@pytest.mark.parametrize("shuffle", ["window:2", "none", "global"])
def test_epoch_reads_each_sample_once_in_the_same_order_with_any_memory(folder, shuffle):
    data = ddlf.data.open(folder, x="vector", y="id")
    roomy, narrow = (read(data, shuffle=shuffle, memory=memory) for memory in (10**6, 2_000))
    assert np.array_equal(np.sort(roomy["y"]), np.arange(ROWS))
    assert np.array_equal(roomy["y"], narrow["y"])
    assert np.array_equal(roomy["x"][:, 0], roomy["y"])
    assert np.array_equal(narrow["x"], roomy["x"])


def test_columns_may_be_vectors_tensors_images_and_trees(folder):
    data = ddlf.data.open(f"{folder}/*.parquet", x={"a": "fixed", "b": ["f0", "f1"]}, y="id", w="f0")
    assert data.columns["x['a']"].dtype == "int16"
    assert np.array_equal(data["x['a']"][:, 2], np.arange(ROWS))
    assert data.columns["x['b']"].shape == (2,)
    tensors = ddlf.data.open(str(folder / "part-0.parquet"), x="tensor")
    assert tensors.columns["x"].shape == (2, 2)
    assert tensors["x"][1].tolist() == [[4, 5], [6, 7]]
    images = read(ddlf.data.open(folder, x="image", y="label", w="id", classes=["cat", "dog"]))
    assert images["x"].shape == (ROWS, 3, 4, 3)
    assert np.array_equal(images["x"][:, 0, 0, 0], images["w"] % 256)
    assert np.array_equal(images["y"], images["w"] % 2)
    small = ddlf.data.open(folder, x="image", image_size=(2, 2))
    assert small.columns["x"].shape == (2, 2, 3)


def test_decode_gets_bytes_texts_and_ragged_lists_as_they_are(folder):
    def decode(sample):
        x = np.zeros(2, "float32")
        x[: len(sample["x"])] = sample["x"]
        return {"x": x, "y": np.int64(sample["y"].tobytes() == b"dog"), "w": sample["w"]}

    for shuffle in ("window:2", "global"):
        columns = read(ddlf.data.open(folder, decode, x="ragged", y="label", w="id"), shuffle=shuffle)
        assert np.array_equal(np.count_nonzero(columns["x"], axis=1), columns["w"] % 3)
        assert np.array_equal(columns["y"], columns["w"] % 2)


def test_joined_columns_of_several_types_are_cast_with_a_message(folder):
    data = ddlf.data.open(folder, x=["f0", "big"])
    assert data.columns["x"].dtype == "float64"
    assert data.notes == [f"x of {folder} has columns of double, float side by side, all as float64"]


def test_names_of_classes_come_from_the_schema_of_hugging_face(tmp_path):
    head = {"huggingface": '{"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}'}
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, 1]}).replace_schema_metadata(head), tmp_path / "a.parquet")
    assert ddlf.data.open(tmp_path / "a.parquet", x="x", y="label").manifest.classes == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(x="imgae"), DatasetError, r"has no column 'imgae'; it has image, id, f0"),
        (dict(x="f0", y="lable"), DatasetError, r"has no column 'lable'; it has label, "),
        (dict(x="ragged"), DatasetError, r"row group 0, row 1: column 'ragged' has a list of 1 values, but 0.*decode="),
        (dict(x="f0", y="label"), DatasetError, r"label 'label' is a text; name the classes"),
        (dict(x="label"), DatasetError, r"column 'label' holds string, not numbers"),
        (
            dict(x="f0", y="label", classes=["cat"]),
            DatasetError,
            r"row 1: column 'label' has 'dog', which is not one of classes",
        ),
        (dict(x="f0", classes=["cat"]), ConfigError, "classes= has no effect"),
        (dict(x="f0", image_size=(2, 2)), ConfigError, "image_size= has no effect"),
        (dict(x=["f0", "image"]), DatasetError, r"'image' holds struct.*only columns of numbers are put side by side"),
        (dict(y="id"), DatasetError, "no column of .* is chosen as the input; write x=...: it has id"),
        (dict(x=7), AppError, "x=7 names no columns"),
        (dict(x="f0", storage_options={"anon": True}), ConfigError, "storage_options have no effect"),
    ],
)
def test_unusable_columns_are_refused_by_name(folder, arguments, kind, message):
    with pytest.raises(kind, match=message):
        read(ddlf.data.open(folder, **arguments))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([1, 2, 3, None, 5, 6]), r"a\.parquet, row group 1, row 1: column 'y' has no value"),
        (pa.array([[1.0], [2.0], [3.0], [4.0], [None], [6.0]]), r"row group 2, row 0: column 'y' has no value"),
        (
            pa.array([[1.0], [2.0], [3.0], [4.0], [], [6.0]]),
            "row group 2, row 1: column 'y' has a list of 1 values, but 0",
        ),
    ],
)
def test_missing_value_is_refused_with_file_row_group_and_row(tmp_path, values, message):
    pq.write_table(pa.table({"x": np.arange(6.0), "y": values}), tmp_path / "a.parquet", row_group_size=2)
    data = ddlf.data.open(tmp_path / "a.parquet")
    for memory in (10**6, 800):
        with pytest.raises(DatasetError, match=message):
            read(data, memory=memory, slots=1)


def test_empty_label_is_refused_by_row(tmp_path):
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": ["a", ""]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match="row 1: column 'y' has an empty text"):
        ddlf.data.open(tmp_path / "a.parquet", x="x", y="y", classes=["a"])


def test_files_of_different_schemas_are_refused_by_name(folder):
    pq.write_table(pa.table({"f0": np.arange(3)}), folder / "part-2.parquet")
    with pytest.raises(DatasetError, match=r"part-2\.parquet: column 'f0' holds int64, but float in part-0"):
        ddlf.data.open(folder, x="f0")
    with pytest.raises(DatasetError, match=r"part-2\.parquet has no column 'id'"):
        ddlf.data.open(folder, x="id")


NUMBERS = pa.array(np.arange(6.0))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([{"a": 1.0}] * 6),
            r"column 'y' holds struct<a: double>, not numbers; write it as numbers.*fields of a",
        ),
        (pa.array([[{"a": 1.0}]] * 6), "column 'y' holds list.*not numbers"),
        (
            pa.array([1] * 6, pa.decimal128(5, 2)),
            r"column 'y' holds decimal128\(5, 2\), not numbers.*decimals as float64",
        ),
        (pa.array([1] * 6, pa.timestamp("s")), r"column 'y' holds timestamp\[ms\], not numbers.*times as seconds"),
        (pa.nulls(6), "column 'y' holds null, not numbers"),
        (pa.array([0, None] * 3).dictionary_encode(), r"row group 0, row 1: column 'y' has no value"),
    ],
)
def test_column_without_numbers_is_refused_by_its_type(tmp_path, column, message):
    pq.write_table(pa.table({"x": NUMBERS, "y": column}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(DatasetError, match=message):
        read(ddlf.data.open(tmp_path / "a.parquet", x="x", y="y"))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1] * 3).dictionary_encode(),
        pa.array(["a", "b"] * 3).dictionary_encode(),
        pa.array(["a", "b"] * 3, pa.string_view()),
        pa.array([False, True] * 3),
        pa.array(np.arange(6, dtype="float16") % 2),
    ],
    ids=str,
)
def test_stored_forms_of_numbers_and_texts_are_read(tmp_path, column):
    pq.write_table(pa.table({"x": NUMBERS, "y": column}), tmp_path / "a.parquet", row_group_size=1)
    classes = ["a", "b"] if "string" in str(column.type) else ()
    columns = read(ddlf.data.open(tmp_path / "a.parquet", x="x", y="y", classes=classes))
    assert np.array_equal(columns["y"], columns["x"] % 2)


def test_file_without_rows_is_skipped(tmp_path):
    table = pa.table({"x": NUMBERS})
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    assert ddlf.data.open(tmp_path, x="x")["x"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DatasetError, match=r"a\.parquet has no rows"):
        ddlf.data.open(tmp_path / "a.parquet", x="x")


def test_partition_column_of_folder_names_is_refused_with_a_remedy(tmp_path):
    for year in ("2025", "2026"):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"x": NUMBERS}), tmp_path / f"year={year}" / "a.parquet")
    assert ddlf.data.open(tmp_path, x="x").manifest.samples == 12
    with pytest.raises(
        DatasetError, match="has no column 'year'; write it into the files: columns that only the names"
    ):
        ddlf.data.open(tmp_path, x="x", y="year")


def test_two_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.table([NUMBERS, NUMBERS], names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"has 2 columns 'x'; give each column its own name"):
        ddlf.data.open(tmp_path, x="x")


def test_data_info_says_that_a_set_without_rows_is_unsuitable(tmp_path, capsys):
    pq.write_table(table([1])[:0].select(["id", "f0"]), tmp_path / "none.parquet")
    with pytest.raises(SystemExit, match="0"):
        main(["data", "info", str(tmp_path)])
    assert capsys.readouterr().out.endswith("suited    no: there are no rows to train on\n")


def test_data_info_shows_files_row_groups_and_columns(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "info", str(folder)])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "column    f0: float" in lines
    assert "column    label: string, a label with classes=" in lines
    assert f"samples   {ROWS}" in lines
    assert any(line.startswith("files     2, ") for line in lines)
    assert any(line.startswith(f"groups    8 row groups of {GROUP} to {GROUP} rows, ") for line in lines)
    assert any(line.startswith("suited    yes, but slowly: each is a request") for line in lines)


def test_places_without_parquet_files_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="there is no Parquet file at"):
        ddlf.data.open(f"{tmp_path}/*.parquet", x="a")
    with pytest.raises(DatasetDamaged, match=r"a\.parquet is missing"):
        ddlf.data.open(tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"a\.csv is not a Parquet file.*ddlf data split"):
        ddlf.data.open(tmp_path / "a.csv", x="a")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no such file PAR1")
    with pytest.raises(DatasetDamaged, match=r"b\.parquet is not a readable Parquet file"):
        ddlf.data.open(tmp_path / "b.parquet")


def test_missing_pyarrow_is_named_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"need pyarrow.*pip install 'ddlf\[parquet\]'"):
        ddlf.data.open(folder, x="f0")


def test_content_differs_for_other_files_columns_and_sizes(folder):
    first = ddlf.data.open(folder, x="f0", y="id").manifest.identity
    assert ddlf.data.open(f"{folder}/*.parquet", x="f0", y="id").manifest.identity == first
    assert ddlf.data.open(folder, x="f1", y="id").manifest.identity != first
    images = {ddlf.data.open(folder, x="image", image_size=size).manifest.identity for size in (None, (4, 3), (3, 3))}
    assert len(images) == 3
    os.utime(folder / "part-0.parquet", ns=(1, 1))  # a copy on another machine has another modification time
    assert ddlf.data.open(folder, x="f0", y="id").manifest.identity == first
    pq.write_table(table(np.arange(100)[::-1]), folder / "part-0.parquet", row_group_size=GROUP)
    assert ddlf.data.open(folder, x="f0", y="id").manifest.identity != first


@pytest.mark.parametrize("way", ["load", "mapped"])
def test_file_that_has_changed_is_refused_by_name(folder, way):
    data = ddlf.data.open(folder, x="f0", y="id")
    pq.write_table(table(np.arange(100)), folder / "part-0.parquet", row_group_size=GROUP)
    with pytest.raises(DatasetError, match=r"part-0\.parquet was written to since the data set was opened"):
        getattr(data, way)(0)
    getattr(data, way)(4)
    (folder / "part-1.parquet").unlink()
    with pytest.raises(DatasetDamaged, match=r"part-1\.parquet is missing|part-1\.parquet.*cannot be read"):
        getattr(data, way)(5)


def test_damaged_page_is_named_and_can_be_left_out(folder, monkeypatch):
    path = folder / "part-0.parquet"
    pq.write_table(table(np.arange(100)), path, row_group_size=GROUP, write_page_checksum=True, compression="none")
    column = pq.read_metadata(path).row_group(2).column(1)
    content = bytearray(path.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    data = ddlf.data.open(folder, x="f0", y="id")
    with pytest.raises(DatasetDamaged, match=r"part-0\.parquet, row group 2 cannot be read"):
        data.load(2)
    assert [bool(data.damaged(number)) for number in range(8)] == [number == 2 for number in range(8)]
    part = portions(data.manifest.sizes, [ROWS], "none", seed=0, epoch=0)[0]
    read = SampleStream(data, part, 8, 10**6, skipped=[2])
    assert sum(len(chunk["y"]) for chunk in read) == ROWS - GROUP
    assert read.left_out == {2: GROUP}


def test_image_that_cannot_be_decoded_is_named_and_its_row_group_can_be_left_out(tmp_path):
    images = [png(n) for n in range(12)]
    images[7] = images[7][:40]
    pq.write_table(pa.table({"x": images, "y": np.arange(12)}), tmp_path / "a.parquet", row_group_size=4)
    data = ddlf.data.open(tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"a\.parquet, row group 1, row 3, column 'x' is not a readable image"):
        read(data, slots=1)
    assert [number for number in range(3) if data.damaged(number)] == [1]
    sizes = [(4, 3), (4, 3), (5, 3)]
    pq.write_table(pa.table({"x": [png(1, size=size) for size in sizes]}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"row 2: an image is uint8 of shape \(3, 5, 3\).*image_size="):
        read(ddlf.data.open(tmp_path / "b.parquet"), slots=1)


def test_incomplete_copy_in_the_cache_is_fetched_again(folder, tmp_path):
    data = ddlf.data.open(folder, x="image", y="id")
    assert np.array_equal(data.mapped(1)["y"], np.arange(GROUP, 2 * GROUP))
    (copy,) = [path for path in (tmp_path / "cache").iterdir() if path.name == data.manifest.files[1].sha256]
    content = bytearray(copy.read_bytes())
    content[-60] ^= 1
    copy.write_bytes(content)
    reopened = ddlf.data.open(folder, x="image", y="id")
    assert np.array_equal(reopened.mapped(1)["y"], np.arange(GROUP, 2 * GROUP))
    assert bytes(reopened.mapped(1)["x"][24]) == png(2 * GROUP - 1)
    copy.write_bytes(content[:100])
    assert np.array_equal(ddlf.data.open(folder, x="image", y="id").mapped(1)["y"], np.arange(GROUP, 2 * GROUP))


def test_row_groups_without_room_in_memory_and_cache_are_refused_with_a_remedy(folder, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE_SIZE", "0")
    data = ddlf.data.open(folder, x="vector", y="id")
    with pytest.raises(
        ConfigError,
        match=r"row group \d of .* cache of this machine .* has no room for it.*half of data_memory.*row_group_size",
    ):
        read(data, memory=1_600)
    assert np.array_equal(np.sort(read(data, memory=4_000)["y"]), np.arange(ROWS))


def test_row_group_larger_than_memory_is_read_piece_by_piece(tmp_path, monkeypatch):
    x = np.arange(400_000, dtype="float64").reshape(-1, 4)
    arrays = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4)
    pq.write_table(pa.table({"x": arrays, "y": np.arange(len(x))}), tmp_path / "a.parquet", data_page_size=2**14)
    monkeypatch.setattr("ddlf.data.row_groups.PIECE_BYTES", 2**14)
    data = ddlf.data.open(tmp_path / "a.parquet")
    lengths = []
    pieces = data._pieces
    monkeypatch.setattr(
        data, "_pieces", lambda *arguments: (lengths.append(len(piece["y"])) or piece for piece in pieces(*arguments))
    )
    columns = read(data, memory=2**17, slots=2)
    assert max(lengths) * 40 <= 2**14
    assert np.array_equal(np.sort(columns["y"]), np.arange(len(x)))
    assert np.array_equal(columns["x"][:, 0], 4.0 * columns["y"])


# -- in stores ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(folder):
    with FaultyStore(folder) as store:
        yield store


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("ddlf.data.store.PATIENCE_S", 60.0)
    monkeypatch.setattr("ddlf.data.store.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("ddlf.data.store.LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr("ddlf.data.store.STALL_S", 0.2)


def urls(store):
    return [f"{store.url}/part-{number}.parquet" for number in range(2)]


def test_web_server_sends_only_the_requested_columns_and_each_once(folder, served, monkeypatch):
    monkeypatch.setattr("ddlf.data.parquet_files.GAP_BYTES", 0)
    data, local = ddlf.data.open(urls(served), x="f0", y="id"), ddlf.data.open(folder, x="f0", y="id")
    assert data.columns == local.columns
    opened = served.ranged
    for shuffle in ("window:2", "global"):
        assert np.array_equal(read(data, shuffle=shuffle)["y"], read(local, shuffle=shuffle)["y"])
    groups = [pq.read_metadata(path).row_group(n) for path in folder.glob("part-*") for n in range(4)]
    chunks = [group.column(n) for group in groups for n in range(2)]  # the chunks of id and f0
    assert served.ranged - opened == sum(chunk.total_compressed_size for chunk in chunks)
    cached = ddlf.data.open(urls(served), x="f0", y="id")
    opened = served.ranged
    assert np.array_equal(read(cached)["y"], read(local)["y"])
    assert served.ranged == opened  # the cache has all chunks


def test_failing_store_is_retried_and_gives_the_same_samples(folder, served, impatient):
    served.fail(error=0.1, throttle=0.1, cut=0.1, stall=0.02)
    data = ddlf.data.open(urls(served), x="vector", y="id")
    assert np.array_equal(read(data)["y"], read(ddlf.data.open(folder, x="vector", y="id"))["y"])
    assert served.failed


def test_server_that_gives_only_whole_files_is_refused(served):
    served.ranges = False
    with pytest.raises(DatasetError, match="cannot be read in parts: the server ignores ranges"):
        ddlf.data.open(urls(served), x="f0")


def test_files_of_a_store_are_found_by_glob_and_folder(folder):
    files = fsspec.filesystem("memory")
    files.store.clear()
    for path in folder.iterdir():
        files.pipe(f"memory://bucket/train/{path.name}", path.read_bytes())
    remote = ddlf.data.open("memory://bucket/train/part-*.parquet", x="f0", y="id", storage_options={})
    assert np.array_equal(remote["y"], np.arange(ROWS))
    assert ddlf.data.open("memory://bucket", x="f0", y="id")["y"].tolist() == list(range(ROWS))
    files.pipe("memory://bucket/train/part-1.parquet", (folder / "part-0.parquet").read_bytes())
    remote = ddlf.data.open("memory://bucket/train/part-*.parquet", x="f1", y="id")
    files.pipe("memory://bucket/train/part-1.parquet", (folder / "part-1.parquet").read_bytes())
    with pytest.raises(DatasetError, match=r"memory://bucket/train/part-1\.parquet was written to since"):
        remote.load(6)
    files.store.clear()


@pytest.mark.parametrize("location", [[], None, "", " ", 3, [""], ["a.parquet", None]], ids=str)
def test_open_refuses_a_value_that_is_not_a_place(location):
    with pytest.raises(
        DatasetError, match="as the place of a data set; name a folder of partition files, a Parquet file"
    ):
        ddlf.data.open(location, x="f0")


def test_open_refuses_names_that_are_given_twice(folder):
    with pytest.raises(DatasetError, match=r"classes= names 'cat' twice; leave it out once"):
        ddlf.data.open(folder, x="f0", y="label", classes=["cat", "dog", "cat"])
    part = folder / "part-0.parquet"
    with pytest.raises(DatasetError, match=r"part-0\.parquet is named twice"):
        ddlf.data.open([str(part), str(part)], x="f0", y="id")


def test_local_names_with_glob_characters_are_file_names(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    folder.rename("br[1]")
    first = np.arange(ROWS // 2)
    pq.write_table(table(first + 7), "br1.parquet")
    pq.write_table(table(first), "br[1].parquet")
    for location, rows in (("br[1]", ROWS), ("br[1]/part-*.parquet", ROWS), ("br[1].parquet", ROWS // 2)):
        assert np.array_equal(np.sort(read(ddlf.data.open(location, x="f0", y="id"))["y"]), np.arange(rows))


def test_local_file_without_an_ending_is_read_by_its_content(folder):
    (folder / "part-0.parquet").rename(folder / "plain")
    assert ddlf.data.open(folder / "plain", x="f0", y="id").manifest.samples == ROWS // 2
    (folder / "words").write_text("hello")
    with pytest.raises(DatasetDamaged, match="words is not a readable Parquet file"):
        ddlf.data.open(folder / "words", x="f0")
    with pytest.raises(
        DatasetError, match=r"words is a file, .*; make partition files of it: ddlf data split .*words FOLDER"
    ):
        ddlf.data.open(folder / "words")
