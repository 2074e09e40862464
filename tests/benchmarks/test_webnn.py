"""Tests of the WebNN experiment: its short form with real processes, and its sentences about the published claims."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.webnn import ONE, claims, facts_of, rows
from ddlf.peers.entries import Arrived, Began, Ended, Posted, Validated
from ddlf.peers.journal import open_journal
from tests.patience import PATIENCE_S


def test_facts_come_from_the_journal(tmp_path):
    journal, _ = open_journal(tmp_path)
    journal.begin_file({}, {})
    entries = [
        (Began(at=100.0, set=1, run="r"), b"s"),
        (Arrived(at=110.0, peer=1, name="", samples=3, keeps=False), b""),
        (Arrived(at=111.0, peer=2, name="", samples=3, keeps=False), b""),
        (Posted(at=112.0, peer=1, number=1, set=2, contains=1, updates=30), b"s"),
        (Posted(at=113.0, peer=2, number=1, set=3, contains=1, updates=10), b"s"),
        *((Validated(at=113.0, set=2, accuracy=a, loss=1.0, samples=9), b"") for a in (0.1, 0.9, 0.9, 0.9, 0.9, 1.0)),
        (Ended(at=120.0, why="over"), b""),
    ]
    journal.append(entries)
    journal.close()
    assert facts_of(tmp_path, 0.91) == {"reached": True, "seconds": 10.0, "updates": 40, "best": 1.0, "pace": 2.0}
    assert not facts_of(tmp_path, 0.93)["reached"]


def test_claims_rank_rules_by_seconds_and_put_failed_rules_last():
    seconds = {"average": 9.0, "weighted": 6.0, "copy": 8.0, "mimic": 5.0}
    runs = [
        {"rule": rule, "peers": peers, "seconds": value + repeat, "updates": 10, "best": 0.9, "pace": 1.0}
        | {"reached": rule != "mimic" or repeat == 0}
        for rule, value in seconds.items()
        for peers in (2, 4)
        for repeat in (0, 2)
    ]
    alone = {"rule": ONE, "peers": 1, "seconds": 4.0, "updates": 9, "best": 1.0, "pace": 1.0, "reached": True}
    ranked = "with 4 peers weighted 7.0 s, copy 9.0 s, average 10.0 s, mimic not each time"
    assert claims([alone, *runs]) == [
        f"published: weighted is the best. measured: yes: {ranked}",
        f"published: mimic is the worst. measured: yes: {ranked}",
        "published: copy equals one peer. measured: no, it is slower: copy 9.0 s with 4 peers, one peer 4.0 s",
        "published: average suffers from many peers. measured: no: 2 peers 10.0 s, 4 peers 10.0 s",
        f"published: one peer looks faster than all. measured: yes: one peer 4.0 s; {ranked}",
    ]
    close = [run | {"seconds": run["seconds"] / 10 + 5 * (run["rule"] == "weighted")} for run in runs]
    verdicts = [
        claim.partition("measured: ")[2].partition(":")[0] for claim in claims([alone | {"seconds": 0.8}, *close])
    ]
    assert verdicts == ["no", "yes", "yes", "no", "not clear"]
    [mimic_row] = (row for row in rows(runs, 0.97) if row[:2] == ["mimic", "4"])
    assert mimic_row[2] == "1 of 2"


@pytest.mark.slow
def test_short_form_reaches_its_target_with_each_rule(few_digits, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.webnn", "--quick", "--rules", "weighted", "--target", "0.5", "--every", "2"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"DDLF_DATA": str(few_digits), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    runs = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [(run["rule"], run["peers"], run["reached"]) for run in runs] == [(ONE, 1, True), ("weighted", 2, True)]
