"""A worker's end of the exchange: weights as they come and updates as they leave.

``ddlf.training.exchange`` is the master's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.encoding import (
    EncodedUpdate,
    apply_delta,
    decode_update,
    encode_update,
    relative_error,
    without_zeros,
)
from ddlf.algorithms.streaming import put
from ddlf.algorithms.weights import Weights
from ddlf.errors import ConfigError

Residual = list[Any]
"""Residual of a codec, for each tensor; None for a tensor without one."""


def read_weights(message: dict[str, Any], held: Weights | None, like: Weights) -> Weights:
    """The weights that came for a slot, whole or as a difference to its last ones.

    Args:
        message: From ``WeightsOut.encode``.
        held: Weights that the slot holds here, if any.
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
    """Weights that are here, as ``read_weights`` takes them.

    Args:
        weights: The weights.
        copy: Whether somebody may change what he is given.
    """
    payloads = [{"raw": w.copy() if copy else w} for w in weights]
    return {"delta": False, "encoded": {"codec": "float32", "payloads": payloads}}


def travelling(update: Any) -> Any:
    """An encoded update without what is zero: tensors that are frozen do not travel. What stays here is as it was."""
    return without_zeros(update) if isinstance(update, dict) and "payloads" in update else update  # type: ignore[arg-type]


def send_update(
    name: str,
    update: Weights,
    lossless: Sequence[bool],
    residual: Residual | None,
    tensors: Sequence[int] | None = None,
) -> tuple[EncodedUpdate, Residual, float]:
    """An update as it travels back.

    Args:
        name: Name of the codec.
        update: One array for each tensor.
        lossless: Whether each must arrive exactly.
        residual: What the codec still owes of the same slot's updates before; it is added.
        tensors: Numbers of those that travel; None for all. What is owed of others waits.

    Returns:
        What travels; what the codec owes now; and its relative error: the L2 norm of the difference to the update over
        the update's.
    """
    chosen = range(len(update)) if tensors is None else tensors
    sent = [update[i] for i in chosen]
    groups = len(residual or ()) // max(
        len(update), 1
    )  # of each tensor what is owed, and of some codecs what they go on from
    places = [group * len(update) + i for group in range(groups) for i in chosen]
    owed = [residual[place] for place in places] if residual else None
    encoded, left = encode_update(CODEC.read(name), sent, [lossless[i] for i in chosen], owed)
    error = 0.0 if name == "float32" else relative_error(sent, decode_update(encoded, sent))
    if tensors is None:
        return encoded, left, error
    groups = len(left) // max(len(tensors), 1)
    whole: Residual = list(residual or ())[: groups * len(update)]
    whole += [None] * (groups * len(update) - len(whole))
    return encoded, put(whole, [group * len(update) + i for group in range(groups) for i in tensors], left), error
