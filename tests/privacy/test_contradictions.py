"""Tests of the table of settings that contradict noise or secure aggregation: its check, sentences and page."""

import pytest

from ddlf.errors import ConfigError
from ddlf.privacy.contradictions import TABLE, Choice, check, contradiction_of, page_rows, sentence
from ddlf.privacy.secure_sum import MOST

NOISED = {"clip": 1.0, "noise": 1.0}
SECURE = {"secure": True, "quorum": 3}
CHOICES = [
    Choice(trainers="peers", clip=1.0),
    Choice(trainers="peers", noise=1.0),
    Choice(trainers="peers", clip=1e38, noise=1.0),
    Choice(trainers="peers", trust="nobody"),
    Choice(trainers="peers", divisor=3),
    Choice(trainers="peers", budget=3.0),
    Choice(trainers="peers", delta=1e-6),
    Choice(trainers="peers", **NOISED, way="swap"),
    Choice(trainers="peers", **NOISED),
    Choice(trainers="peers", **NOISED, quorum=2, merge="krum"),
    Choice(trainers="peers", **NOISED, quorum=2, update_policy="reject"),
    Choice(trainers="peers", **NOISED, quorum=2, trust="nobody", codec="bfloat16"),
    Choice(trainers="peers", **NOISED, quorum=2, trust="nobody", shards=True),
    Choice(trainers="peers", **SECURE, way="swap"),
    Choice(trainers="peers", **SECURE, merge="median"),
    Choice(trainers="peers", **SECURE, update_policy="reject"),
    Choice(trainers="peers", **SECURE, codec="float16"),
    Choice(trainers="peers", secure=True, quorum=2),
    Choice(trainers="peers", secure=True, quorum=MOST + 1),
    Choice(trainers="peers", **SECURE, decay=True),
    Choice(trainers="peers", **SECURE, shards=True),
    Choice(trainers="peers", **SECURE, **NOISED),
    Choice(trainers="peers", **NOISED, quorum=2, longest=20.0),
    Choice(trainers="peers", **SECURE, longest=0.0),
    Choice(trainers="peers", **NOISED, quorum=2, trial=0.2),
    Choice(trainers="peers", **SECURE, trial=0.2),
    Choice(trainers="runs", **NOISED, trust="nobody"),
    Choice(trainers="runs", **SECURE),
    Choice(trainers="workers", clip=1.0),
    Choice(trainers="workers", noise=1.0),
    Choice(trainers="workers", clip=1.0, noise=1e30),
    Choice(trainers="workers", budget=3.0),
    Choice(trainers="workers", delta=1e-6),
    Choice(trainers="workers", **NOISED, private=False),
    Choice(trainers="workers", **NOISED, way="async"),
    Choice(trainers="workers", **NOISED, way="sync", merge="median"),
    Choice(trainers="workers", **NOISED, way="sync", update_policy="clip"),
    Choice(trainers="workers", **NOISED, way="sync", shared=("local_rule='scaffold'",)),
    Choice(trainers="workers", **NOISED, way="sync", metric="loss"),
    Choice(trainers="workers", way="sync", unit="sample"),
    Choice(trainers="workers", **NOISED, way="async", unit="sample"),
    Choice(trainers="workers", **NOISED, way="sync", unit="sample", shared=("an optimizer with use_ema",)),
    Choice(trainers="workers", **NOISED, way="sync", unit="sample", callbacks=True),
    Choice(trainers="workers", limit=4.0),
    Choice(trainers="workers", secure=True, way="sync", **NOISED, limit=6.7),
    Choice(trainers="workers", secure=True, way="sync", private=False),
    Choice(trainers="workers", secure=True, way="async"),
    Choice(trainers="workers", secure=True, way="sync", merge="median"),
    Choice(trainers="workers", secure=True, way="sync", update_policy="clip"),
    Choice(trainers="workers", secure=True, way="sync", codec="int8"),
    Choice(trainers="workers", secure=True, way="sync", outward="delta:int8"),
    Choice(trainers="workers", secure=True, way="sync", **NOISED, unit="sample"),
    Choice(trainers="workers", secure=True, way="sync", shared=("batchnorm='local'",)),
    Choice(trainers="workers", secure=True, way="sync", states="kept"),
    Choice(trainers="workers", secure=True, way="sync", callbacks=True),
    Choice(trainers="workers", secure=True, way="sync", metric="loss"),
]
"""A choice for each row, in the order of the table."""


@pytest.mark.parametrize(("row", "choice"), list(zip(TABLE, CHOICES, strict=True)))
def test_each_row_refuses_its_choice_with_its_sentence(row, choice):
    with pytest.raises(ConfigError) as error:
        check(choice)
    assert error.value.message == sentence(row, choice)
    assert error.value.hint == row.hint
    assert "{" not in error.value.message


@pytest.mark.parametrize(
    "choice",
    [
        Choice(trainers="peers"),
        Choice(trainers="peers", **SECURE),
        Choice(trainers="peers", secure=True, quorum=MOST),
        Choice(trainers="peers", merge="median", update_policy="clip", codec="float16", shards=True),
        Choice(trainers="peers", **NOISED, quorum=2),
        Choice(trainers="peers", **NOISED, divisor=4, trust="nobody"),
        Choice(trainers="peers", **NOISED, quorum=2, trust="server", codec="float16", shards=True),
        Choice(trainers="runs", **NOISED, trust="server"),
        Choice(trainers="workers", **NOISED, way="sync"),
        Choice(trainers="workers", **NOISED, way="sync", callbacks=True),
        Choice(trainers="workers", **NOISED, way="sync", unit="sample", merge="median", update_policy="reject"),
        Choice(trainers="workers", secure=True, way="sync", limit=4.0),
        Choice(trainers="workers", secure=True, way="sync", **NOISED),
        Choice(trainers="workers", private=False, way="async", merge="median", shared=("batchnorm='local'",)),
    ],
)
def test_a_choice_without_a_contradiction_is_accepted(choice):
    assert contradiction_of(choice) is None
    check(choice)


def test_the_page_has_each_row_of_its_trainers():
    rows = [row for trainers in ("peers", "runs", "workers") for row in page_rows(trainers)]
    assert len(rows) == len(TABLE)
    assert all(row.reason in line and row.hint in line for row, line in zip(TABLE, rows, strict=True))
    assert any(line.startswith("- **noise with the merge median**: ") for line in rows)
