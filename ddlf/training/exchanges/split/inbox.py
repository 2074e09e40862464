"""Receives arrays of other parts for a part, such as activations and gradients. Runs in the executor.

The event loop receives, and the thread that computes takes. So a part can receive while it computes, and two parts
that send to each other never wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddlf.errors import BadUpdate, ProtocolError

ACTIVATION = "activation"
"""Kind of a tensor between calls."""
GRADIENT = "gradient"
"""Kind of the gradient of such a tensor."""
SHARED = "gradient of a shared weight"
"""Kind of the sum of a batch's gradients of a weight that another part owns."""
VALUE = "shared weight"
"""Kind of a shared weight after the step of its owner."""
SQUARES = "squares"
"""Kind of the sums of the squared gradients of each weight of a part."""
READY = "request for the next batch"
"""Kind of an empty array: the part that sends it can receive the next batch of an evaluation."""


MOST_SHOWN = 80
"""Maximum number of characters of a wrong key that an error shows."""


class Key(NamedTuple):
    """Names an array that a part receives.

    Args:
        kind: Kind of the array, such as ``ACTIVATION``.
        step: Number of the step in its attempt, from 0.
        micro_batch: Number of the micro-batch in its batch, from 0.
        number: Number of the tensor in the graph of the model, or of the weight in ``model.weights``.
        sender: Number of the part that sends it.
    """

    kind: str
    step: int
    micro_batch: int
    number: int
    sender: int

    @classmethod
    def read(cls, fields: Any) -> Key:
        """Return the key with these fields, which come from another worker.

        Raises:
            ProtocolError: They are not the fields of a key.
        """
        values = fields if isinstance(fields, list | tuple) else ()
        kinds = [str, *[int] * (len(cls._fields) - 1)]
        if [*map(type, values)] != kinds:
            raise ProtocolError(f"another worker sent an array under {str(fields)[:MOST_SHOWN]!r}, which is not a key")
        return cls(*values)

    def __str__(self) -> str:
        where = f"in step {self.step + 1}, micro-batch {self.micro_batch + 1}, from part {self.sender + 1}"
        return f"the {self.kind} {self.number} {where}"


class Stopped(Exception):
    """Error: training must end while a part waits for a tensor."""


AHEAD = 2
"""Tensors of this number of steps are accepted, from the current step on. A part steps only after all its gradients are
there, so the part before it can be at most one step ahead."""


@dataclass(slots=True)
class Inbox:
    """The tensors that a part has received and not used yet.

    Each attempt at a round has a number. Arrays of an earlier attempt are dropped. Arrays of a later attempt are kept
    until that attempt begins here.
    """

    attempt: int = 0
    _workers: Sequence[int] = ()
    _step: int = 0
    _expects: Callable[[Key], bool] = lambda key: True
    _arrays: dict[tuple[int, int | None, Key], np.ndarray[Any, Any]] = field(default_factory=dict)
    _taken_keys: set[Key] = field(default_factory=set)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    def begin(self, attempt: int, expects: Callable[[Key], bool], workers: Sequence[int]) -> None:
        """Begin an attempt at a round.

        Args:
            attempt: Its number.
            expects: Returns whether the part receives a tensor with this key.
            workers: The worker of each part.
        """
        with self._news:
            self.attempt, self._step, self._expects, self._workers = attempt, 0, expects, workers
            self._stopped = False
            self._taken_keys.clear()
            self._arrays = {entry: value for entry, value in self._arrays.items() if entry[0] >= attempt}
            for number, worker, key in list(self._arrays):
                if number == attempt and not (expects(key) and workers[key.sender] == worker):
                    del self._arrays[number, worker, key]

    def put(self, attempt: int, key: Key, value: Any, worker: int | None) -> None:
        """Receive a tensor.

        Args:
            attempt: Number of its attempt.
            key: Names it.
            value: The tensor as an array.
            worker: Number of the worker that sends it; None if no other worker does.

        Raises:
            ProtocolError: It is not expected, comes from a worker that does not have the sending part, or came before.
        """
        with self._news:
            if attempt < self.attempt:
                return
            if not isinstance(value, np.ndarray):
                raise ProtocolError(f"{key} is not an array")
            if attempt == self.attempt:
                if not self._step <= key.step < self._step + AHEAD:
                    raise ProtocolError(f"{key} came in step {self._step + 1}")
                if not self._expects(key):
                    raise ProtocolError(f"this part does not receive {key}")
                if worker != self._workers[key.sender]:
                    sender = "this machine" if worker is None else f"worker {worker}"
                    raise ProtocolError(
                        f"{key} came from {sender}, but worker {self._workers[key.sender]} has that part"
                    )
                if key in self._taken_keys:
                    raise ProtocolError(f"{key} came twice")
            if (attempt, worker, key) in self._arrays:
                raise ProtocolError(f"{key} came twice")
            self._arrays[attempt, worker, key] = value
            self._news.notify_all()

    def take(self, key: Key, shape: tuple[int | None, ...], dtype: str, layer: str) -> np.ndarray[Any, Any]:
        """Wait for a tensor, and return it.

        Args:
            key: Names the tensor.
            shape: The shape that it must have; None for any size.
            dtype: The type that it must have.
            layer: Name of the layer that computes the tensor, for errors.

        Raises:
            Stopped: Training must end.
            ProtocolError: It has another shape or type.
            BadUpdate: It contains NaN.
        """
        entry = self.attempt, self._workers[key.sender], key
        with self._news:
            self._news.wait_for(lambda: self._stopped or entry in self._arrays)
            if self._stopped:
                raise Stopped
            value = self._arrays.pop(entry)
            self._taken_keys.add(key)
        fits = len(value.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, value.shape, strict=True)
        )
        if not fits or str(value.dtype) != dtype:
            raise ProtocolError(f"{key} is {value.dtype} of shape {value.shape} instead of {dtype} of shape {shape}")
        if value.dtype.kind == "f" and np.isnan(value).any():
            content = "outputs" if key.kind == ACTIVATION else "gradients"
            raise BadUpdate(
                f"the {content} of the layer {layer!r} contain NaN in micro-batch {key.micro_batch + 1} of a batch",
                hint="lower the learning rate, or look for NaN in the data",
            )
        return value

    def stepped(self) -> None:
        """Note that the part has made a step."""
        with self._news:
            self._step += 1
            self._taken_keys = {key for key in self._taken_keys if key.step >= self._step}

    def stop(self) -> None:
        """Let a waiting ``take`` raise ``Stopped``. Any thread may call this."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
