"""Defines rules, and the findings that they yield. Pure.

A rule is one function under ``@rule``. Its docstring says why the mistake matters. A paragraph with ``Fix:`` says what
to do, and ``Source:`` names a publication or a measurement::

    @rule("D20", "E", "identical inputs")
    def _identical_inputs(facts: AppFacts) -> Iterator[Finding]:
        '''The model cannot tell samples apart.

        Fix: Check load_dataset.
        Source: Humbatova et al., arXiv:1910.11015
        '''
        ...
        yield Finding("all values of x_train are 0", ("data", "x_train"))
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddlf.errors import ConfigError
from ddlf.extras.advice.facts import AppFacts

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
"""The subject of a rule, by the first letter of its id."""
EXPLANATION = re.compile(r"(.*?)\n\nFix: (.*?)\nSource: (.*)", re.DOTALL)
STRIPPED = "See docs/reference/advice.md (python -OO removes explanations).\n\nFix: See there.\nSource: none"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the user's code that is safe without human review.

    Args:
        kind: What to change: the ``"loss"``, a ``"metric"``, the learning ``"rate"``, an ``"argument"`` of a layer, an argument of the
            ``"optimizer"``, a ``"setting"``; ``"remove"`` a layer; ``"data"`` adds lines to load_dataset.
        value: The new value, or the lines.
        target: Name of the layer or the setting, or the old value.
        argument: Name of the argument.
    """

    kind: Literal["loss", "metric", "rate", "argument", "remove", "setting", "optimizer", "data"]
    value: Any = None
    target: str = ""
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of a part of one of the user's files, to fix a mistake.

    Args:
        path: The file.
        begin: First character to replace, counted in the decoded text without byte order mark and with ``\\n`` as line end.
        end: The character after the last one to replace, counted like ``begin``.
        text: The new text.
    """

    path: Path
    begin: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Position:
    """A line of the user's code.

    Args:
        path: The file.
        line: The number of the line, from 1.
    """

    path: Path
    line: int

    def __str__(self) -> str:
        """Return ``path:line``."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake in an app that a rule has found.

    Args:
        message: A sentence with the evidence in numbers, without a full stop.
        subject: ``("layer", name)``, ``("loss", output)``, ``("optimizer", "")``, ``("data", array)``, ``("setting", name)``, ...
        samples: The numbers of samples that show the mistake.
        changes: Changes that fix the mistake; empty if a person has to decide.
        severity: Overrides the severity of the rule.
        fix: Overrides the fix of the rule.
    """

    message: str
    subject: tuple[str, str] = ("app", "")
    samples: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    severity: Severity | None = None
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, which detects one known mistake.

    Args:
        id: A letter of ``CLASSES`` and two digits. Its meaning never changes.
        severity: ``"E"``: the app cannot learn, or fails; ``"W"``: it loses accuracy or time; ``"I"``: good to know.
        title: The mistake in a few words.
        level: The cheapest level that can find it.
        check: The function that yields the findings in the facts of an app.
    """

    id: str
    severity: Severity
    title: str
    level: Level
    check: Callable[[AppFacts], Iterable[Finding]]

    @property
    def reason(self) -> str:
        """Return why the mistake that this rule finds matters, from the function's docstring."""
        return self._explanation(1)

    @property
    def fix(self) -> str:
        """Return how to fix the mistake."""
        return self._explanation(2)

    @property
    def source(self) -> str:
        """Return the publication or measurement that the rule is based on."""
        return self._explanation(3)

    def _explanation(self, part: int) -> str:
        match = EXPLANATION.fullmatch(inspect.getdoc(self.check) or STRIPPED)
        return " ".join(match[part].split()) if match else ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A finding with its rule and its position in the user's code.

    Args:
        rule: The rule that found it.
        finding: The finding.
        position: Its position in the user's code; None if it is unknown.
        edits: Edits that fix the mistake; empty if a person has to decide.
    """

    rule: Rule
    finding: Finding
    position: Position | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def severity(self) -> Severity:
        """Return the severity of the finding: ``"E"`` (error), ``"W"`` (warning) or ``"I"`` (information)."""
        return self.finding.severity or self.rule.severity

    @property
    def fix(self) -> str:
        """Return how to fix the mistake."""
        return self.finding.fix or self.rule.fix

    def __str__(self) -> str:
        """Return the id of the rule and the message."""
        return f"{self.rule.id} {self.finding.message}"


@dataclass(frozen=True, slots=True)
class Failed:
    """A rule that raised an error. The adviser still checks the other rules.

    Args:
        rule: The rule that failed.
        error: The error that it raised.
    """

    rule: Rule
    error: str


def rule(
    id: str, severity: Severity, title: str, *, level: Level = "quick"
) -> Callable[[Callable[[AppFacts], Iterable[Finding]]], Rule]:
    """Register a function as a rule; a decorator. The top of this file has an example."""
    return lambda check: Rule(id, severity, title, level, check)


def check_rules(rules: Iterable[Rule], facts: AppFacts) -> tuple[list[Advice], list[Failed]]:
    """Return the findings of rules, the worst first, and the rules that raised an error."""
    findings: list[Advice] = []
    failed: list[Failed] = []
    for rule in rules:
        try:
            findings += [Advice(rule, finding) for finding in rule.check(facts)]
        except Exception as error:
            failed.append(Failed(rule, f"{type(error).__name__}: {error}"))
    findings.sort(key=lambda advice: ("EWI".index(advice.severity), advice.rule.id))
    return findings, failed


def find_rule(rules: Iterable[Rule], id: str, origin: str) -> Rule:
    """Return the rule with an id.

    Raises:
        ConfigError: No rule has this id.
    """
    by_id = {rule.id: rule for rule in rules}
    if (rule := by_id.get(id.upper())) is not None:
        return rule
    padded = f"{id[:1]}{id[1:]:0>2}".upper()  # L2 means L02, not L12
    candidates = [padded] if padded in by_id else difflib.get_close_matches(id.upper(), by_id, 1, cutoff=0.5)
    raise ConfigError(
        f"{origin}: there is no rule {id!r}" + (f", did you mean {candidates[0]}?" if candidates else ""),
        hint="docs/reference/advice.md lists them all",
    )


def plural(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('ss', 'ch')) else 's'}"
