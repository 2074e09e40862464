"""Layers, losses, metrics, optimizers and learning rates that the browser's engine computes as Keras does. Runs on the server.

Each row is tested against Keras. A model with anything else is refused by name. The page of the documentation comes
from these tables, and `engine` has the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listed:
    """One class of Keras that the engine has.

    Attributes:
        name: Name of the class.
        kind: Name in the engine.
        takes: Arguments that the engine computes with.
        free: Arguments that do not change a result.
        only: Arguments that may have one value only.
        adapt: Changes the arguments to the form that the engine takes.
    """

    name: str
    kind: str
    takes: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[Config], Config] = dict


def _rows_of_same_kind(*names: str, **arguments: Any) -> dict[str, Listed]:
    return {name: Listed(name, name, **arguments) for name in names}


def _rows_of_kinds(kinds: Mapping[str, str], **arguments: Any) -> dict[str, Listed]:
    return {name: Listed(name, kind, **arguments) for name, kind in kinds.items()}


def _pairs(key: str) -> Callable[[Config], Config]:
    """Return an adapter for a border that is one pair in one dimension, and a pair of each dimension in more."""

    def adapt(config: Config) -> Config:
        border = config[key]
        return {**config, key: border if isinstance(border[0], list | tuple) else [border]}

    return adapt


def _listed_size(config: Config) -> Config:
    size = config["size"]
    return {**config, "size": list(size) if isinstance(size, list | tuple) else [size]}


def _two_axes(config: Config) -> Config:
    axes = config["axes"]
    return {**config, "axes": list(axes) if isinstance(axes, list | tuple) else [axes, axes]}


LAST = {"data_format": "channels_last"}
LORA = {"lora_rank": None, "lora_alpha": None, "quantization_config": None}
CONVOLUTION = ("kernel_size", "strides", "padding", "dilation_rate", "activation")
NORMALIZED = ("center", "scale")
STEPS = ("units", "activation", "return_sequences", "return_state", "go_backwards")
STEPS_ONLY = {"stateful": False, "dropout": 0.0, "recurrent_dropout": 0.0}
STEPS_FREE = ("use_bias", "unroll", "seed", "implementation", "use_cudnn", "zero_output_for_mask")

LAYERS: dict[str, Listed] = {
    **_rows_of_same_kind("Dense", takes=("activation",), free=("units", "use_bias"), only=LORA),
    **_rows_of_same_kind(
        "Embedding", free=("input_dim", "output_dim", "input_length"), only={"mask_zero": False, **LORA}
    ),
    **_rows_of_same_kind("Identity"),
    **_rows_of_same_kind("Activation", takes=("activation",)),
    **_rows_of_same_kind("ReLU", takes=("max_value", "negative_slope", "threshold")),
    **_rows_of_same_kind("LeakyReLU", takes=("negative_slope",)),
    **_rows_of_same_kind("ELU", takes=("alpha",)),
    **_rows_of_same_kind("PReLU", free=("shared_axes",)),
    **_rows_of_same_kind("Softmax", takes=("axis",)),
    **_rows_of_same_kind("Rescaling", takes=("scale", "offset")),
    **_rows_of_same_kind(
        *("Conv1D", "Conv2D", "Conv3D"),
        takes=(*CONVOLUTION, "groups"),
        free=("rank", "filters", "use_bias"),
        only=LAST | LORA,
    ),
    **_rows_of_same_kind(
        *("DepthwiseConv1D", "DepthwiseConv2D"),
        takes=CONVOLUTION,
        free=("rank", "depth_multiplier", "use_bias"),
        only=LAST,
    ),
    **_rows_of_same_kind(
        *("SeparableConv1D", "SeparableConv2D"),
        takes=CONVOLUTION,
        free=("rank", "depth_multiplier", "filters", "use_bias"),
        only=LAST,
    ),
    **_rows_of_same_kind(
        *("Conv1DTranspose", "Conv2DTranspose"),
        takes=("kernel_size", "strides", "padding", "activation"),
        free=("rank", "filters", "use_bias"),
        only={**LAST, "output_padding": None, "dilation_rate": 1},
    ),
    **_rows_of_same_kind(
        *("MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D"),
        takes=("pool_size", "strides", "padding"),
        only=LAST,
    ),
    **_rows_of_same_kind(
        *("GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D"),
        *("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"),
        takes=("keepdims",),
        only=LAST,
    ),
    **_rows_of_same_kind("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"),
    **_rows_of_same_kind("Concatenate", takes=("axis",)),
    **_rows_of_same_kind("Dot", takes=("axes", "normalize"), adapt=_two_axes),
    **_rows_of_same_kind("Flatten", only=LAST),
    **_rows_of_same_kind("Reshape", takes=("target_shape",)),
    **_rows_of_same_kind("Permute", takes=("dims",)),
    **_rows_of_same_kind("RepeatVector", takes=("n",)),
    **_rows_of_same_kind(
        "ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D", takes=("padding",), only=LAST, adapt=_pairs("padding")
    ),
    **_rows_of_same_kind(
        "Cropping1D", "Cropping2D", "Cropping3D", takes=("cropping",), only=LAST, adapt=_pairs("cropping")
    ),
    **_rows_of_same_kind(
        *("UpSampling1D", "UpSampling2D", "UpSampling3D"),
        takes=("size",),
        only={**LAST, "interpolation": "nearest"},
        adapt=_listed_size,
    ),
    **_rows_of_same_kind(
        "BatchNormalization",
        takes=("axis", "momentum", "epsilon"),
        free=(*NORMALIZED, "renorm_clipping", "renorm_momentum"),
        only={"synchronized": False, "renorm": False},
    ),
    **_rows_of_same_kind("LayerNormalization", takes=("axis", "epsilon"), free=NORMALIZED, only={"rms_scaling": False}),
    **_rows_of_same_kind("GroupNormalization", takes=("groups", "axis", "epsilon"), free=NORMALIZED),
    **_rows_of_same_kind("RMSNormalization", takes=("axis", "epsilon")),
    **_rows_of_same_kind("UnitNormalization", takes=("axis",)),
    **_rows_of_same_kind("Dropout", takes=("rate", "noise_shape"), free=("seed",)),
    **_rows_of_same_kind(
        "SpatialDropout1D",
        "SpatialDropout2D",
        "SpatialDropout3D",
        takes=("rate",),
        free=("seed", "noise_shape"),
        only=LAST,
    ),
    **_rows_of_same_kind("SimpleRNN", takes=STEPS, free=STEPS_FREE, only=STEPS_ONLY),
    **_rows_of_same_kind(
        "LSTM", takes=(*STEPS, "recurrent_activation"), free=(*STEPS_FREE, "unit_forget_bias"), only=STEPS_ONLY
    ),
    **_rows_of_same_kind(
        "GRU", takes=(*STEPS, "recurrent_activation", "reset_after"), free=STEPS_FREE, only=STEPS_ONLY
    ),
    **_rows_of_same_kind("Bidirectional", takes=("layer", "backward_layer", "merge_mode")),
    **_rows_of_same_kind(
        "MultiHeadAttention",
        takes=("key_dim",),
        free=("num_heads", "value_dim", "use_bias", "output_shape", "attention_axes", "flash_attention", "seed"),
        only={"dropout": 0.0, "sliding_window": None, "use_gate": False},
    ),
}

ACTIVATIONS = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("sigmoid", "hard_sigmoid", "hard_silu", "log_sigmoid", "sparse_sigmoid", "softmax", "log_softmax"),
    *("softplus", "softsign", "squareplus", "sparse_plus", "tanh", "hard_tanh", "tanh_shrink", "soft_shrink"),
    *("hard_shrink", "exponential"),
)

LOSSES: dict[str, Listed] = {
    **_rows_of_kinds(
        {
            "MeanSquaredError": "mean_squared_error",
            "MeanAbsoluteError": "mean_absolute_error",
            "MeanAbsolutePercentageError": "mean_absolute_percentage_error",
            "MeanSquaredLogarithmicError": "mean_squared_logarithmic_error",
            "LogCosh": "log_cosh",
            "KLDivergence": "kl_divergence",
            "Poisson": "poisson",
            "Hinge": "hinge",
            "SquaredHinge": "squared_hinge",
            "CategoricalHinge": "categorical_hinge",
        }
    ),
    **_rows_of_kinds({"Huber": "huber"}, takes=("delta",)),
    **_rows_of_kinds({"CosineSimilarity": "cosine_similarity"}, only={"axis": -1}),
    **_rows_of_kinds(
        {"CategoricalCrossentropy": "categorical_crossentropy"},
        takes=("from_logits", "label_smoothing"),
        only={"axis": -1},
    ),
    **_rows_of_kinds(
        {"BinaryCrossentropy": "binary_crossentropy"}, takes=("from_logits", "label_smoothing"), only={"axis": -1}
    ),
    **_rows_of_kinds(
        {"SparseCategoricalCrossentropy": "sparse_categorical_crossentropy"},
        takes=("from_logits",),
        only={"ignore_class": None, "axis": -1},
    ),
}
REDUCTIONS = {"sum_over_batch_size": "mean", "mean": "mean", "mean_with_sample_weight": "mean", "sum": "sum"}

METRICS: dict[str, Listed] = {
    **_rows_of_kinds(
        {
            "Accuracy": "accuracy",
            "CategoricalAccuracy": "categorical_accuracy",
            "SparseCategoricalAccuracy": "sparse_categorical_accuracy",
            "MeanSquaredError": "mean_squared_error",
            "RootMeanSquaredError": "root_mean_squared_error",
            "MeanAbsoluteError": "mean_absolute_error",
            "MeanAbsolutePercentageError": "mean_absolute_percentage_error",
            "MeanSquaredLogarithmicError": "mean_squared_logarithmic_error",
            "LogCoshError": "log_cosh",
            "KLDivergence": "kl_divergence",
            "Poisson": "poisson",
            "Hinge": "hinge",
            "SquaredHinge": "squared_hinge",
            "CategoricalHinge": "categorical_hinge",
        }
    ),
    **_rows_of_kinds({"BinaryAccuracy": "binary_accuracy"}, takes=("threshold",)),
    **_rows_of_kinds({"CosineSimilarity": "cosine_similarity"}, only={"axis": -1}),
    **_rows_of_kinds(
        {"CategoricalCrossentropy": "categorical_crossentropy"},
        takes=("from_logits", "label_smoothing"),
        only={"axis": -1},
    ),
    **_rows_of_kinds({"BinaryCrossentropy": "binary_crossentropy"}, takes=("from_logits", "label_smoothing")),
    **_rows_of_kinds(
        {"SparseCategoricalCrossentropy": "sparse_categorical_crossentropy"},
        takes=("from_logits",),
        only={"ignore_class": None, "axis": -1},
    ),
}
BY_SHAPE = ("accuracy", "acc")
"""Keras chooses a metric by the shapes of labels and predictions if it has one of these names."""

CLIPS = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue")
OPTIMIZER_FREE = ("ema_momentum", "ema_overwrite_frequency", "learning_rate")
OPTIMIZER_ONLY = {"use_ema": False, "loss_scale_factor": None, "gradient_accumulation_steps": None}


def _optimizer(name: str, *takes: str) -> dict[str, Listed]:
    return _rows_of_same_kind(name, takes=(*takes, *CLIPS), free=OPTIMIZER_FREE, only=OPTIMIZER_ONLY)


OPTIMIZERS: dict[str, Listed] = {
    **_optimizer("SGD", "momentum", "nesterov"),
    **_optimizer("RMSprop", "rho", "momentum", "epsilon", "centered"),
    **_optimizer("Adam", "beta_1", "beta_2", "epsilon", "amsgrad"),
    **_optimizer("AdamW", "beta_1", "beta_2", "epsilon", "amsgrad"),
    **_optimizer("Adagrad", "initial_accumulator_value", "epsilon"),
    **_optimizer("Adadelta", "rho", "epsilon"),
    **_optimizer("Adamax", "beta_1", "beta_2", "epsilon"),
    **_optimizer("Nadam", "beta_1", "beta_2", "epsilon"),
    **_optimizer("Lion", "beta_1", "beta_2"),
}

RATES: dict[str, Listed] = {
    **_rows_of_same_kind(
        "ExponentialDecay",
        "InverseTimeDecay",
        takes=("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    ),
    **_rows_of_same_kind("PiecewiseConstantDecay", takes=("boundaries", "values")),
    **_rows_of_same_kind(
        "PolynomialDecay", takes=("initial_learning_rate", "decay_steps", "end_learning_rate", "power", "cycle")
    ),
    **_rows_of_same_kind(
        "CosineDecay", takes=("initial_learning_rate", "decay_steps", "alpha", "warmup_target", "warmup_steps")
    ),
}
