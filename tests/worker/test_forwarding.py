"""Tests of forwarding log lines of native code and of the daemon to the master."""

import pytest

from ddlf.worker import file_tail
from ddlf.worker.activity import Activity
from ddlf.worker.events import Logged
from ddlf.worker.file_tail import GrowingFile
from ddlf.worker.forwarding import Forwarding


class Master:
    """A master that records the events that it receives."""

    queued_bytes = 0

    def __init__(self):
        self.events = []

    def report(self, event):
        self.events.append(event)


@pytest.fixture
def log(tmp_path):
    """The file that native code writes."""
    with open(tmp_path / "executor.log", "w+b", buffering=0) as file:
        yield file


@pytest.fixture
def growing_file(log):
    file = GrowingFile(log)
    yield file
    file.close()


def test_each_line_is_read_once_and_an_unfinished_one_only_at_the_end(log, growing_file):
    log.write(b"one\ntw")
    assert growing_file.new_lines() == (["one"], 0)
    assert growing_file.new_lines() == ([], 0)
    log.write(b"o\n 10%\r 20%\nno text: \xff")
    assert growing_file.new_lines() == (["two", " 20%"], 0)
    assert growing_file.new_lines(to_its_end=True) == (["no text: \\xff"], 0)
    assert growing_file.new_lines(to_its_end=True) == ([], 0)


def test_reading_too_many_lines_returns_the_newest_and_counts_the_other_bytes(log, growing_file, monkeypatch):
    monkeypatch.setattr(file_tail, "READ_BYTES", 25)
    lines = [f"line {number}" for number in range(10)]  # each has 7 bytes, including the end of the line
    log.write("".join(f"{line}\n" for line in lines).encode())
    assert growing_file.new_lines() == (lines[-3:], 49)
    log.write(b"more\n")
    assert growing_file.new_lines() == (["more"], 0)


def test_long_line_is_cut(log, growing_file):
    log.write(b"x" * 4000 + b"\n")
    assert growing_file.new_lines() == (["x" * 3072 + " [cut, 928 more bytes]"], 0)


async def test_lines_wait_for_a_master_and_are_dropped_before_the_next_one(log):
    forwarding, master = Forwarding(Activity(Activity.create())), Master()
    forwarding.watch(log)
    log.write(b"native\n")
    forwarding.look_at_native()
    forwarding.log("of the daemon")
    forwarding.master = lambda: master
    forwarding.look_at_native()
    assert master.events == [Logged(lines=["of the daemon", "native"])]
    forwarding.master = lambda: None
    log.write(b"for the first one\n")
    forwarding.log("for it, too")
    forwarding.forget()
    forwarding.master = lambda: master
    log.write(b"an unfinished line")
    forwarding.end()
    assert master.events[1:] == [Logged(lines=["an unfinished line"])]


async def test_tokens_are_hidden_in_lines(log):
    forwarding, master = Forwarding(Activity(Activity.create()), [b"s3cret", b"other"]), Master()
    forwarding.master = lambda: master
    forwarding.watch(log)
    log.write(b"joins with s3cret or other\n")
    forwarding.log("s3crets3cret")
    forwarding.end()
    lines = [line for event in master.events for line in event.lines]
    assert sorted(lines) == ["******", "joins with *** or ***"]
