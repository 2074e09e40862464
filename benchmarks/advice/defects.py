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
        kind: The mistake, in a few words. Defects of one kind differ in the program, or in the amount.
        base: The healthy program.
        changes: Pairs of a text of the program and its replacement.
        rules: Ids of the rules that name the defect. A finding of any of them is right.
        nature: Why training does not show the harm; "" for a defect that is trained.
        level: The level of ``advise`` that finds the defect.
    """

    kind: str
    base: str
    changes: tuple[tuple[str, str], ...]
    rules: frozenset[str]
    nature: str = ""
    level: str = "batch"

    @property
    def mark(self) -> str:
        """Return eight hex digits that identify the changes."""
        return f"{zlib.crc32(repr(self.changes).encode()):08x}"

    def text(self) -> str:
        """Return the program with the defect.

        Raises:
            ValueError: A text to replace is missing in the program, or occurs more than once.
        """
        text = healthy(self.base)
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.kind}, {self.base}: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        return text


def healthy(base: str) -> str:
    """Return the text of a program."""
    return (FOLDER / "programs" / f"{base}.py").read_text(encoding="utf-8")


def of(kind: str, base: str, rules: str, *texts: str, nature: str = "", level: str = "") -> Defect:
    """Return a defect. The texts alternate: a text of the program, then its replacement."""
    pairs = tuple(zip(texts[::2], texts[1::2], strict=True))
    level = level or ("cluster" if nature == CLUSTER else "batch")
    return Defect(kind, base, pairs, frozenset(rules.split()), nature, level)
