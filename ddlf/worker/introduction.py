"""Endpoints of workers, and the workers that each of them may call, as the master tells them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

Address = tuple[str, int, bool]
"""Host, port, and whether a user has given them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where other workers can call a worker, as its daemon reports it.

    Args:
        machine: Identifies its machine.
        port: The port that it listens on; 0 if it listens nowhere.
        advertised: Host and port that a user has given with ``--advertise``; None without them.
        addresses: The addresses that it listens on, loopback first.
        cpus: Equal for workers that share the same CPUs of a machine.
    """

    machine: str
    port: int
    advertised: tuple[str, int] | None = None
    addresses: list[str]
    cpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callee:
    """A worker that another one may call.

    Args:
        id: Its number in the run.
        name: Its name in errors.
        addresses: Where it may be reached, best first.
        shows: The pass that the caller shows.
    """

    id: int
    name: str
    addresses: list[Address]
    shows: bytes
