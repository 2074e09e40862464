"""Read generated model texts. Each is accepted, or refused by a NotationError with positions, about as fast as a valid text.

    python -m tests.trials.texts [--texts 1000000] [--seed 0]

The trial cuts, mixes and repeats valid texts, and inserts words and signs of the notation and of other languages. It
prints each text that breaks the promise, and its exit code is then 1.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time

from ddlf.errors import NotationError
from ddlf.extras.text.language.model import read, statements
from ddlf.extras.text.language.operators import DTYPES, OPERATORS, PROPERTIES
from ddlf.extras.text.language.printer import format
from tests.extras.text.language.texts import DIGITS, HEADS, KERAS, LM, SQUARE
from tests.trials.options import read_options

TIMES_VALID = 4
"""A text may take this many times the time of a valid text on this machine, for each character. Valid texts take about 3 us
a character, and differ by a factor of 1.3. A parser with quadratic time would soon take 100 times as long.
"""
SHORTEST = 10_000
"""Shorter texts may take as long as a text with this number of characters, because the clock is coarse."""
LARGEST = 30_000
SHOWN = 20_000
"""Number of texts for each line of output."""
SEEDS = (DIGITS, SQUARE, HEADS, LM, KERAS)
WORDS = (
    *OPERATORS, *DTYPES, *PROPERTIES, "Dense(units=3)", "Conv2D", "Lambda", "own>Mine()", "numpy>Add", "train", "it", "with(it)", "share=x", "to=x",
    "call=with(it, mask=x)", "shape=[3]", "shapes=[[3], [4]]", "name=x", "lrm=0.5", "1", "-1", "0.5", "1e999", "2147483648", "none", "true",
    '"x"', '"', "'", "#", "#x\n", "\n", "\r\n", "\t", "\x00", "\ufeff", "__class__", "а", "（", "－", "\ud800", "😀", "é", "\u202e",
    *"()[]:;,=.>_+-*/{}|&%$@!\\",
)  # fmt: skip


def changed(text: str, dice: random.Random) -> str:
    """Return a text after one random change."""
    a, b = sorted(dice.randrange(len(text) + 1) for _ in "ab")
    kind = dice.randrange(8)
    if kind == 0:
        return text[:a] + text[b:]
    if kind == 1:
        return text[:a] + dice.choice(WORDS) + text[a:]
    if kind == 2:
        return text[:a] + dice.choice(WORDS) + text[a + 1 :]
    if kind == 3:
        b = min(b, a + 200)
        return text[:b] + text[a:b] * dice.choice((1, 2, 50)) + text[b:]
    if kind == 4:
        other = dice.choice(SEEDS)
        c, d = sorted(dice.randrange(len(other) + 1) for _ in "cd")
        return text[:a] + other[c:d] + text[a:]
    if kind == 5:
        return text[b:] + text[a:b] + text[:a]
    if kind == 6:
        words = text.split(" ")
        c, d = (dice.randrange(len(words)) for _ in "cd")
        words[c], words[d] = words[d], words[c]
        return " ".join(words)
    return "".join(dice.choice(WORDS) for _ in range(dice.randrange(60)))


def broken(text: str) -> str:
    """Return the promise that a text breaks, or an empty text."""
    sent: str | bytes = text.encode("utf-8", "surrogatepass") if len(text) % 7 == 0 else text
    try:
        read(sent)
    except NotationError as error:
        if not error.problems or any(line < 1 or column < 1 for line, column, _ in error.problems):
            return "an error without a place"
    except Exception as error:  # any other error breaks the promise
        return f"{type(error).__name__}: {error}"
    else:
        if read(format(text)).graph != read(text).graph:
            return "another model in its one form"
    return ""


def seconds(text: str) -> float:
    """Return the processor time of parsing a text, in seconds."""
    began = time.process_time()
    with contextlib.suppress(NotationError):
        statements(text, "m")
    return time.process_time() - began


class Pace:
    """The parsing time of valid texts on this machine."""

    def __init__(self) -> None:
        self._allowed = self._measured()

    def _measured(self) -> float:
        """Return the seconds that a character may take."""
        longest = 20 * max(SEEDS, key=len)
        return TIMES_VALID * min(seconds(longest) for _ in range(3)) / len(longest)

    def excess(self, text: str) -> float:
        """Return the parsing time above the allowed time in seconds, which is 0 in most cases. Other programs use this
        machine, too, so measure a slow text again, each time after a valid text.
        """
        characters = max(SHORTEST, len(text))
        least = seconds(text) - self._allowed * characters
        for _ in range(3):
            if least <= 0:
                return 0.0
            self._allowed = max(self._allowed, self._measured())
            least = min(least, seconds(text) - self._allowed * characters)
        return max(0.0, least)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(__doc__, arguments, texts=1_000_000, seed=0)
    dice = random.Random(options.seed)
    for seed in SEEDS:
        read(seed)
    pace = Pace()
    failures, letters, began = 0, 0, time.perf_counter()
    text = dice.choice(SEEDS)
    for number in range(options.texts):
        if dice.random() < 0.3 or len(text) > LARGEST:
            text = dice.choice(SEEDS)
        if number and number % SHOWN == 0:
            print(f"{number:,} texts, {failures} break a promise", flush=True)
        text = changed(text, dice)
        letters += len(text)
        wrong = broken(text)
        if not wrong and (over := pace.excess(text)):
            wrong = f"parsing {len(text):,} characters takes {1000 * over:.0f} ms more than it may"
        if wrong:
            failures += 1
            print(f"text {number}: {wrong}\n{text[:2000]!r}", flush=True)
    print(
        f"{options.texts:,} texts, {letters / 1e6:,.0f} MB, {time.perf_counter() - began:,.0f} s: {failures} break a promise"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
