"""Passes the output of user code on to the daemon. Runs in the executor.

All output still goes to the worker's terminal or its log file. Each line also goes into a pipe to the daemon, up to a
limited rate. Lines beyond the limit are only counted, in the page of memory that both processes share. The executor
never waits. Lines that a process wrote before it was killed are still in the pipe. ``forwarding.py`` is the other end.

Only Python's own streams go this way, including the streams of forked children. Native code and other programs, such
as TensorFlow, write directly to the descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import sys
import threading
import time
from typing import Any, TextIO

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
"""Maximum bytes of each stream in the log file of a worker."""
PIPE_BYTES = 1024**2
F_SETPIPE_SZ = 1031
NOTHING = b"", 0


class Written:
    """The executor's end of the pipe: takes the lines that user code writes.

    Args:
        activity: The page.
        channel: Channel to the daemon, which receives the other end of the pipe.
        stdout: Descriptor that also receives standard output: 1, or a file's.
        stderr: Descriptor that also receives standard error: 2, or a file's.

    Attributes:
        counted: Number of lines of this process, in the page.
        lock: Protects ``counted`` and the pipe.
        pause_until: Time on the monotonic clock until which lines are only counted.
    """

    def __init__(self, activity: Activity, channel: socket.socket, stdout: int, stderr: int = 2) -> None:
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
            former = getattr(sys, name)
            raw = io.BufferedWriter(Raw(number, stdout if number == 1 else stderr, self))
            stream = io.TextIOWrapper(raw, encoding=former.encoding, errors=former.errors, line_buffering=True)
            self._streams[number] = stream
            setattr(sys, name, stream)

    def _begin(self) -> None:
        """Start without any output, in this process or in a child of it. A child writes into the same pipe and has its
        own counter.
        """
        self.counted = self._activity.counted()
        self.lock = threading.RLock()  # an object's finalizer may write while this thread is in here
        self.pause_until = 0.0
        self._unfinished = dict.fromkeys(STREAMS, NOTHING)  # the text since the end of the last line
        self._lines, self._bytes = float(LINES_AT_ONCE), float(BYTES_AT_ONCE)
        self._at = time.monotonic()

    def take(self, stream: int, data: bytes) -> None:
        """Send the whole lines as far as the limit allows, and count all of them. Any thread may call this."""
        with self.lock:
            line_count = data.count(b"\n")
            if line_count:
                if (now := time.monotonic()) >= self.pause_until:
                    self._send(stream, data, now)
                self._unfinished[stream] = NOTHING
                data = data[data.rfind(b"\n") + 1 :]
            if data:
                self._unfinished[stream] = append_to_line(self._unfinished[stream], data)
            # Count the lines only after they are in the pipe: a counted line that is not in the pipe was dropped.
            self.counted[0] += line_count

    def end_line(self) -> None:
        """End an unfinished line, because the method that wrote it is over."""
        for number, stream in self._streams.items():
            with contextlib.suppress(Exception):  # the terminal is gone, or the user has closed it
                stream.flush()
            if self._unfinished[number] is not NOTHING:
                self.take(number, b"\n")

    def _send(self, stream: int, data: bytes, now: float) -> None:
        lines = data.split(b"\n")[:-1]
        first = append_to_line(self._unfinished[stream], lines[0])
        for line in (first, *(append_to_line(NOTHING, line) for line in lines[1:])):
            text = shown_line(*line)
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
        written, ends_line = self._written, data.endswith(b"\n")
        if (
            ends_line and not self._has_rest and time.monotonic() < written.pause_until
        ):  # most lines, if there are a million
            with written.lock:
                written.counted[0] += data.count(b"\n")
            return count
        self._has_rest = not ends_line
        written.take(self._stream, data)
        return count

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream

    def isatty(self) -> bool:
        return os.isatty(self._copy)


def append_to_line(unfinished: tuple[bytes, int], data: bytes) -> tuple[bytes, int]:
    """Append ``data`` to an unfinished line, whose length is limited. Return the kept bytes, and the number of bytes
    that were cut off.

    A carriage return restarts the line, like on a terminal.
    """
    line, cut_off = unfinished
    line += data
    if b"\r" in line:
        begin = line.rstrip(b"\r").rfind(b"\r") + 1
        line, cut_off = (line[begin:], 0) if begin else (line, cut_off)
    return line[:MAX_LINE_BYTES], cut_off + max(0, len(line) - MAX_LINE_BYTES)


def shown_line(line: bytes, cut_off: int) -> bytes:
    """Return a line as it is sent to the master, with a note about bytes that were cut off."""
    if not cut_off:
        return line.rstrip(b"\r")
    characters = line.decode("utf-8", "ignore").encode() if _is_text(line) else line  # no partial character
    return b"%b [cut, %d more bytes]" % (characters, cut_off)


def _is_text(data: bytes) -> bool:
    """Return whether ``data`` is UTF-8, except for an incomplete character at its end."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True
