"""Builds an app's model in the same way on every machine, with names that do not depend on earlier models."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np

from ddlf.data.app_data import batches, data_set_of, has_data, has_own_train, rows, suggestion
from ddlf.data.data_set import DataSet
from ddlf.data.trees import tree_map, tuples
from ddlf.errors import AppError
from ddlf.extras import hooks
from ddlf.training.context import App
from ddlf.training.roles import import_keras
from ddlf.training.slot.arithmetic import Arithmetic
from ddlf.training.slot.distribution import build_by_first_parts, check_strategy, scope_of
from ddlf.training.slot.optimizers import other_optimizers

SAMPLE_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A worker's report about the model that it has built. The master compares the reports of all workers.

    Args:
        weights: Path, shape and type of each weight.
        optimizer: Class and settings of the optimizer, as ``describe_optimizer`` returns them.
        keras: Version of Keras.
        backend: Backend of Keras.
        text: Digest of the model text; empty without one.
        arithmetic: How the worker computes.
        batch_parts: Number of parts into which a step divides a batch.
        gain: How many times faster bfloat16 is than float32; 0 if the worker has not measured it.
    """

    weights: Sequence[Sequence[Any]]
    optimizer: Mapping[str, Any]
    keras: str
    backend: str
    text: str = ""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    batch_parts: int = 1
    gain: float = 0.0

    @classmethod
    def of(
        cls, model: Any, optimizer: Mapping[str, Any], arithmetic: Arithmetic, batch_parts: int = 1, gain: float = 0.0
    ) -> Self:
        """Return the report about a model of this process."""
        import keras

        return cls(
            weights=describe_weights(model),
            optimizer=optimizer,
            keras=keras.__version__,
            backend=keras.backend.backend(),
            text=getattr(getattr(model, "notation", None), "digest", ""),
            arithmetic=arithmetic,
            batch_parts=batch_parts,
            gain=gain,
        )


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Let Keras number its automatic names (``dense_1``, ``auc_2``) from the beginning, as in a new process.

    Afterwards the numbers continue where they were. Without this, the metrics of a second run, or of a worker that
    joined later, would have other names. Also as in a new process, ``set_floatx`` decides the type of the layers: Keras
    itself ignores it once a layer was made.
    """
    from keras.src.backend.common import global_state

    is_chosen = _chosen_policy() != ""
    if not is_chosen:
        global_state.set_global_attribute("dtype_policy", None)
    counts_before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        if counts_before is not None:
            counts = global_state.get_global_attribute("object_name_uids") or {}
            for prefix, count in counts.items():  # so that later objects get other names
                counts_before[prefix] = max(counts_before[prefix], count)
            global_state.set_global_attribute("object_name_uids", counts_before)
        if not is_chosen and _chosen_policy() == "":
            global_state.set_global_attribute("dtype_policy", None)


def ready_model(app: App) -> Any:
    """Return the app's model after checking it.

    If its layers do not declare their input shape, call it on some samples, so that it has its weights.

    Raises:
        AppError: There is no model, or it cannot be trained.
    """
    model = getattr(app, "model", None)
    if (
        ready := getattr(type(model), "ready", None)
    ) is not None:  # a model text, which can create and compile its model once it has data
        model = app.model = ready(model, app)
    if model is None:
        raise AppError(
            "create_model set no self.model", hint="end it with self.model = ... and self.model.compile(...)"
        )
    if not hasattr(model, "get_weights"):
        raise AppError(f"create_model set self.model to a {type(model).__name__}, which is not a Keras model")
    check_strategy(model)
    build_by_first_parts(model)
    if not model.compiled:
        raise AppError(
            f"the model {model.name!r} is not compiled",
            hint="end create_model with self.model.compile(optimizer, loss)",
        )
    if _lacks_a_loss(model) and (has_data(app, "test") or not has_own_train(app)):  # an evaluation needs the loss
        raise AppError(
            f"the model {model.name!r} is compiled without a loss",
            hint='give it a loss: self.model.compile(optimizer, "categorical_crossentropy"), or another one',
        )
    data_set = data_set_of(app, "train")
    lacks = getattr(app, "y_train", None) is None if data_set is None else not any(name[0] == "y" for name in data_set)
    if lacks and has_data(app, "train") and _needs_labels(model):
        raise AppError(
            f"load_dataset set no self.y_train{suggestion(app, 'y_train')}"
            if data_set is None
            else f"{data_set} has no column y",
            hint=f"the model {model.name!r} is compiled with a loss, which compares outputs with labels",
        )
    _check_one_input(app, model)
    if not (model.built and all(layer.built for layer in model.layers)) and has_data(app, "train"):
        try:
            with scope_of(model):
                model(sample(first_rows(app, "train"))[0])
        except NotImplementedError:  # the model has no call method, for example because it trains other models
            pass
        except Exception as error:
            raise AppError(
                f"the model {model.name!r} is not built, and cannot be called on {SAMPLE_ROWS} rows of x_train: {error}",
                hint="begin it with keras.Input(...), or give it a build method",
            ) from error
    for finish in hooks("ready_model"):
        finish(app, model)
    return model


def _check_one_input(app: App, model: Any) -> None:
    """Raise an error if the data are named arrays and the model is Sequential.

    Keras would raise its own traceback, after the workers have begun.
    """
    import keras

    if isinstance(model, keras.Sequential) and model.built and has_data(app, "train"):
        data_set = data_set_of(app, "train")
        # A file may be damaged, which on_bad decides later: names and shapes are known without reading one.
        x = (batches(app, "train") if data_set is None else _made_up_rows(app, "train", data_set))[0]
        if isinstance(x, dict) and len(model.inputs) == 1:
            raise AppError(
                f"x_train is a dict of {', '.join(map(repr, x))}, and {model.name!r} is a Sequential model, which takes one array",
                hint=f"set self.x_train to one array, or make a keras.Model with inputs of these names: {', '.join(map(str, x))}",
            )


def first_rows(app: App, part: str) -> tuple[Any, ...]:
    """Return the first rows of a part of an app's data, in the form for ``fit``. Arrays are returned whole."""
    if not has_data(app, part) and (like := app.run_context.data.example_samples(app)) is not None:
        return like  # type: ignore[no-any-return]
    if (data_set := data_set_of(app, part)) is None:
        return batches(app, part)
    if not any(data_set.availability()):
        return _made_up_rows(app, part, data_set)
    return rows(app, part, data_set.head(SAMPLE_ROWS))


def _made_up_rows(app: App, part: str, data_set: DataSet) -> tuple[Any, ...]:
    """Return zeros with the shapes and types of a data set's rows, in the form for ``fit``, to build a model."""
    zeros = {name: np.zeros((SAMPLE_ROWS, *column.shape), column.dtype) for name, column in data_set.columns.items()}
    return rows(app, part, zeros)


def _needs_labels(model: Any) -> bool:
    return getattr(model, "loss", None) is not None and not _has_own_step(model)


def _has_own_step(model: Any) -> bool:
    import keras

    return (
        type(model).train_step is not keras.Model.train_step or type(model).compute_loss is not keras.Model.compute_loss
    )


def _lacks_a_loss(model: Any) -> bool:
    """Return whether Keras has no loss to minimize in the first step.

    Layers of other packages may add one when called.
    """
    if getattr(model, "loss", None) is not None or _has_own_step(model) or model.losses:
        return False
    layers = list(model._flatten_layers())
    return all(
        type(layer).__module__.startswith("keras.") and getattr(layer, "activity_regularizer", None) is None
        for layer in layers
    )


def is_built(model: Any) -> bool:
    """Return whether a model has all of its weights.

    A model without a call method counts as built if its layers are.
    """
    return bool(model.built or (model.layers and all(layer.built for layer in model.layers)))


def sample(data: Any) -> Any:
    """Return the first rows of arrays or trees of arrays, in the form that the model receives, for a trial call."""
    import keras

    from ddlf.training.slot.feed import keras_type

    return tree_map(
        lambda array: keras.ops.convert_to_tensor(array[:SAMPLE_ROWS], keras_type(array)),
        tuples(data),
    )


def describe_weights(model: Any) -> list[list[Any]]:
    """Return path, shape and type of each of ``model.weights``, to check that machines have the same model."""
    if not is_built(model):
        raise AppError(
            f"the model {model.name!r} is not built", hint="begin it with keras.Input(...), or call it on some samples"
        )
    return [[weight.path, list(weight.shape), str(weight.dtype)] for weight in model.weights]


def may_count(model: Any) -> list[Any]:
    """Return the integer weights in which layers written by users may count something.

    Keras's own layers count only in ``adapt``, before training.
    """
    layers = [layer for layer in model._flatten_layers() if type(layer).__module__.startswith("keras.")]
    keras_weights = {id(weight) for layer in layers for weight in layer._non_trainable_variables}
    kinds = [
        (weight, np.dtype(weight.dtype)) for weight in model.non_trainable_weights if id(weight) not in keras_weights
    ]
    # Boolean masks and quantized single bytes never change.
    return [weight for weight, kind in kinds if kind.kind in "iu" and kind.itemsize > 1]


def left_behind(model: Any) -> list[str]:
    """Return a sentence for each part of a model's state that does not move with a slot to another worker."""
    sentences = [
        f"the weight {weight.path!r} is of type {weight.dtype}: counts of layers in it are lost after "
        "each round, because only floats are merged; make it a float"
        for weight in may_count(model)
    ]
    if attributes := other_optimizers(model):
        sentences.append(
            f"the model has {'another optimizer' if len(attributes) == 1 else 'other optimizers'} in {', '.join(attributes)}: "
            "its state (momentum, steps) stays on each worker, so results depend on the worker of each slot"
        )
    return sentences


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return class and settings of a Keras optimizer, entry by entry, to compare machines and runs.

    Names that Keras numbers are left out.
    """
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    config = {} if optimizer is None else optimizer.get_config()
    for name, value in config.items():
        if name != "name":
            facts[f"optimizer {name}"] = (
                _shortest(value) if isinstance(value, bool | int | float | str) else without_numbers(describe(value))
            )
    return facts


def without_numbers(described: str) -> str:
    """Return a described configuration without the numbers that Keras appends to names, as in ``dense_3``."""
    return re.sub(r"('name': '\w+?)_\d+'", r"\1'", described)


def _shortest(value: Any) -> Any:
    """Return the shortest number with the same float32 value, such as 0.1 for 0.10000000149.

    Keras keeps learning rates in float32.
    """
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def describe(value: Any, depth: int = 0) -> str:
    """Return a value's class and plain attributes as text that is the same in every process.

    So it contains no memory addresses.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)}:{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if depth > 5:
        return type(value).__qualname__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{describe(k, depth + 1)}: {describe(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(entry, depth + 1) for entry in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(describe(entry, depth + 1) for entry in value))}}}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if not _ADDRESS.search(text := repr(value)):
        return text
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    shown = ", ".join(f"{name}={describe(entry, depth + 1)}" for name, entry in sorted(attributes.items()))
    return f"{type(value).__qualname__}({shown})"


LEAST_WEIGHT = 2**18
"""Minimum number of values of a model's largest weight, so that products in bfloat16 make the model faster. The products of
smaller weights take less time than the other work (docs/LAB.md)."""
PROBE_SIZE = 512
PROBE_S = 0.1
LEAST_TURNS = 4
"""Minimum number of counted turns for each type, however long they take."""
MOST = 32.0
"""Largest credible ratio. Matrix units have 16 times the products of vector units (AMX beside AVX-512, tensor cores
beside CUDA's). A ratio above twice that is a measurement error."""


class NumberFormat(NamedTuple):
    """The settings of Keras that decide the types of weights and of computation.

    Args:
        floatx: The type of weights, such as ``"float32"``.
        policy: Name of the dtype policy; "" for that of ``floatx``.
    """

    floatx: str
    policy: str = ""


def number_format() -> NumberFormat | None:
    """Return the number format of this thread; None if Keras is not imported yet."""
    config = getattr(sys.modules.get("keras"), "config", None)
    return None if config is None else NumberFormat(config.floatx(), _chosen_policy())


def _chosen_policy() -> str:
    """Return the dtype policy that someone has set on this thread; "" for the one that Keras sets by itself."""
    import keras
    from keras.src.backend.common import global_state

    policy = global_state.get_global_attribute("dtype_policy")
    return "" if policy is None or policy.name == keras.config.floatx() else str(policy.name)


@cache
def _first_format() -> NumberFormat:
    """Return the number format of this process before any app has changed it."""
    import keras

    return NumberFormat(keras.config.floatx())


def set_precision(name: str, format: NumberFormat | None = None) -> None:
    """Set the number format of layers that this thread makes later. An app's ``create_model`` may change it again.

    Args:
        name: The setting ``precision``. ``mixed_bfloat16`` and ``mixed_float16`` are policies of Keras, with weights in
            float32. ``auto`` also measures how much faster bfloat16 would be: many processors have matrix units for it.
        format: The format that layers have otherwise, as on the master; None for the first one of this process.
    """
    import_keras()
    import keras
    from keras.src.backend.common import global_state

    first = _first_format()
    floatx, policy = format or first
    keras.config.set_floatx(floatx)  # an earlier app may have changed it, and it is one for all threads
    policy = name if name.startswith("mixed_") else policy
    global_state.set_global_attribute("dtype_policy", None)
    if policy:
        keras.config.set_dtype_policy(policy)


def has_large_products(model: Any) -> bool:
    """Return whether a model has a weight that is large enough to gain from products in bfloat16."""
    return any(math.prod(variable.shape) >= LEAST_WEIGHT for variable in model.trainable_variables)


@cache
def gain_of_bfloat16() -> float:
    """Return how many times faster matrix products are in bfloat16 than in float32; 0 if this cannot be measured.

    The probe takes about a tenth of a second, once in each process. A whole model gains less, because it computes more
    than matrix products.
    """
    import keras

    def product(dtype: str) -> Callable[[], object]:
        x = keras.ops.ones((PROBE_SIZE, PROBE_SIZE), dtype)
        # Read one number, so that a backend which computes in the background has to finish.
        return lambda: keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.matmul(x, x)[0, 0], "float32"))

    return times_as_fast(product("bfloat16"), product("float32"))


def times_as_fast(
    candidate: Callable[[], object], reference: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return how many times faster one function is than another, by their quickest runs; 0 if it is unclear.

    The quickest turn shows the ability of the processor, in spite of its other work. Turns alternate, so that other
    work slows both. The first turns do not count, because kernels are chosen and threads start in them. On a busy
    machine the ratio would measure the other work. So the result is 0 if the second quickest turn is more than twice
    the quickest, or if the ratio exceeds any processor's.

    Args:
        candidate: The work.
        reference: The work to compare with.
        clock: Returns seconds.
    """
    took: tuple[list[float], list[float]] = [], []
    end = clock() + PROBE_S
    while clock() < end or len(took[0]) <= LEAST_TURNS:
        for work, times in zip((candidate, reference), took, strict=True):
            begin = clock()
            work()
            times.append(clock() - begin)
    quickest = [sorted(times[1:])[:2] for times in took]
    if any(second > 2 * first for first, second in quickest):
        return 0.0
    ratio = quickest[1][0] / max(quickest[0][0], 1e-9)
    return ratio if ratio <= MOST else 0.0
