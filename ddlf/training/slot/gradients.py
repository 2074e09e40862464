"""The gradients of batches: ``Gradients``, and ``GradientModel``, a model for replicas that only compute gradients.

Runs in the executor, and on the master for advice.

A model runs its own training step, with an optimizer that stores the gradients and changes no weight. So losses, sample
weights, regularization, metrics, moving statistics, and a user's ``compute_loss`` or ``train_step`` work as in ``fit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights, difference
from ddlf.data.trees import tree_map
from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.slot.build import describe_optimizer
from ddlf.training.slot.keras_model import KerasModel


class Gradients:
    """Computes the gradients of batches by a model's own training step, without changing its weights.

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
                f"a layer of the model changes {changed[0]} when it is called, but here only gradients change the weights",
                hint="train in mode 'sync' with exchange='star'",
            )
        self._is_first = False
        update: Weights = []
        for weight, kept, before in zip(model.weights, self._kept, weights, strict=True):
            update += [read(kept)] if kept is not None else difference([before], [read(weight)])
        return update, metrics

    def _train(self, batch: tuple[Any, ...]) -> Any:
        """Run Keras's training step on a batch, which stores the gradients. Return the metrics of the batch."""
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
        """Return paths of trained weights that the model changed by itself in the step.

        Weights with a constraint may change.
        """
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
                f"{type(self._model).__name__}.train_step {what}, but DDLF needs all gradients of a batch here, once",
                hint="end it with one self.optimizer.apply_gradients(...), or train in mode 'sync' with exchange='star'",
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


class GradientModel(KerasModel):
    """A Keras model that computes the gradient of one batch in each round. The weights change elsewhere."""

    def __init__(self, app: App) -> None:
        described = describe_optimizer(app.model.optimizer)
        self._gradients = Gradients(app.model)
        super().__init__(app)
        self.gradient = self._gradient
        self._described = described  # the optimizer that the app compiled

    def _gradient(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """Return the gradient of a batch as an update, and Keras's metrics; both from ``Gradients.of``."""
        update, self._told = self._gradients.of(batch, weights)
        return update, dict(self._told)


WHOLE_BATCH = ("dice", "tversky")
"""Keras's loss functions that combine the samples of a batch by default."""


def check_mean_losses(losses: Any, user: str, *, weighted: bool) -> None:
    """Raise an error for a loss of Keras that is not a mean over samples, so that the means of parts of a batch do not
    add up to it. A function of the user cannot be checked.

    Args:
        losses: The losses of ``compile``: a loss or its name, or several of them nested.
        user: The setting that needs a mean, for the message.
        weighted: Whether samples may have weights.

    Raises:
        ConfigError: There is such a loss.
    """
    import keras

    for one in keras.tree.flatten(losses):
        loss = keras.losses.get(one) if isinstance(one, str) else one
        name, how = getattr(loss, "name", getattr(loss, "__name__", "")), getattr(loss, "reduction", "mean")
        if how in ("sum", "none", None) or (how == "mean_with_sample_weight" and weighted):
            raise ConfigError(
                f"{user} takes the mean over samples, but the loss {name!r} has reduction={how!r}",
                hint="use Keras's default, reduction='sum_over_batch_size'",
            )
        is_keras = str(getattr(loss, "__module__", "")).startswith("keras.")
        if getattr(loss, "axis", 0) is None or (is_keras and name in WHOLE_BATCH and not hasattr(loss, "axis")):
            raise ConfigError(
                f"{user} takes the mean over samples, but the loss {name!r} combines samples of a batch",
                hint="give the loss axes without the first one, such as keras.losses.Dice(axis=(1, 2, 3))",
            )
