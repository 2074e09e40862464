"""The settings, apps and machines that a run refuses, each with a sentence and a hint.

Runs on the master; does not import Keras. A row is ``Refusal(applies, sentence, hint)``. The rows are checked in order
before anything starts. Rows that depend on the workers, slots, files or model are checked once these are known.
Strategies and exchanges add their own rows.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from math import ceil
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.codec import TopK
from ddlf.algorithms.encoding import RAW_BELOW_BYTES
from ddlf.algorithms.local_rules import Plain
from ddlf.algorithms.merge import Median, TrimmedMean, revealed_by
from ddlf.algorithms.outer import Streaming
from ddlf.algorithms.reading_order import CUT_TOLERANCE, MAX_GLOBAL, Global
from ddlf.algorithms.weights import Tensor
from ddlf.errors import AppError, ConfigError
from ddlf.monitor.runs.folder import is_wanted
from ddlf.privacy import contradictions
from ddlf.settings.setting import SYNONYMS, Group, Setting
from ddlf.training.registry import GROUPS, SETTINGS
from ddlf.training.samples.partitions import LEAST_SHARE
from ddlf.training.slot.parts import PARTS
from ddlf.training.spec import ExchangeSettings, Refusal, RunSpec, StrategySettings

if TYPE_CHECKING:
    from ddlf.data.data_set import DataSet
    from ddlf.training.context import App

USUAL_SHUFFLE = "window:8"
"""Mixes as well as a global shuffle if the files are mixed already, and reads each file once: docs/howto/big_data.md"""
FEW = 0.2
"""Smallest share of values that each slot must send to a coordinate-wise merge.

With less, most slots send nothing for most coordinates (docs/algorithms.md).
"""


def check(rows: Iterable[Refusal]) -> None:
    """Raise an error for the first of these combinations of settings that the run has.

    Raises:
        ConfigError: Has the row's sentence and hint.
    """
    for row in rows:
        if row.applies:
            raise ConfigError(row.sentence, hint=row.hint)


def check_spec(spec: RunSpec) -> None:
    """Raise an error for settings that contradict each other or would have no effect.

    Raises:
        ConfigError: Settings contradict each other or have no effect. The error names them.
    """
    check(settings_refusals(spec))
    check(private_data_refusals(spec))
    contradictions.check(privacy_choice(spec))
    check(_unused(spec))
    check(spec.exchange.refusals(spec))
    check(spec.train.refusals(spec))
    check(_slot_part_refusals(spec))


def settings_refusals(spec: RunSpec) -> Iterator[Refusal]:
    """Yield the combinations of settings that are refused, as far as the settings alone decide it."""
    local, outer = spec.local, spec.outer
    streams = isinstance(outer, Streaming)
    yield Refusal(
        local.round_samples is not None and local.epochs != 1,
        f"round_samples={local.round_samples} and worker_epochs={local.epochs} both set the length of a round",
        "leave out one of the two: round_samples=None, or worker_epochs=1",
    )
    yield Refusal(
        local.round_samples is not None and local.steps is not None and not spec.exchange.one_step,
        f"round_samples={local.round_samples} and worker_steps={local.steps} both set the length of a round",
        "leave out one of the two: round_samples=None, or worker_steps=None",
    )
    yield Refusal(
        local.steps is not None and local.epochs != 1 and not spec.exchange.one_step,
        f"worker_steps={local.steps} and worker_epochs={local.epochs} both set the length of a round",
        "leave out one of the two: worker_steps=None, or worker_epochs=1",
    )
    merge, codec = getattr(spec.train, "merge", None), spec.exchange.codec
    yield Refusal(
        isinstance(merge, Median | TrimmedMean) and isinstance(codec, TopK) and codec.fraction < FEW,
        f"merge={str(merge)!r} looks at each coordinate, and codec={codec.name!r} sends so few that most slots send nothing there",
        f"use topk:{FEW} or more, another codec such as int4-block, or a merge of whole updates such as geometric",
    )
    yield Refusal(
        local.schedule is not None and str(local.rate_decay) != "never",
        f"schedule={str(local.schedule)!r} and rate_decay={str(local.rate_decay)!r} both set the learning rate",
        "leave one of them out",
    )
    converge = spec.evaluation.converge
    yield Refusal(
        converge.metric.startswith("test_") and not spec.evaluation.every,
        f"converge={str(converge)!r} looks at {converge.metric!r}, but test data is evaluated at the end only",
        "set evaluate_every=1, or look at validation data (x_val)",
    )
    usual = next((name for name in ("accuracy", "loss") if _is_misspelt(converge.metric, name)), "")
    yield Refusal(
        bool(usual),
        f"converge={str(converge)!r} looks at {converge.metric!r}, "
        f"did you mean '{converge.metric[: -len(_bare(converge.metric))]}{usual}'?",
        "",
    )
    folder = spec.checkpoint
    if folder.folder is None and folder.resume is None and not is_wanted(spec.output.out):
        for setting, value in spec.changed(("checkpoint_every", "checkpoint_keep")):
            yield Refusal(
                True,
                f"{setting.name}={value} has no effect without a folder for checkpoints",
                "set checkpoint, too (--checkpoint DIR)",
            )
    batchnorm = spec.batchnorm
    yield Refusal(
        streams and batchnorm == "local",
        f"batchnorm={batchnorm!r} and outer={str(outer)!r} both determine which weights a slot keeps",
        "leave one of them out",
    )
    for kind, where in ((spec.train, f"mode={spec.train.name!r}"), (spec.exchange, f"exchange={spec.exchange.name!r}")):
        yield Refusal(
            spec.peer is not None and bool(kind.no_peer),
            f"a run with {where} cannot be a peer: {kind.no_peer}",
            "leave peer out (--peer), or train in mode 'sync' or 'async' with exchange 'star', 'sharded' or 'gradient'",
        )
    yield Refusal(
        spec.peer is not None and streams,
        f"peer has no effect with outer={str(outer)!r}: slots keep fragments that no set of a peer replaces",
        "leave one of them out",
    )
    yield Refusal(
        spec.peer is not None and batchnorm == "local",
        "peer has no effect on the weights that each slot keeps with batchnorm='local'",
        "leave one of them out",
    )
    weights = spec.exchange.weights_codec
    yield Refusal(
        streams and not weights.delta and str(weights) != "float32",
        f"weights_codec={str(weights)!r} is for whole weights, and outer={str(outer)!r} exchanges them in fragments",
        f"use weights_codec='delta:{weights}', or float32",
    )


COMMON = (
    ("partition", "each worker trains on its own samples"),
    ("balance", "each worker trains on all its samples"),
    ("slots", "each worker is one slot"),
    ("class_weight", "the master does not know the classes of the samples"),
    ("worker_steps", "each worker trains on all its samples in a round"),
    ("round_samples", "each worker trains on all its samples in a round"),
    ("shuffle", "private data is arrays"),
    ("data_memory", "private data is arrays"),
    ("on_bad", "private data is arrays"),
    ("scout", "trials compare rates on the same samples"),
    ("planned", "a plan compares numbers of slots, and each worker is one slot"),
    ("evaluate_on", "workers evaluate their own data, and the master evaluates the test data that it has"),
)
"""Settings that need data that all nodes have, each with the reason why private data does not fit."""


def private_data_refusals(spec: RunSpec) -> Iterator[Refusal]:
    """Yield the settings that contradict private data on the workers."""
    private, data = spec.data.private, spec.data
    exchange, mode = spec.exchange.name, spec.train.name
    yield Refusal(
        private and mode not in ("sync", "async"),
        f"mode={mode!r} contradicts private=True: its workers share portions of common data",
        "train in mode 'sync' or 'async'",
    )
    yield Refusal(
        private and exchange != "star",
        f"exchange={exchange!r} contradicts private=True: other workers would see the updates of each worker",
        "use exchange='star', where only the master sees them",
    )
    for name, reason in COMMON:
        for setting, value in spec.changed([name]):
            hint = f"leave out {setting.name}"
            if name == "class_weight" and data.privacy_unit != "sample":  # its steps have no sample weights
                hint += ", and set w_train in load_dataset"
            yield Refusal(private, f"{name}={_text(value)} contradicts private=True: {reason}", hint)
    yield Refusal(
        private and spec.batchnorm == "recalibrated",
        "batchnorm='recalibrated' contradicts private=True: it reads the samples of a round twice, after its merge",
        "use batchnorm='averaged'" if data.hides_metrics else "use batchnorm='averaged' or 'local'",
    )
    yield Refusal(
        private and isinstance(spec.outer, Streaming),
        f"outer={str(spec.outer)!r} contradicts private=True: a slot that misses a round would miss its fragments",
        "use another outer optimizer",
    )


def privacy_choice(spec: RunSpec, *, averages: bool = False, momenta: bool = False) -> contradictions.Choice:
    """Return the settings that noise and masks of updates depend on.

    Args:
        spec: All settings of the run.
        averages: Whether the optimizer averages the weights over the run.
        momenta: Whether the optimizer's state tells about updates.
    """
    local, merge = spec.local, getattr(spec.train, "merge", None)
    shared = {
        "optimizer_state='averaged'": local.optimizer_state == "averaged",
        "batchnorm='local'": spec.batchnorm == "local",
        f"local_rule={str(local.rule)!r}": local.rule.steers,
        "an optimizer with use_ema": averages,
    }
    metric = spec.evaluation.converge.metric
    return contradictions.Choice(
        trainers="workers",
        clip=spec.data.update_clip,
        noise=spec.data.noise_multiplier,
        private=spec.data.private,
        way=spec.train.name,
        merge="mean" if merge is None else str(merge),
        reveals=revealed_by(merge),
        update_policy=None if spec.exchange.update_policy == "stop" else spec.exchange.update_policy,
        shared=tuple(text for text, applies in shared.items() if applies),
        delta=spec.data.delta,
        budget=spec.data.privacy_budget,
        secure=spec.data.secure_aggregation,
        limit=spec.data.update_limit,
        codec=spec.exchange.codec.name,
        outward=str(spec.exchange.weights_codec),
        states=local.optimizer_state if momenta and local.optimizer_state != "fresh" else "",
        unit=spec.data.privacy_unit,
        callbacks=bool(spec.worker_callbacks),
        metric=metric if metric and not metric.startswith(("val_", "test_")) else "",
    )


def _bare(metric: str) -> str:
    return metric.removeprefix("val_").removeprefix("test_")


def _is_misspelt(metric: str, usual: str) -> bool:
    """Return whether the name of a metric is a usual name with a typing error.

    It is none if it has more letters, like ``inaccuracy``.
    """
    return usual not in metric and bool(get_close_matches(_bare(metric), [usual], 1, SIMILAR))


def _unused(spec: RunSpec) -> Iterator[Refusal]:
    """Yield an entry for each setting that has no effect with this run's strategy or exchange."""
    train, exchange = spec.train, spec.exchange
    for kind, where, instead in _kinds(spec):
        for setting, value in spec.changed(kind.unused):
            name = setting.name
            yield Refusal(
                True,
                f"{name}={_text(value)} has no effect {where}: {kind.unused[name]}",
                f"leave {name} at {setting.default!r}, or {instead}",
            )
    yield Refusal(
        "exchange" in train.unused and exchange.name != "star" and train.name not in exchange.strategies,
        f"exchange={exchange.name!r} has no effect in {train.words} training: {train.unused.get('exchange')}",
        "leave exchange at 'star', or train in mode 'sync'",
    )


def _slot_part_refusals(spec: RunSpec) -> Iterator[Refusal]:
    """Yield an entry for each setting that makes slots keep a part which this run's strategy or exchange does not use."""
    for kind, where, instead in _kinds(spec):
        for part in PARTS:
            for setting, value in spec.changed([part.setting]):
                yield Refusal(
                    kind.slot_parts is not None and part.name not in kind.slot_parts and part.kept_with(value),
                    f"{setting.name}={_text(value)} has no effect {where}: slots do not keep the part {part.name!r}",
                    f"leave {setting.name} at {setting.default!r}, or {instead}",
                )


def _kinds(spec: RunSpec) -> Iterator[tuple[StrategySettings | ExchangeSettings, str, str]]:
    """Yield the strategy and the exchange, each with its name in a sentence, and what a user can choose instead."""
    yield spec.train, f"in {spec.train.words} training", "train in mode 'sync'"
    by = spec.exchange.chosen_by
    yield spec.exchange, f"with exchange={spec.exchange.name!r}", f"leave out {by}" if by else "use exchange='star'"


def _text(value: Any) -> str:
    return str(value) if isinstance(value, int | float) else repr(str(value))


def check_slots(spec: RunSpec, slots: int, fewest: int = 0) -> None:
    """Raise an error for settings that need more slots than the run has.

    Args:
        spec: All settings of the run.
        slots: K; 0 while it is unknown.
        fewest: The smallest number of slots in any round; 0 while it is unknown.

    Raises:
        ConfigError: The settings need more slots.
    """
    check(spec.train.slot_refusals(slots, fewest))


def check_takeover(spec: RunSpec, *, of_workers: bool) -> None:
    """Raise an error for ``takeover`` if there is nothing to take over: no folder of checkpoints and no workers.

    Args:
        spec: All settings of the run.
        of_workers: Whether the cluster takes workers over.

    Raises:
        ConfigError: ``takeover`` has no effect.
    """
    folder = spec.checkpoint
    row = Refusal(
        bool(folder.takeover) and folder.folder is None and folder.resume is None and not of_workers,
        "takeover=True has no effect without a folder for checkpoints",
        "leave it out, or set checkpoint, too (--checkpoint DIR)",
    )
    check([row])


def check_workers(spec: RunSpec, workers: int, *, one_at_a_time: bool = False) -> None:
    """Raise an error for workers that are too few for the run or cannot do what the settings need.

    Args:
        spec: All settings of the run.
        workers: The number of workers.
        one_at_a_time: Whether a worker cannot answer while it computes.

    Raises:
        ConfigError: The workers cannot carry the run.
    """
    check(spec.train.worker_refusals(workers, one_at_a_time))
    check(spec.exchange.worker_refusals(workers, one_at_a_time, spec.slots or 1))


def check_effect(spec: RunSpec, weights: Sequence[Tensor], trainable: Sequence[bool]) -> str:
    """Raise an error for settings that have no effect on this model.

    Args:
        spec: All settings of the run.
        weights: Weights of the model; only their shapes and types are used.
        trainable: For each tensor, whether it is trained.

    Returns:
        A warning about codecs that have no effect on this model but would have one on a larger model; "" otherwise.

    Raises:
        ConfigError: A setting cannot be used. The error names it.
    """
    rule, codec, outward = spec.local.rule, spec.exchange.codec, spec.exchange.weights_codec
    if not any(trainable) and type(rule) is not Plain:
        raise ConfigError(
            f"local_rule={str(rule)!r} changes gradients, but no weight of this model is trained",
            hint="make sure that a layer with weights has trainable=True, or leave local_rule out",
        )
    coded = [] if str(codec) == "float32" else [f"codec={str(codec)!r}"]
    coded += [] if outward.delta or str(outward) == "float32" else [f"weights_codec={str(outward)!r}"]
    least = 0 if spec.train.encodes_small else RAW_BELOW_BYTES
    if coded and not any(
        w.dtype == np.float32 and w.nbytes >= least
        for w, is_trained in zip(weights, trainable, strict=True)
        if is_trained
    ):
        return (
            f"{' and '.join(coded)} {'has' if len(coded) == 1 else 'have'} no effect: only float32 weights of {RAW_BELOW_BYTES} bytes "
            "or more that are trained are encoded, and this model has none"
        )
    return ""


def check_arrays(spec: RunSpec, *, other_files: bool) -> None:
    """Raise an error for settings that need partition files if the training data are arrays.

    Args:
        spec: All settings of the run.
        other_files: Whether the validation or test data is in files.

    Raises:
        ConfigError: A setting cannot be used. The error names it.
    """
    on_bad = "skip" if spec.data.on_bad == "skip" else None
    for name, value in (
        ("on_bad", on_bad),
        ("shuffle", spec.data.shuffle),
        ("data_memory", None if other_files else spec.data.data_memory),
    ):
        text = value if name == "data_memory" else repr(str(value))
        check(
            [
                Refusal(
                    value is not None,
                    f"{name}={text} is for partition files, and load_dataset sets arrays, which are in memory",
                    f"leave out {name}, or set self.train_data = ddlf.data.open(place)",
                )
            ]
        )


def check_files(spec: RunSpec, data: DataSet) -> None:
    """Raise an error for settings that are impossible with partition files.

    Args:
        spec: The run; its ``shuffle`` is resolved.
        data: The training data.

    Raises:
        ConfigError: A setting cannot be used. The error names it.
    """
    rule = spec.data.shuffle
    is_global, steps = isinstance(rule, Global), spec.local.steps
    samples = data.manifest.samples
    rows = [
        Refusal(
            spec.data.on_bad == "skip" and not data.on_disk,
            f"on_bad='skip' is for partition files and Parquet files, but self.train_data is {data}",
            "leave out on_bad, or write the data as partition files: ddlf data split",
        ),
        *spec.train.file_refusals(spec),
        Refusal(
            is_global and samples > MAX_GLOBAL,
            f"{samples:,} samples are too many for shuffle='global', which takes up to {MAX_GLOBAL:,}",
            f"use shuffle={USUAL_SHUFFLE!r}",
        ),
    ]
    instead = ", or use shuffle='global'"
    for name, value, applies, reason, alternative in (
        ("shuffle", repr(str(rule)), is_global and bool(data.manifest.hosts), "each worker has some of the files", ""),
        (
            "partition",
            repr(str(spec.data.partition)),
            str(spec.data.partition) != "equal",
            "it needs all labels at once",
            "",
        ),
        (
            "exchange",
            repr(spec.exchange.name),
            spec.exchange.one_step and not is_global,
            "a slot has no equal batches of its files",
            instead,
        ),
        (
            "worker_steps",
            str(steps),
            steps is not None and not is_global,
            "round_samples already cuts an epoch into rounds",
            instead,
        ),
    ):
        rows.append(
            Refusal(
                applies,
                f"{name}={value} cannot be combined with partition files that are read with shuffle={str(rule)!r}: {reason}",
                f"leave out {name}{alternative}",
            )
        )
    check(rows)


def check_rounds(spec: RunSpec, samples: int, slots: int) -> None:
    """Raise an error for rounds so short that a slot could get no row of its files.

    Args:
        spec: All settings of the run.
        samples: n, the number of samples.
        slots: K, the number of slots.

    Raises:
        ConfigError: The rounds are too short.
    """
    round_samples = spec.local.round_samples
    if round_samples is None or spec.data.shuffle is None or isinstance(spec.data.shuffle, Global):
        return
    rounds = ceil(samples / round_samples)
    last = samples - (rounds - 1) * ceil(samples / rounds)
    share = 1 / LEAST_SHARE - CUT_TOLERANCE if spec.data.balance == "speed" else 1
    least = int((share - CUT_TOLERANCE) * samples / slots) - 1
    if least * last < samples:
        raise ConfigError(
            f"round_samples={round_samples} cuts {samples:,} samples into {rounds:,} rounds, too short for {slots} slots",
            hint="use longer rounds, or fewer slots",
        )


def check_averages(spec: RunSpec) -> None:
    """Raise an error if the optimizer state is dropped, but the optimizer averages the weights over the run.

    Raises:
        ConfigError: A setting cannot be used. The error names it.
    """
    state = spec.local.optimizer_state
    row = Refusal(
        state in ("fresh", "stays"),
        f"optimizer_state is {state!r}, but the optimizer keeps averages of the weights over the run (use_ema)",
        "use optimizer_state='kept', or an optimizer without use_ema",
    )
    check([row])


def check_evaluation(spec: RunSpec, *, validates: bool, method: str = "load_dataset") -> None:
    """Raise an error for settings that need validation data if there are none.

    Args:
        spec: All settings of the run.
        validates: Whether there is validation data.
        method: The method of the app that would load it.

    Raises:
        AppError: ``converge`` needs validation data.
        ConfigError: Workers would have nothing to evaluate.
    """
    rule = spec.evaluation.converge
    if rule.metric.startswith("val_") and not validates:
        raise AppError(
            f"converge={str(rule)!r} looks at {rule.metric!r}, but there is no x_val",
            hint=f"set x_val, y_val in {method}",
        )
    row = Refusal(
        spec.evaluation.on == "workers" and not spec.evaluation.every and not validates,
        "evaluate_on='workers' has no effect: nothing is evaluated during training",
        "set evaluate_every=1, or validation data (x_val)",
    )
    check([row])


# -- the app and the machine -------------------------------------------------------------------------------------------

BACKENDS = ("tensorflow", "jax", "torch")
SIMILAR = 0.84
"""Similarity above which a name counts as misspelt: one letter of eight is wrong."""


def check_app(app: App) -> None:
    """Raise an error for an app with a misspelt setting, or with a method that has wrong arguments.

    Raises:
        ConfigError: An attribute looks like a misspelt setting.
        AppError: A method has the wrong arguments.
    """
    base = next(cls for cls in type(app).__mro__ if cls.__module__ == "ddlf.app")
    _check_misspelt(app, base)
    _check_train(app)
    if not app.private and type(app).load_test_dataset is not getattr(base, "load_test_dataset", None):
        raise AppError(
            f"{type(app).__name__}.load_test_dataset has no effect, because the training data is not private",
            hint="set the test data in load_dataset, or set private = True",
        )


def _check_misspelt(app: App, base: type) -> None:
    class_values = {
        name: value for cls in reversed(type(app).__mro__) if issubclass(cls, base) for name, value in vars(cls).items()
    }
    for name, value in {**class_values, **vars(app)}.items():
        if name in GROUPS and _looks_like_settings(value, GROUPS[name]) and not _is_read(type(app), base, name):
            group = GROUPS[name].__name__
            raise ConfigError(
                f"{type(app).__name__}.{name} is a {type(value).__name__}, so it would have no effect: {value!r}",
                hint=f"write {name} = ddlf.{group}(...)",
            )
        if (
            name.startswith("_")
            or hasattr(base, name)
            or name in SETTINGS
            or callable(value)
            or isinstance(value, property)
        ):
            continue
        similar = _settings_like(name)
        # An attribute of another type, or one that the app's own methods read, is not a misspelt setting.
        if similar and _alike(value, SETTINGS[similar[0]].default) and not _is_read(type(app), base, name):
            raise ConfigError(
                f"{type(app).__name__}.{name} is not a setting, so it would have no effect; did you mean {similar[0]}?",
                hint=f"rename the attribute if you did not mean {similar[0]}",
            )


def _looks_like_settings(value: Any, group: type[Group]) -> bool:
    """Return whether a dict or a text seems to be meant as a group of settings."""
    settings: list[Setting[Any, Any]] = list(group.settings()) if is_dataclass(group) else []
    names = {name for setting in settings for name in (setting.field, setting.name)}
    if isinstance(value, str) and "=" in value:
        return value.partition("=")[0].strip() in names
    return isinstance(value, dict) and bool(value) and set(value) <= names


@cache
def _settings_like(name: str) -> list[str]:
    if name in SYNONYMS:
        return [SYNONYMS[name]]
    return get_close_matches(name, [setting for setting in SETTINGS if setting != "callbacks"], 1, SIMILAR)


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


def _check_train(app: App) -> None:
    try:
        inspect.signature(app.train).bind([], 1, 1)
    except TypeError:
        raise AppError(
            f"{type(app).__name__}.train cannot be called with its arguments",
            hint="write train(self, weights, worker_epochs, batch_size)",
        ) from None


def check_backend() -> None:
    """Raise an error for a Keras backend that cannot train here.

    Raises:
        ConfigError: The backend cannot train here. The error lists the backends that can.
    """
    name = os.environ.get("KERAS_BACKEND")
    if name and name not in BACKENDS:
        similar = get_close_matches(name, BACKENDS, 1)
        guess = f", did you mean {similar[0]!r}?" if similar else ""
        raise ConfigError(f"KERAS_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}{guess}")
    if not _is_installed("keras"):
        raise ConfigError(
            "keras, which trains the models, is not installed", hint="install it: pip install keras tensorflow"
        )
    if not name:
        home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
        name = None if (home / "keras.json").is_file() else "tensorflow"  # the file may name another backend
    if name and not _is_installed(name):
        installed = [other for other in BACKENDS if _is_installed(other)]
        raise ConfigError(
            f"{name}, which Keras would use here, is not installed",
            hint=f"set KERAS_BACKEND={installed[0]}, which is installed"
            if installed
            else f"install it: pip install {name}",
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
