"""Common mistakes, as changes of healthy programs: each defect says which text it replaces, and by what.

We wrote the defects from published lists, not from the adviser's rules.

The kinds are from Humbatova et al., Taxonomy of Real Faults in Deep Learning Systems (arXiv:1910.11015); Islam et al.
(arXiv:1906.01388); the mutation operators of DeepCrime (Humbatova et al., ISSTA 2021, doi:10.1145/3460319.3464825);
AutoTrainer (ICSE 2021); and A Recipe for Training Neural Networks (2019). The kinds for clusters are from failed runs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
MISLEADS = "measures the wrong thing"
CLUSTER = "fails or costs only on several machines"


@dataclass(frozen=True, slots=True)
class Defect:
    """One mutation of one program.

    Args:
        kind: What was done wrong, in some words: defects of one kind differ in the program, or in the amount.
        base: The healthy program.
        changes: Each text with what is written instead.
        rules: Those that name the defect; any of them is right.
        nature: Why training does not show that it hurts, where it does not; else it is trained.
        level: How deep advice has to look.
    """

    kind: str
    base: str
    changes: tuple[tuple[str, str], ...]
    rules: frozenset[str]
    nature: str = ""
    level: str = "batch"

    @property
    def mark(self) -> str:
        """Eight hex digits of what is written."""
        return f"{zlib.crc32(repr(self.changes).encode()):08x}"

    def text(self) -> str:
        """The program with the defect.

        Raises:
            ValueError: What is to be changed is not in it, or more than once.
        """
        text = healthy(self.base)
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.kind}, {self.base}: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        return text


def healthy(base: str) -> str:
    """The text of a program."""
    return (FOLDER / "programs" / f"{base}.py").read_text(encoding="utf-8")


def of(kind: str, base: str, rules: str, *texts: str, nature: str = "", level: str = "") -> Defect:
    """A defect: texts are pairs, what is there and what is written instead."""
    pairs = tuple(zip(texts[::2], texts[1::2], strict=True))
    level = level or ("cluster" if nature == CLUSTER else "batch")
    return Defect(kind, base, pairs, frozenset(rules.split()), nature, level)
