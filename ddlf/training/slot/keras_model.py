"""A Keras model on a worker, which slots take turns to train.

Runs in the executor, on the thread of Keras.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.local_rules import LOCAL, Control, LocalRule, Plain
from ddlf.algorithms.weights import Weights
from ddlf.data.app_data import data_set_of
from ddlf.errors import AppError, ConfigError
from ddlf.training.callbacks.checks import look_at_batches
from ddlf.training.context import App
from ddlf.training.evaluation.metrics import counted_names, read_counts, scalars
from ddlf.training.slot.batchnorm import measured
from ddlf.training.slot.build import describe_optimizer
from ddlf.training.slot.distribution import copies_of, scope_of, strategy_of
from ddlf.training.slot.loss_scale import LossScale, Overflow
from ddlf.training.slot.metric_variables import make_metric_variables
from ddlf.training.slot.model import Gradient
from ddlf.training.slot.optimizers import (
    HELD_PATH,
    RunPosition,
    build_optimizer,
    continue_schedule,
    innermost,
    no_final_averages,
    read_optimizer,
    write_optimizer,
    write_rates,
)
from ddlf.training.slot.task import NOTHING_COUNTED, MetricCounts, Task

STEPS_PER_EXECUTION = 16
"""Batches in one call of the compiled step, if no callback observes single batches.

``docs/LAB.md`` has the figures.
"""


def use_fast_steps(model: Any, callbacks: Sequence[Any], chosen: int) -> None:
    """Let Keras run several batches in one call of the compiled training step, which is faster for small models.

    Do so only if the user chose no number, no callback looks at single batches, and the backend is TensorFlow without a
    strategy. TensorFlow handles a shorter last group of batches and gives the same bits.

    Args:
        model: The model to be trained next.
        callbacks: Callbacks of this ``fit``.
        chosen: The user's ``steps_per_execution``.
    """
    import keras

    fast = keras.backend.backend() == "tensorflow" and chosen == 1 and not (callbacks and look_at_batches(callbacks))
    fast = fast and strategy_of(model) is None  # Keras 3.15 cannot compile several steps of a strategy
    steps = STEPS_PER_EXECUTION if fast else chosen
    if model.steps_per_execution != steps:
        model.steps_per_execution = steps
        # the step was compiled for the other number
        model.train_function = model.test_function = model.predict_function = None


class KerasModel:
    """A worker's Keras model, which slots take turns to train.

    Args:
        app: The app, with its model built.

    Attributes:
        like: Zeros with the shapes and types of the model's weights.
        lossless: For each weight, whether it must travel exactly, because it is not trained.
        rule: The local rule of the round.
    """

    gradient: Gradient | None = None

    def __init__(self, app: App) -> None:
        self._app = app
        model = app.model
        self._steps = model.steps_per_execution
        self._by_steps = False  # whether each round does some work between calls of the compiled step
        trained = {id(weight) for weight in model.trainable_weights}
        self.lossless: Sequence[bool] = [id(weight) not in trained for weight in model.weights]
        self.like: Weights = [np.broadcast_to(np.zeros((), w.dtype), w.shape) for w in model.get_weights()]  # no memory
        self.optimizer = describe_optimizer(model.optimizer)
        build_optimizer(model)
        if app.optimizer_state == "fresh":
            continue_schedule(model.optimizer)
        with scope_of(model):
            self._position = RunPosition.of(model.optimizer)
        self.rule = KerasRule(model)
        self._loss_scale = LossScale(model.optimizer)
        self._fresh = read_optimizer(model)
        self._slot: int | None = None  # the slot whose optimizer state is in the model
        self._rates: Sequence[Sequence[float]] = ()
        self._first_epoch = 0
        self._last_metrics: dict[str, float] = {}
        self._names: list[str | None] | None = None
        self._entries: np.ndarray[Any, Any] | None = None  # counted entries of each sample; None until counted
        self._step: Any = None
        self._step_keeps_a_seed = False

    def stepped_by_another(self) -> None:
        """Note that another object, such as a Downpour stepper, has replaced the model's optimizer."""
        self._fresh = read_optimizer(self._app.model)

    def steps_at_once(self, steps: int) -> int:
        """Ask for a number of batches per call of the compiled step; return the number that the backend supports."""
        import keras

        self._by_steps = keras.backend.backend() == "tensorflow"
        self._steps = steps if self._by_steps else 1
        return int(self._steps)

    def begin(self, task: Task, optimizer: Weights | None) -> None:
        """Prepare a slot's round: set optimizer, learning rates and random numbers, but not the weights.

        Args:
            task: The round to train, with the slot and its samples.
            optimizer: State of the slot's optimizer; None for a fresh one.
        """
        model = self._app.model
        self._last_metrics = {}
        in_model, self._slot = self._slot, None  # the slot of this state is unknown until this round has ended
        if self.gradient is None and (task.state is not None or task.shared or in_model != task.slot):
            write_optimizer(model, self._fresh if optimizer is None else optimizer)
        if self._position is not None and (steps := task.position) is not None:
            steps_made = task.epochs * -(-len(task.indices) // task.batch_size)
            self._position.set(steps, steps_made)
        self._loss_scale.begin()
        self._rates, self._first_epoch = task.rates, task.first_epoch
        self._set_rates(task.first_epoch)
        reseed(model, (task.seed, task.round, task.slot))
        # Compile a step again if it keeps the seed of its compilation.
        if self._step is not model.train_function:
            self._step, self._step_keeps_a_seed = model.train_function, keeps_a_seed(model)
        if self._step_keeps_a_seed:
            model.train_function = None

    def _set_rates(self, epoch: int) -> None:
        """Set the learning rates that callbacks on the master chose for an epoch.

        A user's ``train`` may have more epochs than the round; these use the last rates.
        """
        if self._rates and self.gradient is None:
            write_rates(self._app.model, self._rates[min(epoch - self._first_epoch, len(self._rates) - 1)])

    def optimizer_state(self, task: Task) -> Weights:
        """Return the state of the slot's optimizer after its round."""
        self._slot = task.slot
        return read_optimizer(self._app.model)

    def fit(
        self,
        data: Any,
        epochs: range,
        callbacks: Iterable[Any],
        begin_epoch: Callable[[int], None],
        end_batch: Callable[[int, int, Any], bool],
        begun: Callable[[], None],
    ) -> dict[str, float]:
        """Train the model on the feed's batches with ``Model.fit``.

        Args:
            data: The ``x`` for ``fit``.
            epochs: Numbers of the epochs.
            callbacks: The user's callbacks.
            begin_epoch: Called with the number of each epoch.
            end_batch: Called with the numbers of epoch and batch, and Keras's metrics so far, after each call of the
                compiled step; returns whether to stop. With JAX, other threads may call it, some batches later.
            begun: Called after ``on_train_begin`` of all callbacks.

        Returns:
            Keras's metrics of the last epoch.
        """
        import keras

        set_rates = self._set_rates

        class Round(keras.callbacks.Callback):  # type: ignore[misc]
            # JAX computes in the background. Keras then need not wait after each batch for the metrics of this callback.
            async_safe = keras.backend.backend() == "jax"

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch, self.newest = epoch, -1
                begin_epoch(epoch)
                set_rates(epoch)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch > self.newest:  # threads of JAX may be late with a batch
                    self.newest = batch
                    if end_batch(self.epoch, batch, logs):
                        self.model.stop_training = True

        class Last(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                begun()

        model, callbacks = self._app.model, list(callbacks)
        use_fast_steps(model, callbacks, self._steps)
        if model.train_function is None and hasattr(data, "element_spec"):  # TensorFlow compiles a step
            make_metric_variables(model, data.element_spec)
        if self._by_steps and model.train_function is None:
            model.train_function = quick_step(model)
        with no_final_averages(model):
            history = model.fit(
                data,
                epochs=epochs.stop,
                initial_epoch=epochs.start,
                verbose=0,
                shuffle=False,
                callbacks=[Round(), *callbacks, Last()],
            ).history
        self._last_metrics = scalars({name: values[-1] for name, values in history.items()})
        return dict(self._last_metrics)

    def overflow(self, task: Task) -> Overflow | None:
        """Return how a round with a scaled loss overflowed; None if it made a step."""
        return self._loss_scale.overflow(task.slot + 1, task.round + 1)

    def entries(self, task: Task) -> int:
        """Return how many label entries of a round count in the loss, at least 1; 0 if the loss ignores no entries."""
        if self._entries is None:
            self._entries = entries_of(self._app)
        return max(int(self._entries[task.indices].sum()), 1) if len(self._entries) else 0

    def statistics(self, task: Task, weights: Weights, batches: Iterable[tuple[tuple[Any, ...], int]]) -> Weights:
        """Return the moving statistics of batch normalization for these weights over some batches.

        ``slot/batchnorm.py`` describes the method.
        """
        reseed(self._app.model, (task.seed, task.round, task.slot))
        return measured(self._app.model, weights, ((batch[0], count) for batch, count in batches))

    def counted(self, metrics: dict[str, float]) -> MetricCounts:
        """Return the sums and counts that determine a round's metrics.

        The master adds the sums and counts of all slots, and computes the metrics of the round.
        """
        if not self._last_metrics:
            return NOTHING_COUNTED
        if self._names is None:
            self._names = counted_names(self._app.model, self._last_metrics)
        names = [name if name and metrics.get(name) == self._last_metrics.get(name) else None for name in self._names]
        return read_counts(self._app.model, names)


class KerasRule:
    """Applies the local rule of a run (a change to the slots' gradients) inside the optimizer of a worker's model.

    It works with every way of training, since all of them use the optimizer's gradients: ``fit``, the user's own
    ``train_step`` or loop. Values that change from round to round are variables of the optimizer. So no function is
    traced again, and JAX, whose step receives all its inputs as arguments, receives them, too.

    Args:
        model: The model, built and compiled, with a built optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._optimizer = innermost(model.optimizer)  # inside a loss-scaling optimizer, gradients are unscaled
        self._model = model
        self._rule: LocalRule = Plain()
        self._constants: list[Any] = []
        indices = {id(weight): index for index, weight in enumerate(model.weights)}
        self._trained_indices = [indices[id(weight)] for weight in model.trainable_weights]
        self._noted = 0
        self._stepped: dict[float, int] = {}  # learning rate -> steps of this round with it

    def begin(self, name: str, weights: Weights, control: Control | None, mean: Control | None) -> None:
        """Set the values that the local rule uses in the next round.

        Args:
            name: The rule as text.
            weights: The global weights.
            control: The slot's control variate; None for zeros.
            mean: Mean of the control variates of all slots; None for zeros.
        """
        self._rule, self._control, self._mean = LOCAL.read(name), control, mean
        if type(self._rule) is Plain:
            return
        if self._optimizer is None:
            raise AppError(
                f"local_rule={name!r} changes the gradients that the model's optimizer is given, but the model has none",
                hint="compile the model with an optimizer, and train with it",
            )
        if not self._constants:
            self._install()
        for constant, index in zip(self._constants, self._trained_indices, strict=True):
            w = weights[index]
            constant.assign(self._rule.constant(w, *self._controls(index, w)))
        self._noted, self._stepped = self._steps(), {}

    def count_steps(self) -> None:
        """Count the steps made so far under the current learning rate, because the rate may change after this call."""
        if type(self._rule) is not Plain and self._rule.steers:
            now, rate = self._steps(), float(np.asarray(self._optimizer.learning_rate))
            self._stepped[rate] = self._stepped.get(rate, 0) + now - self._noted
            self._noted = now

    def new_control(self, update: Weights) -> Control | None:
        """Return the slot's new control (estimate of its gradients) after its round; None if the rule has none.

        Args:
            update: Weights before minus weights after.

        Raises:
            AppError: The model's optimizer made no step, so the rule had no effect.
        """
        if type(self._rule) is Plain:
            return None
        self.count_steps()
        steps = sum(self._stepped.values()) if self._rule.steers else self._steps() - self._noted
        if steps <= 0:
            raise AppError(
                f"local_rule={str(self._rule)!r} had no effect: train made no step with self.model.optimizer",
                hint="train with replica.fit or self.model.optimizer, or use local_rule='plain'",
            )
        if not self._rule.steers:
            return None
        *other_rates, rate = (rate for rate, count in self._stepped.items() if count)
        if other_rates:
            rate = sum(rate * count for rate, count in self._stepped.items()) / steps
        controls: Control = [None] * len(update)
        for index in self._trained_indices:
            controls[index] = self._rule.new_control(*self._controls(index, update[index]), update[index], steps, rate)
        return controls

    def _controls(self, index: int, like: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        both = [None if control is None else control[index] for control in (self._control, self._mean)]
        own_control, mean = (np.zeros_like(like) if control is None else control for control in both)
        return own_control, mean

    def _steps(self) -> int:
        return int(np.asarray(self._optimizer._iterations))

    def _install(self) -> None:
        """Make the optimizer correct each gradient by the local rule before its step."""
        import keras

        optimizer, rule = self._optimizer, self._rule
        with scope_of(self._model):
            self._constants = [
                optimizer.add_variable_from_reference(v, name=HELD_PATH) for v in self._model.trainable_variables
            ]
        # A strategy of TensorFlow adds the gradients of all copies after this, so each copy adds its share.
        share = 1 / copies_of(self._model)
        apply: Callable[..., None] = optimizer._backend_apply_gradients
        constants = {
            optimizer._var_key(v): h for v, h in zip(self._model.trainable_variables, self._constants, strict=True)
        }

        def corrected(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            corrections = [
                rule.correction(
                    keras.ops.convert_to_tensor(v), keras.ops.convert_to_tensor(constants[optimizer._var_key(v)])
                )
                for v in variables
            ]
            apply(
                [
                    keras.ops.add(g, correction if share == 1 else share * correction)
                    for g, correction in zip(gradients, corrections, strict=True)
                ],
                variables,
            )

        vars(optimizer)["_backend_apply_gradients"] = corrected
        self._model.train_function = None


NONE = np.zeros(0, np.int64)


def entries_of(app: App) -> np.ndarray[Any, Any]:
    """Return for each sample how many label entries count in the loss, shape (n,); empty if the loss ignores none.

    Args:
        app: The app, with data and a compiled model.

    Raises:
        ConfigError: The entries cannot be counted in advance, or the loss has several outputs.
    """
    masked = masked_loss(app.model)
    if masked is None:
        return NONE
    if data_set_of(app, "train") is not None:
        raise ConfigError(
            "the loss Masked weighs updates by the entries that count, and the entries of partition files are unknown before reading",
            hint="train on arrays: self.y_train = self.train_data['y']",
        )
    labels = np.asarray(app.y_train)
    return np.asarray(masked.entries_in(labels.reshape(len(labels), -1)), np.int64)


def masked_loss(model: Any) -> Any:
    """Return the loss of a model if it ignores some label entries (class ``Masked``); None otherwise.

    Raises:
        ConfigError: The model has several outputs. Each would need its own merge.
    """
    loss = getattr(model, "loss", None)
    several = [*loss.values()] if isinstance(loss, dict) else [*loss] if isinstance(loss, list | tuple) else [loss]
    masked = [part for part in several if hasattr(part, "entries_in")]
    if masked and len(several) > 1:
        raise ConfigError(
            "the loss Masked weighs updates by the entries that count, and with several outputs each has its own",
            hint="set sample weights (w_train) instead of using Masked",
        )
    return masked[0] if masked else None


FROM_TRACING = (
    "RandomStandardNormal",
    "RandomUniform",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoisson",
    "Multinomial",
)
"""Prefixes of TensorFlow operations that keep the seed that was set when the step was compiled."""

_functions: dict[str, bool] = {}
"""TensorFlow functions by name, and whether they keep a seed. Each operation that runs by itself has one, too."""


def set_seed(seed: int) -> None:
    """Set all seeds like ``keras.utils.set_random_seed``, but faster with TensorFlow.

    ``tf.random.set_seed`` also discards all prepared functions, so that functions with a seed restart. Preparing the
    training step again took 0.06 to 0.15 s in each round of a small model. So this happens only if a function does keep
    a seed.
    """
    import keras
    from keras.src.backend.common import global_state
    from keras.src.utils import rng_utils

    if keras.backend.backend() != "tensorflow":
        keras.utils.set_random_seed(seed)
        return
    from tensorflow import errors
    from tensorflow.python.eager.context import context

    names = context().list_function_names()
    for name in names - _functions.keys():
        with contextlib.suppress(errors.NotFoundError):  # another thread has just released this function
            _functions[name] = any(map(draws, context().get_function_def(name).node_def))
    if any(map(_functions.get, names)):
        keras.utils.set_random_seed(seed)
    else:
        global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
        random.seed(seed)
        np.random.seed(seed)
        context()._seed, context()._rng = seed, random.Random(seed)


def draws(node: Any) -> bool:
    """Return whether an operation in a TensorFlow graph draws random numbers and keeps its own seed."""
    return bool(node.op.startswith(FROM_TRACING))


def reseed(model: Any, seed: tuple[int, ...]) -> None:
    """Set every random state of Keras from a slot's seed, so that the result does not depend on the worker.

    Layers such as Dropout have seed generators. Their variables are not weights, so they do not travel with them.
    ``keras.random`` without a seed has one global generator, which compiled steps keep using: this function sets its
    state instead of replacing it. ``tf.random`` without a seed has no such variable; see ``keeps_a_seed``.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    common = seed_generator.global_seed_generator()
    words = np.random.SeedSequence(seed).generate_state(2)
    set_seed(int(words[0]))
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, common)
    states = [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    for number, state in enumerate([*states, common.state]):
        # 31 bits fit every type of state in all backends.
        words = np.random.SeedSequence([*seed, number]).generate_state(2) >> np.uint32(1)
        state.assign(words.astype(str(state.dtype)))


def keeps_a_seed(model: Any) -> bool:
    """Return whether the compiled TensorFlow training step draws random numbers from a seed set at its compilation."""
    for cell in getattr(getattr(model, "train_function", None), "__closure__", None) or ():
        try:
            compiled: list[Any] = getattr(cell.cell_contents, "_list_all_concrete_functions", list)()
        except ValueError:  # an empty closure cell
            continue
        for concrete in compiled:
            graph = concrete.graph.as_graph_def()
            nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
            if any(map(draws, nodes)):
                return True
    return False


SMALL = 1 << 17
"""Maximum number of values in a small model. In a larger model, the operations are worth several threads."""
LOOPS = ("While", "If", "Case", "For")
"""Suffixes of operations that run other operations several times, or conditionally."""


def quick_step(model: Any) -> Callable[[Any], Any] | None:
    """Return a cheaper replacement for a model's ``train_function``, if one call of it is one batch.

    For a small model, calling the step costs more than computing it. Keras wraps the result, TensorFlow looks up the
    compiled function, and a thread pool runs each operation. Here one lookup serves a whole ``fit``, and the operations
    run on the calling thread. They are the same operations, with the same bits. But this executor computes loops
    differently, so steps with a loop, such as an LSTM's, stay in the pool.

    Args:
        model: Built and compiled model.

    Returns:
        The function. None if Keras's is necessary: the model overrides it, runs eagerly, uses XLA, or is large.
    """
    import keras

    is_overridden = type(model).make_train_function is not keras.Model.make_train_function
    if (
        is_overridden
        or model.run_eagerly
        or model.jit_compile
        or model.steps_per_execution != 1
        or model.count_params() > SMALL
    ):
        return None
    import tensorflow as tf

    step = tf.function(lambda iterator: model.train_step(iterator.get_next()), reduce_retracing=True)
    known_iterator: Any = None
    compiled: Any = None
    threads: str | None = None

    def train_function(iterator: Any) -> Any:
        nonlocal known_iterator, compiled, threads
        if known_iterator is None or known_iterator() is not iterator:
            compiled, known_iterator = step.get_concrete_function(iterator), weakref.ref(iterator)
            threads = None if _has_loops(compiled.graph) else "SINGLE_THREADED_EXECUTOR"
        with contextlib.nullcontext() if threads is None else tf.experimental.function_executor_type(threads):
            return compiled(iterator)

    return train_function


def _has_loops(graph: Any) -> bool:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.endswith(LOOPS) for node in nodes)
