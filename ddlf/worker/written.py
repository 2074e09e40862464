"""Forwards the output of user code to the master. Runs in both processes of a worker.

All output still goes to the worker's terminal or its log file. Each line also goes into a pipe to the daemon, up to a
limited rate. Lines beyond the limit are only counted, in the page of memory that both processes share. The executor
never waits. The daemon sends the lines, and the number of missing lines, to the master that has the worker. Lines that
a process wrote before it was killed are still in the pipe.

Only Python's own streams are forwarded, including the streams of forked children. Native code and other programs, such
as TensorFlow, write directly to the descriptors, and their output stays on the worker.
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
"""The message to the daemon that accompanies the pipe."""
STREAMS = {1: "stdout", 2: "stderr"}
LINES_AT_ONCE, LINES_PER_S = 1_000, 200
BYTES_AT_ONCE, BYTES_PER_S = 1024**2, 256 * 1024
"""Maximum lines and bytes that a worker sends: at once after a silence, and per second over a longer time."""
PAUSE_S = 1.0
"""Seconds without sending after the limit is reached. The master thus receives whole passages instead of every
hundredth line.
"""
MAX_LINE_BYTES = 3 * 1024
"""Maximum bytes of a line; the rest is cut off. A record of this size is written to a pipe in one piece
(``PIPE_BUF``)."""
MAX_COPY_BYTES = 64 * 1024**2
"""Maximum bytes of standard output in the log file of a worker without a terminal."""
PIPE_BYTES = 1024**2
F_SETPIPE_SZ = 1031
FLUSH_S, LOOK_S = 0.1, 0.5
"""Seconds to collect lines before they are sent, and seconds between two checks for lines that were only counted.
"""
LOOKS = 4
"""After this number of checks without new lines, the checks stop. Together they last longer than ``PAUSE_S``."""
MAX_WAITING_LINES = 5_000
"""Maximum number of lines that wait for a slow or a disconnected master. Further lines are only counted.
"""
MAX_EVENT_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 256 * 1024
"""Maximum bytes of events that a master has not read. Above this limit, no events are sent."""

NOTHING = b"", 0


class Written:
    """The executor's end of the pipe: takes the lines that user code writes.

    Args:
        activity: The page.
        channel: Channel to the daemon, which receives the other end of the pipe.
        stdout: Descriptor that also receives standard output: 1, or 2 for the log file.

    Attributes:
        counted: Number of lines of this process, in the page.
        lock: Protects ``counted`` and the pipe.
        pause_until: Time on the monotonic clock until which lines are only counted.
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
        """Start without any output, in this process or in a child of it. A child writes into the same pipe and has its
        own counter.
        """
        self.counted = self._activity.counted()
        self.lock = threading.RLock()  # an object's finalizer may write while this thread is in here
        self.pause_until = 0.0
        self._rest = dict.fromkeys(STREAMS, NOTHING)  # the text since the end of the last line
        self._lines, self._bytes = float(LINES_AT_ONCE), float(BYTES_AT_ONCE)
        self._at = time.monotonic()

    def take(self, stream: int, data: bytes) -> None:
        """Send the whole lines as far as the limit allows, and count all of them. Any thread may call this."""
        with self.lock:
            whole = data.count(b"\n")
            if whole:
                if (now := time.monotonic()) >= self.pause_until:
                    self._send(stream, data, now)
                self._rest[stream] = NOTHING
                data = data[data.rfind(b"\n") + 1 :]
            if data:
                self._rest[stream] = joined(self._rest[stream], data)
            # Count the lines only after they are in the pipe: a counted line that is not in the pipe was dropped.
            self.counted[0] += whole

    def end_line(self) -> None:
        """End an unfinished line, because the method that wrote it is over."""
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
            with contextlib.suppress(OSError):  # the daemon is slow, or has ended
                os.write(self._pipe, b"%d%b\n" % (stream, text))


class Raw(io.RawIOBase):
    """The unbuffered end of ``sys.stdout`` or ``sys.stderr`` in the executor, which forwards all lines.

    Args:
        stream: Descriptor, and number of the stream.
        copy: Descriptor that receives all output.
        written: Forwards the output.
    """

    def __init__(self, stream: int, copy: int, written: Written) -> None:
        self.name = f"<{STREAMS[stream]}>"
        self._stream = stream
        self._copy = copy
        self._room = sys.maxsize if copy == stream else MAX_COPY_BYTES
        self._written = written
        self._has_rest = False

    def write(self, data: Any) -> int:
        """Write as much as possible now, and return the number of bytes."""
        count = os.write(self._copy, data) if self._room > 0 else len(data)
        self._room -= count
        data = bytes(data) if count == len(data) else bytes(data[:count])
        written, ends = self._written, data.endswith(b"\n")
        if ends and not self._has_rest and time.monotonic() < written.pause_until:  # most lines, if there are a million
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
    """Append ``data`` to an unfinished line, whose length is limited. Return the kept bytes, and the number of bytes
    that were cut off.

    A carriage return restarts the line, like on a terminal.
    """
    kept, more = rest
    kept += data
    if b"\r" in kept:
        begin = kept.rstrip(b"\r").rfind(b"\r") + 1
        kept, more = (kept[begin:], 0) if begin else (kept, more)
    return kept[:MAX_LINE_BYTES], more + max(0, len(kept) - MAX_LINE_BYTES)


def shown(kept: bytes, more: int) -> bytes:
    """Return a line as it is sent to the master, with a note about bytes that were cut off."""
    if not more:
        return kept.rstrip(b"\r")
    whole = kept.decode("utf-8", "ignore").encode() if _is_text(kept) else kept  # no partial character
    return b"%b [cut, %d more bytes]" % (whole, more)


def _is_text(data: bytes) -> bool:
    """Return whether ``data`` is UTF-8, except for an incomplete character at its end."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


class Master(Protocol):
    """The control connection of the master that receives the lines."""

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait to be sent to the master."""

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Send the master an event."""


class Forwarding:
    """The daemon's end of the pipe: sends the lines that user code writes to the master.

    Args:
        activity: The page.

    Attributes:
        master: Returns the master that has the worker. Lines wait while it returns None.
    """

    def __init__(self, activity: Activity) -> None:
        self.master: Callable[[], Master | None] = lambda: None
        self._activity = activity
        self._pipe: int | None = None
        self._rest = b""
        self._received = 0  # lines of this executor
        self._noted = 0  # lines of this executor that are known to be missing
        self._missing = 0  # missing lines that were not reported yet
        self._waiting: deque[tuple[int, str]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0

    def listen(self, pipe: int) -> None:
        """Begin to read the lines of a new executor."""
        os.set_blocking(pipe, False)
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._readable)

    def end(self) -> None:
        """Send the remaining lines of an executor that has ended."""
        self.flush()
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
        if self._timer is not None:
            self._timer.cancel()
        self._pipe, self._rest, self._received, self._noted, self._timer = None, b"", 0, 0, None

    def forget(self) -> None:
        """Drop all present lines, because they are not for the next master."""
        self._look()
        self._waiting.clear()
        self._missing = 0

    def flush(self) -> None:
        """Send all present lines, and the number of missing lines."""
        self._read()
        self._send()
        self._look()
        self._send()

    def _readable(self) -> None:
        if not self._read() and self._pipe is not None:  # the end of the pipe; ``end`` closes it
            asyncio.get_running_loop().remove_reader(self._pipe)
        self.wake()

    def wake(self) -> None:
        """Send the waiting lines soon, from the event loop."""
        self._looks = 0
        self._arm(FLUSH_S)

    def _read(self) -> bool:
        """Read the lines in the pipe. Return whether more can arrive."""
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
        """Read the lines in the pipe, and return the number of newly missing lines."""
        counted = self._activity.written  # Read the counter first: a counted line is in the pipe or was dropped.
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
        if self._waiting or self._looks:  # missing lines are reported with the next lines, or when no more are missing
            self._send()  # lines that are missing before these, not after them
        self._looks = 0 if self._look() else self._looks + 1
        is_held_up = bool(self._waiting) and self.master() is not None
        if is_held_up or self._looks < LOOKS:
            self._arm(FLUSH_S if is_held_up else LOOK_S)

    def _send(self) -> None:
        """Send the waiting lines, and the number of lines missing before them, to the master if it accepts them."""
        while (self._waiting or self._missing) and (master := self.master()) and master.queued_bytes < MAX_QUEUED_BYTES:
            lines, length = [], 0
            while self._waiting and length < MAX_EVENT_BYTES:
                stream, text = self._waiting.popleft()
                lines.append([stream, text])
                length += len(text)
            missing, self._missing = self._missing, 0
            master.event("wrote", {"lines": lines, "dropped": missing})
