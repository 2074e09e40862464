"""Every error that DDLF raises, in one tree. Runs everywhere; imports nothing of weight.

::

    DDLFError
    |-- ConfigError (ValueError)                an argument, an option or the configuration file
    |-- AppError (TypeError)                    the user's app lacks something
    |-- ListenError (OSError)                   a worker cannot listen
    |-- ConnectError (ConnectionError)          a worker cannot be reached
    |-- AuthError (PermissionError)             the two sides hold different tokens
    |-- VersionError (ConnectionError)          the two sides cannot speak or exchange code
    |-- ProtocolError (ConnectionError)         bytes that are not of the protocol
    |-- FrameTooLarge (ValueError)              a message over the receiver's limit
    |-- NotPicklable (TypeError)                what cannot be sent
    |-- ResultNotData (TypeError)               what may not come back
    |-- RemoteError (and what was raised)       a method raised on a worker
    |-- RequestCancelled                        a request was cancelled on the worker
    |-- RequestFailed                           a request ended without a result, for what happened around it
    |   |-- WorkerLost (ConnectionError)        the connection ended first
    |   |-- ExecutorCrashed (RuntimeError)      the process that ran it ended
    |   |-- RequestTimeout (TimeoutError)       its time was over
    |   `-- LeaseError (PermissionError)        somebody else has the worker, or the folder
    |-- AppMissing (LookupError)                a worker does not hold this run's app
    |-- BadUpdate (ValueError)                  what a slot sent back cannot be merged
    |-- ClusterTooSmall (ConnectionError)       too few workers are left
    |-- DatasetError (ValueError)               a data set cannot be used
    |   `-- DatasetMismatch                     two nodes hold different data
    `-- CheckpointError (OSError)               a checkpoint cannot be used
        |-- CheckpointCorrupt (ValueError)      it is not what was written
        `-- CheckpointMismatch (ValueError)     it is of another run

Each class also derives from the builtin in brackets, which a caller would catch. A class exists only where somebody acts differently on it. The
text of an error says what happened, where, and what to do next (``hint``); the facts are attributes, which a class declares with their defaults
and its constructor takes by name. ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from ddlf.foreign import bare, builtin_base, known_class, qualified_name


class DDLFError(Exception):
    """The root of the tree.

    Args:
        message: What happened and where, without a full stop at the end.
        hint: What to do next, as an imperative clause.
        worker: The worker it happened on, as ``"worker 2 (10.0.0.7:9000)"``; empty on the master.
        facts: Those of its class, by name.

    Attributes:
        others: The errors of the other workers that failed in the same call, in worker order. This one is of the first.
        item_index: Of the item of a map that it is of, from 0; None of what is no map's.
    """

    exit_code = 1
    others: Sequence[Exception] = ()
    item_index: int | None = None
    _of = 0  # workers in that call
    _base: type[Exception] | None = None

    def __init__(self, message: str, *, hint: str = "", worker: str = "", **facts: Any) -> None:
        Exception.__init__(self, message)  # not super(): the class that was raised on a worker may come next
        if unknown := [name for name in facts if not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} has no fact {unknown[0]!r}")
        self.message = message
        self.hint = hint
        self.worker = worker
        self.__dict__.update(facts)

    def __str__(self) -> str:
        return self._text() if not self.others else _several([self, *self.others], self._of)

    def _text(self) -> str:
        where = f"{self.worker}: " if self.worker else ""
        return f"{where}{self.message}; {self.hint}" if self.hint else f"{where}{self.message}"

    def join(self, others: Sequence[Exception], of: int) -> None:
        """Stand for the errors of several workers.

        Args:
            others: The other ones.
            of: How many workers were asked.
        """
        self.others, self._of = tuple(others), of
        self.exit_code = max(getattr(error, "exit_code", 1) for error in (self, *others))

    def __reduce__(self) -> Any:
        return _remake, (type(self) if self._base is None else RemoteError, self._base, self.args, self.__dict__.copy())


def _several(errors: Sequence[Exception], of: int) -> str:
    """What failed on several workers: each text once, with the workers it came from, then each traceback once."""
    said: dict[str, list[str]] = {}
    tracebacks: dict[str, str] = {}
    for error in errors:
        worker = getattr(error, "worker", "")
        text = DDLFError._text(error) if isinstance(error, RemoteError) else _alone(error)
        said.setdefault(text.removeprefix(f"{worker}: "), []).append(worker)
        if isinstance(error, RemoteError) and error.remote_traceback:
            # The same lines with another text, as of a file name that has the worker's number, are the same traceback.
            lines = error.remote_traceback.rstrip().removesuffix(error.message)
            tracebacks.setdefault(lines, error.remote_traceback.rstrip())
    rows = [f"{', '.join(filter(None, who))}: {text}".removeprefix(": ") for text, who in said.items()]
    more = [f"and {len(rows) - MANY} other texts"] if len(rows) > MANY else []
    return "\n".join(
        [f"{len(errors)} of {of} workers failed", *rows[:MANY], *more]
        + [f"\n{traceback}" for traceback in list(tracebacks.values())[:MANY]]
    )


def _alone(error: Exception) -> str:
    return error._text() if isinstance(error, DDLFError) else f"{type(error).__name__}: {error}"


MANY = 8
"""Different texts of one error: what fails everywhere in another way each is not read to its end."""


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


class ProtocolError(DDLFError, ConnectionError):
    """The other side sent bytes that are not of the protocol. The connection is closed."""


class FrameTooLarge(DDLFError, ValueError):
    """A message is over the limit of the side that would receive it. Nothing was sent."""


class ClusterTooSmall(DDLFError, ConnectionError):
    """So many workers were lost that training cannot go on."""

    exit_code = 5


class RequestFailed(DDLFError):
    """A request ended without a result and without an error of its method: for what happened around it.

    Attributes:
        may_have_run: Whether the request can have started on the worker.
        attempts: How often it was tried; only an idempotent request is tried again.
    """

    may_have_run: bool = True
    attempts: int = 1


class WorkerLost(RequestFailed, ConnectionError):
    """The connection to a worker ended before the request did.

    Attributes:
        last_seen_s: How long before this error the worker gave its last sign of life, in seconds; None if it never did.
        signal: The name of the signal that ended the worker's process, as ``"SIGKILL"``, where this machine can know it; else None.
    """

    exit_code = 5
    last_seen_s: float | None = None
    signal: str | None = None


class ExecutorCrashed(RequestFailed, RuntimeError):
    """The process that ran the request ended; the worker's daemon lives and has started a new one. What waited for its turn has not run.

    Attributes:
        exit_code_of_process: Its exit code, None when a signal ended it.
        signal: The name of that signal, as ``"SIGSEGV"``, or None.
        stderr_tail: The last lines it wrote to its standard error.
        pid: Its process id, if the worker says so.
        gave_up: Whether its daemon ended it, since a request that was cancelled did not end.
        begun: The highest number of a request that can have begun in it.
    """

    exit_code = 5
    exit_code_of_process: int | None = None
    signal: str | None = None
    stderr_tail: str = ""
    pid: int | None = None
    gave_up: bool = False
    begun: int = 2**64

    def _text(self) -> str:
        tail = f"\nits last words:\n{self.stderr_tail}" if self.stderr_tail else ""
        return super()._text() + tail


class RequestTimeout(RequestFailed, TimeoutError):
    """A request did not end within its time."""

    exit_code = 6


class LeaseError(RequestFailed, PermissionError):
    """Somebody else holds what only one may hold: a worker, or a folder of checkpoints."""

    exit_code = 3
    may_have_run = False


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

    file: str = ""
    expected: str = ""
    got: str = ""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but of another model, other data or other settings than this run."""


class BadUpdate(DDLFError, ValueError):
    """What a worker sent back from a round cannot be merged. The weights are those of before.

    Attributes:
        tensor: Which tensor, as ``"dense/kernel"`` or ``"tensor 3"``; empty when it is the update as a whole.
        count: Values of that tensor that are wrong.
    """

    tensor: str = ""
    count: int = 0


class RemoteError(DDLFError):
    """A method raised on a worker.

    The error raised on the master is also an instance of the class that was raised on the worker, if this side knows it: a builtin
    exception, or one of a module that is imported here, as the user's script is. So ``except ValueError`` and ``except MyError`` work across
    machines. The text ends with the worker's own traceback.

    Attributes:
        type: The class that was raised on the worker; None if this side does not know it.
        type_name: Its qualified name, as ``"ValueError"`` or ``"my_app.BadBatch"``.
        remote_message: ``str()`` of the exception on the worker.
        remote_traceback: The worker's own traceback, with the worker's files and lines; empty when the error comes from none of the user's lines.
        attributes: What the exception had as attributes, as far as it is data. ``args`` and those whose names are free are attributes here, too.
    """

    def __init__(self, type_name: str, remote_message: str, remote_traceback: str, *, worker: str = "") -> None:
        super().__init__(f"{type_name}: {remote_message}" if remote_message else type_name, worker=worker)
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.attributes: dict[str, Any] = {}

    @property
    def type(self) -> builtins.type[BaseException] | None:
        """See above."""
        mine = (kind for kind in builtins.type(self).__mro__ if qualified_name(kind) == self.type_name)
        return next(mine, None) or known_class(self.type_name)

    @classmethod
    def of(cls, name: str, *arguments: Any, worker: str = "") -> RemoteError:
        """The error for what was raised on a worker.

        Args:
            name: Of its class; nothing is imported to find it, and no code of it is run.
            arguments: As the constructor's, after ``type_name``.
            worker: As the constructor's.
        """
        kind: Any = known_class(name)
        error: RemoteError = bare(cls if kind is None or not issubclass(kind, Exception) else _remote(kind))
        RemoteError.__init__(error, name, *arguments, worker=worker)
        return error

    def adopt(self, attributes: dict[str, Any], args: tuple[Any, ...]) -> None:
        """Take over what the exception on the worker had."""
        self.attributes = attributes
        for name, value in attributes.items():
            # Into the object itself: a property of the class would be code.
            if not hasattr(RemoteError, name) and name not in self.__dict__ and not name.startswith("__"):
                self.__dict__[name] = value
        self.args = args
        self._fill()

    def _fill(self) -> None:
        """Set what a builtin exception keeps elsewhere than in its attributes, as the numbers of an OSError."""
        error: Any = self
        with contextlib.suppress(Exception):
            builtin_base(builtins.type(self)).__init__(self, *self.args)
        if isinstance(error, OSError):
            error.errno, error.strerror, error.filename = (self.attributes.get(name) for name in OS_ERROR)

    def _text(self) -> str:
        # Not super(): a builtin in between (KeyError) may print itself in its own way.
        return f"{DDLFError._text(self)}\n\n{self.remote_traceback}".rstrip()


OWN = ("message", "hint", "worker", "type_name", "remote_message", "remote_traceback", "attributes")
OS_ERROR = ("errno", "strerror", "filename")


@functools.cache
def _remote(kind: type[Exception]) -> type[RemoteError]:
    """``RemoteError`` that is also of a class, or of the next one above it: some cannot be combined with any other one."""
    for base in kind.__mro__:
        # A group needs its members; the other two cannot leave a coroutine. What a method says of its own connections is not said of this one.
        if issubclass(base, ExceptionGroup | StopIteration | StopAsyncIteration | DDLFError):
            return RemoteError
        with contextlib.suppress(Exception):
            # A property of theirs must not stand before what is this error's own, as that of TensorFlow's errors for ``message`` would.
            own = dict.fromkeys(OWN, "")
            made = type("RemoteError", (RemoteError, base), {"__module__": __name__, "_base": base, **own})
            bare(made)
            return made
    return RemoteError


def _remake(kind: type[Any], base: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """The inverse of ``DDLFError.__reduce__``."""
    error = bare(kind if base is None else _remote(base))
    error.__dict__.update(state)
    error.args = args
    if isinstance(error, RemoteError):
        error._fill()
    return error


__all__ = [name for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, DDLFError)]
