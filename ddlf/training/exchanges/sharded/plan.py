"""The plan of a merge, and the weights that workers compute by it. Runs in the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from ddlf.algorithms.codec import CODEC, Codec, peak_of
from ddlf.algorithms.encoding import SAME, EncodedUpdate, decode_update, encode_parts, encode_update
from ddlf.algorithms.flat_weights import Slice, overlapped
from ddlf.algorithms.weights import Fault, Tensor, Weights
from ddlf.errors import AppMissing, BadUpdate, ConfigError
from ddlf.training.checkpoints.slices import OUTER, WEIGHTS, Slices, assembled, part_name, slice_name
from ddlf.training.exchanges.sharded.ranges import cut_range, decode_slice, moved, size_of, write_range
from ddlf.training.messages import Message
from ddlf.training.slot.task import SlotState
from ddlf.worker.peers import Unreached

EXCHANGE = "exchange"
"""Name of the role that holds weights."""
COPIES = "copies"
"""Name of the role that returns slot states to other workers."""

GLANCE = 1 << 12
"""Number of a tensor's first bytes to compare before comparing all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPlan(Message):
    """The master's plan that tells workers how to compute the mean of one group of slot states.

    Args:
        group: The group of slot states.
        states: For each slot with a state, in slot order: slot, worker with the state (0 if ``on_master`` has it), round,
            and share.
        total: Divisor of the sum. 0 keeps the sum itself, in float64, because the number of slots is not known yet.
        on_master: Slots and states that only the master has.
    """

    group: str
    states: Sequence[tuple[int, int, int, float]]
    total: float
    on_master: Sequence[tuple[int, list[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Message):
    """The master's plan for one round: it tells workers how to compute the next weights from the slots' updates.

    Args:
        base: Generation of the weights that the slots began with.
        generation: The new generation.
        updates: For each slot, in slot order: slot, worker with its update, trained samples, and factor of the update.
        owners: Workers that step a range, in the order of the ranges.
        tensors: Numbers of the tensors to exchange; None for all. The other tensors stay as they are.
        kept: Number of arrays kept for each weight: the outer optimizer's, and the exact weight if weights travel
            through a codec.
        state: Parts of these arrays: first value, last value + 1, and the worker that has them.
        copies: Whether the owner of the next range keeps a backup of this state.
        left: Slot states to back up: slot, its round, its worker, and the worker of the backup.
        groups: Groups of slot state to back up.
        means: Means of slot states to compute.
        merge: The merge rule, as text.
        weighed: For a rule that compares whole updates: a weight for each update, then the divisor of the sum. Empty
            if the rule merges value by value.
        outer: The outer optimizer, as text.
        codec: Codec of the weights, as text.
        trainable: Whether each weight is trained.
        names: Paths of the weights.
        piece: Number of values in a piece.
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
    means: Sequence[MeanPlan]
    merge: str
    weighed: Sequence[float]
    outer: str
    codec: str
    trainable: Sequence[bool]
    names: Sequence[str]
    piece: int

    def to_message(self) -> dict[str, Any]:
        """Return the plan as a message for the network. It has the arrays themselves, not copies."""
        return Message.to_message(self) | {"means": [mean.to_message() for mean in self.means]}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the plan that a message contains."""
        return cls(**{**message, "means": [MeanPlan.from_message(mean) for mean in message["means"]]})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights(Message):
    """The weights of a task, which workers have.

    Args:
        generation: Number of the generation.
        at: Workers that have it.
        left: Workers that have the state of the slot; empty if the state is on the task's worker, or in the task.
        means: Groups of slot state whose means the workers have, each with the number of slots that it is the sum of; 0
            for a mean.
    """

    generation: int
    at: Sequence[int]
    left: Sequence[int] = ()
    means: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedWeights(Message):
    """The weights to evaluate, which workers have.

    Args:
        generation: Number of the generation.
        exact: If the weights travel through a codec, the ranges of the exact weights and their workers.
    """

    generation: int
    exact: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The failure of a worker that has not got its part of a merge from another worker.

    Args:
        worker: Number of the worker.
        other: Number of the other worker.
        reason: The error, in one line.
        link: Whether the link between the two workers failed.
    """

    worker: int
    other: int
    reason: str
    link: bool


@dataclass(frozen=True, slots=True)
class Unmergeable:
    """The failure of a merge because an update cannot be merged.

    Args:
        reason: The text of the error.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """The failure of a merge because the new weights cannot be used.

    Args:
        fault: The reason.
    """

    fault: Fault


MergeFailure = Unanswered | Unmergeable | Unusable

State = list[list[np.ndarray[Any, Any]]]
"""The outer optimizer's state of a range: for each of its arrays per weight, the range of that array over all weights.
If weights travel through a codec, the exact weights follow."""


@dataclass(slots=True)
class Generation:
    """One numbered version of the weights, and the state that belongs to it.

    Args:
        weights: One array for each of the model's weights, as slots begin with them. While the generation is computed,
            only the ready pieces are valid.
        state: Ranges of the outer optimizer's state on this worker.
        ready: An event for each piece, set when it is ready; empty if the generation arrived as a whole.
        codec: Codec of the weights; None if they travel as they are, for example after a fetch from another worker.
        trainable: Whether each weight is trained. Untrained weights are never encoded.
        encoded_pieces: Pieces that this worker has encoded.
        peaks: Largest magnitude of each exact weight, if the codec needs it.
        within: Largest magnitude of each weight in the range that this worker stepped.
        stepped: Set when ``within`` is known.
        means: Means of slot states, by group, that the slots' next rounds begin with.
    """

    weights: Weights
    state: list[tuple[Slice, State]] = field(default_factory=list)
    ready: dict[Slice, asyncio.Event] = field(default_factory=dict)
    codec: Codec | None = None
    trainable: Sequence[bool] = ()
    encoded_pieces: dict[Slice, EncodedUpdate] = field(default_factory=dict)
    peaks: Sequence[float] = ()
    within: list[float] = field(default_factory=list)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    means: dict[str, Any] = field(default_factory=dict)  # ``Mean`` of ``ddlf.training.exchanges.sharded.means``

    @classmethod
    def from_weights(cls, weights: Weights, outer: Weights, codec: str, trainable: Sequence[bool]) -> Generation:
        """Return a complete version of the weights (a generation) from weights and outer optimizer state."""
        weights, outer = ([np.asarray(array, order="C") for array in arrays] for arrays in (weights, outer))
        groups, used = [outer[i : i + len(weights)] for i in range(0, len(outer), len(weights))], codec_of(codec)
        peaks = list(map(peak_of, weights)) if used is not None and used.by_peak else []
        if used is not None:
            groups.append(weights)
            encoded, _ = encode_update(used, weights, [not is_trained for is_trained in trainable])
            weights = [np.asarray(array, order="C") for array in decode_update(encoded, weights)]
        state = [((0, size_of(weights)), groups)] if groups else []
        return cls(weights, state, codec=used, trainable=trainable, peaks=peaks)

    @classmethod
    def restored(
        cls,
        parts: Mapping[int, Mapping[str, Tensor]],
        listed: Mapping[str, Any],
        codec: str,
        trainable: Sequence[bool],
    ) -> Generation:
        """Return the version of the weights (a generation) that the slices of a checkpoint contain.

        Args:
            parts: Slices of the checkpoint, from ``Restored``.
            listed: The checkpoint's list of slices, as ``Slices.sliced``.
            codec, trainable: Arguments of ``from_weights``.
        """
        contents = ((Path(slice_name(number)), arrays) for number, arrays in sorted(parts.items()))
        groups = assembled(contents, listed, {}, Path("the checkpoint"))
        weights, state = (list(groups.get(name, {}).values()) for name in (WEIGHTS, OUTER))
        return cls.from_weights(weights, state, codec, trainable)

    def set(self, piece: Slice, values: Weights) -> None:
        """Set the new weights of one range. They are the values that all workers get after decoding."""
        if self.codec is not None:
            encoded = self.encoded_pieces[piece] = self._encoded(piece, values)
            values = decode_slice(encoded, self.weights, piece)
        write_range(self.weights, piece, values)

    def sent(self, part: Slice, previous: Generation | None = None) -> Weights | EncodedUpdate:
        """Return a range of the weights in the form that travels to another worker. The range must be ready.

        Args:
            part: The range.
            previous: Weights that the receiver has, too. Tensors that equal these do not travel.
        """
        values = cut_range(self.weights, part)
        same = [] if previous is None else list(map(_is_same, values, cut_range(previous.weights, part)))
        if self.codec is None and not any(same):
            return values
        if self.codec is None:
            encoded: EncodedUpdate = {"codec": "float32", "payloads": [{"raw": array} for array in values]}
        else:
            encoded = self.encoded_pieces.get(part) or self._encoded(part, values)
        if any(same):
            payloads = zip(same, encoded["payloads"], strict=True)
            encoded = {**encoded, "payloads": [SAME if is_same else payload for is_same, payload in payloads]}
        return encoded

    def _encoded(self, part: Slice, values: Weights) -> EncodedUpdate:
        assert self.codec is not None
        indices = [i for i, _, _ in overlapped(self.weights, part)]
        sizes, exact = [self.weights[i].nbytes for i in indices], [not self.trainable[i] for i in indices]
        return encode_parts(self.codec, values, sizes, exact, [self.peaks[i] for i in indices] if self.peaks else ())

    async def wait_for(self, part: Slice) -> None:
        """Wait until this worker has computed or received a range of the weights."""
        if (
            part in self.ready
        ):  # nearly always true: searching all pieces each time took a third of an exchange's CPU time
            await self.ready[part].wait()
            return
        for (begin, end), event in self.ready.items():
            if max(begin, part[0]) < min(end, part[1]):
                await event.wait()

    def state_of(self, part: Slice) -> State:
        """Return the outer optimizer's state for a range of the weights, without copying it.

        Raises:
            AppMissing: This worker does not have it.
        """
        for (begin, end), groups in self.state:
            if begin <= part[0] and part[1] <= end:
                return [cut_range(group, moved(part, begin)) for group in groups]
        raise AppMissing("the outer optimizer's state of this slice is not here")


class Unfit(Exception):
    """Error: the next weights cannot be used, for example because of NaN, although the updates were usable.

    Args:
        fault: The reason.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


async def failure_of(me: int, work: Coroutine[Any, Any, None]) -> MergeFailure | None:
    """Run work that needs other workers. Return its failure for the master; None on success.

    Args:
        me: Number of this worker.
        work: The coroutine to run.
    """
    try:
        await work
    except Unreached as error:
        return Unanswered(me, error.worker, error.reason, error.link)
    except BadUpdate as error:
        return Unmergeable(str(error))
    except Unfit as error:
        return Unusable(error.fault)
    return None


def codec_of(text: str) -> Codec | None:
    """Return the codec of travelling weights; None if weights travel as they are."""
    return None if text == "float32" else CODEC.read(text)


def write(worker: int, arrays: Weights, part: Slice, values: Any, previous: Generation | None = None) -> None:
    """Write values that a worker sent into a range of some arrays, after checking them.

    Args:
        worker: Number of the worker.
        arrays: Destination.
        part: Range of the values.
        values: Arrays or an encoded update.
        previous: The weights that the request named as present on this worker.

    Raises:
        Unreached: The values do not fit.
    """
    try:
        if isinstance(values, dict):
            encoded = cast(EncodedUpdate, values)
            values = decode_slice(encoded, arrays, part)
            same = ["same" in payload for payload in encoded["payloads"]]
            if any(same) and previous is None:
                raise ConfigError("it refers to weights that the request did not name")
            if previous is not None:
                olds = cut_range(previous.weights, part)
                values = [old if is_same else new for is_same, new, old in zip(same, values, olds, strict=True)]
        write_range(arrays, part, values)
    except (ConfigError, TypeError) as error:
        raise Unreached(worker, f"it sent values that do not fit: {error}") from error


def _is_same(new: np.ndarray[Any, Any], old: np.ndarray[Any, Any]) -> bool:
    """Return whether two ranges of a tensor have the same bits, so that they need not be sent.

    If a trained tensor has changed, its first values show it.
    """
    if new is old:
        return True
    new, old = (np.ascontiguousarray(array).view(np.uint8) for array in (new, old))
    return bool((new[:GLANCE] == old[:GLANCE]).all() and (new == old).all())


def slice_arrays(
    like: Sequence[Tensor],
    part: Slice,
    names: Sequence[str],
    values: Sequence[Any],
    states: Sequence[Sequence[Any]],
) -> dict[str, Tensor]:
    """Return a range of a model's values and of the outer optimizer's state as named arrays of a checkpoint slice.

    Args:
        like: Arrays with the shapes of the weights.
        part: The range.
        names: Paths of the weights.
        values: For each weight in the range, its values, flat.
        states: For each array of state, its values in the range, in the same form.
    """
    arrays = {}
    for position, (i, low, _) in enumerate(overlapped(like, part)):
        arrays[part_name(WEIGHTS, low, f"{i:04d} {names[i]}")] = values[position]
        for group, state in enumerate(states):
            arrays[part_name(OUTER, low, f"{group * len(like) + i:04d}")] = state[position]
    return arrays


def left_parts(slot: int, state: SlotState) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return a slot's state as arrays of a checkpoint slice, and the lengths of its groups."""
    arrays = {
        part_name(f"slots_{name}", 0, f"slot {slot:04d} {i:04d}"): np.asarray(array)
        for name, group in state.items()
        for i, array in enumerate(group)
        if array is not None
    }
    return arrays, {name: len(group) for name, group in state.items()}


def left_of(slot: int, lengths: Mapping[str, int], arrays: Mapping[str, Tensor]) -> SlotState:
    """Return a slot's state from the arrays that ``left_parts`` made for a checkpoint slice."""
    return {
        name: [arrays.get(part_name(f"slots_{name}", 0, f"slot {slot:04d} {i:04d}")) for i in range(length)]
        for name, length in lengths.items()
    }


def numbers_of(slices: Slices, groups: Collection[str]) -> list[int]:
    """Return the numbers, from 0, of a checkpoint's slices that contain parts of some groups of arrays."""
    return [
        number
        for number, file in slices.by_number.items()
        if any(name.partition(" ")[0] in groups for name in file.arrays)
    ]
