"""The gradient of one batch in place of local training, and the step along the mean of several. The first on workers, the second on the master.

A worker takes the model's own training step, with an optimizer that keeps the gradients and changes no weight. So losses, weights of samples,
regularization, metrics, moving statistics, and an own ``compute_loss`` or ``train_step`` are what they are in ``fit``. The master gives the mean of
the gradients to the optimizer that the model was compiled with: momentum, clipping, schedules, weight decay and averages are Keras's own.

Of n samples in parts of n_k, the loss is the sum of n_k / n times the losses of the parts, and so is its gradient: Keras divides a loss by the
number of samples, also where they have weights, and what regularizes is in each part whole, with shares that add up to one.
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
from ddlf.training.roles.build import first_rows
from ddlf.training.roles.metrics import scalars
from ddlf.training.roles.optimizer_state import read_optimizer, write_optimizer
from ddlf.training.roles.optimizers import chain
from ddlf.training.roles.run_position import followers

AT_FIRST = "_ddlf_at_first"
"""Where an optimizer has the state that it began with: Keras cannot set it back."""


def check_model(app: App) -> None:
    """Refuse a model whose gradients over parts do not add up to that of the whole batch.

    Raises:
        ConfigError: Names what cannot be.
    """
    import keras

    if any(
        isinstance(one, keras.optimizers.LossScaleOptimizer) or one.loss_scale_factor is not None
        for one in chain(app.model.optimizer)
    ):
        raise ConfigError(
            "exchange='gradient' has no use for a loss that is scaled: gradients are float32",
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
    """A worker's model whose training step keeps the gradients of its batch.

    Args:
        model: Compiled and built; its optimizer is replaced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        model.optimizer = self._keeper = _keeper()
        self._keeper.build(model.trainable_variables)
        model.train_function = None  # one may have been made for the other optimizer
        kept = {id(weight): kept for weight, kept in zip(model.trainable_variables, self._keeper.kept, strict=True)}
        self._kept = [kept.get(id(weight)) for weight in model.weights]
        self._is_first = True  # a layer that changes weights does so in each batch

    def of(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """What a batch brings to the model with these weights.

        Args:
            batch: What ``fit`` gets of it: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.
            weights: One array for each of ``model.weights``.

        Returns:
            The gradient of each weight that is trained, and of the others before minus after; and Keras's metrics of the batch.

        Raises:
            AppError: The model's own ``train_step`` did not give its gradients to the optimizer, once and all of them; or a layer changes a weight
                that is trained.
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
        """Keras's training step; returns its metrics."""
        import keras

        model = self._model
        if keras.backend.backend() != "tensorflow" or model.run_eagerly:
            return model.train_on_batch(*batch, return_dict=True)
        if model.train_function is None:
            import tensorflow as tf

            # For any number of samples. Keras would compile for that of the first batch, with other bits than for any: a result must not depend
            # on what the worker has done before.
            spec = tree_map(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), batch)
            compiled = tf.function(model.train_step, input_signature=[spec], jit_compile=model.jit_compile)
            model.train_function = lambda batches: compiled(next(batches))
        model.reset_metrics()
        return model.train_function(iter([batch]))

    def _changed(self, weights: Weights) -> list[str]:
        """Paths of the weights that are trained and were changed, though the optimizer does not; one with a constraint may be."""
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
    """A Keras optimizer that keeps what it is given, in ``kept``, and changes no weight."""
    import keras

    class Keeper(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Sequence[Any]) -> None:
            if not self.built:
                super().build(variables)
                self.kept = self.add_optimizer_variables(variables, "gradient")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            kept = self.kept[self._get_variable_index(variable)]
            self.assign(kept, keras.ops.zeros(kept.shape, kept.dtype))
            self.assign_add(kept, gradient)  # that of an embedding has only rows that were used, some of them twice

    return Keeper(learning_rate=0.0, name="keeper")


class Step:
    """The step of a Keras optimizer, as an outer optimizer: what is merged are gradients.

    Its state is that of the optimizer, so it is in every checkpoint. What is not trained becomes the mean of the workers' values.

    Args:
        model: The master's, compiled and built. Its weights and its optimizer are those of the step.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._optimizer = model, model.optimizer
        self._last: State | None = None  # state that the optimizer is in
        self._apply: Callable[[list[Any]], Any] | None = None
        places = {id(weight): place for place, weight in enumerate(model.weights)}
        self._places = [places[id(weight)] for weight in model.trainable_variables]

    def plan(self, steps: int, epochs: int) -> None:
        """Say of how many steps the run is, of which each round is one."""
        for one in followers(self._optimizer):
            one.plan(steps, epochs)

    def init(self, weights: Sequence[Tensor]) -> State:
        """See ``OuterOptimizer``."""
        if not self._optimizer.built:
            self._optimizer.build(self._model.trainable_variables)
        state: State = vars(self._optimizer).setdefault(AT_FIRST, read_optimizer(self._model))
        return state

    def update(
        self, state: State, weights: Sequence[Tensor], merged: Sequence[Tensor], trainable: Sequence[bool]
    ) -> tuple[State, list[Tensor]]:
        """See ``OuterOptimizer``."""
        import keras

        if self._apply is None:
            self._apply = _compiled(self._optimizer)
        self._model.set_weights(weights)  # a hook may have set others
        if state is not self._last:
            write_optimizer(self._model, state)
        self._apply([keras.ops.convert_to_tensor(merged[place]) for place in self._places])
        self._last = read_optimizer(self._model)
        after = [np.asarray(w - g, w.dtype) if is_float(w) else w for w, g in zip(weights, merged, strict=True)]
        for place, weight in zip(self._places, self._model.trainable_variables, strict=True):
            after[place] = keras.ops.convert_to_numpy(weight)
        return self._last, after


def _compiled(optimizer: Any) -> Callable[[list[Any]], Any]:
    """The optimizer's step along gradients, of all variables that it was built with."""
    import keras

    if keras.backend.backend() != "tensorflow":
        apply: Callable[[list[Any]], Any] = optimizer.apply
        return apply
    import tensorflow as tf

    compiled: Callable[[list[Any]], Any] = tf.function(optimizer.apply)
    return compiled
