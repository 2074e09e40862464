"""Reads a run's folder, even if the run continues, failed, or was killed while it wrote a line. Runs on the master."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from ddlf import events as e
from ddlf.errors import ConfigError
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import from_json
from ddlf.monitor.dashboard.board import Board
from ddlf.monitor.runs import folder
from ddlf.monitor.state import Sums
from ddlf.monitor.terminal.lines import training_event

UNUSED = ('"event":"Phase', '"event":"WorkerWrote"')
"""Texts in lines that nothing here needs. They are not parsed."""
SKIPPED = ('"event":"SlotStarted"', '"event":"SlotFinished"', *UNUSED)
"""Texts in most lines of a long run. They only show what workers do at the moment."""
RESTARTED = "the command was started again, and the run continues"


@dataclass(kw_only=True)
class Share(Sums):
    """The share of one worker in the work of a run.

    Args:
        worker: Number of the worker.
        name: Name of the worker.
        away_s: Seconds in which it was lost.
        wait_s: Seconds without work between its first task and the run's last merge, while it was not lost.
        first: Time of its first task; None if it has brought no update.
        lost_at: Time of its loss, if it is lost.
    """

    worker: int
    name: str
    away_s: float = 0.0
    wait_s: float = 0.0
    first: float | None = None
    lost_at: float | None = None


@dataclass(kw_only=True)
class Stay:
    """The time that one worker was connected, from its coming to its leaving.

    Args:
        worker: Number of the worker.
        name: Name of the worker.
        host: Its machine's own host name.
        address: Host and port of its daemon, or its place.
        engine: The name of what ran it in its engine; empty without one.
        incarnation: Which of the run's workers with this number it was, from 1; 0 if unknown.
        came: When it came, in seconds since 1970.
        left: When it left, or when the run ended; None while the run continues, and if its master was killed.
        cause: The kind of the reason why it left; empty if unknown, or at the end of the run.
        reason: The reason, in the words of its engine if it knew one; empty at the end of the run.
    """

    worker: int
    name: str
    host: str
    address: str
    engine: str
    incarnation: int
    came: float
    left: float | None = None
    cause: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class UnusualEvent:
    """An unusual event of a run, such as a lost worker, for the report.

    Args:
        time: Time of the event, in seconds since 1970.
        round: Its round; 0 without one.
        kind: A ``TrainingEvent.kind``, or ``"warning"``, ``"damaged"``, ``"failed"``, ``"not finite"``.
        text: A sentence.
    """

    time: float
    round: int
    kind: str
    text: str


@dataclass(kw_only=True)
class Past:
    """A finished or running run, as its folder shows it.

    Args:
        path: Folder.
        status: Status of the run.
        summary: Content of ``summary.json``; empty if there is none.
        records: Records of its rounds, or in asynchronous training of its updates.
        times: Time of each record, in seconds since 1970.
        shares: Work of each worker, by number.
        stays: The times that workers were connected, with their places, in the order of their numbers and of coming.
        faults: Unusual events, in order.
        facts: The last event of some kinds, by name: ``RunBegan``, ``ModelBuilt``, ``DataLoaded``, ``TrainingBegan``,
            ``RoundsMeasured``.
        test: Newest metrics of the test data.
        ended: Time of the last event, in seconds since 1970.
        board: The state that the dashboard would show.
    """

    path: Path
    status: folder.Status
    summary: dict[str, Any]
    records: list[RoundRecord] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    shares: dict[int, Share] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)
    faults: list[UnusualEvent] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    ended: float = 0.0
    board: Board = field(default_factory=lambda: Board(most_points=sys.maxsize))

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the run to its end, or to its last event."""
        return max((self.status.ended or self.ended or self.status.began) - self.status.began, 0.0)

    def setting(self, name: str) -> Any:
        """Return the value of a setting in this run; None if it is unknown."""
        return self.summary.get("settings", {}).get(name, {}).get("value")


def read(path: Path, skipped: tuple[str, ...] = SKIPPED) -> Past:
    """Read a run from its folder. Damaged parts are left out.

    Args:
        path: The folder.
        skipped: Texts of lines that are left out. With ``UNUSED``, the board shows what workers do at the moment.

    Raises:
        ConfigError: The folder is not that of a run.
    """
    if not (path / folder.STATE).exists() and not (path / folder.EVENTS).exists():
        raise ConfigError(f"{str(path)!r} is not the folder of a run", hint="list the runs with: ddlf runs")
    past = Past(path=path, status=folder.read_state(path), summary=folder.read_json(path / folder.SUMMARY))
    for worker in past.summary.get("workers", ()):
        _share(past, worker["worker"]).name = worker["name"]
    replaced = _replaced(path / folder.EVENTS, skipped) if past.status.restarts else set[int]()
    for number, data in enumerate(lines(path / folder.EVENTS, skipped)):
        try:
            if number not in replaced:
                _take(past, data)
            elif data["event"] == "RunBegan":
                restarted = UnusualEvent(time=float(data["time"]), round=0, kind="restarted", text=RESTARTED)
                past.faults.append(restarted)
        except (KeyError, TypeError, ValueError):  # written by another version
            continue
    _finish(past)
    return past


def _replaced(path: Path, skipped: tuple[str, ...]) -> set[int]:
    """Return the numbers of the events that do not count, because the command was started again: the ends of the earlier
    parts of the run, the beginnings of the later parts, and rounds that were computed again.
    """
    replaced: set[int] = set()
    rounds: dict[int, int] = {}  # number of the event -> version after the round
    ends: list[int] = []
    has_begun = False
    for number, data in enumerate(lines(path, skipped)):
        kind = data.get("event")
        if kind == "RunBegan":
            replaced.update([number] * has_begun, ends)
            has_begun = True
        elif kind == "RunEnded":
            ends.append(number)
        elif kind == "Committed":
            rounds[number] = data.get("record", {}).get("version", 0)
        elif kind == "TrainingBegan":
            replaced.update(old for old, version in rounds.items() if version > data.get("version", 0))
    return replaced


def lines(path: Path, skipped: tuple[str, ...] = SKIPPED) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file of events as data, except lines that contain a text of ``skipped``."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for line in file:
            if any(text in line[:80] for text in skipped):
                continue
            try:
                data = json.loads(line)
            except ValueError:  # the line is incomplete: the program was killed while it wrote, or the disk was full
                continue
            if isinstance(data, dict):
                yield data


END_BYTES = 256 * 1024
"""Size of the end of a file of events that is searched for the last round."""


def end_of(path: Path) -> tuple[dict[str, Any], float | None]:
    """Return the last event ``Committed`` in a file of events as data, and the time of the file's last line. Only the
    end of the file is read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - END_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return {}, None
    ended: float | None = None
    for line in reversed(lines):
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            ended = ended or data.get("time")
            if data.get("event") == "Committed":
                return data, ended
    return {}, ended


def _share(past: Past, worker: int) -> Share:
    return past.shares.setdefault(worker, Share(worker=worker, name=f"worker {worker}"))


def _take(past: Past, data: dict[str, Any]) -> None:
    now, kind = float(data["time"]), data["event"]
    past.ended = now
    event = from_json(data)
    past.board.tell(event, now)
    match event:
        case e.Committed():
            while past.records and past.records[-1].version >= event.record.version:  # the run has gone back
                del past.records[-1], past.times[-1]
            past.records.append(event.record)
            past.times.append(now)
        case e.RunBegan() | e.ModelBuilt() | e.DataLoaded() | e.TrainingBegan() | e.RoundsMeasured():
            past.facts[kind] = event
        case e.Evaluated():
            past.test = event.metrics
        case e.UpdateArrived():
            share = _share(past, event.worker)
            share.first = share.first or now - event.compute_s - max(event.transfer_s, 0.0)
            share.add(event)
        case e.WorkerLost():
            share = _share(past, event.worker)
            share.add(event)
            share.lost_at = share.lost_at or now
        case e.WorkerReturned() | e.WorkerJoined():
            share = _share(past, event.worker)
            share.name = event.name
            share.away_s += now - (share.lost_at or now)
            share.lost_at = None
        case e.WorkerConnected():
            past.stays.append(
                Stay(
                    worker=event.worker,
                    name=event.name,
                    host=event.host,
                    address=event.address,
                    engine=event.engine,
                    incarnation=event.incarnation,
                    came=now,
                )
            )
        case e.WorkerDisconnected():
            for stay in past.stays:
                if stay.worker == event.worker and stay.left is None:
                    stay.left, stay.cause, stay.reason = now, event.cause, event.why
        case e.WorkerReady():
            _share(past, event.worker).name = event.name
        case e.Warned():
            past.faults.append(UnusualEvent(time=now, round=0, kind="warning", text=event.why))
        case e.PeersTold():
            past.faults.append(UnusualEvent(time=now, round=0, kind=event.what, text=event.why))
        case e.Advised():
            past.faults.append(UnusualEvent(time=now, round=0, kind="advice", text=f"{event.rule}: {event.what}"))
        case e.CheckpointDamaged():
            past.faults.append(UnusualEvent(time=now, round=0, kind="damaged", text=event.why))
    shown = training_event(event)
    if shown is not None and shown.kind not in ("start", "finish"):
        past.faults.append(UnusualEvent(time=now, round=shown.round, kind=shown.kind, text=shown.text))


def _finish(past: Past) -> None:
    last = past.times[-1] if past.times else past.ended
    for share in past.shares.values():
        if share.lost_at is not None:
            share.away_s += max(last - share.lost_at, 0.0)
        if share.first is not None:
            busy = share.compute_s + share.transfer_s + share.away_s
            share.wait_s = max(last - share.first - busy, 0.0)
    past.shares = dict(sorted(past.shares.items()))
    past.stays.sort(key=lambda stay: (stay.worker, stay.came))
    for stay in past.stays:
        stay.left = stay.left or past.status.ended
    for when, record in zip(past.times, past.records, strict=True):
        if not_finite := [name for name, value in record.metrics.items() if not isfinite(value)]:
            text = f"{' and '.join(not_finite)} of training {'is' if len(not_finite) == 1 else 'are'} not finite from here on, or for a while"
            past.faults.append(UnusualEvent(time=when, round=record.round, kind="not finite", text=text))
            break
    if past.status.state == "failed" or (past.status.why and past.status.state == "stopped"):
        past.faults.append(UnusualEvent(time=past.ended, round=0, kind=past.status.state, text=past.status.why))
    past.faults.sort(key=lambda fault: fault.time)
