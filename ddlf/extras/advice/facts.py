"""The facts of an app before it trains: its arrays, its model, its settings. Pure data, so that rules need neither arrays nor Keras."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddlf.events.record import RoundRecord

USUAL_CUT = 0.5
"""The default threshold of metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFacts:
    """One array of an app's data.

    Args:
        name: Its name in code, ``x_train['left']``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        letter: ``"x"``, ``"y"`` or ``"w"``.
        shape: Its shape. The first axis is the samples.
        dtype: Its dtype's name in NumPy; the class of another object.
        bad: Number of values that are NaN or infinite.
        bad_rows: Some samples that have such values.
        low: Least finite value.
        high: Largest finite value.
        std: Standard deviation of finite values.
        whole: Whether all values are whole numbers.
        constant: Numbers of constant features, if samples are rows of features.
        scales: Least and largest standard deviation of features that are not mostly one value; 0, 0 if there is none.
        loudest: Largest root mean square of a feature.
        padded: Share of samples that end with zeros, for rows of integers.
        pierced: Share of samples with zeros between other numbers, for rows of integers.
        commonest: The most frequent number and its share of the numbers other than 0, for rows of integers; else None.
        labels: Facts of labels; None for other arrays.
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
        """Return the shape of one sample."""
        return self.shape[1:]

    @property
    def has_numbers(self) -> bool:
        """Return whether it holds numbers, not text or objects."""
        return self.dtype.startswith(("float", "int", "uint", "bool", "bfloat", "complex"))

    @property
    def is_numpy(self) -> bool:
        """Return whether it is a NumPy array: for other objects, ``dtype`` is their class."""
        others = ("object", "<", ">", "|", "=", "datetime64", "timedelta64", "void", "StringDType")
        return self.has_numbers or self.dtype.startswith(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFacts:
    """Facts of an array of labels.

    Args:
        kind: ``"numbers"`` of classes, ``"one_hot"`` rows, ``"shares"`` (rows with the sum 1), ``"many_hot"`` rows of zeros and ones, ``"real"``.
        counts: Number of samples of each class; for ``numbers`` and ``one_hot`` only.
        sums: Least and largest sum of a row; 0, 0 without rows.
        is_sorted: Whether the samples of each class are consecutive.
    """

    kind: str = "real"
    counts: Mapping[int, int] = field(default_factory=dict)
    sums: tuple[float, float] = (0.0, 0.0)
    is_sorted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Training samples that are also in another part.

    Args:
        part: ``"val"`` or ``"test"``.
        count: Number of these samples.
        of: Number of examined samples of that part.
        pairs: Some of them: number in training and number in that part.
    """

    part: str
    count: int
    of: int
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """The result of comparing samples.

    Args:
        looked: Number of compared training samples.
        distinct: Number of different ones.
        doubled: Some pairs of equal training samples.
        contradicting: Number of training samples that equal a sample with another label.
        pairs: Some of these pairs.
        shared: Training samples in other parts.
        leaks: Features that reveal the label: name of the array and number of the feature.
        follows: The only feature that follows a real target: name, number and correlation; None if there is none.
        overlapping: Windows of other parts that are training windows moved by one step: part, their number, number of examined windows.
        copied: Whether the labels are the inputs.
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
        """Return whether most samples repeat, as in tables of a few categories: then equal samples mean nothing."""
        return self.distinct < 0.5 * self.looked


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer or operation of the model.

    Args:
        name: Its name.
        kind: Its class.
        reads: Names of the layers whose outputs it takes.
        config: Its arguments that are plain data.
        activation: Name of its activation; "" if it has none.
        before: Shape of its input, without the batch.
        shape: Shape of its output, without the batch.
        parameters: Number of its weights.
        trained: Number of its trainable weights.
        fan_in: Number of products in one value of its output; 0 without a kernel.
        equal: The value of its whole kernel; None if values differ.
        initializer: Class of its kernel's initializer.
        spread: Standard deviation of that initializer, if it was given as a number.
        penalty: Largest factor of its L1 or L2 penalties; 0 without any.
        precision: Type of its computations.
        untouched: Whether it is frozen with initial weights, or is a Normalization that was never adapted.
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
    """One output of the model with its loss and target.

    Args:
        name: Name of the output.
        layer: Name of the last layer that changes its values.
        shape: Shape of one sample.
        activation: Its activation: ``"linear"``, ``"softmax"`` and so on; "" if it is unknown.
        loss: ``"cce"``, ``"sce"``, ``"bce"``, ``"mse"``, ``"mae"``, ``"huber"``, ``"kld"``, ``"hinge"``, ...; ``"own"`` for the user's; "" for none.
        logits: Whether the loss takes logits.
        metrics: Names of its metrics.
        cuts: Metrics with a threshold, and the threshold.
        target: Name of the training array with its labels; "" for none.
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
        """Return the number of values at each position of a sample."""
        return (self.shape[-1] or 0) if self.shape else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The optimizer of the model.

    Args:
        kind: Its class; that of the inner optimizer if it scales the loss.
        rate: First learning rate; the highest one with a warm-up.
        schedule: Class of the schedule; "" if the rate is fixed.
        steps: Number of steps of the schedule; None if it never ends.
        fades: Steps until a schedule that never ends is below a hundredth of its first rate; None for others.
        scales_loss: Whether the loss is scaled for float16.
        keeps: Numbers of state for each trainable weight.
        clip: Its smallest limit on gradients; None without a limit.
        decay: Weight decay.
        momentum: Momentum; 0 without one.
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
    """All facts of an app. Unknown facts keep their defaults, and rules that need them find nothing.

    Args:
        app: Name of its class.
        samples: Number of training samples.
        arrays: Arrays of the data.
        rows: The result of comparing samples.
        layers: Layers of the model in the order of computation.
        inputs: Name, sample shape and type of each input of the model.
        heads: Outputs of the model.
        optimizer: None if it has none.
        settings: Effective settings of the run by name.
        workers: Number of workers; None if it is unknown.
        callbacks: Sentences about mistakes in callbacks of the master.
        worker_callbacks: Sentences about mistakes in callbacks of workers.
        own: Parts that the user overrides: ``"train"``, ``"step"``, ``"loss"``.
        left_behind: Sentences about state of the model that does not travel with a slot.
        from_files: Whether training data is read from files.
        memory: Memory of this machine in bytes; None if it is unknown.
        seen: Observations of other levels by name: those of a batch, of a second process.
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
        """Yield the arrays of a letter, of one part or all."""
        yield from (one for one in self.arrays if one.letter == letter and part in (None, one.part))

    def array(self, name: str) -> ArrayFacts | None:
        """Return the array with a name."""
        return next((one for one in self.arrays if one.name == name), None)

    def layer(self, name: str) -> LayerFacts | None:
        """Return the layer with a name."""
        return next((one for one in self.layers if one.name == name), None)

    def readers(self, name: str) -> list[LayerFacts]:
        """Return the layers that take the output of a layer."""
        return [one for one in self.layers if name in one.reads]

    @property
    def steps(self) -> int:
        """Return the number of steps of the run in one process."""
        return self.steps_of(1)

    def steps_of(self, slots: int) -> int:
        """Return the number of steps of one of several slots in the run."""
        epochs = int(self.settings.get("master_epochs", 1))  # those of the whole run, however many a round has
        return epochs * max(
            1, math.ceil(math.ceil(self.samples / slots) / max(1, int(self.settings.get("batch_size", 32))))
        )

    @property
    def steps_an_epoch(self) -> int:
        """Return the number of steps of an epoch in one process."""
        return max(1, -(-self.samples // max(1, int(self.settings.get("batch_size", 32)))))

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return int(self.settings.get("slots") or self.workers or 1)

    @property
    def weights_scale(self) -> bool:
        """Return whether a layer scales the inputs, or they are tokens."""
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
"""Layers that change the scale of their input."""
WEIGHTED = frozenset(
    {"Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"}
    | {"SeparableConv1D", "SeparableConv2D", "DepthwiseConv1D", "DepthwiseConv2D"}
)
"""Layers with a kernel."""
DROPOUT = frozenset(
    {"Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout", "GaussianDropout"}
)
"""Layers that set random values to 0."""
