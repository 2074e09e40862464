"""Tests of the screen of ``ddlf top``."""

import asyncio
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from ddlf import events as e
from ddlf.cli.top import draw, spark, top
from ddlf.monitor.dashboard.board import Board, Received
from ddlf.monitor.dashboard.viewer import take
from tests.monitor.dashboard.made_up import NAMES, answers, beginning, in_parts, one_round

answers_ = answers


def shown(*, workers=4, columns=80, rows=24, run=True, rounds=2, more=(), app="MnistCNN"):
    board, view = Board(cluster="lab"), {"run": None, "lanes": [], "workers": [], "curves": {}, "log": []}
    board.set_workers(answers(workers))
    if run:
        events = [*beginning(workers=workers, app=app)]
        for number in range(1, rounds + 1):
            events += one_round(number, workers=workers, at=float(number))
        for at, event in events:
            board.tell(event, at)
    for event in more:
        board.tell(event, 3.0)
    take(view, board.news(Received(), 4.0) | {"now": 4.0, "held_s": 0.0, "over": False})
    text = io.StringIO()
    Console(file=text, width=columns, highlight=False).print(draw(view, columns, rows))
    return text.getvalue().splitlines()


def test_top_shows_position_metrics_and_workers():
    lines = shown(columns=120)
    assert "MnistCNN  training  round 2 of 40, 5%" in lines[0]
    assert "accuracy 0." in lines[2]
    assert [line.split()[0] for line in lines if "updates" not in line and " 8 " in line] == [
        "pc01",
        "pc02",
        "pc03",
        "gpu01",
    ]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 12), (200, 60)])
@pytest.mark.parametrize("workers", [1, 16, 64])
def test_top_fits_the_terminal_and_counts_hidden_workers(columns, rows, workers):
    lines = shown(workers=workers, columns=columns, rows=rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    named = sum(
        line.split()[0] in NAMES or (line.startswith("worker ") and line.split()[1].isdigit()) for line in lines
    )
    left_out = [int(line.split()[1]) for line in lines if line.startswith("and ") and "more" in line]
    assert named + sum(left_out) == workers
    assert bool(left_out) == (workers + 5 > rows - 1)


def test_top_omits_unknown_figures_before_first_round():
    lines = shown(rounds=0)
    assert lines[0] == "MnistCNN  training  round 0 of 40, 0%, 0:04 so far"


def test_top_shows_the_reason_of_a_lost_or_excluded_worker():
    lost = e.WorkerLost(round=2, worker=2, slot=2, why="the connection ended")
    excluded = e.WorkerGone(round=2, worker=3, why="no memory\nand more")
    lines = "\n".join(shown(columns=120, more=[lost, excluded]))
    assert "lost: the connection ended" in lines
    assert "excluded: no memory " in lines


def test_top_truncates_long_reason():
    lost = e.WorkerLost(round=2, worker=2, slot=2, why="a very long reason " * 20)
    head, *rows = shown(columns=80, more=[lost])[4:9]
    assert head.split() == ["worker", "does", "rate", "updates", "memory", "cores"]
    assert all("GB" in row for row in rows)


def test_top_shows_workers_without_a_run():
    lines = shown(run=False, columns=100)
    assert lines[0] == "lab: no run here"
    assert lines[1].split() == ["worker", "does", "memory", "cores", "sent", "received"]
    assert "busy with 'train' for 0.4 s" in lines[2]
    assert "1.17 GB" in lines[2]


def test_top_shows_cards(monkeypatch):
    reading = {
        "number": "0",
        "name": "H100",
        "utilisation": 87,
        "memory": 12 * 10**9,
        "total": 80 * 10**9,
        "watts": 310.2,
        "celsius": 61,
    }
    monkeypatch.setitem(
        globals(), "answers", lambda workers: [{**answer, "cards": [reading]} for answer in answers_(workers)]
    )
    lines = shown(run=False, columns=120)
    assert lines[1].split() == ["worker", "does", "memory", "cores", "sent", "received", "card"]
    assert "87 %, 12.0 GB, 61 °C" in lines[2]
    lines = shown(run=False, columns=80)
    assert lines[1].split() == ["worker", "does", "memory", "card"]
    assert "87 %, 12.0 GB, 61 °C" in lines[2]


def test_top_shows_the_parts_of_a_model():
    lines = shown(run=False, columns=100, more=[event for _, event in in_parts()])
    assert any("part 2, round 3, 50%" in line for line in lines)
    assert [line.rstrip() for line in lines if " idle" in line and line.startswith("part")] == [
        "part 1  dense dense_1 dense_2 dense_3  on pc01  169 MB  15% idle",
        "part 2  dense_4  on pc03  167 MB  21% idle",
    ]


def test_sparkline_has_highest_and_lowest_value():
    assert spark([0.0, 1.0, 2.0, 7.0], 10) == "▁▂▃█"
    assert spark([3.0, 3.0], 10) == "▁▁"
    assert len(spark([float(x) for x in range(1000)], 40)) == 40


def test_top_truncates_long_name():
    lines = shown(columns=60, app="AModelWithAVeryLongNameOfFiftyTwoLettersAndSomeMore")
    assert lines[0].startswith("AMode")
    assert "…  training  round 2 of 40, 5%, 0:04 so far, " in lines[0]


async def test_top_once_shows_known_state_of_busy_master(monkeypatch, capsys):
    async def busy(options):
        while True:
            yield {
                "about": {},
                "run": None,
                "lanes": [],
                "workers": [],
                "curves": {},
                "log": [],
                "now": 4.0,
                "held_s": 7.0,
            }
            await asyncio.sleep(0)

    monkeypatch.setattr("ddlf.cli.top._source", busy)
    monkeypatch.setattr("ddlf.cli.top.ANSWER_S", 0.01)
    assert await top(SimpleNamespace(once=True)) == 0
    assert "the master has been busy for 7 s and does not answer" in capsys.readouterr().out
