"""Every error that DDLF raises, in one tree. Runs everywhere; imports only light modules.

::

    DDLFError
    |-- ConfigError (ValueError)                an argument, an option or the configuration file
    |-- NotationError (ValueError)              the text of a model
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
    |   |-- DatasetDamaged                      a partition file is not what the manifest says
    |   `-- DatasetMismatch                     two nodes hold different data
    `-- CheckpointError (OSError)               a checkpoint cannot be used
        |-- CheckpointCorrupt (ValueError)      it is not what was written
        `-- CheckpointMismatch (ValueError)     it is of another run

Each class also derives from the builtin in brackets, which a caller would catch. A class exists only if some caller
handles it differently. The text of an error says what happened, where, and what to do next (``hint``). The facts are
attributes. A class declares them with their defaults, and its constructor takes them by name. ``exit_code`` is the exit
code of the command line.
"""

from __future__ import annotations

from ddlf.errors.tracebacks import DDLFError as DDLFError
from ddlf.errors.tracebacks import RemoteError as RemoteError


class ConfigError(DDLFError, ValueError):
    """An argument, an option or the configuration file has a value that cannot be used.

    What to do:
        Change the value that the text names; it says what can stand there. ``ddlf config show app.py --origin`` shows where each setting comes from.
    """

    exit_code = 2


class NotationError(DDLFError, ValueError):
    """The text of a model cannot be read, or says what cannot be.

    What to do:
        Mend what each line of the text names, at its line and column; ``ddlf model check`` says whether all is well.

    Attributes:
        problems: Line and column, both from 1, and sentence of each thing that is wrong, in the order of the text.
    """

    exit_code = 2
    problems: tuple[tuple[int, int, str], ...] = ()


class AppError(DDLFError, TypeError):
    """The user's app lacks something that it must have.

    What to do:
        Write in the app's class what the text names.
    """

    exit_code = 2


class AppMissing(DDLFError, LookupError):
    """A worker does not hold what a training run gave it: its executor is a new one, or another run took its place.

    What to do:
        Nothing, mostly: a run brings its app to such a worker again. If that ends the run, see with ``ddlf status`` who else uses the worker.
    """


class ListenError(DDLFError, OSError):
    """A worker cannot listen on the address it was given.

    What to do:
        Choose another port with ``--port``, or end the program that listens there (``ss -ltnp``). A host must be an address of this machine.
    """

    exit_code = 3


class ConnectError(DDLFError, ConnectionError):
    """One or more workers could not be reached.

    What to do:
        Start the workers that the text names (``ddlf-worker --port 9000`` on each machine); if they run, look at the addresses and at
        firewalls. ``min_workers`` goes on without those that are missing.
    """

    exit_code = 3


class AuthError(DDLFError, PermissionError):
    """The two sides do not hold the same token, or a token cannot be used.

    What to do:
        Copy the token of one side to the other; ``ddlf token new`` and ``ddlf token show`` say how. Who changes a token starts the workers anew.
    """

    exit_code = 4


class VersionError(DDLFError, ConnectionError):
    """The two sides speak different versions of the protocol or run Python versions that cannot exchange code.

    What to do:
        Install the same DDLF, and the same minor version of Python, on both sides.
    """

    exit_code = 4


class ProtocolError(DDLFError, ConnectionError):
    """The other side sent bytes that are not of the protocol. The connection is closed.

    What to do:
        See what listens on that port: most likely it is no worker. If it is one, use the same version of DDLF on both sides.
    """


class FrameTooLarge(DDLFError, ValueError):
    """A message is over the limit of the side that would receive it. Nothing was sent.

    What to do:
        Send less at once, or let the workers load it: ``load_dataset`` runs there, too.
    """


class ClusterTooSmall(DDLFError, ConnectionError):
    """So many workers were lost that training cannot go on.

    What to do:
        See why the workers were lost: their terminals say so. With checkpoints ``--resume auto`` goes on; ``wait_for_workers_s`` waits longer.
    """

    exit_code = 5


class RequestFailed(DDLFError):
    """A request ended without a result and without an error of its method: for what happened around it.

    What to do:
        Call again if ``may_have_run`` is False, or if it does no harm to run it twice; ``options(idempotent=True)`` does so by itself.

    Attributes:
        may_have_run: Whether the request can have started on the worker.
        attempts: How often it was tried; only an idempotent request is tried again.
    """

    may_have_run: bool = True
    attempts: int = 1


class WorkerLost(RequestFailed, ConnectionError):
    """The connection to a worker ended before the request did.

    What to do:
        Look at the worker's terminal and at the network. Training goes on without a lost worker; for a call see ``RequestFailed``.

    Attributes:
        last_seen_s: How long before this error the worker gave its last sign of life, in seconds; None if it never did.
        signal: The name of the signal that ended the worker's process, as ``"SIGKILL"``, where this machine can know it; else None.
    """

    exit_code = 5
    last_seen_s: float | None = None
    signal: str | None = None


class ExecutorCrashed(RequestFailed, RuntimeError):
    """The process that ran the request ended; the worker's daemon lives and has started a new one. What waited for its turn has not run.

    What to do:
        With SIGKILL mostly memory was short: use less of it, or fewer workers on that machine. Else a native library failed; its last words say
        more. For a call see ``RequestFailed``.

    Attributes:
        exit_code_of_process: Exit code, None when a signal ended it.
        signal: The name of that signal, as ``"SIGSEGV"``, or None.
        stderr_tail: The last lines it wrote to its standard error.
        pid: Process id, if the worker says so.
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

    def _rest(self) -> str:
        return f"\nits last words:\n{self.stderr_tail}" if self.stderr_tail else ""


class RequestTimeout(RequestFailed, TimeoutError):
    """A request did not end within its time.

    What to do:
        See with ``ddlf status`` what the worker does; give the call more time with ``options(timeout_s=...)``.
    """

    exit_code = 6


class LeaseError(RequestFailed, PermissionError):
    """Somebody else holds what only one may hold: a worker, or a folder of checkpoints.

    What to do:
        Wait until the others are done (``--wait``), ask them (the text says who they are), or take it from them with ``--takeover``.
    """

    exit_code = 3
    may_have_run = False


class RequestCancelled(DDLFError):
    """The request was cancelled while it ran on the worker.

    What to do:
        Nothing: somebody wanted it.
    """


class NotPicklable(DDLFError, TypeError):
    """A function or an argument holds something that cannot be sent to another process.

    What to do:
        Make files, locks, connections and sessions on the worker, inside the function, instead of sending them.
    """


class ResultNotData(DDLFError, TypeError):
    """A worker's result is not plain data, and the master does not unpickle what workers send unless told to.

    What to do:
        Return numbers, text, containers, arrays or dataclasses; or trust the workers with ``pickle_results=True`` (``--pickle-results``).
    """


class DatasetError(DDLFError, ValueError):
    """A data set cannot be found, read or used.

    What to do:
        Put the file where the text says, or name the right folder in ``DDLF_DATA``; a file that is damaged is removed and loaded again.
    """

    exit_code = 7


class DatasetDamaged(DatasetError):
    """A partition file is missing, or is not what the manifest says.

    What to do:
        Bring it back from a copy, or split the data set again; to train without it, set ``on_bad="skip"``.
    """


class DatasetMismatch(DatasetError):
    """Two nodes hold different data under the same name.

    What to do:
        Give every machine the same files, and load them without shuffling by chance.
    """


class CheckpointError(DDLFError, OSError):
    """A checkpoint cannot be written, found, read or used.

    What to do:
        Do to the disk or the folder what the text says: there is no room, or you may not write there.

    Attributes:
        errno: What the operating system said, as ``errno.ENOSPC``; None when it said nothing.
    """

    exit_code = 7


class CheckpointCorrupt(CheckpointError, ValueError):
    """A checkpoint is not what was once written.

    What to do:
        Go on from one before it (``--resume DIR/round-000011``), or bring the file back from a copy.

    Attributes:
        file: The damaged file, or the folder when the checkpoint as a whole is wrong.
        expected: What should be there, as ``"SHA-256 9f86..."`` or ``"4096 bytes"``.
        got: What is there.
    """

    file: str = ""
    expected: str = ""
    got: str = ""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is whole, but of another model, other data or other settings than this run.

    What to do:
        Run with the settings, model and data that the text names, or begin anew in another folder.
    """


class BadUpdate(DDLFError, ValueError):
    """What a worker sent back from a round cannot be merged. The weights are those of before.

    What to do:
        With NaN or infinity, train with smaller steps. If one worker alone does it, ``update_policy="reject"`` goes on without it.

    Attributes:
        tensor: Which tensor, as ``"dense/kernel"`` or ``"tensor 3"``; empty when it is the update as a whole.
        count: Values of that tensor that are wrong.
    """

    tensor: str = ""
    count: int = 0


__all__ = [name for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, DDLFError)]


def explained(name: str) -> str:
    """Return a description of a class: when it is raised, what to do, and the exit code.

    Args:
        name: One of ``__all__``.
    """
    import inspect

    kind = globals()[name]
    text = (inspect.getdoc(kind) or "").replace("``", "")
    above = ", ".join(base.__name__ for base in kind.__mro__[1:-2])
    return f"{name} ({above})\n\n{text}\n\nExit code of the command line: {kind.exit_code}\n"
