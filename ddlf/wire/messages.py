"""What a message means: the kinds of frames, requests and responses, errors as data. Pure; runs on both sides."""

from __future__ import annotations

import builtins
import traceback
from enum import IntEnum
from typing import Any

from ddlf.errors import DDLFError, RemoteError, SeveralErrors

MAX_ERROR_TEXT = 64 * 1024


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
        command: One of ``IWorker``'s methods, as ``"run_method"``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Example:
        ``await worker.rpc(Request("run_method", add, a=20, b=60))``
    """

    __slots__ = ("args", "command", "kwargs")

    def __init__(self, command: str, /, *args: Any, **kwargs: Any) -> None:
        self.command = command
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        given = [repr(value)[:40] for value in self.args] + [f"{k}={repr(v)[:40]}" for k, v in self.kwargs.items()]
        return f"Request({', '.join([repr(self.command), *given])})"


class Response:
    """What a request ended with: a result or an error.

    Args:
        result: The value, when there is no error.
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


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as data: type name, message and frames, with its causes.

    Nothing of the exception itself is sent, so one that cannot be pickled, or whose ``__str__`` raises, arrives like any other. Frames of
    DDLF itself before the first one of the user are left out.
    """
    chain: list[list[Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    link = ""
    while current is not None and id(current) not in seen and len(chain) < 20:
        seen.add(id(current))
        frames = [
            [f.filename, f.lineno or 0, f.name, f.line or ""] for f in traceback.extract_tb(current.__traceback__)
        ]
        if not chain:
            own = next((index for index, frame in enumerate(frames) if not _is_machinery(str(frame[0]))), len(frames))
            frames = frames[own:]
        chain.append([type_name(current), _text(current), frames[-100:], link])
        if current.__cause__ is not None:
            current, link = current.__cause__, "The above exception was the direct cause of the following exception:"
        elif current.__context__ is not None and not current.__suppress_context__:
            current, link = (
                current.__context__,
                "During handling of the above exception, another exception occurred:",
            )
        else:
            current = None
    return {"chain": chain, "hint": error.hint if isinstance(error, DDLFError) else ""}


def rebuild(facts: dict[str, Any], *, worker: str = "") -> DDLFError:
    """The error that the master raises for what ``describe`` returned on a worker.

    DDLF's own errors come back as themselves; a builtin exception as a ``RemoteError`` that is also an instance of it.
    """
    import ddlf.errors

    chain = facts["chain"]
    name, message, frames, _ = chain[0]
    own = getattr(ddlf.errors, name.removeprefix("ddlf.errors."), None) if name.startswith("ddlf.errors.") else None
    if isinstance(own, type) and issubclass(own, DDLFError) and not frames and own not in (RemoteError, SeveralErrors):
        return own(message, hint=facts.get("hint", ""), worker=worker)
    return _remote_class(name)(name, message, _format(chain), worker=worker)


def type_name(error: BaseException) -> str:
    """``"ValueError"`` for a builtin, ``"module.Name"`` otherwise."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_machinery(filename: str) -> bool:
    return filename.startswith(_HERE) or "/asyncio/" in filename or "/concurrent/futures/" in filename


_HERE = __file__.removesuffix("wire/messages.py")


def _text(error: BaseException) -> str:
    try:
        text = error.message if isinstance(error, DDLFError) else str(error)
    except Exception as broken:
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return text if len(text) <= MAX_ERROR_TEXT else text[:MAX_ERROR_TEXT] + " [cut]"


def _format(chain: list[Any]) -> str:
    """The traceback as Python prints it, with source lines read here when the worker does not have the user's file."""
    parts: list[str] = []
    for name, message, frames, link in reversed(chain):
        summary = traceback.StackSummary.from_list(
            [traceback.FrameSummary(file, line, function, line=text or None) for file, line, function, text in frames]
        )
        lines = ["Traceback on the worker (most recent call last):\n", *summary.format()] if frames else []
        parts.append("".join(lines) + (f"{name}: {message}" if message else name))
        if link:
            parts.append(link)
    return "\n\n".join(parts)


def _remote_class(name: str) -> type[RemoteError]:
    builtin = getattr(builtins, name, None)
    if not (isinstance(builtin, type) and issubclass(builtin, Exception)) or issubclass(builtin, ExceptionGroup):
        return RemoteError
    if name not in _classes:
        try:
            _classes[name] = type("RemoteError", (RemoteError, builtin), {"__module__": "ddlf.errors"})
            _classes[name]("", "", "")
        except TypeError:  # a builtin that wants arguments of its own, as UnicodeDecodeError does
            _classes[name] = RemoteError
    return _classes[name]


_classes: dict[str, type[RemoteError]] = {}
