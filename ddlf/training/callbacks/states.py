"""The attributes of a slot's ``worker_callbacks``, and their conversion to data."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Self

import numpy as np

from ddlf.errors import AppError, DDLFError
from ddlf.rpc.messages import dumps, loads

NOT_STATE = frozenset({"model", "_model", "params", "_params"})


def check_of_workers(callbacks: Iterable[Any]) -> None:
    """Raise an error if ``fit`` cannot call one of the app's ``worker_callbacks``.

    Raises:
        AppError: ``fit`` cannot call a callback. The error names the first one.
    """
    for callback in callbacks:
        check_is_one(callback, "worker_callbacks", hasattr(callback, "set_model"))


def check_is_one(callback: Any, where: str, can_be_called: bool) -> None:
    if isinstance(callback, type):
        raise AppError(f"{where} has the class {callback.__name__}", hint=f"write {callback.__name__}()")
    if not can_be_called:
        raise AppError(f"{where} has a {type(callback).__name__}, which is not a Keras callback")


class CallbackStates:
    """Saves and restores the attributes of callbacks that are data and have changed since this object was made.

    Numbers, text, lists, dicts, sets and arrays are data. Functions are not data: they belong to the callback's code.
    Files and other objects of one process are created again in ``on_train_begin``, which each ``fit`` calls.

    Args:
        callbacks: The callbacks in their initial state.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            self._callbacks[f"{name} {counts[name]}"] = callback
        self._first = {name: _encoded(callback) for name, callback in self._callbacks.items()}
        self._goes_on = False  # whether they have attributes from an earlier round

    @property
    def any(self) -> bool:
        """Whether the app has such callbacks."""
        return bool(self._callbacks)

    def checked(self) -> Self:
        """Return this object. Raise an error if an attribute cannot move with a slot to another worker.

        Raises:
            AppError: An attribute cannot move with a slot. The error names the first one.
        """
        for name, callback in self._callbacks.items():
            for attribute, kind in no_data(callback).items():
                raise AppError(
                    f"{name.partition(' ')[0]} in worker_callbacks keeps a {kind} in {attribute!r}, which cannot move with a slot to another worker",
                    hint="keep numbers, text, lists, dicts or arrays, and make everything else in on_train_begin",
                )
        return self

    def read(self) -> list[np.ndarray[Any, Any]]:
        """Return the changed attributes of the callbacks, as bytes in new arrays of uint8."""
        changed = {}
        for name, callback in self._callbacks.items():
            first, now = self._first[name], _encoded(callback)
            changed[name] = {
                attribute: vars(callback)[attribute]
                for attribute, (_, digest) in now.items()
                if attribute not in first or first[attribute][1] != digest
            }
        return [np.frombuffer(bytes(part), np.uint8) for part in dumps(changed)]

    def write(self, state: Sequence[Any]) -> list[str]:
        """Restore the callbacks' attributes from bytes that ``read`` has returned.

        Returns:
            Names of the callbacks that are missing here, or have another class.
        """
        values = loads([bytearray(np.asarray(part, np.uint8)) for part in state])
        for name in values.keys() & self._callbacks.keys():
            vars(self._callbacks[name]).update(copy.deepcopy(values[name]))
        return [name.partition(" ")[0] for name in values if name not in self._callbacks]

    def begin(self, state: Sequence[Any] | None) -> None:
        """Set the callbacks' attributes for a slot's round: the initial ones, or the ones after its last round."""
        self.reset()
        if state is not None:
            self.write(state)
        self._goes_on = state is not None

    def go_on(self) -> Callable[[], None]:
        """Return a function that restores the callbacks' current attributes, which ``on_train_begin`` may reset.

        The caller must call it after ``on_train_begin`` of the next ``fit``.
        """
        stored, self._goes_on = self.read() if self._goes_on else None, True

        def begun() -> None:
            if stored is not None:
                self.write(stored)

        return begun

    def reset(self) -> None:
        """Restore the initial attributes of the callbacks."""
        for name, callback in self._callbacks.items():
            first = self._first[name]
            for attribute in _encoded(callback).keys() - first.keys():
                del vars(callback)[attribute]
            vars(callback).update({attribute: _decoded(parts) for attribute, (parts, _) in first.items()})

    def go_back(self, state: Sequence[Any]) -> None:
        """Restore the callbacks' attributes of an earlier round.

        Attributes that are not data, such as a function that a callback has chosen in its first epoch, stay.
        """
        for name, callback in self._callbacks.items():
            first, now = self._first[name], _encoded(callback).keys()
            for attribute in now - first.keys():
                del vars(callback)[attribute]
            vars(callback).update({key: _decoded(parts) for key, (parts, _) in first.items() if key in now})
        self.write(state)


def _encoded(callback: Any) -> dict[str, tuple[list[bytes], bytes]]:
    """Return the attributes of a callback that are data: each one as bytes, with a hash to notice changes."""
    encoded = {}
    for attribute, value in _attributes(callback).items():
        try:
            parts = [bytes(part) for part in dumps(value)]
        except DDLFError:
            continue
        encoded[attribute] = parts, hashlib.sha256(b"".join(parts)).digest()
    return encoded


def _decoded(parts: list[bytes]) -> Any:
    return copy.deepcopy(loads([bytearray(part) for part in parts]))


def no_data(callback: Any) -> dict[str, str]:
    """Return the attributes of a callback that cannot move to another worker, and the types of their values.

    They are neither data nor code.
    """
    attributes = {name: value for name, value in _attributes(callback).items() if not callable(value)}
    encoded = _encoded(callback)
    return {
        name: type(value).__name__
        for name, value in attributes.items()
        if name not in encoded and not isinstance(value, ModuleType)
    }


def _attributes(callback: Any) -> dict[str, Any]:
    # ``min_delta`` gets its sign again when the callback finds the direction of its monitored value.
    left_out = NOT_STATE | ({"min_delta"} if hasattr(callback, "monitor_op") else set())
    return {name: value for name, value in vars(callback).items() if name not in left_out}
