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
        name: The array's name in code, such as ``x_train['left']``.
        part: ``"train"``, ``"val"`` or ``"test"``.
        letter: ``"x"``, ``"y"`` or ``"w"``.
        shape: Its shape. The first axis has the samples.
        dtype: The name of its NumPy dtype; for any other object, the name of the object's class.
        non_finite: Number of values that are NaN or infinite.
        non_finite_rows: The numbers of some samples with NaN or infinite values.
        low: Smallest finite value.
        high: Largest finite value.
        std: Standard deviation of the finite values.
        is_whole: Whether all values are whole numbers.
        constant: The numbers of constant features, if samples are rows of features.
        scales: Smallest and largest standard deviation of a feature. Features with mostly one value do not count. 0, 0
            without such features.
        loudest: Largest root mean square of a feature.
        padded: For rows of integers: the share of samples that end with zeros.
        pierced: For rows of integers: the share of samples with zeros between other numbers.
        commonest: For rows of integers: the most frequent number except 0, and its share of the numbers except 0; else
            None.
        labels: The facts of labels; None for an array of inputs or sample weights.
    """

    name: str
    part: str = "train"
    letter: str = "x"
    shape: tuple[int, ...] = (100, 4)
    dtype: str = "float32"
    non_finite: int = 0
    non_finite_rows: tuple[int, ...] = ()
    low: float = -1.0
    high: float = 1.0
    std: float = 1.0
    is_whole: bool = False
    constant: tuple[int, ...] = ()
    scales: tuple[float, float] = (1.0, 1.0)
    loudest: float = 1.0
    padded: float = 0.0
    pierced: float = 0.0
    commonest: tuple[int, float] | None = None
    labels: LabelFacts | None = None

    @property
    def sample(self) -> tuple[int, ...]:
        """Return the shape of one sample of this array."""
        return self.shape[1:]

    @property
    def has_numbers(self) -> bool:
        """Return whether the array contains numbers, not text or objects."""
        return self.dtype.startswith(("float", "int", "uint", "bool", "bfloat", "complex"))

    @property
    def is_numpy(self) -> bool:
        """Return whether the data is a NumPy array. For other objects, ``dtype`` is their class."""
        numpy_types = ("object", "<", ">", "|", "=", "datetime64", "timedelta64", "void", "StringDType")
        return self.has_numbers or self.dtype.startswith(numpy_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFacts:
    """Facts of an array of labels.

    Args:
        kind: ``"numbers"`` of classes, ``"one_hot"`` rows, ``"shares"`` (rows with the sum 1), ``"many_hot"`` rows of zeros and ones, ``"real"``.
        counts: Number of samples of each class, for the kinds ``numbers`` and ``one_hot``.
        sums: Smallest and largest sum of a row; 0, 0 if labels are not rows.
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
        part: The other part, ``"val"`` or ``"test"``.
        count: Number of shared samples.
        of: Number of examined samples of the other part.
        pairs: Some shared samples: the number in training, and the number in the other part.
    """

    part: str
    count: int
    of: int
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """The result of comparing samples.

    Args:
        examined: Number of compared training samples.
        distinct: Number of different samples among them.
        doubled: Some pairs of equal training samples.
        contradicting: Number of training samples that equal a sample with another label.
        pairs: Some pairs of equal training samples with different labels.
        shared: The training samples that are also in other parts.
        leaks: Features that reveal the label: the array's name and the feature's number.
        linear_feature: The only feature that follows a real-valued target: the array's name, the feature's number and
            the correlation; else None.
        overlapping: For each other part: its name, the number of its windows that equal a training window shifted by
            one step, and the number of examined windows.
        copied: Whether the labels are the inputs.
    """

    examined: int = 0
    distinct: int = 0
    doubled: tuple[tuple[int, int], ...] = ()
    contradicting: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    shared: tuple[Shared, ...] = ()
    leaks: tuple[tuple[str, int], ...] = ()
    linear_feature: tuple[str, int, float] | None = None
    overlapping: tuple[tuple[str, int, int], ...] = ()
    copied: bool = False

    @property
    def repeats_by_nature(self) -> bool:
        """Return whether most samples repeat, like in tables of a few categories. Equal samples are not a mistake then."""
        return self.distinct < 0.5 * self.examined


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer or operation of the model.

    Args:
        name: The layer's name.
        kind: The name of its class.
        reads: The names of the layers that it reads.
        config: Its arguments with plain values.
        activation: Name of its activation; "" if it has none.
        input_shape: Shape of its input, without the batch axis.
        shape: Shape of its output, without the batch axis.
        parameters: Number of its weights.
        trained: Number of its trainable weights.
        fan_in: Number of products that one output value sums; 0 without a kernel.
        equal: The value of all its kernel's weights; None if they differ.
        initializer: Class of its kernel's initializer.
        spread: The initializer's standard deviation, if the user sets it to a number.
        penalty: Largest factor of its L1 or L2 penalties; 0 without any.
        precision: The type in which it computes.
        untouched: Whether it is frozen with initial weights, or is a Normalization that was never adapted.
    """

    name: str
    kind: str
    reads: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    activation: str = ""
    input_shape: tuple[int | None, ...] = ()
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
        loss: ``"cce"``, ``"sce"``, ``"bce"``, ``"mse"``, ``"mae"``, ``"huber"``, ``"kld"``, ``"hinge"``, ...; ``"own"``
            for the user's own loss; "" without a loss.
        logits: Whether the loss expects logits.
        metrics: Names of its metrics.
        cuts: The metrics with a threshold, each with its threshold.
        target: Name of the training array with its labels; "" without labels.
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
        """Return the number of values that this output has at each position of a sample, such as one for each class."""
        return (self.shape[-1] or 0) if self.shape else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The optimizer of the model.

    Args:
        kind: The name of its class. For a loss scaling optimizer, the class of the inner optimizer.
        rate: The first learning rate. With a warm-up, the highest one.
        schedule: The name of the schedule's class; "" if the rate is fixed.
        steps: Number of steps of the schedule; None if it never ends.
        fades: For a schedule that never ends: steps until the rate is below 1 % of its first value; else None.
        scales_loss: Whether the loss is scaled for float16.
        keeps: How many numbers of optimizer state it stores for each trainable weight.
        clip: The smallest limit on gradients; None without a limit.
        decay: The weight decay.
        momentum: The momentum; 0 without one.
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
    """All facts of an app. An unknown fact has its default value, and rules that need it report no finding.

    Args:
        app: The name of its class.
        samples: Number of training samples.
        arrays: The facts of each array.
        rows: The result of comparing samples.
        layers: Layers of the model in the order of computation.
        inputs: Name, sample shape and type of each input of the model.
        heads: The outputs of the model.
        optimizer: The optimizer of the model; None without one.
        settings: Effective settings of the run by name.
        workers: Number of workers; None if it is unknown.
        callbacks: Sentences about mistakes in callbacks of the master.
        worker_callbacks: Sentences about mistakes in callbacks of workers.
        custom: Parts that the user overrides: ``"train"``, ``"step"``, ``"loss"``.
        left_behind: Sentences about state of the model that a slot does not take to another worker.
        from_files: Whether training data is read from files.
        memory: Memory of this machine in bytes; None if it is unknown.
        observations: The observations of the levels ``"batch"`` and ``"cluster"`` by name.
        records: The records of the run so far.
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
    custom: frozenset[str] = frozenset()
    left_behind: tuple[str, ...] = ()
    from_files: bool = False
    memory: int | None = None
    observations: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[RoundRecord] = ()

    def arrays_of(self, letter: str, part: str | None = None) -> Iterator[ArrayFacts]:
        """Yield the arrays with a letter (``"x"``, ``"y"`` or ``"w"``), of one part or of all parts."""
        yield from (array for array in self.arrays if array.letter == letter and part in (None, array.part))

    def array(self, name: str) -> ArrayFacts | None:
        """Return the facts of the array with this name; None if there is none."""
        return next((array for array in self.arrays if array.name == name), None)

    def layer(self, name: str) -> LayerFacts | None:
        """Return the facts of the layer with this name; None if there is none."""
        return next((layer for layer in self.layers if layer.name == name), None)

    def readers(self, name: str) -> list[LayerFacts]:
        """Return the layers that read the output of a layer."""
        return [layer for layer in self.layers if name in layer.reads]

    @property
    def steps(self) -> int:
        """Return the number of steps of the run in one process."""
        return self.steps_of(1)

    def steps_of(self, slots: int) -> int:
        """Return the number of steps of one of several slots in the run."""
        epochs = int(self.settings.get("master_epochs", 1))  # the epochs of the whole run, not of a round
        return epochs * max(
            1, math.ceil(math.ceil(self.samples / slots) / max(1, int(self.settings.get("batch_size", 32))))
        )

    @property
    def steps_an_epoch(self) -> int:
        """Return the number of steps of an epoch in one process."""
        return max(1, -(-self.samples // max(1, int(self.settings.get("batch_size", 32)))))

    @property
    def slots(self) -> int:
        """Return the number of slots (parts of a round, each trained by one worker) of the planned run."""
        return int(self.settings.get("slots") or self.workers or 1)

    @property
    def weights_scale(self) -> bool:
        """Return whether the inputs need no scaling before training, because a layer scales them, or they are tokens."""
        return any(layer.kind in NORMALIZING for layer in self.layers)


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
