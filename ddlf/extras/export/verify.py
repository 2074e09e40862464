"""Compares a model on each Keras backend and each exported model in its own runtime, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.extras.export.export import Exported
from ddlf.extras.export.formats import BACKENDS, DISTRIBUTIONS, absent, to_install, version_of
from ddlf.extras.export.steps import Refused, StepRunner

BATCHES = (1, 7, 64)
"""Batch sizes: a single sample, an odd number of samples, and many samples."""
TOLERANCE = 1e-5
"""The default of the maximum difference between outputs and Keras's."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of running the model once, in Keras or in the runtime of an export format.

    Attributes:
        label: ``"keras"``, or the name of a format.
        by: The program that ran it, with its version.
        difference: The largest difference from the reference over all batches; None for the reference and for a failed
            run.
        batch: The batch size with that difference.
        seconds: The time of each batch.
        bytes: The size of the exported files.
        refused: The package that failed to write or run the model, and its reason; else None.
        lacking: The command that installs the missing runtime; empty if it is installed.
    """

    label: str
    by: str
    difference: float | None = None
    batch: int = 0
    seconds: tuple[float, ...] = ()
    bytes: int = 0
    refused: Refused | None = None
    lacking: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return the row for JSON."""
        data = asdict(self) | {"refused": None if self.refused is None else self.refused.to_data()}
        return {"what": data.pop("label"), **data}

    def agrees(self, tolerance: float) -> bool:
        """Return whether the model ran, and its outputs are within the tolerance."""
        return self.refused is None and not self.lacking and (self.difference or 0.0) <= tolerance


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """The comparison of a backend with the reference, layer by layer.

    Attributes:
        backend: The compared backend.
        count: The number of layers that both have.
        first: The name of the first layer that differs, in the order of the reference; empty if all agree.
        difference: The difference of the first different layer.
        before: The largest difference of the layers before it.
    """

    backend: str
    count: int
    first: str = ""
    difference: float = 0.0
    before: float = 0.0


class BackendComparison:
    """Runs one model on several backends and runtimes, and compares the outputs.

    Args:
        model: A ``.keras`` file.
        steps: The runner that starts a process for each run.
        reference: The Keras backend to compare all others with.
        inputs: A file with inputs. None makes up random inputs.
        batches: The batch sizes to run.
        layers: Whether to record the output of each layer.

    Attributes:
        facts: Facts of the model from Keras: ``inputs``, ``outputs``, ``layout``, ``parameters``.
    """

    def __init__(
        self,
        model: Path,
        steps: StepRunner,
        reference: str,
        *,
        inputs: Path | None = None,
        batches: Sequence[int] = BATCHES,
        layers: bool = False,
    ) -> None:
        self.model, self.steps, self.reference = model, steps, reference
        self.inputs, self.batches, self.layers = inputs, list(batches), layers
        self.facts: dict[str, Any] = {}
        self._layer_names: dict[str, list[str]] = {}

    @cached_property
    def reference_row(self) -> Row:
        """Run the model in Keras on the reference backend, only once, and return the result.

        Raises:
            ConfigError: The model or the inputs are invalid.
        """
        return self.keras(self.reference)

    def keras(self, backend: str) -> Row:
        """Run the model in Keras on a backend, after a run on the reference.

        Raises:
            ConfigError: The model or the inputs are invalid.
        """
        by = f"{BACKENDS[backend]} {version_of(DISTRIBUTIONS[backend])}"
        done = self.steps.do(
            f"keras-{backend}",
            backend,
            do="keras",
            model=str(self.model),
            batches=self.batches,
            inputs=str(self.inputs or ""),
            layers=self.layers,
        )
        if isinstance(done, Refused):
            return Row("keras", by, refused=done)
        if self.layers:
            self._layer_names[backend] = done["layers"]
        if backend == self.reference:
            self.facts = {key: done[key] for key in ("inputs", "outputs", "layout", "parameters")}
            self.facts["model"] = str(self.model)
            return Row("keras", by, seconds=tuple(done["seconds"]))
        return self._compared(Row("keras", by, seconds=tuple(done["seconds"])), f"keras-{backend}")

    def artefact(self, written: Exported) -> Iterator[Row]:
        """Run an exported model in each runtime of its format, and yield the comparison with the reference."""
        format = written.target.format
        if written.refused is not None:
            yield Row(format.name, f"Keras on {BACKENDS[written.target.backend]}", refused=written.refused)
            return
        for number, runtime in enumerate(format.runtimes):
            if missing := absent(runtime.modules):
                if number == 0:  # the further runtimes are optional
                    yield Row(format.name, runtime.called, bytes=written.bytes, lacking=to_install(missing))
                continue
            name = f"run-{format.name}-{runtime.name}"
            done = self.steps.do(
                name,
                "jax" if format.name == "stablehlo" else self.reference,
                do="run",
                runtime=runtime.name,
                artefact=str(written.target.paths[0].resolve()),
                facts=self.facts,
                batches=self.batches,
            )
            by = runtime.version()
            if isinstance(done, Refused):
                yield Row(format.name, by, bytes=written.bytes, refused=done)
                continue
            by += f", {done['note']}" if done.get("note") else ""
            yield self._compared(Row(format.name, by, bytes=written.bytes, seconds=tuple(done["seconds"])), name)

    def _compared(self, row: Row, name: str) -> Row:
        worst, worst_batch, problem = 0.0, 0, ""
        for batch in self.batches:
            expected = self.steps.outputs(f"keras-{self.reference}", batch)
            result = self.steps.outputs(name, batch)
            shapes, other_shapes = ([array.shape for array in arrays] for arrays in (expected, result))
            if shapes != other_shapes:
                problem = f"at batch {batch} it gives {_shapes(other_shapes)}, and Keras {_shapes(shapes)}"
                break
            deviation = max(map(difference, expected, result), default=0.0)
            if deviation >= worst:
                worst, worst_batch = deviation, batch
        refused = Refused(row.by, problem) if problem else None
        return Row(row.label, row.by, None if problem else worst, worst_batch, row.seconds, row.bytes, refused)

    def compare_layers(self, tolerance: float) -> list[LayerComparison]:
        """Compare the layers of each backend that ran with those of the reference, even if output shapes differ.

        Args:
            tolerance: The maximum difference at which layers count as equal.
        """
        if self.reference not in self._layer_names:
            return []
        return [self.first_layer(backend, tolerance) for backend in self._layer_names if backend != self.reference]

    def first_layer(self, backend: str, tolerance: float) -> LayerComparison:
        """Compare the layers of a backend with those of the reference on the largest batch.

        Args:
            backend: A backend that ran.
            tolerance: The maximum difference at which layers count as equal.
        """
        outputs, other_outputs = (
            dict(zip(self._layer_names[item], self.steps.outputs(f"keras-{item}", "layers"), strict=True))
            for item in (self.reference, backend)
        )
        common = [name for name in outputs if name in other_outputs]
        before = 0.0
        for name in common:
            is_same_shape = outputs[name].shape == other_outputs[name].shape
            deviation = difference(outputs[name], other_outputs[name]) if is_same_shape else math.inf
            if deviation > tolerance:
                return LayerComparison(backend, len(common), name, deviation, before)
            before = max(before, deviation)
        return LayerComparison(backend, len(common), before=before)


def difference(expected: Any, result: Any) -> float:
    """Return max |result - wanted| / max(1, max |wanted|).

    The difference is absolute if all wanted values are up to 1, else relative to the largest one. NaN only equals NaN.

    Args:
        expected: The array of the reference.
        result: The array to compare, of the same shape.
    """
    expected, result = np.asarray(expected, "float64"), np.asarray(result, "float64")
    if not expected.size:
        return 0.0
    is_equal = (expected == result) | (np.isnan(expected) & np.isnan(result))
    if not (np.isfinite(expected) & np.isfinite(result))[~is_equal].all():
        return math.inf
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    deviations = np.abs(np.subtract(result, expected, where=~is_equal, out=np.zeros_like(expected)))
    return float(deviations.max()) / scale


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def compare(
    comparison: BackendComparison, backends: Sequence[str], written: Sequence[Exported], tell: Callable[[Row], None]
) -> list[Row]:
    """Run the model on all backends and in all runtimes, the reference first.

    Args:
        comparison: Runs the model.
        backends: The Keras backends, the reference first.
        written: The exported models.
        tell: Called with each result as soon as it exists.

    Raises:
        ConfigError: The model or the inputs are invalid.
    """
    rows: list[Row] = []

    def add(row: Row) -> bool:
        rows.append(row)
        tell(row)
        return row.refused is None

    if add(comparison.reference_row):
        for backend in backends[1:]:
            add(comparison.keras(backend))
        for exported in written:
            for row in comparison.artefact(exported):
                add(row)
    return rows


def all_agree(rows: Sequence[Row], tolerance: float) -> bool:
    """Return whether all results are within the tolerance.

    A missing runtime only counts as a failure if no other runtime ran the format.
    """
    ran = {row.label for row in rows if row.agrees(tolerance)}
    return all(row.agrees(tolerance) or (row.lacking and row.label in ran) for row in rows)
