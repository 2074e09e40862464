"""Tests of the corpus of the adviser: each defect can be planted, and the quick level finds most defects."""

import pytest

from benchmarks.advice import __main__ as advice
from benchmarks.advice import table
from benchmarks.advice.corpus import DEFECTS
from ddlf.extras.advice.rules import RULES


def test_each_defect_is_another_program_with_known_rules():
    texts = [defect.text() for defect in DEFECTS]
    assert len(set(texts)) == len(texts) >= 90
    assert len({defect.kind for defect in DEFECTS}) >= 60
    assert {rule for defect in DEFECTS for rule in defect.rules} <= {rule.id for rule in RULES}


@pytest.mark.parametrize(
    ("findings", "is_found", "is_right", "is_quick"),
    [
        ([["D03", "W", "quick", ""]], True, True, True),
        ([["M28", "W", "batch", ""]], True, False, False),
        ([["D15", "I", "quick", ""]], False, False, False),
        ([], False, False, False),
    ],
)
def test_findings_of_a_defect_are_classified(findings, is_found, is_right, is_quick):
    row = {"found": findings, "rules": ["D03"]}
    assert (table.is_found(row), table.is_right(row), table.is_quick(row)) == (is_found, is_right, is_quick)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # one of the defects is a file that a program does not close
def test_the_quick_level_alone_finds_most_defects():
    records = advice.main(["--quick", "--part", "1/4"])
    assert len(records) >= 22
    assert sum(map(table.is_quick, records)) >= 0.6 * len(records)
    assert "quick level alone" in "\n".join(table.report(records))
