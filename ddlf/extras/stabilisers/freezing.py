"""Freezing by depth: the first layers are frozen, and the next layers take shorter steps. Runs wherever a model is.

``ddlf/algorithms/multipliers.py`` has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ddlf.algorithms.multipliers import factors
from ddlf.errors import ConfigError
from ddlf.extras.stabilisers.multipliers import Multipliers, factor_of
from ddlf.extras.stabilisers.wrapper import Wrapper
from ddlf.training.slot.optimizers import read_position


def depths(model: Any) -> dict[str, tuple[int, int]]:
    """Return the depth of each trained layer by name: the lengths of its longest paths from an input and to an output,
    counted in layers.

    Args:
        model: A built Sequential or functional model. The layers of a nested model count one by one.

    Raises:
        ConfigError: The model does not define the order in which its layers are called.
    """
    calls: list[tuple[str, list[int]]] = []
    if _graph(model) is not None:
        _add(model, {id(tensor): [] for tensor in model.inputs}, calls)
    before, after = [0] * len(calls), [1] * len(calls)
    for index, (_, sources) in enumerate(calls):
        before[index] = 1 + max((before[source] for source in sources), default=0)
    for index, (_, sources) in reversed(list(enumerate(calls))):
        for source in sources:
            after[source] = max(after[source], after[index] + 1)
    by_name: dict[str, tuple[int, int]] = {}
    for index, (name, _) in enumerate(calls):
        from_input, to_output = by_name.get(name, (0, 0))
        by_name[name] = max(from_input, before[index]), max(to_output, after[index])
    names = [layer.name for layer in model._flatten_layers() if layer._trainable_variables and not _graph(layer)]
    if missing := [name for name in names if name not in by_name]:
        raise ConfigError(
            f"the layer {missing[0]!r} has no depth: {model.name!r} does not say in which order its layers are called",
            hint="give the factors by name: Multipliers(optimizer, {'dense': 0.1})",
        )
    return {name: by_name[name] for name in names}


def _graph(model: Any) -> Any:
    """Return the object that knows how the layers of a model are connected; None for a layer, or for a model that does
    not define this.
    """
    graph = getattr(model, "_functional", model)
    return graph if getattr(graph, "_nodes_by_depth", None) else None


def _add(model: Any, sources: dict[int, list[int]], calls: list[tuple[str, list[int]]]) -> list[list[int]]:
    """Append the calls of a model's layers to ``calls``, in the order of computation. A call has the layer's name and
    the indices of the calls that it reads.

    Args:
        model: A model with a graph.
        sources: The indices of the calls that compute each tensor. It starts with the model's inputs, and receives all
            other tensors.
        calls: The calls so far.

    Returns:
        For each output of the model, the indices of the calls that compute it.
    """
    graph = _graph(model)
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            inputs = [sources[id(tensor)] for tensor in node.input_tensors]
            if not inputs:
                continue  # an input
            if _graph(layer := node.operation) is not None:
                inner_sources = {id(tensor): index for tensor, index in zip(_graph(layer).inputs, inputs, strict=True)}
                outputs = _add(layer, inner_sources, calls)
            else:
                calls.append((layer.name, sorted({index for indices in inputs for index in indices})))
                outputs = [[len(calls) - 1]] * len(node.output_tensors)
            sources.update({id(tensor): index for tensor, index in zip(node.output_tensors, outputs, strict=True)})
    return [sources[id(tensor)] for tensor in graph.outputs]


def frozen_to(model: Any, share: float, optimizer: Any) -> Any:
    """Return an optimizer that freezes the first layers of a model by their depth.

    Args:
        model: A built Sequential or functional model.
        share: The frozen share of the depth, f in [0, 1]. With 0 no layer is frozen, with 1 every layer that has
            weights.
        optimizer: The optimizer that updates the weights.
    """
    layer_factors = factors(depths(model), share)
    return Multipliers(optimizer, layer_factors) if layer_factors else optimizer


@keras.saving.register_keras_serializable(package="ddlf")
class Unfreezing(Wrapper):
    """Freeze layers by depth, and unfreeze them during the run. The run has one part of equal length for each share.

    ``Unfreezing`` multiplies the step of a weight, like ``Multipliers``. The inner optimizer also updates its state for
    frozen weights, so that its moments are ready when it unfreezes them.

    Args:
        inner_optimizer: The optimizer that updates the weights.
        stages: For each part of the run, the factors by layer name, as in ``Multipliers``.
        steps: Number of steps, needed for training with plain Keras. A DDLF run sets this number itself.
        name: The optimizer's name in Keras.

    Raises:
        ConfigError: ``stages`` is empty, or plain Keras trains and ``steps`` is missing.
    """

    follows_the_run = True

    def __init__(
        self,
        inner_optimizer: Any,
        stages: Sequence[Mapping[str, float]],
        steps: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(inner_optimizer, name)
        self.stages = [{str(key): float(factor) for key, factor in stage.items()} for stage in stages]
        if not self.stages:
            raise ConfigError("stages is empty", hint="Unfreezing.of(model, optimizer, (0.75, 0.5, 0))")
        self.steps = steps
        self.position: Any = None

    @classmethod
    def of(cls, model: Any, optimizer: Any, shares: Sequence[float], steps: int | None = None) -> Any:
        """Create the optimizer for a model. ``shares`` has the frozen share of the depth in each part of the run."""
        layer_depths = depths(model)
        return cls(optimizer, [factors(layer_depths, share) for share in shares], steps)

    def plan(self, steps: int, epochs: int) -> None:
        """Set the number of steps of the run, so that each part has the same length. Like ``RunSchedule.plan``."""
        self.position, self.steps = None, steps

    def begin(self, variables: list[Any]) -> None:
        """Find the factors of each weight in all parts of the run. Implements ``Wrapper.begin``."""
        self._by_key = {
            self._var_key(variable): [factor_of(variable.path, stage) for stage in self.stages]
            for variable in variables
        }

    def change(self, gradients: list[Any], variables: list[Any]) -> None:
        """Take a step with the factors of the current part of the run. Implements ``Wrapper.change``."""
        stage = self._stage()
        with_levels = [(v, self._by_key[self._var_key(v)]) for v in variables]
        slowed = [(v, levels) for v, levels in with_levels if set(levels) != {1.0}]
        before = [keras.ops.copy(v) for v, _ in slowed]  # the inner optimizer updates weights in place
        self.inner_optimizer.apply(gradients, variables)
        for (variable, levels), old in zip(slowed, before, strict=True):
            variable.assign(
                keras.ops.switch(stage, [_part(level) for level in levels], old, keras.ops.convert_to_tensor(variable))
            )

    def _stage(self) -> Any:
        iterations = self.inner_optimizer.iterations
        if self.position is not None:
            step, steps, _ = read_position(self.position, iterations)
        elif self.steps is not None:
            step, steps = keras.ops.cast(iterations, "float32") + 1, self.steps
        else:
            raise ConfigError(
                "Unfreezing needs the number of steps of the run, which plain Keras does not tell it",
                hint="Unfreezing.of(..., steps=epochs * ceil(samples / batch_size)), or train with DDLF",
            )
        parts = len(self.stages)
        return keras.ops.cast(keras.ops.clip(keras.ops.floor((step - 1) * parts / steps), 0, parts - 1), "int32")

    def options(self) -> dict[str, Any]:
        """Return the arguments to save with the optimizer. Implements ``Wrapper.options``."""
        return {"stages": self.stages, "steps": self.steps}


def _part(level: float) -> Any:
    """Return a function that moves a weight only a share ``level`` of the way from its old to its new value.

    A frozen weight keeps its bits, and a free one has the bits of the inner optimizer.
    """
    if level in (0.0, 1.0):
        return lambda old, new: new if level else old
    return lambda old, new: old + keras.ops.cast(level, old.dtype) * (new - old)
