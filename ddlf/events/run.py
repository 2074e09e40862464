"""Events about a run as a whole: its beginning, its data and model, its results."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ddlf.events.event import Event
from ddlf.events.record import RoundRecord

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
    """

    name: str
    parameters: int
    keras: str
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float
    bfloat16_gain: float = 0.0


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
        about: Its subject: ``"data"``, ``"model"``, ``"callback"``, ``"network"``, or a setting.
        why: A description of the mistake.
    """

    about: str
    why: str


class Decided(Event):
    """A rule has decided a value that the model text leaves open.

    Args:
        key: Block and key, as you would write them.
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
        severity: ``"E"``: the model cannot learn; ``"W"``: it costs accuracy or time.
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


IN_ROUNDS = frozenset(("sync",))
"""The strategies of 0.1 whose slots end a round together."""


def ends_rounds_together(event: RunBegan | TrainingBegan) -> bool:
    """Return whether all slots of the run end a round together, also for events of 0.1, which name the mode only."""
    return event.mode in IN_ROUNDS if event.in_rounds is None else event.in_rounds


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
        exchange: ``"star"`` or ``"sharded"``.
        why: The reason.
    """

    exchange: str
    why: str


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
        why: The error's text if it has failed.
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
    """A callback, ``is_convergent`` or the setting ``converge`` has ended training before all epochs were done.

    Args:
        version: Number of merges in the weights.
        epochs: Number of requested local epochs.
    """

    version: int
    epochs: int


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
