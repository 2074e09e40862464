"""The methods and variables that the workers of a cluster host. Runs on the master."""

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
    """The methods and variables that were given to workers.

    It has no reference to the cluster, so that Python frees an unused cluster at once.

    Attributes:
        methods: The request that added each method, by name, then by the worker's number; None stands for all others.
        variables: The value of each variable, by the same keys.
    """

    def __init__(self) -> None:
        self.methods: dict[str, dict[int | None, Any]] = {}
        self.variables: dict[str, dict[int | None, Any]] = {}

    def keep(self, what: dict[str, dict[int | None, Any]], name: str, values: dict[Any, Any]) -> None:
        """Note the values that were given under a name.

        If ``None`` is among the numbers, they replace all earlier ones. Otherwise other workers keep their values.
        """
        what[name] = values if None in values else what.get(name, {}) | values

    def forget(self, what: dict[str, dict[int | None, Any]], name: str, numbers: Iterable[int | None]) -> None:
        """Note that a name was removed from all workers, or from some."""
        if None in numbers:
            what.pop(name, None)
        elif name in what:
            what[name] |= dict.fromkeys(numbers, _GONE)

    def renewals(self, method: Callable[..., Any], workers: Sequence[ProxyWorker]) -> dict[ProxyWorker, Request]:
        """Return requests that replace a hosted function, for the workers that host another one under its name."""
        hosted = self.methods.get(method_name(method), {})
        found = {}
        for worker in workers:
            old = hosted.get(worker.id, hosted.get(None, _GONE))
            if old is not _GONE and old.args[0].function is not method:
                now = Snapshot(method)
                if old.args[0].data == now.data:
                    old.args = (now,)  # the next comparison is then an identity check
                else:
                    found[worker] = Request("add_method", now, **old.kwargs)
        return found

    def requests_for(self, number: int) -> list[Request]:
        """Return the requests that give a worker's new executor the methods and variables of the previous one.

        Methods and values are copies from the time when they were given. Later changes on the master do not count.
        """
        methods = [values.get(number, values.get(None, _GONE)) for values in self.methods.values()]
        variables = {name: values.get(number, values.get(None, _GONE)) for name, values in self.variables.items()}
        return [
            *(request for request in methods if request is not _GONE),
            *(Request("set_variable", name, value) for name, value in variables.items() if value is not _GONE),
        ]


def copied(value: Any) -> Any:
    """Return a copy of a value, or the value itself if it cannot be copied."""
    try:
        return bytes(value) if isinstance(value, memoryview) else copy.deepcopy(value)
    except Exception:  # the class's own __deepcopy__ failed, or the object cannot be copied
        return value
