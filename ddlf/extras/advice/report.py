"""Prints the adviser's report as lines of text, as JSON, and as SARIF for code review.

Reads files only to make diffs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlf.extras.advice.changes import diff, offsets
from ddlf.extras.advice.rule import CLASSES, SEVERITIES, Advice, Edit, Failed, Rule
from ddlf.extras.advice.source import Ignore
from ddlf.version import __version__


@dataclass(frozen=True, slots=True)
class AdviserReport:
    """The report of the adviser. Its text is the output of ``ddlf advise``.

    Args:
        advice: Findings, the worst first.
        failed: The rules that raised an error.
        ignored: Number of findings that the user's comments ignore.
        unused: The comments that ignore no finding.
        skipped: Sentences that name the skipped checks and the reasons.
    """

    advice: tuple[Advice, ...] = ()
    failed: tuple[Failed, ...] = ()
    ignored: int = 0
    unused: tuple[Ignore, ...] = ()
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the report as the text that ``ddlf advise`` prints."""
        return "\n".join(lines(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # a notebook calls this for the last line of a cell
        printer.text(str(self))


def lines(report: AdviserReport, rules: int | None = None) -> Iterator[str]:
    """Yield the report's lines of text.

    Args:
        report: The report to print.
        rules: The number of checked rules, for the last line.
    """
    for one in report.advice:
        where = "" if one.position is None else f"{_short(one.position.path)}:{one.position.line}  "
        yield f"{SEVERITIES[one.severity]:<8}  {one.rule.id}  {where}{one.finding.message}"
        yield f"     why  {one.rule.why}"
        yield f"     fix  {one.fix}"
        yield f"  source  {one.rule.source}"
        if one.edits:
            yield "    edit  --fix makes this change, --diff prints it"
        yield ""
    for failed in report.failed:
        yield f"failed    {failed.rule.id} could not be checked ({failed.error}); all other rules were"
    yield from (f"skipped   {sentence}" for sentence in report.skipped)
    for ignore in report.unused:
        at = ignore.position
        yield f"comment   {_short(at.path)}:{at.line}: ignore[{ignore.id}] is not needed any more"
    counts = Counter(one.severity for one in report.advice)
    said = ", ".join(
        f"{counts[key]} {name}{'s' * (counts[key] != 1)}" for key, name in SEVERITIES.items() if counts[key]
    )
    ignored = f"; {report.ignored} ignored by comments" if report.ignored else ""
    by = "" if rules is None else f", by {rules} rules"
    yield f"advice    {said or 'nothing found'}{by}{ignored}"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def as_json(report: AdviserReport) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    return {
        "findings": [
            {
                "rule": one.rule.id,
                "severity": SEVERITIES[one.severity],
                "title": one.rule.title,
                "what": one.finding.message,
                "why": one.rule.why,
                "fix": one.fix,
                "source": one.rule.source,
                "file": None if one.position is None else _short(one.position.path),
                "line": None if one.position is None else one.position.line,
                "about": list(one.finding.subject),
                "samples": list(one.finding.samples),
                "diff": diff(one.edits),
            }
            for one in report.advice
        ],
        "failed": [{"rule": one.rule.id, "why": one.error} for one in report.failed],
        "ignored": report.ignored,
        "left": list(report.skipped),
        "unneeded": [
            {"rule": one.id, "file": _short(one.position.path), "line": one.position.line} for one in report.unused
        ],
    }


def as_sarif(report: AdviserReport) -> dict[str, Any]:
    """Return the report in the Static Analysis Results Interchange Format (SARIF), version 2.1.0."""
    used = {one.rule.id: one.rule for one in report.advice}
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
                "results": [_sarif_result(one) for one in report.advice],
            }
        ],
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.fix} Source: {rule.source}"},
        "defaultConfiguration": {"level": SEVERITIES[rule.severity]},
    }


def _sarif_result(one: Advice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": one.rule.id,
        "level": SEVERITIES[one.severity],
        "message": {"text": f"{one.finding.message}. {one.fix}"},
    }
    if one.position is not None:
        place = {
            "artifactLocation": {"uri": Path(_short(one.position.path)).as_posix()},
            "region": {"startLine": one.position.line},
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
        result["fixes"] = [{"description": {"text": one.fix}, "artifactChanges": changes}]
    return result


def _region(edit: Edit) -> dict[str, int]:
    """Return the region of a file that an edit replaces, as an object in the SARIF format."""
    at = offsets(edit.path.read_bytes().decode())
    return {"charOffset": at[edit.begin], "charLength": at[edit.end] - at[edit.begin]}


def explained(rule: Rule) -> str:
    """Return the explanation of a rule as a page of Markdown."""
    level = {
        "quick": "DDLF checks settings, arrays and the built model, and trains nothing",
        "batch": "DDLF trains a copy of the model on some batches",
        "cluster": "DDLF uses a second process and several slots, to find defects that one process does not have",
        "run": "DDLF reads the records of a run",
    }[rule.level]
    return (
        f"# {rule.id}: {rule.title}\n\n"
        f"*Severity: {SEVERITIES[rule.severity]}. Subject: {CLASSES[rule.id[0]].lower()}. Level `{rule.level}`: {level}.*\n\n"
        f"**Why**: {rule.why}\n\n**What to do**: {rule.fix}\n\n"
        f"**Source**: {rule.source}\n\n"
        f"To accept a finding, write the comment `# ddlf: ignore[{rule.id}] reason` on its line. On the line of the class, "
        "the comment accepts all findings of this rule in the file.\n"
    )
