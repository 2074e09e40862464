"""The hosted roles of a worker, by run and name, and the command ``call``. Runs in the executor.

A role has a model and slot states. They are freed when its run ends or another run begins.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from ddlf.errors import AppMissing, ProtocolError
from ddlf.worker.methods import Method

FREE_AFTER_S = 1.0
"""Seconds between the end of a role and the release of its memory. The release can take some tenths of a second if this
process imported Keras itself, and the next run may be about to begin.
"""


class Role(Protocol):
    """An object that takes part in a run. Its public async methods are verbs. Verbs marked ``concurrent`` do not wait
    for their turn.
    """

    async def close(self) -> None:
        """End running work and release all resources. No verb follows."""


class Hosting:
    """The roles of one worker.

    Args:
        worker: The first argument of each role's constructor.
        free: Frees reference cycles, such as a model and its layers.
        over: Called with the name of each run whose last role has ended.
    """

    def __init__(
        self,
        worker: object,
        free: Callable[[], object] = gc.collect,
        over: Callable[[str], object] = lambda run: None,
    ) -> None:
        self._worker = worker
        self._free = free
        self._over = over
        self._roles: dict[tuple[str, str], Role] = {}
        self._companions: dict[tuple[str, str], set[str]] = {}  # by role: the names of the roles that end with it
        self._closing: set[asyncio.Task[None]] = set()
        self._open = Method("open", self.open, concurrent=True, skip=0)
        self._close = Method("close", self.close, concurrent=True, skip=0)

    def find(self, *args: Any, by_peer: bool = False) -> Method:
        """Return the method for the arguments of ``call``: run, name of the role, verb, and the verb's own arguments.

        Args:
            args: Arguments of the request.
            by_peer: Whether another worker calls. It may use only verbs marked ``offered``.

        Raises:
            AppMissing: The role does not exist in this run.
            ProtocolError: The role has no such verb, or the arguments name no role and verb.
        """
        if len(args) < 3 or not all(isinstance(word, str) for word in args[:3]):
            raise ProtocolError("call takes a run, the name of a role, and a verb")
        run, name, verb = args[:3]
        if verb == "open" and not by_peer:
            return self._open
        if verb == "close" and not by_peer:
            return self._close
        role = self._roles.get((run, name))
        if role is None:
            raise AppMissing(f"it holds no {name} of this run")
        function = getattr(role, verb, None)
        if verb.startswith("_") or not inspect.iscoroutinefunction(function):
            raise ProtocolError(f"a {name} has no verb {verb!r}")
        if by_peer and not getattr(function, "offered", False):
            raise ProtocolError(f"a {name} does not offer {verb!r} to other workers")
        return Method(f"{name}.{verb}", function, concurrent=getattr(function, "concurrent", False), skip=3)

    async def open(self, run: str, name: str, verb: str, make: Callable[..., Role], *args: Any, **kwargs: Any) -> None:
        """Create and host a role. End the roles of other runs, and a role of the same name."""
        for key in [key for key in self._roles if key[0] != run or key == (run, name)]:
            if key in self._roles:  # it may have ended together with the role that made it
                self._end(key)
        self._roles[run, name] = make(self._worker, *args, **kwargs)

    async def close(self, run: str, name: str, verb: str) -> None:
        """End a role, if it is hosted."""
        if (run, name) in self._roles:
            self._end((run, name))

    def play(self, run: str, name: str, role: Role, *, of: str) -> None:
        """Host a role that another role of the run has made, until that role ends.

        Args:
            run: Name of the run.
            name: Name of the role.
            role: The role.
            of: Name of the role that has made it.
        """
        self._companions.setdefault((run, of), set()).add(name)
        self._roles[run, name] = role

    def drop(self, run: str, name: str, role: Role) -> None:
        """Stop hosting a role that another role has made, unless the name now belongs to a different role."""
        if self._roles.get((run, name)) is role:
            del self._roles[run, name]

    def close_all(self) -> None:
        """End all roles."""
        for key in list(self._roles):
            if key in self._roles:
                self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        """End a role in the background. Nobody waits for it, because its computations may take time to end."""
        run, _ = key
        task = asyncio.get_running_loop().create_task(self._end_behind(self._taken(key)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        if all(run != other for other, _ in self._roles):
            self._over(run)

    def _taken(self, key: tuple[str, str]) -> list[Role]:
        """Remove a role and the roles that it has made, and return them."""
        role = self._roles.pop(key, None)
        made = [one for name in self._companions.pop(key, ()) for one in self._taken((key[0], name))]
        return made if role is None else [role, *made]

    async def _end_behind(self, roles: list[Role]) -> None:
        for role in roles:
            await role.close()
        del role
        roles.clear()
        await asyncio.sleep(FREE_AFTER_S)
        self._free()
