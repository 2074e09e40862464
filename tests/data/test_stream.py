"""Tests of the stream of samples from partition files: its order, its limit of memory, and its immediate end."""

import shutil
import threading
import tracemalloc

import numpy as np
import pytest

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data.location import Folder
from ddlf.data.remote_folder import open_location
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.data.stream import AHEAD, SampleStream, StreamClosed
from ddlf.errors import ConfigError, DatasetError
from tests.patience import PATIENCE_S

N, SIZES = 1000, [150, 130, 170, 140, 160, 120, 130]
X, Y = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3), np.arange(N)


@pytest.fixture(scope="module")
def location(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "a.npz", x=X, y=Y)
    split(open_source(folder / "a.npz"), Folder(folder / "place"), SIZES, shuffle=False)
    return folder / "place"


@pytest.mark.parametrize("memory", [10_000, 10**9], ids=["from the disk", "in memory"])
@pytest.mark.parametrize("shuffle", ["global", "window:3", "none"])
def test_stream_yields_rows_of_portion_in_order(location, shuffle, memory):
    data = ddlf.data.open(location)
    for portion in portions(SIZES, [500, 300, 200], shuffle, seed=1, epoch=2):
        stream = SampleStream(data, portion, 8, memory)
        chunks = list(stream)
        assert all(len(chunk["x"]) % 8 == 0 for chunk in chunks[:-1])
        ids = portion.ids(SIZES)
        assert np.array_equal(np.concatenate([chunk["y"] for chunk in chunks]), ids)
        assert np.array_equal(np.concatenate([chunk["x"] for chunk in chunks]), X[ids])
        assert set(stream.files) == set(portion.stretches(SIZES)[:, 0].tolist()) or shuffle == "global"
        assert shuffle == "global" or len(set(stream.files)) == len(stream.files)


def test_stream_reads_only_needed_files_and_a_little_ahead(location):
    data = ddlf.data.open(location)
    (portion,) = portions(SIZES, [N], "none", seed=0, epoch=0)
    stream = SampleStream(data, portion, 8, 10_000)
    chunks = iter(stream)
    first = next(chunks)
    stream._thread.submit(int).result(PATIENCE_S)  # runs after all reads of the thread
    assert stream.files == [0]
    assert stream._portion.samples > (AHEAD + 2) * len(first["y"])
    stream.close()


def test_first_chunks_are_small(location):
    (portion,) = portions(SIZES, [N], "window:3", seed=0, epoch=0)
    lengths = [len(chunk["y"]) for chunk in SampleStream(ddlf.data.open(location), portion, 8, 10**9)]
    assert lengths == [64, 128, 256, 512, 40]


def test_stream_reuses_files_of_previous_pass(location):
    data = ddlf.data.open(location)
    larger, smaller = portions(SIZES, [600, 400], "window:8", seed=1, epoch=0)
    first = SampleStream(data, larger, 8, 10**9)
    assert [number for chunk in first for number in chunk["y"]] == larger.ids(SIZES).tolist()
    assert [number for chunk in SampleStream(data, larger, 8, 10**9, first) for number in chunk["y"]] == larger.ids(
        SIZES
    ).tolist()
    second, third = SampleStream(data, larger, 8, 10**9, first), SampleStream(data, smaller, 8, 10**9, first)
    assert len([*second]) == len([*SampleStream(data, larger, 8, 10**9)])
    assert [number for chunk in third for number in chunk["y"]] == smaller.ids(SIZES).tolist()
    assert not second.files
    assert not set(third.files) & set(first.files)


def test_stream_keeps_files_in_half_of_memory(location):
    data = ddlf.data.open(location)
    total, largest = data.manifest.nbytes, max(file.nbytes for file in data.manifest.files)
    for memory, all_stay in ((2 * total, True), (2 * total - 2, False), (4 * largest, False)):
        opened, before = [], None
        for epoch in range(4):
            for portion in portions(SIZES, [600, 400], "window:1", seed=1, epoch=epoch):
                before = SampleStream(data, portion, 8, memory, before)
                rows = np.concatenate([chunk["y"] for chunk in before])
                assert np.array_equal(rows, portion.ids(SIZES))
                opened += before.files
                cached_nbytes = sum(data.manifest.files[number].nbytes for number in before._open)
                assert cached_nbytes <= memory // 2
        assert (sorted(opened) == list(range(len(SIZES)))) is all_stay
        assert set(opened) == set(range(len(SIZES)))


def test_closed_stream_ends_waiting_for_slow_store(location):
    data = ddlf.data.open(location)
    (portion,) = portions(SIZES, [N], "none", seed=0, epoch=0)
    load_began, go_on = threading.Event(), threading.Event()

    def load(number):
        load_began.set()
        go_on.wait(PATIENCE_S)
        return type(data).load(data, number)

    data.load = load
    stream = SampleStream(data, portion, 8, 10**9)
    assert load_began.wait(PATIENCE_S)
    ended = []

    def wait():
        with pytest.raises(StreamClosed):
            next(iter(stream))
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    stream.close()
    waiting.join(PATIENCE_S)
    go_on.set()
    assert ended


def test_stream_names_damaged_file_before_its_samples(location, tmp_path):
    shutil.copytree(location, tmp_path / "copy")
    path = tmp_path / "copy" / "v0001" / "00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (portion,) = portions(SIZES, [N], "none", seed=0, epoch=0)
    labels, stream = [], SampleStream(ddlf.data.open(tmp_path / "copy"), portion, 10, 10_000)
    with pytest.raises(DatasetError, match=r"00003\.safetensors is damaged"):
        labels.extend(number for chunk in stream for number in chunk["y"].tolist())
    assert labels == list(range(len(labels)))
    assert len(labels) <= sum(SIZES[:3])


@pytest.mark.parametrize("shuffle", ["global", "window:3", "none"])
def test_skipped_files_are_counted_before_first_chunk(location, tmp_path, shuffle):
    shutil.copytree(location, tmp_path / "copy")
    damaged, missing = (tmp_path / "copy" / "v0001" / f"{number:05}.safetensors" for number in (3, 5))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    missing.unlink()
    data = ddlf.data.open(tmp_path / "copy")
    bad = [number for number in range(len(SIZES)) if data.damaged(number)]
    assert bad == [3, 5]
    files, skipped = np.repeat(np.arange(len(SIZES)), SIZES), 0
    for portion in portions(SIZES, [500, 300, 200], shuffle, seed=1, epoch=2):
        stream = SampleStream(data, portion, 8, 10_000, None, bad)
        ids = portion.ids(SIZES)
        remaining = ids[~np.isin(files[ids], bad)]
        assert stream.samples == len(remaining)
        assert stream.left_out == {number: n for number in bad if (n := int((files[ids] == number).sum()))}
        assert [number for chunk in stream for number in chunk["y"]] == remaining.tolist()
        skipped += len(ids) - len(remaining)
    assert skipped == SIZES[3] + SIZES[5]


def test_too_little_data_memory_error_names_enough(location):
    (portion,) = portions(SIZES, [N], "none", seed=0, epoch=0)
    with pytest.raises(
        ConfigError, match=r"data_memory is 1\.00 kB, too little for batches of 32 samples of 32 B each"
    ):
        SampleStream(ddlf.data.open(location), portion, 32, 1000)


@pytest.mark.parametrize(
    ("shuffle", "memory"), [("window:8", 2**20), ("window:8", 2**21), ("window:2", 2**21), ("none", 2**20)]
)
def test_stream_reads_ten_times_its_memory(tmp_path, shuffle, memory):
    samples = 10 * memory // 768
    np.savez(tmp_path / "a.npz", x=np.zeros((samples, 16, 16, 3), np.uint8))
    files = 44  # two files fit into half of the memory
    sizes = [samples // files + (number < samples % files) for number in range(files)]
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), sizes, shuffle=False)
    data = ddlf.data.open(tmp_path / "place")
    (portion,) = portions(sizes, [samples], shuffle, seed=0, epoch=0)
    read = 0
    for _ in SampleStream(data, portion, 16, memory):
        pass  # single allocations of Python and NumPy, such as imported modules, must not count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for chunk in SampleStream(data, portion, 16, memory):
            read += len(chunk["x"])
        grown = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert read == samples
    assert grown <= 1.1 * memory


def test_too_large_store_files_are_refused_with_usable_size(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    url = f"memory://{tmp_path.name}"
    split(open_source(tmp_path / "a.npz"), open_location(url), SIZES, shuffle=False)
    (portion,) = portions(SIZES, [N], "window:3", seed=0, epoch=0)
    assert sum(len(chunk["y"]) for chunk in SampleStream(ddlf.data.open(url), portion, 8, 8000)) == N
    monkeypatch.setenv("DDLF_CACHE_SIZE", "0")
    with pytest.raises(ConfigError, match="no room in the cache") as raised:
        list(SampleStream(ddlf.data.open(url), portion, 8, 8000))
    assert f"ddlf data repartition {url} --file-bytes 1333" in str(raised.value)
    assert sum(len(chunk["y"]) for chunk in SampleStream(ddlf.data.open(url), portion, 8, 10**6)) == N
