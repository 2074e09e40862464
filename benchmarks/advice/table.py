"""Summarise the records of the corpus: recall, right rules, false alarms, fixes, and each rule's share. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import table

SAID = ("E", "W")
Record = dict[str, Any]


def is_found(record: Record) -> bool:
    """Return whether a defect is found: by a new error or warning, or by the right rule with any severity."""
    return any(severity in SAID for _, severity, *_ in record["found"]) or is_right(record)


def is_right(record: Record) -> bool:
    """Return whether a rule that names the defect has found it."""
    return any(rule in record["rules"] and severity in (*SAID, "I") for rule, severity, *_ in record["found"])


def is_quick(record: Record) -> bool:
    """Return whether the quick level, which reads only settings and arrays, has found the defect."""
    return any(level == "quick" and (s in SAID or rule in record["rules"]) for rule, s, level, *_ in record["found"])


def report(records: list[Record]) -> Iterator[str]:
    """Yield the lines of the report."""
    planted = [record for record in records if "kind" in record]
    hurting = [record for record in planted if record["hurts"]]
    if hurting:
        yield from _defects(planted, hurting)
    wholes = [record for record in records if "whole" in record]
    if wholes:
        yield from _wholes(wholes)
    yield from _rules(hurting, wholes)


def _share(part: int, of: int) -> str:
    return f"{part} of {of} ({part / of:.0%})" if of else "none"


def _defects(planted: list[Record], hurting: list[Record]) -> Iterator[str]:
    kinds = {record["kind"] for record in hurting}
    yield f"planted: {len(planted)} defects; {len(hurting)}, of {len(kinds)} kinds, hurt by more than the spread of 3 seeds, or cannot run"
    for name, predicate in (("found", is_found), ("by the right rule", is_right), ("quick level alone", is_quick)):
        yield f"  {name}: {_share(sum(map(predicate, hurting)), len(hurting))}"
    clusters = [record for record in hurting if any(rule[0] == "C" for rule in record["rules"])]
    yield f"  of class C: {_share(sum(map(is_right, clusters)), len(clusters))}"
    for record in hurting:
        if not is_right(record):
            rules = ", ".join(sorted({rule for rule, severity, *_ in record["found"] if severity in SAID})) or "nothing"
            outcome = "found otherwise" if is_found(record) else "MISSED"
            yield f"    {outcome}: {record['kind']} ({record['base']}): {rules}, not {' '.join(record['rules'])}"
    for record in planted:
        if not record["hurts"]:
            outcome = "found" if is_found(record) else "not found"
            yield f"    did not hurt ({record.get('lost', 0):+.3f}): {record['kind']} ({record['base']}), {outcome}"
    yield from _fixes([record for record in planted if "fix" in record])


def _fixes(mended: list[Record]) -> Iterator[str]:
    yield f"fixes: {len(mended)} diffs"
    for name in ("applies", "runs", "silent"):
        tested = [record for record in mended if name in record["fix"]]
        yield f"  {name}: {_share(sum(record['fix'][name] for record in tested), len(tested))}"
    restored = [record for record in mended if "back" in record["fix"]]
    yield f"  accuracy back within a point: {_share(sum(record['fix']['back'] for record in restored), len(restored))}"
    for record in mended:
        wrong = [name for name in ("applies", "runs", "silent", "back") if not record["fix"].get(name, True)]
        if wrong:
            reason = record["fix"].get("error") or record["fix"].get("scores", "")
            yield f"    not {', '.join(wrong)}: {record['kind']} ({record['base']}), {' '.join(record['fix']['rules'])}: {reason}"


def _wholes(wholes: list[Record]) -> Iterator[str]:
    counts = Counter(severity for record in wholes for _, severity, *_ in record["found"])
    most = max(Counter(s for _, s, *_ in record["found"])["I"] for record in wholes)
    numbers = ", ".join(f"{counts[key]} {name}" for key, name in (("E", "errors"), ("W", "warnings"), ("I", "notes")))
    yield f"healthy: {len(wholes)} programs; {numbers}, {most} notes at most in one; {counts['failed']} rules failed"
    quick = [
        record
        for record in wholes
        if record["what"] == "app" and any(level == "quick" for _, _, level, *_ in record["found"])
    ]
    yield f"  apps with findings of the quick level: {', '.join(record['whole'] for record in quick) or 'none'}"
    for record in wholes:
        for rule, severity, _, sentence in record["found"]:
            yield f"    {severity} {rule} {record['whole']}: {sentence}"


def _rules(hurting: list[Record], wholes: list[Record]) -> Iterator[str]:
    planted = Counter(rule for record in hurting for rule in record["rules"])
    hit = Counter(
        rule for record in hurting for rule in {finding[0] for finding in record["found"]} & set(record["rules"])
    )
    other = Counter(
        rule for record in hurting for rule in {f[0] for f in record["found"] if f[1] in SAID} - set(record["rules"])
    )
    alarms = Counter(rule for record in wholes for rule, severity, *_ in record["found"] if severity in SAID)
    rows = [["rule", "names", "found", "beside another", "false alarms"]]
    rows += [
        [rule, str(planted[rule]), str(hit[rule]), str(other[rule]), str(alarms[rule])]
        for rule in sorted({*planted, *other, *alarms})
    ]
    yield ""
    yield table(rows)
