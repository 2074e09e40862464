"""Tests of checkpoints in slices: they contain the same arrays as one file, and each slice is verified."""

import json
import os
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ddlf.algorithms.flat_weights import cut
from ddlf.errors import CheckpointCorrupt, CheckpointError, LeaseError
from ddlf.training.checkpoints import slices
from ddlf.training.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, NotWritten, is_seen, part_name, write, write_if_seen
from ddlf.training.exchanges.sharded.plan import slice_arrays
from ddlf.training.exchanges.sharded.ranges import cut_range

CHANCE = np.random.default_rng(0)
NAMES = ["embedding", "dense/kernel", "dense/bias", "empty", "scale"]
SHAPES = [(90, 7), (7, 11), (11,), (0, 3), ()]
KINDS = [np.float32, ml_dtypes.bfloat16, np.float32, np.float32, np.int64]
LIKE = [np.asarray(CHANCE.normal(size=shape) * 100, kind) for shape, kind in zip(SHAPES, KINDS, strict=True)]
SIZE = sum(array.size for array in LIKE)


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "run")
    checkpoints.open("a test")
    yield checkpoints
    checkpoints.close()


def saved(folder, number=1, *, count=3, run="abc", harm=lambda begun: None):
    """Save a checkpoint of weights and of the state beside them, in ``count`` slices."""
    begun, state = folder.begin(number, run), [[np.asarray(w * 2, w.dtype) for w in LIKE]]
    begun.sliced[WEIGHTS] = [(f"{i:04d} {NAMES[i]}", w.dtype.name, list(w.shape)) for i, w in enumerate(LIKE)]
    begun.sliced[OUTER] = [(f"{i:04d}", w.dtype.name, list(w.shape)) for i, w in enumerate(LIKE)]
    for shard, part in enumerate(cut(SIZE, count)):
        target, states = begun.destination(shard), [cut_range(group, part) for group in state]
        arrays = slice_arrays(LIKE, part, NAMES, cut_range(LIKE, part), states)
        begun.add(target, write_if_seen(target, arrays, by=shard + 1))
    harm(begun)
    arrays = {"ledger": {"counts": np.arange(5)}}
    return folder.save(Checkpoint(round=number, arrays=arrays, facts={"training": run}, slices=begun))


def bits(arrays):
    return [(name, array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()]


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_slices_are_read_as_they_were_written(folder, count):
    saved(folder, count=count)
    checkpoint = folder.newest()
    assert list(checkpoint.arrays) == ["ledger", WEIGHTS, OUTER]
    assert bits(checkpoint.arrays[WEIGHTS]) == bits({f"{i:04d} {NAMES[i]}": w for i, w in enumerate(LIKE)})
    assert bits(checkpoint.arrays[OUTER]) == bits({f"{i:04d}": np.asarray(w * 2, w.dtype) for i, w in enumerate(LIKE)})
    assert [entry.complete for entry in folder.entries()] == [True]


def test_manifest_names_each_slice_with_size_hash_and_writer(folder):
    path = saved(folder)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 3
    assert [(file["name"], file["by"]) for file in manifest["slices"]] == [
        (f"slice_000{number}.safetensors", number) for number in (1, 2, 3)
    ]
    assert [file["bytes"] for file in manifest["slices"]] == [
        (path / file["name"]).stat().st_size for file in manifest["slices"]
    ]
    assert part_name(WEIGHTS, 0, "0000 embedding") in manifest["slices"][0]["arrays"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda path, other: path.unlink(), r"slice_0002\.safetensors is missing"),
        (lambda path, other: flip(path), r"slice_0002\.safetensors is damaged: expected SHA-256"),
        (lambda path, other: os.truncate(path, 40), r"slice_0002\.safetensors is damaged: expected [\d,]+ bytes"),
        (
            lambda path, other: shutil.copy(other, path),
            r"is a slice of round 2 of another run, xyz, and not of round 2",
        ),
        (
            lambda path, other: shutil.copy(path.parents[1] / "round-000001" / path.name, path),
            r"slice_0002\.safetensors is a slice of round 1 of this run, and not of round 2 of run abc",
        ),
        (
            lambda path, other: shutil.copy(path.parent / "slice_0003.safetensors", path),
            r"slice_0002\.safetensors has other arrays than the manifest names: it is a slice of another worker",
        ),
    ],
    ids=["missing", "damaged", "cut short", "of another run", "of another round", "of another cut"],
)
def test_wrong_slice_is_named_and_the_previous_checkpoint_used(folder, tmp_path, harm, sentence):
    other_folder = CheckpointFolder(tmp_path / "another")
    other_folder.open("a test")
    other_path = saved(other_folder, 2, run="xyz")
    other_folder.close()
    saved(folder, 1)
    path = saved(folder, 2)
    harm(path / "slice_0002.safetensors", other_path / "slice_0002.safetensors")
    with pytest.raises(CheckpointCorrupt, match=sentence):
        folder.load("round-000002")
    problems = []
    assert folder.newest(report=problems.append).round == 1
    assert "round-000001 is used instead" in problems[0]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda begun: begun.files.pop(), "slice_0003"),
        (lambda begun: begun.sliced[WEIGHTS].pop(), "parts of arrays that the manifest names"),
        (lambda begun: begun.sliced[WEIGHTS].append(("0009 more", "float32", [2])), "slices with each value of '0009"),
        (lambda begun: begun.sliced.update({OUTER: [("0000", "float32", [90, 8])]}), "parts of arrays|each value"),
    ],
    ids=["a file too many", "an array too few", "an array too many", "another shape"],
)
def test_slices_that_contradict_the_manifest_are_refused(folder, harm, sentence):
    saved(folder, harm=harm)
    with pytest.raises(CheckpointCorrupt, match=sentence):
        folder.load("round-000001")


def test_a_worker_that_sees_no_folder_or_that_of_another_run_writes_nothing(folder, tmp_path):
    target = folder.begin(1, "abc").destination(0)
    assert is_seen(target.folder, target.session)
    for change in ({"folder": tmp_path / "none"}, {"session": "another"}):
        wrong = replace(target, **change)
        assert not is_seen(wrong.folder, wrong.session)
        reason = f"there is no {wrong.folder} of this run here"
        assert write_if_seen(wrong, {}, by=2) == NotWritten(by=2, reason=reason, visible=False)
    assert not target.file.exists()


def test_a_worker_that_sees_the_folder_and_cannot_write_gives_the_reason(folder):
    target = folder.begin(1, "abc").destination(0)
    answer = write_if_seen(replace(target, file=target.file / "none" / "x"), {"weights 0 a": np.zeros(3)}, by=2)
    assert answer.visible
    assert "cannot write a slice of a checkpoint in" in answer.reason


def test_a_master_that_lost_the_folder_has_nothing_written_there(folder):
    begun = folder.begin(1, "abc")
    CheckpointFolder(folder.path).open("another", takeover=True)
    assert not is_seen(begun.root, begun.session)
    with pytest.raises(LeaseError, match="taken over"):
        folder.begin(2, "abc")


def test_slices_are_removed_with_their_checkpoint_or_killed_writer(folder):
    folder.keep = 2
    for number in range(1, 5):
        saved(folder, number)
    begun = folder.begin(5, "abc")
    write(begun.destination(0), {"weights 0 a": np.zeros(3)})
    assert sorted(path.name for path in folder.path.glob("round-*")) == ["round-000003", "round-000004"]
    folder.close()
    reopened = CheckpointFolder(folder.path)
    reopened.open("the next one")
    assert not list(reopened.path.glob(".*-round-*"))
    reopened.close()


def test_slices_can_be_read_before_and_after_they_are_complete(folder):
    readings = []
    saved(folder, harm=lambda begun: readings.append((begun, bits(begun.read()[WEIGHTS]))))
    begun, before = readings[0]
    assert bits(begun.read()[WEIGHTS]) == before
    assert begun.folder == begun.final


def test_the_attempt_that_the_master_accepted_counts(folder):
    begun = folder.begin(1, "abc")
    late, accepted = begun.destination(0), begun.destination(0)
    for target, value in ((late, 1.0), (accepted, 2.0)):
        written = write(target, {part_name(WEIGHTS, 0, "0000 a"): np.full(3, value)})
    begun.sliced[WEIGHTS] = [("0000 a", "float64", [3])]
    begun.add(accepted, written)
    folder.save(Checkpoint(round=1, arrays={}, facts={"training": "abc"}, slices=begun))
    assert folder.newest().arrays[WEIGHTS]["0000 a"].tolist() == [2.0] * 3


def test_slice_that_differs_from_the_written_bytes_does_not_count(folder):
    begun = folder.begin(1, "abc")
    target = begun.destination(0)
    written = write(target, {part_name(WEIGHTS, 0, "0000 a"): np.zeros(3)})
    with pytest.raises(CheckpointError, match="bytes here, and 5 where it was written"):
        begun.add(target, replace(written, bytes=5))
    os.remove(target.file)
    with pytest.raises(CheckpointError, match="cannot write a slice"):
        begun.add(target, written)


def test_an_unknown_type_is_refused():
    with pytest.raises(CheckpointError, match="'object' arrays"):
        slices.tensors.dtype_of("object")
