"""A model of Keras in the process of a step: loaded, given inputs, run, layer by layer if wanted. ``KERAS_BACKEND`` is set."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ddlf.errors import ConfigError
from ddlf.extras.export.formats import Format
from ddlf.extras.export.source import find

SEED = 0
FREE = 16
"""The length of an axis without a fixed size in made-up inputs."""
WHOLE = 10
"""Whole numbers that are made are below it, where no layer says how many there are."""
COUNTS = ("input_dim", "num_tokens", "num_bins")
"""Attributes of Keras's layers that say how many whole numbers they know."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input.

    Attributes:
        name: Its name in Keras.
        shape: With the batch; None where any size will do.
        dtype: Its type.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


class Loaded:
    """A model that was loaded, which takes its inputs as a list, in Keras's own order.

    Args:
        path: A ``.keras`` file.
        code: The file with the user's own layers, or None.

    Raises:
        ConfigError: It cannot be loaded, or was never built.

    Attributes:
        model: The model.
        inputs: Its inputs.
        layout: The numbers of its inputs in a list, a dict, or alone, as the model takes them.
    """

    def __init__(self, path: Path, code: Path | None) -> None:
        self.model = load(path, code)
        structure = _inputs(self.model, path)
        flat = keras.tree.flatten(structure)
        self.inputs = [
            InputSpec(str(array.name or f"input_{number}"), (None, *array.shape[1:]), str(array.dtype))
            for number, array in enumerate(flat)
        ]
        self.layout = plain(keras.tree.pack_sequence_as(structure, list(range(len(flat)))))
        self.structure = structure

    def packed(self, flat: Sequence[Any]) -> Any:
        """Inputs as the model takes them."""
        return keras.tree.pack_sequence_as(self.structure, list(flat))

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """Return the outputs for some inputs, as Keras predicts them, in Keras's order."""
        return [np.asarray(item) for item in keras.tree.flatten(self.model.predict_on_batch(self.packed(flat)))]

    def outputs(self) -> Any:
        """The numbers of the outputs, in a list, a dict, or as they are."""
        result = self.model(self.packed([ones(entry) for entry in self.inputs]), training=False)
        return plain(keras.tree.pack_sequence_as(result, list(range(len(keras.tree.flatten(result))))))


def load(path: Path, code: Path | None) -> Any:
    """Return a model.

    Raises:
        ConfigError: See ``Loaded``.
    """
    importlib.import_module("ddlf.extras.text.conversion.operator")  # layers of models that were text
    own = own_layers(code) if code is not None else {}
    for name in find(path, code).own:  # registered when the file was written, and not in the code
        if (short := name.rpartition(">")[2]) in own:
            own.setdefault(name, own[short])
    try:
        with zipfile.ZipFile(path):  # a clearer error than Keras's, which only says that the file does not exist
            pass
        return keras.saving.load_model(path, custom_objects=own, compile=False)
    except Exception as error:
        said = " ".join(str(error).split())
        if "Could not locate" in said:
            name = said.partition("Could not locate")[2].partition("'")[2].partition("'")[0]
            raise ConfigError(
                f"{path} needs {name!r}, which {f'{code} has not' if code is not None else 'nobody has registered'}",
                hint="name the Python file that has it: --layers FILE.py",
            ) from error
        raise ConfigError(f"Keras cannot load {path}: {said[:300]}") from error


def own_layers(code: Path) -> dict[str, Any]:
    """Run a Python file, and return its layers by name: whether they are registered makes no difference then.

    Raises:
        ConfigError: The file itself fails.
    """
    sys.path.insert(0, str(code.parent.resolve()))  # as python FILE.py does
    spec = importlib.util.spec_from_file_location(code.stem, code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[code.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--layers {code} fails: {type(error).__name__}: {error}") from error
    return {
        name: item
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, keras.layers.Layer) and item.__module__ == module.__name__
    }


def _inputs(model: Any, path: Path) -> Any:
    """Return the inputs of a model in Keras's structure of shapes.

    Raises:
        ConfigError: Nobody knows yet.
    """
    if isinstance(model, keras.Sequential) and model.built and model.inputs:
        return model.inputs[0]
    if isinstance(model, keras.Model) and model.built and getattr(model, "inputs", None):
        return model.input
    known = getattr(model, "_build_shapes_dict", None)
    if not model.built or not known:
        raise ConfigError(
            f"{path} was never built: nobody knows what shape it takes",
            hint="give it a keras.Input, or call it once with data, and save it again",
        )
    if len(known) > 1 or not all(isinstance(item, int | None) for item in next(iter(known.values()))):
        raise ConfigError(
            f"{path} is a subclass of keras.Model that takes several arguments",
            hint="give it one, or make it of keras.Input and layers",
        )
    shape = next(iter(known.values()))
    return keras.KerasTensor((None, *shape[1:]), dtype=model.input_dtype, name="input_0")


def plain(structure: Any) -> Any:
    """A structure as JSON has it."""
    if isinstance(structure, dict):
        return {str(key): plain(value) for key, value in structure.items()}
    return [plain(item) for item in structure] if isinstance(structure, list | tuple) else structure


def ones(each: InputSpec, batch: int = 2) -> Any:
    """A small input, to call a model once."""
    return keras.ops.ones([batch, *(size or FREE for size in each.shape[1:])], each.dtype)


def made(loaded: Loaded, batch: int) -> list[Any]:
    """Return inputs for a model: normal values, whole numbers that its layers know, the same each time.

    Args:
        loaded: The model.
        batch: Samples.
    """
    random = np.random.default_rng([SEED, batch])
    counts = [getattr(layer, name, None) for layer in _layers(loaded.model) for name in COUNTS]
    most = min((int(item) for item in counts if item), default=WHOLE)
    result = []
    for spec in loaded.inputs:
        shape = [batch, *(size or FREE for size in spec.shape[1:])]
        if spec.dtype in ("string", "object"):
            raise ConfigError(
                f"the input {spec.name!r} takes text, and no text can be made up", hint="leave --verify out"
            )
        if "int" in spec.dtype:
            result.append(random.integers(0, most, shape).astype(spec.dtype))
        elif spec.dtype == "bool":
            result.append(random.integers(0, 2, shape).astype(bool))
        else:
            result.append(keras.ops.convert_to_numpy(keras.ops.cast(random.normal(size=shape), spec.dtype)))
    return result


def given(loaded: Loaded, path: Path, batch: int) -> list[Any]:
    """Return inputs from a file, its samples again and again.

    Args:
        loaded: The model.
        path: ``.npz`` with an array for each input, by its name; one input's may have any name.
        batch: Samples.

    Raises:
        ConfigError: It has no such array, or one of another shape.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--inputs {path} cannot be read: {error}") from error
    result = []
    for spec in loaded.inputs:
        array = next(iter(arrays.values())) if len(loaded.inputs) == len(arrays) == 1 else arrays.get(spec.name)
        if array is None:
            raise ConfigError(
                f"--inputs {path} has no array {spec.name!r}", hint=f"it has: {', '.join(arrays) or 'nothing'}"
            )
        fits = [wanted in (None, there) for wanted, there in zip(spec.shape[1:], array.shape[1:], strict=False)]
        if array.ndim != len(spec.shape) or not all(fits) or not len(array):
            raise ConfigError(f"--inputs {path}: {spec.name!r} takes {spec.shape}, and the array has {array.shape}")
        result.append(array[np.arange(batch) % len(array)].astype(spec.dtype))
    return result


def _layers(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers(layer)


def each_layer(loaded: Loaded, flat: Sequence[Any]) -> dict[str, Any]:
    """Return the output of each layer, also of layers inside layers, in the order in which their calls end.

    Further outputs of a layer, and outputs of its further calls, have a number behind its name. Outputs without values are left out: Keras
    compiles a loop around them.

    Args:
        loaded: The model.
        flat: Its inputs.
    """
    result: dict[str, Any] = {}
    times: dict[str, int] = {}
    usual = keras.Operation.__call__

    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = usual(operation, *args, **kwargs)
        times[operation.name] = count = times.get(operation.name, 0) + 1
        name = operation.name if count == 1 else f"{operation.name}, time {count}"
        leaves = keras.tree.flatten(outputs)
        for number, leaf in enumerate(leaves):
            try:
                result[name if len(leaves) == 1 else f"{name}, output {number}"] = keras.ops.convert_to_numpy(leaf)
            except Exception:  # a tracer: each backend raises another error
                continue
        return outputs

    keras.Operation.__call__ = call
    try:
        loaded.model(loaded.packed([keras.ops.convert_to_tensor(array) for array in flat]), training=False)
    finally:
        keras.Operation.__call__ = usual
    return result


# -- writing ---------------------------------------------------------------------------------------------------------------


def write(loaded: Loaded, format: Format, folder: Path, stem: str, batch: int | None = None) -> None:
    """Write the files of a format.

    Args:
        loaded: The model.
        format: The format.
        folder: Where to.
        stem: Their name without its ending.
        batch: Samples of each batch, of StableHLO only; None for any.
    """
    loaded.model(
        loaded.packed([ones(spec) for spec in loaded.inputs]), training=False
    )  # Keras exports only a called model
    paths = [folder / name for name in format.files(stem)]
    if format.name == "stablehlo":
        exported = stablehlo(loaded, batch)
        paths[0].write_bytes(exported.mlir_module_serialized)
        paths[1].write_bytes(exported.serialize())
        return
    more = {"dynamic_shapes": _free(loaded)} if format.name == "torch" else {}
    loaded.model.export(str(paths[0]), format=format.keras, verbose=False, **more)
    if format.name == "onnx":  # tf2onnx also writes operators that it does not know
        import onnx

        onnx.checker.check_model(str(paths[0]))


def _free(loaded: Loaded) -> Any:
    """Return the sizes that torch leaves open: the batch, with one name in all inputs, and axes without a fixed size."""
    import torch

    batch = torch.export.Dim("batch")
    axes = [
        {0: batch} | {axis: torch.export.Dim.AUTO for axis, size in enumerate(spec.shape) if axis and size is None}
        for spec in loaded.inputs
    ]
    return [(loaded.packed(axes),)]


def stablehlo(loaded: Loaded, batch: int | None = None) -> Any:
    """Return the model as JAX exports a function of its inputs, weights in it.

    Args:
        loaded: The model.
        batch: Samples of each batch; None for any.
    """
    import jax

    def predict(*flat: Any) -> tuple[Any, ...]:
        return tuple(keras.tree.flatten(loaded.model(loaded.packed(flat), training=False)))

    scope = jax.export.SymbolicScope()
    shapes = []
    for number, spec in enumerate(loaded.inputs):
        free = [str(batch or "batch"), *(f"size{number}_{axis}" for axis in range(1, len(spec.shape)))]
        text = ",".join(free[axis] if size is None else str(size) for axis, size in enumerate(spec.shape))
        shapes.append(jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, scope=scope), spec.dtype))
    return jax.export.export(jax.jit(predict))(*shapes)
