"""Compare the results of the browser's engine with the results of Keras for the same model."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlf.extras.text.conversion.weights import variables
from ddlf.peers.browser.graph import layer_graph

TOLERANCE = 1e-5
Arrays = list[np.ndarray[Any, Any]]


@dataclass
class Case:
    """One model with its batches.

    Args:
        name: The name of the case, for messages.
        model: The compiled Keras model.
        batches: Inputs and labels of each training step.
    """

    name: str
    model: Any
    batches: Sequence[tuple[Arrays, Arrays]]
    written: dict[str, Any] = field(init=False)
    weights: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = variables(self.model)
        self.written = {
            "graph": layer_graph(self.model, self.weights),
            "weights": {name: packed(value.numpy()) for name, value in self.weights.items()},
            "batches": [
                {"inputs": all_packed(inputs), "labels": all_packed(labels)} for inputs, labels in self.batches
            ],
        }

    def wrong(self, got: dict[str, Any], tolerance: float = TOLERANCE) -> list[str]:
        """Train the model with Keras, and return how the engine's results differ."""
        if "error" in got:
            return [f"{self.name}: {got['error']}"]
        problems: list[str] = []

        def compare(label: str, expected: Any, actual: Any) -> None:
            expected, actual = np.asarray(expected, np.float32), np.asarray(actual, np.float32)
            if expected.shape != actual.shape:
                problems.append(f"{self.name}: {label} has the shape {actual.shape} instead of {expected.shape}")
            elif not np.allclose(expected, actual, rtol=tolerance, atol=tolerance, equal_nan=True):
                problems.append(f"{self.name}: {label} differs by {np.abs(expected - actual).max():.2g}")

        batches = [(alone(inputs), alone(labels)) for inputs, labels in self.batches]
        inputs, labels = batches[0]
        outputs = self.model(inputs, training=False)
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        for number, (expected, output) in enumerate(zip(outputs, got["outputs"], strict=True)):
            compare(f"output {number}", expected, unpacked(output["data"]).reshape(output["shape"]))
        for name, value in self.model.test_on_batch(inputs, labels, return_dict=True).items():
            compare(f"{name} before training", value, got["evaluated"][name])
        for number, (inputs, labels) in enumerate(batches):
            self.model.reset_metrics()
            for name, value in self.model.train_on_batch(inputs, labels, return_dict=True).items():
                compare(f"{name} of step {number}", value, got["trained"][number][name])
        for name, value in self.weights.items():
            compare(f"{name} after training", value.numpy(), unpacked(got["weights"][name]).reshape(value.shape))
        return problems


def alone(arrays: Arrays) -> Any:
    """Return arrays in the form that Keras expects: a single array without a list."""
    return arrays if len(arrays) > 1 else arrays[0]


def packed(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode()


def unpacked(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), "<f4")


def all_packed(arrays: Arrays) -> list[dict[str, Any]]:
    return [{"data": packed(array), "shape": list(array.shape)} for array in arrays]
