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
from ddlf.data.trees import leaves, tree_map
from ddlf.errors import AppError, ConfigError
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import scalars
from ddlf.training.slot.build import describe_optimizer
from ddlf.training.slot.feed import gathered
from ddlf.training.slot.keras_model import KerasModel
from ddlf.training.slot.metric_variables import make_metric_variables
from ddlf.training.slot.transfer import transfer
from ddlf.training.slot.variables import set_weights


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
        gradients_by_weight = {
            id(weight): gradient
            for weight, gradient in zip(model.trainable_variables, self._keeper.gradients, strict=True)
        }
        self._gradient_variables = [gradients_by_weight.get(id(weight)) for weight in model.weights]
        self._is_first = True  # check only the first batch: a layer that changes weights does so in each batch

    def compute(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
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

        model = self._model
        set_weights(model, weights)
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
        variables = [
            weight if gradient is None else gradient
            for weight, gradient in zip(model.weights, self._gradient_variables, strict=True)
        ]
        for value, gradient, before in zip(transfer().read(variables), self._gradient_variables, weights, strict=True):
            update += [value] if gradient is not None else difference([before], [value])
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
            make_metric_variables(model, spec)
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
            for weight, gradient, before in zip(self._model.weights, self._gradient_variables, weights, strict=True)
            if gradient is not None
            and weight.constraint is None
            and not np.array_equal(before, keras.ops.convert_to_numpy(weight), equal_nan=True)
        ]

    def _check_step(self, weights: Weights) -> None:
        steps, changed = int(self._keeper.iterations), self._changed(weights)
        if steps != 1 or changed:
            fault = f"changed {changed[0]} by itself" if changed else f"gave gradients to the optimizer {steps} times"
            raise AppError(
                f"{type(self._model).__name__}.train_step {fault}, but DDLF needs all gradients of a batch here, once",
                hint="end it with one self.optimizer.apply_gradients(...), or train in mode 'sync' with exchange='star'",
            )


def _keeper() -> Any:
    """Return a Keras optimizer that stores the gradients it receives, in ``gradients``, and changes no weight."""
    import keras

    class Keeper(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Sequence[Any]) -> None:
            if not self.built:
                super().build(variables)
                self.gradients = self.add_optimizer_variables(variables, "gradient")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            stored = self.gradients[self._get_variable_index(variable)]
            self.assign(stored, keras.ops.zeros(stored.shape, stored.dtype))
            self.assign_add(stored, gradient)  # an embedding's gradient has only the used rows, some of them twice

    return Keeper(learning_rate=0.0, name="keeper")


class GradientModel(KerasModel):
    """A Keras model that computes the gradient of one batch in each round. The weights change elsewhere."""

    def __init__(self, app: App) -> None:
        described = describe_optimizer(app.model.optimizer)
        self._gradients = Gradients(app.model)
        super().__init__(app)
        self.gradient = self._gradient
        self.optimizer = described  # the optimizer that the app compiled

    def _gradient(self, batch: tuple[Any, ...], weights: Weights) -> tuple[Weights, dict[str, float]]:
        """Return the gradient of a batch as an update, and Keras's metrics; both from ``Gradients.of``."""
        update, self._last_metrics = self._gradients.compute(batch, weights)
        return update, dict(self._last_metrics)


WHOLE_BATCH = ("dice", "tversky")
"""Keras's loss functions that combine the samples of a batch by default."""
PROBED = 5
"""Samples of the batch that is compared with its parts."""
NEAR = 1e-4
"""Largest relative difference between the loss of a batch and the mean over its parts: both have rounding errors."""


def check_mean_losses(model: Any, user: str, rows: Sequence[Any] = (), *, by_entries: bool = False) -> None:
    """Raise an error for a compiled loss that is not a mean over samples, so that the means of parts of a batch do not
    add up to it.

    Losses of Keras are known. With rows, also compare the loss of a few samples with the mean of the losses of their
    two parts, at made-up outputs. So this also finds functions of the user, without a value of a weight, and it does
    not depend on dropout or batch normalization. If the loss cannot be computed at made-up outputs, it is accepted.

    Args:
        model: The compiled model.
        user: The setting that needs a mean, for the message.
        rows: ``(x, y)`` or ``(x, y, sample_weight)``, as for ``fit``. Without rows, samples may have weights.
        by_entries: Whether updates weigh by the label entries that count in a loss such as ``Masked``. That loss need be
            no mean over samples then.

    Raises:
        ConfigError: There is such a loss.
    """
    import keras

    losses = keras.tree.flatten(getattr(model, "loss", None))
    for declared in losses:
        loss = keras.losses.get(declared) if isinstance(declared, str) else declared
        name, reduction = getattr(loss, "name", getattr(loss, "__name__", "")), getattr(loss, "reduction", "mean")
        if reduction in ("sum", "none", None) or (reduction == "mean_with_sample_weight" and len(rows) != 2):
            raise ConfigError(
                f"{user} takes the mean over samples, but the loss {name!r} has reduction={reduction!r}",
                hint="use Keras's default, reduction='sum_over_batch_size'",
            )
        is_keras = str(getattr(loss, "__module__", "")).startswith("keras.")
        if getattr(loss, "axis", 0) is None or (is_keras and name in WHOLE_BATCH and not hasattr(loss, "axis")):
            raise ConfigError(
                f"{user} takes the mean over samples, but the loss {name!r} combines samples of a batch",
                hint="give the loss axes without the first one, such as keras.losses.Dice(axis=(1, 2, 3))",
            )
    is_weighed = by_entries and any(hasattr(declared, "entries_in") for declared in losses)
    values = _losses_of_parts(model, rows) if len(rows) > 1 and not is_weighed else None
    if values is not None and is_apart(*values):
        raise ConfigError(not_a_mean_message(user, *values), hint=ONE_FOR_EACH)


ONE_FOR_EACH = "let the loss function return one value for each sample, or train in mode 'sync' with exchange='star'"


def is_apart(whole: float, mean: float, tolerance: float = NEAR) -> bool:
    """Return whether the loss of a batch differs from the mean over its parts. NaN and infinity show nothing."""
    return abs(whole - mean) > tolerance * max(abs(whole), abs(mean))


def not_a_mean_message(user: str, whole: float, mean: float) -> str:
    """Return the sentence about such a loss."""
    return (
        f"{user} takes the mean over samples, but the loss combines the samples of a batch: "
        f"it is {whole:.6g} for a batch, and {mean:.6g} for the mean over its two parts"
    )


def _losses_of_parts(model: Any, rows: Sequence[Any]) -> tuple[float, float] | None:
    """Return the loss of some samples at made-up outputs, and the mean over two parts of them; None if it is unknown."""
    import keras
    from keras.src.trainers.compile_utils import CompileLoss

    compiled = getattr(model, "_compile_loss", None)
    structure = getattr(getattr(model, "_functional", None) or model, "_outputs_struct", None)
    count = min(PROBED, min((len(array) for _, array in leaves(rows[1])), default=0))
    if not isinstance(compiled, CompileLoss) or structure is None or count < 2:
        return None
    (y,) = gathered((rows[1],), np.arange(count))
    chance = np.random.default_rng(0)

    cut = count // 2

    def made_up(output: Any) -> Any:  # between 0 and 1, so that it may also be a probability; the parts differ much
        output_values = chance.uniform(0.05, 0.35, (count, *output.shape[1:]))
        output_values[cut:] += 0.6
        return output_values.astype(output.dtype)

    def loss_of(begin: int, end: int) -> float:
        def part(array: Any) -> Any:
            return keras.ops.convert_to_tensor(array[begin:end])

        fresh = CompileLoss(compiled._user_loss, compiled._user_loss_weights, output_names=compiled.output_names)
        loss = fresh(keras.tree.map_structure(part, y), keras.tree.map_structure(part, outputs))
        return float(keras.ops.convert_to_numpy(loss))

    try:
        outputs = keras.tree.map_structure(made_up, structure)
        whole, again = loss_of(0, count), loss_of(0, count)
        if whole != again:  # from chance, which other code checks
            return None
        return whole, (cut * loss_of(0, cut) + (count - cut) * loss_of(cut, count)) / count
    except Exception:  # such as an output of unknown shape, or a loss of the user that needs other values
        return None
