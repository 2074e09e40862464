"""Every error that DDLF raises, in one tree. Runs everywhere; imports only light modules.

::

    DDLFError
    |-- ConfigError (ValueError)                an argument, an option or the configuration file is invalid
    |-- NotationError (ValueError)              the text of a model has a mistake
    |-- AppError (TypeError)                    the user's app lacks a required part
    |-- ListenError (OSError)                   a worker cannot listen
    |-- ConnectError (ConnectionError)          a worker cannot be reached
    |-- AuthError (PermissionError)             the two sides have different tokens
    |-- VersionError (ConnectionError)          the two sides have incompatible versions
    |-- ProtocolError (ConnectionError)         the other side sent invalid bytes
    |-- FrameTooLarge (ValueError)              a message exceeds the receiver's limit
    |-- NotPicklable (TypeError)                an object cannot be sent
    |-- ResultNotData (TypeError)               a result is not plain data
    |-- RemoteError (and the raised class)      a method raised on a worker
    |-- RequestCancelled                        a request was cancelled on the worker
    |-- RequestFailed                           a request ended without a result, for a reason outside its method
    |   |-- WorkerLost (ConnectionError)        the connection ended first
    |   |-- ExecutorCrashed (RuntimeError)      the process that ran it ended
    |   |-- RequestTimeout (TimeoutError)       its time limit was over
    |   `-- LeaseError (PermissionError)        another master has the worker or the folder
    |-- AppMissing (LookupError)                a worker does not host a role of this run
    |-- BadUpdate (ValueError)                  an update cannot be merged
    |-- BudgetSpent                             a release would exceed the privacy budget
    |-- OutOfMemory (MemoryError)               a batch does not fit into the memory of a card or machine
    |-- ClusterTooSmall (ConnectionError)       too few workers remain
    |-- DatasetError (ValueError)               a data set cannot be used
    |   |-- DatasetDamaged                      a partition file differs from the manifest
    |   `-- DatasetMismatch                     two nodes have different data
    `-- CheckpointError (OSError)               a checkpoint cannot be used
        |-- CheckpointCorrupt (ValueError)      its content has changed
        `-- CheckpointMismatch (ValueError)     it belongs to another run

Each class also derives from the builtin in brackets, which a caller would catch. A class exists only if some caller
handles it differently. The text of an error says what happened, where, and what to do next (``hint``). The facts are
attributes. A class declares them with their defaults, and its constructor takes them by name. ``exit_code`` is the exit
code of the command line.
"""

from __future__ import annotations

from ddlf.errors.tracebacks import DDLFError as DDLFError
from ddlf.errors.tracebacks import RemoteError as RemoteError


class ConfigError(DDLFError, ValueError):
    """An argument, an option or the configuration file has an invalid value.

    What to do:
        Change the value that the text names; the text has the valid values. ``ddlf config show app.py --origin`` shows
        where each setting comes from.
    """

    exit_code = 2


class NotationError(DDLFError, ValueError):
    """The text of a model has a mistake.

    What to do:
        Correct each line that the text names. ``ddlf model check`` reports whether the model is valid.

    Attributes:
        problems: Line, column and sentence of each mistake, in the order of the text. Lines and columns count from 1.
    """

    exit_code = 2
    problems: tuple[tuple[int, int, str], ...] = ()


class AppError(DDLFError, TypeError):
    """The user's app lacks a required part.

    What to do:
        Add the part that the text names to the app's class.
    """

    exit_code = 2


class AppMissing(DDLFError, LookupError):
    """A worker no longer hosts a role of this run, because its executor was restarted or another run replaced it.

    What to do:
        Usually nothing: a run sends its app to the worker again. If the error ends the run, ``ddlf status`` shows who
        else uses the worker.
    """


class ListenError(DDLFError, OSError):
    """A worker cannot listen on its address.

    What to do:
        Choose another port with ``--port``, or end the program that uses the port (``ss -ltnp`` shows it). A host must
        be an address of this machine.
    """

    exit_code = 3


class ConnectError(DDLFError, ConnectionError):
    """One or more workers cannot be reached.

    What to do:
        Start the workers that the text names (``ddlf-worker --port 9000`` on each machine). If they are running, check
        addresses and firewalls. ``min_workers`` starts without missing workers.
    """

    exit_code = 3


class AuthError(DDLFError, PermissionError):
    """The two sides have different tokens, or a token cannot be used.

    What to do:
        Copy the token of one side to the other (``ddlf token new``, ``ddlf token show``). Restart the workers after you
        have changed their token.
    """

    exit_code = 4


class VersionError(DDLFError, ConnectionError):
    """The two sides use different protocol versions, or Python versions that cannot exchange code.

    What to do:
        Install the same version of DDLF, and the same minor version of Python, on both sides.
    """

    exit_code = 4


class ProtocolError(DDLFError, ConnectionError):
    """The other side sent invalid bytes. The connection is closed.

    What to do:
        Check which program listens on that port. If it is a worker, use the same version of DDLF on both sides.
    """


class FrameTooLarge(DDLFError, ValueError):
    """A message exceeds the receiver's limit, so it was not sent.

    What to do:
        Send less data at once, or let the workers load it themselves: ``load_dataset`` can run on workers.
    """


class ClusterTooSmall(DDLFError, ConnectionError):
    """Too few workers remain to continue the training.

    What to do:
        Find out why the workers were lost; their terminals show it. With checkpoints, ``--resume auto`` continues the
        run. ``wait_for_workers_s`` waits longer for workers to return.
    """

    exit_code = 5


class RequestFailed(DDLFError):
    """A request ended without a result, for a reason outside its method.

    What to do:
        Call again if ``may_have_run`` is False, or if running twice is harmless. ``options(idempotent=True)`` repeats
        such calls automatically.

    Attributes:
        may_have_run: Whether the request may have started on the worker.
        attempts: Number of attempts. Only idempotent requests are repeated.
    """

    may_have_run: bool = True
    attempts: int = 1


class WorkerLost(RequestFailed, ConnectionError):
    """The connection to a worker ended before the request did.

    What to do:
        Check the worker's terminal and the network. A training continues without the lost worker. For other calls see
        ``RequestFailed``.

    Attributes:
        last_seen_s: Seconds between the worker's last sign of life and this error; None if there was no sign of life.
        signal: Name of the signal that ended the worker's process, such as ``"SIGKILL"``; None if unknown.
        cause: Why its launcher or its engine ended it, such as ``"node lost"``; None if unknown.
        output_tail: The last lines that the worker has written, if it crashed.
    """

    exit_code = 5
    last_seen_s: float | None = None
    signal: str | None = None
    cause: str | None = None
    output_tail: str = ""

    def _details(self) -> str:
        return f"\nits last output:\n{self.output_tail}" if self.output_tail else ""


class ExecutorCrashed(RequestFailed, RuntimeError):
    """The process that ran the request ended. The worker's daemon has started a new one. Waiting requests have not run.

    What to do:
        SIGKILL usually means that the machine ran out of memory: use less of it, or fewer workers on that machine.
        Otherwise a native library failed; the last lines of its output tell more. For the call see ``RequestFailed``.

    Attributes:
        exit_code_of_process: Exit code; None if a signal ended the process.
        signal: Name of that signal, such as ``"SIGSEGV"``, or None.
        stderr_tail: The last lines that the process wrote to its standard error.
        pid: Process id, if the worker reports it.
        gave_up: Whether the daemon ended the process because a cancelled request did not end.
        begun: The highest number of a request that may have begun in the process.
    """

    exit_code = 5
    exit_code_of_process: int | None = None
    signal: str | None = None
    stderr_tail: str = ""
    pid: int | None = None
    gave_up: bool = False
    begun: int = 2**64

    def _details(self) -> str:
        return f"\nits last output:\n{self.stderr_tail}" if self.stderr_tail else ""


class RequestTimeout(RequestFailed, TimeoutError):
    """A request did not end within its time limit.

    What to do:
        ``ddlf status`` shows what the worker does. Allow more time with ``options(timeout_s=...)``.
    """

    exit_code = 6


class LeaseError(RequestFailed, PermissionError):
    """Another master has the lease of a worker or of a checkpoint folder.

    What to do:
        Wait until the other master has finished (``--wait``), ask its user (the text has the name), or take the lease
        with ``--takeover``.
    """

    exit_code = 3
    may_have_run = False


class RequestCancelled(DDLFError):
    """The request was cancelled while it ran on the worker.

    What to do:
        Nothing, because somebody cancelled it on purpose.
    """


class NotPicklable(DDLFError, TypeError):
    """A function or an argument contains an object that cannot be sent to another process.

    What to do:
        Create files, locks, connections and sessions inside the function, on the worker, instead of sending them.
    """


class ResultNotData(DDLFError, TypeError):
    """A worker's result is not plain data, and the master does not unpickle results by default.

    What to do:
        Return numbers, text, containers, arrays or dataclasses. If you trust the workers, set ``pickle_results=True``
        (``--pickle-results``).
    """


class DatasetError(DDLFError, ValueError):
    """A data set cannot be found, read or used.

    What to do:
        Put the file where the text says, or set ``DDLF_DATA`` to its folder. A damaged file is removed and loaded again.
    """

    exit_code = 7


class DatasetDamaged(DatasetError):
    """A partition file is missing or differs from the manifest.

    What to do:
        Restore the file from a copy, or split the data set again. To train without it, set ``on_bad="skip"``.
    """


class DatasetMismatch(DatasetError):
    """Two nodes have different data under the same name.

    What to do:
        Give every machine the same files, and load them without random shuffling.
    """


class CheckpointError(DDLFError, OSError):
    """A checkpoint cannot be written, found, read or used.

    What to do:
        Repair what the text names: for example free disk space, or write permission for the folder.

    Attributes:
        errno: Error number of the operating system, such as ``errno.ENOSPC``; None if there is none.
    """

    exit_code = 7


class CheckpointCorrupt(CheckpointError, ValueError):
    """The content of a checkpoint has changed since it was written.

    What to do:
        Continue from an earlier checkpoint (``--resume DIR/round-000011``), or restore the file from a copy.

    Attributes:
        file: The damaged file, or the folder if the checkpoint as a whole is wrong.
        expected: The expected content, such as ``"SHA-256 9f86..."`` or ``"4096 bytes"``.
        got: The actual content.
    """

    file: str = ""
    expected: str = ""
    got: str = ""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is intact, but belongs to another model, other data or other settings.

    What to do:
        Use the settings, model and data that the text names, or start a new run in another folder.
    """


class BadUpdate(DDLFError, ValueError):
    """A worker's update cannot be merged. The weights stay as they were before the round.

    What to do:
        If it contains NaN or infinity, train with smaller steps. If only one worker sends such updates,
        ``update_policy="reject"`` continues without them.

    Attributes:
        tensor: Name of the tensor, such as ``"dense/kernel"`` or ``"tensor 3"``; empty for the update as a whole.
        count: Number of invalid values in that tensor.
    """

    tensor: str = ""
    count: int = 0


class BudgetSpent(DDLFError):
    """The next release of a run would exceed its ``privacy_budget``. It has not left.

    What to do:
        Use the model of the last release. A run that is resumed needs a larger budget.
    """

    exit_code = 2


class OutOfMemory(DDLFError, MemoryError):
    """A batch does not fit into the memory of a card or machine.

    What to do:
        Set ``batch_size`` to the largest batch that fitted, which the text names, or to less. ``mixed_bfloat16`` halves the
        memory of a batch. On a shared card, raise ``--gpu-memory``.

    Attributes:
        batch_size: Samples in the batch that did not fit; 0 if it is unknown.
        fitted: Samples in the largest batch that fitted; 0 if none did, or if it is unknown.
        card: The card and its limit, such as ``"0 (NVIDIA H200), at most 8.6 GB"``; empty on a CPU.
        peak: The largest number of bytes that arrays have taken on the card; 0 if it is unknown.
    """

    batch_size: int = 0
    fitted: int = 0
    card: str = ""
    peak: int = 0


__all__ = [name for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, DDLFError)]


def explained(name: str) -> str:
    """Return a description of an error class: when DDLF raises it, what to do, and the exit code.

    Args:
        name: Name of the class, one of ``__all__``.
    """
    import inspect

    kind = globals()[name]
    text = (inspect.getdoc(kind) or "").replace("``", "")
    above = ", ".join(base.__name__ for base in kind.__mro__[1:-2])
    return f"{name} ({above})\n\n{text}\n\nExit code of the command line: {kind.exit_code}\n"
