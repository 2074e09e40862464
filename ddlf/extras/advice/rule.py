"""A rule: what is wrong, how it is seen in facts, why it matters, what to do, and who says so. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ddlf.errors import ConfigError
from ddlf.extras.advice.facts import Facts

Severity = Literal["E", "W", "I"]
Level = Literal["quick", "batch", "cluster", "run"]
LEVELS: tuple[Level, ...] = ("quick", "batch", "cluster", "run")
SEVERITIES: dict[Severity, str] = {"E": "error", "W": "warning", "I": "note"}
CLASSES = {
    "D": "Data",
    "L": "Labels and loss",
    "M": "Model",
    "T": "Training",
    "C": "Cluster",
    "R": "Run",
}
"""What rules are about, by the first letter of their ids."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the user's code that can be made without understanding it.

    Args:
        what: What is changed: ``"loss"``, ``"metric"``, ``"rate"``, ``"argument"`` of a layer, ``"remove"`` a layer, ``"setting"``, ``"optimizer"``
            an argument of the optimizer, ``"data"`` lines at the end of load_dataset.
        to: The new value, or the lines.
        of: Name of the layer or of the setting, or the value before.
        name: Name of the argument.
    """

    what: Literal["loss", "logits", "metric", "rate", "argument", "remove", "setting", "optimizer", "data"]
    to: Any = None
    of: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule has seen.

    Args:
        what: A sentence with the evidence in numbers, without a full stop.
        at: What it is about: ``("layer", name)``, ``("loss", output)``, ``("optimizer", "")``, ``("data", array)``, ``("setting", name)``.
        samples: Numbers of samples that show it.
        changes: What would mend it; none if that takes understanding.
        severity: Another one than the rule's, where it is less, or more, than usual.
        fix: What to do, where it is another thing than usual.
    """

    what: str
    at: tuple[str, str] = ("app", "")
    samples: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    severity: Severity | None = None
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that is known to go wrong.

    Args:
        id: A letter of ``CLASSES`` and two digits. It never changes its meaning.
        severity: ``"E"``: cannot learn, or fails; ``"W"``: costs accuracy or time; ``"I"``: good to know.
        level: What has to be done to see it.
        title: What is wrong, in some words.
        look: Yields what is wrong in facts.
        why: Why it matters, a sentence.
        fix: What to do, a sentence.
        source: Who says so.
    """

    id: str
    severity: Severity
    level: Level = "quick"
    title: str
    look: Callable[[Facts], Iterable[Found]]
    why: str
    fix: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule has found.

    Args:
        rule: Which.
        found: What.
    """

    rule: Rule
    found: Found

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.found.severity or self.rule.severity

    @property
    def fix(self) -> str:
        """What to do."""
        return self.found.fix or self.rule.fix


@dataclass(frozen=True, slots=True)
class Failed:
    """A rule that raised: it is told, and stops nothing.

    Args:
        rule: Which.
        why: The error.
    """

    rule: Rule
    why: str


def look(rules: Iterable[Rule], facts: Facts) -> tuple[list[Finding], list[Failed]]:
    """Ask rules; what is worst comes first."""
    findings: list[Finding] = []
    failed: list[Failed] = []
    for rule in rules:
        try:
            findings += [Finding(rule, found) for found in rule.look(facts)]
        except Exception as error:
            failed.append(Failed(rule, f"{type(error).__name__}: {error}"))
    findings.sort(key=lambda one: ("EWI".index(one.severity), one.rule.id))
    return findings, failed


def named(rules: Iterable[Rule], id: str, where: str) -> Rule:
    """The rule of an id.

    Raises:
        ConfigError: There is none.
    """
    known = {rule.id: rule for rule in rules}
    if (rule := known.get(id.upper())) is not None:
        return rule
    padded = f"{id[:1]}{id[1:]:0>2}".upper()  # L2 is L02, rather than L12
    near = [padded] if padded in known else difflib.get_close_matches(id.upper(), known, 1, cutoff=0.5)
    raise ConfigError(
        f"{where}: there is no rule {id!r}" + (f", did you mean {near[0]}?" if near else ""),
        hint="docs/reference/advice.md lists them all",
    )
