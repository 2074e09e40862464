"""A part of a model at work: its passes over the micro-batches of a batch, and its steps. Runs in the executor.

A stage receives from an inbox and sends through a function, so it does not know how arrays travel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

import numpy as np

from ddlf.algorithms.pipeline import passes, sizes
from ddlf.data.trees import tree_map
from ddlf.training.exchanges.split.inbox import ACTIVATION, GRADIENT, READY, SHARED, SQUARES, VALUE, Inbox, Key
from ddlf.training.exchanges.split.part import ModelPart
from ddlf.training.exchanges.split.plan import Plan

Send = Callable[[int, Key, Any], None]
"""Sends an array to the part with a number, under a key. Does not wait for the other part."""


class Stage:
    """The work of one part in an attempt at a round.

    Args:
        plan: How the model is cut.
        part: The part.
        inbox: Receives arrays of other parts. Its attempt has begun.
        send: Sends arrays to other parts.
        clip: Largest norm of the gradients of all parts together; None for any.

    Attributes:
        idle_s: Seconds of waiting for other parts.
    """

    def __init__(self, plan: Plan, part: ModelPart, inbox: Inbox, send: Send, clip: float | None = None) -> None:
        self._plan, self._part, self._inbox, self._send, self._clip = plan, part, inbox, send, clip
        self._weights = plan.graph.model.weights
        self._base = part.replica * plan.parts_of_replica  # number of the first part of the replica
        self._step = 0
        self.idle_s = 0.0

    def train(self, batch: tuple[Any, ...], samples: int, seed: tuple[int, ...], total: int = 0) -> None:
        """Make all passes of the part over a batch, then one step of the optimizer.

        Args:
            batch: The batch as ``fit`` takes it; empty if the part reads no data.
            samples: Number of samples in it.
            seed: Seed of the random numbers in the batch.
            total: Number of samples in the batches of all replicas; 0 if there is only one.
        """
        plan, part, total = self._plan, self._part, total or samples
        counts = sizes(samples, plan.micro_batches) if samples else []
        ends = np.cumsum(counts).tolist()
        data = part.data(batch) if part.reads else ()
        activations: dict[int, list[Any]] = {}
        for forward, number in passes(plan.stage(part.number), plan.stages, len(counts)):
            count, rows = counts[number], slice(ends[number] - counts[number], ends[number])
            if forward:
                activations[number] = self._forward(number, count, tree_map(itemgetter(rows), data), (*seed, number))
            else:
                self._backward(number, count, activations.pop(number), count / total)
        self._make_step()
        if plan.replicas > 1:
            self._average_moving(samples / total)
        self._step += 1
        self._inbox.stepped()

    def evaluate(self, batch: tuple[Any, ...], samples: int, *, last: bool) -> None:
        """Make the forward pass of the part over a batch of an evaluation.

        Args:
            batch: The batch as ``evaluate`` takes it; empty if the part reads no data.
            samples: Number of samples in it.
            last: Whether it is the last batch.
        """
        part, step, values = self._part, self._step, self._plan.program.values
        data = part.data(batch) if part.reads else ()
        tensors: dict[int, Any] = {}
        for segment in part.segments:
            for number in segment.receives:
                tensors[number] = self._take(ACTIVATION, 0, number, self._base + values[number].part, samples)
            outputs = part.evaluate(
                segment, [tensors[number] for number in segment.takes], part.data_of(segment, data), samples
            )
            for number, value in zip(segment.gives, outputs, strict=True):
                tensors[number] = value
                for receiver in values[number].receivers:
                    self._send(self._base + receiver, Key(ACTIVATION, step, 0, number, part.number), value)
        receivers = {
            self._base + to for segment in part.segments for number in segment.gives for to in values[number].receivers
        }
        senders = {self._base + values[number].part for segment in part.segments for number in segment.receives}
        for receiver in sorted(receivers) if step else ():
            # Wait until it has finished the batch before this one, so that it never has more than two.
            self._inbox.take(Key(READY, step, 0, 0, receiver), (0,), "uint8", "the model")
        self._step += 1
        self._inbox.stepped()
        for sender in sorted(senders) if not last else ():
            self._send(sender, Key(READY, step + 1, 0, 0, part.number), np.zeros(0, np.uint8))

    def _forward(self, number: int, count: int, data: tuple[Any, ...], seed: tuple[int, ...]) -> list[Any]:
        """Compute the forward pass of all segments over a micro-batch. Return what their backward passes need."""
        part, activations = self._part, []
        tensors: dict[int, Any] = {}  # the values of this micro-batch that are here
        for segment in part.segments:
            for value_number in segment.receives:
                tensors[value_number] = self._take(
                    ACTIVATION, number, value_number, self._base + self._plan.program.values[value_number].part, count
                )
            inputs = [tensors[value_number] for value_number in segment.takes]
            outputs, segment_activations = part.forward(segment, inputs, part.data_of(segment, data), count, seed)
            activations.append(segment_activations)
            for value_number, value in zip(segment.gives, outputs, strict=True):
                tensors[value_number] = value
                for receiver in self._plan.program.values[value_number].receivers:
                    self._send(
                        self._base + receiver, Key(ACTIVATION, self._step, number, value_number, part.number), value
                    )
        return activations

    def _backward(self, number: int, count: int, activations: list[Any], share: float) -> None:
        """Compute the backward pass of all segments over a micro-batch, the last one first."""
        part, values = self._part, self._plan.program.values
        gradient_sums: dict[int, Any] = {}  # the sums of the gradients from segments of this part
        for segment in reversed(part.segments):
            gradients = [
                self._gradient(number, count, value_number, gradient_sums.pop(value_number, None))
                for value_number in segment.gives
            ]
            input_gradients = part.backward(segment, activations.pop(), gradients, share)
            for value_number, value in zip(
                (value_number for value_number in segment.takes if values[value_number].differentiable),
                input_gradients,
                strict=True,
            ):
                gradient_sums[value_number] = (
                    gradient_sums[value_number] + value if value_number in gradient_sums else value
                )
            for value_number in segment.receives:
                if values[value_number].differentiable:
                    self._send(
                        self._base + values[value_number].part,
                        Key(GRADIENT, self._step, number, value_number, part.number),
                        gradient_sums.pop(value_number),
                    )

    def _make_step(self) -> None:
        """Make one step of the optimizer, with the gradients of other parts where these count, too."""
        part, step = self._part, self._step
        model_part, number = self._plan.parts[part.number], part.number
        borrows = [(index, owner) for index, owner in model_part.borrows if index in part.borrowed]
        lends = [(index, users) for index, users in model_part.lends if part.trains(index)]
        for index, owner in borrows:
            self._send(owner, Key(SHARED, step, 0, index, number), part.shared(index))
        for index, users in lends:
            for user in users:
                part.add(index, self._take_weight(Key(SHARED, step, 0, index, user)))
        part.step(1.0 if self._clip is None else self._scale(self._clip))
        for index, users in lends:
            for user in users:
                self._send(user, Key(VALUE, step, 0, index, number), part.value(index))
        for index, owner in borrows:
            self._weights[index].assign(self._take_weight(Key(VALUE, step, 0, index, owner)))

    def _average_moving(self, share: float) -> None:
        """Set weights that change without training to the mean of all replicas, weighted by samples.

        Args:
            share: This replica's part of the samples.
        """
        part, step, plan = self._part, self._step, self._plan
        model_part, number, count = plan.parts[part.number], part.number, plan.parts_of_replica
        borrows = [(index, owner) for index, owner in model_part.borrows if index in part.moving]
        for index, owner in borrows:
            if owner % count == number % count:
                mean = part.value(index) * np.float32(share)
                self._send(owner, Key(SHARED, step, 0, index, number), mean)
        for index, users in model_part.lends:
            if index in part.moving:
                mean = part.value(index) * np.float32(share)
                for user in users:
                    if user % count == number:
                        mean = mean + self._take_weight(Key(SHARED, step, 0, index, user))
                self._weights[index].assign(mean)
                for user in users:
                    self._send(user, Key(VALUE, step, 0, index, number), mean)
        for index, owner in borrows:
            self._weights[index].assign(self._take_weight(Key(VALUE, step, 0, index, owner)))

    def _scale(self, most: float) -> float:
        """Return the factor of all gradients that limits their norm over all parts to ``global_clipnorm``.

        Each weight's squares are one number, and their sum is exact, so it does not depend on the cut.
        """
        part, step = self._part, self._step
        if not self._plan.parts[part.number].weights:
            return 1.0  # it makes no step
        other_parts = [other for other in self._plan.parts if other.number != part.number and other.weights]
        own_squares = part.squares()
        for other in other_parts:
            self._send(other.number, Key(SQUARES, step, 0, 0, part.number), own_squares)
        other_squares = [
            self._inbox.take(Key(SQUARES, step, 0, 0, other.number), (None,), "float64", "the model")
            for other in other_parts
        ]
        norm = math.sqrt(math.fsum(value for squares in (own_squares, *other_squares) for value in squares.tolist()))
        return most / norm if norm > most else 1.0 if norm <= most else math.nan

    def _take_weight(self, key: Key) -> Any:
        weight = self._weights[key.number]
        return self._inbox.take(key, tuple(weight.shape), str(weight.dtype), weight.path)

    def _gradient(self, number: int, count: int, value_number: int, own_sum: Any) -> Any:
        """Return the gradient of a value that this part has made: the sum over all that use it. None if it has none.

        Args:
            number: Number of the micro-batch.
            count: Number of its samples.
            value_number: Number of the value.
            own_sum: The sum of the gradients from later segments of this part; None if they do not use it.
        """
        value = self._plan.program.values[value_number]
        if not value.differentiable:
            return None
        gradients = [
            self._take(GRADIENT, number, value_number, self._base + receiver, count) for receiver in value.receivers
        ]
        if own_sum is not None:
            gradients.insert(0, own_sum)
        return sum(gradients[1:], gradients[0])

    def _take(self, kind: str, number: int, value_number: int, sender: int, count: int) -> Any:
        value, begin = self._plan.program.values[value_number], time.perf_counter()
        key = Key(kind, self._step, number, value_number, sender)
        array = self._inbox.take(key, (count, *value.shape), value.dtype, value.layer)
        self.idle_s += time.perf_counter() - begin
        return array


def expected(plan: Plan, number: int) -> Callable[[Key], bool]:
    """Return the function that says whether a part receives an array with a key."""
    model_part, values = plan.parts[number], plan.program.values
    borrows, lends = dict(model_part.borrows), dict(model_part.lends)
    base, own_number = plan.replica(number) * plan.parts_of_replica, number % plan.parts_of_replica

    def senders(key: Key) -> Collection[int]:
        """Return the numbers of the parts that send an array of this kind and number to this part."""
        if key.kind in (ACTIVATION, GRADIENT):
            value = values[key.number] if 0 <= key.number < len(values) else None
            if value is None:
                return ()
            if key.kind == ACTIVATION:
                return (base + value.part,) if own_number in value.receivers else ()
            return (
                [base + user for user in value.receivers] if value.part == own_number and value.differentiable else ()
            )
        if key.kind == SHARED:
            return lends.get(key.number, ())
        if key.kind == VALUE:
            return (borrows[key.number],) if key.number in borrows else ()
        return {*range(len(plan.parts))} - {number} if key.kind in (SQUARES, READY) else ()

    def expects(key: Key) -> bool:
        most = plan.micro_batches if key.kind in (ACTIVATION, GRADIENT) else 1
        return 0 <= key.micro_batch < most and key.sender in senders(key)

    return expects
