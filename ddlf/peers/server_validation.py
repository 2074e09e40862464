"""Validations by the server itself: it tests the weights that a new peer would get, on its own test data.

One validation runs at a time, and each result is an entry of the journal. The test runs on a thread. A result that the
ledger or the disk refuses is lost, and the next validation takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from ddlf.algorithms.weights import Weights
from ddlf.errors import CheckpointError
from ddlf.peers import clock
from ddlf.peers.entries import NO_SET, Validated
from ddlf.peers.journal_writer import JournalWriter
from ddlf.peers.kept_sets import KeptSets
from ddlf.peers.ledger import Unfit, WeightLedger
from ddlf.peers.said_lately import Rarely
from ddlf.peers.wire import Wire


class Validator(Protocol):
    """Tests weights on the server's test data. Called on a thread."""

    def __call__(self, weights: Weights) -> tuple[float, float, int]:
        """Return accuracy, loss and number of samples."""


class ServerValidation:
    """Tests weights every ``validate_s`` seconds of the plan, while peers are present.

    Args:
        validator: Tests weights.
        ledger: The ledger. It is only read.
        sets: The sets.
        wire: Reads sets.
        writer: Writes the results.
        say: Prints a line.
    """

    def __init__(
        self,
        validator: Validator,
        ledger: WeightLedger,
        sets: KeptSets,
        wire: Wire,
        writer: JournalWriter,
        say: Callable[[str], None],
    ) -> None:
        self._validator, self._ledger, self._sets, self._wire = validator, ledger, sets, wire
        self._writer, self._say = writer, say
        self._is_running = False
        self._began_at = 0.0
        self._validated = NO_SET
        self._shown = Rarely(clock.now())

    def is_due(self, now: float) -> bool:
        """Return whether ``run`` is due. If so, it counts as begun."""
        every_s = self._ledger.plan.validate_s
        due = bool(every_s and now - self._began_at >= every_s and not self._is_running and self._ledger.present)
        if due:
            self._began_at, self._is_running = now, True
        return due

    async def run(self) -> None:
        """Test the weights that a new peer would get, and write the result."""
        number = self._ledger.start()
        try:
            weights = await asyncio.to_thread(self._wire.decode, self._sets.exact(number))
            accuracy, loss, samples = await asyncio.to_thread(self._validator, weights)
            entry = Validated(at=clock.now(), set=number, accuracy=accuracy, loss=loss, samples=samples)
            with contextlib.suppress(Unfit, CheckpointError):
                await self._writer.commit(entry)
                if number != self._validated and self._shown.is_due(clock.now()):
                    self._say(f"validated set {number}: accuracy {accuracy:.4f}, loss {loss:.4f}, {samples:,} samples")
                self._validated = number
        finally:
            self._is_running = False
