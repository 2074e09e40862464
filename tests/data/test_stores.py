"""Tests of data sets at URLs: drivers of fsspec, the cache on the disk, and failing stores."""

import hashlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from filelock import FileLock

import ddlf.data
from ddlf.algorithms.reading_order import portions
from ddlf.data import store
from ddlf.data.cache import CAP, Cache
from ddlf.data.export import damage, export
from ddlf.data.location import LOCK, Folder
from ddlf.data.remote_folder import RemoteFolder, open_location
from ddlf.data.sources import open_source
from ddlf.data.split import PartitionedSource, repartition, split
from ddlf.data.stream import SampleStream
from ddlf.errors import ConfigError, DatasetError
from ddlf.testing import FaultyStore
from tests.patience import PATIENCE_S

X, Y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(CAP, "1MB")


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    return open_source(tmp_path / "a.npz")


@pytest.fixture
def url():
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/data"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def served(source, tmp_path):
    split(source, Folder(tmp_path / "place"), [5, 5, 5, 5])
    with FaultyStore(tmp_path / "place") as serving:
        yield serving


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(store, "PATIENCE_S", 0.2)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.01)


def read(location):
    manifest = location.manifest()
    parts = [location.load(file, manifest.columns) for file in manifest.files]
    return {name: np.concatenate([part[name] for part in parts]) for name in manifest.columns}


def test_store_has_same_data_set_as_folder(source, url, tmp_path):
    local, remote = Folder(tmp_path / "place"), open_location(url)
    assert split(source, local, [7, 7, 6]) == split(source, remote, [7, 7, 6])
    assert local.manifest() == remote.manifest()
    assert all(np.array_equal(array, read(remote)[name]) for name, array in read(local).items())
    for file in remote.manifest().files:
        mapped = remote.mapped(file, remote.manifest().columns)
        assert np.array_equal(mapped["x"], local.load(file, local.manifest().columns)["x"])
    assert not list(damage(remote, remote.manifest()))
    export(remote, remote.manifest(), tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as exported:
        assert np.array_equal(exported["y"], read(local)["y"])
    with pytest.raises(DatasetError, match="already has a data set"):
        split(source, remote, [20])
    assert f"/bucket/data/{LOCK}" not in fsspec.filesystem("memory").store


def test_file_url_is_a_folder(source, tmp_path):
    split(source, open_location(f"file://{tmp_path}/a%20place"), [20], shuffle=False)
    assert np.array_equal(read(Folder(tmp_path / "a place"))["x"], X)
    with pytest.raises(ConfigError, match="a folder of another machine"):
        open_location("file://nas/data")


def test_interrupted_write_to_store_leaves_nothing(source, url):
    class Torn(Exception):
        pass

    def tear(phase, completed, of):
        if phase == "writing":
            raise Torn

    with pytest.raises(Torn):
        split(source, open_location(url), [5] * 4, moved=tear)
    with pytest.raises(DatasetError, match="no data set"):
        open_location(url).manifest()
    with open_location(url).writing(), pytest.raises(DatasetError, match=r"writes to memory://bucket/data; wait"):
        split(source, open_location(url), [20])
    split(source, open_location(url), [20])
    fsspec.filesystem("memory").pipe("memory://bucket/other/file", b"1")
    with pytest.raises(DatasetError, match="not empty"):
        split(source, open_location("memory://bucket/other"), [20])


@pytest.mark.parametrize("way", ["load", "mapped"])
def test_file_is_fetched_once_unless_cached_copy_is_damaged(served, tmp_path, way):
    for _ in range(2):
        for location in (open_location(served.url), open_location(served.url)):
            manifest = location.manifest()
            for file in manifest.files:
                assert len(getattr(location, way)(file, manifest.columns)["x"]) == 5
    names = [file.name for file in manifest.files]
    assert [served.served[name] for name in names] == [1] * 4
    copy = tmp_path / "cache" / manifest.files[0].sha256
    copy.write_bytes(bytes(len(copy.read_bytes())))
    reading = open_location(served.url)
    assert np.array_equal(
        getattr(reading, way)(manifest.files[0], manifest.columns)["x"],
        location.load(manifest.files[0], manifest.columns)["x"],
    )
    assert served.served[names[0]] == 2


def test_failing_store_is_retried_until_bytes_are_right(served, monkeypatch, caplog):
    monkeypatch.setattr(store, "STALL_S", 0.2)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.001)
    expected = read(open_location(served.url))
    served.fail(error=0.15, throttle=0.15, cut=0.15, stall=0.05)
    for cap in ("0", "1MB"):
        monkeypatch.setenv(CAP, cap)
        for _ in range(4):
            columns = read(open_location(served.url))
            assert all(np.array_equal(array, columns[name]) for name, array in expected.items())
    assert sum(served.failed.values()) > 3
    lines = [record.message for record in caplog.records if "tried again" in record.message]
    assert any(served.url in line and ".safetensors" in line for line in lines)


def test_failing_store_is_reported_in_one_sentence(served, impatient, monkeypatch):
    monkeypatch.setenv(CAP, "0")
    location = open_location(served.url)
    manifest = location.manifest()
    for kind, message in {
        "throttle": "the store answered 503",
        "error": "the store answered 500",
        "stall": "no bytes arrived for",
        "cut": "",
    }.items():
        served.fail(**{kind: 1.0})
        # only this case may time out, because a busy machine may stall, too
        monkeypatch.setattr(store, "STALL_S", 0.2 if kind == "stall" else PATIENCE_S)
        with pytest.raises(DatasetError, match=rf"cannot read {served.url}/v0001/00002.safetensors: .*{message}"):
            location.load(manifest.files[2], manifest.columns)
    monkeypatch.setattr(store, "STALL_S", PATIENCE_S)
    served.fail(damage=1.0)
    with pytest.raises(DatasetError, match=r"00002\.safetensors is damaged"):
        location.load(manifest.files[2], manifest.columns)
    served.fail()
    assert len(location.load(manifest.files[2], manifest.columns)["x"]) == 5


def test_file_of_wrong_size_is_named_without_retries(served, tmp_path, monkeypatch):
    for cap in ("0", "1MB"):
        monkeypatch.setenv(CAP, cap)
        location = open_location(served.url)
        manifest = location.manifest()
        path = tmp_path / "place" / manifest.files[0].name
        content = path.read_bytes()
        path.write_bytes(content + bytes(1000))
        with pytest.raises(DatasetError, match=r"00000.safetensors.*(has more than|has [\d,]+ bytes)"):
            location.load(manifest.files[0], manifest.columns)
        path.unlink()
        with pytest.raises(DatasetError, match=r"00000\.safetensors is missing"):
            location.load(manifest.files[0], manifest.columns)
        path.write_bytes(content)


def test_closed_place_ends_waiting_threads(served, monkeypatch):
    location = open_location(served.url)
    manifest = location.manifest()
    served.fail(throttle=1.0)
    errors = []

    def wait():
        try:
            location.load(manifest.files[0], manifest.columns)
        except DatasetError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not served.failed:
        pass
    location.close()
    waiting.join(PATIENCE_S)
    assert errors


@pytest.mark.parametrize("fault", [{"stall": 1.0}, {"throttle": 1.0}], ids=["it stalls", "it is asked again"])
def test_closing_stream_does_not_wait_for_store(served, fault):
    data = ddlf.data.open(served.url)
    (portion,) = portions([5] * 4, [20], "none", seed=0, epoch=0)
    served.fail(**fault)
    stream = SampleStream(data, portion, 5, 10**6)
    while not served.failed:
        pass
    begin = time.monotonic()
    stream.close()
    stream._thread.shutdown(wait=True)  # like the interpreter at its end
    assert time.monotonic() - begin < store.STALL_S / 2
    served.fail()
    assert sum(len(chunk["x"]) for chunk in SampleStream(data, portion, 5, 10**6)) == 20


def test_interrupt_ends_check_of_stalled_store(served, monkeypatch):
    location = open_location(served.url)
    manifest, usual_check = location.manifest(), location.check
    served.fail(stall=1.0)

    def check(file, columns):
        if file is not manifest.files[0]:
            usual_check(file, columns)
        while not served.failed:  # until another request waits
            pass

    def interrupt(phase, completed, of):
        raise KeyboardInterrupt

    monkeypatch.setattr(location, "check", check)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(damage(location, manifest, interrupt))
    assert time.monotonic() - begin < store.STALL_S  # the check did not wait for the store


def test_workers_of_one_machine_fetch_each_file_once(served, tmp_path):
    def fetch(_):
        location = RemoteFolder(served.url, Cache(tmp_path / "together", 10**6))
        manifest = location.manifest()
        return [len(location.load(file, manifest.columns)["x"]) for file in manifest.files]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(fetch, range(4))) == [[5] * 4] * 4
    assert [served.served[file.name] for file in open_location(served.url).manifest().files] == [1] * 4


def test_cache_keeps_cap_and_drops_least_recently_used(tmp_path):
    cache, names = Cache(tmp_path / "c", 250), [hashlib.sha256(bytes([n])).hexdigest() for n in range(4)]

    def get(number):
        fetched = []
        path = cache.path(names[number], 100, lambda path: (fetched.append(1), path.write_bytes(bytes(100))))
        assert path.stat().st_size == 100
        assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir() if file.is_file()) <= 250
        return bool(fetched)

    assert [get(0), get(1), get(0)] == [True, True, False]
    part = tmp_path / "c" / f".{names[3]}-100-00000000"  # a file of a killed process
    part.touch()
    assert get(2)
    assert not part.exists()
    assert not get(0)
    assert get(1)


def test_cache_keeps_part_of_larger_data_set(served, tmp_path, caplog):
    stored = open_location(served.url).manifest()
    chance = np.random.default_rng(0)
    for way, cached_files in (("load", 2), ("mapped", None)):
        folder = tmp_path / way
        location = RemoteFolder(served.url, Cache(folder, 2 * stored.files[0].nbytes + 10))
        manifest, hits = location.manifest(), []
        for _ in range(3):
            before = sum(served.served.values())
            for number in chance.permutation(4):
                file = manifest.files[number]
                assert len(getattr(location, way)(file, manifest.columns)["x"]) == 5
                assert sum(1 for path in folder.iterdir() if path.is_file()) <= 2
            hits.append(4 - (sum(served.served.values()) - before))
        assert cached_files is None or hits == [0, cached_files, cached_files]
    assert not caplog.records


def test_cache_drops_other_data_sets_and_keeps_smaller_cap(served, tmp_path):
    folder, location = tmp_path / "c", open_location(served.url)
    manifest = location.manifest()
    file_nbytes = manifest.files[0].nbytes
    cache = Cache(folder, 3 * file_nbytes)
    for number in range(3):
        cache.path(f"{number:064x}", file_nbytes, lambda path: path.write_bytes(bytes(file_nbytes)))
    read(RemoteFolder(served.url, Cache(folder, 3 * file_nbytes)))
    assert {path.name for path in folder.iterdir() if path.is_file()} == {file.sha256 for file in manifest.files[:3]}
    read(RemoteFolder(served.url, Cache(folder, 2 * file_nbytes)))
    assert sum(path.is_file() for path in folder.iterdir()) == 2


def test_waiting_for_another_fetch_can_be_ended(served, tmp_path):
    folder, location = tmp_path / "c", RemoteFolder(served.url, Cache(tmp_path / "c", 10**6))
    manifest, errors = location.manifest(), []
    folder.joinpath("locks").mkdir(parents=True)

    def wait():
        try:
            location.load(manifest.files[0], manifest.columns)
        except DatasetError as error:
            errors.append(str(error))

    with FileLock(folder / "locks" / manifest.files[0].sha256[:2]):
        waiting = threading.Thread(target=wait)
        waiting.start()
        location.close()
        waiting.join(PATIENCE_S)
    assert "was ended" in errors[0] or "was closed" in errors[0]


class Conditional(store.Store):
    """A store that checks the condition of a write, like S3.

    A test may change the store before the check, or lose the answer of a write.
    """

    def happens(self):
        """Do nothing. A test may replace this method to change the store before the check."""

    loses = False

    def mark(self, name):
        return hashlib.sha256(self.read(name, 10**6)).hexdigest()

    def write(self, name, data, *, new=False, over=""):
        if over:
            self.happens()
        if over and over != self.mark(name):
            raise FileExistsError(name)
        super().write(name, data, new=new)
        if over and self.loses:  # the write was repeated after a lost answer, so it finds its own manifest
            raise FileExistsError(name)


@pytest.mark.parametrize("moment", ["while it writes", "at its end"])
def test_second_writer_of_next_version_is_refused(source, url, tmp_path, moment):
    location, late = (RemoteFolder(url, Cache(tmp_path / name), Conditional(url)) for name in ("one", "two"))
    split(source, location, [5] * 4)
    before = read(location)

    def write_version():  # the name in the store was removed, by hand or because the store does not protect it
        fsspec.filesystem("memory").rm(f"{url}/{LOCK}")
        repartition(late, PartitionedSource(late), [10] * 2)

    def moved(phase, completed, of):
        if moment == "while it writes" and phase == "writing" and completed == 12:
            write_version()

    if moment == "at its end":
        location._store.happens = write_version
    with pytest.raises(DatasetError, match="another writer has changed"):
        repartition(location, PartitionedSource(location), [4] * 5, moved=moved)
    manifest = location.manifest()
    assert manifest.sizes.tolist() == [10, 10]
    assert not list(damage(location, manifest))
    location._store.happens = lambda: None
    location._store.loses = True
    assert repartition(location, PartitionedSource(location), [20]) == location.manifest()
    assert all(np.array_equal(array, before[name]) for name, array in read(location).items())


def test_cache_without_room_warns_once(served, tmp_path, monkeypatch, caplog):
    expected = read(open_location(served.url))
    monkeypatch.setattr("ddlf.data.cache.shutil.disk_usage", lambda path: _Usage)
    caplog.clear()
    location = RemoteFolder(served.url, Cache(tmp_path / "none"))
    for _ in range(2):
        assert np.array_equal(read(location)["x"], expected["x"])
    manifest = location.manifest()
    assert np.array_equal(location.mapped(manifest.files[0], manifest.columns)["x"], expected["x"][:5])
    (tmp_path / "a file").touch()
    uncached = RemoteFolder(served.url, Cache(tmp_path / "a file", 10**6))
    assert np.array_equal(read(uncached)["x"], expected["x"])
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(":")[0] for line in lines] == [
        f"no room in {tmp_path / 'none'} for a file of {manifest.files[0].nbytes} B",
        f"{tmp_path / 'a file'} cannot be used",
    ]


def test_disabled_cache_is_not_reported(served, monkeypatch, caplog):
    monkeypatch.setenv(CAP, "0")
    read(open_location(served.url))
    assert not caplog.records


class _Usage:
    total, used, free = 10**9, 10**9, 10**6


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("s3://key:secret@bucket/data", ConfigError, "s3://bucket/data contains a password"),
        ("https://host/data?token=secret", ConfigError, r"https://host/data ends with a query"),
        ("nonsense://bucket/data", DatasetError, "no driver is known for nonsense://"),
        ("gs://bucket/data", DatasetError, "gs:// needs gcsfs, which is not installed here; pip install gcsfs"),
        ("az://box/data", DatasetError, "az:// needs adlfs, which is not installed here; pip install adlfs"),
    ],
)
def test_unusable_url_is_refused_without_its_secret(location, error, message):
    with pytest.raises(error, match=message) as raised:
        open_location(location)
    assert "secret" not in str(raised.value)


def test_failing_driver_is_reported_in_one_sentence(monkeypatch):
    def begin(*args, **more):
        raise OSError("Unable to load libjvm\nand much more")

    monkeypatch.setattr(fsspec.core, "url_to_fs", begin)
    with pytest.raises(
        DatasetError,
        match=r"hdfs:// cannot be used: Unable to load libjvm; install the programs that its driver needs$",
    ):
        open_location("hdfs://host/data")


def test_forbidden_without_reason_mentions_clock():
    assert store._hint(PermissionError("Forbidden")).endswith("check its clock")
    assert store._hint(PermissionError("RequestTimeTooSkewed")) == "set this machine's clock"


def test_web_server_is_read_only(served, source):
    with pytest.raises(DatasetError, match=r"cannot write .*read-only"):
        split(source, open_location(served.url + "/new"), [20])


def test_invalid_cache_size_is_refused(monkeypatch):
    monkeypatch.setenv(CAP, "lots")
    with pytest.raises(ConfigError, match="DDLF_CACHE_SIZE is 'lots'"):
        open_location("memory://bucket/data")
