"""Events: facts about a run or a cluster, as values. Displays, run folders and your own sinks subscribe to them.

Rounds, slots and workers count from 1. ``ddlf/monitor/terminal`` turns events into sentences. Events themselves contain
no sentences, except reasons (``why``), which are texts of errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, dataclass_transform

from ddlf.events.record import RoundRecord


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """A fact about the past. Each subclass is a frozen dataclass with keyword-only arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


How = Literal["complete", "converged", "stopped", "cancelled", "failed"]
"""The ways in which a run can end."""


class RunBegan(Event):
    """Training was requested, and its settings are valid. No worker is connected yet.

    Args:
        run: Unique name of the run.
        app: Name of the app's class.
        mode: The name of the strategy, such as ``"sync"``.
        epochs: Local epochs to train.
        worker_epochs: Local epochs in a round.
        batch_size: Samples in a batch of each worker.
        seed: Seed of all random numbers.
        worker_steps: Batches of each slot in a round, if the setting is used.
        round_samples: Largest number of samples in a round, if the setting is used.
        in_rounds: Whether all slots end a round together; None in events of 0.1.
    """

    run: str
    app: str
    mode: str
    epochs: int
    worker_epochs: int
    batch_size: int
    seed: int
    worker_steps: int | None = None
    round_samples: int | None = None
    in_rounds: bool | None = None


class ModelBuilt(Event):
    """All workers at the beginning have built the same model.

    Args:
        name: Name of the model.
        parameters: Number of values in its weights.
        keras: Version of Keras on the workers.
        backends: Distinct backends of Keras on the workers.
        threads: Distinct numbers of threads of the workers.
        seconds: Seconds from the first connection until model and data were ready.
        bfloat16_gain: Speed-up of matrix products in bfloat16 on the first worker's machine; 0 if not measured.
        tf32: Which float32 products cards round to TF32, such as ``"products and convolutions"``; empty for none.
        batch_parts: Into how many parts the cards of a worker divide each batch; 1 if each batch stays on one card.
    """

    name: str
    parameters: int
    keras: str
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float
    bfloat16_gain: float = 0.0
    tf32: str = ""
    batch_parts: int = 1


class DataLoaded(Event):
    """All workers at the beginning have the same training data.

    Args:
        samples: Number of training samples.
        shape: Shape of one sample.
        content: Fingerprint of the training data.
        workers: Number of workers that have it.
        loaded: Number of workers that had to load it.
        seconds: Loading time of the slowest worker.
    """

    samples: int
    shape: tuple[int, ...]
    content: str
    workers: int
    loaded: int
    seconds: float


class Warned(Event):
    """The app is likely to contain a mistake.

    Args:
        about: Its subject: ``"data"``, ``"model"``, ``"callback"``, ``"network"``, ``"source"`` of DDLF on workers, or a
            setting.
        why: A description of the mistake.
    """

    about: str
    why: str


class PeersTold(Event):
    """Something has happened between a run that is a peer and its server, or in a training by peers.

    Args:
        what: A word for it, such as ``"joined"``, ``"rarely"``, ``"lost"``, ``"back"``, ``"broken"``, ``"over"`` or
            ``"quorum"``.
        why: A description.
    """

    what: str
    why: str


class SetPosted(Event):
    """A run that is a peer has posted its weights.

    Args:
        version: The number of commits before.
        number: The number of sets that this run has posted since it began.
    """

    version: int
    number: int


class SetTaken(Event):
    """A run that is a peer has taken a set of the server into its weights.

    Args:
        version: The number of commits before.
        set: The number of the set.
        how: ``"merge"``, or ``"replace"`` if the set has replaced the weights.
    """

    version: int
    set: int
    how: Literal["merge", "replace"]


class Decided(Event):
    """A rule has decided a value that the model text leaves open, or the app's plan has decided settings of the run.

    Args:
        key: Block and key, as you would write them; ``"run"`` for options of ``ddlf run``.
        value: The value, as you would write it.
        rule: Name of the rule.
        why: Its reason.
    """

    key: str
    value: str
    rule: str
    why: str


class Advised(Event):
    """The adviser has a finding. A run reports the first three.

    Args:
        rule: Name of the rule, such as ``"L02"``.
        severity: ``"E"``: the model cannot learn; ``"W"``: the problem costs accuracy or time.
        what: The finding.
        fix: What to do.
        place: ``file:line`` in your code; empty if unknown.
        more: Number of further findings.
    """

    rule: str
    severity: str
    what: str
    fix: str
    place: str = ""
    more: int = 0


class TrainingBegan(Event):
    """Master and workers are ready, and the starting weights are known.

    Args:
        mode: The name of the strategy, such as ``"sync"``.
        samples: Number of training samples.
        slots: Number of slots.
        fixed: Whether this number stays when workers join.
        workers: Workers of the cluster.
        version: Number of merges in the starting weights; 0 for a new run.
        source: Path of the checkpoints that it resumes; None without one.
        rounds: Number of rounds of the whole training; 0 in events of 0.1.
        reached: Number of rounds that the fastest slot has completed; 0 in events of 0.1.
        facts: All settings and data that determine the bits of the run, by name, as JSON.
        shard_workers: Number of workers that only serve weights in Downpour.
        in_rounds: Whether all slots end a round together; None in events of 0.1.
        ends_after_s: A training by peers ends this number of seconds after its first peer; 0 without such an end.
        passed_s: The part of these seconds that had passed before this event.
    """

    mode: str
    samples: int
    slots: int
    fixed: bool
    workers: int
    version: int = 0
    source: str | None = None
    rounds: int = 0
    reached: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    shard_workers: int = 0
    in_rounds: bool | None = None
    ends_after_s: float = 0.0
    passed_s: float = 0.0


class DataPartitioned(Event):
    """Each slot keeps its own samples for the whole run.

    Args:
        partition: The partition rule, as text.
        samples: Number of samples of each slot.
        labels: Number of samples of each label for each slot, if the rule uses labels; else empty.
    """

    partition: str
    samples: tuple[int, ...]
    labels: tuple[dict[str, int], ...] = ()


class ExchangeChosen(Event):
    """``exchange="auto"`` has chosen an exchange.

    Args:
        exchange: The name of the chosen exchange.
        why: The reason.
    """

    exchange: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """A part of a model that spans workers, as planned.

    Args:
        layers: Names of its layers, in the order of their calls.
        weights: Bytes of its weights.
        optimizer: Bytes of its optimizer's state.
        activations: Largest number of bytes of its activations.
    """

    layers: tuple[str, ...]
    weights: int
    optimizer: int
    activations: int


class RoundsPredicted(Event):
    """The planner has predicted the rounds of this run from kept measurements.

    Args:
        seconds: Seconds of a round.
        low: Lower end of the 80 % interval.
        high: Its upper end.
        compute_s: Seconds of the local training of the slowest slot in a round; 0 if they were not measured.
        within: Whether rounds with as many slots were measured.
        when: Time of the measurements, in seconds since 1970.
    """

    seconds: float
    low: float
    high: float
    compute_s: float
    within: bool
    when: float


class RoundsMeasured(Event):
    """A run that the planner has predicted is over.

    Args:
        rounds: Number of measured rounds. The first ones, which compile, do not count.
        seconds: Median of their seconds; 0 without one.
        predicted: Predicted seconds of a round.
        low: Lower end of the 80 % interval.
        high: Its upper end.
    """

    rounds: int
    seconds: float
    predicted: float
    low: float
    high: float


class ModelCut(Event):
    """The model was cut into parts for several workers.

    Args:
        parts: For each part the names of its ``layers``, and the bytes of its ``weights``, its ``optimizer`` and at
            most its ``activations``.
        micro_batches: Number of micro-batches in a batch.
    """

    parts: tuple[PlannedPart, ...]
    micro_batches: int


class NothingToTrain(Event):
    """A resumed run is already complete.

    Args:
        round: Number of rounds that were trained.
        epochs: Number of requested local epochs.
        converged: Whether it had converged before all epochs were done.
    """

    round: int
    epochs: int
    converged: bool


class Committed(Event):
    """Updates were merged, so the global weights have changed.

    This event comes when the record is complete: after the evaluation of these weights, if any, and just before
    ``IApp.on_round``.

    Args:
        record: The record of the round, or of the update in asynchronous training.
    """

    record: RoundRecord


class RunEnded(Event):
    """Training has ended, and its results are saved.

    Args:
        run: Unique name of the run, as in ``RunBegan``.
        how: ``"complete"``, ``"converged"``, ``"stopped"`` (by ``stop_training``), ``"cancelled"`` or ``"failed"``.
        version: Number of merges in the final weights; 0 if the run ended before training began.
        why: The error's text if it has failed; why the strategy has ended it early, if it has.
        staleness: Number of asynchronous updates with staleness 0, 1 and so on.
        weights: Digest of the final weights of asynchronous training; else empty.
    """

    run: str
    how: How
    version: int
    why: str = ""
    staleness: tuple[int, ...] = ()
    weights: str = ""


class Converged(Event):
    """A callback, ``is_convergent``, ``converge`` or the strategy has ended training before all epochs were done.

    Args:
        version: Number of merges in the weights.
        epochs: Number of requested local epochs.
        why: Why the strategy itself has ended training; "" if it has not.
        unit: The kind of these merges: ``"rounds"``, or ``"updates"`` if each slot trains in its own rounds.
    """

    version: int
    epochs: int
    why: str = ""
    unit: str = "rounds"


class Evaluated(Event):
    """The master's model was evaluated on the test data by ``IApp.evaluate_model``.

    Args:
        metrics: Keras's metrics by name.
    """

    metrics: dict[str, float]


class ModelSaved(Event):
    """The master's model was saved.

    Args:
        path: Path of the file.
    """

    path: str


IN_ROUNDS = frozenset(("sync",))
"""The strategies of version 0.1 in which all slots end a round together."""


def ends_rounds_together(event: RunBegan | TrainingBegan) -> bool:
    """Return whether all slots of the run end a round together, also for events of 0.1, which name the mode only."""
    return event.mode in IN_ROUNDS if event.in_rounds is None else event.in_rounds


What = Literal[
    "starting",
    "connecting",
    "importing",
    "sending",
    "loading",
    "building",
    "evaluating",
    "validating",
    "saving",
    "writing",
]
"""The kinds of phases: starting workers' processes, connecting to workers, importing the backend, sending code, loading
data, building the model, evaluating test or validation data, saving the model, writing a checkpoint."""


class PhaseEvent(Event):
    """Base of all events about a phase.

    Args:
        phase: Number of the phase, unique in this process.
        what: Kind of the phase, one of ``ddlf.events.What``.
        worker: Number of the worker that it concerns; 0 for the master.
        name: Name of that worker in cluster.yaml, else ``"worker 2"``; empty for the master.
    """

    phase: int
    what: What
    worker: int = 0
    name: str = ""


class PhaseBegan(PhaseEvent):
    """A phase has begun.

    Args:
        total: Amount of work; 0 if unknown.
        unit: Unit of the total: ``"workers"``, ``"bytes"``, ``"samples"``; empty without a total.
        address: Host and port that the phase connects to; else empty.
    """

    total: int = 0
    unit: str = ""
    address: str = ""


class PhaseMoved(PhaseEvent):
    """A phase has progressed.

    Args:
        done: Amount of work done, in the unit of its ``PhaseBegan``.
    """

    done: int


class PhaseEnded(PhaseEvent):
    """A phase has ended, with or without success.

    Args:
        seconds: Seconds that it took.
        why: The error's text if it has failed, or ``"cancelled"``.
    """

    seconds: float
    why: str = ""


class SlotEvent(Event):
    """Base of all events about one slot.

    Args:
        round: Round of the slot.
        slot: Number of the slot.
        worker: Number of the worker that computes it.
    """

    round: int
    slot: int
    worker: int


class SlotStarted(SlotEvent):
    """A slot was given to a worker."""


class SlotMoved(SlotEvent):
    """A slot has progressed. This event comes at most a few times a second. Your own ``train`` reports progress only if
    it calls ``replica.fit``.

    Args:
        done: Samples trained on in this round so far, counted once for each local epoch.
        total: Samples of the whole round, counted in the same way as ``done``.
        epoch: Number of the local epoch, counted over the whole run.
        loss: Loss of this epoch so far; None without one.
    """

    done: int
    total: int
    epoch: int
    loss: float | None = None


class SlotFinished(SlotEvent):
    """A worker has returned the update of a slot."""


class UpdateArrived(SlotEvent):
    """The master has received the update of a slot, and has not checked it yet.

    Args:
        samples: Number of samples that it was trained on.
        epochs: Number of local epochs.
        compute_s: Seconds of local training, on the worker's clock.
        transfer_s: Remaining seconds from sending the weights to receiving the update.
        bytes_out: Bytes sent for it.
        bytes_back: Bytes received for it.
        files: Numbers, from 1, of the first 100 partition files that the worker opened.
        swapped: Bytes that the worker's machine has read from swap meanwhile; 0 on other systems than Linux.
    """

    samples: int
    epochs: int
    compute_s: float
    transfer_s: float
    bytes_out: int
    bytes_back: int
    files: tuple[int, ...] = ()
    swapped: int = 0


class SlotMissed(SlotEvent):
    """A round is merged without a slot, because the worker that it belongs to is away. Nobody else has its data.

    A round whose secure sum is void misses all its slots.

    Args:
        samples: Number of samples of the slot.
        why: The reason, as a sentence; empty if it is that of the round before.
    """

    samples: int
    why: str


class SlotBackedUp(SlotEvent):
    """A slot is late, so a second worker computes it, too."""


class PartTrained(SlotEvent):
    """A part of a model that spans workers was trained for one round. Its slot is the number of the part.

    Args:
        seconds: Seconds of the part's training, including the idle ones.
        idle_s: Seconds of waiting for other parts.
    """

    seconds: float
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class PortionCounts:
    """The work of one worker in a pass of L-BFGS.

    Args:
        worker: Number of the worker.
        done: Number of portions with a result that counts.
        backup: Number of portions that another worker had, too, when this worker got them.
        dropped: Number of results that do not count, because another worker was faster.
    """

    worker: int
    done: int
    backup: int
    dropped: int


class PassEnded(Event):
    """L-BFGS has computed the loss and its gradient over all samples, at one step of a line search.

    Args:
        round: The iteration.
        number: Number of the pass in the iteration.
        step: Length of the step along the direction; 0 at the first weights.
        loss: Loss there; infinite if it or its gradient is not finite.
        seconds: Seconds that the pass took.
        portions: For each ``worker`` the numbers of its portions that count (``done``), that another worker had, too
            (``backup``), and whose results do not count (``dropped``).
    """

    round: int
    number: int
    step: float
    loss: float
    seconds: float
    portions: tuple[PortionCounts, ...]


class GradientsOverflowed(SlotEvent):
    """With ``mixed_float16``, the gradients of all steps of a slot's round overflowed, so the round taught nothing.

    Keras halves the scale of the loss with each such step. This is usual at the beginning of a run with short rounds.

    Args:
        steps: Number of skipped steps.
        scale: The scale of the loss for the next round.
    """

    steps: int
    scale: float


class UpdateRejected(SlotEvent):
    """An update was rejected.

    Args:
        why: The verdict on it.
    """

    why: str


class UpdateClipped(SlotEvent):
    """An update was scaled down.

    Args:
        factor: Its factor, below 1.
        why: The verdict on it.
    """

    factor: float
    why: str


class ResidualDropped(SlotEvent):
    """State of a slot was lost with its worker. The bits differ from here on.

    Args:
        codec: Name of the codec of updates.
        why: How it was lost.
        groups: Names of the lost state: ``residual``; ``own``, the slot's own weights, replaced by the global ones;
            ``optimizer``, its optimizer state, which restarts.
    """

    codec: str
    why: str
    groups: tuple[str, ...] = ("residual",)


class PartsChanged(Event):
    """Asynchronous slots get new numbers of samples, according to their measured speeds.

    Args:
        round: First round with these numbers.
        samples: Number of samples of each slot in a round.
    """

    round: int
    samples: tuple[int, ...]


class FilesChanged(Event):
    """Training changes to newer partition files with the same samples.

    Args:
        round: First round that reads them.
        before: Previous version of the data set.
        version: New version of the data set.
        files: Number of its partition files.
    """

    round: int
    before: int
    version: int
    files: int


class SlotsChanged(Event):
    """The number of slots has grown, because workers have joined.

    Args:
        round: First round with this number.
        slots: New number of slots.
    """

    round: int
    slots: int


class WorkerEvent(Event):
    """Base of all events about one worker of a run.

    Args:
        round: Newest round that has begun, or the round of the worker's slot.
        worker: Number of the worker.
    """

    round: int
    worker: int


class WorkerReady(WorkerEvent):
    """A worker has loaded app, data and model for the beginning of the run.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerLost(WorkerEvent):
    """A worker was lost. The run tries to reconnect it.

    Args:
        slot: Number of its slot, which moves to another worker; None without a slot.
        why: The reason.
        carries: The kind of the number: ``"slot"``, or ``"part"`` of a model.
    """

    slot: int | None = None
    why: str
    carries: str = "slot"


class WorkerLeaving(WorkerEvent):
    """A worker will end soon. It gets no new slot, and finishes the one that it has if the time is enough.

    Args:
        why: The reason, such as a signal.
        seconds: Seconds until it ends.
        slot: Number of its slot if another worker gets it, because the time is too short; else None.
        carries: The kind of the number: ``"slot"``, or ``"part"`` of a model.
    """

    why: str
    seconds: float
    slot: int | None = None
    carries: str = "slot"


class WorkerLeft(WorkerEvent):
    """A worker that announced its end has handed its work back, and may end. The run loses no work."""


class WorkerReturned(WorkerEvent):
    """A lost worker has returned, and has loaded app, data and model again.

    Args:
        name: Name of the worker.
    """

    name: str


class WorkerJoined(WorkerEvent):
    """A worker has joined during the run.

    Args:
        name: Name of the worker.
        workers: Number of workers now.
        slots: The number of slots if this number is fixed, else None.
    """

    name: str
    workers: int
    slots: int | None = None


class WorkerGone(WorkerEvent):
    """A worker has left the run for good.

    Args:
        rejected: Number of its rejected updates in a row if this is the reason, else 0.
        why: The error's text, possibly several lines, if there was an error.
    """

    rejected: int = 0
    why: str = ""


class WaitingForWorkers(Event):
    """All workers are lost.

    Args:
        round: Newest round that has begun.
        seconds: Seconds until the run ends, unless a worker returns.
    """

    round: int
    seconds: float


class CheckpointWritten(Event):
    """A checkpoint is complete and on the disk.

    Args:
        version: Number of merges in it, as in its name.
        path: Path of the checkpoint folder.
        seconds: Seconds that it took, from the first request for state on workers.
        slices: Number of slices that workers have written; 0 if the master has written the whole checkpoint.
        through: Workers that cannot see the folder, so that the master has written their slices.
    """

    version: int
    path: str
    seconds: float
    slices: int = 0
    through: tuple[int, ...] = ()


class CheckpointFailed(Event):
    """A checkpoint could not be written. Training continues.

    Args:
        round: Newest complete round when the checkpoint began.
        why: The error's text.
        newest: Number of the newest complete checkpoint; None without one.
    """

    round: int
    why: str
    newest: int | None = None


class CheckpointDamaged(Event):
    """A part of a checkpoint is damaged. The run uses another one, or continues without this part.

    Args:
        why: The damaged part, and its replacement.
    """

    why: str


Stream = Literal["stdout", "stderr"]
"""The standard streams of a program."""


class ClusterEvent(Event):
    """Base of all events about one worker of a cluster.

    Args:
        worker: Number of the worker.
        name: Name of the worker in cluster.yaml, else ``"worker 2"``.
    """

    worker: int
    name: str


class WorkerConnected(ClusterEvent):
    """The executor of a worker has answered, so the worker can be used.

    Args:
        address: Host and port of its daemon.
        host: The machine's own host name.
        python: Version of Python on the worker.
        cores: Number of cores that it may use.
        threads: Number of threads that it computes with; 0 if unknown.
        again: Whether it was connected before.
        engine: The name of what runs it in its engine, such as ``"job 12_3"`` or ``"pod app-0"``; empty without one.
        incarnation: How many workers this run has had with this number, this one included; 0 if unknown.
        gpus: Its cards, such as ``"0 (NVIDIA H100 80GB HBM3)"``; empty without a card.
    """

    address: str
    host: str
    python: str
    cores: int
    threads: int
    again: bool = False
    engine: str = ""
    incarnation: int = 0
    gpus: tuple[str, ...] = ()


class CardRead(ClusterEvent):
    """The daemon of a worker has read the state of a card by NVML. It does so about every 10 s during a run.

    Args:
        card: The card, such as ``"0 (NVIDIA H100 80GB HBM3)"``.
        memory: Used bytes of its memory, by all programs.
        total: All bytes of its memory.
        utilisation: Percent of the time in which it computes; None if it does not report this, like the next two.
        watts: Its power.
        celsius: Its temperature.
    """

    card: str
    memory: int
    total: int
    utilisation: int | None = None
    watts: float | None = None
    celsius: int | None = None


class WorkerDisconnected(ClusterEvent):
    """The connection to a worker has ended.

    Args:
        why: The reason, in the words of the engine if it knows one; empty if this side closed the connection.
        cause: The kind of the reason, such as ``"notice"``, ``"preempted"``, ``"node lost"`` or ``"crash"``; empty if
            unknown.
    """

    why: str = ""
    cause: str = ""


class WorkerNotReached(ClusterEvent):
    """Another attempt to connect to a missing worker has failed. More attempts follow.

    Args:
        tries: Number of failed attempts in a row.
        why: The reason of the last failure.
    """

    tries: int
    why: str


class ExecutorEnded(ClusterEvent):
    """A worker's executor has ended and lost its state. The daemon starts another one.

    Args:
        why: The signal or exit code, with the last lines of its log.
    """

    why: str


class WorkerWrote(ClusterEvent):
    """User code on a worker has written lines to a standard stream of Python, for example with ``print`` or
    ``logging``.

    A worker drops lines above a certain rate and counts them. All lines of these events and all dropped lines together
    are the lines that the worker has written while this master had it.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.
        lines: The lines, without line ends; a very long line is cut, and its end says so. Empty if only dropped lines
            are reported.
        dropped: Number of dropped lines of both streams, just before these.
    """

    stream: Stream
    lines: tuple[str, ...]
    dropped: int = 0


class WorkerLogged(ClusterEvent):
    """Native code on a worker, such as TensorFlow, another program, or its daemon has written lines. The run's folder
    keeps them, and no display shows them.

    Args:
        lines: The lines, without line ends.
        left_out: Number of bytes just before these lines that came too fast and were left out.
    """

    lines: tuple[str, ...]
    left_out: int = 0


HowMapped = Literal["complete", "cancelled", "failed"]
"""The ways in which a map can end."""


class MapEvent(Event):
    """Base of all events about a map.

    Args:
        map: Number of the map, unique in this process.
        function: Name of the function.
    """

    map: int
    function: str


class MapBegan(MapEvent):
    """A map has begun to take items.

    Args:
        items: Number of items; None if unknown.
        workers: Number of workers that may compute items.
        per_worker: Number of items that may run on one worker at the same time.
    """

    items: int | None
    workers: int
    per_worker: int


class MapMoved(MapEvent):
    """Items are done. This event comes at most a few times a second.

    Args:
        done: Number of items with a result so far.
        failed: Number of items with an error so far.
    """

    done: int
    failed: int


class MapEnded(MapEvent):
    """A map is over.

    Args:
        how: ``"complete"``, ``"cancelled"`` (the caller stopped taking results) or ``"failed"``.
        done: Number of items with a result.
        failed: Number of items with an error.
        seconds: Seconds since it began.
        compute_s: Sum of the seconds that workers spent on items.
        why: The error's text if it has failed.
    """

    how: HowMapped
    done: int
    failed: int
    seconds: float
    compute_s: float
    why: str = ""


class PeerEvent(Event):
    """Base of all events about one peer with private data.

    Args:
        peer: Its number, from 1.
        name: Name that it gave itself, else ``"peer 3"``.
    """

    peer: int
    name: str


class PeerArrived(PeerEvent):
    """A peer has connected, for the first time or again.

    Args:
        samples: Number of its private samples, by its own account.
    """

    samples: int


class PeerPosted(PeerEvent):
    """A peer has sent sets of weights since the last such event.

    Args:
        posts: Number of its posts so far.
        new: Number of posts since the last event.
        batches: Batches that it has trained since then.
        samples: Samples in these batches.
        seconds: Seconds since then.
        accuracy: Accuracy of its training at the last post; NaN if its model reports none.
        loss: Loss of its training at the last post; NaN without one.
        bytes_back: Bytes of these sets.
    """

    posts: int
    new: int
    batches: int
    samples: int
    seconds: float
    accuracy: float
    loss: float
    bytes_back: int


class PeerLeft(PeerEvent):
    """A peer has gone.

    Args:
        why: The reason.
        removed: Whether it was removed, and cannot come back.
    """

    why: str
    removed: bool = False


class SetValidated(Event):
    """A set of weights was tested, by the server or by a peer on its own data.

    Args:
        set: Number of the set.
        peer: Number of the peer; 0 for the server.
        accuracy: Share of correct answers; NaN if the model reports none.
        loss: Mean loss.
        samples: Number of samples of the test.
    """

    set: int
    peer: int
    accuracy: float
    loss: float
    samples: int


BASES = (Event, ClusterEvent, MapEvent, PeerEvent, PhaseEvent, SlotEvent, WorkerEvent)
KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in BASES
}
"""All events by name, in the order in which they are described."""
