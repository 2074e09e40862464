"""Runs exported models in the runtimes of other programs, within the process of a step (see ``steps``).

Each function loads a file, and returns a function that takes a list of inputs and returns a list of outputs.

Each runtime has its own order of inputs and outputs. They are matched with Keras's by name. A runtime without names has
Keras's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[list[Any]], Sequence[Any]]


def saved_model(path: Path, facts: dict[str, Any]) -> Run:
    """Load a SavedModel with TensorFlow, and return the function that runs it."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))

    def run(flat: list[Any]) -> Sequence[Any]:
        result = loaded.serve(packed(facts["layout"], [tf.constant(array) for array in flat]))
        return [array.numpy() for array in unpacked(facts["outputs"], result)]

    return run


def onnx(path: Path, facts: dict[str, Any]) -> Run:
    """Load an ONNX file with onnxruntime, and return the function that runs it."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    port_names = [port.name for port in session.get_inputs()]
    names = match_names([spec["name"] for spec in facts["inputs"]], port_names)
    return lambda flat: session.run(None, dict(zip(names, flat, strict=True)))


def litert(path: Path, facts: dict[str, Any]) -> Run:
    """Load a LiteRT file with LiteRT, and return the function that runs it."""
    from ai_edge_litert.interpreter import Interpreter

    return _lite(Interpreter(model_path=str(path)), facts)


def tflite(path: Path, facts: dict[str, Any]) -> Run:
    """Load a LiteRT file with TensorFlow's interpreter, which also has the operators that LiteRT lacks."""
    import tensorflow as tf

    return _lite(tf.lite.Interpreter(model_path=str(path)), facts)


def _lite(interpreter: Any, facts: dict[str, Any]) -> Run:
    runner = interpreter.get_signature_runner(next(iter(interpreter.get_signature_list())))
    names = match_names([spec["name"] for spec in facts["inputs"]], list(runner.get_input_details()))

    def run(flat: list[Any]) -> Sequence[Any]:
        result = runner(**dict(zip(names, flat, strict=True)))
        output_names = _names(facts["outputs"])
        return [result[name] for name in match_names(output_names, sorted(result, key=_number_in_name))]

    return run


def openvino(path: Path, facts: dict[str, Any]) -> Run:
    """Load an OpenVINO file with OpenVINO in 32 bits.

    By default, OpenVINO uses 16 bits on processors that support them.
    """
    import openvino as ov

    compiled = ov.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    port_names = [port.any_name for port in compiled.inputs]
    names = match_names([spec["name"] for spec in facts["inputs"]], port_names)

    def run(flat: list[Any]) -> Sequence[Any]:
        result = compiled(dict(zip(names, flat, strict=True)))
        # Further outputs, such as the size of a batch, may follow the model's outputs.
        return [result[port] for port in compiled.outputs[: len(_names(facts["outputs"]))]]

    return run


def torch(path: Path, facts: dict[str, Any]) -> Run:
    """Load a program that torch has exported, and return the function that runs it."""
    import torch as library

    module = library.export.load(str(path)).module()

    def run(flat: list[Any]) -> Sequence[Any]:
        with library.no_grad():
            result = module(packed(facts["layout"], [library.from_numpy(array) for array in flat]))
        return [array.numpy() for array in unpacked(facts["outputs"], result)]

    return run


def iree(path: Path, facts: dict[str, Any]) -> Run:
    """Compile StableHLO for this processor with IREE.

    One compilation serves all batch sizes. If IREE cannot do that, each batch size is compiled, like ``ddlf export
    --batch``.
    """
    from iree.compiler import tools

    modules: dict[int, Any] = {}
    try:
        free = _compiled(path.read_bytes())
    except tools.CompilerToolError:
        if not facts.get("model"):
            raise
        from ddlf.extras.export.keras_model import Loaded, stablehlo

        free, loaded = None, Loaded(Path(facts["model"]), Path(facts["code"]) if facts["code"] else None)
        facts["note"] = "batch fixed"

    def run(flat: list[Any]) -> Sequence[Any]:
        module, batch = free, len(flat[0])
        if module is None:
            if batch not in modules:
                modules[batch] = _compiled(stablehlo(loaded, batch).mlir_module_serialized)
            module = modules[batch]
        result = module.main(*flat)
        return [item.to_host() for item in (result if isinstance(result, list | tuple) else [result])]

    return run


def _compiled(module: bytes) -> Any:
    from iree import runtime
    from iree.compiler import tools

    compiled = tools.compile_str(
        module,
        input_type="stablehlo",
        target_backends=["llvm-cpu"],
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    return runtime.load_vm_flatbuffer(compiled, driver="local-task")


def jax(path: Path, facts: dict[str, Any]) -> Run:
    """Load StableHLO with JAX, from the file for JAX beside the given one."""
    import jax as library

    exported = library.export.deserialize(bytearray(path.with_suffix(".jax").read_bytes()))
    call = library.jit(exported.call)
    return lambda flat: [np.asarray(item) for item in call(*flat)]


RUNTIMES: dict[str, Callable[[Path, dict[str, Any]], Run]] = {
    item.__name__: item for item in (saved_model, onnx, litert, tflite, openvino, torch, iree, jax)
}
"""The functions of this module by the name of the runtime in ``formats``."""


def packed(layout: Any, flat: Sequence[Any]) -> Any:
    """Put the values of a list into a structure whose leaves are indices of the list."""
    if isinstance(layout, dict):
        return {key: packed(value, flat) for key, value in layout.items()}
    return [packed(item, flat) for item in layout] if isinstance(layout, list) else flat[layout]


def unpacked(layout: Any, result: Any) -> list[Any]:
    """Return the values in a nested structure as a list. This is the inverse of ``packed``."""
    flat: dict[int, Any] = {}

    def take(layout: Any, result: Any) -> None:
        if isinstance(layout, dict):
            for key, value in layout.items():
                take(value, result[key])
        elif isinstance(layout, list):
            for value, item in zip(layout, result, strict=True):
                take(value, item)
        else:
            flat[layout] = result

    take(layout, result)
    return [flat[number] for number in range(len(flat))]


def match_names(keras_names: Sequence[str], runtime_names: Sequence[str]) -> list[str]:
    """Return a runtime's names of inputs or outputs in the order of Keras's names, so that values can be passed in the
    right order.

    A runtime's name may contain more than Keras's. If a Keras name is in none or in several of the runtime's names, the
    runtime's order is used.

    Args:
        keras_names: Names in Keras.
        runtime_names: Names in the runtime, in its order.
    """
    result = []
    for name in keras_names:
        candidates = [array for array in runtime_names if array == name] or [
            array for array in runtime_names if name and name in array
        ]
        if len(candidates) != 1:
            return list(runtime_names)
        result += candidates
    return result if len(set(result)) == len(keras_names) else list(runtime_names)


def _names(layout: Any) -> list[str]:
    """Return the names of outputs: their keys, if they have keys."""
    if isinstance(layout, dict):
        result = sorted((value, key) for key, value in layout.items() if isinstance(value, int))
        return [key for _, key in result]
    return [""] * (len(layout) if isinstance(layout, list) else 1)


def _number_in_name(name: str) -> tuple[int, str]:
    digits = name.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else 0, name)
