"""Measures the memory of training in a child process of a worker, and finds the largest batch. Runs in the executor.

The child may die: the worker only hears that it ended. See ``trial`` for the child.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from ddlf.extras.planner.memory import Peak, Peaks, find_largest
from ddlf.rpc.messages import dumps
from ddlf.worker.calls import concurrent
from ddlf.worker.imports import MasterFinder

ENOUGH_BYTES = 256 * 2**20
"""Growth of the memory that shows the bytes of a sample. Allocators cause smaller differences."""
LEAST_SIZES, MOST_SIZES = 3, 6
"""The fewest and the most batch sizes to measure."""
FAR = 16
"""A batch is at most so many times as large as the one before."""
POLL_S = 0.2
PROGRAM = ("-m", "ddlf.extras.planner.trial")


class ChildEnded(Exception):
    """The child did not do its work. The text says why."""


class Child:
    """A child process that trains an app.

    Args:
        app: The pickled app.
        request: Facts for the child.
        deadline: The time when the child must be done, on the clock of ``time.monotonic``.

    Attributes:
        facts: Bytes of the opened app, as ``Trial.open`` returns them.
        has_ended: Whether it has failed or died, so that it trains no more.
        trained: The batch sizes that it has trained.
    """

    def __init__(self, app: bytes, request: dict[str, Any], deadline: float) -> None:
        own_socket, child_socket = socket.socketpair()
        self._deadline = deadline
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(child_socket.fileno())],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._link = Connection(own_socket.detach())
        self.has_ended = False
        self.trained = list[int]()
        try:
            self._send(json.dumps(request).encode())
            self._send(app)
            self.facts: dict[str, int] = self._answer()
        except BaseException:
            self.close()
            raise

    def train(self, batch: int, limit: int | None = None) -> tuple[int, Peak]:
        """Let the child train some steps, and return its most bytes in the first round, and its memory after it.

        Raises:
            ChildEnded: It could not.
        """
        self._send(json.dumps({"batch": batch, "limit": limit}).encode())
        first, most = self._answer()
        peak = Peak(batch=batch, most=most, earlier=tuple(self.trained))
        self.trained.append(batch)
        return first, peak

    def close(self) -> None:
        """End the child."""
        self.has_ended = True
        self._process.kill()
        self._process.wait()
        self._link.close()

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # the child has ended, which the missing answer shows
            self._link.send_bytes(message)

    def _answer(self) -> Any:
        """Return the child's answer, and answer its questions about modules until then."""
        while True:
            message = self._received()
            if "did" in message:
                return message["did"]
            if "failed" in message:
                self.has_ended = True
                raise ChildEnded(message["failed"])
            answer = next(
                (finder.ask(*message["ask"]) for finder in sys.meta_path if isinstance(finder, MasterFinder)), None
            )
            self._send(b"".join(bytes(part) for part in dumps(answer)))

    def _received(self) -> dict[str, Any]:
        while not self._link.poll(POLL_S):
            if time.monotonic() > self._deadline:
                self.has_ended = True
                raise TimeoutError("it needs too much time")
        try:
            message: dict[str, Any] = json.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            self.has_ended = True
            code = self._process.wait()
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ChildEnded(f"it was ended by {name}") from None
        return message


@concurrent
def measure_here(app: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """Measure the memory of training in a child process of this worker. Another child takes the place of one that died.

    Args:
        app: The pickled app.
        request: ``worker``, ``workers`` and ``format`` as in ``Trial``. ``batches``: batch sizes to begin with.
            ``exchange``: how updates travel. ``limit``: the most bytes of a worker, to find the largest batch; None
            without. ``seconds``: the time for all of it.

    Returns:
        ``peaks`` and ``largest``, or ``why`` there are none.
    """
    begin = time.monotonic()
    deadline = begin + request["seconds"]
    children = list[Child]()

    def child() -> Child:
        if not children or children[-1].has_ended:
            children.append(Child(app, request, deadline))
        return children[-1]

    def train(batch: int) -> Peak | None:
        current = child()
        try:
            return current.train(batch, limit)[1]
        except ChildEnded:
            current.close()
            return None

    limit = request["limit"]
    try:
        peaks = measure_batches(child, request["worker"], request["batches"], deadline)
        largest = None
        if limit is not None:
            largest, peaks = find_largest(peaks, limit, request["exchange"], train)
    except (ChildEnded, TimeoutError, OSError) as error:
        return {"why": str(error)}
    finally:
        for process in children:
            process.close()
    return {"peaks": asdict(peaks), "largest": None if largest is None else asdict(largest)}


def measure_batches(child: Callable[[], Any], worker: int, batches: Sequence[int], deadline: float) -> Peaks:
    """Let a child train larger and larger batches until its memory grows clearly.

    A process keeps memory of each batch size that it has trained. So few sizes far apart show the bytes of a sample better
    than many that double.

    Args:
        child: Returns the child; another one after it has ended.
        worker: Number of its worker.
        batches: The batch sizes to begin with.
        deadline: The time when it must end. A third of the time until then begins the last batch size after three.

    Raises:
        ChildEnded: The child could not train the first batch.
        TimeoutError: The first three batch sizes took too long, or did not fit into the memory of the machine.
    """
    facts = child().facts
    samples, loaded = facts["samples"], facts["loaded"]
    peaks = list[Peak]()
    batches_left = sorted({min(batch, samples) for batch in batches})
    begin, factor = time.monotonic(), FAR
    while batches_left:
        batch = batches_left.pop(0)
        try:
            first, peak = child().train(batch)
            peaks.append(peak)
            loaded = max(loaded, first) if len(peaks) == 1 else loaded
        except (ChildEnded, TimeoutError) as error:
            if not peaks:
                raise
            smaller = 2 * peaks[-1].batch
            if isinstance(error, TimeoutError) or len(peaks) >= LEAST_SIZES or batch <= smaller:
                break
            factor, batches_left = 2, [smaller]
            continue
        grown = max(earlier.most for earlier in peaks) - min(earlier.most for earlier in peaks)
        is_late = len(peaks) >= LEAST_SIZES and time.monotonic() - begin > (deadline - begin) / 3
        are_more_needed = len(peaks) < LEAST_SIZES or (grown < ENOUGH_BYTES and len(peaks) < MOST_SIZES)
        if not batches_left and batch < samples and are_more_needed and not is_late:
            batches_left.append(min(next_size(peaks, factor), samples))
    if len(peaks) < LEAST_SIZES and batch < samples:
        raise TimeoutError("it could train with too few batch sizes")
    return Peaks(worker=worker, batches=tuple(peaks), **{**facts, "loaded": loaded})


def next_size(peaks: Sequence[Peak], factor: int) -> int:
    """Return the batch size to measure after some sizes: after one, its double. Then it is the size whose memory grows by
    twice ``ENOUGH_BYTES``, as it seems.

    Args:
        peaks: The memory of the sizes so far, from the smallest.
        factor: The size is at most so many times as large as the last one.
    """
    *before, last = peaks
    if not before:
        return 2 * last.batch
    sample_bytes = (last.most - before[-1].most) / (last.batch - before[-1].batch)
    size = last.batch + 2 * ENOUGH_BYTES / max(sample_bytes, 1.0)
    return int(min(max(size, 2 * last.batch), factor * last.batch))
