"""How much a run has trained on the private data of each worker. Lives on the master, which never sees the samples."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The private data of one worker, which one slot trains on.

    Args:
        name: The fingerprint of the data, made with a key that only the worker has. It identifies the worker's data,
            and nobody without the key can compare it with other data.
        samples: The number of samples.
        trained: How many samples its accepted updates were trained on, over all local epochs.
        epochs: The local epochs of its accepted updates.
        left_out: The rounds, from 0, that were merged without it.
    """

    name: str
    samples: int
    trained: int = 0
    epochs: int = 0
    left_out: tuple[int, ...] = ()


class ShareLedger:
    """How often a run was trained on the data of each worker, in accepted updates. ``IApp.ledger`` shows it.

    It replaces ``SampleLedger`` if the workers' data are private: the master knows numbers of samples, not which ones.

    Args:
        shares: The data of each slot's worker, in slot order.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = tuple(shares)

    @property
    def samples(self) -> int:
        """n, the number of samples of all workers."""
        return sum(share.samples for share in self.shares)

    def add(self, slot: int, epochs: int, samples: int) -> None:
        """Count the samples of a slot's update, which was merged, as trained on.

        Args:
            slot: The slot, from 0.
            epochs: Local epochs.
            samples: The samples that it was trained on, over all local epochs.
        """
        share = self.shares[slot]
        self._set(slot, trained=share.trained + samples, epochs=share.epochs + epochs)

    def leave_out(self, slot: int, number: int) -> None:
        """Note that a round, numbered from 0, was merged without a slot."""
        self._set(slot, left_out=(*self.shares[slot].left_out, number))

    def _set(self, slot: int, **changes: Any) -> None:
        share = dataclasses.replace(self.shares[slot], **changes)
        self.shares = (*self.shares[:slot], share, *self.shares[slot + 1 :])

    def is_exact(self, epochs: int) -> bool:
        """Return whether each worker has trained on all its samples in each of this number of local epochs."""
        return all(share.epochs == epochs and share.trained == epochs * share.samples for share in self.shares)

    def summary(self) -> dict[str, Any]:
        """Return the counts of all slots, and their SHA-256."""
        epochs = [_as_integer(share.trained / share.samples) for share in self.shares]
        return {
            "samples": self.samples,
            "least": min(epochs),
            "most": max(epochs),
            "mean": sum(share.trained for share in self.shares) / self.samples,
            "exact": self.is_exact(self.shares[0].epochs),
            "slots": [
                {
                    "samples": share.samples,
                    "trained": share.trained,
                    "epochs": share.epochs,
                    "left_out": [number + 1 for number in share.left_out],
                }
                for share in self.shares
            ],
            "sha256": hashlib.sha256(repr(self.to_facts()).encode()).hexdigest(),
        }

    def to_facts(self) -> dict[str, Any]:
        """Return the ledger as JSON data, which a checkpoint stores."""
        return {"shares": [{**dataclasses.asdict(share), "left_out": list(share.left_out)} for share in self.shares]}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Self:
        """Return the ledger that a checkpoint has stored."""
        return cls([Share(**{**share, "left_out": tuple(share["left_out"])}) for share in facts["shares"]])


def _as_integer(number: float) -> float:
    return int(number) if number.is_integer() else number
