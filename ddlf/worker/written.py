"""What user code writes, on its way to the master. Runs in both processes of a worker.

Everything goes where it always went, the worker's terminal or its log file. Each line goes into a pipe to the daemon as well, as long as the worker
writes no more than is good for anybody; beyond that it is only counted, in the page of memory that both share. The executor never waits for anybody.
The daemon tells the master that has the worker, and how many lines are missing; what a process wrote before it was killed is still in the pipe.

Only Python's own streams are followed, also those of children that were forked: what native code and other programs write to the descriptors, as
TensorFlow does, stays on the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from ddlf.worker.activity import Activity

LINES = b"LINES"
"""Comes to the daemon with the pipe."""
STREAMS = {1: "stdout", 2: "stderr"}
LINES_AT_ONCE, LINES_PER_S = 1_000, 200
BYTES_AT_ONCE, BYTES_PER_S = 1024**2, 256 * 1024
"""So much of what one worker writes is sent: at once after a silence, and for long."""
PAUSE_S = 1.0
"""For how long nothing is sent when that is used up: so whole passages come, not each hundredth line."""
MAX_LINE_BYTES = 3 * 1024
"""Of a line, more is cut: a record with it is written to a pipe in one piece (``PIPE_BUF``)."""
MAX_COPY_BYTES = 64 * 1024**2
"""Of the standard output of a worker without a terminal, in its log file."""
PIPE_BYTES = 1024**2
F_SETPIPE_SZ = 1031
FLUSH_S, LOOK_S = 0.1, 0.5
"""How long lines are collected before they are sent, and how often it is looked for lines that were only counted."""
LOOKS = 4
"""So many looks without news end the looking: longer than a pause."""
MAX_WAITING_LINES = 5_000
"""Lines that wait for a master that does not take them, or is to come back; more are counted."""
MAX_EVENT_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 256 * 1024
"""What a master has not taken of events; above it none are sent."""

NOTHING = b"", 0


class Written:
    """The executor's end.

    Args:
        activity: The page.
        channel: To the daemon, which gets the other end.
        stdout: Descriptor that standard output goes to as well: 1, or 2 for the log file.

    Attributes:
        counted: How many lines there were in this process, in the page.
        lock: Held by who changes that.
        pause_until: When lines are sent again, by the monotonic clock; meanwhile they are counted.
    """

    def __init__(self, activity: Activity, channel: socket.socket, stdout: int) -> None:
        read_end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):  # not Linux, or the user has many large ones
            fcntl.fcntl(self._pipe, F_SETPIPE_SZ, PIPE_BYTES)
        socket.send_fds(channel, [LINES], [read_end])
        os.close(read_end)
        self._activity = activity
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        self._streams: dict[int, TextIO] = {}
        for number, name in STREAMS.items():
            before = getattr(sys, name)
            raw = io.BufferedWriter(Raw(number, stdout if number == 1 else 2, self))
            stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, line_buffering=True)
            self._streams[number] = stream
            setattr(sys, name, stream)

    def _begin(self) -> None:
        """Begin with nothing written, in this process or in a child of it, which writes into the same pipe and counts for itself."""
        self.counted = self._activity.counted()
        self.lock = threading.RLock()  # an object's end may write while this thread is in here
        self.pause_until = 0.0
        self._rest = dict.fromkeys(STREAMS, NOTHING)  # since the end of the last line
        self._lines, self._bytes = float(LINES_AT_ONCE), float(BYTES_AT_ONCE)
        self._at = time.monotonic()

    def take(self, stream: int, data: bytes) -> None:
        """Send the lines that are whole, as far as that may be, and count all of them. Any thread may."""
        with self.lock:
            whole = data.count(b"\n")
            if whole:
                if (now := time.monotonic()) >= self.pause_until:
                    self._send(stream, data, now)
                self._rest[stream] = NOTHING
                data = data[data.rfind(b"\n") + 1 :]
            if data:
                self._rest[stream] = joined(self._rest[stream], data)
            self.counted[0] += whole  # not before they are in the pipe: what is counted and not there was dropped

    def end_line(self) -> None:
        """Take what has no end yet for a line: the method that wrote it is over."""
        for number, stream in self._streams.items():
            with contextlib.suppress(Exception):  # the terminal is gone, or the user has closed it
                stream.flush()
            if self._rest[number] is not NOTHING:
                self.take(number, b"\n")

    def _send(self, stream: int, data: bytes, now: float) -> None:
        lines = data.split(b"\n")[:-1]
        first = joined(self._rest[stream], lines[0])
        for line in (first, *(joined(NOTHING, line) for line in lines[1:])):
            text = shown(*line)
            self._lines = min(LINES_AT_ONCE, self._lines + (now - self._at) * LINES_PER_S) - 1
            self._bytes = min(BYTES_AT_ONCE, self._bytes + (now - self._at) * BYTES_PER_S) - len(text)
            self._at = now
            if self._lines < 0 or self._bytes < 0:
                self.pause_until = now + PAUSE_S
                return
            with contextlib.suppress(OSError):  # the daemon is late, or gone
                os.write(self._pipe, b"%d%b\n" % (stream, text))


class Raw(io.RawIOBase):
    """A standard stream below its buffer.

    Args:
        stream: Descriptor, and its number.
        copy: Descriptor of where all of it goes.
        written: Follows it.
    """

    def __init__(self, stream: int, copy: int, written: Written) -> None:
        self.name = f"<{STREAMS[stream]}>"
        self._stream = stream
        self._copy = copy
        self._room = sys.maxsize if copy == stream else MAX_COPY_BYTES
        self._written = written
        self._has_rest = False

    def write(self, data: Any) -> int:
        """Write as much as can be written now; returns how much."""
        count = os.write(self._copy, data) if self._room > 0 else len(data)
        self._room -= count
        data = bytes(data) if count == len(data) else bytes(data[:count])
        written, ends = self._written, data.endswith(b"\n")
        if ends and not self._has_rest and time.monotonic() < written.pause_until:  # of a million lines most
            with written.lock:
                written.counted[0] += data.count(b"\n")
            return count
        self._has_rest = not ends
        written.take(self._stream, data)
        return count

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream

    def isatty(self) -> bool:
        return os.isatty(self._copy)


def joined(rest: tuple[bytes, int], data: bytes) -> tuple[bytes, int]:
    """A line that goes on: what is kept of it, and how many bytes are not. After a carriage return it begins anew, as on a terminal."""
    kept, more = rest
    kept += data
    if b"\r" in kept:
        begin = kept.rstrip(b"\r").rfind(b"\r") + 1
        kept, more = (kept[begin:], 0) if begin else (kept, more)
    return kept[:MAX_LINE_BYTES], more + max(0, len(kept) - MAX_LINE_BYTES)


def shown(kept: bytes, more: int) -> bytes:
    """A line as it is sent."""
    if not more:
        return kept.rstrip(b"\r")
    whole = kept.decode("utf-8", "ignore").encode() if _is_text(kept) else kept  # without the half of a character
    return b"%b [cut, %d more bytes]" % (whole, more)


def _is_text(data: bytes) -> bool:
    """Whether it is UTF-8 but for a character at its end that is not whole."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


class Master(Protocol):
    """Who is told."""

    @property
    def queued_bytes(self) -> int:
        """What waits to be sent to it."""

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Tell it."""


class Forwarding:
    """The daemon's end.

    Args:
        activity: The page.

    Attributes:
        master: Returns who has the worker; None while nobody does, which is waited for.
    """

    def __init__(self, activity: Activity) -> None:
        self.master: Callable[[], Master | None] = lambda: None
        self._activity = activity
        self._pipe: int | None = None
        self._rest = b""
        self._received = 0  # of this executor
        self._noted = 0  # lines of it that are known to be missing
        self._missing = 0  # of them, what nobody was told of yet
        self._waiting: deque[tuple[int, str]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0

    def listen(self, pipe: int) -> None:
        """Take the lines of a new executor."""
        os.set_blocking(pipe, False)
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._readable)

    def end(self) -> None:
        """The executor has ended: send what it has left."""
        self.flush()
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
        if self._timer is not None:
            self._timer.cancel()
        self._pipe, self._rest, self._received, self._noted, self._timer = None, b"", 0, 0, None

    def forget(self) -> None:
        """What was written so far is not for the next master."""
        self._look()
        self._waiting.clear()
        self._missing = 0

    def flush(self) -> None:
        """Send all that was written so far, and how much is missing."""
        self._read()
        self._send()
        self._look()
        self._send()

    def _readable(self) -> None:
        if not self._read() and self._pipe is not None:  # its end; who ends the executor closes it
            asyncio.get_running_loop().remove_reader(self._pipe)
        self.wake()

    def wake(self) -> None:
        """Send soon what there is."""
        self._looks = 0
        self._arm(FLUSH_S)

    def _read(self) -> bool:
        """Take what is in the pipe; whether more can come."""
        while self._pipe is not None:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._received += len(lines)
            room = MAX_WAITING_LINES - len(self._waiting)
            self._missing += max(0, len(lines) - room)
            self._waiting.extend((line[0] - 48, line[1:].decode(errors="backslashreplace")) for line in lines[:room])
        return False

    def _look(self) -> int:
        """Take what is there, and find out what is not: returns how many more lines are missing."""
        counted = self._activity.written  # first: what is counted is in the pipe, or nowhere
        self._read()
        missing = max(0, counted - self._received - self._noted)
        self._noted += missing
        self._missing += missing
        return missing

    def _arm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._waiting or self._looks:  # what is missing is told with the next lines, or when no more of it comes
            self._send()  # before it is looked for what is missing after these lines
        self._looks = 0 if self._look() else self._looks + 1
        is_held_up = bool(self._waiting) and self.master() is not None
        if is_held_up or self._looks < LOOKS:
            self._arm(FLUSH_S if is_held_up else LOOK_S)

    def _send(self) -> None:
        """Tell the master, if there is one that takes it, of the lines that wait, and how many are missing before them."""
        while (self._waiting or self._missing) and (master := self.master()) and master.queued_bytes < MAX_QUEUED_BYTES:
            lines, length = [], 0
            while self._waiting and length < MAX_EVENT_BYTES:
                stream, text = self._waiting.popleft()
                lines.append([stream, text])
                length += len(text)
            missing, self._missing = self._missing, 0
            master.event("wrote", {"lines": lines, "dropped": missing})
