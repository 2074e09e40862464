"""What every error has, and the error for what was raised on a worker. Runs everywhere; ``errors`` has the tree of them."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from ddlf.errors import frames
from ddlf.errors.foreign import bare, builtin_base, known_class, qualified_name


class DDLFError(Exception):
    """The root of the tree: catch it for whatever DDLF raises.

    Args:
        message: What happened and where, without a full stop at the end.
        hint: What to do next, as an imperative clause.
        worker: The worker it happened on, as ``"worker 2 (10.0.0.7:9000)"``; empty on the master.
        facts: Those of its class, by name.

    Attributes:
        others: The errors of the other workers that failed in the same call, in worker order. This one is of the first.
        item_index: Index of the item of a map that it is of, from 0; None of what is no map's.
    """

    __module__ = "ddlf.errors"  # where the tree is, and people look for it
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
        sentence, hint, rest = parts(self)
        return (f"{sentence}; {hint}" if hint else sentence) + rest

    def _rest(self) -> str:
        """The lines below the sentence, with the break before them."""
        return ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it in a notebook: the user's own lines, then the text. Its own way shows those of every library."""
        return frames.in_text(frames.of_error(self)[0]).splitlines()

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


def parts(error: DDLFError) -> tuple[str, str, str]:
    """What the text of an error is made of.

    Returns:
        What happened and where; what to do next; the lines below, with the break before them: a worker's traceback, or the errors of several.
    """
    if error.others:
        first, _, rows = _several([error, *error.others], error._of).partition("\n")
        return first, "", f"\n{rows}"
    return _where(error), error.hint, error._rest()


def _where(error: DDLFError) -> str:
    return f"{error.worker}: {error.message}" if error.worker else error.message


def _several(errors: Sequence[Exception], of: int) -> str:
    """What failed on several workers: each text once, with the workers it came from, then each traceback once."""
    said: dict[str, list[str]] = {}
    tracebacks: dict[str, str] = {}
    for error in errors:
        worker = getattr(error, "worker", "")
        text = _alone(error)
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
    if not isinstance(error, DDLFError):
        return f"{type(error).__name__}: {error}"
    where = _where(error)
    rest = "" if isinstance(error, RemoteError) else error._rest()  # its traceback comes below
    return (f"{where}; {error.hint}" if error.hint else where) + rest


MANY = 8
"""Different texts of one error: what fails everywhere in another way each is not read to its end."""


class RemoteError(DDLFError):
    """A method raised on a worker.

    The error raised on the master is also an instance of the class that was raised on the worker, if this side knows it: a builtin
    exception, or one of a module that is imported here, as the user's script is. So ``except ValueError`` and ``except MyError`` work across
    machines. The text ends with the worker's own traceback.

    What to do:
        Mend your own line that the traceback ends with.

    Attributes:
        type: The class that was raised on the worker; None if this side does not know it.
        type_name: Qualified name, as ``"ValueError"`` or ``"my_app.BadBatch"``.
        remote_message: ``str()`` of the exception on the worker.
        remote_traceback: The worker's own traceback, with the worker's files and lines; empty when the error comes from none of the user's lines.
        attributes: What the exception had as attributes, as far as it is data. ``args`` and those whose names are free are attributes here, too.
    """

    __module__ = "ddlf.errors"

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
            name: Name of its class; nothing is imported to find it, and no code of it is run.
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

    def _rest(self) -> str:
        return f"\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""


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
            made = type(
                "RemoteError", (RemoteError, base), {"__module__": RemoteError.__module__, "_base": base, **own}
            )
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
