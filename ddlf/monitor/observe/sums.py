"""What came of a worker's updates, or of all: counted while a run goes on, and again when its folder is read. Runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from ddlf import events as e


@dataclass(kw_only=True)
class Sums:
    """What came of updates.

    Args:
        updates: How many arrived.
        trained: Samples that they were trained on, those of each local epoch counted.
        compute_s: Seconds of local training.
        transfer_s: The other seconds from sending weights to having updates.
        bytes_out: Bytes sent for them.
        bytes_back: Bytes received for them.
        lost: How often whoever brings them was lost.
    """

    updates: int = 0
    trained: int = 0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    lost: int = 0

    def add(self, event: e.UpdateArrived | e.WorkerLost) -> None:
        """Count an update, or a loss."""
        if isinstance(event, e.WorkerLost):
            self.lost += 1
            return
        self.updates += 1
        self.trained += event.samples * event.epochs
        self.compute_s += event.compute_s
        self.transfer_s += max(event.transfer_s, 0.0)  # two clocks
        self.bytes_out += event.bytes_out
        self.bytes_back += event.bytes_back
