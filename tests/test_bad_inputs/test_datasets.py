"""B96-B107: what data that cannot be used says, which file and which count. Nothing is ever unpickled, unpacked to disk, or allocated unseen."""

import builtins
import io
import sys
import tracemalloc
import types
import zipfile

import numpy as np
import pytest

import ddlf
from ddlf.data import datasets
from ddlf.errors import BadUpdate, ConfigError, DatasetError, DatasetMismatch, DDLFError
from tests.training.models import Blobs, app


@pytest.fixture(autouse=True)
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DDLF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def no_download(monkeypatch):
    def load_data():
        raise Exception("no network")

    mnist = types.SimpleNamespace(load_data=load_data)
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(datasets=types.SimpleNamespace(mnist=mnist)))


def mnist(train=3, **changes):
    """Arrays of an mnist.npz with these changes."""
    made = {}
    for split, count in (("train", train), ("test", 2)):
        made[f"x_{split}"] = np.zeros((count, 28, 28), np.uint8)
        made[f"y_{split}"] = np.arange(count, dtype=np.uint8) % 10
    return {**made, **changes}


def complaint(path):
    """What loading MNIST says; the file is named."""
    with pytest.raises(DatasetError) as refused:
        ddlf.load_mnist()
    assert str(path) in str(refused.value)
    assert refused.value.exit_code == 7
    return str(refused.value)


def write_zip(path, members):
    """An archive of these (name, content) pairs, also with names that no honest one has."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def npy(array):
    """An array as the content of a member."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def members(**changes):
    return [(f"{name}.npy", npy(array)) for name, array in mnist(**changes).items()]


# -- B96: files that are not there -------------------------------------------------------------------------------------


def test_B96_a_folder_that_is_missing_is_named(folder):
    folder.rmdir()
    assert "which is no folder; set it to the folder of mnist.npz" in complaint(folder)


def test_B96_an_empty_folder_without_network_says_where_to_put_the_file(no_download):
    with pytest.raises(
        DatasetError, match=r"neither in DDLF_DATA nor in the cache, and cannot be downloaded \(no network"
    ):
        ddlf.load_mnist()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: path.symlink_to("gone.npz"), "is a link to nothing", id="B96 broken link"),
        pytest.param(lambda path: path.mkdir(), "is no file", id="B96 folder"),
    ],
)
def test_B96_what_is_no_file_is_named_and_not_replaced_by_a_download(folder, make, reason):
    make(folder / "mnist.npz")
    assert reason in complaint(folder / "mnist.npz")


def test_B96_a_file_that_may_not_be_read_is_named_with_the_reason(folder, monkeypatch):
    np.savez(folder / "mnist.npz", **mnist())

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", refuse)
    text = complaint(folder / "mnist.npz")
    monkeypatch.undo()
    assert "Permission denied" in text


# -- B97-B100: content -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(dict(y_train=np.zeros(2, np.uint8)), "x_train has 3 rows, y_train 2", id="B97 lengths"),
        pytest.param(dict(train=0), "x_train has no samples", id="B97 none"),
        pytest.param(dict(y_train=np.array([object()] * 3)), "Object arrays cannot be loaded", id="B98"),
        pytest.param(dict(y_train=np.array([0, 10, 2], np.uint8)), "labels from 0 to 10, not 0 to 9", id="B100 labels"),
        pytest.param(
            dict(x_train=np.zeros((3, 5, 5), np.uint8)), "images of shape (5, 5), not (28, 28, 1)", id="B97 shape"
        ),
        pytest.param(dict(x_train=np.full((3, 28, 28), np.nan)), "x_train holds float64, not uint8", id="B100 NaN"),
    ],
)
def test_a_file_with_wrong_content_is_named_with_what_is_wrong(folder, changes, sentence):
    np.savez(folder / "mnist.npz", **mnist(**changes))
    assert sentence in complaint(folder / "mnist.npz")


@pytest.mark.parametrize("cut", [0, 10, 1000, -30, -1], ids=lambda cut: f"B99 {cut}")
def test_B99_a_truncated_file_is_named(folder, cut):
    np.savez(folder / "whole.npz", **mnist())
    (folder / "mnist.npz").write_bytes((folder / "whole.npz").read_bytes()[:cut])
    assert "cannot be read" in complaint(folder / "mnist.npz")


def test_B99_a_header_that_claims_more_than_is_there_is_refused_before_memory_is_taken(folder):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 28, 28)})
    write_zip(folder / "mnist.npz", [*members()[1:], ("x_train.npy", content.getvalue() + b"\0" * 100)])
    tracemalloc.start()
    text = complaint(folder / "mnist.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "x_train claims 784,000,000,000 bytes, but has 100" in text
    assert peak < 10**7


# -- B101-B102: archives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../x.npy", "/tmp/ddlf-unsafe.npy", "C:\\x.npy", "a/../../x.npy", "n" * 300, "x\0y"],
    ids=lambda name: f"B101 {name[:12]!r}",
)
def test_B101_a_member_of_any_name_is_never_written_anywhere(folder, name):
    write_zip(folder / "mnist.npz", [*members(), (name, b"content")])
    before = sorted(folder.parent.rglob("*"))
    (x, _), _ = ddlf.load_mnist()
    assert x.shape == (3, 28, 28, 1)
    assert sorted(folder.parent.rglob("*")) == before


def test_B101_a_member_that_is_there_twice_is_refused(folder):
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_zip(folder / "mnist.npz", [*members(), *members()])
    assert "has x_train twice" in complaint(folder / "mnist.npz")


def test_B102_an_archive_that_unpacks_to_more_than_the_data_can_need_is_refused_unread(folder, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_UNPACKED_BYTES", 10**7)
    with zipfile.ZipFile(folder / "mnist.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members()[1:]:
            archive.writestr(name, content)
        with archive.open("x_train.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {"descr": "|u1", "fortran_order": False, "shape": (40_000, 28, 28)}
            )
            member.write(bytes(40_000 * 28 * 28))
    assert (folder / "mnist.npz").stat().st_size < 100_000
    assert "unpacks to 0.03 GB, more than the 0.01 GB that it can need" in complaint(folder / "mnist.npz")


def test_B102_an_archive_of_very_many_members_is_refused(folder):
    write_zip(folder / "mnist.npz", [*members(), *((f"{number}", b"") for number in range(2000))])
    assert "has 2,004 members, but only 4 are wanted" in complaint(folder / "mnist.npz")


# -- B105-B107: the cache, and other nodes -----------------------------------------------------------------------------


def test_B105_B106_a_cached_file_that_changed_is_never_used(monkeypatch, tmp_path):
    monkeypatch.delenv("DDLF_DATA")
    downloads = []

    def load_data():
        downloads.append(1)
        made = mnist()
        return (made["x_train"], made["y_train"]), (made["x_test"], made["y_test"])

    keras = types.SimpleNamespace(datasets=types.SimpleNamespace(mnist=types.SimpleNamespace(load_data=load_data)))
    monkeypatch.setitem(sys.modules, "keras", keras)
    ddlf.load_mnist()
    ddlf.load_mnist()
    assert len(downloads) == 1
    (cached,) = (tmp_path / "cache").rglob("mnist.npz")
    np.savez(cached, **mnist(train=9))  # a good file, but not the one that was hashed
    assert len(ddlf.load_mnist()[0][0]) == 3
    assert len(downloads) == 2


def test_B105_equal_names_do_not_make_equal_data(folder):
    np.savez(folder / "mnist.npz", **mnist())
    first = datasets.fingerprint(*ddlf.load_mnist()[0])
    np.savez(folder / "mnist.npz", **mnist(y_train=np.array([0, 1, 3], np.uint8)))
    assert datasets.fingerprint(*ddlf.load_mnist()[0]) != first


class Changed(Blobs):
    """Has other data on the second worker."""

    samples = 221
    dtype = "float32"
    rows = None

    async def load_dataset(self):
        await super().load_dataset()
        if hasattr(self, "worker") and self.worker.id == 2:
            self.x_train = self.x_train.astype(self.dtype)[: self.rows]
            self.y_train = self.y_train[: self.rows]


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        pytest.param(dict(dtype="float64"), ["float32", "float64"], id="B107 dtype"),
        pytest.param(dict(rows=220), [" 221 ", " 220 "], id="B107 shape"),
    ],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_B107_data_that_differs_between_workers_is_a_table_and_nothing_is_trained(two_workers, changes, cells):
    made = Changed(two_workers)
    for name, value in changes.items():
        setattr(made, name, value)
    with pytest.raises(DatasetMismatch) as refused:
        await made.train_sync(master_epochs=1)
    assert all(cell in str(refused.value) for cell in ("worker 1", "worker 2", *cells))
    assert made.history == []


class Broken(Blobs):
    """Has unusable data everywhere."""

    async def load_dataset(self):
        await super().load_dataset()
        self.spoil()

    def spoil(self):
        self.y_train = self.y_train[:-1]


@pytest.mark.asyncio(loop_scope="session")
async def test_B97_an_app_with_labels_missing_or_less_samples_than_workers_is_told_so(two_workers):
    with pytest.raises(DDLFError) as refused:
        await Broken(two_workers).train_sync(master_epochs=1)
    assert "x_train has 203 rows, y_train 202" in str(refused.value)
    with pytest.raises(ConfigError, match="1 samples cannot be split over 2 slots"):
        await app(two_workers, samples=1).train_sync(master_epochs=1)


class WithNaN(Blobs):
    verbose = True

    async def load_dataset(self):
        await super().load_dataset()
        self.x_train[[3, 5], [1, 2]] = np.nan, np.inf


@pytest.mark.asyncio(loop_scope="session")
async def test_B100_values_that_are_not_finite_are_counted_before_training(two_workers, capsys):
    with pytest.raises(BadUpdate, match="NaN or infinite"):
        await WithNaN(two_workers).train_sync(master_epochs=1)
    assert "WARNING 2 of 1,624 values of x_train are NaN or infinite" in capsys.readouterr().out
