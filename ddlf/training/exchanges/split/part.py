"""A part of a model: its forward and backward passes over micro-batches, and its steps. Runs in the executor.

Keras trains whole models only. Here the calls of a part run one after another, and the backend differentiates them::

    outputs, loss = part(received activations, inputs of the model)
    gradients of weights and of received activations = backward(gradients of the outputs, share of the loss)

For n samples in micro-batches of n_m, the loss is the sum of n_m / n times the losses of the micro-batches. So each
micro-batch begins its backward pass with n_m / n instead of 1, and the gradients of all micro-batches are added up.
The loss of a part is its regularization. The last part adds the compiled loss, and counts the metrics.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlf.data.trees import tree_map
from ddlf.errors import AppError
from ddlf.training.exchanges.split.graph import functional
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.program import WHOLE, Name, Segment
from ddlf.training.slot.metric_variables import make_variables_of
from ddlf.training.slot.optimizers import state_of

LARGE = 1 << 20
"""Tensors with more values are added, and stepped, one by one."""


class ModelPart(ABC):
    """A part of a model on a worker. Each backend has a subclass.

    Args:
        plan: How the model is cut.
        number: Number of the part, from 0.

    Attributes:
        weights: The Keras variables of the part's weights.
        trained: The weights that the optimizer steps.
        borrowed: Trained weights of other parts that this part uses, by their number in ``model.weights``.
        segments: Its segments, in order.
        replica: Number of its replica, from 0.
        moving: Numbers of the weights that it changes without training them, such as moving averages.
        reads: Whether it needs samples or labels.
        losses: Sum of the regularization of the epoch, weighted by samples; 0 in the last part, which counts it itself.
        is_last: Whether it computes the loss.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        graph, part = plan.graph, plan.parts[number]
        self._plan, self.number = plan, number
        self._model = model = graph.model
        self._function = functional(model)
        self.replica, self._number_in_replica = plan.replica(number), number % plan.parts_of_replica
        self.segments = plan.program.segments[self._number_in_replica]
        self.weights = [model.weights[index] for index in part.weights]
        own_ids = {id(weight) for weight in self.weights}
        self.trained = [weight for weight in model.trainable_variables if id(weight) in own_ids]
        trained = {id(weight) for weight in model.trainable_variables}
        borrowed = {index: model.weights[index] for index, _ in part.borrows}
        self.borrowed = {index: weight for index, weight in borrowed.items() if id(weight) in trained}
        self._sources = [*self.trained, *self.borrowed.values()]
        self._inputs = part.inputs
        self.is_last = self._number_in_replica == plan.parts_of_replica - 1
        first = {id(model.weights[index]) for index in part.first}
        self._regularized = [
            source for source in self._sources if source.regularizer is not None and id(source) in first
        ]
        self._has_loss = self.is_last or bool(self._regularized)
        calls = {op.call for segment in self.segments for op in segment.ops if op.call >= 0}
        for call in calls:
            plan.program.ways[call].adapt(graph.calls[call].operation, number % plan.program.workers)
        layers = {id(graph.calls[call].operation): graph.calls[call].operation for call in calls}.values()
        inner = [
            sublayer for layer in layers if hasattr(layer, "_flatten_layers") for sublayer in layer._flatten_layers()
        ]
        untrained = {
            id(weight) for layer in inner for weight in layer._non_trainable_variables if "float" in str(weight.dtype)
        }
        self.moving = [index for index in part.all_weights if id(model.weights[index]) in untrained]
        self._seeds = _seeds(plan, calls)
        self.reads = bool(self._inputs) or self.is_last
        self._sums: list[Any] | None = None
        self.losses = 0.0

    # -- a micro-batch ------------------------------------------------------------------------------------------------

    def data(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs, labels and sample weights of a micro-batch, as far as the part uses them."""
        if self.is_last:
            return (batch[0] if self._inputs else (), *batch[1:])
        return (batch[0],) if self._inputs else ()

    def prepare(self, batch: tuple[Any, ...]) -> None:
        """Make Keras create the variables of losses and metrics, which it otherwise does in the first batch."""
        if self.is_last:
            make_variables_of(self._model, self._function, *batch)
            # With several outputs, the loss has metrics. Keras counts their calls in compiled steps.
            for metric in self._model._compile_loss.metrics:
                count = type(metric).update_state
                vars(metric)["update_state"] = lambda value, sample_weight=None, metric=metric, count=count: count(
                    metric, value, sample_weight=self._samples
                )

    def data_of(self, segment: Segment, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the data that a segment uses."""
        if segment.has_loss:
            return data
        return data[:1] if segment.inputs else ()

    def _words(self, segment: Segment, seed: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
        """Return the random states of a segment's calls in a micro-batch.

        They follow from the seed, and from the layer and its call in the whole model, so the cut changes nothing.
        """
        states = []
        for _, index, earlier_uses, state in self._seeds_of(segment):
            sequence = np.random.SeedSequence([*seed, index, earlier_uses] if earlier_uses else [*seed, index])
            states.append((sequence.generate_state(2) >> np.uint32(1)).astype(str(state.dtype)))
        return states

    def _seeds_of(self, segment: Segment) -> list[tuple[int, int, int, Any]]:
        calls = {op.call for op in segment.ops}
        return [seed for seed in self._seeds if seed[0] in calls]

    def _sources_of(self, segment: Segment) -> list[int]:
        """Return which of the sources a segment uses, by their numbers. The last one has the regularization."""
        weights = self._model.weights
        used = {id(weights[index]) for op in segment.ops for index in op.weights}
        if segment is self.segments[-1]:
            used.update(map(id, self._regularized))
        return [number for number, source in enumerate(self._sources) if id(source) in used]

    def _fixed_of(self, segment: Segment) -> list[Any]:
        """Return the variables of a segment's layers that are not trained, such as random states."""
        calls = sorted({op.call for op in segment.ops if op.call >= 0})
        layers = [self._plan.graph.calls[call].operation for call in calls]
        variables = [weight for layer in layers for weight in getattr(layer, "non_trainable_variables", [])]
        return [*{id(weight): weight for weight in variables}.values()]

    def _run(
        self,
        segment: Segment,
        values: Sequence[Any],
        data: tuple[Any, ...],
        words: Sequence[Any],
        training: bool = True,
    ) -> tuple[list[Any], Any]:
        """Compute a segment of a micro-batch. Return the values that it gives, and the loss; 0 without one."""
        import keras
        from keras.src.models.functional import unpack_singleton

        computed: dict[Name, Any] = {segment.names[i]: value for i, value in zip(segment.takes, values, strict=True)}
        if segment.inputs:
            tensors = self._function._standardize_inputs(data[0])
            computed.update(
                (Name(WHOLE, tensor, self._number_in_replica), tensors[tensor]) for tensor in segment.inputs
            )
        random_states = self._seeds_of(segment) if training else []
        seeds = [(call, state, value) for (call, _, _, state), value in zip(random_states, words, strict=True)]
        for op in segment.ops:
            for _, state, value in (seed for seed in seeds if seed[0] == op.call):
                state.assign(value)
            if op.gives:
                results = op.compute([computed[name] for name in op.takes], training)
                computed.update(zip(op.gives, results, strict=True))
            if op.call >= 0 and getattr(self._plan.graph.calls[op.call].operation, "_losses", None):
                call = self._plan.graph.calls[op.call]
                call.operation._clear_losses()
                raise AppError(
                    f"the layer {call.name!r} calls add_loss, and with split no worker has the whole loss",
                    hint="use a regularizer of its weights, or leave out split",
                )
        losses = []
        if segment is self.segments[-1]:
            losses = [
                keras.ops.cast(source.regularizer(source), keras.backend.floatx()) for source in self._regularized
            ]
        if segment.has_loss:
            flat = [computed[name] for name in segment.ops[-1].takes]
            outputs = unpack_singleton(keras.tree.pack_sequence_as(self._function._outputs_struct, flat))
            y, weight = (*data[1:], None, None)[:2]
            samples = self._samples = keras.ops.shape(flat[0])[0]
            losses.insert(0, self._model._compile_loss(y, outputs, weight))
            losses = [keras.ops.sum(losses) if len(losses) > 1 else losses[0]]
            self._model._loss_tracker.update_state(losses[0], sample_weight=samples)
            if self._model._compile_metrics is not None:
                self._model._compile_metrics.update_state(y, outputs, sample_weight=weight)
        loss = keras.ops.sum(losses) if losses else keras.ops.zeros(())
        return [computed[segment.names[i]] for i in segment.gives], loss

    def _has_loss_in(self, segment: Segment) -> bool:
        return self._has_loss and segment is self.segments[-1]

    @abstractmethod
    def forward(
        self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment over a micro-batch.

        Args:
            segment: The segment.
            values: The values that it takes, in their order.
            data: The result of ``data_of``.
            samples: Number of samples.
            seed: Seed of the random numbers.

        Returns:
            The values that it gives, in their order; and the activations, which ``backward`` needs.
        """

    @abstractmethod
    def backward(self, segment: Segment, activations: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment over a micro-batch, and add its gradients to the sums.

        Args:
            segment: The segment.
            activations: Second result of ``forward``.
            gradients: The gradients of the given values, in their order; None without a gradient.
            share: Factor of the loss: the micro-batch's part of the samples of its batch.

        Returns:
            The gradients of the taken values that are differentiable, in their order.
        """

    def evaluate(self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...], samples: int) -> list[Any]:
        """Compute a segment of a batch as ``Model.evaluate`` does, and count its losses and metrics.

        Args:
            segment, values, data, samples: Arguments of ``forward``.

        Returns:
            The values that it gives, in their order.
        """
        outputs, loss = self._evaluated(segment, values, data)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return outputs

    @abstractmethod
    def _evaluated(self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Return the outputs of a segment and its loss in an evaluation."""

    def _back(self, segment: Segment) -> list[bool]:
        """Return for each value that a segment takes whether it has a gradient."""
        return [self._plan.program.values[number].differentiable for number in segment.takes]

    def _add(self, indices: Sequence[int], gradients: list[Any]) -> None:
        """Add the gradients of some sources to the sums, and remove them from the list.

        One large gradient goes at a time, so that each is freed before the next one is added.
        """
        sums = self._sums = self._sums or [None] * len(self._sources)
        for number, index in enumerate(indices):
            if gradients[number] is not None and sums[index] is None:
                sums[index], gradients[number] = self._first(index, gradients[number]), None
        for numbers in one_by_one(gradients):
            added = self._added(
                [sums[indices[position]] for position in numbers], [gradients[position] for position in numbers]
            )
            for position, value in zip(numbers, added, strict=True):
                sums[indices[position]], gradients[position] = value, None

    def _first(self, index: int, gradient: Any) -> Any:
        """Return the sum of one gradient."""
        return gradient

    @abstractmethod
    def _added(self, sums: list[Any], gradients: list[Any]) -> Sequence[Any]:
        """Return each sum with one more gradient. The sums may be changed."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def shared(self, index: int) -> np.ndarray[Any, Any]:
        """Return the sum of the gradients of a borrowed weight, by its index in ``model.weights``."""
        number = len(self.trained) + list(self.borrowed).index(index)
        total = None if self._sums is None else self._sums[number]
        weight = self.borrowed[index]
        return np.zeros(weight.shape, weight.dtype) if total is None else np.asarray(total)

    def add(self, index: int, gradient: np.ndarray[Any, Any]) -> None:
        """Add the sum of another part to the gradient of a weight that this part owns."""
        import keras

        weight = self._model.weights[index]
        number = next(number for number, trained in enumerate(self.trained) if trained is weight)
        self._sums = self._sums or [None] * len(self._sources)
        addend, total = keras.ops.convert_to_tensor(gradient), self._sums[number]
        self._sums[number] = addend if total is None else total + addend

    def value(self, index: int) -> np.ndarray[Any, Any]:
        """Return a copy of the value of a weight, by its index in ``model.weights``."""
        import keras

        return np.array(keras.ops.convert_to_numpy(self._model.weights[index]))

    def trains(self, index: int) -> bool:
        """Return whether the optimizer of this part steps a weight, by its index in ``model.weights``."""
        return any(weight is self._model.weights[index] for weight in self.trained)

    def squares(self) -> np.ndarray[Any, Any]:
        """Return the sum of the squared gradient of each trained weight."""
        import keras

        sums = self._sums or [None] * len(self.trained)
        values = [0.0 if g is None else float(keras.ops.sum(keras.ops.square(g))) for g in sums[: len(self.trained)]]
        return np.array(values, np.float64)

    def step(self, scale: float = 1.0) -> None:
        """Make one step of the optimizer with the sums of the gradients times a factor, and begin new sums."""

        sums, self._sums = self._sums or [], None
        pairs = [(g, v) for g, v in zip(sums, self.trained, strict=False) if g is not None]
        if pairs:
            gradients, variables = map(list, zip(*pairs, strict=True))
            self._apply(gradients, variables, scale)

    @abstractmethod
    def _apply(self, gradients: list[Any], variables: list[Any], scale: float) -> None:
        """Make a step of the optimizer with the gradients times a factor."""

    # -- state --------------------------------------------------------------------------------------------------------

    def read(self) -> list[np.ndarray[Any, Any]]:
        """Return the values of the part's weights."""
        import keras

        return [keras.ops.convert_to_numpy(weight) for weight in self.weights]

    def begin_round(self) -> None:
        """Forget the gradients of a batch that an earlier attempt at a round has not finished."""
        self._sums = None

    def begin_epoch(self) -> None:
        """Begin to count losses and metrics of an epoch."""
        self.losses = 0.0
        if self.is_last:
            self._model.reset_metrics()


class TensorFlowPart(ModelPart):
    """A part of a model in TensorFlow. A tape keeps the activations of a micro-batch until its backward pass."""

    _adding: Any = None

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__(plan, number)
        self._stepping: dict[tuple[int, ...], Any] = {}  # by the ids of the variables
        self._totals: list[Any] = [None] * len(self._sources)  # the memory of the sums, which every step uses again
        self._compiled: dict[int, Any] = {}  # by the id of a segment
        self._evaluating: dict[int, Any] = {}

    def forward(
        self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment, as ``ModelPart.forward`` describes."""
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(value) for value in values]
        data = tree_map(tf.convert_to_tensor, data)
        words = list(map(tf.convert_to_tensor, self._words(segment, seed)))
        if id(segment) not in self._compiled:
            spec = _any_number((tensors, data))
            seeds = [tf.TensorSpec(array.shape, array.dtype) for array in words]
            run = partial(self._run, segment)
            # AutoGraph does not convert Python code here, and Keras does not let it convert the steps of ``fit`` either.
            # The conversion would take a fifth of the time of the compilation.
            self._compiled[id(segment)] = tf.function(run, input_signature=(*spec, seeds), autograph=False)
        sources = [tensor for tensor, has_gradient in zip(tensors, self._back(segment), strict=True) if has_gradient]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([self._sources[index].value for index in self._sources_of(segment)])
            tape.watch(sources)
            outputs, loss = self._compiled[id(segment)](tensors, data, words)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (tape, list(outputs), loss, sources)

    def backward(self, segment: Segment, activations: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment, as ``ModelPart.backward`` describes."""
        import tensorflow as tf

        tape, outputs, loss, sources = activations
        targets = [
            (tensor, tf.convert_to_tensor(g)) for tensor, g in zip(outputs, gradients, strict=True) if g is not None
        ]
        if self._has_loss_in(segment):
            targets.append((loss, tf.cast(share, loss.dtype)))
        if not targets:
            return [tf.zeros_like(tensor) for tensor in sources]
        indices = self._sources_of(segment)
        variables = [self._sources[index].value for index in indices]
        ends, factors = map(list, zip(*targets, strict=True))
        computed = tape.gradient(ends, [*variables, *sources], output_gradients=factors)
        back = zip(computed[len(variables) :], sources, strict=True)
        result = [tf.zeros_like(tensor) if g is None else tf.convert_to_tensor(g) for g, tensor in back]
        weight_gradients = [None if g is None else tf.convert_to_tensor(g) for g in computed[: len(variables)]]
        del computed  # so that ``_add`` has the only references to the gradients
        self._add(indices, weight_gradients)
        return result

    def _evaluated(self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import tensorflow as tf

        tensors, data = [tf.convert_to_tensor(value) for value in values], tree_map(tf.convert_to_tensor, data)
        if id(segment) not in self._evaluating:
            run = lambda values, data: self._run(segment, values, data, (), training=False)  # noqa: E731
            spec = _any_number((tensors, data))
            self._evaluating[id(segment)] = tf.function(run, input_signature=spec, autograph=False)
        outputs, loss = self._evaluating[id(segment)](tensors, data)
        return list(outputs), loss

    def _first(self, index: int, gradient: Any) -> Any:
        import tensorflow as tf

        if self._totals[index] is None:
            self._totals[index] = tf.Variable(gradient, trainable=False)
        else:
            self._totals[index].assign(gradient, read_value=False)
        return self._totals[index]

    def _added(self, sums: list[Any], gradients: list[Any]) -> Sequence[Any]:
        import tensorflow as tf

        if self._adding is None:

            @tf.function(autograph=False)  # type: ignore[untyped-decorator]
            def adding(sums: list[Any], gradients: list[Any]) -> None:
                for total, gradient in zip(sums, gradients, strict=True):
                    total.assign_add(gradient, read_value=False)

            self._adding = adding
        # In place: a new tensor for each sum would cost more time, and the memory of all gradients once more.
        self._adding(sums, gradients)
        return sums

    def _apply(self, gradients: list[Any], variables: list[Any], scale: float) -> None:
        # One large weight at a time: TensorFlow would step all at once, with several temporary tensors for each. All
        # of these steps begin with the same values of variables that belong to all weights, such as the step count.
        import tensorflow as tf

        weight_of = dict(zip(self._plan.optimizer.paths, self._plan.optimizer.weight_of, strict=True))
        shared = [variable for variable in state_of(self._model) if weight_of[variable.path] is None]
        initial = [tf.convert_to_tensor(variable) for variable in shared]
        for number, positions in enumerate(one_by_one(gradients)):
            for variable, value in zip(shared, initial, strict=True) if number else ():
                variable.assign(value)
            scaled = [gradients[position] for position in positions]
            if scale != 1.0:
                scaled = [tf.convert_to_tensor(gradient) * tf.cast(scale, gradient.dtype) for gradient in scaled]
            self._step_of([variables[position] for position in positions])(scaled)

    def _step_of(self, variables: list[Any]) -> Any:
        """Return the compiled step of some variables."""
        import tensorflow as tf

        key = tuple(map(id, variables))
        if key not in self._stepping:
            apply = self._model.optimizer.apply

            self._stepping[key] = tf.function(
                lambda sums: apply([tf.convert_to_tensor(total) for total in sums], variables), autograph=False
            )
        return self._stepping[key]


class JaxPart(ModelPart):
    """A part of a model in JAX. The function that ``jax.vjp`` returns keeps the activations of a micro-batch."""

    _backward: Any = None
    _adding: Any = None
    _stepping: Any = None

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__(plan, number)
        self._forward: dict[int, Any] = {}  # by the id of a segment
        self._evaluating: dict[int, Any] = {}

    def _states(self, segment: Segment) -> list[Any]:
        """Return the variables that a forward pass of a segment may change."""
        return [*self._fixed_of(segment), *(self._model.metrics_variables if segment.has_loss else ())]

    def _compiled(self, segment: Segment) -> Any:
        """Return the compiled forward pass of a segment."""
        import jax
        import keras

        states, back = self._states(segment), self._back(segment)
        sources = [self._sources[index] for index in self._sources_of(segment)]

        def run(trained: Any, floats: Any, non_floats: Any, before: Any, data: Any, words: Any) -> Any:
            mapping = [*zip(sources, trained, strict=True), *zip(states, before, strict=True)]
            remaining = {True: iter(floats), False: iter(non_floats)}
            values = [next(remaining[has_gradient]) for has_gradient in back]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                result = self._run(segment, values, data, words)
            after = [scope.get_current_value(state) for state in states]
            return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

        def forward(trained: Any, floats: Any, non_floats: Any, before: Any, data: Any, words: Any) -> Any:
            return jax.vjp(lambda t, f: run(t, f, non_floats, before, data, words), trained, floats, has_aux=True)

        return jax.jit(forward)

    def forward(
        self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment, as ``ModelPart.forward`` describes."""
        if id(segment) not in self._forward:
            self._forward[id(segment)] = self._compiled(segment)
        states, back = self._states(segment), self._back(segment)
        floats = [value for value, has_gradient in zip(values, back, strict=True) if has_gradient]
        non_floats = [value for value, has_gradient in zip(values, back, strict=True) if not has_gradient]
        trained = [self._sources[index].value for index in self._sources_of(segment)]
        before, words = [state.value for state in states], self._words(segment, seed)
        (outputs, loss), pull, after = self._forward[id(segment)](trained, floats, non_floats, before, data, words)
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (pull, list(outputs), loss)

    def backward(self, segment: Segment, activations: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment, as ``ModelPart.backward`` describes."""
        import jax

        pull, outputs, loss = activations
        if self._backward is None:
            self._backward = jax.jit(lambda pull, ends: pull(ends))
        ends = [
            _no_gradient(output) if g is None else jax.numpy.asarray(g)
            for output, g in zip(outputs, gradients, strict=True)
        ]
        weight_gradients, value_gradients = self._backward(pull, (ends, jax.numpy.asarray(share, loss.dtype)))
        self._add(self._sources_of(segment), list(weight_gradients))
        return list(value_gradients)

    def _evaluated(self, segment: Segment, values: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import jax
        import keras

        states = [*(self._sources[index] for index in self._sources_of(segment)), *self._states(segment)]
        if id(segment) not in self._evaluating:

            def run(before: Any, values: Any, data: Any) -> Any:
                with keras.StatelessScope(state_mapping=list(zip(states, before, strict=True))) as scope:
                    result = self._run(segment, values, data, (), training=False)
                after = [scope.get_current_value(state) for state in states]
                return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

            self._evaluating[id(segment)] = jax.jit(run)
        before = [state.value for state in states]
        (outputs, loss), after = self._evaluating[id(segment)](before, list(values), data)
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        return list(outputs), loss

    def _added(self, sums: list[Any], gradients: list[Any]) -> Sequence[Any]:
        import jax

        if self._adding is None:
            self._adding = jax.jit(
                lambda sums, gradients: [a + b for a, b in zip(sums, gradients, strict=True)], donate_argnums=0
            )
        new_sums: Sequence[Any] = self._adding(sums, gradients)
        return new_sums

    def _apply(self, gradients: list[Any], variables: list[Any], scale: float) -> None:
        import jax
        import keras

        optimizer = self._model.optimizer
        if scale != 1.0:
            pairs = zip(gradients, variables, strict=True)
            gradients = [keras.ops.multiply(g, keras.ops.cast(scale, v.dtype)) for g, v in pairs]
        if self._stepping is None:
            self._stepping = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
        states = optimizer.variables
        values, after = self._stepping(
            [state.value for state in states], gradients, [variable.value for variable in variables]
        )
        for variable, value in zip([*variables, *states], [*values, *after], strict=True):
            variable.assign(value)


def one_by_one(gradients: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the numbers of all small gradients, then of each large one. None stands for a missing gradient."""
    present = [number for number, gradient in enumerate(gradients) if gradient is not None]
    small = [number for number in present if math.prod(gradients[number].shape) <= LARGE]
    if small:
        yield small
    yield from ([number] for number in present if number not in small)


def _any_number(tensors: Any) -> Any:
    """Return the signature of TensorFlow's tensors with any number of samples.

    The bits of a result must not depend on the number of samples in earlier work.
    """
    import tensorflow as tf

    return tree_map(lambda tensor: tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype), tensors)


def _seeds(plan: Plan, calls: Collection[int]) -> list[tuple[int, int, int, Any]]:
    """Return the random states that some calls use.

    Returns:
        For each one: the number of the call; the number of the state in the model; how many earlier calls use it; and
        its Keras variable.
    """
    model, used = plan.graph.model, dict[int, int]()
    states = [variable for variable in model.non_trainable_variables if variable.path.endswith("seed_generator_state")]
    index_of = {id(state): index for index, state in enumerate(states)}
    seeds = []
    for number, call in enumerate(plan.graph.calls):
        layers = call.operation._flatten_layers() if hasattr(call.operation, "_flatten_layers") else ()
        for state in (generator.state for layer in layers for generator in layer._seed_generators):
            earlier_uses = used[id(state)] = used.get(id(state), -1) + 1
            if number in calls:
                seeds.append((number, index_of[id(state)], earlier_uses, state))
    return seeds


def _no_gradient(tensor: Any) -> Any:
    import jax

    if jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating):
        return jax.numpy.zeros_like(tensor)
    return np.zeros(tensor.shape, jax.dtypes.float0)


KINDS: dict[str, Callable[[Plan, int], ModelPart]] = {"tensorflow": TensorFlowPart, "jax": JaxPart}
"""The class of a part for each backend of Keras."""
