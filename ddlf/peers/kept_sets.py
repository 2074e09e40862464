"""The sets that a server of peers keeps: their bytes as the journal has them and as they travel, and their sketches.

A set is here from the moment when the ledger takes its entry until no peer can ask for it: the ledger says which sets it
needs. If the codec rounds, a set of the server has two forms, the exact one of the journal and the rounded one that travels.
A posted set has one. The state of the outer optimizer belongs to the base, and follows it in the journal.

Only the event loop changes anything here. A thread may read the bytes of a set, which never change.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddlf.algorithms.weights import Weights
from ddlf.errors import CheckpointMismatch
from ddlf.peers.checks import SetCheck
from ddlf.peers.journal import Journal, needed_sets
from ddlf.peers.ledger import WeightLedger
from ddlf.peers.merging import Part, state_layout
from ddlf.peers.sets import layout_of
from ddlf.peers.sketches import Sketch, Sketcher
from ddlf.peers.wire import Wire


class KeptSets:
    """Keeps the sets that the ledger needs.

    Args:
        ledger: The ledger. It is only read.
        wire: Makes the sets that travel.
        check: Gets the sketch of each set.
        trainable: Per tensor, whether it is trained.

    Attributes:
        travelling: The bytes of each set, as they travel.
        state: State of the outer optimizer, which belongs to the base; empty without one.
        next_state: Its state for the next base. It becomes ``state`` when the ledger takes this base.
    """

    def __init__(self, ledger: WeightLedger, wire: Wire, check: SetCheck, trainable: Sequence[bool]) -> None:
        self.travelling: dict[int, bytes] = {}
        self.state: Weights = []
        self.next_state: Weights = []
        self._exact: dict[int, bytes] = {}  # the sets that travel in another form
        self._ledger, self._wire, self._check = ledger, wire, check
        self._sketcher = Sketcher(wire, trainable, secrets.randbits(64))
        self._next_number = 1

    def read(self, journal: Journal, folder: Path) -> None:
        """Read the needed sets of a journal, and the state of the outer optimizer.

        Raises:
            CheckpointMismatch: The state cannot be used.
        """
        base, state = self._ledger.base, b""
        for number, data in needed_sets(journal, self._ledger.pinned).items():
            size = self._wire.length(data)
            state = data[size:] if number == base else state
            self.keep(number, data[:size], self._wire.travelling(data[:size]))
        if not state:
            return
        layout = state_layout(self._ledger.plan, self._wire.decode(self.exact(base)))
        if layout is None or (fault := layout.fault(state)):
            raise CheckpointMismatch(f"the state of the outer optimizer in {folder} cannot be used: {fault}")
        self.state = self.next_state = layout.decode(state)

    def for_file(self) -> dict[int, bytes]:
        """Return the bytes of all needed sets in the form of the journal."""
        base = self._ledger.base
        needed = self.travelling | self._exact
        return {number: data + state_bytes(self.state) * (number == base) for number, data in needed.items()}

    def new_number(self) -> int:
        """Return the number of a new set. It is above all numbers in the ledger and all that were returned before."""
        number = max(self._next_number, self._ledger.next_set)
        self._next_number = number + 1
        return number

    def keep(self, number: int, data: bytes, travelling: bytes) -> None:
        """Keep a set of the journal. Without ``travelling``, it travels as it is."""
        self.travelling[number] = travelling or data
        if travelling:
            self._exact[number] = data
        if not self._check.has(number):
            self._check.keep(number, self.sketch(self.travelling[number]))

    def sketch(self, travelling: bytes) -> Sketch:
        """Return the sketch of a set that travels. A thread may call it."""
        return self._sketcher.sketch(travelling)

    def exact(self, number: int) -> bytes:
        """Return a set as the journal has it."""
        return self._exact.get(number) or self.travelling[number]

    def part(self, number: int) -> Part:
        """Return a set as a part of a mean."""
        ledger_set = self._ledger.sets[number]
        read = partial(self._wire.decode, self.exact(number))
        return Part(read=read, trainings=ledger_set.trainings, samples=ledger_set.samples)

    def forget(self, number: int) -> None:
        """Drop a set unless the ledger needs it."""
        if not self._ledger.needs(number):
            self.drop(number)

    def drop(self, number: int) -> None:
        """Drop a set, if it is here."""
        self.travelling.pop(number, None)
        self._exact.pop(number, None)
        self._check.drop(number)


def state_bytes(state: Weights) -> bytes:
    """Return the state of an outer optimizer as it follows its base in the journal; empty without a state."""
    return layout_of({str(number): array for number, array in enumerate(state)}).encode(state) if state else b""
