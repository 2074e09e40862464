"""All settings of a run, as one value: ``RunSpec``. Runs everywhere; imports no heavy modules.

A run has a strategy, data, an exchange, and groups for local training, evaluation, checkpoints and output. Each is a
frozen dataclass whose fields are settings. Each setting is declared once: here, or in the package of its strategy. The
text below a setting appears only in the reference. ``registry`` makes a ``RunSpec`` from an app.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ddlf.settings.checks import (
    CALLBACKS,
    CLIP,
    CODEC,
    CONVERGE,
    FOLDER,
    LOCAL_RULE,
    MULTIPLIERS,
    NAME,
    OUTWARD,
    PARTITION,
    PEER,
    RATE_DECAY,
    SCHEDULE,
    SHUFFLE,
    TRACKERS,
    Above,
    Number,
    OneOf,
    Whole,
    class_weights,
    count_of_bytes,
    page,
    switch,
)
from ddlf.settings.setting import FACT, FILE, Group, Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddlf.algorithms.clipping import Adaptive, Rolling
    from ddlf.algorithms.codec import Codec, Outward
    from ddlf.algorithms.convergence import Convergence
    from ddlf.algorithms.local_rules import LocalRule
    from ddlf.algorithms.multipliers import ByName, Freeze
    from ddlf.algorithms.partitioners import Partition
    from ddlf.algorithms.rate_decay import Plateau, RateDecay
    from ddlf.algorithms.reading_order import Shuffle
    from ddlf.algorithms.schedules import Rates
    from ddlf.training.context import App


class Refusal(NamedTuple):
    """A combination of settings that cannot work, and the error's text for it.

    Args:
        applies: Whether this run has the combination.
        sentence: The problem; begins with ``setting=value``.
        hint: Advice for the user.
    """

    applies: bool
    sentence: str
    hint: str


# -- data and local training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data(Group):
    """Which samples each slot trains on, and how they are read."""

    batch_size: Setting[int, int] = Setting(32, Whole(1), "samples per batch, on each worker", "N", FILE | FACT)
    """Two workers with a batch size of 64 each train on 128 samples per step, like in the papers."""

    partition: Setting[Partition, Partition | str] = Setting(
        "equal",
        PARTITION,
        "how samples are distributed among the slots",
        "RULE",
        FACT,
    )
    """This setting is for studies with unevenly distributed data. With ``equal`` every round uses another partition.
    With any other rule each slot keeps its samples for the whole run, the number of slots stays fixed, and the first
    lines of output show what each slot has."""

    private: Setting[bool, bool] = Setting(
        False, switch, "each worker has its own training data, which no other worker and not the master sees", use=FACT
    )
    """``load_dataset`` is called on workers only. Each worker is a slot, and trains on all its samples in each epoch. The
    master learns their number, shapes and types. A round that has lost a worker for ``wait_for_workers_s`` continues
    without it."""

    secure_aggregation: Setting[bool, bool] = Setting(
        False,
        switch,
        "workers add up updates of private data under masks, so that the master learns only the sum",
        use=FACT,
    )
    """It needs ``private``, mode ``sync`` and three to 50 workers. The mean is weighted by samples, as without it. Workers
    report no metrics. A worker that is lost while a sum is unmasked makes its round void: the weights stay. With
    ``update_clip`` and ``noise_multiplier``, each worker clips its update and adds a share of the noise itself."""

    update_limit: Setting[float | None, float | None] = Setting(
        None,
        Above(0, none="8, or what clip and noise need"),
        "largest value of an update with secure_aggregation (default: 8; with noise, what clip and noise need)",
        use=FACT,
    )
    """Values are rounded to ``update_limit / 2^25``. An update with a larger value ends the run."""

    update_clip: Setting[float | None, float | None] = Setting(
        None,
        Above(0, none="no noise"),
        "most norm of an update of private data, over all trained weights: longer ones are shortened",
        use=FACT,
    )
    """It needs ``private`` and ``noise_multiplier``. The sum of the clipped updates is noised, and divided by the number
    of slots. Weights that are not trained stay as they are, such as statistics of batch normalization. With
    ``privacy_unit='sample'``, it is the most norm of the gradient of a sample."""

    noise_multiplier: Setting[float | None, float | None] = Setting(
        None,
        Above(0, none="no noise"),
        "noise on the sum of a round's updates of private data, as a multiple of update_clip",
        use=FACT,
    )
    """The standard deviation of the noise is ``noise_multiplier * update_clip``. The master adds it, from the system's
    random source, so equal seeds give other weights. Training metrics and evaluations by workers are left out, because
    they have no noise. With ``privacy_unit='sample'``, the noise is on the steps of each worker."""

    delta: Setting[float | None, float | None] = Setting(
        None,
        Above(0, none="1e-5", below=1),
        "probability that a stated epsilon does not hold, for private data with noise",
        use=FACT,
    )
    """The record of each round has the epsilon of each slot (``record.epsilons``), and the largest one as the metric
    ``epsilon``. ``pip install 'ddlf[privacy]'`` adds dp-accounting, which computes it."""

    privacy_unit: Setting[str, str] = Setting(
        "worker",
        OneOf("worker", "sample"),
        "what the noise on private data hides: all data of a worker (worker), or a single sample (sample)",
        use=FACT,
    )
    """With ``sample``, each worker trains by DP-SGD: it draws Poisson batches of ``batch_size`` samples on average, clips
    the gradient of each sample to ``update_clip``, and adds the noise to their sum. The master merges updates as without
    noise. Coins and noise come from the worker's system. This needs TensorFlow or JAX."""

    privacy_budget: Setting[float | None, float | None] = Setting(
        None,
        Above(0, none="no limit"),
        "largest epsilon of a worker with private data: the run ends before a release would exceed it",
    )
    """The run ends with the weights of the last release. A resumed run counts the releases before it."""

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
    hardly stale. The first two rounds are equal and measure the speed. The number of slots stays fixed."""

    shuffle: Setting[Shuffle | None, Shuffle | str | None] = Setting(
        None, SHUFFLE, "how samples from data files are shuffled", "RULE", FILE | FACT
    )
    """This setting is for ``self.train_data`` only. Its default there is ``window:8``: each epoch reads the files in
    another order and shuffles the rows of 8 open files together. Because ``ddlf data split`` shuffles all samples, this
    is as good as ``global``. ``global`` can put any sample after any other, like with arrays, but reads rows one by one
    from the disk. ``none`` reads files and rows in their stored order."""

    data_memory: Setting[int | None, str | int | None] = Setting(
        None,
        count_of_bytes,
        "memory per worker for samples from data files (default: an eighth of the machine's memory, at most 1 GiB)",
        "SIZE",
        FILE,
    )
    """DDLF uses this memory for reading ahead, and for the window of files if it fits into half of this memory.
    Otherwise rows are read from the disk, whose cache does not count."""

    on_bad: Setting[str, str] = Setting("stop", OneOf("stop", "skip"), "what to do with a damaged data file", "", FILE)
    """``skip`` checks each file completely before it uses a sample of it. The ledger records the left-out
    samples. It is marked as not exact."""

    class_weight: Setting[Mapping[int, float] | None, Mapping[int, float] | None] = Setting(
        None, class_weights, "weight of each class in the loss, as for fit", None, FACT
    )
    """Classes that are not listed have weight 1. ``w_train`` is the alternative."""

    @property
    def hides_metrics(self) -> bool:
        """Whether the metrics of single workers are left out, because they would tell what noise or masks hide."""
        return self.noise_multiplier is not None or self.secure_aggregation

    @property
    def protects_samples(self) -> bool:
        """Whether each worker noises its own steps, so that they hide single samples."""
        return self.noise_multiplier is not None and self.privacy_unit == "sample"

    @property
    def noises_updates(self) -> bool:
        """Whether the updates of workers are clipped, and their sum gets noise."""
        return self.noise_multiplier is not None and self.privacy_unit == "worker"


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
        "correction added to local gradients",
        "RULE",
        FILE | FACT,
        flat="local_rule",
    )
    """The correction keeps slots from drifting apart in long rounds or with uneven data. It changes the gradients that
    ``model.optimizer`` receives."""

    precision: Setting[str, str] = Setting(
        "auto",
        OneOf("auto", "float32", "mixed_bfloat16", "mixed_float16"),
        "number format of the computation; auto uses float32 and says when bfloat16 would be faster",
        "",
        FACT,
    )
    """Weights are float32 with each format, and so is the merge. With ``mixed_float16`` Keras scales the loss. The scale
    and its counter belong to the state of the optimizer, so they survive rounds, losses of workers and a resume."""

    tf32: Setting[str, str] = Setting(
        "auto",
        OneOf("auto", "on", "off"),
        "whether cards round factors of float32 products to TF32, with 10 of 23 bits: on, off, or as the framework does (auto)",
        "",
        FILE | FACT,
    )
    """TensorFlow and JAX do this by default, and PyTorch only in convolutions. CPUs and older cards cannot."""

    rate_decay: Setting[RateDecay | Plateau, RateDecay | Plateau | str] = Setting(
        "never", RATE_DECAY, "how the learning rate decays with the epochs", "RULE", FACT
    )
    """The master decides once per epoch, for all slots. ``plateau`` watches the validation loss, or the training
    loss without ``x_val``. ``webnn`` needs ``x_val`` and an accuracy metric."""

    schedule: Setting[Rates | None, Rates | str | None] = Setting(
        None, SCHEDULE, "learning rate schedule over the run, such as warmup:0.05,cosine", "RULE", FACT
    )
    """The values of a schedule are relative to the learning rate of the compiled model, and positions are fractions of
    the run. So every slot reaches the end of the schedule at the end of the run, for any number of slots, mode and
    round length."""

    clip: Setting[Rolling | Adaptive | None, Rolling | Adaptive | str | None] = Setting(
        None, CLIP, "gradient clipping", "RULE", FACT
    )
    """``rolling`` uses the gradient norms of previous batches. ``agc`` uses the norm of each unit's weights, except
    in the last layer. Clipping wraps the optimizer."""

    multipliers: Setting[Freeze | ByName | None, Freeze | ByName | str | None] = Setting(
        None, MULTIPLIERS, "learning rate multipliers by layer: freeze:0.75, or body=0.1,head=2", "RULE", FACT
    )
    """Layers or weights are selected by name or by depth. ``freeze`` takes the fractions of the layers to freeze, one
    for each of equal parts of the run."""


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
        "when to stop before the last epoch, such as target:val_accuracy,0.97,last=5",
        "RULE",
    )
    """Training also stops when ``is_convergent`` of the app returns true."""


@dataclass(frozen=True)
class Checkpoint(Group):
    """The place where a run stores its state, and the state that it starts from."""

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
        False, switch, "take the checkpoint folder over from another master that writes to it"
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
        (), TRACKERS, "experiment trackers to log to", "NAMES", option="log"
    )
    """Only the master logs. ``pip install "ddlf[track]"`` installs both."""

    echo: Setting[bool, bool] = Setting(
        True, switch, "print what user code prints on the workers, with the worker's name"
    )
    """This covers ``print``, ``logging`` and warnings, before and during training. The event ``WorkerWrote`` reports
    them in any case."""

    verbose: Setting[bool, bool] = Setting(True, switch, "print the progress of the run")
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
    """This check only uses data that is in memory before training. ``ddlf advise`` checks more. With ``strict`` a run
    does not start if it could not learn anything."""


# -- strategies and exchanges ------------------------------------------------------------------------------------------


class StrategySettings(Group):
    """The settings of a strategy, and what other code must know about it.

    Attributes:
        name: The value of ``mode`` that selects it.
        words: Its name in sentences, before the word "training".
        about: How it applies updates, for the help of ``mode``; "" for a strategy of another package.
        in_rounds: Whether all slots end a round together, so that a commit is a round. Otherwise each slot's update is
            a commit.
        backups: Whether a second worker also gets the task of a slot that is much slower than the others of its round.
        encodes_small: Whether codecs are applied to tensors of any size.
        keeps_optimizer: Whether a slot's optimizer keeps its state from round to round.
        about_rates: The effect that a learning rate set by a callback lacks here; "" if it has its full effect.
        role: The role that trains on the workers, as ``"module:Class"``; "" for the role of the exchange.
        role_of_part: The role of a worker that has only a part of the model; "" for the role of the exchange.
        unused: Settings of every run, and maybe ``exchange``, that have no effect here, each with the reason.
        no_peer: Why a run with this strategy cannot be a peer; "" if it can.
        slot_parts: The names of the slot parts that it uses; None for all. A run is refused if a setting makes slots
            keep another part.
    """

    words: ClassVar[str]
    about: ClassVar[str] = ""
    in_rounds: ClassVar[bool] = False
    backups: ClassVar[bool] = False
    encodes_small: ClassVar[bool] = False
    keeps_optimizer: ClassVar[bool] = True
    about_rates: ClassVar[str] = ""
    role: ClassVar[str] = ""
    role_of_part: ClassVar[str] = ""
    unused: ClassVar[dict[str, str]] = {}
    slot_parts: ClassVar[tuple[str, ...] | None] = None
    no_peer: ClassVar[str] = ""

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return whether the number of slots stays the same, so that workers that join later get no slot."""
        return False

    def slot_warning(self, slots: int) -> str:
        """Return a warning if K slots are enough to run, but few for these settings; "" otherwise."""
        return ""

    @classmethod
    def compared(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint that had an effect.

        A run that resumes must have the same ones.
        """
        return saved

    @property
    def extra_workers(self) -> int:
        """Return the number of workers that train no slot, such as servers."""
        return 0

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return an error for each combination of settings that this strategy does not support."""
        return ()

    def file_refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return an error for each setting that stops this strategy from training on partition files."""
        return ()

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterable[Refusal]:
        """Return errors about too few or unsuitable workers, for the arguments of ``refusals.check_workers``."""
        return ()

    def slot_refusals(self, slots: int, fewest: int) -> Iterable[Refusal]:
        """Return errors about too few slots, for the arguments of ``refusals.check_slots``."""
        return ()


@dataclass(frozen=True)
class ExchangeSettings(Group):
    """The settings that every exchange has, and what other code must know about it.

    Attributes:
        name: The value of ``exchange`` that selects it; "" for a group of settings that every exchange has.
        about: How it exchanges results, for the help of ``exchange``; "" for an exchange of another package.
        strategies: The names of the strategies that can use it; empty for all with an exchange.
        unused: Settings of every run that have no effect here, each with the reason.
        slot_parts: The attribute of ``StrategySettings``.
        no_peer: Why a run with this exchange cannot be a peer; "" if it can.
        one_step: Whether a round is one step that all slots make together, without local training.
        role: The role that trains on the workers, as ``"module:Class"``.
        same_bits_as: The exchange whose bits it has, so that a run can continue with either; "" for none.
        chosen_by: Name of a setting. A value of it selects the exchange if ``exchange`` is not set; "" for none.
        spans_workers: Whether several workers together carry a slot. Then a run has one slot by default, and no worker is
            a backup.
    """

    about: ClassVar[str] = ""
    strategies: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[dict[str, str]] = {}
    slot_parts: ClassVar[tuple[str, ...] | None] = None
    one_step: ClassVar[bool] = False
    no_peer: ClassVar[str] = ""
    role: ClassVar[str] = "ddlf.training.slot.replica:Replica"
    same_bits_as: ClassVar[str] = ""
    chosen_by: ClassVar[str] = ""
    spans_workers: ClassVar[bool] = False

    codec: Setting[Codec, Codec | str] = Setting(
        "float32",
        CODEC,
        "compression of updates",
        "NAME",
        FACT,
    )

    weights_codec: Setting[Outward, Outward | Codec | str] = Setting(
        "float32",
        OUTWARD,
        "compression of weights sent to the workers",
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

    def check_app(self, app: App) -> None:
        """Raise an error before anything starts if the app cannot be trained with this exchange."""

    def for_data(self, data: Data) -> ExchangeSettings:
        """Return the exchange of a run with these settings of its data; by default this one."""
        return self

    def refusals(self, spec: RunSpec) -> Iterable[Refusal]:
        """Return an error for each combination of settings that this exchange does not support."""
        return ()

    def worker_refusals(self, workers: int, one_at_a_time: bool, slots: int) -> Iterable[Refusal]:
        """Return errors about workers that are too few for the slots, or unsuitable, for ``refusals.check_workers``."""
        return ()


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

    train: StrategySettings
    data: Data
    exchange: ExchangeSettings
    local: Local
    evaluation: Evaluation
    checkpoint: Checkpoint
    output: Output

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

    planned: Setting[bool, bool] = Setting(
        False, switch, "train with the slots, mode, exchange and codec that ddlf plan predicts to be fastest", ""
    )
    """The plan is that of ``ddlf plan`` for the same app and workers, with the batch size of the run. A line says what it
    chooses. If its verdict is unclear, the run keeps its own settings. Without such a plan the run is refused, and so is
    another value that is set outside of the app's class."""

    scout: Setting[bool, bool] = Setting(
        False, switch, "first find the learning rate, as ddlf scout does, and train with it", ""
    )
    """Short trials on all workers compare learning rates before the training. If the rate of the app is as good as the
    best one, it stays; otherwise ``learning_rate`` of the app changes, and a line says so."""

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

    deterministic: Setting[bool, bool] = Setting(
        False,
        switch,
        "compute equal bits in each run, also on cards; an op that cannot is an error",
        "",
        FILE | FACT,
    )
    """Each backend has an option for this: op determinism of TensorFlow, XLA's deterministic ops, and the deterministic
    algorithms of PyTorch, cuDNN and cuBLAS. The promise holds for equal cards, drivers and versions. It costs speed. The
    master and all workers use it."""

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

    peer: Setting[str | None, str | None] = Setting(
        None, PEER, "take part in a training with private data, as one peer: the link of ddlf peers", "LINK"
    )
    """The run posts its weights after as many commits as the server's plan has ``updates``, and merges the sets of other
    peers between two commits. It begins with the server's set, and its model must have the same weights by name. The end
    of the peers' training ends the run. The code in the link is a secret, and is in no record of the run."""

    wait_for_workers_s: Setting[float, float] = Setting(
        60.0, Number(0, unit="seconds"), "seconds to wait when all workers are lost"
    )
    """With private data, a round also waits so long for each lost worker, and then continues without it. So does the begin:
    a worker that misses the begin of a new run has no slot in it."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of settings in the spec, and the spec itself for the settings of the run as a whole."""
        return self, self.data, self.local, self.exchange, self.train, self.evaluation, self.checkpoint, self.output

    @property
    def outer(self) -> Any:
        """The outer optimizer, which applies merged updates; None if the strategy merges no updates."""
        return getattr(self.train, "outer", None)

    @property
    def batchnorm(self) -> str:
        """The value of the setting ``batchnorm``: how batch normalization is treated."""
        setting: str = getattr(self.train, "batchnorm", "averaged")
        return setting

    @property
    def role(self) -> str:
        """The class on the workers that trains, as ``"module:Class"``."""
        if self.exchange.spans_workers and self.train.role_of_part:
            return self.train.role_of_part
        if self.data.protects_samples:
            return "ddlf.training.slot.sample_noise:SampleNoiseReplica"
        return self.train.role or self.exchange.role

    def slots_on(self, workers: int) -> int:
        """Return K, the number of slots that a new run has on this number of workers."""
        usual = 1 if self.exchange.spans_workers else workers - self.train.extra_workers
        return self.slots or usual

    def uses(self, slot_part: str) -> bool:
        """Return whether both the strategy and the exchange use the slot part with this name."""
        return all(kind.slot_parts is None or slot_part in kind.slot_parts for kind in (self.train, self.exchange))

    def changed(self, names: Iterable[str]) -> Iterator[tuple[Setting[Any, Any], Any]]:
        """Yield the settings in ``names`` whose value in this run is not the default, each with its value.

        Args:
            names: Names of app's attributes. Settings that the run does not have are left out.
        """
        by_name = {setting.name: (setting, group) for group in self.groups for setting in group.settings()}
        for name in names:
            if name in by_name:
                setting, group = by_name[name]
                value = getattr(group, setting.field)
                if value != setting.check(name, setting.value):
                    yield setting, value
