"""The gradient exchange: a worker computes the gradient of one batch, and the master steps along the mean of all.

A worker runs the model's own training step, with an optimizer that stores the gradients and changes no weight. So
losses, sample weights, regularization, metrics, moving statistics, and a user's ``compute_loss`` or ``train_step``
work as in ``fit``. The master gives the mean gradient to the optimizer that the model was compiled with. So momentum,
clipping, schedules, weight decay and averages are Keras's own.

For n samples in parts of n_k, the loss is the sum of n_k / n times the losses of the parts. The same holds for its
gradient: Keras divides a loss by the number of samples, even if they have weights. Each part contains the whole
regularization loss, and the factors n_k / n add up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.outer import State
from ddlf.algorithms.weights import Tensor, Weights, difference, is_float
from ddlf.data.trees import tree_map
from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.slot.build import first_rows
from ddlf.training.slot.optimizers import chain, followers, read_optimizer, write_optimizer

AT_FIRST = "_ddlf_at_first"
"""Attribute of an optimizer with its initial state, because Keras cannot reset it."""


def check_model(app: App) -> None:
    """Refuse a model whose mean gradient over parts differs from the gradient of the whole batch.

    Raises:
        ConfigError: The model has a scaled loss, or a loss whose reduction is not the mean over samples.
    """
    import keras

    if any(
        isinstance(one, keras.optimizers.LossScaleOptimizer) or one.loss_scale_factor is not None
        for one in chain(app.model.optimizer)
    ):
        raise ConfigError(
            "exchange='gradient' does not support a scaled loss: gradients are float32",
            hint="compile the model without LossScaleOptimizer and loss_scale_factor",
        )
    weighted = len(first_rows(app, "train")) == 3
    for loss in keras.tree.flatten(app.model.loss):
        how = getattr(loss, "reduction", "mean")
        if how in ("sum", "none", None) or (how == "mean_with_sample_weight" and weighted):
            raise ConfigError(
                f"exchange='gradient' takes the mean over samples, but the loss {loss.name!r} has reduction={how!r}",
                hint="use Keras's default, reduction='sum_over_batch_size'",
            )


class Gradients:
    """A worker's model whose training step stores the gradients of its batch.

    Args:
        model: Compiled and built model. Its optimizer is replaced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        model.optimizer = self._keeper = _keeper()
        self._keeper.build(model.trainable_variables)
        model.train_function = None  # it may have been compiled for the other optimizer
        kept = {id(weight): kept for weight, kept in zip(model.trainable_variables, self._keeper.kept, strict=True)}
        self._kept = [kept.get(id(weight)) for weight in model.weights]
        self._is_first = True  # check only the first batch: a layer that changes weights does so in each batch

    def of(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """Return the gradients of a batch, for a model with these weights.

        Args:
            batch: The batch as ``fit`` receives it: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.
            weights: One array for each of ``model.weights``.

        Returns:
            The gradient of each trained weight, and before minus after for the other weights; and Keras's metrics of
            the batch.

        Raises:
            AppError: The model's own ``train_step`` did not give all gradients to the optimizer exactly once; or a
                layer changes a trained weight.
        """
        import keras

        model, read = self._model, keras.ops.convert_to_numpy
        model.set_weights(weights)
        self._keeper.iterations.assign(0)
        metrics = scalars(self._train(batch))
        if type(model).train_step is not keras.Model.train_step:
            self._check_step(weights)
        elif self._is_first and (changed := self._changed(weights)):
            raise AppError(
                f"a layer of the model changes {changed[0]} when it is called, but with exchange='gradient' only the optimizer's step is merged",
                hint="use exchange='star'",
            )
        self._is_first = False
        update: Weights = []
        for weight, kept, before in zip(model.weights, self._kept, weights, strict=True):
            update += [read(kept)] if kept is not None else difference([before], [read(weight)])
        return update, metrics

    def _train(self, batch: tuple[Any, ...]) -> Any:
        """Run Keras's training step on a batch. Return its metrics."""
        import keras

        model = self._model
        if keras.backend.backend() != "tensorflow" or model.run_eagerly:
            return model.train_on_batch(*batch, return_dict=True)
        if model.train_function is None:
            import tensorflow as tf

            # Compile for any number of samples. Keras would compile for the size of the first batch, with other bits.
            # A result must not depend on the earlier work of this worker.
            spec = tree_map(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), batch)
            compiled = tf.function(model.train_step, input_signature=[spec], jit_compile=model.jit_compile)
            model.train_function = lambda batches: compiled(next(batches))
        model.reset_metrics()
        return model.train_function(iter([batch]))

    def _changed(self, weights: Weights) -> list[str]:
        """Return paths of trained weights that the model changed by itself. Weights with a constraint may change."""
        import keras

        return [
            weight.path
            for weight, kept, before in zip(self._model.weights, self._kept, weights, strict=True)
            if kept is not None
            and weight.constraint is None
            and not np.array_equal(before, keras.ops.convert_to_numpy(weight), equal_nan=True)
        ]

    def _check_step(self, weights: Weights) -> None:
        steps, changed = int(self._keeper.iterations), self._changed(weights)
        if steps != 1 or changed:
            what = f"changed {changed[0]} by itself" if changed else f"gave gradients to the optimizer {steps} times"
            raise AppError(
                f"{type(self._model).__name__}.train_step {what}, but exchange='gradient' needs all of a batch's gradients, once",
                hint="end it with one self.optimizer.apply_gradients(...), or use exchange='star'",
            )


def _keeper() -> Any:
    """Return a Keras optimizer that stores the gradients it receives, in ``kept``, and changes no weight."""
    import keras

    class Keeper(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Sequence[Any]) -> None:
            if not self.built:
                super().build(variables)
                self.kept = self.add_optimizer_variables(variables, "gradient")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            kept = self.kept[self._get_variable_index(variable)]
            self.assign(kept, keras.ops.zeros(kept.shape, kept.dtype))
            self.assign_add(kept, gradient)  # an embedding's gradient has only the used rows, some of them twice

    return Keeper(learning_rate=0.0, name="keeper")


class Step:
    """An outer optimizer that steps with a Keras optimizer. The merged updates are gradients.

    Its state is the optimizer's state, so every checkpoint contains it. An untrained weight becomes the mean of the
    workers' values.

    Args:
        model: The master's model, compiled and built. The step changes its weights and its optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._optimizer = model, model.optimizer
        self._last: State | None = None  # the optimizer's current state
        self._apply: Callable[[list[Any]], Any] | None = None
        places = {id(weight): place for place, weight in enumerate(model.weights)}
        self._places = [places[id(weight)] for weight in model.trainable_variables]
        if not self._optimizer.built:  # a resumed run writes a state into it before anything asks for the initial one
            self._optimizer.build(model.trainable_variables)
        self._initial: State = vars(self._optimizer).setdefault(AT_FIRST, read_optimizer(model))

    def plan(self, steps: int, epochs: int) -> None:
        """Give the optimizer's schedules the number of steps and epochs of the run. Each round is one step."""
        for one in followers(self._optimizer):
            one.plan(steps, epochs)

    def init(self, weights: Sequence[Tensor]) -> State:
        """Return the optimizer's initial state, as ``OuterOptimizer`` requires."""
        return self._initial

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """Step along the mean gradient, as ``OuterOptimizer`` requires. Return the new state and the new weights."""
        import keras

        if self._apply is None:
            self._apply = _compiled(self._optimizer)
        self._model.set_weights(weights)  # a hook may have changed the model's weights
        if state is not self._last:
            write_optimizer(self._model, state)
        self._apply([keras.ops.convert_to_tensor(merged[place]) for place in self._places])
        self._last = read_optimizer(self._model)
        after = [np.asarray(w - g, w.dtype) if is_float(w) else w for w, g in zip(weights, merged, strict=True)]
        for place, weight in zip(self._places, self._model.trainable_variables, strict=True):
            after[place] = keras.ops.convert_to_numpy(weight)
        return self._last, after


def _compiled(optimizer: Any) -> Callable[[list[Any]], Any]:
    """Return the optimizer's step along gradients of all variables that it was built with. TensorFlow compiles it."""
    import keras

    if keras.backend.backend() != "tensorflow":
        apply: Callable[[list[Any]], Any] = optimizer.apply
        return apply
    import tensorflow as tf

    compiled: Callable[[list[Any]], Any] = tf.function(optimizer.apply)
    return compiled
