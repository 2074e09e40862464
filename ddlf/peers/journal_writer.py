"""The writer of the journal: the one task that appends entries and lets the ledger take them. Runs on the server.

An entry passes these steps, in the order in which entries come:

| step | where | afterwards |
|---|---|---|
| ``commit`` admits it | event loop | it fits the ledger of now, and waits |
| its batch is appended with one sync | thread | it survives a power cut, and nobody knows it |
| ``take`` gets it, and all others of its batch | event loop, without a pause | the ledger and the sets know it |
| ``commit`` returns | event loop | an answer that follows from it may leave |

Entries that come while a batch is written form the next batch. Everything else of the server runs meanwhile. The ledger
does not change while a batch is written, since only ``take`` changes it. It changes between two batches: code that awaits
must look at the ledger again. So must the writer: an entry that did fit may not fit after the others of its batch. Then
``commit`` raises ``Unfit``, though the journal has the entry. A server that reads the journal again refuses it again.

``take`` must not await ``commit``: the writer would wait for itself. It sends a consequence of an entry, or begins a task with it.
No entry is written while the journal begins a new file, so that its snapshot has all entries before it.

A disk that refuses fails the entries of the batch. They are neither in the journal nor in the ledger, and the writer
continues with the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from ddlf.errors import CheckpointError, DDLFError
from ddlf.peers.entries import Entry
from ddlf.peers.journal import Journal, head_of
from ddlf.peers.ledger import Unfit, WeightLedger

T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Sets up to this size are checked, and made into records, on the event loop: a thread costs more."""
AGAIN_S = 1.0
"""Seconds until the server writes to a disk again that has refused."""
CLOSED = "the server of peers ends: nothing more is written to its journal"


class Waiting(NamedTuple):
    """An entry that waits for the disk.

    Attributes:
        entry: The entry.
        data: Its set, and what follows the set in the journal.
        head: The head of its record; empty if a thread is to make it.
        travelling: The set as it travels, if it travels in another form.
        written: Done when the ledger has taken the entry.
    """

    entry: Entry
    data: bytes
    head: bytes
    travelling: bytes
    written: asyncio.Future[None]


class JournalWriter:
    """Writes entries in batches.

    Args:
        journal: The journal.
        ledger: The ledger, which admits entries. Its state begins a new file.
        take: Lets the ledger take an entry that is on the disk, with its set as the journal has it and as it travels, and
            carries out what follows. It raises ``Unfit`` if the ledger does not take the entry.
        needed: Returns the bytes of all needed sets, as the journal has them.
        begin: Begins a task of the server.
        refused: Gets an error of the disk, and what could not be written.
    """

    def __init__(
        self,
        journal: Journal,
        ledger: WeightLedger,
        *,
        take: Callable[[Entry, bytes, bytes], None],
        needed: Callable[[], Mapping[int, bytes]],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        refused: Callable[[str, DDLFError], None],
    ) -> None:
        self._journal, self._ledger = journal, ledger
        self._take, self._needed, self._begin, self._refused = take, needed, begin, refused
        self._waiting: list[Waiting] = []
        self._waits = asyncio.Event()  # an entry waits, or the writer is to end
        self._is_closing = False
        self._archiving = asyncio.Lock()

    async def commit(self, entry: Entry, data: bytes = b"", travelling: bytes = b"") -> None:
        """Write an entry to the journal, let the ledger take it, and carry out what follows.

        Args:
            entry: The entry.
            data: Its set, and what follows the set in the journal.
            travelling: The set as it travels, if it travels in another form.

        Raises:
            Unfit: The entry does not fit the ledger.
            CheckpointError: The journal cannot be written.
        """
        if self._is_closing:
            raise CheckpointError(CLOSED)
        self._ledger.admit(entry)
        # Now, since the set of a post that has just come is in the processor's cache.
        head = head_of(entry, data) if len(data) <= INLINE_BYTES else b""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(entry, data, head, travelling, written))
        self._waits.set()
        await written

    async def write(self) -> None:
        """Write batches until ``close`` was called and no entry waits. One task of the server."""
        while self._waiting or not self._is_closing:
            await self._waits.wait()
            self._waits.clear()
            batch, self._waiting = self._waiting, []
            if batch:
                await self._write_batch(batch)

    def close(self) -> None:
        """Refuse later entries. ``write`` ends when no entry waits."""
        self._is_closing = True
        self._waits.set()

    def fail_waiting(self) -> None:
        """Fail the waiting entries, because ``write`` has failed."""
        for waiting in self._waiting:
            _set_exception(waiting.written, CheckpointError(CLOSED))

    async def _write_batch(self, batch: list[Waiting]) -> None:
        entries, heads = [(waiting.entry, waiting.data) for waiting in batch], [waiting.head for waiting in batch]
        try:
            await asyncio.to_thread(self._journal.append, entries, heads)
        except DDLFError as error:
            self._refused("entries", error)
            for waiting in batch:
                _set_exception(waiting.written, error)
            return
        for entry, data, _, travelling, written in batch:
            try:
                self._take(entry, data, travelling)
            except Unfit as error:  # something in the same batch came first
                _set_exception(written, error)
            else:
                if not written.done():
                    written.set_result(None)
        if self._journal.is_long:
            try:
                await asyncio.to_thread(self._journal.begin_file, self._ledger.state(), self._needed())
            except DDLFError as error:
                self._refused("file", error)
            else:
                self._begin(self._archive())

    async def _archive(self) -> None:
        async with self._archiving:
            try:
                await asyncio.to_thread(self._journal.archive)
            except DDLFError as error:
                self._refused("archive", error)


async def until_written(
    write: Callable[[], Awaitable[T]], ledger: WeightLedger, refused: Callable[[CheckpointError], None] | None = None
) -> T:
    """Write something that must not be lost, as soon as the disk takes it.

    Args:
        write: Writes it, and returns a result.
        ledger: The ledger. When the training has ended, a disk that refuses ends the server.
        refused: Gets each error of the disk.

    Raises:
        CheckpointError: The training has ended, and the disk refuses.
    """
    while True:
        try:
            return await write()
        except CheckpointError as error:
            if refused is not None:
                refused(error)
            if ledger.ended:
                raise unwritten_end(error) from error
            await asyncio.sleep(AGAIN_S)


def unwritten_end(error: CheckpointError) -> CheckpointError:
    """Return the error that ends a server whose disk refuses the end of the training."""
    return CheckpointError(
        f"the server ends, and its training is not over, because the end cannot be written: {error.message}",
        hint="free some space, and continue with: ddlf peers serve --resume last",
    )


def _set_exception(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
