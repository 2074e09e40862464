"""Summarise the records of the corpus: recall, right rules, false alarms, fixes, and each rule's share. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import table

SAID = ("E", "W")
Record = dict[str, Any]


def is_found(one: Record) -> bool:
    """Return whether a defect is found: by a new error or warning, or by the right rule with any severity."""
    return any(severity in SAID for _, severity, *_ in one["found"]) or is_right(one)


def is_right(one: Record) -> bool:
    """Return whether a rule that names the defect has found it."""
    return any(rule in one["rules"] and severity in (*SAID, "I") for rule, severity, *_ in one["found"])


def is_quick(one: Record) -> bool:
    """Return whether the quick level, which reads only settings and arrays, has found the defect."""
    return any(level == "quick" and (s in SAID or rule in one["rules"]) for rule, s, level, *_ in one["found"])


def report(records: list[Record]) -> Iterator[str]:
    """Yield the lines of the report."""
    planted = [one for one in records if "kind" in one]
    hurting = [one for one in planted if one["hurts"]]
    if hurting:
        yield from _defects(planted, hurting)
    wholes = [one for one in records if "whole" in one]
    if wholes:
        yield from _wholes(wholes)
    yield from _rules(hurting, wholes)


def _share(part: int, of: int) -> str:
    return f"{part} of {of} ({part / of:.0%})" if of else "none"


def _defects(planted: list[Record], hurting: list[Record]) -> Iterator[str]:
    kinds = {one["kind"] for one in hurting}
    yield f"planted: {len(planted)} defects; {len(hurting)}, of {len(kinds)} kinds, hurt by more than the spread of 3 seeds, or cannot run"
    for name, what in (("found", is_found), ("by the right rule", is_right), ("quick level alone", is_quick)):
        yield f"  {name}: {_share(sum(map(what, hurting)), len(hurting))}"
    clusters = [one for one in hurting if any(rule[0] == "C" for rule in one["rules"])]
    yield f"  of class C: {_share(sum(map(is_right, clusters)), len(clusters))}"
    for one in hurting:
        if not is_right(one):
            said = ", ".join(sorted({rule for rule, severity, *_ in one["found"] if severity in SAID})) or "nothing"
            yield f"    {'found otherwise' if is_found(one) else 'MISSED'}: {one['kind']} ({one['base']}): {said}, not {' '.join(one['rules'])}"
    for one in planted:
        if not one["hurts"]:
            yield f"    did not hurt ({one.get('lost', 0):+.3f}): {one['kind']} ({one['base']}), {'found' if is_found(one) else 'not found'}"
    yield from _fixes([one for one in planted if "fix" in one])


def _fixes(mended: list[Record]) -> Iterator[str]:
    yield f"fixes: {len(mended)} diffs"
    for name in ("applies", "runs", "silent"):
        known = [one for one in mended if name in one["fix"]]
        yield f"  {name}: {_share(sum(one['fix'][name] for one in known), len(known))}"
    back = [one for one in mended if "back" in one["fix"]]
    yield f"  accuracy back within a point: {_share(sum(one['fix']['back'] for one in back), len(back))}"
    for one in mended:
        wrong = [name for name in ("applies", "runs", "silent", "back") if not one["fix"].get(name, True)]
        if wrong:
            why = one["fix"].get("error") or one["fix"].get("scores", "")
            yield f"    not {', '.join(wrong)}: {one['kind']} ({one['base']}), {' '.join(one['fix']['rules'])}: {why}"


def _wholes(wholes: list[Record]) -> Iterator[str]:
    counts = Counter(severity for one in wholes for _, severity, *_ in one["found"])
    most = max(Counter(s for _, s, *_ in one["found"])["I"] for one in wholes)
    said = ", ".join(f"{counts[key]} {name}" for key, name in (("E", "errors"), ("W", "warnings"), ("I", "notes")))
    yield f"healthy: {len(wholes)} programs; {said}, {most} notes at most in one; {counts['failed']} rules failed"
    quick = [
        one for one in wholes if one["what"] == "app" and any(level == "quick" for _, _, level, *_ in one["found"])
    ]
    yield f"  apps with findings of the quick level: {', '.join(one['whole'] for one in quick) or 'none'}"
    for one in wholes:
        for rule, severity, _, what in one["found"]:
            yield f"    {severity} {rule} {one['whole']}: {what}"


def _rules(hurting: list[Record], wholes: list[Record]) -> Iterator[str]:
    meant = Counter(rule for one in hurting for rule in one["rules"])
    hit = Counter(rule for one in hurting for rule in {found[0] for found in one["found"]} & set(one["rules"]))
    other = Counter(
        rule for one in hurting for rule in {f[0] for f in one["found"] if f[1] in SAID} - set(one["rules"])
    )
    alarms = Counter(rule for one in wholes for rule, severity, *_ in one["found"] if severity in SAID)
    rows = [["rule", "names", "found", "beside another", "false alarms"]]
    rows += [
        [rule, str(meant[rule]), str(hit[rule]), str(other[rule]), str(alarms[rule])]
        for rule in sorted({*meant, *other, *alarms})
    ]
    yield ""
    yield table(rows)
