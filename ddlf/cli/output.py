"""What people read of a run that fails: their own lines first, and nothing that native code writes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from ddlf.errors import DDLFError, RemoteError

HERE = f"{Path(__file__).parents[1]}{os.sep}"
MACHINERY = (HERE, "<frozen ", f"{Path(contextlib.__file__).parent / 'asyncio'}{os.sep}")
ALSO_MACHINERY = ("/concurrent/futures/", "/contextlib.py", "/threading.py")
LIBRARIES = ("site-packages", "dist-packages")
FRAME = re.compile(r'  File "([^"]*)", line \d+, in .*(?:\n    .*)*')
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def show_error(error: BaseException, *, whole: bool) -> None:
    """Print an error to standard error: DDLF's own as one sentence, any other with the user's own lines.

    Args:
        error: What was raised.
        whole: Whether to show all frames.
    """
    if isinstance(error, DDLFError):
        text = "".join(traceback.format_exception(error)) if whole else ""
        text += f"error  {error if whole else _once(error)}\n"
    else:
        text = "".join(traceback.format_exception(error) if whole else _of_the_user(error))
    if not sys.stderr.isatty():
        text = ANSI.sub("", text)  # Keras's bold type
    sys.stderr.write(text)
    sys.stderr.flush()


def _once(error: DDLFError) -> str:
    """The text of an error; of one that a worker raised, what the first line says is not said again, and its libraries' lines are left out."""
    text = str(error)
    if not isinstance(error, RemoteError) or not error.remote_traceback:
        return text
    whole = error.remote_traceback.rstrip()
    shown = whole.removesuffix(f"{error.type_name}: {error.remote_message}".rstrip()).rstrip()
    frames = list(FRAME.finditer(shown))
    while len(frames) > 1 and frames[-1].end() == len(shown) and any(part in frames[-1][1] for part in LIBRARIES):
        shown = shown[: frames.pop().start()].rstrip()
    return text.replace(whole, shown)


def _of_the_user(error: BaseException) -> list[str]:
    """A traceback without the frames of DDLF, asyncio, and of the libraries that the user's last line called."""
    hidden = 0
    described = traceback.TracebackException.from_exception(error)
    seen = set()
    rest = [described]
    while rest:
        current = rest.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        rest += [part for part in (current.__cause__, current.__context__, *(current.exceptions or ())) if part]
        frames = [frame for frame in current.stack if not _is_machinery(frame.filename)]
        while len(frames) > 1 and any(part in frames[-1].filename for part in LIBRARIES):
            frames.pop()
        if frames or issubclass(current.exc_type or Exception, SyntaxError):
            hidden += len(current.stack) - len(frames)
            current.stack = traceback.StackSummary.from_list(frames)
    lines = list(described.format())
    return lines + ["(-v shows the lines of the libraries, too)\n"] * bool(hidden)


def _is_machinery(filename: str) -> bool:
    return filename.startswith(MACHINERY) or any(part in filename for part in ALSO_MACHINERY)


@contextlib.contextmanager
def native_output_to_log() -> Iterator[None]:
    """Send what native code writes to standard error into a log file; Python's own errors still reach the terminal.

    TensorFlow writes lines about processors and drivers that no setting silences; they would bury the one line that matters.
    """
    import platformdirs

    try:
        folder = Path(platformdirs.user_log_dir("ddlf"))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open(folder / "master.log", "wb")  # noqa: SIM115
        sys.stderr.flush()
        terminal = os.dup(2)
    except OSError:
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
