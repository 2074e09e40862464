"""Events: facts about a run or a cluster, as values. Displays, run folders and your own sinks subscribe to them.

Rounds, slots and workers count from 1. ``ddlf/monitor/terminal`` turns events into sentences. Events themselves contain
no sentences, except reasons (``why``), which are texts of errors.
"""

from ddlf.events import checkpoints, cluster, maps, phases, run, slots, workers
from ddlf.events.checkpoints import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointWritten,
)
from ddlf.events.cluster import (
    ClusterEvent,
    ExecutorEnded,
    Stream,
    WorkerConnected,
    WorkerDisconnected,
    WorkerNotReached,
    WorkerWrote,
)
from ddlf.events.event import (
    Event,
)
from ddlf.events.maps import (
    HowMapped,
    MapBegan,
    MapEnded,
    MapEvent,
    MapMoved,
)
from ddlf.events.phases import (
    PhaseBegan,
    PhaseEnded,
    PhaseEvent,
    PhaseMoved,
    What,
)
from ddlf.events.run import (
    Advised,
    Committed,
    Converged,
    DataLoaded,
    DataPartitioned,
    Decided,
    Evaluated,
    ExchangeChosen,
    How,
    ModelBuilt,
    ModelSaved,
    NothingToTrain,
    RunBegan,
    RunEnded,
    TrainingBegan,
    Warned,
)
from ddlf.events.slots import (
    FilesChanged,
    PartsChanged,
    ResidualDropped,
    SlotBackedUp,
    SlotEvent,
    SlotFinished,
    SlotMoved,
    SlotsChanged,
    SlotStarted,
    UpdateArrived,
    UpdateClipped,
    UpdateRejected,
)
from ddlf.events.workers import (
    WaitingForWorkers,
    WorkerEvent,
    WorkerGone,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerReturned,
)

__all__ = [
    "KINDS",
    "Advised",
    "CheckpointDamaged",
    "CheckpointFailed",
    "CheckpointWritten",
    "ClusterEvent",
    "Committed",
    "Converged",
    "DataLoaded",
    "DataPartitioned",
    "Decided",
    "Evaluated",
    "Event",
    "ExchangeChosen",
    "ExecutorEnded",
    "FilesChanged",
    "How",
    "HowMapped",
    "MapBegan",
    "MapEnded",
    "MapEvent",
    "MapMoved",
    "ModelBuilt",
    "ModelSaved",
    "NothingToTrain",
    "PartsChanged",
    "PhaseBegan",
    "PhaseEnded",
    "PhaseEvent",
    "PhaseMoved",
    "ResidualDropped",
    "RunBegan",
    "RunEnded",
    "SlotBackedUp",
    "SlotEvent",
    "SlotFinished",
    "SlotMoved",
    "SlotStarted",
    "SlotsChanged",
    "Stream",
    "TrainingBegan",
    "UpdateArrived",
    "UpdateClipped",
    "UpdateRejected",
    "WaitingForWorkers",
    "Warned",
    "What",
    "WorkerConnected",
    "WorkerDisconnected",
    "WorkerEvent",
    "WorkerGone",
    "WorkerJoined",
    "WorkerLost",
    "WorkerNotReached",
    "WorkerReady",
    "WorkerReturned",
    "WorkerWrote",
]

BASES = (ClusterEvent, MapEvent, PhaseEvent, SlotEvent, WorkerEvent)
KINDS: dict[str, type[Event]] = {
    name: kind
    for module in (run, phases, slots, workers, checkpoints, cluster, maps)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, *BASES)
}
"""All events by name, in the order in which they are described."""
