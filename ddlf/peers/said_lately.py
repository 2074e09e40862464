"""The lines that a server of peers has said lately, so that peers cannot flood its terminal. Pure, except for these lines.

A line about one peer, or about the disk, may become due at each message. The terminal shows one line about the same
subject in ``SAID_S``. A line that every run repeats, such as a validation, is frequent in a young run and rare in an old one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

SAID_SHARE, SAID_S = 0.1, 60.0
"""The terminal shows a validation again after this share of the time so far, and at the latest after these seconds."""


class SaidLately:
    """Says one line about a subject in ``SAID_S``, and leaves out the others.

    Args:
        say: Prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at: dict[tuple[Hashable, ...], float] = {}

    def say(self, line: str, *subject: Hashable, now: float) -> None:
        """Say a line, unless the terminal has shown a line about the same subject lately.

        Args:
            line: The line.
            subject: Subject of the line, such as a peer and its posts.
            now: The time.
        """
        said_at = self._said_at.get(subject)
        if said_at is None or now - said_at >= SAID_S:
            self._said_at[subject] = now
            self._say(line)


class Rarely:
    """Says whether a line that comes again and again is due: the longer a run lasts, the rarer it is.

    Args:
        began_at: Time of the beginning.
    """

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._said_at = -1e9

    def is_due(self, now: float) -> bool:
        """Return whether the line is due now. If so, it counts as said."""
        due = now - self._said_at >= min((now - self._began_at) * SAID_SHARE, SAID_S)
        if due:
            self._said_at = now
        return due
