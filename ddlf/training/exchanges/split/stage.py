"""A part of a model at work: its passes over the micro-batches of a batch, and its steps. Runs in the executor.

A stage receives from an inbox and sends through a function, so it does not know how arrays travel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
        self._step = 0
        self.idle_s = 0.0

    def train(self, batch: tuple[Any, ...], samples: int, seed: tuple[int, ...]) -> None:
        """Make all passes of the part over a batch, then one step of the optimizer.

        Args:
            batch: The batch as ``fit`` takes it; empty if the part reads no data.
            samples: Number of samples in it.
            seed: Seed of the random numbers in the batch.
        """
        plan, part, me, step = self._plan, self._part, self._plan.parts[self._part.number], self._step
        counts = sizes(samples, plan.micro_batches)
        ends = np.cumsum(counts).tolist()
        data = part.data(batch) if part.reads else ()
        kept: dict[int, Any] = {}
        for forward, number in passes(part.number, len(plan.parts), len(counts)):
            count, rows = counts[number], slice(ends[number] - counts[number], ends[number])
            if forward:
                taken = [self._take(Key(ACTIVATION, step, number, one, sender), count) for one, sender in me.takes]
                outputs, kept[number] = part.forward(taken, tree_map(itemgetter(rows), data), count, (*seed, number))
                for (tensor, receivers), value in zip(me.gives, outputs, strict=True):
                    for receiver in receivers:
                        self._send(receiver, Key(ACTIVATION, step, number, tensor, part.number), value)
            else:
                gradients = [self._gradient(number, count, *one) for one in me.gives]
                back = part.backward(kept.pop(number), gradients, count / samples)
                senders = dict(me.takes)
                for tensor, value in zip(part.back, back, strict=True):
                    self._send(senders[tensor], Key(GRADIENT, step, number, tensor, part.number), value)
        self._make_step()
        self._step += 1
        self._inbox.stepped()

    def evaluate(self, batch: tuple[Any, ...], samples: int, *, last: bool) -> None:
        """Make the forward pass of the part over a batch of an evaluation.

        Args:
            batch: The batch as ``evaluate`` takes it; empty if the part reads no data.
            samples: Number of samples in it.
            last: Whether it is the last batch.
        """
        part, me, step = self._part, self._plan.parts[self._part.number], self._step
        taken = [self._take(Key(ACTIVATION, step, 0, one, sender), samples) for one, sender in me.takes]
        outputs = part.evaluate(taken, part.data(batch) if part.reads else (), samples)
        for (tensor, receivers), value in zip(me.gives, outputs, strict=True):
            for receiver in receivers:
                self._send(receiver, Key(ACTIVATION, step, 0, tensor, part.number), value)
        for receiver in sorted({one for _, receivers in me.gives for one in receivers}) if step else ():
            # Wait until it has finished the batch before this one, so that it never has more than two.
            self._inbox.take(Key(READY, step, 0, 0, receiver), (0,), "uint8", "the model")
        self._step += 1
        self._inbox.stepped()
        for sender in sorted({sender for _, sender in me.takes}) if not last else ():
            self._send(sender, Key(READY, step + 1, 0, 0, part.number), np.zeros(0, np.uint8))

    def _make_step(self) -> None:
        """Make one step of the optimizer, with the gradients of other parts where these count, too."""
        part, step = self._part, self._step
        me, number = self._plan.parts[part.number], part.number
        borrows = [(place, owner) for place, owner in me.borrows if place in part.borrowed]
        lends = [(place, users) for place, users in me.lends if part.trains(place)]
        for place, owner in borrows:
            self._send(owner, Key(SHARED, step, 0, place, number), part.shared(place))
        for place, users in lends:
            for user in users:
                part.add(place, self._take_weight(Key(SHARED, step, 0, place, user)))
        part.step(1.0 if self._clip is None else self._scale(self._clip))
        for place, users in lends:
            for user in users:
                self._send(user, Key(VALUE, step, 0, place, number), part.value(place))
        for place, owner in borrows:
            self._weights[place].assign(self._take_weight(Key(VALUE, step, 0, place, owner)))

    def _scale(self, most: float) -> float:
        """Return the factor of all gradients that limits their norm over all parts to ``global_clipnorm``.

        Each weight's squares are one number, and their sum is exact, so it does not depend on the cut.
        """
        part, step = self._part, self._step
        others = [one for one in self._plan.parts if one.number != part.number]
        mine = part.squares()
        for one in others:
            self._send(one.number, Key(SQUARES, step, 0, 0, part.number), mine)
        found = [
            self._inbox.take(Key(SQUARES, step, 0, 0, one.number), (None,), "float64", "the model") for one in others
        ]
        norm = math.sqrt(math.fsum(value for squares in (mine, *found) for value in squares.tolist()))
        return most / norm if norm > most else 1.0 if norm <= most else math.nan

    def _take_weight(self, key: Key) -> Any:
        weight = self._weights[key.number]
        return self._inbox.take(key, tuple(weight.shape), str(weight.dtype), weight.path)

    def _gradient(self, number: int, count: int, tensor: int, receivers: Sequence[int]) -> Any:
        """Return the gradient of a tensor that this part has sent: the sum over its receivers. None if it has none."""
        if tensor not in self._part.differentiable:
            return None
        found = [self._take(Key(GRADIENT, self._step, number, tensor, receiver), count) for receiver in receivers]
        return sum(found[1:], found[0])

    def _take(self, key: Key, count: int) -> Any:
        symbol = self._plan.graph.tensors[key.number]
        begin = time.perf_counter()
        value = self._inbox.take(
            key, (count, *symbol.shape[1:]), str(symbol.dtype), symbol._keras_history.operation.name
        )
        self.idle_s += time.perf_counter() - begin
        return value


def expected(plan: Plan, number: int) -> Callable[[Key], bool]:
    """Return the function that says whether a part receives an array with a key."""
    me = plan.parts[number]
    takes, gives, borrows, lends = dict(me.takes), dict(me.gives), dict(me.borrows), dict(me.lends)

    def expects(key: Key) -> bool:
        if not 0 <= key.micro_batch < (plan.micro_batches if key.kind in (ACTIVATION, GRADIENT) else 1):
            return False
        senders: dict[str, Any] = {
            ACTIVATION: {takes.get(key.number)},
            GRADIENT: gives.get(key.number, ()),
            SHARED: lends.get(key.number, ()),
            VALUE: {borrows.get(key.number)},
            SQUARES: {*range(len(plan.parts))} - {number},
            READY: {*range(len(plan.parts))} - {number},
        }
        return key.sender in senders.get(key.kind, ())

    return expects
