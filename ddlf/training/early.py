"""What can be seen to be wrong with an app before anything is started. Runs on the master; imports nothing of Keras."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from ddlf.algorithms.codec import TopK
from ddlf.algorithms.encoding import RAW_BELOW_BYTES
from ddlf.algorithms.local_rules import Plain
from ddlf.algorithms.merge import Median, TrimmedMean
from ddlf.algorithms.outer import OUTER, Streaming
from ddlf.algorithms.ranges import fits
from ddlf.algorithms.weights import Tensor
from ddlf.errors import AppError, CheckpointMismatch, ConfigError
from ddlf.training.settings.settings import SETTINGS

TRAINING = ("tensorflow", "jax", "torch")
SIMILAR = 0.84
"""How near a name must be to that of a setting to be taken for a slip of the pen: one letter of eight."""

LINK = 125e6
"""Bytes per second of a link, each way, where none was measured: 1 Gbit/s."""
AGREED_S = 0.05
"""What a round takes to agree on who does what, from worker to worker."""
FEW = 0.2
"""Share of its values that each slot has to send to a merge by coordinates. Below it most slots are silent at most of them:
see docs/explanation/algorithms.md."""


def check_app(app: Any) -> None:
    """Refuse an app whose parts do not fit.

    Raises:
        ConfigError: It has an attribute that looks like a setting, but is none.
        AppError: A method cannot be called as it will be.
    """
    base = next(cls for cls in type(app).__mro__ if cls.__module__ == "ddlf.app")
    _check_misspelt(app, base)
    _check_train(app)


def check_together(settings: Mapping[str, Any]) -> None:
    """Refuse settings that do not go with each other.

    Args:
        settings: Every setting as it is used, by name.

    Raises:
        ConfigError: Two do not.
    """
    merge, codec = settings["merge"], settings["codec"]
    if isinstance(merge, Median | TrimmedMean) and isinstance(codec, TopK) and codec.fraction < FEW:
        raise ConfigError(
            f"merge={str(merge)!r} looks at each coordinate, and codec={codec.name!r} sends so few that most slots send nothing there",
            hint=f"use topk:{FEW} or more, another codec such as int4-block, or a merge of whole updates such as geometric",
        )
    outer, weights = settings["outer"], settings["weights_codec"]
    if settings["optimizer_state"] == "averaged" and settings["mode"] == "async":
        raise ConfigError(
            "optimizer_state='averaged' is for synchronous training: asynchronous slots end no round together",
            hint="use 'kept' or 'fresh', or train in mode 'sync'",
        )
    if settings["balance"] == "speed" and settings["mode"] == "async" and settings["worker_steps"] is None:
        raise ConfigError(
            "balance='speed' in asynchronous training says how many steps a round has, and without worker_steps it is of whole epochs",
            hint="set worker_steps, the steps of the fastest slot, or leave balance at 'equal'",
        )
    if settings["schedule"] is not None and str(settings["rate_decay"]) != "never":
        raise ConfigError(
            f"schedule={str(settings['schedule'])!r} and rate_decay={str(settings['rate_decay'])!r} both say how the learning rate goes",
            hint="leave one of them out",
        )
    converge = settings["converge"]
    if converge.metric.startswith("test_") and not settings["evaluate_every"]:
        raise ConfigError(
            f"converge={str(converge)!r} looks at {converge.metric!r}, but test data is evaluated at the end only",
            hint="set evaluate_every=1, or look at validation data (x_val)",
        )
    if isinstance(outer, Streaming) and settings["batchnorm"] == "local":
        raise ConfigError(
            f"batchnorm={settings['batchnorm']!r} and outer={str(outer)!r} both say which weights a slot keeps",
            hint="leave one of them out",
        )
    if isinstance(outer, Streaming) and not weights.delta and str(weights) != "float32":
        raise ConfigError(
            f"weights_codec={str(weights)!r} is for whole weights, and outer={str(outer)!r} exchanges them in fragments",
            hint=f"use weights_codec='delta:{weights}', or float32",
        )


def check_sharded(settings: Mapping[str, Any]) -> None:
    """Refuse what needs whole updates or weights in one place, where workers exchange slices.

    Args:
        settings: Every setting as it is used, by name.

    Raises:
        ConfigError: Names the setting.
    """
    if settings["exchange"] != "sharded":
        return
    whole = "looks at updates or tensors as wholes, and with exchange='sharded' workers have slices of them"
    outer, rules, weights = settings["outer"], [OUTER.read(name) for name in OUTER.names], settings["weights_codec"]
    own = "is not one of DDLF's, and workers step their slices by its name"
    unknown = whole if type(outer) in map(type, rules) else own
    steps_values = fits(outer) and unknown is whole
    for name, fine, why, instead in (
        (
            "outer",
            steps_values,
            unknown,
            "a rule that steps each value by itself, such as 'nesterov' or 'fedadam'",
        ),
        (
            "weights_codec",
            not weights.delta,
            "is of the difference to what each slot holds, and with exchange='sharded' slots hold nothing: all begin with the same weights",
            "'bfloat16', 'float16' or 'float32'",
        ),
    ):
        if not fine:
            raise ConfigError(f"{name}={str(settings[name])!r} {why}", hint=f"use {instead}, or exchange='star'")


def chosen_exchange(settings: Mapping[str, Any], workers: int, weights: int) -> tuple[str, str]:
    """What ``exchange="auto"`` becomes, and why: what moves the bytes of a round in less time.

    Args:
        settings: Every setting as it is used, by name.
        workers: How many train, K.
        weights: Bytes of the model's weights, P.

    Formula:
        Over links of B bytes/s each way ``2 K P / B`` through the master, ``2 (K - 1) / K P / B`` and what it takes to agree from worker to worker.
    """
    try:
        check_sharded({**settings, "exchange": "sharded"})
    except ConfigError as error:
        return "star", error.message
    star, sharded = 2 * workers * weights / LINK, 2 * (workers - 1) / workers * weights / LINK + AGREED_S
    size = f"{workers} worker{'s' * (workers > 1)} and {weights / 1e6:.3g} MB of weights"
    times = f"{star:.2g} s through the master and {sharded:.2g} s from worker to worker"
    return (
        "sharded" if sharded < star and workers > 1 else "star",
        f"for {size} a round moves for about {times}, at 1 Gbit/s",
    )


def check_slots(settings: Mapping[str, Any], slots: int, fewest: int = 0) -> None:
    """Refuse a merge that needs more slots than there are.

    Args:
        settings: Every setting as it is used, by name.
        slots: K; 0 while it is not known.
        fewest: Slots in the round that has fewest; 0 while it is not known.

    Raises:
        ConfigError: It needs more.
    """
    merge = settings["merge"]
    if 0 < slots < merge.least:
        raise ConfigError(
            f"merge={str(merge)!r} needs {merge.least} slots to find a bad update among the others, and there are {slots}",
            hint=f"set slots={merge.least}, which any number of workers can carry, or take another merge, such as 'median'",
        )
    if 0 < fewest < merge.least:
        raise ConfigError(
            f"merge={str(merge)!r} needs {merge.least} slots, and the last round of an epoch has {fewest}, with one of the last samples each",
            hint="choose another worker_steps or batch_size, so that more samples are left, or none",
        )


def check_effect(settings: Mapping[str, Any], weights: Sequence[Tensor], trainable: Sequence[bool]) -> str:
    """Refuse what has nothing to act on in this model.

    Args:
        settings: Every setting as it is used, by name.
        weights: Of the model; only shapes and types count.
        trainable: Whether each is trained.

    Returns:
        What has no effect, and is not refused since a larger model would have it; empty if all has.

    Raises:
        ConfigError: Names the setting.
    """
    rule = settings["local_rule"]
    if not any(trainable) and type(rule) is not Plain:
        raise ConfigError(
            f"local_rule={str(rule)!r} changes gradients, and nothing in this model is trained",
            hint="see that a layer with weights has trainable=True, or leave local_rule out",
        )
    downpour, outward = settings["mode"] == "downpour", settings["weights_codec"]
    coded = [] if downpour or str(settings["codec"]) == "float32" else [f"codec={str(settings['codec'])!r}"]
    coded += [] if outward.delta or str(outward) == "float32" else [f"weights_codec={str(outward)!r}"]
    least = 0 if downpour else RAW_BELOW_BYTES  # shards are rows of all values
    if coded and not any(
        w.dtype == np.float32 and w.nbytes >= least for w, on in zip(weights, trainable, strict=True) if on
    ):
        return (
            f"{' and '.join(coded)} {'has' if len(coded) == 1 else 'have'} no effect: only float32 weights of {RAW_BELOW_BYTES} bytes "
            "or more that are trained are encoded, and this model has none"
        )
    return ""


def _check_misspelt(app: Any, base: type) -> None:
    own = {
        name: value for cls in reversed(type(app).__mro__) if issubclass(cls, base) for name, value in vars(cls).items()
    }
    for name, value in {**own, **vars(app)}.items():
        if name.startswith("_") or hasattr(base, name) or callable(value) or isinstance(value, property):
            continue
        near = _settings_like(name)
        # One that is of another type, or that the app's own methods read, is theirs.
        if near and _alike(value, getattr(base, near[0])) and not _is_read(type(app), base, name):
            raise ConfigError(
                f"{type(app).__name__}.{name} is no setting, so it would have no effect; did you mean {near[0]}?",
                hint=f"give it a name of another kind if it is something else than {near[0]}",
            )


@cache
def _settings_like(name: str) -> list[str]:
    return difflib.get_close_matches(name, [known for known in SETTINGS if known != "callbacks"], 1, SIMILAR)


def _alike(value: Any, setting: Any) -> bool:
    return setting is None or type(value) is type(setting)


def _is_read(cls: type, base: type, name: str) -> bool:
    functions = [vars(part).values() for part in cls.__mro__ if issubclass(part, base) and part is not base]
    codes = [function.__code__ for values in functions for function in values if inspect.isfunction(function)]
    while codes:
        code = codes.pop()
        if name in code.co_names or name in code.co_consts:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return False


def _check_train(app: Any) -> None:
    try:
        inspect.signature(app.train).bind([], 1, 1)
    except TypeError:
        raise AppError(
            f"{type(app).__name__}.train cannot be called with what it gets",
            hint="write train(self, weights, worker_epochs, batch_size)",
        ) from None


def check_exchange(app: Any, exchange: str) -> None:
    """Refuse an app that trains in its own way, where nothing is trained locally.

    Raises:
        AppError: It has a ``train`` of its own.
    """
    if exchange == "gradient" and app.train.__module__ != "ddlf.app":
        raise AppError(
            f"{type(app).__name__}.train is local training: with exchange='gradient' there is none",
            hint="leave out train, or exchange='star'; an own compute_loss or train_step of the model can stay",
        )


def check_same_model(stored: Mapping[str, Any], described: Sequence[Sequence[Any]]) -> None:
    """Refuse the weights of another model, by the first one that differs.

    Args:
        stored: The weights of a checkpoint, by number and path as ``"0002 dense/kernel"``.
        described: Path and shape of each weight of this model, and more.

    Raises:
        CheckpointMismatch: The text has both.
    """
    theirs = [(name.partition(" ")[2], tuple(array.shape)) for name, array in stored.items()]
    mine = [(str(row[0]), tuple(row[1])) for row in described]
    for number, (old, new) in enumerate(zip_longest(theirs, mine), 1):
        if old is None or new is None or old[1] != new[1]:
            was, now = (f"{found[0]} of shape {found[1]}" if found else "not there" for found in (old, new))
            raise CheckpointMismatch(
                f"the checkpoint is of another model: weight {number} is {was} in it, but {now} here",
                hint="use the model that it is of, or begin anew in another folder",
            )


def check_backend() -> None:
    """Refuse a Keras backend that cannot train here.

    Raises:
        ConfigError: With those there are.
    """
    name = os.environ.get("KERAS_BACKEND")
    if name and name not in TRAINING:
        near = difflib.get_close_matches(name, TRAINING, 1)
        guess = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"KERAS_BACKEND must be one of {', '.join(TRAINING)}, got {name!r}{guess}")
    if not _is_installed("keras"):
        raise ConfigError(
            "keras is not installed, which trains the models", hint="install it: pip install keras tensorflow"
        )
    if not name:
        home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
        name = None if (home / "keras.json").is_file() else "tensorflow"  # that file may name another
    if name and not _is_installed(name):
        others = [other for other in TRAINING if _is_installed(other)]
        raise ConfigError(
            f"{name} is not installed, which Keras would use here",
            hint=f"set KERAS_BACKEND={others[0]}, which is" if others else f"install it: pip install {name}",
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
