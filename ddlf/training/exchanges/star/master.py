"""The star exchange at the master, which has the weights. The worker's side is ``ddlf.training.slot.parts``.

``ddlf.algorithms.encoding`` applies the codecs. For delta codecs, the master keeps the exact weights that each slot's
worker holds, so that another worker can get the same ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ddlf.algorithms.codec import Float32, Outward
from ddlf.algorithms.encoding import encode_delta, encode_update
from ddlf.algorithms.outer import put
from ddlf.algorithms.update_check import Verdict
from ddlf.algorithms.weights import Weights
from ddlf.cluster.proxy import ProxyWorker
from ddlf.training.checkpoints.restoring import Restoring
from ddlf.training.slot.task import Reply


class StarWeights:
    """The source of the weights at the master.

    Args:
        name: A codec that ``Outward`` can read, optionally with the prefix ``delta:``.
        lossless: For each tensor, whether it must arrive exactly.
        fragments: Whether only some tensors travel at a time; the slot keeps the others.

    Attributes:
        differences: Whether weights travel as differences.
        held: The weights that each slot holds, if they travel as differences.
        stays, restoring, compares, evaluation: The attributes of ``WeightSource``.
    """

    stays = False
    restoring: Restoring | None = None
    evaluation: Any = None
    compares: Callable[[dict[int, Reply]], Awaitable[dict[int, Verdict]]] | None = None

    def __init__(self, name: str, lossless: Sequence[bool], *, fragments: bool = False) -> None:
        how = Outward.read(name)
        self._codec, self.differences = how.codec, how.delta or fragments
        self.lossless = lossless
        self.held: dict[int, Weights] = {}
        self._last: tuple[Weights, dict[str, Any]] | None = None
        self._sent: dict[int, tuple[int, Weights, dict[str, Any] | None]] = {}

    def encode(
        self, slot: int, weights: Weights, number: int, *, holds: bool = True, tensors: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the message with the weights for a slot's worker. Without deltas, all slots share one encoding.

        Args:
            slot: The slot, from 0.
            weights: The global weights.
            number: The slot's round. Within one round, the same list of weights gives the same message, so another
                worker gets what the first one got. In a later round, the same list (if no update was merged) gives a
                new difference, to the weights that the first message produced.
            holds: Whether the worker still has the last weights of this slot.
            tensors: Numbers of the tensors that may have changed; None for all.
        """
        if not self.differences:
            if self._last is None or self._last[0] is not weights:
                encoded, _ = encode_update(self._codec, weights, self.lossless)
                self._last = weights, {"delta": False, "encoded": encoded}
            return self._last[1]
        before = self._sent.get(slot)
        if before is None or before[0] != number or before[1] is not weights:
            self._sent[slot] = number, weights, self._difference(slot, weights, tensors)
        difference = self._sent[slot][2]
        if difference is not None and holds:
            return difference
        # Send exactly what the slot's own worker would have now, so that another one computes the same bits.
        encoded, _ = encode_update(Float32(), self.held[slot], self.lossless)
        return {"delta": False, "encoded": encoded}

    def whole(self, weights: Weights) -> dict[str, Any]:
        """Return the message with whole weights, for workers that may hold nothing.

        The weights are exact if they usually travel as differences, and encoded with the codec otherwise.
        """
        codec = Float32() if self.differences else self._codec
        return {"delta": False, "encoded": encode_update(codec, weights, self.lossless)[0]}

    async def reach(self, worker: ProxyWorker) -> None:
        """Prepare a worker to get weights. The master needs no preparation."""

    def silent(self, worker: int, other: int, why: str) -> None:
        """Handle the report that two workers cannot reach each other. The master reaches both, so it ignores this."""

    def _difference(self, slot: int, weights: Weights, tensors: Sequence[int] | None) -> dict[str, Any] | None:
        """Return the message that brings a slot to new weights; None if the slot holds nothing yet."""
        if slot not in self.held:
            self.held[slot] = weights
            return None
        chosen, held = range(len(weights)) if tensors is None else tensors, self.held[slot]
        new, old, exact = ([whole[i] for i in chosen] for whole in (weights, held, self.lossless))
        encoded, after = encode_delta(new, old, self._codec, exact)  # type: ignore[arg-type]
        self.held[slot] = put(held, chosen, after)
        return {"delta": True, "encoded": encoded} | ({} if tensors is None else {"tensors": list(tensors)})
