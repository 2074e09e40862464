"""Tests of the board, which collects the data of the page from events.

Its memory is limited, and each viewer receives each value once.
"""

import json

import pytest

from ddlf import events as e
from ddlf.monitor.dashboard.board import MOST_LINES, MOST_SPANS, Board, Received
from ddlf.monitor.dashboard.series import MOST_POINTS, Series
from tests.monitor.dashboard.made_up import beginning, in_parts, in_portions, one_round, with_peers


def trained(rounds, *, workers=4, **how):
    board = Board(title="lab")
    for at, event in beginning(rounds=rounds, workers=workers):
        board.tell(event, at)
    for number in range(1, rounds + 1):
        for at, event in one_round(number, rounds=rounds, workers=workers, at=float(number), **how):
            board.tell(event, at)
    return board


def test_a_curve_has_every_round_until_it_is_thinned():
    series = Series(most=8)
    for x in range(1, 8):
        series.add(x, {"loss": float(x)})
    assert series.points_after(0) == ([1, 2, 3, 4, 5, 6, 7], {"loss": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]})
    series.add(8, {"loss": 8.0})
    assert series.points_after(0) == ([2, 4, 6, 8], {"loss": [1.5, 3.5, 5.5, 7.5]})
    assert (len(series), series.thinned) == (4, 1)


def test_the_newest_point_of_a_thinned_curve_is_the_mean_of_its_rounds_so_far():
    series = Series(most=4)
    for x in range(1, 8):
        series.add(x, {"loss": float(x)})
    x, columns = series.points_after(0)
    assert x[-1] == 7
    assert columns["loss"][-1] == 7.0  # the first of the two rounds of this point
    assert len(x) == len(columns["loss"])


def test_curves_that_begin_late_or_have_gaps_have_the_length_of_all_curves():
    series = Series(most=8)
    for x in range(1, 31):
        series.add(
            x, {"loss": 1.0 / x, **({"test_loss": 2.0} if x % 10 == 0 else {}), **({"late": 1.0} if x > 20 else {})}
        )
        points, columns = series.points_after(0)
        assert {len(points)} == {len(column) for column in columns.values()}
    assert set(filter(None, columns["test_loss"])) == {2.0}


def test_values_that_are_not_finite_are_gaps():
    series = Series()
    series.add(1, {"loss": float("nan"), "accuracy": float("inf")})
    series.add(2, {"loss": 0.5})
    assert series.points_after(0) == ([1, 2], {"loss": [None, 0.5]})


@pytest.mark.slow
def test_ten_thousand_rounds_need_no_more_memory_than_a_thousand():
    board = trained(10_000, workers=2)
    message = board.news(Received(), 0.0)
    assert MOST_POINTS / 2 <= len(message["series"]["x"]) <= MOST_POINTS
    assert message["series"]["x"][-1] == 10_000
    assert len(message["spans"]["new"]) == MOST_SPANS
    assert len(json.dumps(message, allow_nan=False)) < 400_000


def test_a_viewer_receives_everything_once_at_any_times():
    """The test joins the messages in the same way as the page."""
    board, position, x, columns, spans = Board(), Received(), [], {}, []
    events = [*beginning(rounds=2500, workers=2)]
    for number in range(1, 2501):
        events += one_round(number, rounds=2500, workers=2, at=float(number))
    for index, (at, event) in enumerate(events):
        board.tell(event, at)
        if index % 37 and index != len(events) - 1:
            continue
        message = board.news(position, at)
        start = message["series"]["from"]
        x = [*x[:start], *message["series"]["x"]]
        columns = {
            name: [*columns.get(name, [None] * start)[:start], *values]
            for name, values in message["series"]["columns"].items()
        }
        spans += message["spans"]["new"]
    assert (x, columns) == board.series.points_after(0)
    assert spans[-1][2] == 2500
    assert len(spans) == 2 * 2500
    assert "series" not in board.news(position, 0.0)


def test_messages_are_plain_json_although_a_loss_is_not_finite():
    board = Board()
    for at, event in beginning():
        board.tell(event, at)
    rounds = list(one_round(1))
    at, committed = rounds[-1]
    worse = type(committed.record)(
        **{name: getattr(committed.record, name) for name in committed.record.__dataclass_fields__}
        | {"metrics": {"loss": float("nan")}}
    )
    board.tell(e.Committed(record=worse), at)
    message = json.loads(json.dumps(board.news(Received(), at), allow_nan=False))
    assert message["run"]["metrics"]["loss"] is None


def test_a_second_run_clears_the_curves_of_viewers():
    board, position = trained(5), Received()
    board.news(position, 0.0)
    for at, event in beginning(rounds=3, at=100.0):
        board.tell(event, at)
    message = board.news(position, 101.0)
    assert message["run"]["number"] == 2
    assert message["series"] == {"from": 0, "x": [], "columns": {}}
    assert message["spans"] == {"more": False, "new": []}


@pytest.mark.parametrize("dropped", [0, 12])
def test_lines_of_workers_have_their_names_and_dropped_lines_are_reported(dropped):
    board = Board()
    board.tell(e.WorkerWrote(worker=2, name="pc02", stream="stderr", lines=("one", "two"), dropped=dropped), 7.0)
    lines = board.news(Received(), 7.0)["log"]["new"]
    assert lines[-2:] == [[7.0, "stderr", "pc02", "one"], [7.0, "stderr", "pc02", "two"]]
    assert ["12 lines were dropped here" in line[3] for line in lines[:-2]] == [True] * bool(dropped)


def test_the_log_keeps_the_last_lines_only():
    board, position = Board(), Received()
    for number in range(3 * MOST_LINES):
        board.tell(e.WorkerWrote(worker=1, name="w", stream="stdout", lines=(f"line {number}",)), 0.0)
    lines = board.news(position, 0.0)["log"]["new"]
    assert [line[3] for line in lines] == [f"line {number}" for number in range(2 * MOST_LINES, 3 * MOST_LINES)]
    assert "log" not in board.news(position, 0.0)


def test_each_worker_has_its_updates_and_its_number_of_losses():
    board = trained(3, workers=2)
    board.tell(e.WorkerLost(round=3, worker=2, slot=2, why="the connection ended"), 9.0)
    first, second = board.news(Received(), 9.0)["lanes"]
    assert (first["updates"], first["trained"], first["lost"], first["state"]) == (3, 90_000, 0, "idle")
    assert (second["state"], second["why"], second["lost"]) == ("lost", "the connection ended", 1)


def test_colours_and_control_codes_are_not_in_the_log():
    board = Board()
    board.tell(e.WorkerWrote(worker=1, name="pc01", stream="stdout", lines=("\x1b[31mred\x1b[0m \x1b[2J", "b\ra")), 1.0)
    assert [text for *_, text in board.log.entries_after(0)] == ["red \\x1b[2J", "b\\ra"]


def test_the_reason_of_an_unreachable_worker_does_not_repeat_its_address():
    board = Board()
    for at, event in beginning(workers=1):
        board.tell(event, at)
    refused = "10.0.0.11:9000: connection refused, nothing listens there"
    board.tell(e.WorkerLost(round=1, worker=1, why="cut"), 3.0)
    board.tell(e.WorkerNotReached(worker=1, name="pc01", tries=2, why=refused), 4.0)
    (lane,) = board.news(Received(), 5.0)["lanes"]
    assert (lane["state"], lane["why"]) == ("lost", "connection refused, nothing listens there (2 tries)")


def shown(events):
    board = Board()
    for at, event in events:
        board.tell(event, at)
    message = json.loads(json.dumps(board.news(Received(), 100.0), allow_nan=False))
    return message["run"], {lane["worker"]: lane for lane in message["lanes"]}, message["spans"]["new"]


def test_parts_of_a_model_are_shown_with_their_workers_memory_and_idle_shares():
    run, lanes, spans = shown(in_parts())
    assert run["micro_batches"] == 8
    assert [(part["worker"], part["layers"][0], part["nbytes"]) for part in run["parts"]] == [
        (1, "dense", 169_000_012),
        (3, "dense_4", 167_400_012),
    ]
    assert [round(part["idle"], 3) for part in run["parts"]] == [0.153, 0.205]
    assert (lanes[1]["slot"], lanes[2]["slot"], lanes[3]["slot"]) == (1, 0, 2)
    assert [(worker, part, number) for worker, part, number, *_ in spans] == [
        (1, 1, 1),
        (2, 2, 1),
        (1, 1, 2),
        (2, 2, 2),
    ]


def test_workers_are_shown_at_their_places_with_the_reason_of_a_replacement():
    _, lanes, _ = shown(in_parts())
    assert [(lane["host"], lane["engine"], lane["incarnation"], lane["left"]) for lane in lanes.values()] == [
        ("pc01", "job 4711_0", 1, ""),
        ("pc09", "job 4711_1", 2, "Slurm preempted its job"),
        ("pc03", "job 4711_2", 1, ""),
    ]


def test_portions_are_counted_over_all_passes_of_a_run():
    run, lanes, _ = shown(in_portions())
    assert [lane["portions"] for lane in lanes.values()] == [
        {"done": 27, "backup": 3, "dropped": 0},
        {"done": 30, "backup": 3, "dropped": 0},
        {"done": 15, "backup": 0, "dropped": 6},
    ]
    assert run["pass"] == {"round": 3, "number": 2, "step": 0.5, "loss": 2 / 3}


def test_the_next_run_has_no_parts_and_portions_of_the_last_run():
    run, lanes, _ = shown([*in_parts(), *in_portions(at=20.0), *beginning(at=40.0)])
    assert (run["parts"], run["pass"], lanes[1]["portions"]["done"]) == ([], None, 0)


def curves_of(board, position=None):
    return json.loads(json.dumps(board.news(position or Received(), 100.0), allow_nan=False))["peers"]


def test_each_peer_has_curves_with_gaps_while_it_is_away():
    board = Board()
    for at, event in with_peers(3, 30, at=100.0):
        board.tell(event, at)
    curves = curves_of(board)
    x, columns = curves["x"], curves["columns"]
    assert (curves["names"], curves["count"]) == ({"1": "clinic 1", "2": "clinic 2", "3": "clinic 3"}, 3)
    assert x == list(range(3, 31))
    seconds_away = {
        peer: [second for second, batches in zip(x, columns[f"batches {peer}"], strict=True) if batches is None]
        for peer in (1, 2, 3)
    }
    assert seconds_away == {1: [], 2: [3, 4, 5, *range(10, 20)], 3: [*range(3, 8), *range(15, 31)]}
    before, after = (columns["batches 2"][x.index(second)] for second in (9, 20))
    assert before < after <= before + 30
    assert (
        sum(columns[f"batches {peer}"][-1] or 0 for peer in (1, 2)) + columns["batches 3"][x.index(14)] == board.batches
    )
    assert columns["accuracy 1"][-1] > 0.9


@pytest.mark.slow
def test_curves_of_many_peers_for_a_day_are_bounded_and_complete_for_each_viewer():
    board, position, x, columns = Board(), Received(), [], {}
    for at, event in with_peers(220, 280):
        board.tell(event, at)
        if isinstance(event, e.Committed) and event.record.round % 37 == 0:
            new = board.news(position, at)["peers"]
            begin = new["from"]
            x = [*x[:begin], *new["x"]]
            columns = {
                name: [*columns.get(name, [None] * begin)[:begin], *values] for name, values in new["columns"].items()
            }
    new = board.news(position, at)["peers"]
    curves = curves_of(board)
    assert [*x[: new["from"]], *new["x"]] == curves["x"]
    assert {
        name: [*columns.get(name, [None] * new["from"])[: new["from"]], *values]
        for name, values in new["columns"].items()
    } == curves["columns"]
    assert (len(curves["names"]), curves["count"]) == (200, 220)
    assert "3" not in curves["names"]  # peer 3 has left, so a later peer uses its place
    assert 120 <= len(curves["x"]) <= 240
    assert {len(column) for column in curves["columns"].values()} == {len(curves["x"])}
    assert len(json.dumps(curves)) < 1_000_000


def test_a_run_without_peers_has_no_curves_of_peers_of_the_last_run():
    board, position = Board(), Received()
    for at, event in with_peers(2, 20):
        board.tell(event, at)
    assert curves_of(board, position)
    for at, event in beginning(at=100.0):
        board.tell(event, at)
    assert curves_of(board, position) is None
