"""Invented events of runs and answers of workers, for tests of the dashboard and the report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ddlf import events as e
from ddlf.events.record import RoundRecord

NAMES = ("pc01", "pc02", "pc03", "gpu01", "pc05", "pc06", "pc07", "pc08")


def name(worker: int) -> str:
    return NAMES[worker - 1] if worker <= len(NAMES) else f"worker {worker}"


def beginning(
    *, rounds: int = 40, workers: int = 4, at: float = 0.0, mode: str = "sync", app: str = "MnistCNN"
) -> Iterator[tuple[float, e.Event]]:
    """Yield the events before the first round, with their times."""
    yield (
        at,
        e.RunBegan(run="r1", app=app, mode=mode, epochs=rounds, worker_epochs=1, batch_size=64, seed=0),
    )
    for worker in range(1, workers + 1):
        address = f"10.0.0.{10 + worker}:9000"
        facts = dict(worker=worker, name=name(worker), address=address, host=name(worker), python="3.11.9")
        yield at + 0.2, e.WorkerConnected(**facts, cores=8, threads=4)
    yield (
        at + 2,
        e.ModelBuilt(
            name="mnist_cnn", parameters=225_034, keras="3.15.1", backends=("tensorflow",), threads=(4,), seconds=2.0
        ),
    )
    yield (
        at + 2,
        e.DataLoaded(samples=60_000, shape=(28, 28, 1), content="9f3c", workers=workers, loaded=workers, seconds=1.1),
    )
    for worker in range(1, workers + 1):
        yield at + 2, e.WorkerReady(round=0, worker=worker, name=name(worker))
    yield at + 2, e.TrainingBegan(mode=mode, samples=60_000, slots=workers, fixed=False, workers=workers)


def one_round(
    number: int, *, rounds: int = 40, workers: int = 4, at: float = 0.0, round_s: float = 1.0, test: bool = True
) -> Iterator[tuple[float, e.Event]]:
    """Yield the events of a round of synchronous training that begins at the time ``at``."""
    chance = random.Random(number)
    samples = 60_000 // workers
    size = 900_136
    spent = []
    for worker in range(1, workers + 1):
        yield at, e.SlotStarted(round=number, slot=worker, worker=worker)
        pace = (0.86 if worker == 3 else 0.62 + 0.03 * worker) * chance.uniform(0.92, 1.08)
        spent.append((pace * round_s, (0.04 + 0.02 * worker / workers) * chance.uniform(0.7, 1.5) * round_s))
    loss = 0.03 + 2.1 * math.exp(-number / (rounds * 0.17)) + chance.gauss(0, 0.012)
    for share in (0.3, 0.6, 0.9):
        for worker, (compute, _) in enumerate(spent, 1):
            moved = dict(round=number, slot=worker, worker=worker, epoch=number)
            yield at + share * compute, e.SlotMoved(**moved, done=int(share * samples), total=samples, loss=abs(loss))
    for worker, (compute, transfer) in sorted(enumerate(spent, 1), key=lambda pair: sum(pair[1])):
        cost = dict(compute_s=compute, transfer_s=transfer, bytes_out=size, bytes_back=size)
        ends = at + compute + transfer
        yield ends, e.UpdateArrived(round=number, slot=worker, worker=worker, samples=samples, epochs=1, **cost)
        yield ends, e.SlotFinished(round=number, slot=worker, worker=worker)
    yield at + round_s, e.Committed(record=record(number, rounds, workers, spent, loss, round_s, test=test))


def record(
    number: int, rounds: int, workers: int, spent: list[tuple[float, float]], loss: float, round_s: float, *, test: bool
) -> RoundRecord:
    slowest = max(compute for compute, _ in spent)
    accuracy = min(0.997, 1 - 0.31 * abs(loss))
    metrics = {
        "loss": abs(loss),
        "accuracy": accuracy,
        "val_loss": abs(loss) * 1.06 + 0.01,
        "val_accuracy": accuracy - 0.006,
    }
    tested = {"loss": abs(loss) * 1.1 + 0.012, "accuracy": accuracy - 0.008} if test and number % 2 == 0 else {}
    return RoundRecord(
        round=number,
        rounds=rounds,
        version=number,
        epochs=1,
        samples=60_000,
        seconds=round_s,
        compute_s=slowest,
        transfer_s=max(transfer for _, transfer in spent),
        merge_s=0.02 * round_s,
        wait_s=sum(slowest - compute for compute, _ in spent) / workers,
        bytes_out=900_136 * workers,
        bytes_back=900_136 * workers,
        slots=workers,
        workers=tuple(range(1, workers + 1)),
        metrics=metrics,
        test=tested,
    )


def answers(workers: int = 4, *, busy: str | None = "train") -> list[dict[str, Any]]:
    """Return the status facts of workers."""
    result = []
    for worker in range(1, workers + 1):
        facts: dict[str, Any] = dict(
            worker=worker, name=name(worker), address=f"10.0.0.{10 + worker}:9000", state="alive"
        )
        facts |= dict(silent_s=0.1, sent=worker * 31_400_000, received=worker * 30_900_000, host=name(worker))
        facts |= dict(
            executor="ready", restarts=0, last_exit=None, uptime_s=3600.0, cores=8, lease=None, python="3.11.9"
        )
        facts["busy"] = {"id": 1, "method": busy, "seconds": 0.4} if busy else None
        facts["memory"] = {"used": 1_100_000_000 + worker * 70_000_000, "free": 9_000_000_000, "total": 16_600_000_000}
        result.append(facts)
    return result


def in_parts(*, at: float = 0.0, workers: int = 3, rounds: int = 4) -> Iterator[tuple[float, e.Event]]:
    """Yield the events of a run on Slurm. Its model spans two of three workers; in round 3, part 2 moves to the third worker."""
    for when, event in beginning(at=at - 4, workers=workers, rounds=rounds, app="SpeechModel"):
        if isinstance(event, e.WorkerConnected):
            yield when, replace(event, engine=f"job 4711_{event.worker - 1}", incarnation=1)
        else:
            yield when, event
        if isinstance(event, e.DataLoaded):
            sizes = dict(weights=83_200_000, optimizer=12)
            first = e.PlannedPart(layers=("dense", "dense_1", "dense_2", "dense_3"), **sizes, activations=2_600_000)
            second = e.PlannedPart(layers=("dense_4",), **sizes, activations=1_000_000)
            yield when, e.ModelCut(parts=(first, second), micro_batches=8)
    for number in range(1, rounds):
        begin, holders = at + 2 * number - 2, (1, 2) if number < 3 else (1, 3)
        if number == 3:
            reason = "Slurm preempted its job"
            yield begin, e.WorkerLost(round=3, worker=2, slot=2, why=f"worker 2 ({name(2)}): {reason}")
            yield begin, e.WorkerDisconnected(worker=2, name=name(2), why=reason, cause="preempted")
        for part, worker in enumerate(holders, 1):
            yield begin, e.SlotStarted(round=number, slot=part, worker=worker)
        for part, worker in enumerate(holders, 1):
            moved = dict(round=number, slot=part, worker=worker, epoch=number, done=30_000, total=60_000)
            yield begin + 1, e.SlotMoved(**moved, loss=2.0 / number if part == 2 else None)
        if number == rounds - 1:
            break  # this round continues
        for part, worker in enumerate(holders, 1):
            of = dict(round=number, slot=part, worker=worker)
            yield begin + 2, e.SlotFinished(**of)
            yield begin + 2, e.PartTrained(**of, seconds=1.9, idle_s=0.19 + 0.1 * part)
        spent = [(1.7, 0.2)] * 2
        yield begin + 2, e.Committed(record=record(number, rounds, 1, spent, 2.0 / number, 2.0, test=False))
    address = "10.0.0.12:9000"
    facts = dict(worker=2, name=name(2), address=address, host="pc09", python="3.11.9", cores=8, threads=4)
    yield at + 2 * rounds - 1, e.WorkerConnected(**facts, again=True, engine="job 4711_1", incarnation=2)


def in_portions(*, at: float = 0.0, workers: int = 3, rounds: int = 4) -> Iterator[tuple[float, e.Event]]:
    """Yield the events of a run of L-BFGS. Worker 3 is slow, so other workers recompute some of its portions."""
    for when, event in beginning(at=at - 4, workers=workers, rounds=rounds, mode="lbfgs", app="Regression"):
        yield when, replace(event, in_rounds=True) if isinstance(event, e.RunBegan | e.TrainingBegan) else event
    for number in range(1, rounds):
        begin = at + number - 1
        for worker in range(1, workers + 1):
            yield begin, e.SlotStarted(round=number, slot=worker, worker=worker)
        counts = [(9, 1, 0), (10, 1, 0), (5, 0, 2)]
        portions = tuple(
            e.PortionCounts(worker=worker, done=done, backup=backup, dropped=dropped)
            for worker, (done, backup, dropped) in enumerate(counts, 1)
        )
        facts = dict(round=number, number=2, step=0.5, loss=2.0 / number, seconds=0.9, portions=portions)
        yield begin + 0.9, e.PassEnded(**facts)
        round_record = record(number, rounds, workers, [(0.8, 0.1)] * workers, 2.0 / number, 1.0, test=False)
        shown = {"loss": 2.0 / number, "gradient": 0.1 / number, "step": 0.5, "passes": 2, "left_out": 0}
        yield begin + 1, e.Committed(record=replace(round_record, metrics=shown))


def with_peers(count: int, seconds: int, *, at: float = 0.0) -> Iterator[tuple[float, e.Event]]:
    """Yield the events of a training by peers, which arrive one after another and post each second.

    Peer 2 is away in the second third of the time, and peer 3 leaves in the middle.
    """
    mode = "peers in swaps"
    yield (
        at,
        e.RunBegan(
            run="r1",
            app="peers of digits",
            mode=mode,
            epochs=0,
            worker_epochs=1,
            batch_size=64,
            seed=0,
            in_rounds=False,
        ),
    )
    began = e.TrainingBegan(mode=mode, samples=0, slots=0, fixed=False, workers=0, in_rounds=False)
    yield at, began
    posts, left_at, back = 0, {2: seconds // 3, 3: seconds // 2}, 2 * seconds // 3
    for second in range(1, seconds + 1):
        now, metrics = at + second, []
        for peer in range(1, count + 1):
            of, begins = {"peer": peer, "name": f"clinic {peer}"}, 1 + peer * seconds // (4 * count)
            if second in (begins, back if peer == 2 else 0):
                yield now, e.PeerArrived(**of, samples=400)
            if second == left_at.get(peer):
                yield now, e.PeerLeft(**of, why="its lease has run out")
            is_away = second < begins or (
                second >= left_at.get(peer, seconds + 1) and not (peer == 2 and second >= back)
            )
            if is_away:
                continue
            chance = random.Random(1000 * peer + second)
            pace, count_of_posts = int((5 + 20 * (peer * 7 % 10) / 10) * chance.uniform(0.8, 1.2)), second - begins + 1
            accuracy = 0.97 - 0.9 * math.exp(-count_of_posts / (8 + peer % 5)) + chance.gauss(0, 0.01)
            did = dict(posts=count_of_posts, new=1, batches=pace, samples=64 * pace, seconds=1.0, bytes_back=10_000)
            yield now, e.PeerPosted(**of, **did, accuracy=accuracy, loss=1.1 - accuracy)
            posts += 1
            metrics.append(accuracy)
        if metrics:
            mean = sum(metrics) / len(metrics)
            numbers = {"loss": 1.1 - mean, "accuracy": mean}
            yield now, e.Committed(record=RoundRecord(
                round=second, rounds=0, slot=1, version=posts, epochs=1, samples=64, seconds=1.0, compute_s=0.0,
                transfer_s=0.0, merge_s=0.0, bytes_out=0, bytes_back=10_000 * len(metrics), slots=count, metrics=numbers,
                test={},
            ))  # fmt: skip
