"""The board, which holds the state, history and log of a cluster and its run, for the dashboard's pages and metrics.
Runs on the master.

Memory is bounded, however long the run and its log are. A ``Received`` records what one viewer has received. The difference
to the board is always small, so no viewer needs a queue: a slow viewer only receives fewer updates.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from ddlf import events as e
from ddlf.events import ends_rounds_together
from ddlf.events.record import RoundRecord
from ddlf.monitor.dashboard.peer_curves import PeerCurves
from ddlf.monitor.dashboard.series import MOST_POINTS, Series
from ddlf.monitor.state import State, Sums, WorkerLane
from ddlf.monitor.terminal.echo import harmless
from ddlf.monitor.terminal.lines import line
from ddlf.monitor.terminal.phrases import phase_in_words

MOST_SPANS = 800
"""Maximum number of updates in the timeline."""
MOST_LINES = 500
"""Maximum number of lines in the log."""
LONGEST_LINE = 500
OF_A_RUN = ("run", "app", "mode", "batch_size", "worker_epochs", "worker_steps", "seed")
"""Facts of ``RunBegan`` that the page shows."""
TROUBLE = (
    e.Advised,
    e.Warned,
    e.WorkerLost,
    e.WorkerGone,
    e.UpdateRejected,
    e.CheckpointFailed,
    e.CheckpointDamaged,
    e.GradientsOverflowed,
    e.ResidualDropped,
)


class Tail:
    """The last entries of a list that only grows.

    Args:
        most: Number of entries to keep.

    Attributes:
        count: Number of all entries so far.
    """

    def __init__(self, most: int) -> None:
        self._entries: deque[Any] = deque(maxlen=most)
        self.count = 0

    def append(self, entry: Any) -> None:
        """Add an entry at the end of the list."""
        self._entries.append(entry)
        self.count += 1

    def entries_after(self, received: int) -> list[Any]:
        """Return the entries after the first ``received`` ones, as far as they are still kept."""
        new = min(self.count - received, len(self._entries))
        return list(self._entries)[len(self._entries) - new :]


@dataclass
class Received:
    """Records how much of the board one viewer has received, so that only the rest is sent: numbers of changes, points,
    spans and lines.
    """

    run: int = -1
    began: int = 0
    workers: int = -1
    thinned: int = 0
    points: int = 0
    peers_thinned: int = 0
    peers_points: int = 0
    spans: int = 0
    lines: int = 0


@dataclass
class Header:
    """The facts at the head of the dashboard's page, which change rarely in a run, or never."""

    run: str = ""
    app: str = ""
    mode: str = ""
    in_rounds: bool = True
    batch_size: int = 0
    worker_epochs: int = 0
    worker_steps: int | None = None
    seed: int = 0
    model: str = ""
    parameters: int = 0
    keras: str = ""
    samples: int = 0
    first: int = 0
    ended: float | None = None
    rejected: int = 0
    checkpoint: int = 0
    stopping: bool = False


class Board:
    """Collects events, and returns the facts that viewers have not received yet.

    Args:
        most_points: Maximum number of points of a curve.
        about: Constant facts, for viewers.

    Attributes:
        state: State of the run.
        sums: Sums over each worker's updates in this run, by number.
        total: Sums over all updates.
        batches: Batches that peers with private data have trained.
        peers: Curves of each peer.
        workers: The workers' last answers, a dict for each.
    """

    def __init__(self, most_points: int = MOST_POINTS, **about: Any) -> None:
        self.about = about
        self._most_points = most_points
        self.state = State()
        self.header = Header()
        self.total = Sums()
        self.sums: dict[int, Sums] = {}
        self.batches = 0
        self.workers: list[dict[str, Any]] = []
        self.series = Series(most_points)
        self.peers = PeerCurves()
        self.spans = Tail(MOST_SPANS)
        self.log = Tail(MOST_LINES)
        self._runs = 0
        self._changes = self._answers = 0
        self._pace: deque[tuple[float, int]] = deque()
        self._newest_rate = 0.0

    # -- input --------------------------------------------------------------------------------------------------------

    def set_workers(self, workers: list[dict[str, Any]]) -> None:
        """Store the answers of all workers about their state, to show them."""
        self.workers = workers
        self._answers += 1

    def stop(self, now: float) -> None:
        """Record that the user asked the run to end."""
        if not self.header.stopping:
            self.header.stopping = True
            self._changes += 1
            self.say(now, "", "stopping  after this round, on request", "warn")

    def say(self, now: float, source: str, text: str, level: str) -> None:
        """Add lines to the log. The level is ``"info"``, ``"warn"``, or a worker's output stream."""
        for text_line in text.split("\n"):
            self.log.append([round(now, 3), level, source, text_line[:LONGEST_LINE]])

    def tell(self, event: e.Event, now: float) -> None:
        """Update the board by an event of a run or a cluster.

        Args:
            event: The event.
            now: The time of the event, in seconds since 1970.
        """
        self._changes += 1
        if isinstance(event, e.RunBegan):
            self._begin(event)
        self.state.tell(event, now)
        self._note(event, now)
        match event:
            case e.WorkerWrote():
                if event.dropped:
                    self.say(now, event.name, f"{event.dropped:,} lines were dropped here", "warn")
                self.say(
                    now, event.name, "\n".join(harmless(text, colours=False) for text in event.lines), event.stream
                )
            case e.RunEnded():
                words = f"ended     {event.how}" + f": {event.why}" * bool(event.why)
                self.say(now, "", words, "warn" if event.how == "failed" else "info")
            case e.Committed():
                pass  # the page shows these events as curves
            case _ if text := line(event):
                self.say(now, "", text, "warn" if isinstance(event, TROUBLE) else "info")

    def _begin(self, event: e.RunBegan) -> None:
        facts = {name: getattr(event, name) for name in OF_A_RUN}
        self.header = Header(**facts, in_rounds=ends_rounds_together(event))
        self.total, self.sums, self.batches = Sums(), {}, 0
        self.series, self.spans = Series(self._most_points), Tail(MOST_SPANS)
        self.peers = PeerCurves()
        self._pace.clear()
        self._newest_rate = 0.0
        self._runs += 1

    def _note(self, event: e.Event, now: float) -> None:
        header = self.header
        if isinstance(event, e.PeerEvent):
            self.peers.tell(event)
        match event:
            case e.ModelBuilt():
                header.model, header.parameters, header.keras = event.name, event.parameters, event.keras
            case e.DataLoaded():
                header.samples = event.samples
            case e.TrainingBegan():
                header.samples, header.first = event.samples, event.version
                self._pace.append((now, 0))
            case e.PartTrained():
                times = (round(now - event.seconds, 3), round(event.seconds - event.idle_s, 4), 0.0)
                self.spans.append([event.worker, event.slot, event.round, *times])
            case e.UpdateArrived():
                self._count(event)
                if self.state.parts:  # the update of all parts: each part has its own span
                    return
                times = (round(now - event.compute_s - event.transfer_s, 3), event.compute_s, event.transfer_s)
                self.spans.append([event.worker, event.slot, event.round, *(round(value, 4) for value in times)])
            case e.Committed():
                self._commit(event.record, now)
            case e.PeerPosted():
                self._count(event)
                self.batches += event.batches
            case e.WorkerLost():
                self._count(event)
            case e.UpdateRejected():
                header.rejected += 1
            case e.CheckpointWritten():
                header.checkpoint = event.version
            case e.RunEnded():
                header.ended = now

    def _count(self, event: e.UpdateArrived | e.WorkerLost | e.PeerPosted) -> None:
        number = event.peer if isinstance(event, e.PeerPosted) else event.worker
        for sums in (self.total, self.sums.setdefault(number, Sums())):
            sums.add(event)

    def _commit(self, record: RoundRecord, at: float) -> None:
        values = dict(record.metrics) | {f"test_{name}": value for name, value in record.test.items()}
        times = dict(compute=record.compute_s, transfer=record.transfer_s, merge=record.merge_s, wait=record.wait_s)
        self._newest_rate = self._rate(record, at)
        values |= {"#rate": self._newest_rate, **{f"#{name}_s": value for name, value in times.items()}}
        values |= {"#sent": record.bytes_out, "#received": record.bytes_back}
        if record.error:
            values["#error"] = record.error
        if self.batches:
            values["#batches"] = self.batches
        elif record.slot is not None:
            values["#staleness"] = record.staleness
        self.series.add(record.version, values)
        self.peers.add(at - self.state.began)

    def _rate(self, record: RoundRecord, at: float) -> float:
        """Return the recent samples per second, of the last round or of the last update of each slot."""
        self._pace.append((at, self.total.trained))
        while len(self._pace) > (1 if record.slot is None else max(self.state.slots, 1)) + 1:
            self._pace.popleft()
        (then, before), now = self._pace[0], self._pace[-1][1]
        return (now - before) / (at - then) if at > then else 0.0

    # -- output -------------------------------------------------------------------------------------------------------

    def news(self, received: Received, now: float) -> dict[str, Any]:
        """Return the facts that a viewer has not received yet, as JSON data, possibly empty. Update ``received``.

        ``"from"`` is the number of earlier points of the curves that stay valid. ``"more"`` says whether earlier spans
        and lines stay valid.
        """
        message: dict[str, Any] = {}
        if received.run < 0:
            message["about"] = self.about
        if received.began != self._runs:
            received.began, received.thinned, received.points, received.spans = self._runs, self.series.thinned, 0, 0
            received.peers_thinned, received.peers_points = self.peers.series.thinned, 0
        if received.run != self._changes:
            received.run = self._changes
            if received.thinned != self.series.thinned:
                received.thinned, received.points = self.series.thinned, 0
            x, columns = self.series.points_after(received.points)
            message["run"] = self._run(now)
            message["lanes"] = [self._lane(lane) for _, lane in sorted(self.state.lanes.items())]
            message["series"] = {"from": received.points, "x": x, "columns": columns}
            message["peers"] = self._peers(received)
            message["spans"] = {"more": received.spans > 0, "new": self.spans.entries_after(received.spans)}
            received.points, received.spans = len(self.series), self.spans.count
        if received.workers != self._answers:
            received.workers = self._answers
            message["workers"] = self.workers
        if received.lines != self.log.count:
            message["log"] = {"more": received.lines > 0, "new": self.log.entries_after(received.lines)}
            received.lines = self.log.count
        return message

    def _peers(self, received: Received) -> dict[str, Any] | None:
        """Return the new points of the curves of peers; None if the run has no peers."""
        peers = self.peers
        if not peers.names:
            return None
        if received.peers_thinned != peers.series.thinned:
            received.peers_thinned, received.peers_points = peers.series.thinned, 0
        begin, (x, columns) = received.peers_points, peers.series.points_after(received.peers_points)
        received.peers_points = len(peers.series)
        return {"from": begin, "x": x, "columns": columns, "names": peers.names, "count": peers.count}

    def _run(self, now: float) -> dict[str, Any] | None:
        state = self.state
        if not state.app:
            return None
        return {
            **vars(self.header),
            **vars(self.total),
            "number": self._runs,
            "phase": state.how or ("training" if state.is_training else "preparing"),
            "why": state.reason,
            "doing": sorted({phase_in_words(phase) for phase in state.phases.values()}),
            "began": state.began,
            "version": state.record.version if state.record else self.header.first,
            "round": max(state.round, state.record.round if state.record else 0),
            "rounds": state.rounds,
            "slots": state.slots,
            "done": round(state.done, 5),
            "has_end": state.has_end,
            "left_s": None if state.how else state.left_s(now),
            "rate": (self._newest_rate or state.rate) if state.is_training else 0.0,
            "metrics": finite(state.metrics),
            "waiting_until": state.waiting_until,
            "parts": [asdict(part) for part in state.parts],
            "micro_batches": state.micro_batches,
            "pass": None if state.passed is None else self._pass(state.passed),
        }

    @staticmethod
    def _pass(event: e.PassEnded) -> dict[str, Any]:
        return {"round": event.round, "number": event.number, "step": event.step, "loss": finite_or_none(event.loss)}

    def _lane(self, lane: WorkerLane) -> dict[str, Any]:
        phases = [phase_in_words(phase) for phase in self.state.phases.values() if phase.worker == lane.worker]
        status = "gone" if lane.is_gone else "lost" if not lane.is_there else "busy" if lane.slot or phases else "idle"
        facts = {name: getattr(lane, name) for name in LANE}
        facts["done"] = round(lane.done / lane.total, 3) if lane.slot and lane.total else 0.0
        sums = vars(self.sums.get(lane.worker, NOTHING))
        facts["name"] = lane.name.partition(" (")[0]  # leave out the address of the worker
        facts["why"] = lane.refused.removeprefix(f"{lane.address}: ") or lane.reason
        facts["portions"] = asdict(lane.portions)
        return {
            **facts,
            **sums,
            "state": status,
            "doing": phases[-1] if phases else "",
            "loss": finite_or_none(lane.loss),
        }


LANE = (
    *("worker", "name", "heard", "since", "slot", "round", "epoch", "rate"),
    *("host", "engine", "incarnation", "left", "is_peer"),
)
NOTHING = Sums()


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON can contain it: None replaces NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON can contain them: None replaces NaN and infinity."""
    return {name: finite_or_none(value) for name, value in metrics.items()}
