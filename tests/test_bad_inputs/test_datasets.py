"""Tests of unusable data: errors name the file and the count, and DDLF does not unpickle, write or allocate unchecked data."""

import builtins
import io
import tracemalloc
import zipfile

import numpy as np
import pytest

import ddlf
from ddlf.data import datasets
from ddlf.errors import BadUpdate, ConfigError, DatasetError, DatasetMismatch, DDLFError
from tests.data.archives import npy
from tests.training.models import Blobs, app


@pytest.fixture(autouse=True)
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DDLF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def mnist(train=3, **changes):
    """Return the arrays of an ``mnist.npz`` with these changes."""
    arrays = {}
    for split, count in (("train", train), ("test", 2)):
        arrays[f"x_{split}"] = np.zeros((count, 28, 28), np.uint8)
        arrays[f"y_{split}"] = np.arange(count, dtype=np.uint8) % 10
    return {**arrays, **changes}


def complaint(path):
    """Return the error message of loading MNIST. It must name the file."""
    with pytest.raises(DatasetError) as refused:
        ddlf.load_mnist()
    assert str(path) in str(refused.value)
    assert refused.value.exit_code == 7
    return str(refused.value)


def write_zip(path, members):
    """Write an archive of (name, content) pairs. The names may be dangerous."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def members(**changes):
    return [(f"{name}.npy", npy(array)) for name, array in mnist(**changes).items()]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: path.symlink_to("gone.npz"), "is a link to nothing", id="broken link"),
        pytest.param(lambda path: path.mkdir(), "is no file", id="folder"),
    ],
)
def test_path_that_is_not_a_file_is_named_and_not_downloaded(folder, make, reason):
    make(folder / "mnist.npz")
    assert reason in complaint(folder / "mnist.npz")


def test_unreadable_file_is_named_with_the_reason(folder, monkeypatch):
    np.savez(folder / "mnist.npz", **mnist())

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", refuse)
    text = complaint(folder / "mnist.npz")
    monkeypatch.undo()
    assert "Permission denied" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(train=0), "x_train has no samples"),
        (dict(x_train=np.full((3, 28, 28), np.nan)), "x_train holds float64, not uint8"),
    ],
)
def test_file_with_wrong_content_is_named_with_the_reason(folder, changes, sentence):
    np.savez(folder / "mnist.npz", **mnist(**changes))
    assert sentence in complaint(folder / "mnist.npz")


def test_header_that_claims_too_much_takes_no_memory(folder):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 28, 28)})
    write_zip(folder / "mnist.npz", [*members()[1:], ("x_train.npy", content.getvalue() + b"\0" * 100)])
    tracemalloc.start()
    text = complaint(folder / "mnist.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "x_train claims 784,000,000,000 bytes, but has 100" in text
    assert peak < 10**7


@pytest.mark.parametrize(
    "name",
    ["../x.npy", "/tmp/ddlf-unsafe.npy", "C:\\x.npy", "a/../../x.npy", "n" * 300, "x\0y"],
    ids=lambda name: repr(name[:12]),
)
def test_archive_member_is_never_written_anywhere(folder, name):
    write_zip(folder / "mnist.npz", [*members(), (name, b"content")])
    before = sorted(folder.parent.rglob("*"))
    (x, _), _ = ddlf.load_mnist()
    assert x.shape == (3, 28, 28, 1)
    assert sorted(folder.parent.rglob("*")) == before


def test_duplicate_archive_member_is_refused(folder):
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_zip(folder / "mnist.npz", [*members(), *members()])
    assert "has x_train twice" in complaint(folder / "mnist.npz")


def test_archive_that_unpacks_to_too_much_is_refused_unread(folder, monkeypatch):
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


def test_archive_of_very_many_members_is_refused(folder):
    write_zip(folder / "mnist.npz", [*members(), *((f"{number}", b"") for number in range(2000))])
    assert "has 2,004 members, but only 4 are expected" in complaint(folder / "mnist.npz")


class Changed(Blobs):
    """An app with other data on the second worker."""

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
        pytest.param(dict(dtype="float64"), ["float32", "float64"], id="dtype"),
        pytest.param(dict(rows=220), [" 221 ", " 220 "], id="shape"),
    ],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_data_that_differs_between_workers_ends_in_a_table(two_workers, changes, cells):
    changed = Changed(two_workers)
    for name, value in changes.items():
        setattr(changed, name, value)
    with pytest.raises(DatasetMismatch) as refused:
        await changed.train_sync(master_epochs=1)
    assert all(cell in str(refused.value) for cell in ("worker 1", "worker 2", *cells))
    assert changed.history == []


class Broken(Blobs):
    """An app with unusable data on all workers."""

    async def load_dataset(self):
        await super().load_dataset()
        self.spoil()

    def spoil(self):
        self.y_train = self.y_train[:-1]


@pytest.mark.asyncio(loop_scope="session")
async def test_missing_labels_and_too_few_samples_are_refused(two_workers):
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


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_values_that_are_not_finite_are_counted_before_training(two_workers, capsys):
    with pytest.raises(BadUpdate, match="NaN or infinite"):
        await WithNaN(two_workers).train_sync(master_epochs=1)
    assert "WARNING 2 of 1,624 values of x_train are NaN or infinite" in capsys.readouterr().out
