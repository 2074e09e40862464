"""Tests of the table of settings that contradict noise or secure aggregation: its check, sentences and page."""

import pytest

from ddlf.errors import ConfigError
from ddlf.privacy.contradictions import TABLE, Choice, check, found, page_rows, sentence
from ddlf.privacy.secure_sum import MOST

NOISED = {"clip": 1.0, "noise": 1.0}
SECURE = {"secure": True, "quorum": 3}
CHOICES = [
    Choice(place="peers", clip=1.0),
    Choice(place="peers", noise=1.0),
    Choice(place="peers", clip=1e38, noise=1.0),
    Choice(place="peers", trust="nobody"),
    Choice(place="peers", divisor=3),
    Choice(place="peers", budget=3.0),
    Choice(place="peers", delta=1e-6),
    Choice(place="peers", **NOISED, way="swap"),
    Choice(place="peers", **NOISED),
    Choice(place="peers", **NOISED, quorum=2, merge="krum"),
    Choice(place="peers", **NOISED, quorum=2, update_policy="reject"),
    Choice(place="peers", **NOISED, quorum=2, trust="nobody", codec="bfloat16"),
    Choice(place="peers", **NOISED, quorum=2, trust="nobody", shards=True),
    Choice(place="peers", **SECURE, way="swap"),
    Choice(place="peers", **SECURE, merge="median"),
    Choice(place="peers", **SECURE, update_policy="reject"),
    Choice(place="peers", **SECURE, codec="float16"),
    Choice(place="peers", secure=True, quorum=2),
    Choice(place="peers", secure=True, quorum=MOST + 1),
    Choice(place="peers", **SECURE, decay=True),
    Choice(place="peers", **SECURE, shards=True),
    Choice(place="peers", **SECURE, **NOISED),
    Choice(place="peers", **NOISED, quorum=2, longest=20.0),
    Choice(place="peers", **SECURE, longest=0.0),
    Choice(place="peers", **NOISED, quorum=2, trial=0.2),
    Choice(place="peers", **SECURE, trial=0.2),
    Choice(place="runs", **NOISED, trust="nobody"),
    Choice(place="runs", **SECURE),
    Choice(place="workers", clip=1.0),
    Choice(place="workers", noise=1.0),
    Choice(place="workers", clip=1.0, noise=1e30),
    Choice(place="workers", budget=3.0),
    Choice(place="workers", delta=1e-6),
    Choice(place="workers", **NOISED, private=False),
    Choice(place="workers", **NOISED, way="async"),
    Choice(place="workers", **NOISED, way="sync", merge="median"),
    Choice(place="workers", **NOISED, way="sync", update_policy="clip"),
    Choice(place="workers", **NOISED, way="sync", shared=("local_rule='scaffold'",)),
    Choice(place="workers", **NOISED, way="sync", metric="loss"),
    Choice(place="workers", way="sync", unit="sample"),
    Choice(place="workers", **NOISED, way="async", unit="sample"),
    Choice(place="workers", **NOISED, way="sync", unit="sample", shared=("an optimizer with use_ema",)),
    Choice(place="workers", **NOISED, way="sync", unit="sample", callbacks=True),
    Choice(place="workers", limit=4.0),
    Choice(place="workers", secure=True, way="sync", **NOISED, limit=6.7),
    Choice(place="workers", secure=True, way="sync", private=False),
    Choice(place="workers", secure=True, way="async"),
    Choice(place="workers", secure=True, way="sync", merge="median"),
    Choice(place="workers", secure=True, way="sync", update_policy="clip"),
    Choice(place="workers", secure=True, way="sync", codec="int8"),
    Choice(place="workers", secure=True, way="sync", outward="delta:int8"),
    Choice(place="workers", secure=True, way="sync", **NOISED, unit="sample"),
    Choice(place="workers", secure=True, way="sync", shared=("batchnorm='local'",)),
    Choice(place="workers", secure=True, way="sync", states="kept"),
    Choice(place="workers", secure=True, way="sync", callbacks=True),
    Choice(place="workers", secure=True, way="sync", metric="loss"),
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
        Choice(place="peers"),
        Choice(place="peers", **SECURE),
        Choice(place="peers", secure=True, quorum=MOST),
        Choice(place="peers", merge="median", update_policy="clip", codec="float16", shards=True),
        Choice(place="peers", **NOISED, quorum=2),
        Choice(place="peers", **NOISED, divisor=4, trust="nobody"),
        Choice(place="peers", **NOISED, quorum=2, trust="server", codec="float16", shards=True),
        Choice(place="runs", **NOISED, trust="server"),
        Choice(place="workers", **NOISED, way="sync"),
        Choice(place="workers", **NOISED, way="sync", callbacks=True),
        Choice(place="workers", **NOISED, way="sync", unit="sample", merge="median", update_policy="reject"),
        Choice(place="workers", secure=True, way="sync", limit=4.0),
        Choice(place="workers", secure=True, way="sync", **NOISED),
        Choice(place="workers", private=False, way="async", merge="median", shared=("batchnorm='local'",)),
    ],
)
def test_a_choice_without_a_contradiction_is_accepted(choice):
    assert found(choice) is None
    check(choice)


def test_the_page_has_each_row_of_its_place():
    rows = [row for section in ("peers", "runs", "workers") for row in page_rows(section)]
    assert len(rows) == len(TABLE)
    assert all(row.why in line and row.hint in line for row, line in zip(TABLE, rows, strict=True))
    assert any(line.startswith("- **noise with the merge median**: ") for line in rows)
