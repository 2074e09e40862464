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
        self.replica, self._place = plan.replica(number), number % plan.parts_of_replica
        self.segments = plan.program.segments[self._place]
        self.weights = [model.weights[place] for place in part.weights]
        mine = {id(weight) for weight in self.weights}
        self.trained = [weight for weight in model.trainable_variables if id(weight) in mine]
        trained = {id(weight) for weight in model.trainable_variables}
        others = {place: model.weights[place] for place, _ in part.borrows}
        self.borrowed = {place: weight for place, weight in others.items() if id(weight) in trained}
        self._sources = [*self.trained, *self.borrowed.values()]
        self._inputs = part.inputs
        self.is_last = self._place == plan.parts_of_replica - 1
        first = {id(model.weights[place]) for place in part.first}
        self._regularized = [one for one in self._sources if one.regularizer is not None and id(one) in first]
        self._has_loss = self.is_last or bool(self._regularized)
        calls = {op.call for segment in self.segments for op in segment.ops if op.call >= 0}
        for call in calls:
            plan.program.ways[call].adapt(graph.calls[call].operation, number % plan.program.workers)
        layers = {id(graph.calls[call].operation): graph.calls[call].operation for call in calls}.values()
        inner = [one for layer in layers if hasattr(layer, "_flatten_layers") for one in layer._flatten_layers()]
        kept = {id(one) for layer in inner for one in layer._non_trainable_variables if "float" in str(one.dtype)}
        self.moving = [place for place in part.all_weights if id(model.weights[place]) in kept]
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
            for one in self._model._compile_loss.metrics:  # with several outputs; Keras counts calls in compiled steps
                count = type(one).update_state
                vars(one)["update_state"] = lambda value, sample_weight=None, one=one, count=count: count(
                    one, value, sample_weight=self._samples
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
        found = []
        for _, place, again, state in self._seeds_of(segment):
            sequence = np.random.SeedSequence([*seed, place, again] if again else [*seed, place])
            found.append((sequence.generate_state(2) >> np.uint32(1)).astype(str(state.dtype)))
        return found

    def _seeds_of(self, segment: Segment) -> list[tuple[int, int, int, Any]]:
        calls = {op.call for op in segment.ops}
        return [one for one in self._seeds if one[0] in calls]

    def _sources_of(self, segment: Segment) -> list[int]:
        """Return which of the sources a segment uses, by their numbers. The last one has the regularization."""
        weights = self._model.weights
        used = {id(weights[place]) for op in segment.ops for place in op.weights}
        if segment is self.segments[-1]:
            used.update(map(id, self._regularized))
        return [number for number, one in enumerate(self._sources) if id(one) in used]

    def _fixed_of(self, segment: Segment) -> list[Any]:
        """Return the variables of a segment's layers that are not trained, such as random states."""
        calls = sorted({op.call for op in segment.ops if op.call >= 0})
        layers = [self._plan.graph.calls[call].operation for call in calls]
        kept = [weight for layer in layers for weight in getattr(layer, "non_trainable_variables", [])]
        return [*{id(weight): weight for weight in kept}.values()]

    def _run(
        self,
        segment: Segment,
        taken: Sequence[Any],
        data: tuple[Any, ...],
        words: Sequence[Any],
        training: bool = True,
    ) -> tuple[list[Any], Any]:
        """Compute a segment of a micro-batch. Return the values that it gives, and the loss; 0 without one."""
        import keras
        from keras.src.models.functional import unpack_singleton

        found: dict[Name, Any] = {segment.names[one]: value for one, value in zip(segment.takes, taken, strict=True)}
        if segment.inputs:
            values = self._function._standardize_inputs(data[0])
            found.update((Name(WHOLE, tensor, self._place), values[tensor]) for tensor in segment.inputs)
        known = self._seeds_of(segment) if training else []
        seeds = [(call, state, one) for (call, _, _, state), one in zip(known, words, strict=True)]
        for op in segment.ops:
            for _, state, one in (seed for seed in seeds if seed[0] == op.call):
                state.assign(one)
            if op.gives:
                made = op.compute([found[name] for name in op.takes], training)
                found.update(zip(op.gives, made, strict=True))
            if op.call >= 0 and getattr(self._plan.graph.calls[op.call].operation, "_losses", None):
                call = self._plan.graph.calls[op.call]
                call.operation._clear_losses()
                raise AppError(
                    f"the layer {call.name!r} calls add_loss, and with split no worker has the whole loss",
                    hint="use a regularizer of its weights, or leave out split",
                )
        losses = []
        if segment is self.segments[-1]:
            losses = [keras.ops.cast(one.regularizer(one), keras.backend.floatx()) for one in self._regularized]
        if segment.has_loss:
            flat = [found[name] for name in segment.ops[-1].takes]
            outputs = unpack_singleton(keras.tree.pack_sequence_as(self._function._outputs_struct, flat))
            y, weight = (*data[1:], None, None)[:2]
            samples = self._samples = keras.ops.shape(flat[0])[0]
            losses.insert(0, self._model._compile_loss(y, outputs, weight))
            losses = [keras.ops.sum(losses) if len(losses) > 1 else losses[0]]
            self._model._loss_tracker.update_state(losses[0], sample_weight=samples)
            if self._model._compile_metrics is not None:
                self._model._compile_metrics.update_state(y, outputs, sample_weight=weight)
        loss = keras.ops.sum(losses) if losses else keras.ops.zeros(())
        return [found[segment.names[one]] for one in segment.gives], loss

    def _has_loss_in(self, segment: Segment) -> bool:
        return self._has_loss and segment is self.segments[-1]

    @abstractmethod
    def forward(
        self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment over a micro-batch.

        Args:
            segment: The segment.
            taken: The values that it takes, in their order.
            data: The result of ``data_of``.
            samples: Number of samples.
            seed: Seed of the random numbers.

        Returns:
            The values that it gives, in their order; and the argument ``kept`` of ``backward``, which has the activations.
        """

    @abstractmethod
    def backward(self, segment: Segment, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment over a micro-batch, and add its gradients to the sums.

        Args:
            segment: The segment.
            kept: Second result of ``forward``.
            gradients: The gradients of the given values, in their order; None without a gradient.
            share: Factor of the loss: the micro-batch's part of the samples of its batch.

        Returns:
            The gradients of the taken values that are differentiable, in their order.
        """

    def evaluate(self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...], samples: int) -> list[Any]:
        """Compute a segment of a batch as ``Model.evaluate`` does, and count its losses and metrics.

        Args:
            segment, taken, data, samples: Arguments of ``forward``.

        Returns:
            The values that it gives, in their order.
        """
        outputs, loss = self._evaluated(segment, taken, data)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return outputs

    @abstractmethod
    def _evaluated(self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Return the outputs of a segment and its loss in an evaluation."""

    def _back(self, segment: Segment) -> list[bool]:
        """Return for each value that a segment takes whether it has a gradient."""
        return [self._plan.program.values[one].differentiable for one in segment.takes]

    def _add(self, places: Sequence[int], gradients: list[Any]) -> None:
        """Add the gradients of some sources to the sums, and remove them from the list.

        One large gradient goes at a time, so that each is freed before the next one is added.
        """
        sums = self._sums = self._sums or [None] * len(self._sources)
        for number, place in enumerate(places):
            if gradients[number] is not None and sums[place] is None:
                sums[place], gradients[number] = self._first(place, gradients[number]), None
        for numbers in one_by_one(gradients):
            added = self._added([sums[places[one]] for one in numbers], [gradients[one] for one in numbers])
            for one, value in zip(numbers, added, strict=True):
                sums[places[one]], gradients[one] = value, None

    def _first(self, place: int, gradient: Any) -> Any:
        """Return the sum of one gradient."""
        return gradient

    @abstractmethod
    def _added(self, ones: list[Any], others: list[Any]) -> Sequence[Any]:
        """Return each sum of ``ones`` with one more gradient. They may be changed."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def shared(self, place: int) -> np.ndarray[Any, Any]:
        """Return the sum of the gradients of a borrowed weight, by its number in ``model.weights``."""
        number = len(self.trained) + list(self.borrowed).index(place)
        found = None if self._sums is None else self._sums[number]
        weight = self.borrowed[place]
        return np.zeros(weight.shape, weight.dtype) if found is None else np.asarray(found)

    def add(self, place: int, gradient: np.ndarray[Any, Any]) -> None:
        """Add the sum of another part to the gradient of a weight that this part owns."""
        import keras

        weight = self._model.weights[place]
        number = next(number for number, one in enumerate(self.trained) if one is weight)
        self._sums = self._sums or [None] * len(self._sources)
        more, mine = keras.ops.convert_to_tensor(gradient), self._sums[number]
        self._sums[number] = more if mine is None else mine + more

    def value(self, place: int) -> np.ndarray[Any, Any]:
        """Return a copy of the value of a weight, by its number in ``model.weights``."""
        import keras

        return np.array(keras.ops.convert_to_numpy(self._model.weights[place]))

    def trains(self, place: int) -> bool:
        """Return whether the optimizer of this part steps a weight, by its number in ``model.weights``."""
        return any(one is self._model.weights[place] for one in self.trained)

    def squares(self) -> np.ndarray[Any, Any]:
        """Return the sum of the squared gradient of each trained weight."""
        import keras

        sums = self._sums or [None] * len(self.trained)
        found = [0.0 if g is None else float(keras.ops.sum(keras.ops.square(g))) for g in sums[: len(self.trained)]]
        return np.array(found, np.float64)

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
        self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment, as ``ModelPart.forward`` describes."""
        import tensorflow as tf

        values = [tf.convert_to_tensor(one) for one in taken]
        data = tree_map(tf.convert_to_tensor, data)
        words = list(map(tf.convert_to_tensor, self._words(segment, seed)))
        if id(segment) not in self._compiled:
            spec = _any_number((values, data))
            seeds = [tf.TensorSpec(one.shape, one.dtype) for one in words]
            run = partial(self._run, segment)
            self._compiled[id(segment)] = tf.function(run, input_signature=(*spec, seeds))
        sources = [value for value, has in zip(values, self._back(segment), strict=True) if has]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([self._sources[place].value for place in self._sources_of(segment)])
            tape.watch(sources)
            outputs, loss = self._compiled[id(segment)](values, data, words)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (tape, list(outputs), loss, sources)

    def backward(self, segment: Segment, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment, as ``ModelPart.backward`` describes."""
        import tensorflow as tf

        tape, outputs, loss, sources = kept
        targets = [(one, tf.convert_to_tensor(g)) for one, g in zip(outputs, gradients, strict=True) if g is not None]
        if self._has_loss_in(segment):
            targets.append((loss, tf.cast(share, loss.dtype)))
        if not targets:
            return [tf.zeros_like(one) for one in sources]
        places = self._sources_of(segment)
        variables = [self._sources[place].value for place in places]
        ends, factors = (list(one) for one in zip(*targets, strict=True))
        found = tape.gradient(ends, [*variables, *sources], output_gradients=factors)
        back = zip(found[len(variables) :], sources, strict=True)
        result = [tf.zeros_like(one) if g is None else tf.convert_to_tensor(g) for g, one in back]
        mine = [None if g is None else tf.convert_to_tensor(g) for g in found[: len(variables)]]
        del found  # so that ``_add`` has the only references to the gradients
        self._add(places, mine)
        return result

    def _evaluated(self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import tensorflow as tf

        values, data = [tf.convert_to_tensor(one) for one in taken], tree_map(tf.convert_to_tensor, data)
        if id(segment) not in self._evaluating:
            run = lambda taken, data: self._run(segment, taken, data, (), training=False)  # noqa: E731
            self._evaluating[id(segment)] = tf.function(run, input_signature=_any_number((values, data)))
        outputs, loss = self._evaluating[id(segment)](values, data)
        return list(outputs), loss

    def _first(self, place: int, gradient: Any) -> Any:
        import tensorflow as tf

        if self._totals[place] is None:
            self._totals[place] = tf.Variable(gradient, trainable=False)
        else:
            self._totals[place].assign(gradient, read_value=False)
        return self._totals[place]

    def _added(self, ones: list[Any], others: list[Any]) -> Sequence[Any]:
        import tensorflow as tf

        if self._adding is None:

            @tf.function  # type: ignore[untyped-decorator]
            def adding(sums: list[Any], gradients: list[Any]) -> None:
                for total, gradient in zip(sums, gradients, strict=True):
                    total.assign_add(gradient, read_value=False)

            self._adding = adding
        # In place: a new tensor for each sum would cost more time, and the memory of all gradients once more.
        self._adding(ones, others)
        return ones

    def _apply(self, gradients: list[Any], variables: list[Any], scale: float) -> None:
        # One large weight at a time: TensorFlow would step all at once, with several temporary tensors for each. All
        # of these steps begin with the same values of variables that belong to all weights, such as the step count.
        import tensorflow as tf

        optimizer = self._model.optimizer
        of = dict(zip(self._plan.optimizer.paths, self._plan.optimizer.of, strict=True))
        shared = [one for one in optimizer.variables if of[one.path] is None]
        before = [tf.convert_to_tensor(one) for one in shared]
        for number, places in enumerate(one_by_one(gradients)):
            for variable, value in zip(shared, before, strict=True) if number else ():
                variable.assign(value)
            found = [gradients[place] for place in places]
            if scale != 1.0:
                found = [tf.convert_to_tensor(one) * tf.cast(scale, one.dtype) for one in found]
            self._step_of([variables[place] for place in places])(found)

    def _step_of(self, variables: list[Any]) -> Any:
        """Return the compiled step of some variables."""
        import tensorflow as tf

        key = tuple(map(id, variables))
        if key not in self._stepping:
            apply = self._model.optimizer.apply

            self._stepping[key] = tf.function(
                lambda sums: apply([tf.convert_to_tensor(one) for one in sums], variables)
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
        sources = [self._sources[place] for place in self._sources_of(segment)]

        def run(trained: Any, floats: Any, others: Any, before: Any, data: Any, words: Any) -> Any:
            mapping = [*zip(sources, trained, strict=True), *zip(states, before, strict=True)]
            left = {True: iter(floats), False: iter(others)}
            taken = [next(left[has]) for has in back]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                result = self._run(segment, taken, data, words)
            after = [scope.get_current_value(one) for one in states]
            return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

        def forward(trained: Any, floats: Any, others: Any, before: Any, data: Any, words: Any) -> Any:
            return jax.vjp(lambda t, f: run(t, f, others, before, data, words), trained, floats, has_aux=True)

        return jax.jit(forward)

    def forward(
        self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a segment, as ``ModelPart.forward`` describes."""
        if id(segment) not in self._forward:
            self._forward[id(segment)] = self._compiled(segment)
        states, back = self._states(segment), self._back(segment)
        floats = [value for value, has in zip(taken, back, strict=True) if has]
        others = [value for value, has in zip(taken, back, strict=True) if not has]
        trained = [self._sources[place].value for place in self._sources_of(segment)]
        before, words = [one.value for one in states], self._words(segment, seed)
        (outputs, loss), pull, after = self._forward[id(segment)](trained, floats, others, before, data, words)
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        if self._has_loss_in(segment) and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (pull, list(outputs), loss)

    def backward(self, segment: Segment, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a segment, as ``ModelPart.backward`` describes."""
        import jax

        pull, outputs, loss = kept
        if self._backward is None:
            self._backward = jax.jit(lambda pull, ends: pull(ends))
        ends = [
            _no_gradient(one) if g is None else jax.numpy.asarray(g) for one, g in zip(outputs, gradients, strict=True)
        ]
        mine, back = self._backward(pull, (ends, jax.numpy.asarray(share, loss.dtype)))
        self._add(self._sources_of(segment), list(mine))
        return list(back)

    def _evaluated(self, segment: Segment, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import jax
        import keras

        states = [*(self._sources[place] for place in self._sources_of(segment)), *self._states(segment)]
        if id(segment) not in self._evaluating:

            def run(before: Any, taken: Any, data: Any) -> Any:
                with keras.StatelessScope(state_mapping=list(zip(states, before, strict=True))) as scope:
                    result = self._run(segment, taken, data, (), training=False)
                after = [scope.get_current_value(one) for one in states]
                return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

            self._evaluating[id(segment)] = jax.jit(run)
        before = [one.value for one in states]
        (outputs, loss), after = self._evaluating[id(segment)](before, list(taken), data)
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        return list(outputs), loss

    def _added(self, ones: list[Any], others: list[Any]) -> Sequence[Any]:
        import jax

        if self._adding is None:
            self._adding = jax.jit(
                lambda one, other: [a + b for a, b in zip(one, other, strict=True)], donate_argnums=0
            )
        found: Sequence[Any] = self._adding(ones, others)
        return found

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
        values, after = self._stepping([one.value for one in states], gradients, [one.value for one in variables])
        for variable, value in zip([*variables, *states], [*values, *after], strict=True):
            variable.assign(value)


def one_by_one(gradients: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the numbers of all small gradients, then of each large one. None stands for a missing gradient."""
    present = [number for number, one in enumerate(gradients) if one is not None]
    small = [number for number in present if math.prod(gradients[number].shape) <= LARGE]
    if small:
        yield small
    yield from ([number] for number in present if number not in small)


def _any_number(tensors: Any) -> Any:
    """Return the signature of TensorFlow's tensors with any number of samples.

    The bits of a result must not depend on the number of samples in earlier work.
    """
    import tensorflow as tf

    return tree_map(lambda one: tf.TensorSpec((None, *one.shape[1:]), one.dtype), tensors)


def _seeds(plan: Plan, calls: Collection[int]) -> list[tuple[int, int, int, Any]]:
    """Return the random states that some calls use.

    Returns:
        For each one: the number of the call; the number of the state in the model; how many earlier calls use it; and
        its Keras variable.
    """
    model, used = plan.graph.model, dict[int, int]()
    states = [one for one in model.non_trainable_variables if one.path.endswith("seed_generator_state")]
    places = {id(state): place for place, state in enumerate(states)}
    found = []
    for number, call in enumerate(plan.graph.calls):
        layers = call.operation._flatten_layers() if hasattr(call.operation, "_flatten_layers") else ()
        for state in (one.state for layer in layers for one in layer._seed_generators):
            again = used[id(state)] = used.get(id(state), -1) + 1
            if number in calls:
                found.append((number, places[id(state)], again, state))
    return found


def _no_gradient(tensor: Any) -> Any:
    import jax

    if jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating):
        return jax.numpy.zeros_like(tensor)
    return np.zeros(tensor.shape, jax.dtypes.float0)


KINDS: dict[str, Callable[[Plan, int], ModelPart]] = {"tensorflow": TensorFlowPart, "jax": JaxPart}
"""The class of a part for each backend of Keras."""
