"""Keras metrics as numbers by name, and their merge over slots. Workers read the metrics, the master merges them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlf.errors import AppError
from ddlf.training.context import App
from ddlf.training.slot.build import first_rows, sample
from ddlf.training.slot.task import NOTHING_COUNTED, MetricCounts

MAX_STATE_BYTES = 1 << 20
"""Maximum size of the metrics' state that travels. Larger metrics are averaged by value. An AUC has 3 kB."""


def scalars(values: Any) -> dict[str, float]:
    """Return metrics as floats by name. An array becomes ``f1_score_0``, ``f1_score_1`` and so on.

    Raises:
        AppError: A metric is not a number.
    """
    if not isinstance(values, Mapping):
        raise AppError(
            f"metrics must be a dict of numbers by name, got a {type(values).__name__}",
            hint="let train return (update, {'loss': ...})",
        )
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            array = np.asarray(_in_memory(value)).astype(np.float64)
        except (TypeError, ValueError):
            raise AppError(
                f"the metric {name!r} is {value!r}, which is not a number", hint="leave it out, or give a number for it"
            ) from None
        for index in np.ndindex(array.shape):
            numbers["_".join([str(name), *map(str, index)])] = float(array[index])
    return numbers


def _in_memory(value: Any) -> Any:
    """Return a tensor as an array in this process's memory, and other values as they are. NumPy itself cannot read a
    tensor of PyTorch on a card.
    """
    ops = getattr(sys.modules.get("keras"), "ops", None)
    return ops.convert_to_numpy(value) if ops is not None and ops.is_tensor(value) else value


def counted_names(model: Any, metrics: Mapping[str, float]) -> list[str | None]:
    """Return the names of a model's metrics; None in place of a name if ``metrics`` has another value than Keras.

    Args:
        model: Model after training.
        metrics: Values of the last epoch from ``fit``. A user's train step may return anything.
    """
    variables = [variable for metric in model.metrics for variable in metric.variables]
    if sum(np.prod(variable.shape) for variable in variables) * 8 > MAX_STATE_BYTES:
        return []
    values = scalars(model.get_metrics_result())
    names = [
        name if np.array_equal(metrics.get(name, ()), value, equal_nan=True) else None for name, value in values.items()
    ]
    return names if any(names) else []


def read_counts(model: Any, names: Sequence[str | None]) -> MetricCounts:
    """Return the sums and counts of a model's metrics.

    The sums over all slots determine the exact metrics of a round.

    Args:
        model: The model.
        names: The result of ``counted_names``.
    """
    import keras

    if not any(names):
        return NOTHING_COUNTED
    variables = [variable for metric in model.metrics for variable in metric.variables]
    return MetricCounts(names, [keras.ops.convert_to_numpy(variable) for variable in variables])


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A worker's evaluation of weights on its own data.

    Args:
        metrics: The metrics.
        samples: Number of samples.
        counted: The counts behind the metrics.
    """

    metrics: Mapping[str, float]
    samples: int
    counted: MetricCounts


class MetricMerge:
    """Merges the metrics of all slots of a round, so that the result does not depend on the workers.

    Keras counts in its metrics, with sample weights and masks, and computes values from the counts. This class does the
    same with the sums of the counts over all slots. Other values, such as the result of a user's ``train``, are
    averaged, weighted by samples.

    Args:
        app: The user's ``IApp``, with data and model.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._model = app.model  # read once: a later read of app.model would set each round's weights
        self._ready: bool | None = None

    def __call__(self, parts: Sequence[tuple[Mapping[str, float], int, MetricCounts]]) -> dict[str, float]:
        """Return the metrics of a round, merged from the metrics of its slots.

        Args:
            parts: Metrics, number of samples, and the counts behind the metrics, for each slot.
        """
        if len(parts) == 1:
            return dict(parts[0][0])
        total = sum(samples for _, samples, _ in parts)
        names = dict.fromkeys(name for metrics, _, _ in parts for name in metrics)
        merged = {}
        for name in names:
            values = [(metrics[name], samples) for metrics, samples, _ in parts if name in metrics]
            count = sum(samples for _, samples in values) or total
            merged[name] = sum(value * samples for value, samples in values) / count
        return {**merged, **self._counted([counts for _, _, counts in parts])}

    def of(self, counts: MetricCounts) -> dict[str, float]:
        """Return the metrics that follow from sums and counts in ``model.metrics``; empty if these do not fit."""
        return self._counted([counts])

    def _counted(self, counts: Sequence[MetricCounts]) -> dict[str, float]:
        names = counts[0].names
        if not names or any(list(other.names) != list(names) for other in counts) or not self._build():
            return {}
        metrics = self._model.metrics
        variables = [variable for metric in metrics for variable in metric.variables]
        shapes = [tuple(variable.shape) for variable in variables]
        if any([np.shape(array) for array in other.state] != shapes for other in counts):
            return {}
        sums = [
            np.sum(arrays, axis=0, dtype=np.float64).astype(np.asarray(arrays[0]).dtype)
            for arrays in zip(*(other.state for other in counts), strict=True)
        ]
        results: dict[str, Any] = {}
        for metric in metrics:
            metric_sums, sums = sums[: len(metric.variables)], sums[len(metric.variables) :]
            value = metric.stateless_result(metric_sums)
            results.update(value if isinstance(value, dict) else {metric.name: value})
        # By place, not by name: this model may have been created after others, so its automatic names differ.
        values = list(scalars(results).values())
        if len(values) != len(names):
            return {}
        return {name: value for name, value in zip(names, values, strict=True) if name is not None}

    def _build(self) -> bool:
        """Make Keras create the variables of the metrics in the master's model.

        Otherwise Keras creates them in the first batch.
        """
        if self._ready is None:
            model = self._model
            try:
                x, y, w = (*sample(first_rows(self._app, "train")), None, None)[:3]
                outputs = model(x)
                model.compute_loss(x, y, outputs, w)
                model.compute_metrics(x, y, outputs, w)
                model.reset_metrics()
                self._ready = True
            except Exception:  # a user's train_step may update its metrics in any way
                self._ready = False
        return self._ready
