"""The kinds of messages, requests and responses, and errors as data. Pure; runs on both sides."""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NoReturn

import ddlf.errors
from ddlf.errors import DDLFError, ProtocolError, RemoteError, RequestFailed
from ddlf.errors.tracebacks import OS_ERROR, is_machinery
from ddlf.rpc.values import dumps

DOING = "doing"
"""The event of a running request: its present activity and progress."""
MAX_ERROR_TEXT = 64 * 1024
"""Most characters of an exception's text. The rest is cut off."""
MAX_ATTRIBUTES_BYTES = 64 * 1024
"""Most bytes of an exception's arguments and attributes. A larger value is data and does not belong in a message."""
MAX_CHAIN = 20
"""Most causes and group members that are sent with an exception."""


class Kind(IntEnum):
    """The first field of a frame's header."""

    REQUEST = 1  # name: command, extra: seconds it may take or None, value: [args, kwargs]
    RESULT = 2  # value: the result
    ERROR = 3  # value: what ``describe`` returns
    CANCEL = 4  # no body
    EVENT = 5  # name: what happened, value: its facts


class Request:
    """One call of a worker's command.

    Args:
        command: The name of an ``IWorker`` method, such as ``"run_method"``.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Attributes:
        pickle: Pickles the request's objects once for all workers that receive it. With None each worker's request is
            pickled separately.
        hear: Receives the worker's messages about the request while it runs; None if nobody needs them.

    Example:
        ``await worker.rpc(Request("run_method", add, a=20, b=60))``
    """

    __slots__ = ("args", "command", "hear", "kwargs", "pickle")

    def __init__(self, command: str, /, *args: Any, **kwargs: Any) -> None:
        self.command = command
        self.args = args
        self.kwargs = kwargs
        self.pickle: Callable[[Any], bytes] | None = None
        self.hear: Callable[[dict[str, Any]], None] | None = None

    def __repr__(self) -> str:
        given = [repr(value)[:40] for value in self.args] + [f"{k}={repr(v)[:40]}" for k, v in self.kwargs.items()]
        return f"Request({', '.join([repr(self.command), *given])})"


class Response:
    """The outcome of a request: a result or an error.

    Args:
        result: The value, if there is no error.
        error: The exception, or None.
    """

    __slots__ = ("error", "result")

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result = result
        self.error = error

    def unwrap(self) -> Any:
        """Return the result or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result

    def __repr__(self) -> str:
        return f"Response(error={self.error!r})" if self.error is not None else f"Response({repr(self.result)[:60]})"


def read_arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Check the value of a request.

    Returns:
        Positional and keyword arguments.

    Raises:
        ProtocolError: The value does not have this form.
    """
    if type(value) is list and len(value) == 2:
        args, kwargs = value
        if type(args) is list and type(kwargs) is dict and all(type(name) is str for name in kwargs):
            return args, kwargs
    raise ProtocolError("a request's value is [arguments, keyword arguments]")


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as data: type name, message and frames, with its causes.

    Only data is sent. An exception that cannot be pickled, or whose ``__str__`` raises, therefore arrives like any
    other. DDLF's own frames before the first user frame are left out.
    """
    chain: list[list[Any]] = []
    seen: set[int] = set()
    rest: list[tuple[BaseException, str]] = [(error, "")]
    while rest and len(chain) < MAX_CHAIN:
        current, link = rest.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        frames = [
            [f.filename, f.lineno or 0, f.name, f.line or ""] for f in traceback.extract_tb(current.__traceback__)
        ]
        if not chain:
            own = next((index for index, frame in enumerate(frames) if not is_machinery(str(frame[0]))), len(frames))
            frames = frames[own:]
        chain.append([type_name(current), _text(current), frames[-100:], link])
        if current.__cause__ is not None:
            rest.append((current.__cause__, "The above exception was the direct cause of the following exception:"))
        elif current.__context__ is not None and not current.__suppress_context__:
            link = "During handling of the above exception, another exception occurred:"
            rest.append((current.__context__, link))
        if isinstance(current, BaseExceptionGroup):
            rest += [(part, "The above exception is one of the group below:") for part in current.exceptions]
    facts: dict[str, Any] = {"chain": chain, "hint": _hint(error)}
    may_have_run = getattr(error, "may_have_run", None)
    if isinstance(may_have_run, bool):
        facts["may_have_run"] = may_have_run
    if not isinstance(error, DDLFError):
        facts |= _carried(error)
    return facts


def _hint(error: BaseException) -> str:
    if isinstance(error, DDLFError):
        return error.hint
    if isinstance(error, FileNotFoundError):
        name = error.filename
        if isinstance(name, str) and not os.path.isabs(name):
            with contextlib.suppress(OSError):  # the folder itself is gone
                return f"relative paths begin at {os.getcwd()} there, so put it there on each machine, or name it from the root"
        return ""
    missing = isinstance(error, ModuleNotFoundError) and type(error.name) is str and not error.name.startswith("ddlf")
    return where_modules_come_from(str(error.name)) if missing else ""  # type: ignore[attr-defined]


def where_modules_come_from(name: str) -> str:
    """Return advice about a module that a worker cannot import."""
    return f"install {name.partition('.')[0]} on the worker, or keep it below the script's folder, from where modules travel"


def _carried(error: BaseException) -> dict[str, Any]:
    """Return the arguments and attributes of an exception that are data."""
    facts: dict[str, Any] = {}
    text = _text(error)  # the other side uses it as the only argument
    if error.args != ((text,) if text else ()) and _is_data(list(error.args)):
        facts["args"] = list(error.args)
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__") and _is_data(value)}
    if isinstance(error, OSError):
        given = {name: getattr(error, name) for name in OS_ERROR}
        attributes |= {name: value for name, value in given.items() if value is not None and _is_data(value)}
    if attributes and _is_data(attributes):
        facts["attributes"] = attributes
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list) and notes:
        facts["notes"] = [str(note)[:MAX_ERROR_TEXT] for note in notes[:MAX_CHAIN] if isinstance(note, str)]
    return facts


def _no_object(value: Any) -> NoReturn:
    """Refuse every object, even one whose class the master may know. The master needs the error in any case."""
    raise TypeError


def _is_data(value: Any) -> bool:
    try:
        buffers = dumps(value, _no_object)
    except Exception:  # values that cannot be encoded stay on this side
        return False
    return len(buffers) == 1 and len(buffers[0]) <= MAX_ATTRIBUTES_BYTES


def rebuild(facts: dict[str, Any], *, worker: str = "") -> DDLFError:
    """Return the error that the master raises for the result of ``describe`` on a worker.

    DDLF's own errors keep their class. Other errors become a ``RemoteError`` that is also an instance of their class,
    if this side knows it.
    """
    try:
        return _rebuild(facts, worker)
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        return ProtocolError(f"error data cannot be read ({type(problem).__name__}: {problem})", worker=worker)


def _rebuild(facts: dict[str, Any], worker: str) -> DDLFError:
    chain = facts["chain"]
    name, message, frames, _ = chain[0]
    hint = str(facts.get("hint", ""))
    own = getattr(ddlf.errors, name.removeprefix("ddlf.errors."), None) if name.startswith("ddlf.errors.") else None
    if isinstance(own, type) and issubclass(own, DDLFError) and not frames and own is not RemoteError:
        error = own(message, hint=hint, worker=worker)
        if isinstance(error, RequestFailed):
            error.may_have_run = bool(facts.get("may_have_run", True))
        return error
    # Without lines of the user, the traceback would only repeat the message.
    lines = _format(chain) if any(entry[2] for entry in chain) or len(chain) > 1 else ""
    remote = RemoteError.of(name, message, lines, worker=worker)
    remote.hint = hint
    attributes, args = facts.get("attributes", {}), facts.get("args")
    if not all(type(key) is str for key in attributes):
        raise TypeError("names are text")
    remote.adopt(dict(attributes), tuple(args) if args is not None else (message,) if message else ())
    for note in facts.get("notes", ()):
        remote.add_note(note)
    return remote


def type_name(error: BaseException) -> str:
    """Return ``"ValueError"`` for a builtin, ``"module.Name"`` otherwise."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        # A hint travels separately from the text. A RemoteError keeps the traceback of its worker.
        text = error.message if isinstance(error, DDLFError) and not isinstance(error, RemoteError) else str(error)
    except Exception as broken:
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return text if len(text) <= MAX_ERROR_TEXT else text[:MAX_ERROR_TEXT] + " [cut]"


def _format(chain: list[Any]) -> str:
    """Return the traceback as Python prints it. Source lines come from this side if the worker lacks the file."""
    parts: list[str] = []
    for name, message, frames, link in reversed(chain):
        summary = traceback.StackSummary.from_list(
            [
                traceback.FrameSummary(file, line, function, line=_line(file, text))
                for file, line, function, text in frames
            ]
        )
        lines = ["Traceback on the worker (most recent call last):\n", *summary.format()] if frames else []
        parts.append("".join(lines) + (f"{name}: {message}" if message else name))
        if link:
            parts.append(link)
    return "\n\n".join(parts)


def _line(file: str, text: str) -> str | None:
    """Return the source line, or None to look it up on this side: in a notebook's cell, or in a file.

    Only regular files are read, because reading a device might never end.
    """
    return None if not text and (file in linecache.cache or os.path.isfile(file)) else text
