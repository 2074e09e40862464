"""The report of the adviser, as lines for people, as JSON, and as SARIF for code review. Reads files only to make diffs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlf.extras.advice.changes import Edit, diff, places
from ddlf.extras.advice.rule import CLASSES, SEVERITIES, Failed, Finding, Rule
from ddlf.extras.advice.source import Ignore, Place
from ddlf.version import __version__

SARIF_LEVELS = {"E": "error", "W": "warning", "I": "note"}


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding, where it is in the user's code.

    Args:
        finding: What was found.
        place: Where that is written; None if it is not known.
        edits: What would mend it; none if nobody but the user can.
    """

    finding: Finding
    place: Place | None
    edits: tuple[Edit, ...] = ()

    def __str__(self) -> str:
        """A line."""
        return f"{self.finding.rule.id} {self.finding.found.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """What the adviser says of an app.

    Args:
        advice: Findings, the worst first.
        failed: Rules that raised.
        ignored: How many findings the user's comments have taken away.
        unneeded: Comments that took nothing away.
        left: What was not looked at, and why, as sentences.
    """

    advice: tuple[Advice, ...] = ()
    failed: tuple[Failed, ...] = ()
    ignored: int = 0
    unneeded: tuple[Ignore, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What ``ddlf advise`` prints."""
        return "\n".join(lines(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # the last line of a cell in a notebook
        printer.text(str(self))


def lines(answer: Report, rules: int | None = None) -> Iterator[str]:
    """What people read.

    Args:
        answer: What came of asking.
        rules: How many were asked, if that is to be said.
    """
    for one in answer.advice:
        finding, rule = one.finding, one.finding.rule
        yield f"{SEVERITIES[finding.severity]:<8}  {rule.id}  {_where(one)}{finding.found.what}"
        yield f"     why  {rule.why}"
        yield f"     try  {finding.fix}"
        yield f"  source  {rule.source}"
        if one.edits:
            yield "    mend  --fix writes it, --diff shows it"
        yield ""
    for failed in answer.failed:
        yield f"failed    {failed.rule.id} could not look ({failed.why}); all other rules have"
    yield from (f"left      {sentence}" for sentence in answer.left)
    for ignore in answer.unneeded:
        yield f"comment   {_short(ignore.place.path)}:{ignore.place.line}: ignore[{ignore.id}] is not needed any more"
    counts = Counter(one.finding.severity for one in answer.advice)
    said = ", ".join(
        f"{counts[key]} {name}{'s' * (counts[key] != 1)}" for key, name in SEVERITIES.items() if counts[key]
    )
    ignored = f"; {answer.ignored} ignored by comments" if answer.ignored else ""
    by = "" if rules is None else f", by {rules} rules"
    yield f"advice    {said or 'nothing found'}{by}{ignored}"


def _where(one: Advice) -> str:
    return "" if one.place is None else f"{_short(one.place.path)}:{one.place.line}  "


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def as_json(answer: Report) -> dict[str, Any]:
    """An answer as data for programs."""
    return {
        "findings": [
            {
                "rule": one.finding.rule.id,
                "severity": SEVERITIES[one.finding.severity],
                "title": one.finding.rule.title,
                "what": one.finding.found.what,
                "why": one.finding.rule.why,
                "fix": one.finding.fix,
                "source": one.finding.rule.source,
                "file": None if one.place is None else _short(one.place.path),
                "line": None if one.place is None else one.place.line,
                "about": list(one.finding.found.at),
                "samples": list(one.finding.found.samples),
                "diff": diff(one.edits),
            }
            for one in answer.advice
        ],
        "failed": [{"rule": one.rule.id, "why": one.why} for one in answer.failed],
        "ignored": answer.ignored,
        "left": list(answer.left),
        "unneeded": [
            {"rule": one.id, "file": _short(one.place.path), "line": one.place.line} for one in answer.unneeded
        ],
    }


def as_sarif(answer: Report) -> dict[str, Any]:
    """An answer in the Static Analysis Results Interchange Format, version 2.1.0."""
    used = {one.finding.rule.id: one.finding.rule for one in answer.advice}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ddlf advise",
                        "version": __version__,
                        "rules": [_sarif_rule(one) for one in used.values()],
                    }
                },
                "results": [_sarif_result(one) for one in answer.advice],
            }
        ],
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.fix} Source: {rule.source}"},
        "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(one: Advice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.finding.rule.id,
        "level": SARIF_LEVELS[one.finding.severity],
        "message": {"text": f"{one.finding.found.what}. {one.finding.fix}"},
    }
    if one.place is not None:
        place = {
            "artifactLocation": {"uri": Path(_short(one.place.path)).as_posix()},
            "region": {"startLine": one.place.line},
        }
        result["locations"] = [{"physicalLocation": place}]
    if one.edits:
        changes = [
            {
                "artifactLocation": {"uri": Path(_short(edit.path)).as_posix()},
                "replacements": [
                    {
                        "deletedRegion": _region(edit),
                        "insertedContent": {"text": edit.text},
                    }
                ],
            }
            for edit in one.edits
        ]
        result["fixes"] = [{"description": {"text": one.finding.fix}, "artifactChanges": changes}]
    return result


def _region(edit: Edit) -> dict[str, int]:
    """The letters that go, counted as the file has them."""
    at = places(edit.path.read_bytes().decode())
    return {"charOffset": at[edit.begin], "charLength": at[edit.end] - at[edit.begin]}


def explained(rule: Rule) -> str:
    """All that there is to know of a rule, as a page of Markdown."""
    level = {
        "quick": "settings, arrays and the model as it is built: nothing is trained",
        "batch": "some batches on a copy of the model",
        "cluster": "what only workers would tell: a fresh process, several slots",
        "run": "the records of a run",
    }[rule.level]
    return (
        f"# {rule.id}: {rule.title}\n\n"
        f"*{SEVERITIES[rule.severity]}; {CLASSES[rule.id[0]].lower()}; level {rule.level}: {level}*\n\n"
        f"**Why**: {rule.why}\n\n**What to do**: {rule.fix}\n\n"
        f"**Source**: {rule.source}\n\n"
        f"Where it is meant: `# ddlf: ignore[{rule.id}] reason` on the line that it names, or on that of the class.\n"
    )
