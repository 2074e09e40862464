"""Reads the block ``train`` of a model text, with its own keys and settings of a run. Does not import Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddlf.errors import ConfigError, NotationError
from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.blocks import plain
from ddlf.extras.text.language.model import Model, statements
from ddlf.extras.text.language.operators import LOSSES, loss_meant
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, String, Value, Word, walk
from ddlf.training.registry import SETTINGS

SETS = ("digits", "mnist", "cifar10", "iris")
"""The names of built-in data sets."""
ALIASES = {"batch": "batch_size", "epochs": "master_epochs"}
"""Short names of settings."""
IN_BRACKETS = {"learning_rate": ("learning_rate",), "clipping": ("clipnorm", "clipvalue", "global_clipnorm")}
"""Keys that may also stand in the brackets of an optimizer, and their names there."""
NOT_WRITTEN = ("callbacks", "worker_callbacks")
"""Settings whose values are Python objects, which a text cannot contain."""
SCALINGS = ("Normalization", "Rescaling")
INITIAL = (
    *("by_activation", "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform"),
    *("orthogonal", "random_normal", "random_uniform", "truncated_normal"),
)

OPTIMIZERS, SCHEDULES, PENALTIES = (
    keras_layers.training_objects(kind) for kind in ("optimizer", "schedule", "penalty")
)
"""The arguments of each class in Keras 3.15. ``ddlf model check`` does not import Keras."""
UNCERTAINTY = "uncertainty"
"""The value of ``loss_weights`` that lets the model learn how losses count."""

Check = Callable[[Value], str]
"""A check of a value. It returns the description of valid values, or nothing for a valid one."""


@dataclass(frozen=True)
class Train:
    """The content of a model text's block ``train``, which says how to train the model.

    Attributes:
        key_values: The values of the block's own keys.
        settings: The values of settings of a run, by their full names.
        at: The position of each key.
    """

    key_values: dict[str, Value] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)


def read_train(block: Mapping[str, Statement], problems: Problems) -> Train:
    """Check each key of a block ``train``.

    Args:
        block: The statements of the block, by key.
        problems: Collects the mistakes. The function raises no error.
    """
    train = Train()
    for key, statement in block.items():
        name = ALIASES.get(key, key)
        if name in train.at:
            problems.add(statement.property.at, f"train has {key!r} and {name!r}, which are the same: leave out one")
        elif key not in KEYS and (name not in SETTINGS or name in NOT_WRITTEN):
            _refuse_key(key, statement, problems)
        elif statement.items and (value := _one_value(key, statement, problems)) is not None:
            train.at[name] = value.at
            if key in KEYS:
                if requirement := KEYS[key](value):
                    problems.add(value.at, f"{key} must be {requirement}{_suggestion(key, value, problems)}")
                elif key in ("optimizer", "penalty", "scaling"):
                    check_arguments(value, problems)
                train.key_values[key] = value
            else:
                _take_setting(key, name, value, train, problems)
    _refuse_twice(train, problems)
    return train


def _refuse_twice(train: Train, problems: Problems) -> None:
    """Refuse a learning rate or clipping in several places, so that the model text is not ambiguous."""
    optimizer = train.key_values.get("optimizer")
    for key, names in IN_BRACKETS.items():
        value = train.key_values.get(key)
        if value is None or is_none(value) or not isinstance(optimizer, Call):
            continue
        if any(arg.key in names for arg in optimizer.args):
            problems.add(train.at[key], "the optimizer has one, too: leave out one of both")


def check_train(model: Model) -> Train:
    """Return the content of the block ``train`` of a model.

    Raises:
        NotationError: The block has mistakes.
    """
    problems = Problems(model.text, model.file)
    train = read_train(model.train, problems)
    if "initial" in train.key_values and not model.draws:
        problems.add(
            train.at["initial"],
            "initial has no effect: no operator has weights, and layers of Keras have their own, such as kernel_initializer=he_normal",
        )
    problems.check()
    return train


def read_key(key: str, text: str, origin: str) -> Train:
    """Read a training key that comes from outside the model text, such as an option of the command line. Return it as a
    block ``train``.

    Raises:
        ConfigError: The value is invalid; ``origin`` is its source.
    """
    _, parsed, problems = statements(f"train:{key} {text};", origin)
    train = read_train({statement.property.name: statement for statement in parsed.statements}, problems)
    try:
        problems.check()
    except NotationError as error:
        raise ConfigError(f"{origin}: {'; '.join(problem[2] for problem in error.problems)}") from None
    return train


def ignored_of(key_values: Mapping[str, Value]) -> float | None:
    """Return the label that the losses ignore; None if they ignore no label."""
    label = key_values.get("ignore")
    return label.value if isinstance(label, Number) else None


def clips(optimizer: Value | None) -> bool:
    """Return whether an argument in an optimizer's brackets clips gradients."""
    return any(arg.key in IN_BRACKETS["clipping"] for arg in _args(optimizer))


def has_own_rates(optimizer: Value | None) -> bool:
    """Return whether the optimizer in a model text sets its own learning rate schedule."""
    is_schedule_free = getattr(optimizer, "name", "").casefold() == "schedulefreeadamw"
    return is_schedule_free or any(
        arg.key == "learning_rate" and isinstance(arg.value, Call) for arg in _args(optimizer)
    )


def _args(value: Value | None) -> Iterator[Arg]:
    """Yield the arguments in the text of an optimizer, and of the optimizer inside it."""
    for arg in value.args if isinstance(value, Call) else ():
        yield arg
        yield from _args(arg.value) if arg.key == "inner_optimizer" else ()


def _refuse_key(key: str, statement: Statement, problems: Problems) -> None:
    if key in NOT_WRITTEN:
        problems.add(statement.property.at, f"{key} are objects of a program: a text cannot have them")
        return
    names = [*KEYS, *ALIASES, *(name for name in SETTINGS if name not in NOT_WRITTEN)]
    suggestion = (
        problems.suggestion(key, names) or f"; it has {', '.join([*KEYS, *ALIASES])}, and all settings of a run"
    )
    problems.add(statement.property.at, f"train has no key {key!r}{suggestion}")


def _one_value(key: str, statement: Statement, problems: Problems) -> Value | None:
    args = [arg for args in statement.items for arg in args]
    if len(args) > 1 or args[0].key:
        advice = ", which is a list in brackets: [one, other]" if key in ("metrics", "loss_weights") else ""
        problems.add(args[-1].at, f"{key!r} has one value, without a key{advice}")
        return None
    return args[0].value


def _take_setting(key: str, name: str, value: Value, train: Train, problems: Problems) -> None:
    if isinstance(value, Call):
        problems.add(value.at, f"{key} must be {SETTINGS[name].accepts}, and no layer")
        return
    plain_value = plain(value)
    if name == "class_weight" and isinstance(plain_value, list):
        plain_value = dict(enumerate(plain_value))
    try:
        SETTINGS[name].check(key, plain_value)
    except ConfigError as error:
        hint = f", {error.hint}" if error.hint else ""
        problems.add(value.at, f"{error.message}{hint}")
        return
    train.settings[name] = plain_value


def _suggestion(key: str, value: Value, problems: Problems) -> str:
    """Return the end of an error's sentence that suggests the most similar valid name."""
    name = value.name if isinstance(value, Word | Call) else ""
    if key == "loss":
        name = loss_meant(name)
    return problems.suggestion(name, NAMES[key]) if name and key in NAMES else ""


def check_arguments(value: Value, problems: Problems, *, inner: bool = False) -> None:
    """Check the names of the arguments of optimizers, penalties and layers that scale.

    Args:
        value: The value in the model text.
        problems: Collects the mistakes.
        inner: Whether the value is an argument of another one.
    """
    if isinstance(value, Items):
        for item in value.values:
            check_arguments(item, problems, inner=inner)
    if not isinstance(value, Call):
        return
    layers = keras_layers.arguments()
    parameters = OPTIMIZERS | SCHEDULES | PENALTIES
    if value.name in parameters:
        names = parameters[value.name]
    elif value.name in layers and not inner:
        names = (*layers[value.name], *keras_layers.COMMON, "name")
    else:
        problems.add(
            value.at, f"Keras has no {value.name!r} that could stand here{problems.suggestion(value.name, parameters)}"
        )
        return
    for arg in value.args:
        if arg.key not in names:
            suggestion = problems.suggestion(arg.key, names) or f"; it has {', '.join(names)}"
            problems.add(arg.at, f"{value.name} has no argument {arg.key!r}{suggestion}")
        else:
            check_arguments(arg.value, problems, inner=True)


# -- what values may be ---------------------------------------------------------------------------------------------------


def is_none(value: Value) -> bool:
    """Return whether a value is ``none``."""
    return isinstance(value, Word) and value.name in ("none", "None")


def _has_lambda(value: Value) -> bool:
    return any(isinstance(call, Call) and call.name == "Lambda" for call in walk(value))


def _object(requirement: str, names: tuple[str, ...], *, word: bool = False, none: bool = False) -> Check:
    """Return a function that checks a value: it must be a Keras class with arguments in brackets, such as
    ``Adam(0.001)``.

    With ``word``, the name alone is also valid, in upper or lower case.
    """

    def check(value: Value) -> str:
        is_valid = isinstance(value, Call) and value.name in names and all(arg.key for arg in value.args)
        folded = [name.casefold() for name in names]
        is_valid = is_valid or (word and isinstance(value, Word) and value.name.casefold() in folded)
        return "" if (is_valid and not _has_lambda(value)) or (none and is_none(value)) else requirement

    return check


def _number(requirement: str, fits: Callable[[float], bool], *, none: bool = True) -> Check:
    def check(value: Value) -> str:
        is_valid = isinstance(value, Number) and fits(value.value)
        return "" if is_valid or (none and is_none(value)) else requirement

    return check


def _word(requirement: str, names: tuple[str, ...]) -> Check:
    return lambda value: "" if isinstance(value, Word) and value.name in names else requirement


def _metrics(value: Value) -> str:
    metrics = value.values if isinstance(value, Items) else (value,)
    is_valid = all(isinstance(item, Word | Call | String) and not _has_lambda(item) for item in metrics)
    return "" if is_valid else "a metric of Keras, or a list of them: [accuracy, AUC()]"


def _scaling(value: Value) -> str:
    check_layer = _object(
        "none, Rescaling(scale=), Normalization(mean=, variance=), or a list of these for each input",
        SCALINGS,
        none=True,
    )
    layers = value.values if isinstance(value, Items) else (value,)
    return next((requirement for requirement in map(check_layer, layers) if requirement), "")


def _loss_weights(value: Value) -> str:
    weights = plain(value) if isinstance(value, Items) else []
    is_valid = bool(weights) and all(
        isinstance(item, int | float) and not isinstance(item, bool) and item >= 0 for item in weights
    )
    if isinstance(value, Word | Call) and value.name == UNCERTAINTY:
        args = value.args if isinstance(value, Call) else ()
        is_valid = all(arg.key and isinstance(arg.value, Number) and arg.value.value > 0 for arg in args)
    learned = f"{UNCERTAINTY}, {UNCERTAINTY}(one=2.3, other=230) with about the first losses"
    return (
        "" if is_valid or is_none(value) else f"none, {learned}, or a list with a number of 0 or more for each output"
    )


def _data(value: Value) -> str:
    is_valid = isinstance(value, String) or (isinstance(value, Word) and value.name in SETS)
    return "" if is_valid else f'one of {", ".join(SETS)}, or a file in quotes: "data.npz"'


KEYS: dict[str, Check] = {
    "data": _data,
    "optimizer": _object(
        "an optimizer of Keras: adam, or SGD(learning_rate=0.1, momentum=0.9)", tuple(OPTIMIZERS), word=True
    ),
    "learning_rate": _number("a number above 0", lambda value: value > 0, none=False),
    "loss": _word(f"one of {', '.join(LOSSES)}", LOSSES),
    "metrics": _metrics,
    "initial": _word(f"one of {', '.join(INITIAL)}", INITIAL),
    "scaling": _scaling,
    "penalty": _object("none, or L1(l1=), L2(l2=), L1L2(l1=, l2=)", tuple(PENALTIES), none=True),
    "clipping": _number("none, or the largest norm of all gradients together, above 0", lambda value: value > 0),
    "loss_weights": _loss_weights,
    "patience": _number(
        "none, or a whole number of epochs, 1 or more", lambda value: isinstance(value, int) and value >= 1
    ),
    "validation": _number(
        "none, or the share of training samples that are held out, between 0 and 1", lambda value: 0 < value < 1
    ),
    "ignore": _number("none, or the label of entries that are left out of the losses", lambda value: True),
}
"""The block's own keys, each with the check of its value."""
NAMES: dict[str, tuple[str, ...]] = {
    "data": SETS,
    "optimizer": tuple(OPTIMIZERS),
    "loss": LOSSES,
    "initial": INITIAL,
    "scaling": SCALINGS,
    "penalty": tuple(PENALTIES),
}
"""The valid names by key, to suggest a similar one."""
