"""Tests of the events of a training by peers, and of the run folder and board that are made from them."""

import json
from dataclasses import replace

import pytest

from ddlf import events as e
from ddlf.monitor.dashboard.board import Board, Received
from ddlf.monitor.runs import folder, report, run_reader, table
from ddlf.peers.entries import Arrived, Began, Invited, Joined, Left, Posted, Validated
from ddlf.peers.plan import Plan
from ddlf.peers.run_events import PeersWriter, Teller
from ddlf.peers.swap import SwapLedger

PLAN = Plan(batch_size=10, codec="bfloat16")


class Reported:
    """A ledger, the ``Teller`` that turns its entries into events, and the events."""

    def __init__(self):
        self.ledger, self.events, self.next_set = SwapLedger(PLAN), [], 2
        self.teller = Teller(self.ledger, self.events.append, 1000)
        self.take(Began(at=0.0, set=1, run="a run"))
        self.teller.begin("peers of digits", 0, 0.0)
        for peer in (1, 2):
            self.take(Invited(at=0.0, code=f"code {peer}", until=100.0))
            self.take(Joined(at=0.0, peer=peer, code=f"code {peer}", key=f"key {peer}"))
            self.take(Arrived(at=0.0, peer=peer, name="clinic" * (peer == 1), samples=100, keeps=False))

    def take(self, entry):
        self.ledger.apply(entry)
        self.teller.took(entry)

    def post(self, peer, loss):
        number = self.ledger.members[peer].number + 1
        facts = {"set": self.next_set, "contains": 0, "updates": 20, "accuracy": 0.5, "loss": loss}
        self.take(Posted(at=1.0, peer=peer, number=number, **facts))
        self.next_set += 1


@pytest.fixture
def reported():
    training = Reported()
    training.post(1, 2.0)
    training.post(1, 1.0)
    training.post(2, 3.0)
    training.take(Validated(at=1.0, set=2, accuracy=0.75, loss=0.5, samples=64, peer=1))
    for _ in range(2):
        training.teller.sent(1000)
    training.teller.tick(2.0)
    training.take(Left(at=2.0, peer=2, why="it said goodbye"))
    return training


def test_the_board_shows_how_much_of_an_end_in_seconds_has_passed():
    for end, has_end, done, left_s in ((100.0, True, 0.4, 60.0), (0.9, False, 0.0, None)):
        for passed_s in (0.0, 30.0):  # a new run and a resumed run
            board, ledger = Board(), SwapLedger(Plan(end=end))
            ledger.first_at = 1000.0 - passed_s if passed_s else 0.0
            now = 1000.0
            teller = Teller(ledger, lambda event: board.tell(event, now), 1000)  # noqa: B023
            teller.begin("peers of digits", 0, now)
            board.tell(e.PeerArrived(peer=1, name="", samples=10), now)
            now += 40.0 - passed_s
            board.tell(e.PeerLeft(peer=1, name="", why="it said goodbye"), now)
            run = board.news(Received(), now)["run"]
            assert (run["has_end"], run["done"], run["left_s"]) == (has_end, done, left_s)


def test_posts_between_two_ticks_become_one_record_and_an_event_of_each_peer(reported):
    posted = [event for event in reported.events if isinstance(event, e.PeerPosted)]
    assert [(event.name, event.posts, event.new, event.batches, event.samples) for event in posted] == [
        ("clinic", 2, 2, 40, 400),
        ("peer 2", 1, 1, 20, 200),
    ]
    [record] = [event.record for event in reported.events if isinstance(event, e.Committed)]
    assert (record.version, record.samples, record.bytes_back, record.seconds) == (3, 600, 3000, 2.0)
    assert record.bytes_out == 2000
    assert (record.metrics, record.test) == ({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.75, "loss": 0.5})
    reported.events.clear()
    reported.teller.tick(3.0)
    assert not reported.events


def test_the_board_shows_peers_with_their_rates_and_the_averages(reported):
    board = Board()
    for event in reported.events:
        board.tell(event, 1.0)
    message = board.news(Received(), 2.0)
    shown = {lane["name"]: (lane["state"], lane["rate"], lane["updates"], lane["is_peer"]) for lane in message["lanes"]}
    assert message["run"]["mode"] == "peers in swaps, sets as bfloat16"
    assert shown == {"clinic": ("busy", 200.0, 2, True), "peer 2": ("lost", 100.0, 1, True)}
    assert message["run"]["metrics"]["test_accuracy"] == 0.75
    assert message["series"]["columns"]["#batches"] == [60]
    json.dumps(message, allow_nan=False)


def test_the_folder_of_a_resumed_run_has_one_report_of_both_parts(tmp_path, reported):
    for part in (False, True):
        writer = PeersWriter(tmp_path, PLAN, "peers of digits", continues=part)
        writer.write([(float(at), event) for at, event in enumerate(reported.events)])
        writer.end("stopped" if not part else "finished", "", 0)
        reported.events.clear()
        reported.teller.begin("peers of digits", 0, 3.0)
        reported.post(1, 0.5)
        reported.teller.tick(4.0)
        reported.teller.end("complete", "the accuracy is reached")
    run = run_reader.read(tmp_path)
    assert (run.status.state, run.status.app, run.status.restarts) == ("finished", "peers of digits", 1)
    assert [record.version for record in run.records] == [3, 4]
    assert run.setting("batch_size") == 10
    tables = {part["title"]: part["rows"] for part in report.record_of(run)["tables"]}
    assert [row[0] for row in tables["Peers"][1:]] == ["clinic", "peer 2"]
    assert (tmp_path / folder.REPORT).exists()
    quantities = dict(table.run_rows([run])[1:])
    expected = {"peers": "2", "batch size of peers": "10", "posts": "4", "sent": "2.00 kB", "received": "4.00 kB"}
    assert {name: quantities[name] for name in expected} == expected
    unmeasured = ("workers", "updates", "local epochs", "seconds per", "computing", "transfer", "waiting", "staleness")
    assert not [name for name in quantities if any(word in name for word in unmeasured)]


def test_a_small_batch_has_only_the_samples_that_the_peer_has(reported):
    """A pass over 100 samples in batches of 64 has two batches, and one of 10 samples has one batch."""
    for size, batches, samples in ((100, 6, 300), (10, 6, 60), (64, 6, 384), (128, 6, 384)):
        reported.ledger.members[1].samples = size
        reported.teller._ledger.plan = replace(PLAN, batch_size=64)
        assert reported.teller._samples(1, batches) == samples
