"""Local steps that protect single samples: DP-SGD. Runs on private workers.

One step on the samples of a Poisson batch B, with the clip norm C, the noise multiplier z and the expected size b of a batch
(Abadi et al. 2016, arXiv:1607.00133)::

    g = (sum over B of g_i min(1, C / |g_i|) + N(0, (z C)^2)) / b;   w <- optimizer(w, g)

Each of the n samples enters B by its own coin, with probability ``b / n``. A batch may be empty: then g is noise, and the step
counts like any other. Coins and noise come from the random source of the operating system, because who knows the batch knows
more than epsilon allows. For the same reason, no loss, no metric and no size of a batch leaves the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ddlf.data.app_data import batches, has_own_train
from ddlf.errors import AppError, ConfigError
from ddlf.privacy.poisson import PoissonBatches
from ddlf.privacy.release import gaussian_like
from ddlf.training.context import App
from ddlf.training.slot.feed import TrainingSamples, gathered
from ddlf.training.slot.keras_model import KerasModel, masked_loss
from ddlf.training.slot.replica import Replica

CHUNK = 32
"""Samples whose gradients are in memory at once."""
ROUNDING = 1e-6
"""Gradients are clipped this much shorter, so that float32 cannot make them longer than the clip norm."""
WHOLE = "use privacy_unit='worker', which protects all data of a worker"


class NoisedSteps:
    """Trains a compiled Keras model by DP-SGD, batch by batch.

    Args:
        model: The compiled model, with one output.
        clip: Most norm of a sample's gradient, over all trained weights together.
        noise: Noise multiplier: the noise on the sum of a batch has the standard deviation ``noise * clip``.

    Raises:
        ConfigError: The backend or the model is not supported.
    """

    def __init__(self, model: Any, clip: float, noise: float) -> None:
        check_model(model)
        self._model = model
        self._clip, self._noise = clip, noise
        self._sums = SUMS[backend()](model, clip / (1 + ROUNDING))

    def step(self, x: Any, y: Any, expected: float) -> None:
        """Make one step on the samples of a Poisson batch.

        Args:
            x: Inputs of the samples: an array, which may have no row.
            y: Their labels.
            expected: The expected number of samples in a batch.
        """
        variables = self._model.trainable_variables
        total = [np.zeros(tuple(variable.shape)) for variable in variables]
        for begin in range(0, len(x), CHUNK):
            rows = np.arange(begin, begin + CHUNK)
            inside = rows < len(x)
            rows = np.where(inside, rows, begin)  # chunks have one size, so that the step is compiled once
            sums = self._sums(x[rows], y[rows], inside.astype(np.float32))
            for index, chunk_sum in enumerate(sums):
                total[index] += np.asarray(chunk_sum, np.float64)
        std = self._noise * self._clip
        gradients = [(summed + gaussian_like(summed, std)) / expected for summed in total]
        self._model.optimizer.apply(
            [_tensor(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)], variables
        )


class PoissonFeed:
    """A source of Poisson batches from arrays.

    Args:
        data: ``(x, y)``, two arrays.
        batch_size: The samples that a batch has on average.
    """

    def __init__(self, data: tuple[Any, ...], batch_size: int) -> None:
        self.data, self.dataset = data, self
        self.of = PoissonBatches(samples=len(data[0]), batch_size=batch_size)

    def set_order(self, order: Any) -> None:
        """Do nothing: coins choose the samples."""

    def draw(self) -> tuple[Any, ...]:
        """Return inputs and labels of a new batch."""
        return gathered(self.data, self.of.draw())


class PoissonSamples(TrainingSamples):
    """The training data of an app, in Poisson batches."""

    def feed(self, batch_size: int) -> PoissonFeed:
        """Return the source of batches for ``SampleNoiseModel.fit``."""
        return PoissonFeed(batches(self._app, "train"), batch_size)


class SampleNoiseModel(KerasModel):
    """A worker's Keras model, whose steps protect single samples.

    Args:
        app: The app, with its model built.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._noise = NoisedSteps(app.model, float(app.update_clip), float(app.noise_multiplier))

    def fit(
        self,
        data: PoissonFeed,
        epochs: range,
        callbacks: Iterable[Any],
        begin_epoch: Callable[[int], None],
        end_batch: Callable[[int, int, Any], bool],
        begun: Callable[[], None],
    ) -> dict[str, float]:
        """Train the model on Poisson batches. ``KerasModel.fit`` describes the arguments. There are no metrics."""
        begun()
        for epoch in epochs:
            begin_epoch(epoch)
            self._set_rates(epoch)
            for step in range(data.of.steps):
                x, y = data.draw()
                self._noise.step(x, y, data.of.expected)
                if end_batch(epoch, step, None):
                    return {}
        return {}


class SampleNoiseReplica(Replica):
    """One worker's copy of an app and its model, for training that protects single samples."""

    MODEL = SampleNoiseModel
    ONE_CARD: ClassVar[str] = "privacy_unit='sample'"
    SAMPLES = PoissonSamples


def check_app(app: App) -> None:
    """Refuse an app that cannot be trained by steps that protect single samples.

    Args:
        app: The app on the master, with its model built.

    Raises:
        AppError: It has its own ``train``.
        ConfigError: Backend, model or data are not supported.
    """
    if has_own_train(app):
        raise AppError(
            f"{type(app).__name__}.train makes its own steps, which privacy_unit='sample' cannot clip and noise",
            hint=f"leave out train, or {WHOLE}",
        )
    rows = app.run_context.data.example_samples(app)
    if rows is None or len(rows) != 2 or not all(isinstance(array, np.ndarray) for array in rows):
        raise ConfigError(
            "privacy_unit='sample' needs one array of inputs and one of labels, without sample weights",
            hint=f"set x_train and y_train alone, or {WHOLE}",
        )
    check_model(app.model)


def check_model(model: Any) -> None:
    """Refuse a model whose gradients cannot be computed sample by sample.

    Raises:
        ConfigError: Names the backend, the layer or the loss.
    """
    import keras

    if backend() not in SUMS:
        raise ConfigError(
            f"privacy_unit='sample' does not work with Keras on {backend()}",
            hint=f"set KERAS_BACKEND to {' or '.join(SUMS)}, or {WHOLE}",
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"{type(model).__name__}.train_step makes its own steps, which privacy_unit='sample' cannot clip and noise",
            hint=f"leave it out, or {WHOLE}",
        )
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ConfigError("privacy_unit='sample' needs a model with one input and one output", hint=WHOLE)
    if masked_loss(model) is not None:
        raise ConfigError(
            "privacy_unit='sample' contradicts the loss Masked, which tells how many entries count", hint=WHOLE
        )
    if type(model.optimizer).__name__ == "LossScaleOptimizer":
        raise ConfigError("privacy_unit='sample' does not work with mixed_float16", hint="use float32")
    if not model.trainable_weights:
        raise ConfigError("privacy_unit='sample' needs a model with trainable weights, and this one has none")
    for weight in model.trainable_weights:
        if str(weight.dtype) != "float32":
            raise ConfigError(
                f"privacy_unit='sample' clips gradients of float32 weights, and {weight.path!r} is {weight.dtype}",
                hint=f"use a model with float32 weights, or {WHOLE}",
            )
    for layer in model._flatten_layers(include_self=False):
        kind = type(layer).__name__
        if getattr(layer, "_seed_generators", ()) and not _drops_nothing(layer):
            raise ConfigError(
                f"privacy_unit='sample' contradicts the layer {layer.name!r} ({kind}): its random numbers cannot be drawn sample by sample",
                hint=f"leave the layer out, or {WHOLE}",
            )
        if kind != "Normalization" and layer.trainable and getattr(layer, "_non_trainable_variables", ()):
            about = "statistics over a batch" if kind == "BatchNormalization" else "a state that training changes"
            raise ConfigError(
                f"privacy_unit='sample' contradicts the layer {layer.name!r} ({kind}): it keeps {about}, which get no noise",
                hint="use GroupNormalization or LayerNormalization, or set layer.trainable = False",
            )


def _drops_nothing(layer: Any) -> bool:
    """Return whether a recurrent layer or cell has random numbers that it never draws."""
    return getattr(layer, "dropout", None) == 0 and getattr(layer, "recurrent_dropout", None) == 0


def backend() -> str:
    """Return the name of Keras's backend."""
    import keras

    return str(keras.backend.backend())


def _tensor(array: np.ndarray[Any, Any], variable: Any) -> Any:
    import keras

    return keras.ops.convert_to_tensor(array, variable.dtype)


Sums = Callable[[Any, Any, Any], Sequence[Any]]
"""From inputs, labels and the weight 0 or 1 of each sample to the sums of clipped gradients."""


def _in_tensorflow(model: Any, clip: float) -> Sums:
    import tensorflow as tf

    variables = [variable.value for variable in model.trainable_variables]

    def clipped_gradients(row: Any) -> Any:
        x, y, counts = row
        x, y = x[None], y[None]
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = [
            tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True)
        ]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients]))
        factor = counts * tf.minimum(1.0, clip / tf.maximum(norm, 1e-30))
        return [factor * gradient for gradient in gradients]

    @tf.function  # type: ignore[untyped-decorator]
    def sums(x: Any, y: Any, counts: Any) -> Any:
        return [tf.reduce_sum(clipped, 0) for clipped in tf.vectorized_map(clipped_gradients, (x, y, counts))]

    def sums_of_arrays(x: Any, y: Any, counts: Any) -> Sequence[Any]:
        summed: Sequence[Any] = sums(tf.convert_to_tensor(x), tf.convert_to_tensor(y), tf.convert_to_tensor(counts))
        return summed

    return sums_of_arrays


def _in_jax(model: Any, clip: float) -> Sums:
    import jax
    import jax.numpy as jnp

    def loss_of(weights: Any, fixed: Any, metrics: Any, x: Any, y: Any) -> Any:
        predicted, _ = model.stateless_call(weights, fixed, x[None], training=True)
        loss, _ = model.stateless_compute_loss(weights, fixed, metrics, x=x[None], y=y[None], y_pred=predicted)
        return loss

    def clipped_gradients(weights: Any, fixed: Any, metrics: Any, x: Any, y: Any, counts: Any) -> Any:
        gradients = jax.grad(loss_of)(weights, fixed, metrics, x, y)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in gradients))
        factor = counts * jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-30))
        return [factor * gradient for gradient in gradients]

    def sums(weights: Any, fixed: Any, metrics: Any, x: Any, y: Any, counts: Any) -> Any:
        clipped = jax.vmap(clipped_gradients, (None, None, None, 0, 0, 0))(weights, fixed, metrics, x, y, counts)
        return [gradients.sum(0) for gradients in clipped]

    compiled = jax.jit(sums)

    def sums_of_arrays(x: Any, y: Any, counts: Any) -> Sequence[Any]:
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        summed: Sequence[Any] = compiled(*([variable.value for variable in group] for group in groups), x, y, counts)
        return summed

    return sums_of_arrays


SUMS: dict[str, Callable[[Any, float], Sums]] = {"tensorflow": _in_tensorflow, "jax": _in_jax}
"""How each backend of Keras computes gradients sample by sample."""
