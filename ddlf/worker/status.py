"""The state of a worker, as its daemon and its executor report it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlf.worker.activity import HeldPart, Shard
from ddlf.worker.card_watch import Reading
from ddlf.worker.events import ExecutorExited


@dataclass(frozen=True, slots=True)
class Busy:
    """The request that the executor runs.

    Args:
        id: Number of the request.
        method: Name of the method.
        seconds: Seconds since it has begun.
    """

    id: int
    method: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory. Unknown values are None.

    Args:
        used: Used by the processes of the worker.
        total: All memory of the machine.
        free: The memory that programs can still get.
    """

    used: int | None
    total: int | None
    free: int | None


@dataclass(frozen=True, slots=True)
class DataSets:
    """The data sets that a worker has in memory.

    Args:
        count: Their number.
        bytes: Their bytes.
    """

    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """The lease of a worker.

    Args:
        holder: Name of the master that has it, for people.
        since: Time of day.
        epoch: Epoch of the lease.
        state: Whether the master is ``"alive"``, ``"suspect"`` or ``"dead"``.
        silent_s: Seconds since its last sign of life.
    """

    holder: str
    since: str
    epoch: int
    state: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The state of a worker.

    Args:
        host: Name of its machine.
        pid: Process id of its daemon.
        executor_pid: Process id of its executor; None without one.
        executor: State of the executor: ``"starting"``, ``"ready"`` or ``"failed"``.
        restarts: Number of executors after the first.
        last_exit: How the last executor ended; None before.
        busy: The request that the executor runs; None if it runs none.
        uptime_s: Seconds since the daemon has begun.
        cores: Cores that the worker may use.
        gpus: Its cards, such as ``"0 (NVIDIA H100)"``.
        gpu_uuids: Their unique names.
        cards: The newest reading of each card.
        memory: Memory of its processes and of its machine.
        masters: Number of masters that are connected.
        datasets: Its data sets in memory.
        shard: The part of a run's weights that it keeps as a server; None without one.
        part: The part of a model that it trains; None without one.
        methods: Names of the methods that it hosts.
        lease: Its lease; None if no master has it.
        python: Version of Python.
        tls: Whether other machines can connect with TLS.
        insecure_plaintext: Whether other machines can connect without TLS.
    """

    host: str
    pid: int
    executor_pid: int | None
    executor: str
    restarts: int
    last_exit: ExecutorExited | None
    busy: Busy | None
    uptime_s: float
    cores: int
    gpus: list[str]
    gpu_uuids: list[str]
    cards: list[Reading]
    memory: Footprint
    masters: int
    datasets: DataSets
    shard: Shard | None
    part: HeldPart | None
    methods: list[str]
    lease: LeaseStatus | None
    python: str
    tls: bool
    insecure_plaintext: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """An executor, as it describes itself at the beginning of each session. Without arguments, an unknown one.

    Args:
        name: Random name, which a new executor does not share.
        pid: Its process id.
        host: Name of its machine; empty if the executor is unknown.
        python: Version of Python.
        numpy: Version of NumPy.
        cores: Cores of this worker, which its environment may limit.
        has_own_cores: Whether an engine has given these cores to this worker only.
        threads: Threads for computation.
        deterministic: Whether it computes equal bits in each run.
        gpus: Its cards, such as ``"0 (NVIDIA H100)"``.
        gpu_uuids: Their unique names.
    """

    name: str = ""
    pid: int = 0
    host: str = ""
    python: str = ""
    numpy: str = ""
    cores: int = 0
    has_own_cores: bool = False
    threads: int = 0
    deterministic: bool = False
    gpus: list[str] = field(default_factory=list)
    gpu_uuids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """The answer to a request to import modules before executors start.

    Args:
        reason: Why executors start without the modules; empty if they start with them.
        replaceable: Whether a replacement of the present executor has or would have an effect.
    """

    reason: str
    replaceable: bool
