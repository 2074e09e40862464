"""Tests of reading a past run: the time of each worker, and the incidents."""

import json
import math

import pytest

from ddlf import events as e
from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder, table
from ddlf.monitor.runs.run_reader import end_of, read
from tests.monitor.runs.made import BEGAN, events_of, record, run


def test_computing_transferring_and_waiting_add_up_to_the_whole_time(tmp_path):
    past_run = read(run(tmp_path, "a", events_of(5)))
    first, second = past_run.shares.values()
    assert (first.name, second.name) == ("worker 1 (pc1)", "worker 2 (pc2)")
    assert (first.updates, first.trained, first.bytes_out, first.bytes_back) == (5, 2500, 7_500_000, 2_500_000)
    assert (first.compute_s, second.compute_s) == (7.5, 3.75)
    assert first.transfer_s == second.transfer_s == 1.25
    assert first.wait_s == pytest.approx(10.0 - first.compute_s - first.transfer_s)
    assert second.compute_s + second.transfer_s + second.wait_s == pytest.approx(10.0)


def test_the_time_while_a_worker_was_lost_is_not_waiting_time(tmp_path):
    events = events_of(5)
    events.insert(8, (BEGAN + 4.5, e.WorkerLost(round=3, worker=2, slot=2, why="worker 2: cut")))
    events.insert(10, (BEGAN + 7.0, e.WorkerReturned(round=4, worker=2, name="worker 2 (pc2)")))
    past_run = read(run(tmp_path, "a", sorted(events, key=lambda timed: timed[0])))
    share = past_run.shares[2]
    assert (share.lost, share.away_s) == (1, 2.5)
    assert share.compute_s + share.transfer_s + share.away_s + share.wait_s == pytest.approx(10.0)
    assert [(fault.kind, fault.round) for fault in past_run.faults] == [("lost", 3), ("back", 4)]
    assert (
        past_run.faults[0].text == "worker 2: cut; slot 2 moves to another worker, or back to this one when it returns"
    )


def test_the_first_loss_that_is_not_finite_is_an_incident(tmp_path):
    events = events_of(3)
    events += [(BEGAN + 8, e.Committed(record=record(n, metrics={"loss": math.nan}))) for n in (4, 5)]
    (fault,) = read(run(tmp_path, "a", events)).faults
    assert (fault.kind, fault.round) == ("not finite", 4)


def test_the_reason_of_a_failed_run_is_the_last_incident(tmp_path):
    events = [*events_of(1), (BEGAN + 3, e.Warned(about="data", why="3 of x_train are NaN"))]
    past_run = read(run(tmp_path, "a", events, "failed", "AppError: no"))
    assert [(fault.kind, fault.text) for fault in past_run.faults] == [
        ("warning", "3 of x_train are NaN"),
        ("failed", "AppError: no"),
    ]


def test_damaged_lines_and_lines_of_a_later_version_are_skipped(tmp_path):
    path = run(tmp_path, "a", events_of(2))
    with (path / folder.EVENTS).open("a") as file:
        for data in ({"event": "Committed"}, {"time": 1, "event": "Unknown"}, {"time": 1, "event": "Evaluated"}, [1]):
            file.write(json.dumps(data) + "\n")
        file.write("\x00\x00\n{}\nnull\n")
    assert len(read(path).records) == 2


def test_the_end_of_a_long_file_is_found_without_reading_all_of_it(tmp_path):
    path = run(tmp_path, "a", events_of(1200))
    assert (path / folder.EVENTS).stat().st_size > 2 * 256 * 1024
    last, ended = end_of(path / folder.EVENTS)
    assert (last["record"]["round"], ended) == (1200, BEGAN + 2400)
    assert end_of(tmp_path / "none") == ({}, None)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read(tmp_path)


def test_places_of_workers_and_reasons_of_their_end_are_read(tmp_path):
    facts = dict(worker=1, name="worker 1")
    location = dict(address="place 0", host="n1", python="3.11", cores=2, threads=2)
    events = [
        (BEGAN + 1, e.WorkerConnected(**facts, **location, engine="job 12_0", incarnation=1)),
        (BEGAN + 2, e.WorkerDisconnected(**facts, why="node n1 is down\nmore", cause="node lost")),
        (BEGAN + 4, e.WorkerConnected(**facts, **{**location, "host": "n2"}, engine="job 13_0", incarnation=2)),
    ]
    path = run(tmp_path, "a", [*events_of(3), *events])
    first, second = read(path).stays
    assert (first.host, first.engine, first.incarnation, first.came) == ("n1", "job 12_0", 1, BEGAN + 1)
    assert (first.left, first.cause, first.reason) == (BEGAN + 2, "node lost", "node n1 is down\nmore")
    assert (second.host, second.engine, second.left) == ("n2", "job 13_0", read(path).status.ended)
    head, *rows = table.stay_rows(read(path))
    assert head == ["worker", "host", "in its engine", "incarnation", "came", "left", "cause", "reason"]
    assert [row[:4] + row[6:] for row in rows] == [
        ["worker 1", "n1", "job 12_0", "1", "node lost", "node n1 is down"],
        ["worker 1", "n2", "job 13_0", "2", "", ""],
    ]
    assert (path / "tables" / "places.csv").read_text().count("\n") == 3


def test_workers_of_earlier_records_have_no_engine(tmp_path):
    path = run(tmp_path, "a", events_of(1))
    with (path / folder.EVENTS).open("a") as file:
        facts = {
            "worker": 1,
            "name": "pc01",
            "address": "pc01:9000",
            "host": "n1",
            "python": "3.11",
            "cores": 2,
            "threads": 2,
        }
        file.write(json.dumps({"time": BEGAN + 3, "event": "WorkerConnected", **facts}) + "\n")
        file.write(json.dumps({"time": BEGAN + 4, "event": "WorkerDisconnected", "worker": 1, "name": "pc01"}) + "\n")
    (stay,) = read(path).stays
    assert (stay.engine, stay.incarnation, stay.left, stay.cause) == ("", 0, BEGAN + 4, "")
