"""The optimizer of a Downpour replica, which sums the gradients and takes plain SGD steps. Runs on the compute thread.

It replaces the compiled optimizer, so it receives each gradient inside the compiled step of ``fit`` or of a user's
``train_step``. Clipping, weight decay, the learning rate and its schedule come from the compiled optimizer, and act
before a gradient is added. The compiled optimizer's other state has no effect: the servers' push rule decides how a
gradient moves the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.errors import AppError, ConfigError
from ddlf.training.slot.optimizers import chain, innermost
from ddlf.training.slot.quick_step import SMALL
from ddlf.training.slot.run_position import RunPosition, Steps


class Stepper:
    """A worker's model with a replaced optimizer.

    Args:
        model: Built and compiled model.

    Attributes:
        rows: Layout of its weights as rows.

    Raises:
        AppError: The model has no optimizer.
        ConfigError: The optimizer has a feature that Downpour does not support.
    """

    def __init__(self, model: Any) -> None:
        import keras

        check_optimizer(model.optimizer)
        trained = {id(weight) for weight in model.trainable_weights}
        self.rows = Rows.of(model.get_weights(), [id(weight) in trained for weight in model.weights])
        self._optimizer = _made(innermost(model.optimizer))
        model.optimizer = _around(model.optimizer, self._optimizer)
        model.optimizer.build(model.trainable_variables)
        self._position = RunPosition.of(model.optimizer)
        model.train_function = None  # it may have been compiled for the other optimizer
        kept = {id(w): kept for w, kept in zip(model.trainable_variables, self._optimizer.unpushed, strict=True)}
        variables = [model.weights[place] for place in self.rows.trained]
        self._trained = _Variables(variables)
        self._rest = _Variables([model.weights[place] for place in self.rows.rest])
        self._unpushed = _Variables([kept[id(weight)] for weight in variables])
        self._zeros: list[Any] = []
        if self.rows.sizes[0] <= SMALL and keras.backend.backend() == "tensorflow":  # a large model needs the memory
            self._zeros = [keras.ops.convert_to_tensor(array) for array in self._zero()]

    def begin(self, steps: int) -> None:
        """Begin a round with no gradients, and set the number of earlier steps."""
        self._optimizer.iterations.assign(steps)
        self.take_up(None)

    def begin_at(self, steps: Steps | None, left: int) -> None:
        """Set the run's schedules to the beginning of a round.

        Args:
            steps: Steps of the round; None if unknown.
            left: Number of the remaining steps. It is smaller than ``steps`` if a lost worker has made some of them.
        """
        if self._position is not None and steps is not None:
            self._position.set(steps._replace(before=max(steps.after - left, steps.before)))

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(np.asarray(self._optimizer.iterations))

    @property
    def rate(self) -> float:
        """The current learning rate."""
        return float(np.asarray(self._optimizer.learning_rate))

    def unpushed(self) -> Row:
        """Return the sum of the gradients."""
        return self._unpushed.row()

    def take_up(self, unpushed: Row | None) -> None:
        """Set the sum of the gradients; None for zero."""
        if unpushed is None:
            self._unpushed.set(self._zeros or self._zero())
        else:
            self._unpushed.set(self.rows.arrays(unpushed, self.rows.trained))

    def _zero(self) -> list[Any]:
        return self.rows.arrays(np.zeros(self.rows.sizes[0], np.float32), self.rows.trained)

    def weights(self) -> Row:
        """Return the trained values."""
        return self._trained.row()

    def rest(self) -> Row:
        """Return the untrained float values."""
        return self._rest.row()

    def set(self, weights: Row | None, rest: Row) -> None:
        """Set the trained values, unless None, and the untrained values."""
        if weights is not None:
            self._trained.set(self.rows.arrays(weights, self.rows.trained))
        self._rest.set(self.rows.arrays(rest, self.rows.rest))


class _Variables:
    """Variables that are read and written as one row.

    In a small model Keras's accessors take several times as long as a step. So with TensorFlow this class calls the
    operations below them.

    Args:
        variables: Keras variables of floats.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        import keras

        self._variables = variables
        self._read, self._write = _value, _assign
        if keras.backend.backend() == "tensorflow":
            self._variables = [one.value for one in variables]
            self._read, self._write = _value_in_tensorflow, _assign_in_tensorflow

    def row(self) -> Row:
        """Return their values, one after another."""
        parts = [np.asarray(self._read(one), np.float32).reshape(-1) for one in self._variables]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def set(self, arrays: Sequence[Any]) -> None:
        """Set the values, given in the variables' shapes and types."""
        for variable, array in zip(self._variables, arrays, strict=True):
            self._write(variable, array)


def _value(variable: Any) -> Any:
    import keras

    return keras.ops.convert_to_numpy(variable)


def _assign(variable: Any, array: Any) -> None:
    variable.assign(array)


def _value_in_tensorflow(variable: Any) -> Any:
    import tensorflow as tf

    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()


def _assign_in_tensorflow(variable: Any, array: Any) -> None:
    import tensorflow as tf

    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.convert_to_tensor(array))


AROUND = {
    "RollingClip": (
        "it goes by the norms that it has seen, and the replicas of a worker step with one optimizer in turn",
        "clip='agc', global_clipnorm of the optimizer, or update_policy='reject', which leaves out pushes with NaN or infinite values",
    ),
    "Multipliers": (
        "the rule of the shards decides how far a gradient moves each weight",
        "freeze layers by layer.trainable = False, or train in mode 'sync' or 'async'",
    ),
    "Unfreezing": (
        "the rule of the shards decides how far a gradient moves each weight",
        "freeze layers by layer.trainable = False, or train in mode 'sync' or 'async'",
    ),
    "": ("replicas take plain steps, and the rule of the shards decides", "train in mode 'sync' or 'async'"),
}
"""Wrapping optimizers that Downpour refuses: the reason, and the hint."""


def _around(optimizer: Any, inner: Any) -> Any:
    """Wrap an optimizer in the wrappers of a compiled optimizer."""
    for one in reversed([*chain(optimizer)][:-1]):
        inner = type(one)(inner, **one.options())
    return inner


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that a replica cannot replace.

    Raises:
        AppError: The model has no optimizer.
        ConfigError: The optimizer has a feature that Downpour does not support.
    """
    if optimizer is None:
        raise AppError("mode='downpour' needs the gradients that an optimizer is given, but the model has none")
    inner = innermost(optimizer)
    scales = any(type(one).__name__ == "LossScaleOptimizer" for one in chain(optimizer))
    for one in chain(optimizer):
        if one is not inner and (name := type(one).__name__) not in ("AGC", "LossScaleOptimizer"):
            why, hint = AROUND.get(name, AROUND[""])
            raise ConfigError(
                f"mode='downpour' does not support {name}, an optimizer around another one: {why}", hint=hint
            )
    optimizer = inner
    unfit = {
        "a scaled loss": scales or getattr(optimizer, "loss_scale_factor", None),
        "averages of the weights (use_ema)": getattr(optimizer, "use_ema", False),
        "gradient_accumulation_steps": getattr(optimizer, "gradient_accumulation_steps", None),
        "several optimizers": getattr(optimizer, "optimizers", None),
    }
    for what, found in unfit.items():
        if found:
            raise ConfigError(
                f"mode='downpour' does not support {what}: replicas take plain steps, and the rule of the shards decides",
                hint="compile the model without, or train in mode 'sync' or 'async'",
            )


def _made(compiled: Any) -> Any:
    """Return the optimizer that replaces a compiled one."""
    import keras

    decay = compiled.weight_decay

    class Stepping(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Sequence[Any]) -> None:
            if not self.built:
                super().build(variables)
                self.unpushed = self.add_optimizer_variables(variables, "unpushed")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            unpushed, rate = (
                self.unpushed[self._get_variable_index(variable)],
                keras.ops.cast(learning_rate, variable.dtype),
            )
            if decay and compiled._use_weight_decay(variable):
                more = keras.ops.multiply(keras.ops.convert_to_tensor(variable), decay)
                self.assign_add(unpushed, more)
                self.assign_sub(variable, keras.ops.multiply(more, rate))
            self.assign_add(unpushed, gradient)  # an embedding's gradient has only the used rows
            self.assign_sub(variable, keras.ops.multiply(gradient, rate))

    rate = compiled._learning_rate
    return Stepping(
        learning_rate=float(np.asarray(rate)) if hasattr(rate, "assign") else rate,
        clipnorm=compiled.clipnorm,
        clipvalue=compiled.clipvalue,
        global_clipnorm=compiled.global_clipnorm,
        name="downpour",
    )
