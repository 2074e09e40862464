"""Tests of events: they are written as JSON and read again, sinks receive them, and lines are made from them."""

import dataclasses
import json
import logging
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddlf import IApp, events
from ddlf.events import KINDS
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import Events, from_json, to_json
from ddlf.monitor.terminal.lines import line, line_without_hook, training_event

SAVED = events.ModelSaved(path="m.keras")
RECORD = RoundRecord(
    round=1, rounds=2, version=1, epochs=1, samples=8, seconds=1.0, compute_s=1.0, transfer_s=0.0, merge_s=0.0,
    bytes_out=1, bytes_back=1, workers=(1, 2), verdicts=("slot 2 rejected",), metrics={"loss": float("nan")},
)  # fmt: skip


def any_event():
    return st.one_of(
        *(st.builds(kind, **{n: st.from_type(t) for n, t in hints(kind).items()}) for kind in KINDS.values())
    )


def hints(kind):
    return get_type_hints(kind)


@given(any_event())
def test_every_event_is_read_back_from_json_unchanged(event):
    text = json.dumps(to_json(event), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(event)  # compares texts, because NaN is not equal to itself


def test_numbers_of_numpy_are_written_like_python_numbers():
    event = events.Evaluated(metrics={"loss": np.float32(0.5), "hits": np.int64(3), "mean": np.array([1.0, np.inf])})
    assert to_json(event) == {"event": "Evaluated", "metrics": {"loss": 0.5, "hits": 3, "mean": [1.0, "Infinity"]}}


def test_an_event_of_a_later_version_is_read_without_its_unknown_facts():
    assert from_json({**to_json(SAVED), "colour": "red"}) == SAVED
    committed = to_json(events.Committed(record=RECORD))
    del committed["record"]["slots"]
    assert from_json(committed).record.slots == 0
    with pytest.raises(TypeError):
        from_json({"event": "ModelSaved"})


def test_an_event_has_facts_only_and_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SAVED.path = "other"
    with pytest.raises(TypeError):
        events.ModelSaved("given by place")


def test_a_sink_gets_all_events_from_its_subscription_until_its_removal():
    emitter, first, second = Events(), [], []
    take_off = emitter.subscribe(first.append)
    emitter.emit(SAVED)
    emitter.subscribe(second.append)
    emitter.emit(SAVED)
    take_off()
    take_off()
    emitter.emit(SAVED)
    assert (len(first), len(second)) == (2, 2)


def test_a_sink_that_raises_is_removed_and_named_once_with_its_traceback(caplog):
    emitter, first, second = Events(), [], []

    def broken(event):
        first.append(event)
        raise KeyError("in the sink")

    emitter.subscribe(broken)
    emitter.subscribe(second.append)
    with caplog.at_level(logging.ERROR):
        emitter.emit(SAVED)
        emitter.emit(SAVED)
    assert (len(first), len(second)) == (1, 2)
    (log_record,) = caplog.records
    assert "broken" in log_record.getMessage()
    assert "ModelSaved(path='m.keras')" in log_record.getMessage()
    assert "KeyError: 'in the sink'" in caplog.text


def test_a_sink_may_remove_itself_and_add_other_sinks():
    emitter, received = Events(), []

    def once(event):
        take_off()
        emitter.subscribe(received.append)

    take_off = emitter.subscribe(once)
    emitter.emit(SAVED)
    emitter.emit(SAVED)
    assert received == [SAVED]


@given(any_event())
@example(events.SlotMissed(round=2, slot=1, worker=1, samples=3, why=""))
def test_either_the_hook_or_the_default_makes_the_line_of_each_event(event):
    hooked = training_event(event)
    text = line(event)
    if hooked is None and not isinstance(event, events.Committed):
        assert text == line_without_hook(event)
    else:
        assert line_without_hook(event) == ""
    if hooked is not None:
        assert hooked.kind in ("start", "finish") or text == (hooked.text and f"{hooked.kind:<9} {hooked.text}")
        assert hooked.round == event.round


def test_an_app_prints_events_that_no_hook_prints_and_sends_them_to_its_sinks(capsys):
    app, received = IApp(), []
    take_off = app.subscribe(received.append)
    app.run_context.emit(SAVED)
    app.run_context.emit(events.SlotsChanged(round=2, slots=3))
    app.verbose = False
    app.run_context.emit(SAVED)
    take_off()
    app.run_context.emit(SAVED)
    assert capsys.readouterr().out == "saved     m.keras\n"
    assert received == [SAVED, events.SlotsChanged(round=2, slots=3), SAVED]
    assert "run_context" not in app.__getstate__()


def test_the_lines_of_the_start_of_a_run():
    built = dict(
        name="cnn", parameters=515146, keras="3.1", backends=("jax", "tensorflow"), threads=(1, 2), seconds=2.04
    )
    text = "model     cnn: 515,146 parameters, Keras 3.1 on jax and tensorflow, threads per worker 1-2, ready in 2.0 s"
    assert line(events.ModelBuilt(**built, bfloat16_gain=1.3)) == text
    assert line(events.ModelBuilt(**built, bfloat16_gain=1.94)) == (
        f"{text}\nprecision float32; large matrix products are about 1.9x as fast in bfloat16 here: try mixed_bfloat16"
    )
    assert "about 11x as fast in bfloat16" in line(events.ModelBuilt(**built, bfloat16_gain=11.2))
    assert line(events.ModelBuilt(**built, batch_parts=2)) == f"{text}\ncards     2 cards of a worker share each batch"
    data = dict(samples=60000, shape=(28, 28), content="abc", seconds=0.25)
    text = "data      60,000 samples of shape (28, 28), content abc: "
    assert line(events.DataLoaded(**data, workers=2, loaded=1)) == f"{text}loaded on 1 worker in 0.2 s"
    assert line(events.DataLoaded(**data, workers=2, loaded=0)) == f"{text}already on all 2 workers, not loaded again"
    assert line(events.DataLoaded(**data, workers=1, loaded=0)) == f"{text}already on the worker, not loaded again"


def test_the_lines_of_a_resumed_run():
    began = dict(samples=8, slots=2, fixed=True, workers=2)
    assert line(events.TrainingBegan(mode="sync", **began)) == ""
    assert (
        line(events.TrainingBegan(mode="sync", **began, version=3, source="dir")) == "resumed   after round 3, from dir"
    )
    assert line(events.TrainingBegan(mode="sync", **began, version=3, reached=3, source="dir")).endswith("3, from dir")
    after_updates = events.TrainingBegan(mode="sync", **began, version=16, reached=8)
    assert line(after_updates) == "resumed   after update 16, with round 9, where the last training of this app ended"
    assert line(events.TrainingBegan(mode="async", **{**began, "workers": 3}, version=3)).splitlines() == [
        "resumed   after update 3, where the last training of this app ended",
        "slots     2 on 3 workers, 1 spare",
    ]
    assert (
        line(events.TrainingBegan(mode="sync", **{**began, "workers": 1}))
        == "slots     2 on 1 worker, which take turns"
    )
    with_shards = events.TrainingBegan(mode="downpour", **{**began, "workers": 3}, shard_workers=1)
    assert line(with_shards) == "slots     2 on 2 workers, 1 more holds the weights"
    with_shards = events.TrainingBegan(mode="downpour", **{**began, "workers": 3}, shard_workers=2)
    assert line(with_shards) == "slots     2 on 1 worker, which take turns, 2 more hold the weights"
    assert line(events.TrainingBegan(mode="sync", **{**began, "workers": 3, "fixed": False})) == ""


def test_samples_of_slots_are_shown_in_few_lines():
    labels = {str(label): label + 1 for label in range(12)}
    printed = line(
        events.DataPartitioned(
            partition="dirichlet:alpha=0.1", samples=(712, 78), labels=({"3": 402, "0": 310}, labels)
        )
    )
    assert printed.splitlines() == [
        "parts     slot 1: 712 samples, 0:310 3:402",
        "          slot 2: 78 samples, 2:3 3:4 4:5 5:6 6:7 7:8 8:9 9:10 10:11 11:12 and 2 more labels",
    ]
    printed = line(events.DataPartitioned(partition="power:exponent=1.0", samples=tuple(range(64, 0, -1)))).splitlines()
    assert (len(printed), printed[8:]) == (
        10,
        ["          slot 9: 56 samples", "          55 more slots: 1 to 55 samples"],
    )


def test_the_lines_of_workers_that_join_and_leave():
    lost = events.WorkerLost(round=1, worker=2, why="worker 2: cut")
    assert line(lost) == "lost      worker 2: cut; it rejoins when it is back"
    with_slot = dataclasses.replace(lost, slot=1)
    assert (
        line(with_slot)
        == "lost      worker 2: cut; slot 1 moves to another worker, or back to this one when it returns"
    )
    joined = events.WorkerJoined(round=1, worker=3, name="worker 3", workers=3, slots=2)
    assert line(joined) == "joined    worker 3 has joined: 2 slots on 3 workers, 1 spare"
    assert line(dataclasses.replace(joined, slots=None)) == "joined    worker 3 has joined"
    assert line(dataclasses.replace(joined, slots=4)) == "joined    worker 3 has joined"
    excluded = events.WorkerGone(round=1, worker=2, why="KeyError: x\n\nTraceback")
    assert line(excluded) == "gone      KeyError: x; it is excluded from this run\n\nTraceback"
    rejected = events.WorkerGone(round=1, worker=2, rejected=3)
    assert line(rejected) == "gone      worker 2 is excluded: 3 of its updates in a row were rejected"
