"""Tests of the folder of checkpoints: it always has a complete checkpoint, it reports all damage, and it has one writer."""

import errno
import gc
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlf.errors import CheckpointCorrupt, CheckpointError, ConfigError, LeaseError
from ddlf.training.checkpoints import checkpoint as module
from ddlf.training.checkpoints import tensors
from ddlf.training.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from ddlf.training.checkpoints.durable import seal, unseal
from ddlf.version import __version__
from tests.patience import PATIENCE_S
from tests.processes import command
from tests.training.checkpoints.test_tensors import arrays, names
from tests.trials.checkpoints import same, state


def checkpoint_of(round, facts=(), **arrays):
    return Checkpoint(round=round, arrays={"weights": arrays}, facts=dict(facts))


@pytest.fixture
def folder(tmp_path):
    """An open folder."""
    folder = CheckpointFolder(tmp_path / "run")
    folder.open("the test")
    yield folder
    folder.close()


def listed(folder):
    return sorted(name for name in os.listdir(folder.path) if name not in (".lock", "owner.json"))


# A saved state is read back


@settings(max_examples=15)  # each syncs its files; test_tensors.py tries more arrays
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), st.dictionaries(names(), arrays()), max_size=3
    )
)
def test_arrays_are_read_back_with_the_same_bits_types_names_and_order(tmp_path_factory, groups):
    folder = CheckpointFolder(tmp_path_factory.mktemp("any"))
    folder.open("the test")
    folder.save(Checkpoint(round=3, arrays=groups, facts={}))
    checkpoint = folder.newest()
    assert list(checkpoint.arrays) == list(groups)
    for group, saved in groups.items():
        assert list(checkpoint.arrays[group]) == list(saved)
        for name, array in tensors.plain(saved).items():
            assert checkpoint.arrays[group][name].dtype == array.dtype
            assert checkpoint.arrays[group][name].shape == array.shape
            assert checkpoint.arrays[group][name].tobytes() == array.tobytes()


def test_facts_are_read_back_unchanged_with_nan_large_numbers_and_their_order(folder):
    facts = {
        "z": 1,
        "a": [1, 2.5, None, True, "é\ud800"],
        "rng": 2**127 - 1,
        "best": float("inf"),
        "deep": {"x": {"y": []}},
    }
    folder.save(checkpoint_of(1, facts))
    assert folder.newest().facts == facts
    assert list(folder.newest().facts) == list(facts)
    folder.save(checkpoint_of(2, {"loss": float("nan")}))
    assert folder.newest().facts["loss"] != folder.newest().facts["loss"]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"shape": (1, 2)}, r"facts\['shape'\] is a builtins.tuple"),
        ({"a": [{"b": np.float32(1)}]}, r"facts\['a'\]\[0\]\['b'\] is a numpy.float32"),
        ({"a": {1: 2}}, r"facts\['a'\] has the key 1"),
        ({"n": 10**5000}, "cannot be written as JSON"),
    ],
)
def test_facts_that_json_would_change_are_refused_by_name(folder, facts, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        folder.save(checkpoint_of(1, facts))
    assert listed(folder) == []


def test_facts_that_contain_themselves_are_refused(folder):
    facts = {}
    facts["again"] = facts
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        folder.save(checkpoint_of(1, facts))


@pytest.mark.parametrize("group", ["", "../weights", "Weights", "a/b", "manifest.json", ".hidden", "x" * 65, "a\n"])
def test_a_group_whose_name_is_not_a_plain_file_name_is_refused(folder, group):
    with pytest.raises(CheckpointError, match="cannot name a file"):
        folder.save(Checkpoint(round=1, arrays={group: {}}, facts={}))


@pytest.mark.parametrize("number", [-1, 1.0, True, np.int64(3)])
def test_a_round_is_a_whole_number(folder, number):
    with pytest.raises(CheckpointError, match="cannot be of round"):
        folder.save(checkpoint_of(number))


def test_the_same_state_gives_the_same_bytes(tmp_path):
    for name in "ab":
        folder = CheckpointFolder(tmp_path / name)
        folder.open(name)
        folder.save(state(7))
    for file in (tmp_path / "a" / "round-000007").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / "round-000007" / file.name).read_bytes()


def test_only_the_owner_may_read_a_checkpoint(folder):
    saved = folder.save(state(1))
    assert {stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()} == {0o600}
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(folder.path.stat().st_mode) == 0o700


# Which checkpoint is kept and read


def test_last_three_are_kept_and_the_newest_has_the_highest_round(folder):
    for number in (1, 2, 5, 9, 10, 1_000_000):
        folder.save(state(number, 0.01))
    assert listed(folder) == ["round-000009", "round-000010", "round-1000000"]
    for age, name in enumerate(listed(folder)):
        os.utime(folder.path / name, (2_000_000_000 - age, 2_000_000_000 - age))
    assert folder.newest().round == 1_000_000
    assert [entry.round for entry in folder.entries()] == [1_000_000, 10, 9]


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep must be at least 1, not 0"):
        CheckpointFolder(tmp_path, keep=0)


def test_missing_or_empty_folder_has_no_checkpoint(tmp_path):
    missing = CheckpointFolder(tmp_path / "none")
    assert missing.newest() is None
    assert missing.entries() == []
    assert not missing.path.exists()
    with pytest.raises(CheckpointError, match=r"there is no folder .*/none; check its name"):
        missing.newest(required=True)


def test_leftovers_of_killed_writers_are_removed_and_never_read(folder):
    folder.save(state(1, 0.01))
    shutil.move(folder.path / "round-000001", folder.path / f"{module.WRITING}round-000001-ab")
    shutil.copytree(folder.path / f"{module.WRITING}round-000001-ab", folder.path / f"{module.REMOVING}round-000000-cd")
    assert folder.newest() is None
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*; found 2 incomplete"):
        folder.newest(required=True)
    assert [(entry.round, entry.complete, entry.problem) for entry in folder.entries()] == [
        (None, False, "its writer was interrupted")
    ] * 2
    folder.close()
    folder.open("the next")
    assert listed(folder) == []


def test_files_of_other_programs_are_left_alone(folder):
    for name in ("round-1", "round-0000001", "round-000001x", "notes", "round-000001.replaced.old"):
        (folder.path / name).mkdir()
    folder.save(state(3, 0.01))
    folder.close()
    folder.open("again")
    assert len(listed(folder)) == 6
    assert [entry.name for entry in folder.entries()] == ["round-000003"]


def test_a_round_that_is_saved_again_replaces_the_first_checkpoint(folder):
    folder.save(checkpoint_of(4, {"attempt": 1}))
    folder.save(checkpoint_of(4, {"attempt": 2}))
    assert listed(folder) == ["round-000004"]
    assert folder.newest().facts == {"attempt": 2}


def test_writer_killed_between_two_renames_loses_nothing(folder):
    folder.save(checkpoint_of(4, {"attempt": 1}))
    os.rename(folder.path / "round-000004", folder.path / "round-000004.replaced")
    assert folder.newest().facts == {"attempt": 1}
    folder.close()
    folder.open("the next")
    assert listed(folder) == ["round-000004"]
    os.rename(folder.path / "round-000004", folder.path / "round-000004.replaced")
    folder.save(checkpoint_of(4, {"attempt": 2}))
    assert listed(folder) == ["round-000004"]
    assert folder.newest().facts == {"attempt": 2}


def test_writing_and_reading_create_no_reference_cycles(folder):
    """The garbage collector stops all threads while it runs, and reference cycles make it run more often."""
    for number in (1, 2, 3):  # the first calls import modules and fill caches
        folder.load(folder.save(state(number, 0.01)))
    gc.collect()
    gc.disable()
    try:
        folder.load(folder.save(state(4, 0.01)))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_saving_an_earlier_round_than_the_newest_is_refused(folder):
    folder.save(checkpoint_of(9))
    with pytest.raises(CheckpointError, match=r"round-000009 is from a later round than 5"):
        folder.save(checkpoint_of(5))
    assert listed(folder) == ["round-000009"]
    shutil.rmtree(folder.path / "round-000009")
    folder.save(checkpoint_of(5))
    assert listed(folder) == ["round-000005"]


def test_training_replaces_a_damaged_later_checkpoint(folder):
    for number in (1, 2, 5):
        saved = folder.save(checkpoint_of(number))
    (saved / "weights.safetensors").write_bytes(b"")
    folder.save(checkpoint_of(3))
    assert folder.newest(report=[].append).round == 3
    folder.save(checkpoint_of(5))
    assert folder.newest().round == 5
    assert [entry.complete for entry in folder.entries()] == [True] * 3


def test_reader_takes_a_newer_checkpoint_if_its_own_is_removed(folder, monkeypatch):
    folder.save(checkpoint_of(1))
    load = CheckpointFolder.load

    def overtaken(reader, name, **options):
        if name == "round-000001":
            folder.save(checkpoint_of(2))
            shutil.rmtree(folder.path / name)
        return load(reader, name, **options)

    monkeypatch.setattr(CheckpointFolder, "load", overtaken)
    assert CheckpointFolder(folder.path).newest().round == 2


# Damage


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A shorter form of the trial that breaks checkpoints."""
    report = tmp_path_factory.mktemp("run") / "found.json"
    counts = ["--kills", "3", "--flips", "10", "--cuts", "5"]
    completed = command("tests.trials.checkpoints", *counts, "--json", report)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(report.read_text())


def test_each_flipped_bit_is_named_and_the_previous_one_used(broken):
    assert broken["flips"].items() >= {"times": 10, "named": 10, "fell_back": 10}.items()


def test_each_truncation_is_named_and_the_previous_one_used(broken):
    assert broken["cuts"].items() >= {"times": 5, "named": 5, "fell_back": 5}.items()


def test_writer_killed_in_mid_write_leaves_a_complete_checkpoint(broken):
    assert broken["kills"].items() >= {"in_mid_write": 3, "wrong": []}.items()


def test_writer_killed_before_any_step_leaves_a_complete_checkpoint(broken):
    assert broken["every_step"]["steps"] > 50
    assert broken["every_step"]["wrong"] == []


@pytest.mark.parametrize("file", ["manifest.json", "weights.safetensors", "optimizer.safetensors"])
def test_a_missing_zeroed_or_longer_file_is_named(folder, file):
    saved = folder.save(state(1, 0.01))
    content = (saved / file).read_bytes()
    for data in (b"", b"\0" * len(content), content + b"\0", content[::-1]):
        (saved / file).write_bytes(data)
        with pytest.raises(CheckpointCorrupt) as caught:
            folder.load(saved)
        assert caught.value.file == str(saved / file)
        assert caught.value.expected
        assert caught.value.got
    (saved / file).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{file} is missing"):
        folder.load(saved)
    os.mkfifo(saved / file)  # opening a pipe to read it would block
    with pytest.raises(CheckpointCorrupt, match="expected a file, found something else"):
        folder.load(saved)


def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(folder, caplog):
    for number in (1, 2, 3):
        folder.save(state(number, 0.01))
    for number in (2, 3):
        file = folder.path / f"round-00000{number}" / "weights.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert folder.newest().round == 1
    assert [record.message.split("/")[-2] for record in caplog.records] == ["round-000003", "round-000002"]
    assert all(record.message.endswith("; round-000001 is used instead") for record in caplog.records)
    entries = folder.entries()
    assert [entry.complete for entry in entries] == [False, False, True]
    assert "weights.safetensors is damaged: expected SHA-256" in entries[0].problem


def test_a_folder_with_damaged_checkpoints_only_is_an_error_instead_of_a_new_run(folder):
    saved = folder.save(state(1, 0.01))
    (saved / "manifest.json").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint in .*; found 1 damaged, .*manifest.json is empty"
    ):
        folder.newest()


def test_a_file_that_the_manifest_does_not_name_is_named(folder):
    saved = folder.save(state(1, 0.01))
    (saved / ".DS_Store").touch()
    folder.load(saved)
    (saved / "extra.safetensors").touch()
    with pytest.raises(CheckpointCorrupt, match=r"extra.safetensors is damaged: expected no such file"):
        folder.load(saved)


def changed(saved, change):
    """Change the manifest and seal it again, as a person could do on purpose."""
    file = saved / "manifest.json"
    content = unseal(file.read_bytes(), file)
    change(content)
    file.write_bytes(seal(content))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.update(extra=1), r"expected the entries of format 2, found extra: Extra inputs"),
        (lambda m: m.pop("facts"), r"facts: Field required"),
        (lambda m: m.update(round="1"), r"round: Input should be a valid integer"),
        (lambda m: m.update(round=2), "expected round 2, as its manifest says, found round 1 in its name"),
        (lambda m: m["files"][0].update(name="../owner.json"), r"names a file outside the checkpoint: '../owner.json'"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), r"names a file outside the checkpoint: '/etc/passwd'"),
        (lambda m: m["files"][0].update(name="manifest.json"), "names a file outside"),
        (lambda m: m["files"].append(m["files"][0]), "expected every file once"),
        (lambda m: m["files"][0].update(bytes=-1), "weights.safetensors is damaged"),
        (lambda m: m["files"][0].update(bytes=10**30), "weights.safetensors is damaged"),
        (lambda m: m["files"][0]["arrays"].pop(), "expected 9 arrays named in the manifest"),
        (lambda m: m["files"][0]["arrays"].append("x"), "expected 11 arrays named in the manifest"),
    ],
)
def test_a_sealed_manifest_with_wrong_content_is_refused(folder, change, sentence):
    saved = folder.save(state(1, 0.01))
    changed(saved, change)
    with pytest.raises(CheckpointCorrupt, match=sentence):
        folder.load(saved)


def test_a_newer_format_is_refused_with_both_versions_and_not_skipped(folder):
    folder.save(state(1, 0.01))
    saved = folder.save(state(2, 0.01))
    changed(saved, lambda manifest: manifest.update(format=4, ddlf="2.1", something="new"))
    with pytest.raises(
        CheckpointError, match=f"was written by DDLF 2.1 in format 4, this is DDLF {__version__} with format 3"
    ):
        folder.newest()


def test_missing_checkpoint_is_an_error_and_a_renamed_one_is_not(folder):
    saved = folder.save(state(1, 0.01))
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/round-000002"):
        folder.load("round-000002")
    os.rename(saved, folder.path / "best")
    assert same(folder.load("best"), state(1, 0.01))


# Killed writers, full disks and missing rights


def test_files_are_synced_before_a_checkpoint_gets_its_name(folder, monkeypatch):
    folder.keep = 1
    folder.save(state(1, 0.01))
    operations = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree
    monkeypatch.setattr(
        os, "fsync", lambda fd: (operations.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)), fsync(fd))
    )
    monkeypatch.setattr(
        os, "rename", lambda old, new: (operations.append(("rename", Path(new).name)), rename(old, new))
    )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **_: (operations.append(("remove", path.name)), rmtree(path, **_))
    )
    folder.save(state(2, 0.01))
    steps = [
        (operation, name.split("-")[0]) if name.startswith(".") else (operation, name) for operation, name in operations
    ]
    assert steps == [
        ("sync", "weights.safetensors"),
        ("sync", "optimizer.safetensors"),
        ("sync", "ledger.safetensors"),
        ("sync", "manifest.json"),
        ("sync", ".writing"),
        ("rename", "round-000002"),
        ("sync", folder.path.name),
        ("rename", ".removing"),
        ("remove", ".removing"),
        ("remove", ".writing"),
    ]


FULL = """
import os, sys
from tests.trials.checkpoints import same, state
from ddlf.errors import CheckpointError
from ddlf.training.checkpoints import checkpoint
folder = checkpoint.CheckpointFolder(sys.argv[1] + "/run")
folder.open("the test")
folder.save(state(1, 0.3))
for free_bytes in (checkpoint.free_bytes, lambda path: None):  # the second time only the kernel knows
    checkpoint.free_bytes = free_bytes
    try:
        folder.save(state(2, 0.9))
    except CheckpointError as error:
        print(error.errno, error)
    assert sorted(os.listdir(folder.path)) == [".lock", "owner.json", "round-000001"], os.listdir(folder.path)
    assert same(folder.newest(), state(1, 0.3))
folder.save(state(2, 0.3))
print(folder.newest().round)
"""


def test_a_full_disk_is_reported_with_both_sizes_and_the_previous_checkpoint_stays(tmp_path):
    # The process mounts a real file system of 1 MB, which disappears when the process ends.
    script = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    completed = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert completed.returncode == 0, completed.stderr
    first, second, after = completed.stdout.splitlines()
    for line in (first, second):
        assert line.startswith(f"{errno.ENOSPC} no space: need 901 kB, free ")
        assert f" kB in {tmp_path}/run; free some" in line
        assert line.endswith("; earlier checkpoints are complete")
    assert after == "2"


LIMITED = """
import os, resource, sys
from tests.trials.checkpoints import same, state
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
folder.open("the test")
folder.save(state(1, 0.3))
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    folder.save(state(2, 0.9))
except OSError as error:
    print(error)
assert sorted(os.listdir(folder.path)) == [".lock", "owner.json", "round-000001"]
assert same(folder.newest(), state(1, 0.3))
"""


def test_a_limit_on_the_size_of_files_is_reported(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(
        f"no space: need 901 kB in {tmp_path}, more than a file may have here; see ulimit -f"
    )


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EIO])
def test_refusal_of_the_system_leaves_the_previous_checkpoint(folder, monkeypatch, number):
    folder.save(state(1, 0.01))

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    for step in ("sync", "write_new", "seal"):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, refuse)
            with pytest.raises(CheckpointError) as caught:
                folder.save(state(2, 0.01))
            assert caught.value.errno == number
        assert listed(folder) == ["round-000001"]
    folder.save(state(2, 0.01))
    assert folder.newest().round == 2


def test_saving_succeeds_if_an_old_checkpoint_cannot_be_removed(folder, monkeypatch, caplog):
    folder.keep = 1
    folder.save(state(1, 0.01))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_remove", lambda *_: (_ for _ in ()).throw(OSError(errno.EACCES, "no")))
        folder.save(state(2, 0.01))
    assert "cannot remove the old checkpoint" in caplog.text
    assert listed(folder) == ["round-000001", "round-000002"]
    folder.save(state(3, 0.01))
    assert listed(folder) == ["round-000003"]


def test_a_file_with_the_name_of_the_folder_is_reported(tmp_path):
    (tmp_path / "run").touch()
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(CheckpointError, match="is a file, not a folder; name a folder"):
            CheckpointFolder(path).open("the test")
        with pytest.raises(CheckpointError, match="is a file, not a folder; name a folder"):
            CheckpointFolder(path).newest()


def test_a_folder_without_write_permission_is_reported_when_it_is_opened(tmp_path):
    script = (
        "from ddlf.training.checkpoints.checkpoint import *; import sys; CheckpointFolder(sys.argv[1]).open('the test')"
    )
    mount = f"mount -t tmpfs none {tmp_path} && mount -o remount,ro {tmp_path}"
    completed = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec {sys.executable} -c "{script}" {tmp_path}'],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert f"{tmp_path}: Read-only file system; use another folder" in completed.stderr.splitlines()[-1]


# One writer


def test_writing_needs_an_open_folder_and_reading_does_not(folder):
    folder.save(state(1, 0.01))
    reader = CheckpointFolder(folder.path)
    assert same(reader.newest(), state(1, 0.01))
    assert reader.epoch == 0
    with pytest.raises(LeaseError, match="was not opened for writing"):
        reader.save(state(2, 0.01))


def test_master_that_lost_the_folder_writes_nothing(folder, monkeypatch):
    folder.save(state(1, 0.01))
    new = CheckpointFolder(folder.path)
    for step in ("free_bytes", "write_new", "seal"):
        folder.close()
        folder.open("the old master", takeover=True)
        original = getattr(module, step)

        def overtaken(*arguments, original=original):
            monkeypatch.undo()
            new.open("the new master", takeover=True)
            return original(*arguments)

        monkeypatch.setattr(module, step, overtaken)
        with pytest.raises(
            LeaseError, match=r"taken over by .* \(the new master\), epoch \d+ > \d+; nothing\ was written"
        ):
            folder.save(state(2, 0.01))
        assert listed(folder) == ["round-000001"]
    new.save(state(2, 0.01))


def test_reader_finds_a_checkpoint_while_a_writer_replaces_them(folder):
    folder.keep = 1
    folder.save(state(1, 0.01))
    stop, wrong = threading.Event(), []

    def read():
        reader, last_round = CheckpointFolder(folder.path), 0
        while not stop.is_set():
            checkpoint = reader.newest(report=wrong.append)
            if (
                checkpoint is None
                or checkpoint.round < last_round
                or not same(checkpoint, state(checkpoint.round, 0.01))
            ):
                wrong.append(checkpoint)
            last_round = checkpoint.round

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(2, 20):
            folder.save(state(number, 0.01))
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert wrong == []


def test_manifest_is_readable_json(folder):
    saved = folder.save(checkpoint_of(12, {"seed": 7}, kernel=np.ones(3, ml_dtypes.bfloat16)))
    content = json.loads((saved / "manifest.json").read_text())
    assert list(content) == ["format", "ddlf", "round", "epoch", "files", "records", "facts", "sha256"]
    assert content["files"][0] | {"sha256": "", "bytes": 0} == {
        "name": "weights.safetensors",
        "bytes": 0,
        "sha256": "",
        "arrays": ["kernel"],
    }
