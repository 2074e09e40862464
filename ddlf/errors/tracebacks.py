"""The base class of all errors, the error for exceptions on a worker, and their tracebacks. Runs everywhere.

``ddlf.errors`` has the tree of classes. This file finds exception classes of user code and libraries without importing
them, creates errors without running their code, and hides the frames of DDLF and of libraries in tracebacks.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class DDLFError(Exception):
    """The root of the tree. Catch it to handle every error of DDLF.

    Args:
        message: The event and its location, without a full stop at the end.
        hint: What to do next, as an imperative clause.
        worker: The worker that caused it, such as ``"worker 2 (10.0.0.7:9000)"``; empty on the master.
        facts: Facts that its class declares, by name.

    Attributes:
        others: The errors of the other workers that failed in the same call, in worker order. This error belongs to the
            first worker.
        item_index: Index of the failed item of a map, from 0; None outside a map.
    """

    __module__ = "ddlf.errors"  # the tree is there, and users look for it there
    exit_code = 1
    others: Sequence[Exception] = ()
    item_index: int | None = None
    _of = 0  # workers in that call
    _base: type[Exception] | None = None

    def __init__(self, message: str, *, hint: str = "", worker: str = "", **facts: Any) -> None:
        Exception.__init__(self, message)  # not super(): the next class may be the one raised on the worker
        if unknown := [name for name in facts if not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} has no fact {unknown[0]!r}")
        self.message = message
        self.hint = hint
        self.worker = worker
        self.__dict__.update(facts)

    def __str__(self) -> str:
        sentence, hint, details = parts(self)
        return (f"{sentence}; {hint}" if hint else sentence) + details

    def _details(self) -> str:
        """Return the lines of the error's text below its sentence, beginning with a line break."""
        return ""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in a notebook: the user's own lines, then the text. IPython itself would
        show the lines of every library.
        """
        return hide_library_frames(format_for_user(self)[0]).splitlines()

    def join(self, other_errors: Sequence[Exception], workers: int) -> None:
        """Make this error represent the errors of several workers that failed in the same call.

        Args:
            other_errors: The errors of the other workers.
            workers: Number of all workers in the call.
        """
        self.others, self._of = tuple(other_errors), workers
        self.exit_code = max(getattr(error, "exit_code", 1) for error in (self, *other_errors))

    def __reduce__(self) -> Any:
        return _remake, (type(self) if self._base is None else RemoteError, self._base, self.args, self.__dict__.copy())


def parts(error: DDLFError) -> tuple[str, str, str]:
    """Return the parts of an error's text, so that a caller can arrange them.

    Returns:
        The event and its location; the hint; the lines below, beginning with a line break. These are a worker's
        traceback, or the errors of several workers.
    """
    if error.others:
        first, _, rows = _summary_of_failures([error, *error.others], error._of).partition("\n")
        return first, "", f"\n{rows}"
    return _where(error), error.hint, error._details()


def _where(error: DDLFError) -> str:
    return f"{error.worker}: {error.message}" if error.worker else error.message


def _summary_of_failures(errors: Sequence[Exception], workers: int) -> str:
    """Return a text about the failures of several workers.

    It has each message once, with its workers, then each traceback once.
    """
    workers_of: dict[str, list[str]] = {}
    tracebacks: dict[str, str] = {}
    for error in errors:
        worker = getattr(error, "worker", "")
        text = _sentence(error)
        workers_of.setdefault(text.removeprefix(f"{worker}: "), []).append(worker)
        if isinstance(error, RemoteError) and error.remote_traceback:
            # The same lines with another text count as the same traceback. The text may contain a file name with the
            # worker's number.
            lines = error.remote_traceback.rstrip().removesuffix(error.message)
            tracebacks.setdefault(lines, error.remote_traceback.rstrip())
    rows = [f"{', '.join(filter(None, workers))}: {text}".removeprefix(": ") for text, workers in workers_of.items()]
    omitted = [f"and {len(rows) - MANY} other texts"] if len(rows) > MANY else []
    return "\n".join(
        [f"{len(errors)} of {workers} workers failed", *rows[:MANY], *omitted]
        + [f"\n{traceback}" for traceback in list(tracebacks.values())[:MANY]]
    )


def _sentence(error: Exception) -> str:
    if not isinstance(error, DDLFError):
        return f"{type(error).__name__}: {error}"
    where = _where(error)
    details = "" if isinstance(error, RemoteError) else error._details()  # its traceback comes below
    return (f"{where}; {error.hint}" if error.hint else where) + details


MANY = 8
"""Maximum number of different texts in one error. Nobody reads a longer list."""


class RemoteError(DDLFError):
    """A method raised an exception on a worker.

    The error is also an instance of the class that was raised on the worker, if the master knows that class: a builtin
    exception, or a class of an imported module such as the user's script. ``except ValueError`` and ``except MyError``
    therefore work across machines. The text ends with the worker's own traceback.

    What to do:
        Correct your own line at the end of the traceback.

    Attributes:
        type: The class that was raised on the worker; None if the master does not know it.
        type_name: Qualified name of the class, such as ``"ValueError"`` or ``"my_app.BadBatch"``.
        remote_message: ``str()`` of the exception on the worker.
        remote_traceback: The worker's own traceback, with the worker's files and lines; empty if no line of the user's
            code raised the error.
        attributes: The attributes of the exception that are data. They are also attributes of this error, unless a name
            is taken, and so are its ``args``.
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
        """The class that was raised on the worker; None if this side does not know it."""
        bases = (kind for kind in builtins.type(self).__mro__ if qualified_name(kind) == self.type_name)
        return next(bases, None) or known_class(self.type_name)

    @classmethod
    def of(cls, name: str, *arguments: Any, worker: str = "") -> RemoteError:
        """Return the error that stands for an exception on a worker.

        Args:
            name: Name of its class. The class is found without importing a module or running its code.
            arguments: The constructor's arguments after ``type_name``.
            worker: The constructor's ``worker``.
        """
        kind: Any = known_class(name)
        error: RemoteError = bare(cls if kind is None or not issubclass(kind, Exception) else _remote(kind))
        RemoteError.__init__(error, name, *arguments, worker=worker)
        return error

    def adopt(self, attributes: dict[str, Any], args: tuple[Any, ...]) -> None:
        """Give this error the attributes and arguments of the exception on the worker."""
        self.attributes = attributes
        for name, value in attributes.items():
            # Set it in the object's dictionary, because a property of the class would run code.
            if not hasattr(RemoteError, name) and name not in self.__dict__ and not name.startswith("__"):
                self.__dict__[name] = value
        self.args = args
        self._fill()

    def _fill(self) -> None:
        """Set the values that a builtin exception keeps outside its attributes, such as the number of an OSError."""
        error: Any = self
        with contextlib.suppress(Exception):
            builtin_base(builtins.type(self)).__init__(self, *self.args)
        if isinstance(error, OSError):
            error.errno, error.strerror, error.filename = (self.attributes.get(name) for name in OS_ERROR)

    def _details(self) -> str:
        return f"\n\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""


OWN = ("message", "hint", "worker", "type_name", "remote_message", "remote_traceback", "attributes")
OS_ERROR = ("errno", "strerror", "filename")


@functools.cache
def _remote(kind: type[Exception]) -> type[RemoteError]:
    """Return a class that derives from ``RemoteError`` and from the class of the worker's exception.

    If that class cannot be combined with others, its nearest suitable base class takes its place.
    """
    for base in kind.__mro__:
        # A group needs its members. StopIteration and StopAsyncIteration cannot leave a coroutine. A DDLFError of a
        # method is about the method's own connections, not about this call.
        if issubclass(base, ExceptionGroup | StopIteration | StopAsyncIteration | DDLFError):
            return RemoteError
        with contextlib.suppress(Exception):
            # Properties of the user's class must not hide this error's own attributes. TensorFlow's errors have such a
            # property ``message``.
            own_attributes = dict.fromkeys(OWN, "")
            combined = type(
                "RemoteError",
                (RemoteError, base),
                {"__module__": RemoteError.__module__, "_base": base, **own_attributes},
            )
            bare(combined)
            return combined
    return RemoteError


def _remake(kind: type[Any], base: Any, args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Return a copy of an error in another process, from the parts that ``DDLFError.__reduce__`` returned."""
    error = bare(kind if base is None else _remote(base))
    error.__dict__.update(state)
    error.args = args
    if isinstance(error, RemoteError):
        error._fill()
    return error


def known_class(name: str) -> type[BaseException] | None:
    """Return the exception class with that qualified name, if it is a builtin or its module is already imported."""
    value: Any = vars(builtins).get(name)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is not None:
            value = module
            for part in parts[cut:]:
                value = getattr(value, "__dict__", {}).get(part)  # getattr could run a module's import
            break
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def qualified_name(kind: type) -> str:
    """Return the name of an exception class for the other side. A builtin has no module in its name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def bare(kind: type[Any]) -> Any:
    """Return an error of a class without running its constructor or any code of a user's class."""
    builtin: Any
    for builtin in kind.__mro__:
        if builtin.__module__ == "builtins":
            with contextlib.suppress(TypeError):  # a different builtin determines the memory layout of this class
                return builtin.__new__(kind)
    raise TypeError(f"no {kind.__name__} can be made")


def builtin_base(kind: type[Any]) -> Any:
    """Return the nearest builtin base class of an exception class."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


HERE = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen ")
STANDARD = re.compile(
    r"[/\\]python3\.\d+t?[/\\](asyncio[/\\]|concurrent[/\\]|(contextlib|threading|runpy)\.py)", re.IGNORECASE
)
LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\]")
RUN_OF_FRAMES = re.compile(
    r'(?:^  File "[^"\n]*", line \d+, in .*\n(?:    .*\n)*(?:  \[Previous line repeated .*\n)?\n?)+', re.MULTILINE
)
FRAME = re.compile(r'^  File "([^"\n]*)".*\n(?:(?!  File ).*\n)*', re.MULTILINE)


def is_machinery(file: str) -> bool:
    """Return whether a file is part of DDLF, or a file of Python that only runs other code."""
    return file.startswith(HERE) or STANDARD.search(file) is not None


def visible_frames(files: Sequence[str]) -> list[bool]:
    """Return for each frame of a traceback whether to show it. The frames are given by their files.

    The user's frames are shown. If there are none, the frames of libraries are shown.
    """
    for hidden in (lambda file: is_machinery(file) or LIBRARIES.search(file) is not None, is_machinery):
        shown = [not hidden(file) for file in files]
        if any(shown):
            return shown
    return [True] * len(files)


def hide_library_frames(text: str) -> str:
    """Return a text in which the tracebacks lack the frames of libraries."""

    def shown(run: re.Match[str]) -> str:
        frames = list(FRAME.finditer(run[0]))
        is_visible = visible_frames([frame[1] for frame in frames])
        return "".join(frame[0] for frame, keep in zip(frames, is_visible, strict=True) if keep)

    return RUN_OF_FRAMES.sub(shown, f"{text}\n").removesuffix("\n")


def format_for_user(error: BaseException) -> tuple[str, bool]:
    """Return the traceback of an error and its causes as Python prints it, without the frames of libraries, and whether
    any frames were hidden.
    """
    described = traceback.TracebackException.from_exception(error)
    visited, queue, hidden = {id(described)}, [described], 0
    while queue:
        current = queue.pop()
        parts = [part for part in (current.__cause__, current.__context__, *(current.exceptions or ())) if part]
        queue += [part for part in parts if id(part) not in visited]
        visited.update(map(id, parts))
        shown = visible_frames([frame.filename for frame in current.stack])
        remaining = [frame for frame, keep in zip(current.stack, shown, strict=True) if keep]
        if isinstance(current.exc_type, type) and issubclass(current.exc_type, SyntaxError):
            # A SyntaxError names the file itself.
            remaining = [frame for frame in remaining if not is_machinery(frame.filename)]
        hidden += len(current.stack) - len(remaining)
        current.stack = traceback.StackSummary.from_list(remaining)
    return "".join(described.format()), bool(hidden)
