"""The events that a daemon reports to the master that has its worker. Pure.

An event travels as an object of one of these classes, with the name that ``NAMES`` gives its class. Masters ignore
events that they do not know.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlf.worker.card_watch import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorExited:
    """The executor's process has ended.

    Args:
        text: How it ended, such as ``"was ended by SIGKILL"``.
        hint: Advice; empty without any.
        pid: Its process id; None if it could not be started.
        exit_code: Its exit code; None if a signal has ended it, or if the code is unknown.
        signal: Name of the signal that has ended it; None without one.
        stderr_tail: The last lines that it wrote.
        begun: The highest id of the requests that it has begun to run in turn.
        method: The method that it ran; empty if it ran none.
        beside: The highest id of the requests that it has begun to run beside others.
        gave_up: Whether the daemon ended it after a ``cancel``.
        state: The state of the executor now; see ``ExecutorProcess``.
    """

    text: str
    hint: str = ""
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    stderr_tail: str = ""
    begun: int = 0
    method: str = ""
    beside: int = 0
    gave_up: bool = False
    state: str = "starting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedBy:
    """The worker ends now.

    Args:
        by: The person, signal or process that has ended it.
        hint: Advice.
        lost_card: How a card of the worker was lost, if it ends for this reason; else empty.
    """

    by: str
    hint: str = "ask that user, and start the worker again"
    lost_card: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The worker will end soon.

    Args:
        by: The person or signal that ends it.
        within_s: Seconds that are left.
    """

    by: str
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """Another master has taken the worker over.

    Args:
        by: Name of that master, for people.
        since: Time of day.
        epoch: Epoch of its lease.
    """

    by: str
    since: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The executor asks for code of the master, such as a module to import.

    Args:
        id: Number of the question, for the answer.
        kind: The kind of code; see ``Sources.give``.
        name: Full name of the module.
        file: Name of the file; empty if it is unknown.
    """

    id: int
    kind: str
    name: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """User code has written lines.

    Args:
        streams: File descriptor of the stream of each line. Two lists travel a hundred times faster than a list of pairs.
        texts: The lines, in their order.
        dropped: Lines before these that are missing.
    """

    streams: list[int]
    texts: list[str]
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Native code and the daemon have written lines.

    Args:
        lines: The lines.
        left_out: Bytes before these that are missing.
    """

    lines: list[str]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsRead:
    """The daemon has read the state of its cards.

    Args:
        cards: The newest reading of each card.
    """

    cards: list[Reading]


DaemonEvent = ExecutorExited | StoppedBy | Leaving | LeaseLost | Wanted | Wrote | Logged | CardsRead
NAMES: dict[type[DaemonEvent], str] = {
    ExecutorExited: "executor_exited",
    StoppedBy: "stopped_by",
    Leaving: "leaving",
    LeaseLost: "lease_lost",
    Wanted: "wanted",
    Wrote: "wrote",
    Logged: "logged",
    CardsRead: "cards",
}
"""The name of each kind of event in its frame."""
KINDS = {name: kind for kind, name in NAMES.items()}
