"""What the workers of a cluster were given to keep: methods and variables. Runs on the master."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddlf.cluster.proxy import ProxyWorker
from ddlf.rpc.code import Snapshot
from ddlf.rpc.iworker import method_name
from ddlf.rpc.messages import Request

_GONE = object()


class Hosted:
    """The methods and variables that workers were given. It knows no cluster, so that one that nobody holds is gone at once.

    Attributes:
        methods: By name, then by the worker's number, or None for all others: what gave it.
        variables: Likewise the value.
    """

    def __init__(self) -> None:
        self.methods: dict[str, dict[int | None, Any]] = {}
        self.variables: dict[str, dict[int | None, Any]] = {}

    def keep(self, what: dict[str, dict[int | None, Any]], name: str, values: dict[Any, Any]) -> None:
        """Note what was given under a name: to all, if ``None`` is among the numbers; else those of other workers stay."""
        what[name] = values if None in values else what.get(name, {}) | values

    def forget(self, what: dict[str, dict[int | None, Any]], name: str, numbers: Iterable[int | None]) -> None:
        """Note that it was taken away, from all or from some."""
        if None in numbers:
            what.pop(name, None)
        elif name in what:
            what[name] |= dict.fromkeys(numbers, _GONE)

    def renewals(self, method: Callable[..., Any], workers: Sequence[ProxyWorker]) -> dict[ProxyWorker, Request]:
        """What gives a function to those of the workers that were given another one under its name."""
        hosted = self.methods.get(method_name(method), {})
        found = {}
        for worker in workers:
            old = hosted.get(worker.id, hosted.get(None, _GONE))
            if old is not _GONE and old.args[0].function is not method:
                now = Snapshot(method)
                if old.args[0].data == now.data:
                    old.args = (now,)  # so that the next comparison takes no time
                else:
                    found[worker] = Request("add_method", now, **old.kwargs)
        return found

    def requests_for(self, number: int) -> list[Request]:
        """What gives a worker's new executor what the one before had.

        Methods and values are those of the time when they were given, whatever this side has changed in them since.
        """
        methods = [values.get(number, values.get(None, _GONE)) for values in self.methods.values()]
        variables = {name: values.get(number, values.get(None, _GONE)) for name, values in self.variables.items()}
        return [
            *(request for request in methods if request is not _GONE),
            *(Request("set_variable", name, value) for name, value in variables.items() if value is not _GONE),
        ]


def copied(value: Any) -> Any:
    """A value of its own for later, if there can be one."""
    try:
        return bytes(value) if isinstance(value, memoryview) else copy.deepcopy(value)
    except Exception:  # a class's own __deepcopy__, or something that has no second one
        return value
