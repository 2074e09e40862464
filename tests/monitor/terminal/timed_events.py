"""Events of runs with their times, for tests of the displays."""

from __future__ import annotations

from collections.abc import Iterator

from ddlf import events as e
from ddlf.events.record import RoundRecord
from ddlf.monitor.state import State

BEGAN = e.RunBegan(run="r", app="Digits", mode="sync", epochs=12, worker_epochs=2, batch_size=16, seed=0)


def record(round, *, slots=2, slot=None, version=None, rounds=6, loss=0.5):
    return RoundRecord(
        round=round, rounds=rounds, slot=slot, version=version or round, epochs=2, samples=1000, seconds=4.0,
        compute_s=3.0, transfer_s=1.0, merge_s=0.0, bytes_out=10, bytes_back=10, slots=slots,
        workers=tuple(range(1, slots + 1)), metrics={"loss": loss, "accuracy": 0.9},
    )  # fmt: skip


def connected(worker, **more):
    facts = dict(address="10.0.0.1:9000", host="pc", python="3.11", cores=2, threads=1)
    return e.WorkerConnected(worker=worker, name=f"worker {worker}", **{**facts, **more})


def began(slots, *, mode="sync", **more):
    return e.TrainingBegan(mode=mode, samples=1000, slots=slots, fixed=False, workers=slots, **more)


def arrived(worker, *, round=1, samples=500, epochs=2, compute_s=1.0):
    figures = dict(samples=samples, epochs=epochs, compute_s=compute_s, transfer_s=0.1, bytes_out=1, bytes_back=1)
    return e.UpdateArrived(round=round, slot=worker, worker=worker, **figures)


def moved(worker, done, *, round=1, total=1000, epoch=1, loss=0.5, slot=None):
    return e.SlotMoved(round=round, slot=slot or worker, worker=worker, done=done, total=total, epoch=epoch, loss=loss)


def a_round(number, *, workers=2, begin, seconds=4.0) -> Iterator[tuple[float, e.Event]]:
    """Yield the events of a round of synchronous training. Each worker has the slot with its number."""
    for worker in range(1, workers + 1):
        yield begin, e.SlotStarted(round=number, slot=worker, worker=worker)
    for worker in range(1, workers + 1):
        yield begin + seconds / 2, moved(worker, 500, round=number)
    for worker in range(1, workers + 1):
        yield begin + seconds, arrived(worker, round=number)
        yield begin + seconds, e.SlotFinished(round=number, slot=worker, worker=worker)
    yield begin + seconds, e.Committed(record=record(number, slots=workers))


def state_after(*events: tuple[float, e.Event]) -> State:
    state = State()
    for now, event in events:
        state.tell(event, now)
    return state


def in_training(workers=2, rounds=2) -> State:
    """Return the state of a run that began at 10 s, after some rounds of 4 s and half of the next one."""
    last = 10.0 + 4 * rounds
    begun = [event for event in a_round(rounds + 1, workers=workers, begin=last) if isinstance(event[1], e.SlotStarted)]
    half = [(last + 2, moved(n, 500, round=rounds + 1, epoch=5)) for n in range(1, workers + 1)]
    return state_after(
        (0.0, BEGAN),
        *((1.0, connected(n)) for n in range(1, workers + 1)),
        (10.0, began(workers)),
        *(event for n in range(rounds) for event in a_round(n + 1, workers=workers, begin=10.0 + 4 * n)),
        *begun,
        *half,
    )
