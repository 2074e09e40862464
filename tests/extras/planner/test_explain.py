"""Tests of explaining slow rounds, with made-up events. The prediction of a round is 1 s of training and 0.5 s of exchange."""

import json

import pytest

from ddlf.cli.main import main
from ddlf.events import (
    CheckpointWritten,
    Committed,
    PhaseEnded,
    RoundsMeasured,
    RoundsPredicted,
    RunEnded,
    SlotBackedUp,
    UpdateArrived,
)
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import to_json
from ddlf.extras.planner.explain import explain

PREDICTED = RoundsPredicted(seconds=1.5, low=1.3, high=1.7, compute_s=1.0, within=True, when=0.0)
OVER = RunEnded(run="a", how="complete", version=1)


def update(number, worker, compute, transfer, swapped, samples=9):
    costs = dict(samples=samples, epochs=1, bytes_out=1, bytes_back=1)
    return UpdateArrived(
        round=number, slot=worker, worker=worker, compute_s=compute, transfer_s=transfer, swapped=swapped, **costs
    )


def committed(number, seconds, compute, transfer, slot, data, samples=9):
    costs = dict(transfer_s=transfer, merge_s=0.0, bytes_out=1, bytes_back=1, epochs=1, samples=samples)
    return Committed(
        record=RoundRecord(
            round=number,
            rounds=9,
            version=number,
            slot=slot,
            seconds=seconds,
            compute_s=compute,
            wait_data_s=data,
            **costs,
        )
    )


def rounds(
    compute=(1.0, 1.0), transfer=(0.4, 0.4), idle=0.1, data=0.0, swapped=(0, 0), more=(), count=6, slots=False, late=0.0
):
    """Return the events of rounds with these times of workers. The first two rounds take longer, because they compile."""
    yield 0.0, PREDICTED
    now = dict.fromkeys((1, 2), 0.0)
    for number in range(1, count + 1):
        factor = 9 if number <= 2 else 1
        costs = list(zip((1, 2), compute, transfer, swapped, strict=True))
        for worker, computing, moving, pages in costs:
            seconds = factor * (computing + moving)
            if slots:
                now[worker] += seconds + idle
                yield now[worker], update(number, worker, factor * computing, moving, pages)
                yield now[worker], committed(number, seconds, computing, moving, worker, data)
            else:
                yield now[1] + seconds, update(number, worker, factor * computing, moving, pages)
        if not slots:
            seconds = late + max(factor * (computing + moving) for _, computing, moving, _ in costs)
            now[1] += seconds + idle
            yield from ((now[1], event) for event in more)
            yield now[1], committed(number, seconds, max(compute), max(transfer), None, data)
    yield now[1], OVER


def with_short_rounds(**options):
    """Return the events of ``rounds``, with two short rounds of one sample after each round, like at the end of an epoch."""
    later = dict.fromkeys((None, 1, 2), 0.0)
    for when, event in rounds(**options):
        slot = event.record.slot if isinstance(event, Committed) else getattr(event, "slot", None)
        slot = slot if options.get("slots") else None
        yield when + later[slot], event
        if isinstance(event, Committed):
            later[slot] += 0.2
            for _ in range(2):
                for worker in [slot] if slot else (1, 2):
                    yield when + later[slot], update(event.record.round, worker, 0.1 / worker, 0.0, 0, samples=1)
                yield when + later[slot], committed(event.record.round, 0.1, 0.1, 0.0, slot, 0.0, samples=1)


def evaluated(seconds):
    return PhaseEnded(phase=1, what="validating", seconds=seconds)


@pytest.mark.parametrize(
    ("options", "cause", "worker"),
    [
        ({}, "within its interval", None),
        ({"compute": (0.5, 0.5)}, "faster", None),
        ({"transfer": (2.4, 2.4)}, "link", None),
        ({"transfer": (2.4, 0.4)}, "link", 1),
        ({"compute": (1.0, 3.0)}, "straggler", 2),
        ({"compute": (1.0, 3.0), "slots": True}, "straggler", 2),
        ({"compute": (3.0, 3.0)}, "computing", None),
        ({"compute": (3.0, 3.0), "swapped": (1 << 28, 0)}, "swapping", 1),
        ({"compute": (3.0, 3.0), "data": 2.0}, "data", None),
        ({"idle": 2.0, "more": (evaluated(2.0),)}, "data", None),
        ({"idle": 2.0}, "wait", None),
        ({"late": 2.0}, "wait", None),  # other workers recompute the slots of a lost worker
        ({"idle": 2.0, "more": (CheckpointWritten(version=1, path="a", seconds=1.9),)}, "wait", None),
        ({"late": 5.0, "more": (SlotBackedUp(round=1, slot=1, worker=2),)}, "straggler", None),
        ({"compute": (2.0, 2.0), "transfer": (1.5, 1.5)}, "unclear", None),
    ],
)
def test_the_cause_is_named(options, cause, worker):
    explanation = explain(rounds(**options))
    assert (explanation.cause, explanation.worker) == (cause, worker)
    assert explanation.predicted == 1.5


@pytest.mark.parametrize(
    ("options", "cause", "worker"),
    [
        ({}, "within its interval", None),
        ({"compute": (1.0, 3.0)}, "straggler", 2),
        ({"compute": (1.0, 3.0), "slots": True}, "straggler", 2),
        ({"transfer": (2.4, 0.4)}, "link", 1),
    ],
)
def test_short_last_rounds_of_epochs_do_not_count(options, cause, worker):
    explanation = explain(with_short_rounds(**options, count=9))
    assert (explanation.cause, explanation.worker) == (cause, worker)
    assert explanation.parts == pytest.approx(explain(rounds(**options, count=9)).parts)


def test_evaluations_of_workers_count_but_evaluations_after_the_run_do_not():
    slow = list(rounds(transfer=(2.4, 2.4), more=(evaluated(2.0),)))
    assert explain(slow).cause == "link"  # the master evaluates at the same time
    assert explain(slow, evaluates_there=True).cause == "data"
    later = [*rounds(idle=2.0), (99.0, evaluated(50.0))]
    assert explain(later).cause == "wait"


def test_a_restarted_run_is_explained_from_its_restart():
    events = [*rounds(transfer=(2.4, 2.4)), *rounds(compute=(1.0, 3.0))]
    assert explain(events).cause == "straggler"


def test_the_clock_of_the_run_has_priority_over_the_times_of_its_events():
    measured = RoundsMeasured(rounds=4, seconds=1.6, predicted=1.5, low=1.3, high=1.7)
    assert explain([*rounds(idle=2.0), (0.0, measured)]).cause == "within its interval"


def a_run(folder, events):
    path = folder / "20260102-030405-App"
    path.mkdir()
    (path / "state.json").write_text("{}")
    (path / "events.jsonl").write_text("".join(json.dumps({"time": t, **to_json(event)}) + "\n" for t, event in events))


def command(*words, code=0):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--check", *words])
    assert ended.value.code == code


def test_the_command_explains_a_run_in_its_folder(tmp_path, capsys):
    a_run(tmp_path, rounds(compute=(1.0, 3.0)))
    command("last", "--out", str(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        "rounds    3.5 s each, predicted 1.5 s (1.3-1.7)",
        "more      straggler 2 s, wait 0.1 s",
        "straggler of worker 2: one worker trains more slowly than the others: look for other programs there, or train without it",
    ]
    command("last", "--out", str(tmp_path), "--json")
    assert json.loads(capsys.readouterr().out)["cause"] == "straggler"


@pytest.mark.parametrize(
    ("events", "words", "message"),
    [
        ([], (), "the rounds of 20260102-030405-App were not predicted; plan first"),
        (list(rounds(count=2)), (), "has too few rounds to compare"),
        ([], ("app.py", "--local", "2", "--budget", "9s"), "app.py, --local, --budget have no effect with --check"),
        ([], ("--ui", "json"), "--ui has no effect with --check"),
    ],
)
def test_runs_that_cannot_be_explained_are_refused(tmp_path, capsys, events, words, message):
    a_run(tmp_path, events)
    command("last", "--out", str(tmp_path), *words, code=2)
    assert message in capsys.readouterr().err
