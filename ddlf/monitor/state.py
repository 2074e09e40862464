"""The state of a run, computed from its events one by one, and sums over its updates. It has no clock: callers pass the
time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ddlf import events as e
from ddlf.events import ends_rounds_together
from ddlf.events.record import RoundRecord

COMMITS_OF_A_PACE = 12
"""The speed is computed from this number of recent commits, so that it does not contain the slow first round, which
compiles the model."""
RATE_S = 0.5
"""Minimum seconds for a meaningful rate."""


@dataclass(slots=True)
class RunningPhase:
    """A phase that is running now: work other than training that takes time, such as loading data.

    Args:
        activity: One of ``ddlf.events.What``, or a phrase.
        worker: Number of the worker that does it; 0 for the master.
        since: Time of its beginning.
        total: The amount of work; 0 if it is unknown.
        unit: The unit of the total.
        done: The finished part of the total.
        address: The address of a connection.
    """

    activity: str
    worker: int
    since: float
    total: int = 0
    unit: str = ""
    done: int = 0
    address: str = ""


@dataclass(slots=True)
class Portions:
    """The work of one worker in all passes of a run of L-BFGS. ``ddlf.events.PortionCounts`` describes the numbers."""

    done: int = 0
    backup: int = 0
    dropped: int = 0


@dataclass(slots=True)
class PartLane:
    """The state of one part of a model that spans workers, for displays.

    Args:
        layers: Names of its layers.
        nbytes: Bytes of its weights, their gradients, its optimizer and its activations.
        worker: Number of the worker that has it; 0 before the first round.
        idle: Share of the last round that it has waited for other parts; None before the end of the first round.
    """

    layers: tuple[str, ...]
    nbytes: int
    worker: int = 0
    idle: float | None = None


@dataclass(slots=True)
class WorkerLane:
    """The state of one worker in a run, for displays.

    Args:
        worker: Number of the worker.
        name: Name of the worker, without its address.
        heard: Time of its last event.
        since: The time of its last change of state.
        is_there: Whether it is connected.
        is_gone: Whether it is excluded from the run.
        reason: Why it was lost or excluded.
        slot: The number of the slot that it computes; 0 for none.
        round: The round of that slot, or of the previous one.
        epoch: Number of the local epoch, counted over the whole run.
        done: Samples trained on in this round, counted in each local epoch.
        total: Samples to train on in this round, counted in the same way; 0 if unknown.
        rate: Samples per second; 0 if unknown.
        loss: Training loss so far in this epoch; None if unknown.
        refused: Error and number of failed attempts to reach it; empty if it is connected, or not tried.
        address: Host and port of its daemon; empty before it was connected to.
        host: Its machine's own host name; empty before it was connected to.
        engine: The name of what runs it in its engine, such as ``"job 12_3"``; empty without one.
        incarnation: Which of the run's workers with this number it is, from 1; 0 if unknown.
        left: Why the worker before it with this number left, in the words of its engine if it knew them.
        portions: Its work in passes of L-BFGS.
        is_peer: Whether it is a peer with private data.
    """

    worker: int
    name: str
    heard: float
    since: float
    is_there: bool = True
    is_gone: bool = False
    reason: str = ""
    slot: int = 0
    round: int = 0
    epoch: int = 0
    done: int = 0
    total: int = 0
    rate: float = 0.0
    loss: float | None = None
    refused: str = ""
    address: str = ""
    host: str = ""
    engine: str = ""
    incarnation: int = 0
    left: str = ""
    portions: Portions = field(default_factory=Portions)
    is_peer: bool = False

    def quiet_s(self, now: float) -> float:
        """Return the seconds since its last event or change of state."""
        return now - max(self.heard, self.since)

    def became(self, now: float, *, is_there: bool = True, is_gone: bool = False, reason: str = "") -> None:
        """Change the state of the worker. From now on it computes no slot."""
        self.is_there, self.is_gone, self.reason, self.since = is_there, is_gone, reason, now
        self.slot = self.done = self.total = 0
        self.refused = ""


@dataclass(slots=True)
class State:
    """The state of a run, or of a cluster without one. Times are seconds of the caller's clock.

    Attributes:
        app: Name of the app's class; empty while there is no run.
        in_rounds: Whether all slots end a round together.
        rounds: Rounds of the whole run; in asynchronous training, of each slot.
        slots: Number of slots; 0 before training.
        began: Time of the run's beginning.
        is_training: Whether the run is computing rounds.
        how: How the run ended; empty while it is running.
        reason: The error's text if it has failed.
        record: The newest record.
        metrics: Newest value of each metric of training and, named ``test_...``, of the test.
        lanes: The workers by number.
        phases: The running phases by number, the oldest first.
        waiting_until: Time when the run ends if no worker returns; None while there is a worker.
        parts: The parts of a model that spans workers; empty for a whole model.
        micro_batches: Number of micro-batches of a batch of such a model.
        passed: The last pass of L-BFGS; None without one.
        ends_after_s: A training by peers ends this number of seconds after its first peer; 0 without such an end.
    """

    app: str = ""
    in_rounds: bool = True
    rounds: int = 0
    slots: int = 0
    began: float = 0.0
    is_training: bool = False
    how: str = ""
    reason: str = ""
    record: RoundRecord | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    lanes: dict[int, WorkerLane] = field(default_factory=dict)
    phases: dict[int, RunningPhase] = field(default_factory=dict)
    waiting_until: float | None = None
    parts: list[PartLane] = field(default_factory=list)
    micro_batches: int = 0
    passed: e.PassEnded | None = None
    ends_after_s: float = 0.0
    _first_peer: float | None = None  # these seconds began at this time
    _told_at: float = 0.0
    _base: float = 0.0  # rounds that each slot had completed when training began
    # slot -> completed rounds, with the finished share of the current one
    _reached: dict[int, float] = field(default_factory=dict)
    _marks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=COMMITS_OF_A_PACE))
    # whether a first round is complete: it is slower than the later rounds, which resemble each other
    _compiled: bool = False

    # -- results ------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> float:
        """The finished share of the whole run, 0 to 1, including the rounds before a resumed checkpoint."""
        if self.ends_after_s:
            return 0.0 if self._first_peer is None else min(1.0, (self._told_at - self._first_peer) / self.ends_after_s)
        if not self.rounds or not self.slots:
            return 0.0
        reached = sum(self._reached.values()) + self._base * max(0, self.slots - len(self._reached))
        return min(1.0, reached / max(self.slots, len(self._reached)) / self.rounds)

    @property
    def has_end(self) -> bool:
        """Whether it is known when the run ends, so that its finished share means something."""
        return bool(self.rounds or self.ends_after_s)

    @property
    def round(self) -> int:
        """The newest round that has started; 0 before the first."""
        return max((lane.round for lane in self.lanes.values()), default=0)

    @property
    def rate(self) -> float:
        """The training speed in samples per second: of the last round, or else the sum over all workers, before the
        first round ends and in asynchronous training.
        """
        if self.record is not None and self.record.slot is None and self.record.seconds:
            return self.record.samples * self.record.epochs / self.record.seconds
        return sum(lane.rate for lane in self.lanes.values() if lane.is_there and not lane.is_gone)

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the run is over at the current speed; None if that is not known yet."""
        if self.ends_after_s:
            return None if self._first_peer is None else max(0.0, self._first_peer + self.ends_after_s - now)
        if not self._marks:
            return None
        then, before = self._marks[0]
        gained = self.done - before
        return (1.0 - self.done) / gained * (now - then) if gained > 0 and now > then else None

    # -- events -------------------------------------------------------------------------------------------------------

    def tell(self, event: e.Event, now: float) -> None:
        """Update the state of the run by an event that happens now."""
        self._told_at = now
        match event:
            case e.PhaseEvent():
                self._phase(event, now)
            case e.MapEvent():
                self._map(event, now)
            case e.SlotEvent():
                self._slot(event, now)
            case e.ClusterEvent():
                self._cluster(event, now)
            case e.WorkerEvent():
                self._worker(event, now)
            case e.PeerEvent():
                self._peer(event, now)
            case e.WaitingForWorkers():
                self.waiting_until = now + event.seconds
            case e.RunBegan():
                self._begin(event, now)
            case e.TrainingBegan():
                self.is_training, self.slots = True, event.slots
                self.ends_after_s = event.ends_after_s
                self._first_peer = now - event.passed_s if event.passed_s else None
                self._base = event.version if self.in_rounds else event.version / max(event.slots, 1)
                self.rounds = event.rounds or self.rounds + (0 if event.source else round(self._base))
                self._marks.append((now, self.done))
            case e.SlotsChanged():
                self.slots = event.slots
            case e.ModelCut():
                self.micro_batches = event.micro_batches
                self.parts = [
                    PartLane(part.layers, 2 * part.weights + part.optimizer + part.activations) for part in event.parts
                ]
            case e.PassEnded():
                self._pass(event, now)
            case e.Committed():
                self._commit(event.record, now)
            case e.Evaluated():
                self.metrics |= {f"test_{name}": value for name, value in event.metrics.items()}
            case e.RunEnded():
                self.is_training, self.how, self.reason, self.waiting_until = False, event.how, event.why, None
                for lane in self.lanes.values():
                    lane.slot = 0

    def _begin(self, event: e.RunBegan, now: float) -> None:
        self.app, self.in_rounds, self.began = event.app, ends_rounds_together(event), now
        self.rounds = 0 if event.worker_steps or event.round_samples else math.ceil(event.epochs / event.worker_epochs)
        self.slots, self.how, self.reason, self.record, self._base, self._compiled = 0, "", "", None, 0.0, False
        self.micro_batches, self.passed = 0, None
        for collection in (self.metrics, self._reached, self._marks, self.parts):
            collection.clear()
        for lane in self.lanes.values():
            lane.is_gone, lane.round, lane.loss, lane.portions = False, 0, None, Portions()

    def _commit(self, record: RoundRecord, now: float) -> None:
        if self.record is not None and record.version <= self.record.version:  # the run has gone back
            self._marks.clear()
        self.record, self.rounds, self.slots = record, record.rounds, record.slots or self.slots
        self.metrics |= record.metrics | {f"test_{name}": value for name, value in record.test.items()}
        reached = float(record.round)
        if record.slot is None:  # all slots have completed the round, even if they sent no progress
            self._base = reached
            self._reached = {slot: completed for slot, completed in self._reached.items() if completed > reached}
        else:
            self._reached[record.slot] = max(self._reached.get(record.slot, 0.0), reached)
        if not self._compiled:
            self._compiled = True
            self._marks.clear()
        self._marks.append((now, self.done))

    def _pass(self, event: e.PassEnded, now: float) -> None:
        self.passed = event
        for portion in event.portions:
            sums = self._lane(portion.worker, now).portions
            sums.done, sums.backup, sums.dropped = (
                sums.done + portion.done,
                sums.backup + portion.backup,
                sums.dropped + portion.dropped,
            )

    def _phase(self, event: e.PhaseEvent, now: float) -> None:
        if event.worker:
            lane = self._lane(event.worker, now)
            lane.heard, lane.name = now, event.name or lane.name
        if isinstance(event, e.PhaseBegan):
            self.phases[event.phase] = RunningPhase(
                event.what, event.worker, now, event.total, event.unit, address=event.address
            )
        elif isinstance(event, e.PhaseEnded):
            self.phases.pop(event.phase, None)
        elif isinstance(event, e.PhaseMoved) and event.phase in self.phases:
            self.phases[event.phase].done = event.done

    def _map(self, event: e.MapEvent, now: float) -> None:
        """Update the state by an event of a map, which is shown like a phase. Its phase has a negative number."""
        phase = self.phases.get(-event.map)
        match event:
            case e.MapBegan():
                self.phases[-event.map] = RunningPhase(f"mapping {event.function}", 0, now, event.items or 0, "items")
            case e.MapMoved() if phase is not None and phase.total:
                phase.done = event.done + event.failed
            case e.MapEnded():
                self.phases.pop(-event.map, None)

    def _slot(self, event: e.SlotEvent, now: float) -> None:
        lane = self._lane(event.worker, now)
        part = self.parts[event.slot - 1] if event.slot <= len(self.parts) else None
        match event:
            case e.PartTrained() if part is not None:
                part.worker, part.idle = event.worker, event.idle_s / max(event.seconds, 1e-9)
            case e.SlotStarted():
                if part is not None:
                    part.worker = event.worker
                lane.became(now)
                lane.slot, lane.round = event.slot, event.round
                self._reach(event, 0.0)
                self.waiting_until = None
            case e.SlotMoved():
                lane.heard, lane.slot, lane.round = now, event.slot, event.round
                lane.done, lane.total, lane.epoch, lane.loss = event.done, event.total, event.epoch, event.loss
                if now - lane.since > RATE_S:
                    lane.rate = event.done / (now - lane.since)
                if event.round > self._reached.get(event.slot, self._base):  # otherwise it is over
                    self._reach(event, event.done / max(event.total, 1))
            case e.UpdateArrived():
                lane.heard = now
                if event.compute_s:
                    lane.rate = event.samples * event.epochs / event.compute_s
            case e.SlotFinished():
                lane.heard = now
                lane.became(now)
                self._reach(event, 1.0)

    def _reach(self, event: e.SlotEvent, share: float) -> None:
        """Record the progress of a slot. The progress drops if the slot is computed again, but not for a slower second
        worker."""
        other_lanes = (lane for lane in self.lanes.values() if lane.slot == event.slot and lane.worker != event.worker)
        best = max((lane.done / max(lane.total, 1) for lane in other_lanes if lane.round == event.round), default=0.0)
        self._reached[event.slot] = event.round - 1 + max(share, best)

    def _cluster(self, event: e.ClusterEvent, now: float) -> None:
        lane = self._lane(event.worker, now)
        lane.name = event.name
        match event:
            case e.WorkerConnected():
                lane.heard, lane.address = now, event.address
                lane.host, lane.engine, lane.incarnation = event.host, event.engine, event.incarnation
                if not lane.is_there:
                    lane.became(now)
            case e.WorkerNotReached():
                if lane.is_there:
                    lane.became(now, is_there=False, reason=event.why)
                tries = f"{event.tries} {'try' if event.tries == 1 else 'tries'}"
                lane.refused = f"{event.why.partition(chr(10))[0]} ({tries})"
            case e.WorkerDisconnected() | e.ExecutorEnded():
                lane.left = event.why or lane.left
                if event.why and not lane.is_gone:
                    lane.became(now, is_there=False, reason=event.why)
            case _:
                lane.heard = now

    def _worker(self, event: e.WorkerEvent, now: float) -> None:
        lane = self._lane(event.worker, now)
        match event:
            case e.WorkerLost():
                lane.became(now, is_there=False, reason=event.why)
            case e.WorkerLeft():
                lane.became(now, is_there=False, reason="it announced its end")
            case e.WorkerGone():
                reason = event.why or f"{event.rejected} updates in a row were rejected"
                lane.became(now, is_there=lane.is_there, is_gone=True, reason=reason)
            case e.WorkerReady() | e.WorkerReturned() | e.WorkerJoined():
                lane.heard, self.waiting_until = now, None
                if not lane.is_there or lane.is_gone:
                    lane.became(now)

    def _peer(self, event: e.PeerEvent, now: float) -> None:
        """Update the state by an event of a peer, which is shown like a worker with one slot."""
        lane = self._lane(event.peer, now)
        lane.name, lane.heard, lane.is_peer = event.name, now, True
        match event:
            case e.PeerArrived():
                self._first_peer = self._first_peer or now
                lane.became(now)
                lane.slot = event.peer
            case e.PeerPosted():
                lane.slot, lane.round, lane.loss = event.peer, event.posts, event.loss
                lane.rate = event.samples / event.seconds if event.seconds > 0 else 0.0
            case e.PeerLeft():
                lane.became(now, is_there=False, is_gone=event.removed, reason=event.why)

    def _lane(self, worker: int, now: float) -> WorkerLane:
        if worker not in self.lanes:
            self.lanes[worker] = WorkerLane(worker, f"worker {worker}", now, now)
        return self.lanes[worker]


@dataclass(kw_only=True)
class Sums:
    """Sums over the updates of a worker, or of all workers.

    Args:
        updates: Number of updates.
        trained: Samples that they were trained on, counted in each local epoch.
        compute_s: Seconds of local training.
        transfer_s: The other seconds from sending weights to receiving the update.
        bytes_out: Bytes sent for them.
        bytes_back: Bytes received for them.
        lost: Number of losses of the worker or workers.
    """

    updates: int = 0
    trained: int = 0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    lost: int = 0

    def add(self, event: e.UpdateArrived | e.WorkerLost | e.PeerPosted) -> None:
        """Add an update, the posts of a peer, or the loss of a worker, to the sums."""
        if isinstance(event, e.PeerPosted):
            self.updates += event.new
            self.trained += event.samples
            self.bytes_back += event.bytes_back
            return
        if isinstance(event, e.WorkerLost):
            self.lost += 1
            return
        self.updates += 1
        self.trained += event.samples * event.epochs
        self.compute_s += event.compute_s
        self.transfer_s += max(event.transfer_s, 0.0)  # the clocks of two machines may differ
        self.bytes_out += event.bytes_out
        self.bytes_back += event.bytes_back
