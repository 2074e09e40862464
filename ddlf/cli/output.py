"""Print errors: the user's own lines first, and no output of native code."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

from ddlf import errors
from ddlf.errors import AppError, ConfigError, DDLFError, RemoteError, tracebacks
from ddlf.errors.tracebacks import parts

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
INDENT = " " * 7
SELF_EXPLAINING = (ConfigError, AppError, RemoteError)
"""Errors whose page says no more than their text."""


def show_error(error: BaseException, *, whole: bool) -> None:
    """Print an error to standard error. An error of DDLF is a sentence and a hint; any other error has the traceback
    lines of the user's own code.

    Args:
        error: The error.
        whole: Whether to show the lines of libraries, too.
    """
    if isinstance(error, DDLFError):
        text = (_traceback_of_master(error) if whole else "") + _printed_error(error, whole)
    elif whole:
        text = "".join(traceback.format_exception(error))
    else:
        text, hidden = tracebacks.format_for_user(error)
        text += f"({MORE})\n" * hidden
    if not sys.stderr.isatty():
        text = ANSI.sub("", text)  # Keras's bold type
    sys.stderr.write(text)
    sys.stderr.flush()


MORE = "-v also shows the lines of libraries"


def _printed_error(error: DDLFError, whole: bool) -> str:
    """Return the text to print about an error: what happened, the hint, where to read more, and the lines of the user's
    code on the worker.

    Without a terminal there is no layout in rows, except that a hint never follows the last line of a table.
    """
    sentence, hint, details = parts(error)
    if isinstance(error, RemoteError) and not error.others:  # the sentence says it
        details = details.removesuffix(f"{error.type_name}: {error.remote_message}".rstrip()).rstrip()
    shown = (
        (sentence, details)
        if whole
        else (tracebacks.hide_library_frames(sentence), tracebacks.hide_library_frames(details))
    )
    hidden = shown != (sentence, details)
    sentence, details = "\n".join([shown[0], *getattr(error, "__notes__", ())]), shown[1]
    # ``ddlf help`` has no page of a private class, only of the public class that it is derived from.
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
    pages = [] if isinstance(error, SELF_EXPLAINING) or name == "DDLFError" else [f"ddlf help {name}"]
    if not sys.stderr.isatty():
        sentence = sentence.rstrip()
        before_hint = "\ntry    " if "\n" in sentence else "; "
        ending = before_hint + hint if hint else ""
        text = f"error  {sentence}{ending}{details}\n"
        return text + "".join(f"more   {where}\n" for where in pages)
    rows = {"error": sentence, "why": _cause(error), "try": hint, "more": ", ".join([*pages, *[MORE] * hidden])}
    lines = f"{details}\n".removeprefix("\n") if details else ""
    return "".join(_row(label, text) for label, text in rows.items() if text) + lines


def _cause(error: DDLFError) -> str:
    """Return the cause of an error in one line; empty if the error's sentence already says it."""
    cause = error.__cause__
    sentence = parts(cause)[0] if isinstance(cause, DDLFError) else getattr(cause, "strerror", None) or str(cause or "")
    first_line = sentence.strip().partition("\n")[0]
    return "" if first_line.casefold() in parts(error)[0].casefold() else first_line


def _row(label: str, text: str) -> str:
    columns = max(shutil.get_terminal_size().columns, 40)
    lines: list[str] = []
    for line in f"{label:<7}{text.rstrip()}".split("\n"):
        table = line.startswith(" ") or len(line) <= columns
        lines += [line] if table else textwrap.wrap(line, columns, subsequent_indent=INDENT, break_long_words=False)
    return "\n".join(lines) + "\n"


def _traceback_of_master(error: DDLFError) -> str:
    """Return the traceback lines of the user's code on the master. The lines of a worker's error come last."""
    if isinstance(error, RemoteError):
        return "".join(["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)])
    return "".join(traceback.format_exception(error))


@contextlib.contextmanager
def native_output_to_log() -> Iterator[None]:
    """Redirect standard error of native code to a log file. Python's own errors still reach the terminal.

    TensorFlow writes lines about processors and drivers that no setting silences. They would bury the important line.
    """
    import platformdirs

    try:
        folder = Path(platformdirs.user_log_dir("ddlf"))
        if not folder.is_absolute():
            raise RuntimeError("an older platformdirs returns a folder that begins with a literal ~")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open(folder / "master.log", "wb")  # noqa: SIM115
        sys.stderr.flush()
        terminal = os.dup(2)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        yield
        return
    before, sys.stderr = sys.stderr, os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        sys.stderr.close()
        sys.stderr = before
        log.close()


def write_whole(path: Path, content: bytes) -> None:
    """Replace a user's file atomically, and keep its permissions.

    Raises:
        ConfigError: The file cannot be written.
    """
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        if not os.access(target, os.W_OK):  # the folder may be writable although the file is not
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        temporary.write_bytes(content)
        shutil.copymode(target, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
