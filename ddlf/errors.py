"""Every error that DDLF raises, in one tree. Runs everywhere; imports nothing.

Each class also derives from the builtin that a caller would catch. A class exists only where somebody acts differently on it. The text of an
error says what happened, where, and what to do next (``hint``); the facts are attributes. ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AppError",
    "AppMissing",
    "AuthError",
    "BadUpdate",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "ClusterTooSmall",
    "ConfigError",
    "ConnectError",
    "DDLFError",
    "DatasetError",
    "DatasetMismatch",
    "ExecutorCrashed",
    "FrameTooLarge",
    "LeaseError",
    "ListenError",
    "NotPicklable",
    "ProtocolError",
    "RemoteError",
    "RequestCancelled",
    "RequestTimeout",
    "ResultNotData",
    "SeveralErrors",
    "VersionError",
    "WorkerLost",
]


class DDLFError(Exception):
    """The root of the tree.

    Args:
        message: What happened and where, without a full stop at the end.
        hint: What to do next, as an imperative clause.
        worker: The worker it happened on, as ``"worker 2 (10.0.0.7:9000)"``; empty on the master.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", worker: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.worker = worker

    def __str__(self) -> str:
        where = f"{self.worker}: " if self.worker else ""
        return f"{where}{self.message}; {self.hint}" if self.hint else f"{where}{self.message}"


class ConfigError(DDLFError, ValueError):
    """An argument, an option or the configuration file has a value that cannot be used."""

    exit_code = 2


class AppError(DDLFError, TypeError):
    """The user's app lacks something that it must have."""

    exit_code = 2


class AppMissing(DDLFError, LookupError):
    """A worker does not hold what a training run gave it: its executor is a new one, or another run took its place."""


class ListenError(DDLFError, OSError):
    """A worker cannot listen on the address it was given."""

    exit_code = 3


class ConnectError(DDLFError, ConnectionError):
    """One or more workers could not be reached."""

    exit_code = 3


class AuthError(DDLFError, PermissionError):
    """The two sides do not hold the same token, or a token cannot be used."""

    exit_code = 4


class VersionError(DDLFError, ConnectionError):
    """The two sides speak different versions of the protocol or run Python versions that cannot exchange code."""

    exit_code = 4


class LeaseError(DDLFError, PermissionError):
    """Somebody else holds what only one may hold: a worker, or a folder of checkpoints.

    Attributes:
        may_have_run: Whether the request can have started on the worker before it changed hands.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", worker: str = "", may_have_run: bool = False) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.may_have_run = may_have_run


class ProtocolError(DDLFError, ConnectionError):
    """The other side sent bytes that are not of the protocol. The connection is closed."""


class FrameTooLarge(DDLFError, ValueError):
    """A message is over the limit of the side that would receive it. Nothing was sent."""


class WorkerLost(DDLFError, ConnectionError):
    """The connection to a worker ended before the request did.

    Attributes:
        may_have_run: Whether the request can have started on the worker.
        last_seen_s: How long before this error the worker gave its last sign of life, in seconds; None if it never did.
        attempts: How often an idempotent request was tried.
        signal: The name of the signal that ended the worker's process, as ``"SIGKILL"``, where this machine can know it; else None.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        worker: str = "",
        may_have_run: bool = True,
        last_seen_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.may_have_run = may_have_run
        self.last_seen_s = last_seen_s
        self.attempts = 1
        self.signal: str | None = None


class ClusterTooSmall(DDLFError, ConnectionError):
    """So many workers were lost that training cannot go on."""

    exit_code = 5


class ExecutorCrashed(DDLFError, RuntimeError):
    """The process that ran the request ended; the worker's daemon lives and has started a new one.

    Attributes:
        may_have_run: Whether the request can have started in it.
        attempts: How often an idempotent request was tried.
        exit_code_of_process: Its exit code, None when a signal ended it.
        signal: The name of that signal, as ``"SIGSEGV"``, or None.
        stderr_tail: The last lines it wrote to its standard error.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        worker: str = "",
        exit_code: int | None = None,
        signal: str | None = None,
        stderr_tail: str = "",
    ) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.exit_code_of_process = exit_code
        self.signal = signal
        self.stderr_tail = stderr_tail
        self.may_have_run = True
        self.attempts = 1

    def __str__(self) -> str:
        tail = f"\nits last words:\n{self.stderr_tail}" if self.stderr_tail else ""
        return super().__str__() + tail


class RequestTimeout(DDLFError, TimeoutError):
    """A request did not end within its time.

    Attributes:
        may_have_run: Whether the request can have started on the worker.
    """

    exit_code = 6

    def __init__(self, message: str, *, hint: str = "", worker: str = "", may_have_run: bool = True) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.may_have_run = may_have_run


class RequestCancelled(DDLFError):
    """The request was cancelled while it ran on the worker."""


class NotPicklable(DDLFError, TypeError):
    """A function or an argument holds something that cannot be sent to another process."""


class ResultNotData(DDLFError, TypeError):
    """A worker's result is not plain data, and the master does not unpickle what workers send unless told to."""


class DatasetError(DDLFError, ValueError):
    """A data set cannot be found, read or used."""

    exit_code = 7


class DatasetMismatch(DatasetError):
    """Two nodes hold different data under the same name."""


class CheckpointError(DDLFError, OSError):
    """A checkpoint cannot be written, found, read or used.

    Attributes:
        errno: What the operating system said, as ``errno.ENOSPC``; None when it said nothing.
    """

    exit_code = 7


class CheckpointCorrupt(CheckpointError, ValueError):
    """A checkpoint is not what was once written.

    Attributes:
        file: The damaged file, or the folder when the checkpoint as a whole is wrong.
        expected: What should be there, as ``"SHA-256 9f86..."`` or ``"4096 bytes"``.
        got: What is there.
    """

    def __init__(
        self, message: str, *, hint: str = "", worker: str = "", file: str = "", expected: str = "", got: str = ""
    ) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.file = file
        self.expected = expected
        self.got = got


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but of another model, other data or other settings than this run."""


class BadUpdate(DDLFError, ValueError):
    """What a worker sent back from a round cannot be merged. The weights are those of before.

    Attributes:
        tensor: Which tensor, as ``"dense/kernel"`` or ``"tensor 3"``; empty when it is the update as a whole.
        count: Values of that tensor that are wrong.
    """

    def __init__(self, message: str, *, hint: str = "", worker: str = "", tensor: str = "", count: int = 0) -> None:
        super().__init__(message, hint=hint, worker=worker)
        self.tensor = tensor
        self.count = count


class RemoteError(DDLFError):
    """A method raised on a worker.

    When the type is a builtin exception, the error raised on the master is also an instance of it, so that
    ``except ValueError`` works across machines. The text ends with the worker's own traceback.

    Attributes:
        type_name: Qualified name of the type raised on the worker, as ``"ValueError"`` or ``"my_app.BadBatch"``.
        remote_message: ``str()`` of the exception on the worker.
        remote_traceback: The worker's own traceback, with the worker's files and lines.
    """

    def __init__(self, type_name: str, remote_message: str, remote_traceback: str, *, worker: str = "") -> None:
        super().__init__(f"{type_name}: {remote_message}" if remote_message else type_name, worker=worker)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        # Not super(): a builtin in between (KeyError) may print itself in its own way.
        text = DDLFError.__str__(self)
        return f"{text}\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else text


class SeveralErrors(DDLFError, ExceptionGroup[Exception]):
    """More than one worker failed in one call; ``exceptions`` holds an error for each, in worker order."""

    def __new__(cls, message: str, exceptions: Sequence[Exception]) -> SeveralErrors:
        """Make the group; ExceptionGroup takes its arguments here."""
        return ExceptionGroup.__new__(cls, message, exceptions)

    def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
        # Not super(): ``message`` is read-only in an ExceptionGroup, which has set it already.
        self.hint = self.worker = ""
        self.exit_code = max(getattr(error, "exit_code", 1) for error in exceptions)

    def __str__(self) -> str:
        """The distinct texts, each once, with the workers they came from."""
        seen: dict[str, list[str]] = {}
        for error in self.exceptions:
            worker = getattr(error, "worker", "")
            text = str(error).removeprefix(f"{worker}: ")
            seen.setdefault(text, []).append(worker)
        return "\n".join([self.message, *(f"{', '.join(filter(None, who))}: {text}" for text, who in seen.items())])

    def derive(self, excs: Sequence[Any]) -> Any:
        """Keep the type when ``except*`` splits the group."""
        return SeveralErrors(self.message, excs)
