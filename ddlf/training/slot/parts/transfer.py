"""A worker's side of the exchange: decodes weights and encodes updates, and keeps what both need for the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddlf.algorithms.codec import Outward, codec_named
from ddlf.algorithms.encoding import (
    EncodedUpdate,
    apply_delta,
    decode_update,
    encode_update,
    relative_error,
    without_zeros,
)
from ddlf.algorithms.outer import put
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.part import Kept, Left, SlotPart, SlotPlan, SlotRound
from ddlf.training.slot.task import HELD, RESIDUAL, SlotState, Task


class ReceivedWeights(SlotPart):
    """The global weights of the round.

    The next weights may come as a difference to them. The master knows them, so they never travel.
    """

    name = HELD
    travels = False

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True: each round decodes its weights."""
        return True

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        round.weights = read_weights(round.task.weights, left, round.model.like)
        return round.weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.weights

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.differences else None

    @classmethod
    def goes_on(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return Outward.read(now["weights_codec"]).delta or str(now["outer"]).startswith("streaming")


class Residual(SlotPart):
    """The residual: the sum of the codec's errors in the slot's updates so far, for each tensor.

    It is added to the next update (error feedback).
    """

    name = RESIDUAL

    def __init__(self, app: App, model: TrainableModel) -> None:
        self._residual: Left | None = None

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True: each round encodes its update."""
        return True

    def begin(self, round: SlotRound, weights: Weights, left: Left | None) -> Weights:
        self._residual = left
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Encode the update for the network. After a change to an exact codec, the old residual is sent in full."""
        round.encoded, residual, round.codec_error = send_update(
            round.task.codec, update, round.exact, self._residual, round.tensors
        )
        return update, residual

    @classmethod
    def kept(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.spec.exchange.codec.biased else None


def read_weights(message: dict[str, Any], held: Weights | None, like: Weights) -> Weights:
    """Return the weights in a message for a slot, which has whole weights or a difference to the last ones.

    Args:
        message: The result of ``StarWeights.encode``.
        held: The weights that the slot holds here, if any.
        like: The model's weights, for shapes and types.
    """
    if not message["delta"]:
        return decode_update(message["encoded"], like)
    if held is None:
        raise ConfigError("a difference of weights came before any weights")
    tensors = message.get("tensors")
    if tensors is None:
        return apply_delta(held, message["encoded"])
    return put(held, tensors, apply_delta([held[i] for i in tensors], message["encoded"]))


def whole(weights: Weights, *, copy: bool = False) -> dict[str, Any]:
    """Return local weights in the form that ``read_weights`` accepts.

    Args:
        weights: The weights.
        copy: Whether to copy them, because the receiver may change them.
    """
    payloads = [{"raw": w.copy() if copy else w} for w in weights]
    return {"delta": False, "encoded": {"codec": "float32", "payloads": payloads}}


def travelling(update: Any) -> Any:
    """Return an encoded update without zeros, since frozen tensors do not travel. Other values pass unchanged."""
    return without_zeros(update) if isinstance(update, dict) and "payloads" in update else update  # type: ignore[arg-type]


def send_update(
    name: str,
    update: Weights,
    lossless: Sequence[bool],
    residual: Left | None,
    tensors: Sequence[int] | None = None,
) -> tuple[EncodedUpdate, Left, float]:
    """Encode an update for the network.

    Args:
        name: Name of the codec.
        update: One array for each tensor.
        lossless: For each tensor, whether it must arrive exactly.
        residual: The codec's residual of the slot's earlier updates, which is added.
        tensors: Numbers of the tensors that travel; None for all. The residuals of the others stay.

    Returns:
        The encoded update; the new residual; and the relative error: the L2 norm of the difference to the update,
        divided by the update's.
    """
    chosen = range(len(update)) if tensors is None else tensors
    sent = [update[i] for i in chosen]
    groups = len(residual or ()) // max(
        len(update), 1
    )  # arrays per tensor: a residual, and for some codecs a start value
    places = [group * len(update) + i for group in range(groups) for i in chosen]
    owed = [residual[place] for place in places] if residual else None
    encoded, left = encode_update(codec_named(name), sent, [lossless[i] for i in chosen], owed)
    error = 0.0 if name == "float32" else relative_error(sent, decode_update(encoded, sent))
    if tensors is None:
        return encoded, left, error
    groups = len(left) // max(len(tensors), 1)
    whole: Left = list(residual or ())[: groups * len(update)]
    whole += [None] * (groups * len(update) - len(whole))
    return encoded, put(whole, [group * len(update) + i for group in range(groups) for i in tensors], left), error
