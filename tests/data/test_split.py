"""Tests of splitting a source into partition files: content, verification, export, interruption and damage."""

import dataclasses
import json
import os
import tracemalloc

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from ddlf.data import manifest
from ddlf.data.export import damage, export
from ddlf.data.location import LOCK, Folder
from ddlf.data.manifest import Column, Manifest, PartitionFile
from ddlf.data.sources import open_source
from ddlf.data.split import Buckets, sizes_of, split
from ddlf.errors import ConfigError, DatasetError

ROWS = 600


def arrays(rows=ROWS):
    """Return distinct rows, sorted by label."""
    x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3)
    return {"x": x, "y": np.arange(rows) // 60, "w": np.arange(rows) % 2 == 0}


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "source.npz", **arrays())
    return tmp_path / "source.npz"


def split_into(source, folder, *, files=5, **options):
    opened = open_source(source)
    return split(opened, Folder(folder), sizes_of(opened.samples, 1, files=files), **options)


def read(folder):
    """Return all samples of a place, in the order of their ids."""
    stored = Folder(folder).manifest()
    parts = [Folder(folder).arrays(file, stored.columns) for file in stored.files]
    return {name: np.concatenate([part[name] for part in parts]) for name in stored.columns}


def rows_of(data):
    return sorted(
        zip(data["x"].reshape(len(data["x"]), -1).tolist(), data["y"].tolist(), data["w"].tolist(), strict=True)
    )


def test_split_has_each_sample_once_and_shuffles_globally(source, tmp_path):
    stored = split_into(source, tmp_path / "place")
    data = read(tmp_path / "place")
    assert rows_of(data) == rows_of(arrays())
    assert stored.sizes.tolist() == [120] * 5
    assert [file.first for file in stored.files] == [0, 120, 240, 360, 480]
    assert {name: (str(array.dtype), array.shape[1:]) for name, array in data.items()} == {
        "x": ("float32", (2, 3)),
        "y": ("int64", ()),
        "w": ("bool", ()),
    }
    for part in np.split(data["y"], 5):
        assert len(set(part.tolist())) == 10
    assert Folder(tmp_path / "place").manifest() == stored
    assert list(damage(Folder(tmp_path / "place"), stored)) == []


def test_split_without_shuffle_keeps_order(source, tmp_path):
    split_into(source, tmp_path / "place", shuffle=False, files=7)
    assert all(np.array_equal(read(tmp_path / "place")[name], array) for name, array in arrays().items())


def test_split_bits_depend_on_seed_not_on_memory(source, tmp_path):
    contents = {split_into(source, tmp_path / f"m{memory}", memory=memory).content for memory in (10**9, 10**5, 28_000)}
    assert len(contents) == 1
    assert split_into(source, tmp_path / "seed", seed=1).content not in contents


def test_stratified_files_have_equal_shares_of_labels(tmp_path):
    labels = np.repeat([7, -2, 0], [500, 90, 10])
    np.savez(tmp_path / "s.npz", x=np.arange(600), y=labels)
    hashes = {
        split_into(tmp_path / "s.npz", tmp_path / f"{m}", memory=m, stratify="y").content for m in (10**9, 40_000)
    }
    assert len(hashes) == 1
    data = read(tmp_path / "40000")
    assert sorted(data["x"].tolist()) == list(range(600))
    assert np.array_equal(labels[data["x"]], data["y"])
    for part in np.split(data["y"], 5):
        shares = [int((part == label).sum()) for label in (7, -2, 0)]
        # the files are cut to their sizes after the samples are dealt
        assert np.abs(np.subtract(shares, [100, 18, 2])).max() <= 2
    for column in ("z", "x2"):
        with pytest.raises(
            ConfigError, match=f"--stratify {column} is not a column of labels; whole numbers are: x, y"
        ):
            split_into(tmp_path / "s.npz", tmp_path / "none", stratify=column)


def test_split_with_little_memory_uses_several_heaps():
    assert len(Buckets(600, 5, 28_000 // 3 // 57, 0).heaps) > 1
    assert len(Buckets(600, 5, 10**6, 0).heaps) == 1


def test_split_stays_within_memory(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (20_000, 500), np.uint8))
    # the first call imports modules, which must not count as memory of the split
    split_into(tmp_path / "x.npy", tmp_path / "before", files=40, memory=2_000_000)
    peaks = []
    for name in ("place", "again"):  # Python's table of names may have to grow in one of the calls
        tracemalloc.start()
        split_into(tmp_path / "x.npy", tmp_path / name, files=40, memory=2_000_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 2_400_000


def test_split_makes_every_order_equally_likely(tmp_path):
    """Chi-squared test of the 24 orders of 4 samples in 2 buckets.

    With 23 degrees of freedom, the statistic is above 73 once in a million.
    """
    counts = dict.fromkeys(range(24), 0)
    orders = {}
    rows = np.arange(4)
    for seed in range(1200):
        buckets = Buckets(4, 2, 100, seed)
        order = np.concatenate(list(buckets.shuffled(0, *buckets.read_all([rows], rows.dtype))))
        counts[orders.setdefault(tuple(order.tolist()), len(orders))] += 1
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 73


@given(samples=st.integers(1, 10**4), row=st.integers(1, 1000), files=st.integers(1, 50), most=st.integers(1, 10**4))
def test_file_sizes_differ_by_at_most_one(samples, row, files, most):
    for sizes in (
        sizes_of(samples, row, files=min(files, samples)),
        sizes_of(samples, row, file_samples=most),
        sizes_of(samples, row, file_bytes=most * row),
    ):
        assert sum(sizes) == samples
        assert max(sizes) - min(sizes) <= 1
    assert len(sizes_of(samples, row, files=min(files, samples))) == min(files, samples)
    assert max(sizes_of(samples, row, file_samples=most)) <= most
    assert max(sizes_of(samples, row, file_bytes=most * row)) * row <= most * row


def test_export_has_all_samples_in_order_of_ids(source, tmp_path):
    stored = split_into(source, tmp_path / "place")
    export(Folder(tmp_path / "place"), stored, tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as exported:
        assert all(np.array_equal(exported[name], array) for name, array in read(tmp_path / "place").items())
        assert list(exported) == ["x", "y", "w"]
    with pytest.raises(DatasetError, match="already exists"):
        export(Folder(tmp_path / "place"), stored, tmp_path / "again.npz")


def test_verify_names_every_flipped_bit_and_truncation(source, tmp_path):
    split_into(source, tmp_path / "place", files=3)
    folder, chance = Folder(tmp_path / "place"), np.random.default_rng(1)
    stored = folder.manifest()
    files = [tmp_path / "place" / name for name in ("manifest.json", *(file.name for file in stored.files))]
    for number in range(140):
        path = files[number % len(files)]
        content = path.read_bytes()
        at = int(chance.integers(len(content)))
        bad = bytearray(content)
        bad[at] ^= 1 << int(chance.integers(8))
        path.write_bytes(bad if number % 3 else content[:at])
        try:
            errors = list(damage(folder, folder.manifest()))
        except DatasetError as error:
            errors = [error]
        assert len(errors) == 1, (path, at)
        assert str(path) in str(errors[0])
        path.write_bytes(content)
    assert list(damage(folder, folder.manifest())) == []


def test_interrupted_split_is_unreadable_and_restarts(source, tmp_path):
    class Torn(Exception):
        pass

    def tear(phase, completed, of):
        if phase == "writing" and completed > 300:
            raise Torn

    with pytest.raises(Torn):
        split_into(source, tmp_path / "place", moved=tear, memory=28_000)
    assert not (tmp_path / "place").exists()
    # This state is like after kill -9, when no process can clean up.
    (tmp_path / "place" / "v0001").mkdir(parents=True)
    (tmp_path / "place" / "v0000-x").mkdir()
    (tmp_path / "place" / "v0001" / "00000.safetensors").write_bytes(b"half")
    (tmp_path / "place" / LOCK).touch()
    with pytest.raises(DatasetError, match="unfinished"):
        Folder(tmp_path / "place").manifest()
    stored = split_into(source, tmp_path / "place")
    assert list(damage(Folder(tmp_path / "place"), stored)) == []
    assert sorted(os.listdir(tmp_path / "place")) == [LOCK, "manifest.json", "v0001"]


def test_split_overwrites_nothing_and_has_one_writer(source, tmp_path):
    split_into(source, tmp_path / "place")
    with pytest.raises(DatasetError, match="already has a data set"):
        split_into(source, tmp_path / "place")
    assert len(read(tmp_path / "place")["y"]) == ROWS
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "v0001").mkdir()
    with pytest.raises(DatasetError, match="is not empty"):
        split_into(source, tmp_path / "mine")
    assert (tmp_path / "mine" / "v0001").exists()
    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / LOCK), pytest.raises(DatasetError, match="another process is writing"):
        split_into(source, tmp_path / "busy")
    with pytest.raises(DatasetError, match="is a file"):
        split_into(source, source)


def test_full_disk_is_reported_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.data.location.shutil.disk_usage", lambda path: (10**9, 10**9, 10**6))
    with pytest.raises(DatasetError, match=r"no space in .*; \d+.* are needed"):
        split_into(source, tmp_path / "place")
    assert not (tmp_path / "place").exists()


def test_too_little_memory_error_names_enough(source, tmp_path):
    with pytest.raises(ConfigError, match=r"needs 27.4 kB of memory, .*files of at most 13 samples"):
        split_into(source, tmp_path / "place", memory=3000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts.update(ddlf_data=3), "newer DDLF"),
        (lambda facts: facts["files"][0].__setitem__(0, "../../etc/passwd"), "is not the name of a partition file"),
        (lambda facts: facts["files"][0].__setitem__(0, "/etc/passwd"), "is not the name of a partition file"),
        (
            lambda facts: facts["files"][0].__setitem__(0, "s3://other/v0001/00000.safetensors"),
            "is not the name of a partition file",
        ),
        (lambda facts: facts["files"][1].__setitem__(4, 0), "ids or hash"),
        (lambda facts: facts["files"][1].__setitem__(1, 0), "ids or hash"),
        (lambda facts: facts["files"].clear(), "no file"),
        (lambda facts: facts["columns"].clear(), "no columns"),
        (lambda facts: facts["columns"].update(x=["object", []]), "not numbers"),
        (lambda facts: facts["columns"].update(x=["uint8", [-1]]), "is not a valid count"),
        (lambda facts: facts.pop("classes"), "has an impossible entry"),
    ],
)
def test_impossible_manifest_is_refused_despite_right_hash(source, tmp_path, change, message):
    split_into(source, tmp_path / "place")
    path = tmp_path / "place" / "manifest.json"
    facts = json.loads(path.read_bytes())
    del facts["sha256"]
    change(facts)
    path.write_bytes(manifest._sealed(manifest._spelled(facts)))
    with pytest.raises(DatasetError, match=message):
        Folder(tmp_path / "place").manifest()


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"ddlf_data": 1}', "[" * 100_000])
def test_other_file_is_refused_as_manifest(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DatasetError, match=r"manifest\.json"):
        Folder(tmp_path).manifest()


def test_verify_names_missing_extra_linked_and_swapped_files(source, tmp_path):
    stored = split_into(source, tmp_path / "place")
    folder = tmp_path / "place" / "v0001"
    names = [folder / f"{number:05}.safetensors" for number in range(5)]
    names[0].rename(tmp_path / "away")
    names[1].rename(names[0])
    (tmp_path / "away").rename(names[1])
    names[2].unlink()
    names[3].rename(tmp_path / "real")
    names[3].symlink_to(tmp_path / "real")
    (folder / "00009.safetensors").touch()
    errors = [str(error) for error in damage(Folder(tmp_path / "place"), stored)]
    assert len(errors) == 5
    assert [
        "00009.safetensors does not belong to this" in errors[0],
        "is damaged" in errors[1],
        "is damaged" in errors[2],
    ] == [True] * 3
    assert "is missing" in errors[3]
    assert "is a link" in errors[4]


def test_file_with_other_columns_than_manifest_is_named(source, tmp_path):
    stored = split_into(source, tmp_path / "place")
    changed = dataclasses.replace(stored, columns={**stored.columns, "y": Column("int32", (2,))})
    with pytest.raises(DatasetError, match="other columns than the manifest"):
        Folder(tmp_path / "place").arrays(stored.files[0], changed.columns)


@pytest.mark.slow
def test_manifest_of_a_hundred_thousand_files_is_read_back():
    files = [
        PartitionFile(f"v0001/{number:05}.safetensors", 10_000, 7_840_000, f"{number:064x}", number * 10_000)
        for number in range(100_000)
    ]
    large = Manifest({"x": Column("uint8", (28, 28))}, files)
    assert large.samples == 10**9
    assert len(large.spelled()) < 15e6
    is_equal = manifest.read(large.spelled(), "here") == large
    assert is_equal  # a comparison in the assertion would make pytest print all files
