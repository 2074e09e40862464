"""Optimizers, schedules and penalties of Keras 3.15 by name, with their arguments. Pure: Keras itself is not asked."""

from __future__ import annotations

from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Call, Items, Value

_OF_ALL = (
    "learning_rate weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum ema_overwrite_frequency loss_scale_factor "
    "gradient_accumulation_steps name"
)
_OWN = {
    "Adadelta": "rho epsilon",
    "Adafactor": "beta_2_decay epsilon_1 epsilon_2 clip_threshold relative_step",
    "Adagrad": "initial_accumulator_value epsilon",
    "Adam": "beta_1 beta_2 epsilon amsgrad",
    "AdamW": "beta_1 beta_2 epsilon amsgrad",
    "Adamax": "beta_1 beta_2 epsilon",
    "Ftrl": "learning_rate_power initial_accumulator_value l1_regularization_strength l2_regularization_strength "
    "l2_shrinkage_regularization_strength beta",
    "Lion": "beta_1 beta_2",
    "Muon": "adam_beta_1 adam_beta_2 adam_weight_decay epsilon exclude_layers exclude_embeddings muon_a muon_b muon_c adam_lr_ratio momentum "
    "ns_steps nesterov rms_rate",
    "Nadam": "beta_1 beta_2 epsilon",
    "RMSprop": "rho momentum epsilon centered",
    "Rlion": "beta_1 beta_2 slope",
    "SGD": "momentum nesterov",
    "ScheduleFreeAdamW": "beta_1 beta_2 epsilon warmup_steps",
}
OPTIMIZERS = {name: (*own.split(), *_OF_ALL.split()) for name, own in _OWN.items()} | {
    "LossScaleOptimizer": ("inner_optimizer", "initial_scale", "dynamic_growth_steps", *_OF_ALL.split()[1:])
}
SCHEDULES = {
    "CosineDecay": ("initial_learning_rate", "decay_steps", "alpha", "name", "warmup_target", "warmup_steps"),
    "CosineDecayRestarts": ("initial_learning_rate", "first_decay_steps", "t_mul", "m_mul", "alpha", "name"),
    "ExponentialDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase", "name"),
    "InverseTimeDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase", "name"),
    "PiecewiseConstantDecay": ("boundaries", "values", "name"),
    "PolynomialDecay": ("initial_learning_rate", "decay_steps", "end_learning_rate", "power", "cycle", "name"),
}
PENALTIES = {"L1": ("l1",), "L2": ("l2",), "L1L2": ("l1", "l2"), "OrthogonalRegularizer": ("factor", "mode")}


def check_arguments(value: Value, problems: Problems, *, inner: bool = False) -> None:
    """Look at the names of arguments of an optimizer, a penalty or a layer that scales, and of what stands in its brackets.

    Args:
        value: What is written.
        problems: Is told what is wrong.
        inner: Whether it is an argument itself.
    """
    if isinstance(value, Items):
        for each in value.values:
            check_arguments(each, problems, inner=inner)
    if not isinstance(value, Call):
        return
    layers = keras_layers.arguments()
    known = OPTIMIZERS | SCHEDULES | PENALTIES
    if value.name in known:
        names = known[value.name]
    elif value.name in layers and not inner:
        names = (*layers[value.name], *keras_layers.COMMON, "name")
    else:
        problems.add(value.at, f"Keras has no {value.name!r} that could stand here{problems.near(value.name, known)}")
        return
    for arg in value.args:
        if arg.key not in names:
            meant = problems.near(arg.key, names) or f"; it has {', '.join(names)}"
            problems.add(arg.at, f"{value.name} has no argument {arg.key!r}{meant}")
        else:
            check_arguments(arg.value, problems, inner=True)
