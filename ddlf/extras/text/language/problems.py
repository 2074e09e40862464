"""Collects the mistakes in a model text with their positions. Pure."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Iterable
from typing import NamedTuple

from ddlf.errors import NotationError

MAX_SHOWN = 20
"""Maximum number of mistakes in one error. A text in another language would have one per line."""
MAX_WORD = 40
"""Number of letters of a word that are compared."""
MAX_PROBLEMS = 100
"""Maximum number of collected mistakes."""


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Return the most similar of some words, or nothing if none is similar.

    Swapped letters cost less than other differences; the first letter costs more.
    """
    candidates = difflib.get_close_matches(word, names, 5, 0.6)

    def distance(candidate: str) -> tuple[bool, float, bool]:
        return (
            sorted(candidate) != sorted(word),
            -difflib.SequenceMatcher(None, candidate, word).ratio(),
            candidate[0] != word[0],
        )

    return sorted(candidates, key=distance)[:1]


class TextProblem(NamedTuple):
    """A mistake or a warning, with line and column in characters, from 1."""

    line: int
    column: int
    sentence: str


class Problems:
    """Collects the mistakes in a model text.

    Args:
        text: The whole text.
        file: The name of the file, to print before each problem.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self._starts = [0, *(at + 1 for at, letter in enumerate(text) if letter == "\n")]
        self._errors: dict[tuple[int, str], None] = {}
        self._warned: dict[tuple[int, str], None] = {}

    def __len__(self) -> int:
        return len(self._errors)

    def line_and_column(self, at: int) -> tuple[int, int]:
        """Return line and column of a character, from 1."""
        line = bisect.bisect_right(self._starts, at)
        return line, at - self._starts[line - 1] + 1

    def add(self, at: int, sentence: str, *, derived: bool = False) -> None:
        """Record a mistake at a character of the text.

        Args:
            at: Index of the character.
            sentence: The mistake, and the probable intention.
            derived: Whether it may only follow from another mistake. Then it is added only if it is the first one.
        """
        if not (derived and self._errors):
            self._errors[at, sentence] = None

    def warn(self, at: int, sentence: str) -> None:
        """Add a warning about a valid, but probably unintended statement."""
        self._warned[at, sentence] = None

    def suggestion(self, word: str, names: Iterable[str]) -> str:
        """Return the end of an error's sentence that suggests the most similar known word; empty if no word is similar.

        Only the mistakes to print get a suggestion, because the search takes time.
        """
        folded: dict[str, str] = {}
        for name in names if len(self) < MAX_SHOWN else ():
            folded.setdefault(name.casefold(), name)
        matches = [word.casefold()] if word.casefold() in folded else []
        matches = matches or nearest(word.casefold()[:MAX_WORD], folded)
        return f", did you mean {folded[matches[0]]!r}?" if matches else ""

    def warnings(self) -> tuple[TextProblem, ...]:
        """Return the warnings in the order of the model text."""
        return self._sorted(self._warned)

    def check(self) -> None:
        """Raise an error if there are mistakes.

        Raises:
            NotationError: Lists the mistakes in the order of the model text.
        """
        if self._errors:
            problems = self._sorted(self._errors)
            lines = [
                f"{self.file}:{problem.line}:{problem.column}: {problem.sentence}" for problem in problems[:MAX_SHOWN]
            ]
            if len(problems) > MAX_SHOWN:
                lines.append(f"and {len(problems) - MAX_SHOWN} more")
            raise NotationError("\n".join(lines), problems=problems)

    def _sorted(self, problems: Iterable[tuple[int, str]]) -> tuple[TextProblem, ...]:
        return tuple(TextProblem(*self.line_and_column(at), sentence) for at, sentence in sorted(problems))
