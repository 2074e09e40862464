"""Finds the user's own lines in a traceback and hides the others. Pure; runs everywhere."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

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


def of_the_user(files: Sequence[str]) -> list[bool]:
    """Return for each frame of a traceback, given by its file, whether to show it.

    The user's frames are shown. If there are none, the frames of libraries are shown.
    """
    for hidden in (lambda file: is_machinery(file) or LIBRARIES.search(file) is not None, is_machinery):
        shown = [not hidden(file) for file in files]
        if any(shown):
            return shown
    return [True] * len(files)


def in_text(text: str) -> str:
    """Return a text without the frames of libraries in its tracebacks."""

    def shown(run: re.Match[str]) -> str:
        frames = list(FRAME.finditer(run[0]))
        kept = of_the_user([frame[1] for frame in frames])
        return "".join(frame[0] for frame, keep in zip(frames, kept, strict=True) if keep)

    return RUN_OF_FRAMES.sub(shown, f"{text}\n").removesuffix("\n")


def of_error(error: BaseException) -> tuple[str, bool]:
    """Return the traceback of an error and its causes as Python prints it, without the frames of libraries, and whether
    any frames were hidden.
    """
    described = traceback.TracebackException.from_exception(error)
    seen, rest, hidden = {id(described)}, [described], 0
    while rest:
        current = rest.pop()
        parts = [part for part in (current.__cause__, current.__context__, *(current.exceptions or ())) if part]
        rest += [part for part in parts if id(part) not in seen]
        seen.update(map(id, parts))
        shown = of_the_user([frame.filename for frame in current.stack])
        kept = [frame for frame, keep in zip(current.stack, shown, strict=True) if keep]
        if isinstance(current.exc_type, type) and issubclass(current.exc_type, SyntaxError):
            kept = [frame for frame in kept if not is_machinery(frame.filename)]  # a SyntaxError names the file itself
        hidden += len(current.stack) - len(kept)
        current.stack = traceback.StackSummary.from_list(kept)
    return "".join(described.format()), bool(hidden)
