"""Tests of the single writer of a folder: only a takeover replaces a living writer, and a replaced writer writes nothing."""

import os
import subprocess
import sys
import threading

import pytest

from ddlf.errors import CheckpointCorrupt, LeaseError
from ddlf.training.checkpoints import ownership
from ddlf.training.checkpoints.durable import replace, seal
from ddlf.training.checkpoints.ownership import Owner, Ownership, boot, started, this_host
from tests.patience import PATIENCE_S


def put_owner(folder, **changes):
    """Write the ``owner.json`` of this process, with some fields changed."""
    owner = Owner(
        session="s",
        epoch=4,
        holder="job",
        host=this_host(),
        pid=os.getpid(),
        started=started(os.getpid()),
        boot=boot(),
    ).model_copy(update=changes)
    replace(folder / "owner.json", seal(owner.model_dump()))


@pytest.fixture
def ended():
    """A process that has ended, but that its parent has not waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process
    process.wait()


def test_a_living_writer_is_named_and_not_replaced(tmp_path):
    Ownership(tmp_path).claim("ddlf run app.py")
    with pytest.raises(
        LeaseError, match=rf"in use by pid {os.getpid()} on {this_host()} \(ddlf run app.py\); end that"
    ):
        Ownership(tmp_path).claim("another")


def test_takeover_stops_a_living_writer(tmp_path):
    old, new = Ownership(tmp_path), Ownership(tmp_path)
    old.claim("old")
    new.claim("new", takeover=True)
    with pytest.raises(LeaseError, match=r"taken over by pid \d+ on .* \(new\), epoch 2 > 1; nothing\ was written"):
        old.check()
    with pytest.raises(LeaseError, match="taken over"), old.exclusive():
        pytest.fail("the lock was given to a writer that lost the folder")
    old.release()  # leaves the folder with its new writer
    new.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"closed": True},
        {"closed": True, "host": "pc7"},
        {"started": 1},
        {"boot": "before the last start of this machine"},
        {"pid": 2**22 + 1},
    ],
    ids=["closed", "closed elsewhere", "its number is another process's now", "machine restarted", "gone"],
)
def test_dead_writer_is_replaced(tmp_path, changes):
    put_owner(tmp_path, **changes)
    assert Ownership(tmp_path).claim("new").epoch == 5


def test_a_process_that_ended_but_was_not_waited_for_is_replaced(tmp_path, ended):
    put_owner(tmp_path, pid=ended.pid, started=started(ended.pid))
    assert Ownership(tmp_path).claim("new").epoch == 5


def test_a_writer_on_another_machine_is_only_replaced_by_takeover(tmp_path):
    put_owner(tmp_path, host="pc7", pid=41)
    with pytest.raises(LeaseError, match=rf"in use by pid 41 on pc7 \(job\), as far as can be seen from {this_host()}"):
        Ownership(tmp_path).claim("new")
    assert Ownership(tmp_path).claim("new", takeover=True).epoch == 5


def test_the_epoch_grows_with_each_claim(tmp_path):
    epochs = []
    for _ in range(3):
        ownership = Ownership(tmp_path)
        epochs.append(ownership.claim("one after the other").epoch)
        ownership.release()
    (tmp_path / "owner.json").unlink()
    epochs.append(Ownership(tmp_path).claim("after the file was lost", epoch_above=lambda: 3).epoch)
    assert epochs == [1, 2, 3, 4]


@pytest.mark.parametrize("data", [b"", b"{}", seal({"epoch": "4"}), seal({"x": 1})])
def test_a_damaged_owner_file_is_only_replaced_by_takeover(tmp_path, data):
    (tmp_path / "owner.json").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"owner.json.*take it over with --takeover"):
        Ownership(tmp_path).claim("new")
    assert Ownership(tmp_path).claim("new", takeover=True, epoch_above=lambda: 7).epoch == 8


def test_a_writer_without_a_claim_or_after_its_release_cannot_write(tmp_path):
    ownership = Ownership(tmp_path)
    with pytest.raises(LeaseError, match="was not opened for writing"):
        ownership.check()
    ownership.claim("me")
    ownership.release()
    with pytest.raises(LeaseError, match="was not opened for writing"):
        ownership.check()
    ownership.release()


def test_a_writer_whose_claim_was_deleted_stops(tmp_path):
    ownership = Ownership(tmp_path)
    ownership.claim("me")
    (tmp_path / "owner.json").unlink()
    with pytest.raises(LeaseError, match=r"owner.json was removed"):
        ownership.check()


def test_a_writer_waits_a_limited_time_for_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "LOCK_WAIT_S", 0.1)
    stopped = Ownership(tmp_path)
    stopped.claim("stopped while it held the lock")
    with stopped.exclusive(), pytest.raises(LeaseError, match=r"has been locked for 0.1 s by pid .* \(stopped while"):
        Ownership(tmp_path).claim("new", takeover=True)


def test_one_of_many_simultaneous_claims_gets_the_folder(tmp_path):
    begin, winners = threading.Barrier(8), []

    def claim():
        begin.wait(PATIENCE_S)
        try:
            winners.append(Ownership(tmp_path).claim("one of many").epoch)
        except LeaseError:
            winners.append(None)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(winners, key=str) == [1, *[None] * 7]
