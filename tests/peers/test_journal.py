"""Tests of the journal: a cut file gives a prefix, other damage is an error, and a full disk acknowledges no entry."""

import errno
import os

import pytest

from ddlf.errors import CheckpointCorrupt, CheckpointError
from ddlf.peers import journal as module
from ddlf.peers.entries import Began, Invited, Merged, Posted
from ddlf.peers.journal import history, open_journal

ENTRIES = [
    (Began(at=1.0, set=1, run="r"), b"first set"),
    (Invited(at=2.0, code="c", until=9.0), b""),
    (Posted(at=3.0, peer=1, number=1, set=2, contains=0, updates=5), b"second"),
    (Merged(at=4.0, set=3, of=(2,)), bytes(range(256))),
]


def begun(folder):
    folder.mkdir()
    journal, stored = open_journal(folder)
    assert stored.snapshot is None
    journal.begin_file({"a": 1}, {})
    return journal


def test_entries_and_sets_are_read_back(tmp_path):
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES[:3])
    journal.append(ENTRIES[3:])
    assert journal.syncs == 2
    journal.close()
    again, stored = open_journal(tmp_path / "a")
    assert stored.snapshot == {"a": 1}
    assert repr(stored.entries) == repr([entry for entry, _ in ENTRIES])
    assert [again.read(number) for number in (1, 2, 3)] == [b"first set", b"second", bytes(range(256))]
    again.close()


def test_a_journal_cut_at_any_byte_gives_a_prefix(tmp_path):
    journal = begun(tmp_path / "a")
    ends = []
    for entry in ENTRIES:
        journal.append([entry])
        ends.append(os.path.getsize(tmp_path / "a" / "journal-000001"))
    journal.close()
    data = (tmp_path / "a" / "journal-000001").read_bytes()
    (tmp_path / "b").mkdir()
    for cut in range(len(data) + 1):
        (tmp_path / "b" / "journal-000001").write_bytes(data[:cut])
        again, stored = open_journal(tmp_path / "b")
        assert len(stored.entries) == sum(end <= cut for end in ends)
        if stored.snapshot is not None:  # it can be continued
            again.append(ENTRIES[1:2])
            assert len(open_journal(tmp_path / "b")[1].entries) == len(stored.entries) + 1
        again.close()


def test_a_new_file_that_is_cut_leaves_the_old_one(tmp_path):
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES)
    before = (tmp_path / "a" / "journal-000001").read_bytes()
    journal.begin_file({"a": 2}, {1: b"first set", 3: bytes(range(256))})
    journal.close()
    new = (tmp_path / "a" / "journal-000002").read_bytes()
    for cut in range(len(new)):
        (tmp_path / "a" / "journal-000001").write_bytes(before)
        (tmp_path / "a" / "journal-000002").write_bytes(new[:cut])
        again, stored = open_journal(tmp_path / "a")
        assert (stored.snapshot, len(stored.entries)) == ({"a": 1}, 4)
        again.close()


@pytest.mark.parametrize("at", [0, 9, 40, -1])
def test_damage_in_an_older_file_is_an_error(tmp_path, at):
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES)
    journal.begin_file({"a": 2}, {3: bytes(range(256))})
    journal.close()
    path = tmp_path / "a" / "journal-000001"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="journal-000001 is damaged"):
        open_journal(tmp_path / "a")


@pytest.mark.parametrize("record", range(4), ids=["snapshot", "first", "second", "third"])
def test_damage_before_later_entries_is_an_error_and_removes_nothing(tmp_path, record):
    """The later entries were written after those before them were on the disk, so no power cut has left this damage."""
    journal = begun(tmp_path / "a")
    path = tmp_path / "a" / "journal-000001"
    begins = [0]
    for entry in ENTRIES:
        begins.append(os.path.getsize(path))
        journal.append([entry])
    journal.close()
    for place in (0, 9, 30):
        data = bytearray(path.read_bytes())
        data[begins[record] + place] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match=f"journal-000001 is damaged.* at byte {begins[record]:,}"):
            open_journal(tmp_path / "a")
        assert path.read_bytes() == data
        data[begins[record] + place] ^= 1
        path.write_bytes(data)


def test_entries_that_a_power_cut_has_torn_are_removed_together(tmp_path):
    """Entries that are written at once share one sync. The disk may have any parts of them."""
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES[:1])
    path = tmp_path / "a" / "journal-000001"
    size = os.path.getsize(path)
    journal.append(ENTRIES[1:])
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[: size + 8] + bytes(40) + data[size + 48 :])
    again, stored = open_journal(tmp_path / "a")
    again.close()
    assert repr(stored.entries) == repr([ENTRIES[0][0]])
    assert os.path.getsize(path) == size


def test_files_without_a_needed_set_become_history(tmp_path):
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES)
    journal.begin_file({"a": 2}, {})
    journal.archive()
    journal.append(ENTRIES[1:2])
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["history-000001.jsonl", "journal-000002"]
    assert repr(list(history(tmp_path / "a"))) == repr([entry for entry, _ in [*ENTRIES, ENTRIES[1]]])
    journal.close()


def test_needed_sets_are_copied_when_old_files_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_FILE_BYTES", 100)
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES[:1])
    needed = {1: b"first set"}
    for number in range(2, 40):
        journal.append([(Posted(at=3.0, peer=1, number=number, set=number, contains=0, updates=5), bytes(100))])
        if number % 10 == 0:
            journal.begin_file({"a": number}, needed)
            journal.archive()
    files = [path.name for path in (tmp_path / "a").glob("journal-*")]
    assert len(files) <= 2
    assert journal.read(1) == b"first set"
    journal.close()
    again, _ = open_journal(tmp_path / "a")
    assert again.read(1) == b"first set"
    again.close()


def test_a_full_disk_acknowledges_nothing(tmp_path, monkeypatch):
    journal = begun(tmp_path / "a")
    journal.append(ENTRIES[:1])
    size = os.path.getsize(tmp_path / "a" / "journal-000001")
    write = os.pwritev

    def little(descriptor, parts, at):
        return write(descriptor, [parts[0][:10]], at)

    def full(descriptor, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", little)
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match="no space"):
            journal.append(ENTRIES[2:])
    assert os.path.getsize(tmp_path / "a" / "journal-000001") == size
    journal.append(ENTRIES[2:])
    journal.close()
    assert len(open_journal(tmp_path / "a")[1].entries) == 3


def test_a_disk_that_takes_few_bytes_at_once_gets_all_of_them(tmp_path, monkeypatch):
    journal = begun(tmp_path / "a")
    write = os.pwrite

    def few(descriptor, data, at):
        return write(descriptor, data[:7], at)

    monkeypatch.setattr(module, "MOST_PARTS", 3)
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: few(descriptor, b"".join(parts), at))
    monkeypatch.setattr(os, "pwrite", few)
    journal.append(ENTRIES)
    journal.close()
    _, stored = open_journal(tmp_path / "a")
    assert repr(stored.entries) == repr([entry for entry, _ in ENTRIES])
