"""Events as lines of text, and the display that prints them: few enough to read, but enough to show that the run
continues."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from ddlf import events as e
from ddlf.events import ends_rounds_together
from ddlf.events.record import RoundRecord, TrainingEvent, print_at_once
from ddlf.monitor.terminal.display import Display
from ddlf.monitor.terminal.phrases import waiting

KINDS: dict[type[e.Event], Any] = {
    e.SlotStarted: "start",
    e.SlotFinished: "finish",
    e.SlotBackedUp: "backup",
    e.SlotMissed: "missed",
    e.SlotsChanged: "slots",
    e.WorkerLost: "lost",
    e.WorkerLeaving: "leaving",
    e.WorkerLeft: "left",
    e.WorkerReturned: "back",
    e.WorkerJoined: "joined",
    e.WorkerGone: "gone",
    e.WaitingForWorkers: "waiting",
    e.UpdateRejected: "rejected",
    e.UpdateClipped: "clipped",
    e.GradientsOverflowed: "overflow",
    e.ResidualDropped: "dropped",
    e.CheckpointFailed: "checkpoint",
}
"""``TrainingEvent.kind`` of each event that ``IApp.on_event`` gets."""
PARTS, LABELS = 10, 10
"""Maximum number of slots that are printed for a partition, and of labels per slot, the most frequent ones."""
MOST_SHOWN = 6
"""Maximum number of staleness values in a line; the report has all."""
MOST_OF_A_VALUE = 60
"""Maximum length of a decided value in a line. The model text in the run's folder has the whole value."""
GAIN_WORTH_SAYING = 1.3
EXACT_GAIN = 3.0
"""Larger gains are printed without decimals, because they vary between runs."""
"""Minimum speed-up of matrix products by bfloat16 for a printed line. The rest of a training step gets no faster."""


def training_event(event: e.Event) -> TrainingEvent | None:
    """Convert an event to the ``TrainingEvent`` that ``IApp.on_event`` receives; None for events that it does not
    receive.
    """
    kind = KINDS.get(type(event))
    if kind is None:
        return None
    facts = {name: getattr(event, name, None) for name in ("slot", "worker")}
    return TrainingEvent(kind=kind, round=vars(event)["round"], text=_sentence(event), **facts)


def line(event: e.Event) -> str:
    """Return the text that is printed for an event, without the last line break; "" for ordinary events.

    Text from an error may have several lines; those after the first are not indented.
    """
    if kind := KINDS.get(type(event)):
        sentence = "" if kind in ("start", "finish") else _sentence(event)
        return sentence and f"{kind:<9} {sentence}"
    return str(event.record) if isinstance(event, e.Committed) else _line(event)


def line_without_hook(event: e.Event) -> str:
    """Return the text that is printed for an event, like ``line``, but "" for events that ``IApp.on_event`` or
    ``IApp.on_round`` prints itself.
    """
    return "" if type(event) in KINDS or isinstance(event, e.Committed) else _line(event)


def _sentence(event: e.Event) -> str:
    match event:
        case e.SlotBackedUp():
            return f"slot {event.slot} is late; worker {event.worker} computes it as well"
        case e.SlotMissed(why=""):
            return ""  # the line of the round names the slot
        case e.SlotMissed():
            return f"without slot {event.slot} and its {event.samples:,} samples: {event.why}"
        case e.SlotsChanged():
            return f"{event.slots} from round {event.round} on: one per worker"
        case e.WorkerLost(slot=None):
            return f"{event.why}; it rejoins when it is back"
        case e.WorkerLost(carries="own slot"):
            return f"{event.why}; slot {event.slot} waits for it, because nobody else has its data"
        case e.WorkerLost():
            return f"{event.why}; {event.carries} {event.slot} moves to another worker, or back to this one when it returns"
        case e.WorkerLeaving(slot=None):
            return (
                f"worker {event.worker} ends within {event.seconds:.0f} s ({event.why}); it gets no new {event.carries}"
            )
        case e.WorkerLeaving(carries="own slot"):
            ends = f"worker {event.worker} ends within {event.seconds:.0f} s ({event.why})"
            return f"{ends}; it may finish slot {event.slot}, which nobody else can train"
        case e.WorkerLeaving():
            return f"worker {event.worker} ends within {event.seconds:.0f} s ({event.why}); {event.carries} {event.slot} moves to another worker"
        case e.WorkerLeft():
            return f"worker {event.worker} has handed its work back; it rejoins when it is back"
        case e.WorkerReturned():
            return f"{event.name} has rejoined"
        case e.WorkerJoined():
            reserve = event.workers - (event.slots or event.workers)
            slots_text = f": {event.slots} slots on {event.workers} workers, {reserve} spare" if reserve > 0 else ""
            return f"{event.name} has joined{slots_text}"
        case e.WorkerGone(rejected=0):
            first, _, details = event.why.partition("\n")
            return f"{first}; it is excluded from this run\n{details}".rstrip()
        case e.WorkerGone():
            return f"worker {event.worker} is excluded: {event.rejected} of its updates in a row were rejected"
        case e.WaitingForWorkers():
            return f"no workers left; waiting {event.seconds:g} s for one to return"
        case e.UpdateRejected() | e.UpdateClipped():
            return f"worker {event.worker}, {event.why}"
        case e.GradientsOverflowed():
            return (
                f"slot {event.slot} on worker {event.worker} has learned nothing: float16 overflowed in all {event.steps} "
                f"steps of its round; the loss is now scaled by {event.scale:g}"
            )
        case e.ResidualDropped():
            nouns = {
                "residual": f"the residual of {event.codec} in slot {event.slot}",
                "own": f"the local weights of slot {event.slot}",
                "optimizer": f"the optimizer state of slot {event.slot}",
            }
            return (
                f"lost with worker {event.worker} ({event.why}): "
                f"{' and '.join(nouns.get(group, group) for group in event.groups)}; "
                "the results now differ in their bits from those of a run without this loss"
            )
        case e.CheckpointFailed(newest=None):
            return f"{event.why}; training continues, but there is no checkpoint yet"
        case e.CheckpointFailed():
            return f"{event.why}; training continues, and the previous checkpoint, of round {event.newest}, is intact"
    return ""


def _line(event: e.Event) -> str:
    match event:
        case e.ModelBuilt():
            text = (
                f"model     {event.name}: {event.parameters:,} parameters, Keras {event.keras} on {' and '.join(event.backends)}, "
                f"threads per worker {'-'.join(map(str, event.threads))}, ready in {event.seconds:.1f} s"
            )
            if event.bfloat16_gain > GAIN_WORTH_SAYING:
                gain = event.bfloat16_gain
                text += (
                    f"\nprecision float32; large matrix products are about {gain:.{0 if gain > EXACT_GAIN else 1}f}x as fast in "
                    "bfloat16 here: try mixed_bfloat16"
                )
            if event.batch_parts > 1:
                text += f"\ncards     {event.batch_parts} cards of a worker share each batch"
            if event.tf32:
                text += f"\nprecision {event.tf32} of float32 use TF32 on cards, with 10 of 23 bits: --tf32 off computes with all"
            return text
        case e.DataLoaded():
            loading = (
                f"loaded on {event.loaded} worker{'s' * (event.loaded != 1)} in {event.seconds:.1f} s"
                if event.loaded
                else f"already on {f'all {event.workers} workers' if event.workers > 1 else 'the worker'}, not loaded again"
            )
            content = f"content {event.content}" if event.content else "private: each worker has its own"
            return f"data      {event.samples:,} samples of shape {event.shape}, {content}: {loading}"
        case e.Warned():
            return f"{event.about:<9} WARNING {event.why}"
        case e.PeersTold():
            return f"{event.what:<9} {event.why}"
        case e.Decided():
            value = event.value if len(event.value) <= MOST_OF_A_VALUE else f"{event.value[:MOST_OF_A_VALUE]}..."
            return f"decided   {event.key} {value}: {event.why} ({event.rule})"
        case e.Advised():
            further = f"; {event.more} more: ddlf advise" if event.more else ""
            return (
                f"advice    {event.rule} {event.what} ({event.place or f'ddlf advise --explain {event.rule}'}){further}"
            )
        case e.TrainingBegan():
            return "\n".join(filter(None, (_resumed(event), _slots(event))))
        case e.DataPartitioned():
            return "\n".join(f"{'' if number else 'parts':<9} {text}" for number, text in enumerate(_parts(event)))
        case e.FilesChanged():
            return f"files     {event.files:,} of version {event.version} from round {event.round} on, with the same samples"
        case e.ExchangeChosen():
            return f"exchange  {event.exchange}: {event.why}"
        case e.RoundsMeasured():
            return f"rounds    {compared(event)}"
        case e.NothingToTrain(converged=True):
            return f"nothing   to train: it converged after round {event.round}; to continue, set more than {event.epochs} epochs"
        case e.NothingToTrain():
            return f"nothing   to train: all {event.epochs} epochs are done; to continue, set more epochs"
        case e.Converged():
            if event.why:
                merges = f"{event.version} {event.unit if event.version != 1 else event.unit.removesuffix('s')}"
                return f"ended     after {merges}, before all {event.epochs} epochs: {event.why}"
            reason = "is_convergent, converge or a callback stopped it"
            return f"converged after {event.version} merges, before the end of {event.epochs} epochs: {reason}"
        case e.RunEnded() if len(event.staleness) > 1:
            few, many = event.staleness[:MOST_SHOWN], sum(event.staleness[MOST_SHOWN:])
            counts = [f"{tau} in {count}" for tau, count in enumerate(few) if count] + [f"more in {many}"] * bool(many)
            return f"staleness {', '.join(counts)} of {sum(event.staleness)} updates"
        case e.Evaluated():
            return "test      " + "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
        case e.ModelSaved():
            return f"saved     {event.path}"
        case e.CheckpointDamaged():
            return event.why
        case e.PeerArrived():
            return f"here      {event.name} with {event.samples:,} samples"
        case e.PeerLeft():
            return f"left      {event.name}: {event.why}"
    return ""


def compared(event: e.RoundsMeasured) -> str:
    """Return measured rounds beside their prediction, for people."""
    predicted = f"predicted {event.predicted:.3g} s ({event.low:.3g}-{event.high:.3g})"
    if not event.rounds:
        return f"{predicted}; the run was too short to measure one"
    judgement = "; faster" * (event.seconds < event.low) + "; the reason: ddlf plan --check last" * (
        event.seconds > event.high
    )
    return f"{event.seconds:.3g} s each, {predicted}{judgement}"


def _parts(event: e.DataPartitioned) -> list[str]:
    texts = [f"slot {number}: {count:,} samples" for number, count in enumerate(event.samples, 1)]
    for slot, labels in enumerate(event.labels[: len(texts)]):
        in_order = sorted(labels, key=lambda label: (len(label), label))  # numbers, as texts
        most = sorted(in_order, key=lambda label: -labels[label])[:LABELS]
        shown = " ".join(f"{label}:{labels[label]}" for label in in_order if label in most)
        further = f" and {len(labels) - LABELS} more labels" if len(labels) > LABELS else ""
        texts[slot] += f", {shown}{further}"
    if len(texts) > PARTS:
        remaining = event.samples[PARTS - 1 :]
        texts[PARTS - 1 :] = [f"{len(remaining)} more slots: {min(remaining):,} to {max(remaining):,} samples"]
    return texts


def _resumed(event: e.TrainingBegan) -> str:
    if not event.version:
        return ""
    where = f", from {event.source}" if event.source else ", where the last training of this app ended"
    in_rounds = ends_rounds_together(event)
    # the previous training was asynchronous, with updates of single slots
    if in_rounds and event.reached not in (0, event.version):
        return f"resumed   after update {event.version}, with round {event.reached + 1}{where}"
    return f"resumed   after {'round' if in_rounds else 'update'} {event.version}{where}"


def _slots(event: e.TrainingBegan) -> str:
    extra_workers = event.shard_workers
    idle = event.workers - extra_workers - event.slots
    if not event.fixed or not (idle or extra_workers):
        return ""
    if event.facts.get("private") == "true":  # a slot trains on its own worker only: other lines name who is away
        return ""
    clauses = [
        f"slots     {event.slots} on {event.workers - extra_workers} {'worker' if event.workers - extra_workers == 1 else 'workers'}"
    ]
    clauses += [f"{idle} spare" if idle > 0 else "which take turns"] * bool(idle)
    clauses += [f"{extra_workers} more {'holds' if extra_workers == 1 else 'hold'} the weights"] * bool(extra_workers)
    return ", ".join(clauses)


APART_S = 2.0
"""Minimum seconds between two lines about a worker, or about all together."""
QUIET_S = 5.0
"""Seconds without a line until a line names the slow work. The next such line comes after twice this time, and so
on."""
LONGEST_QUIET_S = 60.0
LOOK_S = 0.5


class Lines(Display):
    """A display that shows a run as lines of text. Methods of the app, such as ``on_round``, print most lines. This
    display selects the records to print, and adds lines about long waits.
    """

    prints = True

    def __init__(self) -> None:
        super().__init__()
        # the time of the last line about each slot, or about all slots under None
        self._printed_at: dict[int | None, float] = {}
        self._pending: RoundRecord | None = None
        self._last_line_at = time.monotonic()
        self._quiet_s = QUIET_S
        self._done = threading.Event()
        # Use a thread, because slow work often blocks the event loop.
        self._thread = threading.Thread(target=self._watch, name="ddlf lines", daemon=True)
        self._thread.start()

    def tell(self, event: e.Event) -> None:
        """Print a line for an event, if it deserves one. At the end of a run, print the last record first if it had no
        line yet.
        """
        super().tell(event)
        if isinstance(event, e.RunEnded | e.Converged | e.RoundsMeasured) and self._pending is not None:
            print_at_once(str(self._pending))
            self._pending = None
        if isinstance(event, e.RunBegan) or (line(event) and not isinstance(event, e.Committed)):
            self._note_line()

    def is_due(self, record: RoundRecord) -> bool:
        """Return whether to print a line for the record of a round now. The first record gets one, and the last one at
        the end of the run.
        """
        now = time.monotonic()
        if now - self._printed_at.get(record.slot, -APART_S) < APART_S:
            self._pending = record
            return False
        self._printed_at[record.slot], self._pending = now, None
        self._note_line()
        return True

    def close(self) -> None:
        """Print nothing more. Safe to call again."""
        self._done.set()
        self._thread.join()

    def _note_line(self) -> None:
        self._last_line_at, self._quiet_s = time.monotonic(), QUIET_S

    def _watch(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the training itself fails when it prints
            while not self._done.wait(LOOK_S):
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Print the current wait or progress, if no line was printed for ``QUIET_S``."""
        if now - self._last_line_at >= self._quiet_s and (text := waiting(self.state, now)):
            print_at_once(f"{'training' if self.state.is_training else 'waiting':<9} {text}")
            self._last_line_at, self._quiet_s = now, min(2 * self._quiet_s, LONGEST_QUIET_S)
