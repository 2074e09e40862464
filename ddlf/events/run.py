"""A run as a whole: how it begins, what it trains, what it comes to."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ddlf.events.event import Event
from ddlf.events.record import RoundRecord

How = Literal["complete", "converged", "stopped", "cancelled", "failed"]
"""How a run can end."""


class RunBegan(Event):
    """Training was asked for, and its settings can be used; nothing has been connected for it yet.

    Args:
        run: Names the run: a text that is another one for each.
        app: Name of the app's class.
        mode: ``"sync"`` or ``"async"``.
        epochs: Local epochs to train.
        worker_epochs: Local epochs in a round.
        batch_size: Samples in a batch of each worker.
        seed: Seed of everything random.
        worker_steps: Batches of each slot in a round, if rounds are parts of epochs.
        round_samples: The most samples of all slots in a round, if that cuts epochs into rounds.
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


class ModelBuilt(Event):
    """Every worker of the beginning that was not lost has built the model, and it is the same everywhere.

    Args:
        name: Name of the model.
        parameters: How many numbers its weights have.
        keras: Version of Keras on the workers.
        backends: Backends of Keras on the workers, each once.
        threads: Numbers of threads of the workers, each once.
        seconds: Seconds from the beginning of the connecting until model and data were ready.
        bfloat16_gain: How many times as fast matrix products are in bfloat16 on the first worker's machine; 0 where it was not measured.
    """

    name: str
    parameters: int
    keras: str
    backends: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float
    bfloat16_gain: float = 0.0


class DataLoaded(Event):
    """Every worker of the beginning that was not lost has the training data, and it is the same everywhere.

    Args:
        samples: Samples of training data.
        shape: Shape of one sample.
        content: Fingerprint of the training data.
        workers: How many workers have it.
        loaded: How many of them had to load it.
        seconds: Seconds that the slowest of them took to load it.
    """

    samples: int
    shape: tuple[int, ...]
    content: str
    workers: int
    loaded: int
    seconds: float


class Warned(Event):
    """Something of the app was found that is likely to be a mistake.

    Args:
        about: What it is of: ``"data"``, ``"model"``, ``"callback"``, ``"network"``, or a setting.
        why: What was found.
    """

    about: str
    why: str


class Decided(Event):
    """Something that the text of a model does not say was decided by a rule.

    Args:
        key: What it is of: block and key, as they would be written.
        value: As it would be written.
        rule: Name of the rule.
        why: Its reason.
    """

    key: str
    value: str
    rule: str
    why: str


class Advised(Event):
    """The adviser has found something in the app; of what it finds in a run by itself the first three are told.

    Args:
        rule: Id of the rule, as ``"L02"``.
        severity: ``"E"``: nothing can be learnt; ``"W"``: it costs accuracy or time.
        what: What was found.
        fix: What to do.
        place: File and line of the user's, with a colon between them; "" if that is not known.
        more: How many more there are, which are not told.
    """

    rule: str
    severity: str
    what: str
    fix: str
    place: str = ""
    more: int = 0


class TrainingBegan(Event):
    """The nodes are ready, and what the run goes on from is known.

    Args:
        mode: ``"sync"`` or ``"async"``.
        samples: Samples of training data.
        slots: Number of slots.
        fixed: Whether it stays this number whoever comes.
        workers: Workers of the cluster.
        version: Merges that the run goes on from; 0 for a new one.
        source: Path of the checkpoints that it goes on from; None for what the app was trained to before.
        rounds: Rounds of the whole training; 0 in events of 0.1.
        reached: Of these those that the foremost slot has done; 0 in events of 0.1.
        facts: All that decides about the bits of the run, by name, each as JSON.
        shard_workers: How many of the workers have the shards and train no slot.
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


class DataPartitioned(Event):
    """Slots differ in what samples they have: each keeps its own for the whole run.

    Args:
        partition: The rule, as it was given.
        samples: Samples of each slot.
        labels: How many samples each slot has of each label, if the rule goes by labels; else empty.
    """

    partition: str
    samples: tuple[int, ...]
    labels: tuple[dict[str, int], ...] = ()


class ExchangeChosen(Event):
    """``exchange="auto"`` has become one of those there are.

    Args:
        exchange: ``"star"`` or ``"sharded"``.
        why: Why.
    """

    exchange: str
    why: str


class NothingToTrain(Event):
    """A run that is gone on from has nothing left to train.

    Args:
        round: Rounds that were trained.
        epochs: Local epochs that were asked for.
        converged: Whether it had converged, rather than done them all.
    """

    round: int
    epochs: int
    converged: bool


class Committed(Event):
    """Updates were merged: the global weights are others.

    It comes when the record is complete, after the test of these weights if they are tested, and just before ``IApp.on_round``.

    Args:
        record: What the round, or in asynchronous training the update, was like.
    """

    record: RoundRecord


class RunEnded(Event):
    """Training has ended, and what there was to keep is kept.

    Args:
        run: Names the run, as in ``RunBegan``.
        how: ``"complete"``, ``"converged"``, ``"stopped"`` (by ``stop_training``), ``"cancelled"`` or ``"failed"``.
        version: Merges that the run has come to, those that it went on from included; 0 if it has ended before training began.
        why: The error's text if it has failed.
        staleness: How many updates of asynchronous training had a staleness of 0, of 1 and so on.
        weights: Digest of the weights that asynchronous training has come to; "" in other runs, and before training began.
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
        version: Merges that the run has come to.
        epochs: Local epochs that were asked for.
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
