"""Weights that are made of a round by all workers together, and how: what ``shards.py`` works with. Runs in the executor."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec
from ddlf.algorithms.encoding import SAME, EncodedUpdate, decode_update, encode_parts, encode_update
from ddlf.algorithms.payload import peak_of
from ddlf.algorithms.ranges import Slice, decode_slice, overlapped, put, take
from ddlf.algorithms.update_check import Fault
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppMissing, BadUpdate, ConfigError
from ddlf.training.exchanges.peers import Unreached

GLANCE = 1 << 12
"""Bytes of a tensor that are looked at before all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the next weights are made.

    Args:
        base: Generation of the weights that the slots began with.
        generation: The one that comes of it.
        updates: Of each slot, in slot order, its number, the worker that has its update, the samples that it trained on, and what the update is
            scaled by.
        owners: Workers that step a slice, in the order of the slices.
        tensors: Numbers of those that are exchanged; None for all. The others stay as they are.
        kept: Arrays that are kept of each weight: the outer optimizer's, and the weight as it is stepped where it travels as a codec makes it.
        state: Parts of these: first value, the one behind the last, and the worker that has them.
        copies: Whether the owner of the next slice keeps a copy of that state.
        left: Of what slots have left on their workers, of which others keep copies: slot, its round, its worker, and the worker with the copy.
        groups: Groups of these states that are copied.
        means: Means of what slots have left that are made with it: ``MeanPlan`` of ``ddlf.training.exchanges.sharded.means``, as they travel.
        merge: The merge rule, as text.
        weighed: What it makes of the updates as wholes: a weight for each, and what their sum is divided by; empty if it merges value by value.
        outer: The outer optimizer, as text.
        codec: How weights travel, as text.
        trainable: Whether each weight is trained.
        names: Paths of the weights.
        piece: Values in a piece.
    """

    base: int
    generation: int
    updates: Sequence[tuple[int, int, int, float]]
    owners: Sequence[int]
    tensors: Sequence[int] | None
    kept: int
    state: Sequence[tuple[int, int, int]]
    copies: bool
    left: Sequence[tuple[int, int, int, int]]
    groups: Sequence[str]
    means: Sequence[dict[str, Any]]
    merge: str
    weighed: Sequence[float]
    outer: str
    codec: str
    trainable: Sequence[bool]
    names: Sequence[str]
    piece: int


State = list[list[np.ndarray[Any, Any]]]
"""What the outer optimizer keeps of a slice: for each array that it keeps of a weight, the slice of all of them. Behind it the weights themselves,
where they travel as a codec makes them."""


@dataclass(slots=True)
class Generation:
    """Weights, and the state that belongs to them.

    Args:
        weights: One array for each of the model's, as slots begin with them; of a generation that is being made, what is ready of them.
        state: Slices of the outer optimizer's state that are kept here.
        ready: Of each piece whether it is there; empty of what came as a whole.
        codec: How they travel; None for as they are, as from who has them from others.
        trainable: Of each whether it is trained: others travel as they are.
        made: Pieces that were encoded here.
        peaks: Largest magnitude of each weight as it is stepped, where the codec goes by that and there is one.
        within: The same of the slice that was stepped here.
        stepped: Set when that is known.
        means: By group those of what slots have left that their next rounds begin with.
    """

    weights: Weights
    state: list[tuple[Slice, State]] = field(default_factory=list)
    ready: dict[Slice, asyncio.Event] = field(default_factory=dict)
    codec: Codec | None = None
    trainable: Sequence[bool] = ()
    made: dict[Slice, EncodedUpdate] = field(default_factory=dict)
    peaks: Sequence[float] = ()
    within: list[float] = field(default_factory=list)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    means: dict[str, Any] = field(default_factory=dict)  # ``Mean`` of ``ddlf.training.exchanges.sharded.means``

    @classmethod
    def whole(cls, weights: Weights, outer: Weights, codec: str, trainable: Sequence[bool]) -> Generation:
        """Weights and the outer optimizer's state that are here whole."""
        weights, outer = ([np.asarray(array, order="C") for array in arrays] for arrays in (weights, outer))
        groups, used = [outer[i : i + len(weights)] for i in range(0, len(outer), len(weights))], codec_of(codec)
        peaks = list(map(peak_of, weights)) if used is not None and used.by_peak else []
        if used is not None:
            groups.append(weights)
            encoded, _ = encode_update(used, weights, [not one for one in trainable])
            weights = [np.asarray(array, order="C") for array in decode_update(encoded, weights)]
        kept = [((0, size_of(weights)), groups)] if groups else []
        return cls(weights, kept, codec=used, trainable=trainable, peaks=peaks)

    def set(self, piece: Slice, values: Weights) -> None:
        """Have new weights of a piece, as all will have them."""
        if self.codec is not None:
            encoded = self.made[piece] = self._encoded(piece, values)
            values = decode_slice(encoded, self.weights, piece)
        put(self.weights, piece, values)

    def sent(self, part: Slice, before: Generation | None = None) -> Weights | EncodedUpdate:
        """A slice of the weights as it travels; it is there.

        Args:
            part: Which slice.
            before: Weights that the receiver has, too: what is as it is in these does not travel.
        """
        values = take(self.weights, part)
        same = [] if before is None else list(map(_is_same, values, take(before.weights, part)))
        if self.codec is None and not any(same):
            return values
        if self.codec is None:
            encoded: EncodedUpdate = {"codec": "float32", "payloads": [{"raw": array} for array in values]}
        else:
            encoded = self.made.get(part) or self._encoded(part, values)
        if any(same):
            payloads = zip(same, encoded["payloads"], strict=True)
            encoded = {**encoded, "payloads": [SAME if is_same else one for is_same, one in payloads]}
        return encoded

    def _encoded(self, part: Slice, values: Weights) -> EncodedUpdate:
        assert self.codec is not None
        places = [i for i, _, _ in overlapped(self.weights, part)]
        sizes, exact = [self.weights[i].nbytes for i in places], [not self.trainable[i] for i in places]
        return encode_parts(self.codec, values, sizes, exact, [self.peaks[i] for i in places] if self.peaks else ())

    async def wait_for(self, part: Slice) -> None:
        """Wait until a slice is there."""
        if (
            part in self.ready
        ):  # nearly always: to look through all pieces for each was a third of what an exchange computes
            await self.ready[part].wait()
            return
        for (begin, end), event in self.ready.items():
            if max(begin, part[0]) < min(end, part[1]):
                await event.wait()

    def state_of(self, part: Slice) -> State:
        """The state of a slice, as views.

        Raises:
            AppMissing: It is not here.
        """
        for (begin, end), groups in self.state:
            if begin <= part[0] and part[1] <= end:
                return [take(group, moved(part, begin)) for group in groups]
        raise AppMissing("the outer optimizer's state of this slice is not here")


class Unfit(Exception):
    """The next weights cannot be used, though the updates could.

    Args:
        fault: Why.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


async def told(me: int, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
    """Do something together with others, and say what was in the way.

    Args:
        me: Number of this worker.
        work: What is done.
    """
    try:
        await work
    except Unreached as error:
        return {"me": me, "peer": error.worker, "why": error.why, "link": error.link}
    except BadUpdate as error:
        return {"bad": str(error)}
    except Unfit as error:
        return {"weights": dataclasses.asdict(error.fault)}
    return {}


def codec_of(text: str) -> Codec | None:
    """The codec of weights; None where they travel as they are."""
    return None if text == "float32" else CODEC.read(text)


def write(worker: int, arrays: Weights, part: Slice, values: Any, before: Generation | None = None) -> None:
    """Write what a worker sent.

    Args:
        worker: Its number.
        arrays: Where to.
        part: Which slice it is.
        values: What it sent.
        before: The weights that it was told are here.

    Raises:
        Unreached: It does not fit.
    """
    try:
        if isinstance(values, dict):
            encoded = cast(EncodedUpdate, values)
            values = decode_slice(encoded, arrays, part)
            same = ["same" in payload for payload in encoded["payloads"]]
            if any(same) and before is None:
                raise ConfigError("it is as it was in weights that it was not told of")
            if before is not None:
                olds = take(before.weights, part)
                values = [old if is_same else new for is_same, new, old in zip(same, values, olds, strict=True)]
        put(arrays, part, values)
    except (ConfigError, TypeError) as error:
        raise Unreached(worker, f"it sent what does not fit: {error}") from error


def _is_same(new: np.ndarray[Any, Any], old: np.ndarray[Any, Any]) -> bool:
    """Whether two slices of a tensor have the same bits; of what is trained the first values say that they have not."""
    if new is old:
        return True
    new, old = (np.ascontiguousarray(one).view(np.uint8) for one in (new, old))
    return bool((new[:GLANCE] == old[:GLANCE]).all() and (new == old).all())


def moved(part: Slice, begin: int) -> Slice:
    """A slice as it lies in one that begins somewhere."""
    return part[0] - begin, part[1] - begin


def size_of(weights: Weights) -> int:
    """How many values there are."""
    return sum(w.size for w in weights)
