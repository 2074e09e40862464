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
    for advice in report.advice:
        position = "" if advice.position is None else f"{_relative_path(advice.position.path)}:{advice.position.line}  "
        yield f"{SEVERITIES[advice.severity]:<8}  {advice.rule.id}  {position}{advice.finding.message}"
        yield f"     why  {advice.rule.reason}"
        yield f"     fix  {advice.fix}"
        yield f"  source  {advice.rule.source}"
        if advice.edits:
            yield "    edit  --fix makes this change, --diff prints it"
        yield ""
    for failed in report.failed:
        yield f"failed    {failed.rule.id} could not be checked ({failed.error}); all other rules were"
    yield from (f"skipped   {sentence}" for sentence in report.skipped)
    for ignore in report.unused:
        at = ignore.position
        yield f"comment   {_relative_path(at.path)}:{at.line}: ignore[{ignore.id}] is not needed any more"
    counts = Counter(advice.severity for advice in report.advice)
    counted = ", ".join(
        f"{counts[key]} {name}{'s' * (counts[key] != 1)}" for key, name in SEVERITIES.items() if counts[key]
    )
    ignored = f"; {report.ignored} ignored by comments" if report.ignored else ""
    by = "" if rules is None else f", by {rules} rules"
    yield f"advice    {counted or 'nothing found'}{by}{ignored}"


def _relative_path(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def as_json(report: AdviserReport) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    return {
        "findings": [
            {
                "rule": advice.rule.id,
                "severity": SEVERITIES[advice.severity],
                "title": advice.rule.title,
                "what": advice.finding.message,
                "why": advice.rule.reason,
                "fix": advice.fix,
                "source": advice.rule.source,
                "file": None if advice.position is None else _relative_path(advice.position.path),
                "line": None if advice.position is None else advice.position.line,
                "about": list(advice.finding.subject),
                "samples": list(advice.finding.samples),
                "diff": diff(advice.edits),
            }
            for advice in report.advice
        ],
        "failed": [{"rule": advice.rule.id, "why": advice.error} for advice in report.failed],
        "ignored": report.ignored,
        "left": list(report.skipped),
        "unneeded": [
            {"rule": advice.id, "file": _relative_path(advice.position.path), "line": advice.position.line}
            for advice in report.unused
        ],
    }


def as_sarif(report: AdviserReport) -> dict[str, Any]:
    """Return the report in the Static Analysis Results Interchange Format (SARIF), version 2.1.0."""
    used = {advice.rule.id: advice.rule for advice in report.advice}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ddlf advise",
                        "version": __version__,
                        "rules": [_sarif_rule(advice) for advice in used.values()],
                    }
                },
                "results": [_sarif_result(advice) for advice in report.advice],
            }
        ],
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.reason},
        "help": {"text": f"{rule.fix} Source: {rule.source}"},
        "defaultConfiguration": {"level": SEVERITIES[rule.severity]},
    }


def _sarif_result(advice: Advice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": advice.rule.id,
        "level": SEVERITIES[advice.severity],
        "message": {"text": f"{advice.finding.message}. {advice.fix}"},
    }
    if advice.position is not None:
        location = {
            "artifactLocation": {"uri": Path(_relative_path(advice.position.path)).as_posix()},
            "region": {"startLine": advice.position.line},
        }
        result["locations"] = [{"physicalLocation": location}]
    if advice.edits:
        changes = [
            {
                "artifactLocation": {"uri": Path(_relative_path(edit.path)).as_posix()},
                "replacements": [
                    {
                        "deletedRegion": _region(edit),
                        "insertedContent": {"text": edit.text},
                    }
                ],
            }
            for edit in advice.edits
        ]
        result["fixes"] = [{"description": {"text": advice.fix}, "artifactChanges": changes}]
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
        f"**Why**: {rule.reason}\n\n**What to do**: {rule.fix}\n\n"
        f"**Source**: {rule.source}\n\n"
        f"To accept a finding, write the comment `# ddlf: ignore[{rule.id}] reason` on its line. On the line of the class, "
        "the comment accepts all findings of this rule in the file.\n"
    )
