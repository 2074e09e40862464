"""All settings of a run, as one value: ``RunSpec``. Runs everywhere; imports no heavy modules.

A run has a strategy, data, an exchange, and groups for local training, evaluation, checkpoints and output. Each is a
frozen dataclass whose fields are settings. Each setting is declared once, in this file. The text below a setting
appears only in the reference.

An app can name groups: ``mode = ddlf.Downpour(replicas=16, fetch=2)``. Or it can name each setting, like options,
``run:`` and ``-p`` do: ``mode = "downpour"; replicas = 16; n_fetch = 2``. ``spec_of`` makes a ``RunSpec`` from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.settings.checks import (
    ARRIVAL,
    CALLBACKS,
    CLASS_WEIGHTS,
    CLIP,
    CODEC,
    CONVERGE,
    FOLDER,
    LOCAL_RULE,
    MERGE,
    MULTIPLIERS,
    NAME,
    OUTER,
    OUTWARD,
    PARTITION,
    PUSHED,
    RATE_DECAY,
    SCHEDULE,
    SHUFFLE,
    STALENESS,
    SWITCH,
    TRACKERS,
    OneOf,
    Whole,
    count_of_bytes,
    page,
    seconds,
)
from ddlf.training.settings.setting import FACT, FILE, Group, Setting
from ddlf.training.strategy import ENTRY_POINTS, BaseExchange, Loop, Place, Refusal, Strategy

if TYPE_CHECKING:
    from ddlf.algorithms.arrival_rule import Arrival
    from ddlf.algorithms.clipping import Adaptive, Rolling
    from ddlf.algorithms.codec import Codec, Outward
    from ddlf.algorithms.convergence import Convergence
    from ddlf.algorithms.local_rules import LocalRule
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.multipliers import ByName, Freeze
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.algorithms.partitioners import Partition
    from ddlf.algorithms.push_rules import Pushed
    from ddlf.algorithms.rate_decay import Plateau, RateDecay
    from ddlf.algorithms.reading_order import Shuffle
    from ddlf.algorithms.schedules import Rates
    from ddlf.algorithms.staleness import Staleness
    from ddlf.training.crew import Crew
    from ddlf.training.exchange import Outwards
    from ddlf.training.exchanges.gradient.step import Step


# -- data and local training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data(Group):
    """Which samples each slot trains on, and how they are read."""

    batch_size: Setting[int, int] = Setting(32, Whole(1), "samples per batch, on each worker", "N", FILE | FACT)
    """As in the papers, two workers with a batch size of 64 each train on 128 samples per step."""

    partition: Setting[Partition, Partition | str] = Setting(
        "equal",
        PARTITION,
        "how samples are distributed among the slots: equal, dirichlet:0.1, classes:2, power:1",
        "RULE",
        FACT,
    )
    """For studies with unevenly distributed data. With ``equal`` every round uses another partition. With any other
    rule each slot keeps its samples for the whole run, the number of slots stays fixed, and the first lines of output
    show what each slot has."""

    balance: Setting[str, str] = Setting(
        "equal",
        OneOf("equal", "speed"),
        "size of each slot's part of the data: equal, or proportional to the speed of its worker (speed)",
        "",
        FACT,
    )
    """With ``speed`` the parts follow the measured speed of each worker, so that all finish together. This requires
    ``partition='equal'``, because other rules assign the samples themselves. In asynchronous training this is DyLU,
    dynamic local updates (arXiv:2401.09135), and requires ``worker_steps``: the fastest slot takes that many steps
    per round, and every other slot ``max(1, floor(worker_steps * speed / fastest speed))``, so that updates are
    hardly stale. The first two rounds are equal and measure the speed; the number of slots stays what it is at the
    start."""

    shuffle: Setting[Shuffle | None, Shuffle | str | None] = Setting(
        None, SHUFFLE, "how samples from data files are shuffled: global, window:8, none", "RULE", FILE | FACT
    )
    """Only for ``self.train_data``, where the default is ``window:8``: each epoch reads the files in another order
    and shuffles the rows of 8 open files together. Because ``ddlf data split`` shuffles all samples, this is as good
    as ``global``. ``global`` can put any sample after any other, as with arrays, but reads rows one by one from the
    disk. ``none`` reads files and rows in their stored order."""

    data_memory: Setting[int | None, str | int | None] = Setting(
        None,
        count_of_bytes,
        "memory per worker for samples from data files (default: an eighth of the machine's memory, at most 1 GiB)",
        "SIZE",
        FILE,
    )
    """Used for reading ahead, and for the window of files if it fits into half of this memory. Otherwise rows are
    read from the disk, whose cache does not count."""

    on_bad: Setting[str, str] = Setting("stop", OneOf("stop", "skip"), "what to do with a damaged data file", "", FILE)
    """``skip`` reads each file once before it uses a sample of it. The ledger records what was left out, and is
    marked as not exact."""

    class_weight: Setting[Mapping[int, float] | None, Mapping[int, float] | None] = Setting(
        None, CLASS_WEIGHTS, "weight of each class in the loss, as for fit", None, FACT
    )
    """Classes that are not listed have weight 1. ``w_train`` is the alternative."""


@dataclass(frozen=True)
class Local(Group):
    """How a slot trains in a round."""

    epochs: Setting[int, int] = Setting(
        1, Whole(1), "epochs of local training per round", "N", FILE | FACT, flat="worker_epochs"
    )
    """Workers exchange results once per round."""

    steps: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="rounds of worker_epochs"),
        "batches per slot and round, instead of worker_epochs",
        "N",
        FILE | FACT,
        flat="worker_steps",
    )
    """Results are exchanged after every N batches. An epoch is split into rounds and each round into slots, so that
    every sample is used once per epoch; the last round of an epoch is shorter. ``master_epochs`` and the epoch
    numbers in Keras callbacks still count epochs. Validation data is evaluated after each epoch."""

    round_samples: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="rounds of worker_epochs"),
        "maximum number of samples per round over all slots, instead of worker_epochs",
        "N",
        FILE | FACT,
    )
    """An epoch is split into the smallest number of rounds that respects the limit. The rounds are as equal as
    possible, with exchanges and checkpoints between them."""

    optimizer_state: Setting[str, str] = Setting(
        "kept",
        OneOf("kept", "stays", "fresh", "averaged"),
        "what happens to a slot's optimizer state between rounds: kept, kept on its worker (stays), reset (fresh), averaged",
        "",
        FILE | FACT,
    )
    """``kept`` sends the state back with each update (nothing for SGD, the size of the weights with momentum, twice
    that for Adam), and on to another worker if the slot moves. ``stays`` fetches it only when the slot moves, for
    checkpoints, and at the end, so that an exchange is as small as with SGD. If the worker is lost and the previous
    round has no checkpoint, that optimizer starts from scratch, and an event says so. ``averaged``, for synchronous
    training, starts all slots of a round with the mean of the states that the previous round ended with, weighted by
    samples. Integers, such as the step count, take the maximum. The state then also goes out with each task."""

    rule: Setting[LocalRule, LocalRule | str] = Setting(
        "plain",
        LOCAL_RULE,
        "correction added to local gradients: plain, fedprox:0.01, scaffold",
        "RULE",
        FILE | FACT,
        flat="local_rule",
    )
    """Keeps slots from drifting apart in long rounds or with uneven data. It changes the gradients that
    ``model.optimizer`` receives."""

    precision: Setting[str, str] = Setting(
        "auto",
        OneOf("auto", "float32", "mixed_bfloat16", "mixed_float16"),
        "number format of the computation; auto uses float32 and says when bfloat16 would be faster",
        "",
        FACT,
    )

    rate_decay: Setting[RateDecay | Plateau, RateDecay | Plateau | str] = Setting(
        "never", RATE_DECAY, "how the learning rate decays with the epochs: never, plateau:0.5,5, webnn", "RULE", FACT
    )
    """Decided on the master once per epoch, for all slots. ``plateau`` watches the validation loss, or the training
    loss without ``x_val``. ``webnn`` needs ``x_val`` and an accuracy metric."""

    schedule: Setting[Rates | None, Rates | str | None] = Setting(
        None, SCHEDULE, "learning rate schedule over the run: warmup:0.05,cosine; linear, hold, restarts", "RULE", FACT
    )
    """Values are relative to the learning rate of the compiled model, and positions are fractions of the run. So
    every slot reaches the end of the schedule at the end of the run, for any number of slots, mode and round
    length."""

    clip: Setting[Rolling | Adaptive | None, Rolling | Adaptive | str | None] = Setting(
        None, CLIP, "gradient clipping: rolling, agc:0.01", "RULE", FACT
    )
    """``rolling`` uses the gradient norms of previous batches. ``agc`` uses the norm of each unit's weights, except
    in the last layer. Clipping wraps the optimizer."""

    multipliers: Setting[Freeze | ByName | None, Freeze | ByName | str | None] = Setting(
        None, MULTIPLIERS, "learning rate multipliers by layer: freeze:0.75, or body=0.1,head=2", "RULE", FACT
    )
    """Layers or weights are selected by name or by depth. ``freeze`` takes the fractions of the layers to freeze, one
    for each of equal parts of the run."""


# -- exchanges --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange(BaseExchange):
    """Settings that every exchange has. ``Star``, ``Sharded``, ``Auto`` and ``Gradient`` are the exchanges."""

    codec: Setting[Codec, Codec | str] = Setting(
        "float32",
        CODEC,
        "compression of updates: float32, float16, bfloat16, int8, int8-block, int4-block, topk:0.01, powersgd:2",
        "NAME",
        FACT,
    )

    weights_codec: Setting[Outward, Outward | Codec | str] = Setting(
        "float32",
        OUTWARD,
        "compression of weights sent to the workers: float32, float16, bfloat16, delta:CODEC",
        "NAME",
        FACT,
    )
    """Any codec can follow ``delta:``, which sends the difference from the weights that the worker already holds."""

    update_policy: Setting[str, str] = Setting(
        "stop", OneOf("stop", "reject", "clip"), "what to do with a suspicious update", "", FACT
    )
    """``stop`` ends training on NaN, infinity or a wrong shape, and names the worker, the tensor and the count.
    ``reject`` also compares the length and direction of each update with the others, has a suspicious one recomputed
    on another worker, and drops it if that does not help. ``clip`` scales down updates that are too long."""

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the exchange of this run, and why it was chosen; "" if there was no choice."""
        return self, ""

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the loop of synchronous training for this exchange."""
        from ddlf.training.strategies.sync.master import Synchronous

        return Synchronous(merge=merge, outer=outer, balance=balance)

    def weights(self, place: Place) -> Outwards:
        """Return the source of the weights: the master."""
        from ddlf.training.exchange import WeightsOut

        return WeightsOut(str(self.weights_codec), place.lossless, fragments=place.fragments)


@dataclass(frozen=True)
class Star(Exchange):
    """Updates of local training go to the master, and weights come from it."""

    name: ClassVar[str] = "star"


@dataclass(frozen=True)
class Sharded(Exchange):
    """Each worker merges a slice of all updates and gives it to the others."""

    name: ClassVar[str] = "sharded"
    on_workers: ClassVar[bool] = True
    role: ClassVar[str] = "ddlf.training.exchanges.sharded.replica:ShardedReplica"

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the loop of synchronous training whose updates stay on the workers."""
        from ddlf.training.exchanges.sharded.master import ShardedRounds

        return ShardedRounds(merge=merge, outer=outer, balance=balance)

    def weights(self, place: Place) -> Outwards:
        """Return the source of the weights: the workers, each with a slice."""
        from ddlf.training.exchanges.members import Members

        return Members(place.run, place.crew, place.cluster, place.lossless, codec=str(self.weights_codec))

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of rules that need whole updates or weights in one place."""
        from ddlf.algorithms.outer import OUTER
        from ddlf.algorithms.ranges import fits

        outer, weights = spec.outer, spec.exchange.weights_codec
        known = type(outer) in {type(OUTER.read(name)) for name in OUTER.names}
        whole = "looks at updates or tensors as wholes, and with exchange='sharded' workers have slices of them"
        own = "is not one of DDLF's, and workers step their slices by its name"
        yield Refusal(
            not (known and fits(outer)),
            f"outer={str(outer)!r} {whole if known else own}",
            "use a rule that steps each value by itself, such as 'nesterov' or 'fedadam', or exchange='star'",
        )
        yield Refusal(
            weights.delta,
            f"weights_codec={str(weights)!r} is of the difference to what each slot holds, "
            "and with exchange='sharded' slots hold nothing: all begin with the same weights",
            "use 'bfloat16', 'float16' or 'float32', or exchange='star'",
        )


@dataclass(frozen=True)
class Auto(Exchange):
    """``Star`` or ``Sharded``, whichever is likely to be faster."""

    name: ClassVar[str] = "auto"
    role: ClassVar[str] = Sharded.role

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the faster exchange, if the workers can reach each other, and the reason."""
        from ddlf.training.exchanges.members import chosen

        name, why = await chosen(app, crew, spec)
        return EXCHANGES[name].of_flat(self.flat()), why


@dataclass(frozen=True)
class Gradient(Exchange):
    """The gradient of one batch goes to the master, which makes one common step."""

    name: ClassVar[str] = "gradient"
    one_step: ClassVar[bool] = True

    def check_app(self, app: App) -> None:
        """Refuse an app with its own ``train``, which is local training.

        Raises:
            AppError: The app has its own ``train``.
        """
        if app.train.__module__ != "ddlf.app":
            raise AppError(
                f"{type(app).__name__}.train is local training: with exchange='gradient' there is none",
                hint="leave out train, or exchange='star'; an own compute_loss or train_step of the model can stay",
            )

    def step(self, app: App) -> Step:
        """Return the common step, made by the model's own optimizer on the master."""
        from ddlf.training.exchanges.gradient.step import Step, check_model

        check_model(app)
        return Step(app.model)

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of settings for local training. Parts of a batch are equal, since other sizes recompile."""
        values, local = spec.flat(), spec.local
        for name in _OF_LOCAL_TRAINING:
            value, usual = values[name], SETTINGS[name].value
            text = str(value) if hasattr(value, "family") else value
            yield Refusal(
                bool(value) and value != SETTINGS[name].check(name, usual),
                f"{name}={text!r} is for local training: with exchange='gradient' there is none",
                f"leave {name} at {SETTINGS[name].default!r}, or use exchange='star'",
            )
        yield Refusal(
            local.steps not in (None, 1),
            f"worker_steps={local.steps} is for local training: with exchange='gradient' a round is one step",
            "leave out worker_steps, or use exchange='star'",
        )
        yield Refusal(
            local.round_samples is not None,
            "round_samples is for local training: with exchange='gradient' a round is one step",
            "leave it out, or use exchange='star'",
        )
        yield Refusal(
            local.precision == "mixed_float16",
            "precision='mixed_float16' scales the loss by what each worker sees: with exchange='gradient' they take one step",
            "use precision='mixed_bfloat16', or exchange='star'",
        )


_OF_LOCAL_TRAINING = (
    "worker_epochs",
    "local_rule",
    "balance",
    "partition",
    "optimizer_state",
    "batchnorm",
    "outer",
    "worker_callbacks",
)
"""Settings that only affect local training or its updates."""


# -- strategies -------------------------------------------------------------------------------------------------------

_OUTER: Setting[OuterOptimizer, OuterOptimizer | str | None] = Setting(
    None,
    OUTER,
    "optimizer that applies the merged update to the weights: subtract, diloco, fedadam (default: subtract)",
    "RULE",
    FACT,
)
"""An optimizer on the master that treats the merged update as a gradient."""

_STALENESS = "weight of an update that is based on old weights: constant, inverse, polynomial:0.5, hinge"
_MAX_STALENESS: Setting[int | None, int | None] = Setting(
    None,
    Whole(0, none="no limit"),
    "maximum number of rounds a slot may be ahead of the slowest slot before it waits (default: no limit)",
    "N",
    FACT,
)
"""With 0 all slots start each round together with the same weights, as in synchronous training, but updates are added
as they arrive."""


@dataclass(frozen=True)
class Sync(Strategy):
    """Synchronous training: all slots train from the same weights, and their updates become one in each round."""

    name: ClassVar[str] = "sync"
    words: ClassVar[str] = "synchronous"
    in_rounds: ClassVar[bool] = True
    backups: ClassVar[bool] = True

    merge: Setting[Rule, Rule | str] = Setting(
        "mean",
        MERGE,
        "how the updates of a round are merged: mean, median, trimmed:0.2, krum, geometric, clipped",
        "RULE",
        FACT,
    )
    """The mean is weighted by samples. The other rules limit the influence of a few corrupt updates."""

    outer: Setting[OuterOptimizer, OuterOptimizer | str | None] = _OUTER

    batchnorm: Setting[str, str] = Setting(
        "averaged",
        OneOf("averaged", "local", "recalibrated"),
        "batch normalization: averaged over the slots, kept per slot (local), or recomputed after each merge (recalibrated)",
        "",
        FACT,
    )
    """``local`` keeps the moving statistics, scale and offset of ``BatchNormalization`` separate for each slot during
    the whole run. The model that is evaluated and saved has their mean (FedBN, arXiv:2102.07623). Use it when the
    slots' data differ. ``recalibrated`` recomputes the moving statistics after each merge: the workers receive the
    merged weights and run the samples of their round through the model once more (SWA, arXiv:1803.05407). This costs
    a forward pass and sends the weights twice per round. Scale and offset are merged like other weights."""

    def loop(self, spec: RunSpec, step: Step | None) -> Loop:
        """Return the loop of the exchange, which trains in rounds of all slots."""
        return spec.exchange.loop(self.merge, step or self.outer, spec.data.balance)

    def slot_warning(self, slots: int) -> str:
        """Return a warning if the merge has too few slots to find bad updates."""
        useful = self.merge.useful
        if slots >= useful:
            return ""
        said = f"merge={str(self.merge)!r} of {slots} slot{'s' * (slots > 1)}"
        return f"{said} cannot tell a bad update from a good one: it takes {useful} slots or more"

    def slot_refusals(self, slots: int, fewest: int) -> Iterator[Refusal]:
        """Yield refusals of too few slots for the merge."""
        least = self.merge.least
        yield Refusal(
            0 < slots < least,
            f"merge={str(self.merge)!r} needs {least} slots to find a bad update among the others, and there are {slots}",
            f"set slots={least}, which any number of workers can carry, or take another merge, such as 'median'",
        )
        yield Refusal(
            0 < fewest < least,
            f"merge={str(self.merge)!r} needs {least} slots, and the last round of an epoch has {fewest}, with one of the last samples each",
            "choose another worker_steps or batch_size, so that more samples are left, or none",
        )


@dataclass(frozen=True)
class Async(Strategy):
    """Asynchronous training: each update changes the weights when it comes, and nobody waits."""

    name: ClassVar[str] = "async"
    words: ClassVar[str] = "asynchronous"

    arrival: Setting[Arrival, Arrival | str] = Setting(
        "published", ARRIVAL, "how an arriving update is applied to the weights", "RULE", FACT
    )

    staleness: Setting[Staleness, Staleness | str] = Setting(
        "constant", STALENESS, _STALENESS, "RULE", FACT, unset=None
    )
    """The staleness of an update is the number of merges between reading the weights that it is based on and applying
    it. The staleness of a push is the number of steps that the server took in between. The default is ``constant`` in
    asynchronous training and ``inverse``, which is 1 / max(1, staleness), in Downpour."""

    outer: Setting[OuterOptimizer, OuterOptimizer | str | None] = _OUTER
    max_staleness: Setting[int | None, int | None] = _MAX_STALENESS

    def loop(self, spec: RunSpec, step: Step | None) -> Loop:
        """Return the loop in which each slot has its own rounds."""
        from ddlf.training.strategies.asynchronous.master import Asynchronous

        return Asynchronous(
            arrival=self.arrival,
            staleness=self.staleness,
            outer=self.outer,
            max_staleness=self.max_staleness,
            balance=spec.data.balance,
        )

    @classmethod
    def compared(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint that had an effect.

        Release 0.1 accepted ``balance`` with rounds of whole epochs, where it has no effect.
        """
        return saved if saved.get("worker_steps") else {name: saved[name] for name in saved if name != "balance"}

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return True with ``balance="speed"``, which gives each slot its own pace."""
        return spec.data.balance == "speed"

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of settings for rounds that all slots end together."""
        yield Refusal(
            spec.local.optimizer_state == "averaged",
            "optimizer_state='averaged' is for synchronous training: asynchronous slots end no round together",
            "use 'kept' or 'fresh', or train in mode 'sync'",
        )
        yield Refusal(
            spec.data.balance == "speed" and spec.local.steps is None,
            "balance='speed' in asynchronous training sets the steps of a round, and without worker_steps a round is of whole epochs",
            "set worker_steps, the steps of the fastest slot, or leave balance at 'equal'",
        )


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD: replicas push gradients to shards of the weights on the workers."""

    name: ClassVar[str] = "downpour"
    words: ClassVar[str] = "Downpour"
    encodes_small: ClassVar[bool] = True  # a shard is one row of values
    keeps_optimizer: ClassVar[bool] = False
    about_rates: ClassVar[str] = (
        "says how far a replica goes until its next fetch; shards step at the rate of push_rule"
    )
    role: ClassVar[str] = "ddlf.training.strategies.downpour.replica:DownpourReplica"
    unused: ClassVar[dict[str, str]] = {
        "worker_epochs": "a round is one epoch of a replica, or worker_steps of it",
        "codec": "gradients travel as they are",
        "optimizer_state": "what the compiled optimizer keeps is not used, and push_rule has a state of its own",
        "local_rule": "replicas begin with new weights every n_fetch steps",
        "balance": "replicas train at their own pace",
        "rate_decay": "push_rule says how far a push goes",
        "multipliers": "push_rule decides how far a gradient moves each weight; freeze layers by layer.trainable = False",
    }

    replicas: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one in each slot"),
        "number of model replicas, distributed among the slots (default: one per slot)",
        "N",
        FILE | FACT,
    )
    """Replicas on the same worker take turns in random order."""

    fetch: Setting[int, int] = Setting(
        1,
        Whole(1),
        "steps between two fetches of the weights by a replica",
        "N",
        FILE | FACT,
        flat="n_fetch",
    )

    push: Setting[int, int] = Setting(
        1, Whole(1), "steps whose gradients a replica pushes together", "N", FILE | FACT, flat="n_push"
    )
    """A push is the sum of these gradients."""

    rule: Setting[Pushed, Pushed | str] = Setting(
        "adagrad",
        PUSHED,
        "optimizer that the servers apply to pushed gradients: adagrad, sgd, momentum, adam",
        "RULE",
        FACT,
        flat="push_rule",
    )
    """Between two fetches a replica steps with the model's own optimizer, including its learning rate, clipping and
    weight decay."""

    staleness: Setting[Staleness, Staleness | str] = Setting("inverse", STALENESS, _STALENESS, "RULE", FACT, unset=None)
    max_staleness: Setting[int | None, int | None] = _MAX_STALENESS

    shards: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one on each worker"),
        "number of servers that hold the weights, each a part (default: one per worker)",
        "N",
        FILE | FACT,
    )

    cut: Setting[str, str] = Setting(
        "equal",
        OneOf("equal", "layers"),
        "how the weights are divided among the servers: equal parts, or whole layers (layers)",
        "",
        FILE | FACT,
        flat="shard_cut",
    )
    """``layers`` never splits a layer between two servers. The parts are as equal as this allows."""

    servers: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="those that train"),
        "number of workers that only hold weights and do not train: the last N of the cluster",
        "N",
        FILE,
        flat="shard_workers",
    )
    """By default ``slots`` is the number of the other workers. If such a worker is lost, its part continues on the
    worker with the copy. These workers train only when no other worker is left."""

    copies: Setting[int | None, int | None] = Setting(
        None,
        Whole(0, none="one, where there is another worker"),
        "copies of each part of the weights, on other workers (default: 1)",
        "N",
        FILE,
    )
    """No copies are made if there is only one worker."""

    softsync: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="a step for each push"),
        "combine pushes: a server takes one step with the mean of replicas/N pushes",
        "N",
        FACT,
    )
    """By default a server takes one step per push."""

    warm_start: Setting[int | None, int | None] = Setting(
        None,
        Whole(0, none="at most 200, and half of the first replica's first round"),
        "steps that the first replica takes alone before the others start",
        "N",
        FACT,
    )
    """By default at most 200, and at most half of the first replica's first round. The warm start always ends with
    the first slot's first round."""

    def loop(self, spec: RunSpec, step: Step | None) -> Loop:
        """Return the loop with the replicas and the servers of the weights."""
        from ddlf.training.strategies.downpour.master import Replicas

        return Replicas(self, spec.exchange.weights_codec)

    def weights(self, place: Place) -> Outwards:
        """Return the source of the weights: the servers."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.roles import SERVERS

        return Members(place.run, place.crew, place.cluster, place.lossless, SERVERS)

    def check_model(self, model: Any) -> None:
        """Refuse an optimizer that a replica cannot step with."""
        from ddlf.training.strategies.downpour.stepper import check_optimizer

        check_optimizer(model.optimizer)

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return True, since the slots' replicas are numbered."""
        return True

    @property
    def extra_workers(self) -> int:
        """The number of workers that only have servers."""
        return self.servers or 0

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of settings that replicas or servers cannot support."""
        weights, slots = spec.exchange.weights_codec, spec.slots or 1
        yield Refusal(
            str(spec.local.clip).startswith("rolling"),
            f"clip={str(spec.local.clip)!r} has no effect in Downpour training: it goes by the norms that it has seen, "
            "and the replicas of a worker step with one optimizer in turn; agc does not",
            "leave clip at None, or train in mode 'sync'",
        )
        yield Refusal(
            weights.delta,
            f"weights_codec={str(weights)!r} is of differences, and a shard does not keep what each replica has",
            "use 'float16' or 'bfloat16'",
        )
        yield Refusal(
            spec.local.precision == "mixed_float16",
            "precision='mixed_float16' scales the loss by what each worker sees, and replicas push gradients without",
            "use precision='mixed_bfloat16'",
        )
        yield Refusal(
            spec.exchange.update_policy == "clip",
            "update_policy='clip' compares updates of whole rounds, and Downpour has none",
            "use 'stop', or 'reject' to leave out what is no number",
        )
        if replicas := self.replicas or spec.slots:
            yield from self.replica_refusals(replicas, slots)

    def replica_refusals(self, replicas: int, slots: int) -> Iterator[Refusal]:
        """Yield refusals of fewer replicas than slots, or than a step of ``softsync`` needs.

        Args:
            replicas: Number of replicas of the run.
            slots: K; 1 while it is unknown.
        """
        yield Refusal(
            replicas < slots,
            f"replicas={replicas} are fewer than the {slots} slots that carry them",
            f"set slots={replicas}, or leave replicas out: then each slot is one",
        )
        yield Refusal(
            bool(self.softsync) and (self.softsync or 0) > replicas,
            f"softsync must be from 1 to the {replicas} replicas, got {self.softsync}",
            "",
        )

    def file_refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield refusals of leaving out damaged files."""
        yield Refusal(
            spec.data.on_bad == "skip",
            "on_bad='skip' does not go with mode='downpour': replicas number the batches of all samples before they read any",
            "leave out on_bad, or train in mode 'async'",
        )

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterator[Refusal]:
        """Yield refusals of workers that cannot answer while they compute, or are too few for backups and servers."""
        there = f"there {'are' if workers > 1 else 'is'} {workers}"
        yield Refusal(
            one_at_a_time,
            "mode='downpour' needs workers that answer while others compute, and those of in_process_cluster do one thing at a time",
            "use local_cluster",
        )
        yield Refusal(
            bool(self.copies) and (self.copies or 0) >= workers,
            f"copies={self.copies} of each shard and the shard itself need {(self.copies or 0) + 1} workers, and {there}",
            "start more workers, or leave copies out",
        )
        yield Refusal(
            bool(self.servers) and (self.servers or 0) >= workers,
            f"shard_workers={self.servers} leave no worker to train: {there}",
            "start more workers, or leave shard_workers out: then those that train have the shards, too",
        )


# -- evaluation, checkpoints and output -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation(Group):
    """When the model is tested, and when training can stop."""

    every: Setting[int, int] = Setting(
        0,
        Whole(0),
        "evaluate the test data after every N rounds (0: only at the end)",
        "N",
        FILE,
        flat="evaluate_every",
    )
    """In asynchronous training N counts updates. The workers compute the next round meanwhile."""

    on: Setting[str, str] = Setting(
        "master",
        OneOf("master", "workers"),
        "where test and validation data are evaluated during training",
        "",
        FILE,
        flat="evaluate_on",
    )
    """With ``workers`` each worker evaluates some of the batches before or after its next round, and the result has
    the same bits as on the master. The final test, by ``evaluate_model``, is always on the master. Your own metric
    classes cannot be split: then the master evaluates, and a line says why."""

    converge: Setting[Convergence, Convergence | str] = Setting(
        "never",
        CONVERGE,
        "when to stop before the last epoch: never, target:val_accuracy,0.97,last=5",
        "RULE",
    )
    """Training also stops when ``is_convergent`` of the app returns true."""


@dataclass(frozen=True)
class Checkpoint(Group):
    """Where a run stores its state, and the state from which it continues."""

    folder: Setting[str | Path | None, str | Path | None] = Setting(
        None, FOLDER, "folder for checkpoints, written after every round", "DIR", flat="checkpoint"
    )
    """None writes no checkpoints, or uses the folder of ``resume``."""

    every: Setting[int, int] = Setting(
        1, Whole(1), "write a checkpoint only after every N rounds, and at the end", "N", flat="checkpoint_every"
    )
    """In asynchronous training N counts updates."""

    keep: Setting[int, int] = Setting(3, Whole(1), "number of checkpoints to keep", flat="checkpoint_keep")

    resume: Setting[str | Path | None, str | Path | None] = Setting(
        None,
        FOLDER,
        "continue from a checkpoint: auto (the newest in --checkpoint, if any), or a folder, or the name of a run",
        "auto|DIR",
    )
    """``DIR/round-000012`` selects one checkpoint. With another folder as ``checkpoint``, the old folder is only
    read. Synchronous training ends with the same bits as without the interruption, unless the parts follow measured
    speed. A run that is complete is not trained again."""

    takeover: Setting[bool, bool] = Setting(
        False, SWITCH, "take the checkpoint folder over from another master that writes to it"
    )
    """``Cluster`` has the same option for workers. ``--takeover`` sets both."""


@dataclass(frozen=True)
class Output(Group):
    """The output of a run, and the place of its records."""

    out: Setting[str | Path | None, str | Path | None] = Setting(
        None, FOLDER, "parent folder for run folders; none disables them", "DIR"
    )
    """With ``ddlf run``, None means ``$DDLF_RUN_DIR`` or ``./runs``, and ``"none"`` disables run folders. In a
    program, None disables them."""

    run_name: Setting[str | None, str | None] = Setting(
        None, NAME, "name of the run, used in the name of its folder", "NAME", option="name"
    )
    """The default is the name of the app's class."""

    trackers: Setting[tuple[str, ...], tuple[str, ...] | list[str] | str] = Setting(
        (), TRACKERS, "experiment trackers to log to: tensorboard, mlflow", "NAMES", option="log"
    )
    """Only the master logs. ``pip install "ddlf[track]"`` installs both."""

    echo: Setting[bool, bool] = Setting(
        True, SWITCH, "print what user code prints on the workers, with the worker's name"
    )
    """``print``, ``logging`` and warnings, during training and before. The event ``WorkerWrote`` reports them in any
    case."""

    verbose: Setting[bool, bool] = Setting(True, SWITCH, "print the progress of the run")
    """``-q`` switches it off."""

    ui: Setting[str, str] = Setting(
        "auto",
        OneOf("auto", "rich", "plain", "json", "none"),
        "output style: live display (rich), log lines (plain), events as JSON lines (json), or only the results (none)",
        "",
    )
    """``auto`` is ``rich`` in a terminal or notebook, and ``plain`` elsewhere or if ``$CI`` is set. ``$DDLF_UI``
    applies to all runs: it overrides the class attribute, and is overridden by the option and by the attribute of the
    object. ``plain`` prints at most one line about rounds every 2 s. With ``json``, output of programs goes to
    standard error."""

    dashboard: Setting[bool | int | None, bool | int | None] = Setting(
        None, page, "whether ``ddlf run`` serves a page for the browser, and on which port"
    )
    """None serves the page if standard output is a terminal. True chooses the first free port from 8900 to 8919.
    ``DDLF_DASHBOARD`` and ``--dashboard`` override the attribute. In your own code, ``cluster.dashboard(app)`` serves
    the page."""

    advice: Setting[str, str] = Setting(
        "quick",
        OneOf("off", "quick", "strict"),
        "check for known mistakes before training: never (off), print them (quick), or refuse to start (strict)",
        "",
    )
    """Only looks at what is in memory before training; ``ddlf advise`` does more. With ``strict`` a run that could
    not learn anything does not start."""


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSpec(Group):
    """All settings of a run.

    Args:
        train: How it trains.
        data: Which samples each slot trains on.
        exchange: How updates and weights travel.
        local: How a slot trains in a round.
        evaluation: When the model is tested.
        checkpoint: Where its state is stored.
        output: Its output.
    """

    train: Strategy = field(default_factory=Sync)
    data: Data = field(default_factory=Data)
    exchange: Exchange = field(default_factory=Star)
    local: Local = field(default_factory=Local)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    output: Output = field(default_factory=Output)

    epochs: Setting[int, int] = Setting(
        10, Whole(1), "epochs of training in the whole run", "N", FILE, flat="master_epochs"
    )
    """With ``resume``, this is the total, including the epochs before the checkpoint."""

    seed: Setting[int, int] = Setting(
        0,
        Whole(0, 2**32 - 1),
        "random seed for initial weights, sample order and everything else",
        "N",
        FILE | FACT,
    )
    """In synchronous training, equal seeds give bit-identical results."""

    slots: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="as many as workers"),
        "parts that each round is split into; any worker can compute any part (default: one per worker)",
        "N",
        FILE | FACT,
    )
    """K, the number of logical replicas. Workers may join and leave: the result depends only on K. If K is not set,
    workers that join later get new slots, from a round that ``history`` names. If K is set, it stays fixed:
    additional workers are spare, and fewer workers take turns."""

    threads: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one number for all workers, chosen from cores and slots"),
        "threads that each worker computes with (default: chosen, equal on all workers)",
        "N",
        FILE | FACT,
    )
    """The bits of convolutions depend on the number of threads, so it is equal on all workers. By default a
    synchronous run uses the cores of its smallest machine divided by the slots per machine, and a resumed run the
    number in its checkpoint. Set a number to get the same bits on other machines. In asynchronous and Downpour
    training, each worker uses its share of its machine's cores by default."""

    callbacks: Setting[Sequence[Any], Sequence[Any]] = Setting(
        (), CALLBACKS, "Keras callbacks that run on the master once per epoch, as for fit"
    )
    """Create them in ``create_model``. They receive the metrics of all slots and of the validation data. A learning
    rate that they set applies to every slot from the next round on, and ``stop_training`` ends the run. For callbacks
    that watch batches, use ``worker_callbacks``."""

    worker_callbacks: Setting[Sequence[Any], Sequence[Any]] = Setting(
        (), CALLBACKS, "Keras callbacks for fit on the workers, where they also see batches"
    )
    """Create them in ``create_model``. Each round is one call of ``fit``, and epochs are counted over the whole run.
    Data in their attributes belongs to the slot: it is passed on from round to round, moves to another worker with
    the slot, and is saved in checkpoints."""

    wait_for_workers_s: Setting[float, float] = Setting(60.0, seconds, "seconds to wait when all workers are lost")

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the spec, and the spec itself for the settings of the run as a whole."""
        return self, self.data, self.local, self.exchange, self.train, self.evaluation, self.checkpoint, self.output

    @property
    def outer(self) -> Any:
        """The outer optimizer; None if the strategy merges no updates."""
        return getattr(self.train, "outer", None)

    @property
    def batchnorm(self) -> str:
        """The treatment of batch normalization."""
        setting: str = getattr(self.train, "batchnorm", "averaged")
        return setting

    @property
    def role(self) -> str:
        """The role that trains on the workers, as ``"module:Class"``."""
        return self.train.role or self.exchange.role

    def flat(self) -> dict[str, Any]:
        """Return every setting by the name of the app's attribute, with defaults for settings of other strategies."""
        values = {"mode": self.train.name, "exchange": self.exchange.name}
        for group in self.groups:
            values.update(Group.flat(group))
        return {name: values[name] if name in values else one.check(name, one.value) for name, one in SETTINGS.items()}


STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Sync, Async, Downpour)}
"""The strategies of this package."""
EXCHANGES: dict[str, type[Exchange]] = {kind.name: kind for kind in (Star, Sharded, Auto, Gradient)}


@cache
def installed() -> Mapping[str, type[Strategy]]:
    """Return the strategies of this package and of other installed packages, by name."""
    outside = {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINTS)}
    return {**outside, **STRATEGIES}


class KindOf:
    """A check for a group, its name, or a text such as ``downpour:replicas=16``; it returns the name."""

    def __init__(self, kinds: Callable[[], Mapping[str, type[Group]]], own: Mapping[str, type[Group]]) -> None:
        self._kinds, self._own = kinds, own

    def __call__(self, name: str, value: Any) -> str:
        if isinstance(value, Group) and value.name:
            return value.name
        text = value.partition(":")[0] if isinstance(value, str) else value
        return text if text in self._own else OneOf(*self._kinds())(name, text)

    def group(self, name: str, text: str) -> Group | None:
        """Return the group in a text with settings; None if the text is only a name."""
        kind, colon, rest = text.partition(":")
        return self._kinds()[self(name, kind)].of_text(rest) if colon else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds of this package."""
        return tuple(self._own)

    def __str__(self) -> str:
        return str(OneOf(*self._own))


MODE = KindOf(installed, STRATEGIES)
EXCHANGE = KindOf(lambda: EXCHANGES, EXCHANGES)

_MODE: Setting[str, str] = Setting(
    "sync",
    MODE,
    "how updates are applied: once per round (sync), on arrival (async), or as gradients pushed to servers on the workers (downpour)",
    "MODE",
    FILE | FACT,
    flat="mode",
)
"""What ``train_model`` and ``ddlf run`` do. Settings of the mode can follow: ``downpour:replicas=16,fetch=2``."""

_EXCHANGE: Setting[str, str] = Setting(
    "star",
    EXCHANGE,
    "how workers exchange results: updates through the master (star), updates merged in slices on the workers (sharded), "
    "the faster of these two (auto), or one gradient per batch (gradient)",
    "EXCHANGE",
    FILE | FACT,
    flat="exchange",
)
"""With ``sharded`` each worker merges one slice of all updates and sends it to the other workers. The result has the
same bits as with ``star``, but no data of the size of the model passes through the master in a round; the master
receives the model for checkpoints and after the last round. ``auto`` chooses one of the two by the amount of data
that a round moves, and says why. With ``gradient`` the master averages the gradients over the samples and takes one
step with the model's own optimizer, as one process with K times the batch size would. Each step costs an exchange,
which local training avoids."""
_EXCHANGE.strategies = ("sync",)

GROUPS: dict[str, type[Group]] = {
    "mode": Strategy,
    "data": Data,
    "local": Local,
    "exchange": Exchange,
    "train": Strategy,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "output": Output,
}
"""The app's attributes that accept groups. ``train`` is the same as ``mode``, and also a method."""
_TEXTS = {"mode": MODE, "exchange": EXCHANGE}


KINDS_OF_GROUPS: tuple[type[Group], ...] = (
    *(RunSpec, Data, Local, Exchange),
    *STRATEGIES.values(),
    *(Evaluation, Checkpoint, Output),
)


def _settings() -> dict[str, Setting[Any, Any]]:
    """Return every setting by the name of the app's attribute, and note which strategies have it."""
    table: dict[str, Setting[Any, Any]] = {"mode": _MODE, "exchange": _EXCHANGE}
    for kind in KINDS_OF_GROUPS:
        for one in kind.settings():
            known = table.setdefault(one.name, one)
            if issubclass(kind, Strategy):
                known.strategies = (*known.strategies, kind.name)
    return table


SETTINGS: Mapping[str, Setting[Any, Any]] = _settings()
"""Each setting by the name of the app's attribute, in the order of all lists."""
DEFAULTS: Mapping[str, Any] = {name: one.default for name, one in SETTINGS.items()}


def option(name: str) -> str:
    """Return the command line form of a setting or another option."""
    other = SETTINGS[name].option if name in SETTINGS else ""
    return f"--{(other or name).replace('_', '-')}"


def group_of(name: str, value: object) -> Group | None:
    """Return the group that an app's attribute is set to; None for any other value.

    Args:
        name: The name of the attribute.
        value: A group; or its text, for ``mode`` and ``exchange``.

    Raises:
        ConfigError: The text cannot be read.
    """
    if name in _TEXTS and isinstance(value, str):
        return _TEXTS[name].group(name, value)
    return value if name in GROUPS and isinstance(value, GROUPS[name]) else None


class View:
    """A descriptor: an app's attribute that returns a group with the app's settings, and accepts one."""

    def __init__(self, kind: type[Group]) -> None:
        self._kind = kind

    def __get__(self, app: object, owner: type) -> Any:
        where = owner if app is None else app
        return self._kind.of_flat({one.name: getattr(where, one.name, one.default) for one in self._kind.settings()})


def spread(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Replace groups by the settings that the user gave in them.

    Args:
        values: Values by the names of an app's attributes, including groups and texts of groups.
        where: The place of these values, for the error.

    Returns:
        The values, with each group replaced by its given settings.

    Raises:
        ConfigError: A group and another value contradict each other.
    """
    groups = {name: group for name, value in values.items() if (group := group_of(name, value)) is not None}
    found = {name: value for name, value in values.items() if name not in groups}
    for name, group in groups.items():
        said = group.given()
        if group.name:
            said["mode" if isinstance(group, Strategy) else "exchange"] = group.name
        for key, value in said.items():
            if key in found and (SETTINGS[key].check(key, found[key]) if key in SETTINGS else found[key]) != value:
                raise ConfigError(
                    f"{key}={found[key]!r} and {name}={group} say different things{f' in {where}' if where else ''}",
                    hint=f"leave {key} out of one of them",
                )
            found[key] = value
    return found


class Configured(Protocol):
    """An object with settings as attributes: an app."""

    mode: Any


def spec_of(app: Configured, mode: str | None = None, given: Mapping[str, Any] | None = None) -> RunSpec:
    """Return the spec of a run from an app's settings.

    Args:
        app: Has the settings as attributes.
        mode: The name of the strategy; by default the app's ``mode``.
        given: Settings that override the attributes, by name; None overrides nothing.

    Raises:
        ConfigError: A value is invalid, or has no effect with the strategy.
    """
    given = given or {}
    mode = MODE("mode", mode or app.mode)
    kind = installed()[mode]
    own = {one.name: one for one in kind.settings()}
    values: dict[str, Any] = {}
    for name, setting in {**SETTINGS, **own}.items():
        chosen = given.get(name)
        value = getattr(app, name, setting.default) if chosen is None else chosen
        if name == "worker_epochs" and chosen is None and _rounds_are_of_another_mode(app, kind):
            value = setting.default
        usual = setting.default
        if value is None and usual is None and setting.value is not None:
            value = own.get(name, setting).value  # each strategy has its own default
        values[name] = setting.check(name, value)
        if not setting.used_by(mode) and value != usual and values[name] != setting.check(name, setting.value):
            raise _unused(name, value, usual, kind, setting.strategies)
    values["mode"] = mode
    for name, rule in values.items():
        only = getattr(rule, "only", mode)
        if only != mode:
            raise ConfigError(
                f"{name}={str(rule)!r} is for {installed()[only].words} training: {kind.words} training has nothing like it",
                hint=f"choose another {name}, or train in mode {only!r}",
            )
        for other in getattr(rule, "ignores", ()):
            if values[other] != SETTINGS[other].check(other, SETTINGS[other].value):
                raise ConfigError(
                    f"{other}={given.get(other) or getattr(app, other)!r} has no effect with {name}={str(rule)!r}",
                    hint=f"leave {other} out, or choose another {name}",
                )
    if EXCHANGES[values["exchange"]].one_step and values["worker_steps"] is None:
        values["worker_steps"] = 1
    return RunSpec(
        train=kind.of_flat(values),
        data=Data.of_flat(values),
        exchange=EXCHANGES[values["exchange"]].of_flat(values),
        local=Local.of_flat(values),
        evaluation=Evaluation.of_flat(values),
        checkpoint=Checkpoint.of_flat(values),
        output=Output.of_flat(values),
        **{one.field: values[one.name] for one in RunSpec.settings()},
    )


def _rounds_are_of_another_mode(app: Configured, kind: type[Strategy]) -> bool:
    """Return whether a class set ``worker_epochs`` for its usual mode, and now trains in a mode that ignores it."""
    return (
        "worker_epochs" in kind.unused
        and getattr(type(app), "mode", kind.name) != kind.name
        and "worker_epochs" not in vars(app)
    )


def _unused(name: str, value: Any, usual: Any, kind: type[Strategy], others: Sequence[str]) -> ConfigError:
    words = " and ".join(STRATEGIES[other].words for other in others)
    return ConfigError(
        f"{name}={value!r} is for {words} training: {kind.words} training has no use for it",
        hint=f"leave {name} at {usual!r}, or train in mode {' or '.join(map(repr, others))}",
    )
