"""Loads, runs and writes a Keras model in the process of a step, where ``KERAS_BACKEND`` is set."""

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
"""The length of an axis without a fixed size in generated inputs."""
WHOLE = 10
"""Generated whole numbers are below this limit, if no layer defines another limit."""
COUNTS = ("input_dim", "num_tokens", "num_bins")
"""Attributes of Keras layers with the number of whole numbers that the layer accepts."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The description of one input of a model: its name, shape and type.

    Attributes:
        name: Its name in Keras.
        shape: Its shape with the batch axis. None is a variable size.
        dtype: The name of its type.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


class Loaded:
    """A loaded model that takes its inputs as a list, in Keras's order.

    Args:
        path: A ``.keras`` file.
        code: The Python file with the user's own layers, or None.

    Raises:
        ConfigError: Keras cannot load the model, or it was never built.

    Attributes:
        model: The Keras model.
        inputs: The model's inputs.
        layout: The structure of the model's inputs, a list, a dict or a single value, with input numbers in place of
            arrays.
    """

    def __init__(self, path: Path, code: Path | None) -> None:
        self.model = load(path, code)
        structure = _inputs(self.model, path)
        flat = keras.tree.flatten(structure)
        self.inputs = [
            InputSpec(str(array.name or f"input_{number}"), (None, *array.shape[1:]), str(array.dtype))
            for number, array in enumerate(flat)
        ]
        self.layout = plain_structure(keras.tree.pack_sequence_as(structure, list(range(len(flat)))))
        self.structure = structure

    def packed(self, flat: Sequence[Any]) -> Any:
        """Return a list of inputs in the structure that the model takes."""
        return keras.tree.pack_sequence_as(self.structure, list(flat))

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """Return the predictions for some inputs as a list in Keras's order."""
        return [np.asarray(item) for item in keras.tree.flatten(self.model.predict_on_batch(self.packed(flat)))]

    def outputs(self) -> Any:
        """Return the structure of the outputs, with output numbers in place of arrays."""
        result = self.model(self.packed([input_of_ones(entry) for entry in self.inputs]), training=False)
        return plain_structure(keras.tree.pack_sequence_as(result, list(range(len(keras.tree.flatten(result))))))


def load(path: Path, code: Path | None) -> Any:
    """Load a Keras model from a ``.keras`` file, with the user's own layers if there is a file with them.

    Raises:
        ConfigError: Keras cannot load the model, or it was never built.
    """
    importlib.import_module("ddlf.extras.text.conversion.operator")  # registers the layers that texts use
    custom_layers = own_layers(code) if code is not None else {}
    for name in find(path, code).custom_layers:  # packages that may have registered layers of this file
        if (short := name.rpartition(">")[2]) in custom_layers:
            custom_layers.setdefault(name, custom_layers[short])
    try:
        with zipfile.ZipFile(path):  # This error is clearer than Keras's, which only says that the file does not exist.
            pass
        return keras.saving.load_model(path, custom_objects=custom_layers, compile=False)
    except Exception as error:
        message = " ".join(str(error).split())
        if "Could not locate" in message:
            name = message.partition("Could not locate")[2].partition("'")[2].partition("'")[0]
            raise ConfigError(
                f"{path} needs {name!r}, which {f'{code} has not' if code is not None else 'nobody has registered'}",
                hint="name the Python file that has it: --layers FILE.py",
            ) from error
        raise ConfigError(f"Keras cannot load {path}: {message[:300]}") from error


def own_layers(code: Path) -> dict[str, Any]:
    """Run the user's Python file, and return the Keras layers in it by name, so that the file need not register them.

    Raises:
        ConfigError: The file raises an error.
    """
    sys.path.insert(0, str(code.parent.resolve()))  # like python FILE.py
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
    """Return the shapes of a model's inputs in the structure in which Keras takes the inputs.

    Raises:
        ConfigError: The shapes of the inputs are unknown, because the model was never built.
    """
    if isinstance(model, keras.Sequential) and model.built and model.inputs:
        return model.inputs[0]
    if isinstance(model, keras.Model) and model.built and getattr(model, "inputs", None):
        return model.input
    shapes = getattr(model, "_build_shapes_dict", None)
    if not model.built or not shapes:
        raise ConfigError(
            f"the model in {path} was never built, so the shape of its input is unknown",
            hint="give it a keras.Input, or call it once with data, and save it again",
        )
    if len(shapes) > 1 or not all(isinstance(item, int | None) for item in next(iter(shapes.values()))):
        raise ConfigError(
            f"{path} is a subclass of keras.Model that takes several arguments",
            hint="give it a single argument, or build the model from keras.Input and layers",
        )
    shape = next(iter(shapes.values()))
    return keras.KerasTensor((None, *shape[1:]), dtype=model.input_dtype, name="input_0")


def plain_structure(structure: Any) -> Any:
    """Convert a nested structure of Keras to plain lists and dicts, so that it can be written as JSON."""
    if isinstance(structure, dict):
        return {str(key): plain_structure(value) for key, value in structure.items()}
    return [plain_structure(item) for item in structure] if isinstance(structure, list | tuple) else structure


def input_of_ones(spec: InputSpec, batch: int = 2) -> Any:
    """Return an input array of ones, to call a model once."""
    return keras.ops.ones([batch, *(size or FREE for size in spec.shape[1:])], spec.dtype)


def random_inputs(loaded: Loaded, batch: int) -> list[Any]:
    """Return random inputs for a model, from a fixed seed: normal values, or whole numbers that its layers accept.

    Args:
        loaded: The model.
        batch: The number of samples.
    """
    random = np.random.default_rng([SEED, batch])
    counts = [getattr(layer, name, None) for layer in _layers(loaded.model) for name in COUNTS]
    most = min((int(item) for item in counts if item), default=WHOLE)
    result = []
    for spec in loaded.inputs:
        shape = [batch, *(size or FREE for size in spec.shape[1:])]
        if spec.dtype in ("string", "object"):
            raise ConfigError(
                f"the input {spec.name!r} takes text, and DDLF cannot generate texts", hint="leave --verify out"
            )
        if "int" in spec.dtype:
            result.append(random.integers(0, most, shape).astype(spec.dtype))
        elif spec.dtype == "bool":
            result.append(random.integers(0, 2, shape).astype(bool))
        else:
            result.append(keras.ops.convert_to_numpy(keras.ops.cast(random.normal(size=shape), spec.dtype)))
    return result


def inputs_from_file(loaded: Loaded, path: Path, batch: int) -> list[Any]:
    """Return a batch of inputs from a file. If the file has too few samples, they repeat.

    Args:
        loaded: The model.
        path: An ``.npz`` file with an array for each input by its name. If the model has one input, the name is free.
        batch: The number of samples.

    Raises:
        ConfigError: The file lacks an array, or an array has the wrong shape.
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
        fits = [expected in (None, actual) for expected, actual in zip(spec.shape[1:], array.shape[1:], strict=False)]
        if array.ndim != len(spec.shape) or not all(fits) or not len(array):
            raise ConfigError(f"--inputs {path}: {spec.name!r} takes {spec.shape}, and the array has {array.shape}")
        result.append(array[np.arange(batch) % len(array)].astype(spec.dtype))
    return result


def _layers(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers(layer)


def outputs_by_layer(loaded: Loaded, flat: Sequence[Any]) -> dict[str, Any]:
    """Return the output of each layer, including nested layers, in the order in which the calls end.

    A number follows the layer's name for its further outputs and calls. Outputs without values, inside a loop that
    Keras compiles, are missing.

    Args:
        loaded: The model.
        flat: A list of the model's inputs.
    """
    result: dict[str, Any] = {}
    call_counts: dict[str, int] = {}
    original_call = keras.Operation.__call__

    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original_call(operation, *args, **kwargs)
        call_counts[operation.name] = count = call_counts.get(operation.name, 0) + 1
        name = operation.name if count == 1 else f"{operation.name}, time {count}"
        leaves = keras.tree.flatten(outputs)
        for number, leaf in enumerate(leaves):
            try:
                result[name if len(leaves) == 1 else f"{name}, output {number}"] = keras.ops.convert_to_numpy(leaf)
            except Exception:  # the output is a tracer, and each backend raises another error for it
                continue
        return outputs

    keras.Operation.__call__ = call
    try:
        loaded.model(loaded.packed([keras.ops.convert_to_tensor(array) for array in flat]), training=False)
    finally:
        keras.Operation.__call__ = original_call
    return result


# -- writing ---------------------------------------------------------------------------------------------------------------


def write(loaded: Loaded, format: Format, folder: Path, stem: str, batch: int | None = None) -> None:
    """Write the files of a model in an export format.

    Args:
        loaded: The model.
        format: The format.
        folder: The folder to write to.
        stem: The name of the files without a suffix.
        batch: The fixed batch size, for StableHLO only; None for a variable one.
    """
    # Keras exports only a called model.
    loaded.model(loaded.packed([input_of_ones(spec) for spec in loaded.inputs]), training=False)
    paths = [folder / name for name in format.files(stem)]
    if format.name == "stablehlo":
        exported = stablehlo(loaded, batch)
        paths[0].write_bytes(exported.mlir_module_serialized)
        paths[1].write_bytes(exported.serialize())
        return
    options = {"dynamic_shapes": _free(loaded)} if format.name == "torch" else {}
    loaded.model.export(str(paths[0]), format=format.keras, verbose=False, **options)
    if format.name == "onnx":  # tf2onnx also writes operators that it does not know
        import onnx

        onnx.checker.check_model(str(paths[0]))


def _free(loaded: Loaded) -> Any:
    """Return the sizes that the program exported by torch accepts in any number: the batch, with one name in all
    inputs, and each axis without a fixed size."""
    import torch

    batch = torch.export.Dim("batch")
    axes = [
        {0: batch} | {axis: torch.export.Dim.AUTO for axis, size in enumerate(spec.shape) if axis and size is None}
        for spec in loaded.inputs
    ]
    return [(loaded.packed(axes),)]


def stablehlo(loaded: Loaded, batch: int | None = None) -> Any:
    """Return the model as an exported JAX function of its inputs, including the weights.

    Args:
        loaded: The model.
        batch: The fixed batch size; None for a variable one.
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
