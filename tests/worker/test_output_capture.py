"""Tests of sending the output of user code from Python's streams through a pipe to the worker's master."""

import asyncio
import io
import os
import socket
import sys
from contextlib import asynccontextmanager

import pytest

from ddlf.worker import forwarding as forwarding_module
from ddlf.worker import output_capture
from ddlf.worker.activity import Activity
from ddlf.worker.events import Wrote
from ddlf.worker.forwarding import Forwarding
from ddlf.worker.output_capture import LINES, NOTHING, Written, append_to_line, shown_line
from tests.patience import PATIENCE_S


class Master:
    """A master that records the lines and the numbers of dropped lines that it receives."""

    def __init__(self):
        self.queued_bytes = 0
        self.lines, self.dropped, self.counts = [], 0, []
        self.news = asyncio.Event()

    def report(self, event):
        assert type(event) is Wrote
        self.counts.append((len(event.texts), event.dropped))
        self.lines += zip(event.streams, event.texts, strict=True)
        self.dropped += event.dropped
        self.news.set()


@asynccontextmanager
async def both_ends(monkeypatch, copy):
    """Yield the executor's end, the daemon's end and a master; the executor writes to the streams of this process."""
    for name in ("stdout", "stderr"):  # the executor replaces these streams; pytest's return after the test
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace"))
    page = Activity.create()
    executor_end, daemon_end = socket.socketpair()
    with executor_end, daemon_end:
        sender = Written(Activity(page), executor_end, copy.fileno())
        data, (pipe,), _, _ = socket.recv_fds(daemon_end, 64, 1)
    assert data == LINES
    forwarding, master = Forwarding(Activity(page)), Master()
    forwarding.master = lambda: master
    forwarding.listen(pipe)
    try:
        yield sender, forwarding, master
    finally:
        forwarding.end()
        os.close(sender._pipe)
        os.close(page)


@pytest.fixture
def copy(tmp_path):
    """Yield the log file, which receives a copy of the output."""
    with open(tmp_path / "log", "w+b") as file:
        yield file


def content(file):
    return os.pread(file.fileno(), 10**8, 0)


async def test_lines_arrive_with_their_stream_and_are_written_to_the_log(monkeypatch, copy):
    async with both_ends(monkeypatch, copy) as (sender, forwarding, master):
        print("first", 1)
        print("to stderr", file=sys.stderr)
        print("two\nlines é 漢 \U0001f600")
        sys.stdout.buffer.write(b"no text: \xff\x00\n")
        print("without an end", end="")
        sender.end_line()
        forwarding.flush()
        assert master.lines == [
            (1, "first 1"), (2, "to stderr"), (1, "two"), (1, "lines é 漢 \U0001f600"), (1, "no text: \\xff\x00"), (1, "without an end"),
        ]  # fmt: skip
        assert master.dropped == 0
        expected = "first 1\ntwo\nlines é 漢 \U0001f600\n".encode() + b"no text: \xff\x00\nwithout an end"
        assert content(copy) == expected
        assert (sys.stdout.fileno(), sys.stdout.isatty(), sys.stdout.name) == (1, False, "<stdout>")


async def test_lines_of_several_threads_arrive_whole_without_a_flush(monkeypatch, copy):
    def write(number):
        for line in range(20):
            sys.stdout.write(f"thread {number} line {line}\n")

    async with both_ends(monkeypatch, copy) as (_, _, master):
        await asyncio.gather(*(asyncio.to_thread(write, number) for number in range(4)))
        async with asyncio.timeout(PATIENCE_S):
            while len(master.lines) < 80:
                master.news.clear()
                await master.news.wait()
    assert sorted(master.lines) == sorted((1, f"thread {n} line {line}") for n in range(4) for line in range(20))


async def test_too_many_lines_are_partly_sent_and_the_dropped_ones_counted(monkeypatch, copy):
    async with both_ends(monkeypatch, copy) as (_, forwarding, master):
        for number in range(30_000):
            print("line", number)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        forwarding.flush()
        assert len(master.lines) + master.dropped == 30_000
        assert master.lines[: output_capture.LINES_AT_ONCE] == [
            (1, f"line {n}") for n in range(output_capture.LINES_AT_ONCE)
        ]
        assert content(copy).count(b"\n") == 30_000
        before = len(master.lines)
        print("and", "three\nmore\nlines")
        forwarding.flush()
        assert len(master.lines) - before + master.dropped + before == 30_003


async def test_a_slow_daemon_loses_lines_and_counts_them(monkeypatch, copy):
    monkeypatch.setattr(output_capture, "LINES_AT_ONCE", 10**6)
    monkeypatch.setattr(output_capture, "BYTES_AT_ONCE", 10**9)
    async with both_ends(monkeypatch, copy) as (sender, forwarding, master):
        sender._lines, sender._bytes = 10.0**6, 10.0**9
        for number in range(2_000):
            print(f"{number:>2000}")
        forwarding.flush()
        assert len(master.lines) + master.dropped == 2_000
        assert master.dropped > 1_000


async def test_lines_wait_for_the_same_master_up_to_a_limit(monkeypatch, copy):
    monkeypatch.setattr(forwarding_module, "MAX_WAITING_LINES", 10)
    async with both_ends(monkeypatch, copy) as (_, forwarding, master):
        forwarding.master = lambda: None
        for number in range(15):
            print(number)
        forwarding.flush()
        forwarding.master = lambda: master
        master.queued_bytes = forwarding_module.MAX_QUEUED_BYTES
        forwarding.flush()
        assert master.counts == []
        master.queued_bytes = 0
        forwarding.flush()
        assert master.lines == [(1, str(number)) for number in range(10)]
        assert master.dropped == 5


async def test_lines_written_before_are_not_sent_to_another_master(monkeypatch, copy):
    async with both_ends(monkeypatch, copy) as (_, forwarding, master):
        for number in range(3_000):
            print(number)
        forwarding.forget()
        print("for the next one")
        forwarding.flush()
        assert len(master.lines) + master.dropped == 1


async def test_lines_of_forked_children_arrive_and_are_counted(monkeypatch, copy):
    async with both_ends(monkeypatch, copy) as (_, forwarding, master):
        print("mine")
        children = []
        for number in range(2):
            if not (pid := os.fork()):
                for line in range(3_000):
                    print("child", number, line)
                os._exit(0)
            children.append(pid)
        for pid in children:
            await asyncio.to_thread(os.waitpid, pid, 0)
        forwarding.flush()
        assert len(master.lines) + master.dropped == 6_001
        assert {"mine", "child 0 0", "child 1 0"} <= {line for _, line in master.lines}
        assert content(copy).count(b"\n") == 6_001


async def test_lines_written_during_a_flush_are_sent_too(monkeypatch, copy):
    class Ending:
        def __del__(self):
            print("the end of an object")

    async with both_ends(monkeypatch, copy) as (sender, forwarding, master):
        take, ending = sender._send, [Ending()]

        def interrupted(*args):
            ending.clear()
            take(*args)

        sender._send = interrupted
        print("around it", file=sys.stderr)
        forwarding.flush()
    assert sorted(master.lines) == [(1, "the end of an object"), (2, "around it")]


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ([b"plain"], b"plain"),
        ([b"a", b"b"], b"ab"),
        ([b"windows\r"], b"windows"),
        ([b"10%\r20%\r", b"30%"], b"30%"),
        ([b"10%\r", b"20%\r"], b"20%"),
        ([b"\r"], b""),
        ([b"x" * 5000, b"y" * 5000], b"x" * 3072 + b" [cut, 6928 more bytes]"),
        ([b"x" * 5000, b"\rnew"], b"new"),
        ([b"x" + "é".encode() * 2000], b"x" + "é".encode() * 1535 + b" [cut, 929 more bytes]"),
        ([b"\xff" * 4000], b"\xff" * 3072 + b" [cut, 928 more bytes]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_has_the_text_that_a_terminal_shows_and_a_long_one_is_cut(pieces, line):
    incomplete = NOTHING
    for piece in pieces:
        incomplete = append_to_line(incomplete, piece)
    assert shown_line(*incomplete) == line
