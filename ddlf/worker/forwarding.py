"""Forwards the output of a worker to its master. Runs in the daemon.

The lines of user code come through the pipe of ``output_capture.py``. The output of native code, such as TensorFlow, and of other
programs goes to a file, which the daemon reads. The daemon sends these lines and its own ones as separate events, because
a terminal shows only the lines of user code. The token never leaves the worker this way.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Protocol

from ddlf.worker.activity import Activity
from ddlf.worker.events import DaemonEvent, Logged, Wrote
from ddlf.worker.file_tail import GrowingFile

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
HIDDEN = "***"
"""Stands in a line where a token was."""


class Master(Protocol):
    """The control connection of the master that receives the lines."""

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait to be sent to the master."""

    def report(self, event: DaemonEvent) -> None:
        """Send the master an event."""


class Forwarding:
    """Sends the lines that a worker writes to the master: the lines of user code, and as separate events the lines of
    native code and of the daemon.

    Args:
        activity: The page.
        secrets: Texts that are replaced in each line.

    Attributes:
        master: Returns the master that has the worker. Lines wait while it returns None.
    """

    def __init__(self, activity: Activity, secrets: Sequence[bytes] = ()) -> None:
        self.master: Callable[[], Master | None] = lambda: None
        self._activity = activity
        self._secrets = [secret.decode(errors="backslashreplace") for secret in secrets]
        self._native: GrowingFile | None = None
        self._log: deque[str] = deque(maxlen=MAX_WAITING_LINES)
        self._left_out = 0  # bytes of native code's output that were not reported yet
        self._pipe: int | None = None
        self._unfinished = b""
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

    def watch(self, file: IO[bytes]) -> None:
        """Begin to read the file that native code of a new executor writes."""
        self._stop_watching()
        self._native = GrowingFile(file)

    def log(self, line: str) -> None:
        """Send a line of the daemon."""
        self._log.append(self._harmless(line))
        self._send()

    def look_at_native(self) -> None:
        """Send what native code has written since the last look, if a master has the worker."""
        if self.master() is not None:
            self._read_native()
            self._send()

    def end(self) -> None:
        """Send the remaining lines of an executor that has ended."""
        self._read_native(to_its_end=True)
        self._stop_watching()
        self.flush()
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
        if self._timer is not None:
            self._timer.cancel()
        self._pipe, self._unfinished, self._received, self._noted, self._timer = None, b"", 0, 0, None

    def _stop_watching(self) -> None:
        if self._native is not None:
            self._native.close()
            self._native = None

    def forget(self) -> None:
        """Drop all present lines, because they are not for the next master."""
        self._look()
        self._waiting.clear()
        self._log.clear()
        self._missing = self._left_out = 0
        if self._native is not None:
            self._native.skip()

    def flush(self) -> None:
        """Send all present lines, and the number of missing lines."""
        self._read()
        self._read_native()
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
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            self._received += len(lines)
            room = MAX_WAITING_LINES - len(self._waiting)
            self._missing += max(0, len(lines) - room)
            for line in lines[:room]:
                text = self._harmless(line[1:].decode(errors="backslashreplace"))
                self._waiting.append((line[0] - 48, text))
        return False

    def _read_native(self, *, to_its_end: bool = False) -> None:
        if self._native is not None:
            lines, left_out = self._native.new_lines(to_its_end=to_its_end)
            self._log.extend(map(self._harmless, lines))
            self._left_out += left_out

    def _harmless(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

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
        """Send the waiting lines, and how much is missing before them, to the master if it accepts them."""
        while (self._waiting or self._missing) and (master := self.master()) and master.queued_bytes < MAX_QUEUED_BYTES:
            streams, texts, length = list[int](), list[str](), 0
            while self._waiting and length < MAX_EVENT_BYTES:
                stream, text = self._waiting.popleft()
                streams.append(stream)
                texts.append(text)
                length += len(text)
            missing, self._missing = self._missing, 0
            master.report(Wrote(streams=streams, texts=texts, dropped=missing))
        while (self._log or self._left_out) and (master := self.master()) and master.queued_bytes < MAX_QUEUED_BYTES:
            lines, length = list[str](), 0
            while self._log and length < MAX_EVENT_BYTES:
                lines.append(self._log.popleft())
                length += len(lines[-1])
            left_out, self._left_out = self._left_out, 0
            master.report(Logged(lines=lines, left_out=left_out))
