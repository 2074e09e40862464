"""A part of a model: its forward and backward passes over micro-batches, and its steps. Runs in the executor.

Keras trains whole models only. Here the calls of a part run one after another, and the backend differentiates them::

    outputs, loss = part(received activations, inputs of the model)
    gradients of weights and of received activations = backward(gradients of the outputs, share of the loss)

For n samples in micro-batches of n_m, the loss is the sum of n_m / n times the losses of the micro-batches. So each
micro-batch begins its backward pass with n_m / n instead of 1, and the gradients of all micro-batches are added up.
The loss of a part is its regularization. The last part adds the compiled loss, and counts the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddlf.data.trees import tree_map
from ddlf.errors import AppError
from ddlf.training.exchanges.split.graph import functional
from ddlf.training.exchanges.split.plan import Plan

LARGE = 1 << 20
"""Tensors with more values are added one by one."""


class ModelPart:
    """A part of a model on a worker. Each backend has a subclass.

    Args:
        plan: How the model is cut.
        number: Number of the part, from 0.

    Attributes:
        weights: The Keras variables of the part's weights.
        trained: The weights that the optimizer steps.
        borrowed: Trained weights of other parts that this part uses, by their number in ``model.weights``.
        takes: Numbers of the tensors that it receives.
        gives: Numbers of the tensors that it sends.
        back: Numbers of the received tensors that have gradients.
        differentiable: Numbers of the sent tensors that have gradients.
        reads: Whether it needs samples or labels.
        losses: Sum of the regularization of the epoch, weighted by samples; 0 in the last part, which counts it itself.
        is_last: Whether it computes the loss.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        graph, part = plan.graph, plan.parts[number]
        self._plan, self.number = plan, number
        self._model = model = graph.model
        self._function = functional(model)
        self._calls = graph.calls[part.begin : part.end]
        self._tensors = graph.tensors
        self.weights = [model.weights[place] for place in part.weights]
        mine = {id(weight) for weight in self.weights}
        self.trained = [weight for weight in model.trainable_variables if id(weight) in mine]
        trained = {id(weight) for weight in model.trainable_variables}
        others = {place: model.weights[place] for place, _ in part.borrows}
        self.borrowed = {place: weight for place, weight in others.items() if id(weight) in trained}
        self._sources = [*self.trained, *self.borrowed.values()]
        self.takes = [tensor for tensor, _ in part.takes]
        self.gives = [tensor for tensor, _ in part.gives]
        self.back = [tensor for tensor in self.takes if is_float(graph.tensors[tensor])]
        self.differentiable = {tensor for tensor in self.gives if is_float(graph.tensors[tensor])}
        self._inputs = part.inputs
        self.is_last = number == len(plan.parts) - 1
        self._regularized = [weight for weight in self.trained if weight.regularizer is not None]
        self._has_loss = self.is_last or bool(self._regularized)
        layers = {id(call.operation): call.operation for call in self._calls}.values()
        kept = [weight for layer in layers for weight in getattr(layer, "non_trainable_variables", [])]
        self._fixed = [*{id(weight): weight for weight in kept}.values()]
        self._seeds = _seeds(plan, part.begin, part.end)
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
            self._model._symbolic_build(data_batch=batch)
            for one in self._model._compile_loss.metrics:  # with several outputs; Keras counts calls in compiled steps
                count = type(one).update_state
                vars(one)["update_state"] = lambda value, sample_weight=None, one=one, count=count: count(
                    one, value, sample_weight=self._samples
                )

    def _words(self, seed: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
        """Return the random states of the part's calls in a micro-batch.

        They follow from the seed, and from the layer and its call in the whole model, so the cut changes nothing.
        """
        found = []
        for _, place, again, state in self._seeds:
            sequence = np.random.SeedSequence([*seed, place, again] if again else [*seed, place])
            found.append((sequence.generate_state(2) >> np.uint32(1)).astype(str(state.dtype)))
        return found

    def _run(
        self, taken: Sequence[Any], data: tuple[Any, ...], words: Sequence[Any], training: bool = True
    ) -> tuple[list[Any], Any]:
        """Compute a micro-batch. Return the tensors to send, and the loss; 0 without one."""
        import keras
        from keras.src.models.functional import operation_fn, unpack_singleton

        found = {id(self._tensors[number]): value for number, value in zip(self.takes, taken, strict=True)}
        if self._inputs:
            values = self._function._standardize_inputs(data[0])
            found.update((id(one), value) for one, value in zip(self._function.inputs, values, strict=True))
        known = self._seeds if training else []
        seeds = [(number, state, one) for (number, _, _, state), one in zip(known, words, strict=True)]
        for place, call in enumerate(self._calls):
            for _, state, one in (seed for seed in seeds if seed[0] == place):
                state.assign(one)
            args, options = call.node.arguments.fill_in(found)
            outputs = operation_fn(call.operation, training=training)(*args, **options)
            found.update(
                (id(one), value) for one, value in zip(call.node.outputs, keras.tree.flatten(outputs), strict=True)
            )
            if getattr(call.operation, "_losses", None):
                call.operation._clear_losses()
                raise AppError(
                    f"the layer {call.name!r} calls add_loss, and with split no worker has the whole loss",
                    hint="use a regularizer of its weights, or leave out split",
                )
        losses = [keras.ops.cast(one.regularizer(one), keras.backend.floatx()) for one in self._regularized]
        if self.is_last:
            flat = [found[id(one)] for one in self._function.outputs]
            outputs = unpack_singleton(keras.tree.pack_sequence_as(self._function._outputs_struct, flat))
            y, weight = (*data[1:], None, None)[:2]
            samples = self._samples = keras.ops.shape(flat[0])[0]
            losses.insert(0, self._model._compile_loss(y, outputs, weight))
            losses = [keras.ops.sum(losses) if len(losses) > 1 else losses[0]]
            self._model._loss_tracker.update_state(losses[0], sample_weight=samples)
            if self._model._compile_metrics is not None:
                self._model._compile_metrics.update_state(y, outputs, sample_weight=weight)
        loss = keras.ops.sum(losses) if losses else keras.ops.zeros(())
        return [found[id(self._tensors[number])] for number in self.gives], loss

    def forward(
        self, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a micro-batch.

        Args:
            taken: The received tensors, in the order of ``takes``.
            data: The result of ``data``.
            samples: Number of samples.
            seed: Seed of the random numbers.

        Returns:
            The tensors to send, in the order of ``gives``; and the argument ``kept`` of ``backward``, which has the activations.
        """
        raise NotImplementedError

    def backward(self, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a micro-batch, and add its gradients to the sums.

        Args:
            kept: Second result of ``forward``.
            gradients: The gradients of the sent tensors, in the order of ``gives``; None without a gradient.
            share: Factor of the loss: the micro-batch's part of the samples of its batch.

        Returns:
            The gradients of the received tensors, in the order of ``back``.
        """
        raise NotImplementedError

    def evaluate(self, taken: Sequence[Any], data: tuple[Any, ...], samples: int) -> list[Any]:
        """Compute a batch as ``Model.evaluate`` does, and count its losses and metrics.

        Args:
            taken, data, samples: Arguments of ``forward``.

        Returns:
            The tensors to send, in the order of ``gives``.
        """
        outputs, loss = self._evaluated(taken, data)
        if self._has_loss and not self.is_last:
            self.losses += float(loss) * samples
        return outputs

    def _evaluated(self, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """Return the outputs of the part and its loss in an evaluation."""
        raise NotImplementedError

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
        import keras

        sums, self._sums = self._sums or [], None
        pairs = [(g, v) for g, v in zip(sums, self.trained, strict=False) if g is not None]
        if scale != 1.0:
            pairs = [(keras.ops.multiply(g, keras.ops.cast(scale, v.dtype)), v) for g, v in pairs]
        if pairs:
            self._apply(*map(list, zip(*pairs, strict=True)))

    def _apply(self, gradients: list[Any], variables: list[Any]) -> None:
        raise NotImplementedError

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

    _compiled: Any = None
    _evaluating: Any = None
    _stepping: Any = None
    _adding: Any = None

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__(plan, number)
        self._totals: list[Any] = [None] * len(self._sources)  # the memory of the sums, which every step uses again

    def forward(
        self, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a micro-batch, as ``ModelPart.forward`` describes."""
        import tensorflow as tf

        values = [tf.convert_to_tensor(one) for one in taken]
        data, words = tree_map(tf.convert_to_tensor, data), list(map(tf.convert_to_tensor, self._words(seed)))
        if self._compiled is None:
            seeds = [tf.TensorSpec(one.shape, one.dtype) for one in words]
            self._compiled = tf.function(self._run, input_signature=(*_any_number((values, data)), seeds))
        sources = [value for number, value in zip(self.takes, values, strict=True) if number in self.back]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([one.value for one in self._sources])
            tape.watch(sources)
            outputs, loss = self._compiled(values, data, words)
        if self._has_loss and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (tape, list(outputs), loss, sources)

    def backward(self, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a micro-batch, as ``ModelPart.backward`` describes."""
        import tensorflow as tf

        tape, outputs, loss, sources = kept
        targets = [(one, tf.convert_to_tensor(g)) for one, g in zip(outputs, gradients, strict=True) if g is not None]
        if self._has_loss:
            targets.append((loss, tf.cast(share, loss.dtype)))
        if not targets:
            return [tf.zeros_like(one) for one in sources]
        variables = [one.value for one in self._sources]
        ends, factors = (list(one) for one in zip(*targets, strict=True))
        found = tape.gradient(ends, [*variables, *sources], output_gradients=factors)
        back = [
            tf.zeros_like(one) if g is None else tf.convert_to_tensor(g)
            for g, one in zip(found[len(variables) :], sources, strict=True)
        ]
        mine = [None if g is None else tf.convert_to_tensor(g) for g in found[: len(variables)]]
        del found  # so that ``_add`` has the only references to the gradients
        self._add(mine)
        return back

    def _evaluated(self, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import tensorflow as tf

        values, data = [tf.convert_to_tensor(one) for one in taken], tree_map(tf.convert_to_tensor, data)
        if self._evaluating is None:
            run = lambda taken, data: self._run(taken, data, (), training=False)  # noqa: E731
            self._evaluating = tf.function(run, input_signature=_any_number((values, data)))
        outputs, loss = self._evaluating(values, data)
        return list(outputs), loss

    def _add(self, gradients: list[Any]) -> None:
        import tensorflow as tf

        if self._sums is None:
            self._sums = [None] * len(gradients)
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    if self._totals[place] is None:
                        self._totals[place] = tf.Variable(gradient, trainable=False)
                    else:
                        self._totals[place].assign(gradient, read_value=False)
                    self._sums[place], gradients[place] = self._totals[place], None
            return
        if self._adding is None:

            @tf.function  # type: ignore[untyped-decorator]
            def adding(sums: list[Any], gradients: list[Any]) -> None:
                for total, gradient in zip(sums, gradients, strict=True):
                    total.assign_add(gradient, read_value=False)

            self._adding = adding
        there = [place for place, gradient in enumerate(gradients) if gradient is not None]
        large = [place for place in there if gradients[place].shape.num_elements() > LARGE]
        for places in ([place for place in there if place not in large], *([place] for place in large)):
            # In place: a new tensor for each sum would cost more time and memory. One large gradient at a time, so that each
            # is freed before the next one is added.
            self._adding([self._sums[place] for place in places], [gradients[place] for place in places])
            for place in places:
                gradients[place] = None

    def _apply(self, gradients: list[Any], variables: list[Any]) -> None:
        import tensorflow as tf

        if self._stepping is None:
            apply = self._model.optimizer.apply
            self._stepping = tf.function(lambda sums: apply([tf.convert_to_tensor(one) for one in sums], variables))
        self._stepping(gradients)


class JaxPart(ModelPart):
    """A part of a model in JAX. The function that ``jax.vjp`` returns keeps the activations of a micro-batch."""

    _forward: Any = None
    _backward: Any = None
    _evaluating: Any = None
    _adding: Any = None
    _stepping: Any = None

    def _states(self) -> list[Any]:
        """Return the variables that a forward pass may change."""
        return [*self._fixed, *(self._model.metrics_variables if self.is_last else ())]

    def forward(
        self, taken: Sequence[Any], data: tuple[Any, ...], samples: int, seed: tuple[int, ...]
    ) -> tuple[list[Any], Any]:
        """Compute the forward pass of a micro-batch, as ``ModelPart.forward`` describes."""
        import jax
        import keras

        states = self._states()
        if self._forward is None:

            def run(trained: Any, floats: Any, others: Any, before: Any, data: Any, words: Any) -> Any:
                mapping = [*zip(self._sources, trained, strict=True), *zip(states, before, strict=True)]
                left = {"f": iter(floats), "o": iter(others)}
                taken = [next(left["f" if number in self.back else "o"]) for number in self.takes]
                with keras.StatelessScope(state_mapping=mapping) as scope:
                    result = self._run(taken, data, words)
                after = [scope.get_current_value(one) for one in states]
                return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

            def forward(trained: Any, floats: Any, others: Any, before: Any, data: Any, words: Any) -> Any:
                return jax.vjp(lambda t, f: run(t, f, others, before, data, words), trained, floats, has_aux=True)

            self._forward = jax.jit(forward)
        floats = [value for number, value in zip(self.takes, taken, strict=True) if number in self.back]
        others = [value for number, value in zip(self.takes, taken, strict=True) if number not in self.back]
        trained, before = [one.value for one in self._sources], [one.value for one in states]
        (outputs, loss), pull, after = self._forward(trained, floats, others, before, data, self._words(seed))
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        if self._has_loss and not self.is_last:
            self.losses += float(loss) * samples
        return list(outputs), (pull, list(outputs), loss)

    def backward(self, kept: Any, gradients: Sequence[Any], share: float) -> list[Any]:
        """Compute the backward pass of a micro-batch, as ``ModelPart.backward`` describes."""
        import jax

        pull, outputs, loss = kept
        if self._backward is None:
            self._backward = jax.jit(lambda pull, ends: pull(ends))
        ends = [
            _no_gradient(one) if g is None else jax.numpy.asarray(g) for one, g in zip(outputs, gradients, strict=True)
        ]
        mine, back = self._backward(pull, (ends, jax.numpy.asarray(share, loss.dtype)))
        self._add(list(mine))
        return list(back)

    def _evaluated(self, taken: Sequence[Any], data: tuple[Any, ...]) -> tuple[list[Any], Any]:
        import jax
        import keras

        states = [*self._sources, *self._states()]
        if self._evaluating is None:

            def run(before: Any, taken: Any, data: Any) -> Any:
                with keras.StatelessScope(state_mapping=list(zip(states, before, strict=True))) as scope:
                    result = self._run(taken, data, (), training=False)
                after = [scope.get_current_value(one) for one in states]
                return result, [old if new is None else new for old, new in zip(before, after, strict=True)]

            self._evaluating = jax.jit(run)
        (outputs, loss), after = self._evaluating([one.value for one in states], list(taken), data)
        for state, value in zip(states, after, strict=True):
            state.assign(value)
        return list(outputs), loss

    def _add(self, gradients: list[Any]) -> None:
        import jax

        if self._sums is None:
            self._sums = gradients
            return
        if self._adding is None:
            self._adding = jax.jit(
                lambda one, other: [a + b for a, b in zip(one, other, strict=True)], donate_argnums=0
            )
        self._sums = list(self._adding(self._sums, gradients))

    def _apply(self, gradients: list[Any], variables: list[Any]) -> None:
        import jax

        optimizer = self._model.optimizer
        if self._stepping is None:
            self._stepping = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
        states = optimizer.variables
        values, after = self._stepping([one.value for one in states], gradients, [one.value for one in variables])
        for variable, value in zip([*variables, *states], [*values, *after], strict=True):
            variable.assign(value)


def _any_number(tensors: Any) -> Any:
    """Return the signature of TensorFlow's tensors with any number of samples.

    The bits of a result must not depend on the number of samples in earlier work.
    """
    import tensorflow as tf

    return tree_map(lambda one: tf.TensorSpec((None, *one.shape[1:]), one.dtype), tensors)


def _seeds(plan: Plan, begin: int, end: int) -> list[tuple[int, int, int, Any]]:
    """Return the random states that some calls use.

    Returns:
        For each one: the number of the call, counted from ``begin``; the number of the state in the model; how many
        earlier calls use it; and its Keras variable.
    """
    model, used = plan.graph.model, dict[int, int]()
    states = [one for one in model.non_trainable_variables if one.path.endswith("seed_generator_state")]
    places = {id(state): place for place, state in enumerate(states)}
    found = []
    for number, call in enumerate(plan.graph.calls[:end]):
        layers = call.operation._flatten_layers() if hasattr(call.operation, "_flatten_layers") else ()
        for state in (one.state for layer in layers for one in layer._seed_generators):
            again = used[id(state)] = used.get(id(state), -1) + 1
            if number >= begin:
                found.append((number - begin, places[id(state)], again, state))
    return found


def _no_gradient(tensor: Any) -> Any:
    import jax

    if jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating):
        return jax.numpy.zeros_like(tensor)
    return np.zeros(tensor.shape, jax.dtypes.float0)


def is_float(tensor: Any) -> bool:
    """Return whether a symbolic tensor of Keras has floats, so that it has a gradient."""
    import keras

    return bool(keras.backend.is_float_dtype(str(tensor.dtype)))


KINDS: dict[str, Callable[[Plan, int], ModelPart]] = {"tensorflow": TensorFlowPart, "jax": JaxPart}
"""The class of a part for each backend of Keras."""
