"""A read-only store of the partition files that other workers of the run have on their disks.

Runs in the executor, on threads that read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.errors import DatasetError, DDLFError
from ddlf.training.roles import REPLICA

if TYPE_CHECKING:
    from ddlf.worker.worker import Worker

PIECE_BYTES = 2**22
"""The largest piece of a file in one answer."""


class PeerFiles:
    """Reads partition files from the disks of other workers. It has the interface of a ``Store``.

    ``RemoteFolder`` uses it, and compares each file with the manifest.

    Args:
        location: The place of the files on this worker and the others.
        worker: This worker.
        loop: Event loop for the calls to other workers.
    """

    def __init__(self, location: object, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._location, self._worker, self._loop = location, worker, loop
        self._closed: Future[None] = Future()

    def __str__(self) -> str:
        return str(self._location)

    def close(self) -> None:
        """End reads that wait for another worker with an error, and refuse later reads."""
        if not self._closed.done():
            self._closed.set_result(None)

    def interrupt(self) -> None:
        """End reads that wait for another worker with an error. Later reads work again."""
        if not self._closed.done():
            waiting, self._closed = self._closed, Future()
            waiting.set_result(None)

    def ending(self) -> Callable[[], bool]:
        """Return a function that says whether a read that starts now must end.

        It must after ``interrupt`` or ``close``.
        """
        return self._closed.done

    def read(self, name: str, nbytes: int) -> Any:
        """Return all bytes of a file, fetched from another worker.

        Args:
            name: Path below the place.
            nbytes: Size of the file in bytes.

        Raises:
            DatasetError: No reachable worker has it.
        """
        content = np.empty(nbytes, np.uint8)
        for begin, piece in self._pieces(name, nbytes):
            content[begin : begin + len(piece)] = piece
        return content

    def fetch(self, name: str, nbytes: int, target: Path) -> None:
        """Copy a file of ``nbytes`` bytes from another worker to a path on this machine.

        Raises:
            DatasetError: No reachable worker has it.
            OSError: The disk cannot store it.
        """
        with open(target, "r+b" if target.exists() else "wb") as file:
            for begin, piece in self._pieces(name, nbytes):
                file.seek(begin)
                file.write(piece.data)

    def _pieces(self, name: str, nbytes: int) -> Iterator[tuple[int, Any]]:
        """Yield the pieces of a file with their positions in it.

        If the worker that sends them is lost, another one that has the file continues.
        """
        begin, reason = 0, "none of them has it"
        peers = self._worker.peers
        for number in sorted(peers, key=lambda other: (other < self._worker.id, other)):
            while begin < nbytes:
                try:
                    piece = self._request_piece(number, name, begin, min(PIECE_BYTES, nbytes - begin))
                except Closed:
                    raise DatasetError(
                        f"the read of {self._location} was interrupted", hint="read the files again"
                    ) from None
                except DDLFError as error:
                    reason = error.message.partition("\n")[0]
                    break
                if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or not 0 < piece.size <= nbytes - begin:
                    break
                yield begin, piece
                begin += len(piece)
        if begin < nbytes:
            raise DatasetError(
                f"{self._location}/{name} is not on this worker, and no other worker sent it: {reason}",
                hint="bring it to a worker: ddlf data send",
            )

    def _request_piece(self, number: int, name: str, begin: int, nbytes: int) -> Any:
        peers = self._worker.peers
        asking = asyncio.run_coroutine_threadsafe(
            peers[number].call((peers.run, REPLICA), "file", name, begin, nbytes), self._loop
        )
        closed = self._closed
        wait((asking, closed), return_when=FIRST_COMPLETED)
        if closed.done():
            asking.cancel()
            raise Closed
        return asking.result()


class Closed(Exception):
    """Error: reading was ended by ``close`` or ``interrupt``."""
