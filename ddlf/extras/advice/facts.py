"""What there is to know of an app before it trains: its arrays, its model, its settings. Pure data, so that rules need neither arrays nor Keras."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddlf.events.record import RoundRecord

USUAL_CUT = 0.5
"""Above which a metric takes an output for a yes, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFacts:
    """One array of an app's data.

    Args:
        name: As it is written, ``x_train['left']``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        letter: ``"x"``, ``"y"`` or ``"w"``.
        shape: With the samples first.
        dtype: NumPy's name of it.
        bad: How many values are NaN or infinite.
        bad_rows: Some samples that have such values.
        low: Least finite value.
        high: Largest finite value.
        std: Standard deviation of finite values.
        whole: Whether all values are whole numbers.
        constant: Numbers of features that have one value only, if samples are rows of features.
        scales: Least and largest standard deviation of features that are not constant and not mostly one value; 0, 0 if there is none.
        loudest: Root of the mean square of the feature that has the largest.
        padded: Share of samples that end with zeros, of rows of whole numbers.
        pierced: Share of samples that have zeros between others, of rows of whole numbers.
        commonest: What is there most often, and its share of what is not 0, of rows of whole numbers; None of others.
        labels: What labels say; None of what is no label.
    """

    name: str
    part: str = "train"
    letter: str = "x"
    shape: tuple[int, ...] = (100, 4)
    dtype: str = "float32"
    bad: int = 0
    bad_rows: tuple[int, ...] = ()
    low: float = -1.0
    high: float = 1.0
    std: float = 1.0
    whole: bool = False
    constant: tuple[int, ...] = ()
    scales: tuple[float, float] = (1.0, 1.0)
    loudest: float = 1.0
    padded: float = 0.0
    pierced: float = 0.0
    commonest: tuple[int, float] | None = None
    labels: LabelFacts | None = None

    @property
    def sample(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.shape[1:]

    @property
    def has_numbers(self) -> bool:
        """Whether it holds numbers, rather than text or objects."""
        return self.dtype.startswith(("float", "int", "uint", "bool", "bfloat", "complex"))

    @property
    def is_numpy(self) -> bool:
        """Whether it is an array of NumPy at all: of what is none the class stands in place of a type."""
        others = ("object", "<", ">", "|", "=", "datetime64", "timedelta64", "void", "StringDType")
        return self.has_numbers or self.dtype.startswith(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFacts:
    """What an array of labels says.

    Args:
        kind: ``"numbers"`` of classes, ``"one_hot"`` rows, ``"shares"`` (rows that sum to 1), ``"many_hot"`` rows of zeros and ones, ``"real"``.
        counts: Samples of each class, by its number; of ``numbers`` and ``one_hot`` only.
        sums: Least and largest sum of a row; 0, 0 where samples have no rows.
        is_sorted: Whether samples of a class lie one behind the other.
    """

    kind: str = "real"
    counts: Mapping[int, int] = field(default_factory=dict)
    sums: tuple[float, float] = (0.0, 0.0)
    is_sorted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Samples of training that another part has, too.

    Args:
        part: ``"val"`` or ``"test"``.
        count: How many samples of that part.
        of: How many that part has, of those that were looked at.
        pairs: Some of them: number in training, number in that part.
    """

    part: str
    count: int
    of: int
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """What comparing samples has shown.

    Args:
        looked: How many training samples were compared.
        distinct: How many of these are different ones.
        doubled: Some pairs of training samples that are equal.
        contradicting: Training samples that are equal to another one with another label.
        pairs: Some of these pairs.
        shared: Samples that other parts have, too.
        leaks: Features that say the label: name of the array, and number of the feature.
        follows: The one feature that follows a number nearly: name, number, and its correlation; None if none does.
        overlapping: Windows of other parts that are windows of training one step on or back: part, how many, of how many.
        copied: Whether labels are the inputs.
    """

    looked: int = 0
    distinct: int = 0
    doubled: tuple[tuple[int, int], ...] = ()
    contradicting: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    shared: tuple[Shared, ...] = ()
    leaks: tuple[tuple[str, int], ...] = ()
    follows: tuple[str, int, float] | None = None
    overlapping: tuple[tuple[str, int, int], ...] = ()
    copied: bool = False

    @property
    def repeats_by_nature(self) -> bool:
        """Whether samples are of few kinds, as those of tables of a few categories: then equal ones are no sign of anything."""
        return self.distinct < 0.5 * self.looked


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer, or one operation, of the model.

    Args:
        name: Its own.
        kind: Its class.
        reads: Names of those whose outputs it takes.
        config: Its arguments, as far as they are plain data.
        activation: Name of its activation; "" if it has none.
        before: Shape of its input, without the batch.
        shape: Shape of its output, without the batch.
        parameters: How many numbers it has.
        trained: How many of these are trained.
        fan_in: Products that are summed for one value of its output; 0 if it has no kernel.
        equal: The value that its whole kernel has; None if values differ.
        initializer: Class of what makes its kernel.
        spread: Standard deviation of what makes its kernel, if that was given as a number.
        penalty: The largest factor of L1 or L2; 0 for none.
        precision: Type that it computes in.
        untouched: Whether it is frozen with a kernel as its initializer draws it, and biases of 0; of a Normalization, whether it was never adapted.
    """

    name: str
    kind: str
    reads: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    activation: str = ""
    before: tuple[int | None, ...] = ()
    shape: tuple[int | None, ...] = ()
    parameters: int = 0
    trained: int = 0
    fan_in: int = 0
    equal: float | None = None
    initializer: str = ""
    spread: float | None = None
    penalty: float = 0.0
    precision: str = "float32"
    untouched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """One output of the model, with what it is compared to.

    Args:
        name: Name of the output.
        layer: Name of the layer that makes it, behind which nothing changes values.
        shape: Of one sample.
        activation: What made its values: ``"linear"``, ``"softmax"`` and so on; "" if that is not known.
        loss: ``"cce"``, ``"sce"``, ``"bce"``, ``"mse"``, ``"mae"``, ``"huber"``, ``"kld"``, ``"hinge"``, ...; ``"own"`` for the user's; "" for none.
        logits: Whether the loss takes what was not normalized.
        metrics: Their names.
        cuts: Metrics that take an output above a number for a yes, and that number.
        target: Name of the training array that it is compared with; "" for none.
    """

    name: str = "output"
    layer: str = "output"
    shape: tuple[int | None, ...] = (10,)
    activation: str = ""
    loss: str = ""
    logits: bool = False
    metrics: tuple[str, ...] = ()
    cuts: tuple[tuple[str, float], ...] = ()
    target: str = ""

    @property
    def units(self) -> int:
        """How many values it has for each place of a sample."""
        return (self.shape[-1] or 0) if self.shape else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What steps the weights.

    Args:
        kind: Its class; of one that scales the loss, that of the one inside.
        rate: Learning rate at first; at its highest, with a warm-up.
        schedule: Class of the schedule; "" if the rate is fixed.
        steps: After how many steps the schedule has done all; None if it never has.
        fades: After how many steps one that only comes nearer to 0 is below a hundredth; None of others.
        scales_loss: Whether the loss is scaled for float16.
        keeps: Numbers that it keeps for each that is trained.
        clip: The smallest of its limits on gradients; None for none.
        decay: Weight decay.
        momentum: Share of the step before that goes into a step; 0 of what has none.
    """

    kind: str = "Adam"
    rate: float = 0.001
    schedule: str = ""
    steps: int | None = None
    fades: int | None = None
    scales_loss: bool = False
    keeps: int = 2
    clip: float | None = None
    decay: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFacts:
    """All that rules look at. What is not known is left at its default, and rules that need it are silent.

    Args:
        app: Name of the class.
        samples: Training samples.
        arrays: Each array of the data.
        rows: What comparing samples has shown.
        layers: The model's, in the order in which they compute.
        inputs: Name, shape of a sample and type of each input.
        heads: The model's outputs.
        optimizer: None if it has none.
        settings: Settings of the run by name, as they are used.
        workers: How many there are; None if that is not known.
        callbacks: What is wrong with callbacks, as sentences; those of the master.
        worker_callbacks: The same of those on workers.
        own: What the user has written in the place of Keras's or DDLF's own: ``"train"``, ``"step"``, ``"loss"``.
        left_behind: What the model keeps and no slot takes along, as sentences.
        from_files: Whether training data is read from files.
        memory: Of this machine, in bytes; None if that is not known.
        seen: What other levels have seen, by name: what a batch has shown, what a second process has made.
        records: Records of the run so far.
    """

    app: str = "App"
    samples: int = 1000
    arrays: tuple[ArrayFacts, ...] = ()
    rows: SampleFacts = field(default_factory=SampleFacts)
    layers: tuple[LayerFacts, ...] = ()
    inputs: tuple[tuple[str, tuple[int | None, ...], str], ...] = ()
    heads: tuple[OutputFacts, ...] = ()
    optimizer: OptimizerFacts | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    callbacks: tuple[str, ...] = ()
    worker_callbacks: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    left_behind: tuple[str, ...] = ()
    from_files: bool = False
    memory: int | None = None
    seen: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[RoundRecord] = ()

    def of(self, letter: str, part: str | None = None) -> Iterator[ArrayFacts]:
        """Arrays of a letter, of one part or all."""
        yield from (one for one in self.arrays if one.letter == letter and part in (None, one.part))

    def array(self, name: str) -> ArrayFacts | None:
        """The array of that name."""
        return next((one for one in self.arrays if one.name == name), None)

    def layer(self, name: str) -> LayerFacts | None:
        """The layer of that name."""
        return next((one for one in self.layers if one.name == name), None)

    def readers(self, name: str) -> list[LayerFacts]:
        """Layers that take the output of this one."""
        return [one for one in self.layers if name in one.reads]

    @property
    def steps(self) -> int:
        """Batches that one process makes in the run."""
        return self.steps_of(1)

    def steps_of(self, slots: int) -> int:
        """Batches that a slot makes in the run, of so many."""
        epochs = int(self.settings.get("master_epochs", 1))  # those of the whole run, however many a round has
        return epochs * max(
            1, math.ceil(math.ceil(self.samples / slots) / max(1, int(self.settings.get("batch_size", 32))))
        )

    @property
    def steps_an_epoch(self) -> int:
        """Batches that one process makes in an epoch."""
        return max(1, -(-self.samples // max(1, int(self.settings.get("batch_size", 32)))))

    @property
    def slots(self) -> int:
        """K."""
        return int(self.settings.get("slots") or self.workers or 1)

    @property
    def weights_scale(self) -> bool:
        """Whether something in the model brings inputs of any scale to a usual one, or they are numbers of tokens."""
        return any(one.kind in NORMALIZING for one in self.layers)


NORMALIZING = frozenset(
    {
        "Rescaling",
        "Normalization",
        "BatchNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "UnitNormalization",
    }
    | {"RMSNormalization", "SpectralNormalization", "Embedding", "Discretization", "Hashing", "CategoryEncoding"}
    | {"TextVectorization", "StringLookup", "IntegerLookup", "MelSpectrogram", "STFTSpectrogram"}
)
"""Layers behind which the scale of what came in is no more what it was."""
WEIGHTED = frozenset(
    {"Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"}
    | {"SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D"}
)
"""Layers that sum products with a kernel."""
DROPOUT = frozenset(
    {"Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout", "GaussianDropout"}
)
"""Layers that set random values to 0."""
