"""Writes a model in one format, in the process of a step, through Keras's own ``export`` where Keras has the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from ddlf.extras.export.formats import Format
from ddlf.extras.export.keras_model import Loaded, ones


def write(loaded: Loaded, format: Format, folder: Path, stem: str, batch: int | None = None) -> None:
    """Write the files of a format.

    Args:
        loaded: The model.
        format: The format.
        folder: Where to.
        stem: Their name without its ending.
        batch: Samples of each batch, of StableHLO only; None for any.
    """
    loaded.model(loaded.packed([ones(each) for each in loaded.inputs]), training=False)  # Keras exports what was called
    paths = [folder / name for name in format.files(stem)]
    if format.name == "stablehlo":
        exported = stablehlo(loaded, batch)
        paths[0].write_bytes(exported.mlir_module_serialized)
        paths[1].write_bytes(exported.serialize())
        return
    more = {"dynamic_shapes": _free(loaded)} if format.name == "torch" else {}
    loaded.model.export(str(paths[0]), format=format.keras, verbose=False, **more)
    if format.name == "onnx":  # tf2onnx writes what it does not know all the same
        import onnx

        onnx.checker.check_model(str(paths[0]))


def _free(loaded: Loaded) -> Any:
    """Which sizes torch leaves open: the batch, of one name in all inputs, and what has no size of its own."""
    import torch

    batch = torch.export.Dim("batch")
    axes = [
        {0: batch} | {axis: torch.export.Dim.AUTO for axis, size in enumerate(each.shape) if axis and size is None}
        for each in loaded.inputs
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
    for number, each in enumerate(loaded.inputs):
        free = [str(batch or "batch"), *(f"size{number}_{axis}" for axis in range(1, len(each.shape)))]
        text = ",".join(free[axis] if size is None else str(size) for axis, size in enumerate(each.shape))
        shapes.append(jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, scope=scope), each.dtype))
    return jax.export.export(jax.jit(predict))(*shapes)
