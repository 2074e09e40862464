"""Helpers that train models in parts without processes, and plain Keras models to compare them with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ddlf.algorithms.pipeline import sizes
from ddlf.training.exchanges.split.cut import CUT
from ddlf.training.exchanges.split.graph import Graph
from ddlf.training.exchanges.split.inbox import ACTIVATION, GRADIENT, Inbox, Stopped
from ddlf.training.exchanges.split.part import KINDS
from ddlf.training.exchanges.split.plan import Plan
from ddlf.training.exchanges.split.stage import Stage, expected
from ddlf.training.exchanges.split.variables import name_all, unmade
from ddlf.training.slot.build import fresh_names
from ddlf.training.slot.variables import set_value


def build_model(build, seed=3):
    import keras

    keras.utils.set_random_seed(seed)
    with fresh_names():
        return build()


def build_without_memory(build):
    with unmade():
        return build_model(build)


class Parts:
    """All parts of a model. Each part has its own copy of the model, like on workers."""

    def __init__(self, build, split, batch_size, micro_batches, replicas=1):
        import keras

        whole_model = build_model(build)
        cut = CUT("split", split)
        self.plan = Plan.of(Graph.of(whole_model), cut, batch_size, micro_batches, replicas)
        self.parts, self.models = [], []
        for part_plan in self.plan.parts:
            model = build_without_memory(build)
            options = cut.within, replicas, self.plan.program.by_rows
            plan = Plan.at(Graph.of(model), self.plan.ends, batch_size, micro_batches, *options)
            for index in part_plan.all_weights:
                set_value(model.weights[index], plan.piece(part_plan.number, index, whole_model.get_weights()[index]))
            part = KINDS[keras.backend.backend()](plan, part_plan.number)
            model.optimizer.build(part.trained)
            name_all(model.optimizer)
            self.parts.append(part)
            self.models.append(model)
        self.inboxes, self.attempt = [Inbox() for _ in self.parts], 1
        self.sent_activations = [0] * len(self.parts)
        self.stages = []
        for part, model, inbox in zip(self.parts, self.models, self.inboxes, strict=True):
            plan = part._plan
            inbox.begin(1, expected(plan, part.number), range(len(self.parts)))
            clip, model.optimizer.global_clipnorm = model.optimizer.global_clipnorm, None
            self.stages.append(Stage(plan, part, inbox, self.send, clip))

    def send(self, receiver, key, value):
        array = np.asarray(value)
        if key.kind in (ACTIVATION, GRADIENT):
            self.sent_activations[key.sender] += array.nbytes
        self.inboxes[receiver].put(self.attempt, key, array, key.sender)

    def begin_epoch(self):
        for part in self.parts:
            part.begin_epoch()

    def train(self, batch, seed):
        """Make one step, each part on its own thread."""
        self.train_replicas([batch], [seed])

    def train_replicas(self, batches, seeds):
        """Make one step with a batch for each replica."""
        counts = [len(leaves(batch[0])[0]) for batch in batches]

        def work(stage, part):
            batch, samples = batches[part.replica], counts[part.replica]
            if samples:
                part.prepare(batch)
            stage.train(batch, samples, seeds[part.replica], sum(counts))

        self.all_do(work)

    def evaluate(self, batches):
        """Evaluate batches, each part on its own thread. Return the metrics."""
        counts = [len(leaves(batch[0])[0]) for batch in batches]

        def work(stage, part):
            part.begin_epoch()
            part.prepare(batches[0])
            stage._inbox.begin(2, expected(part._plan, part.number), range(len(self.parts)))
            stage._step = 0
            for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
                stage.evaluate(batch, count, last=number == len(batches) - 1)

        self.attempt = 2
        self.all_do(work)
        return self.metrics(sum(counts))

    def all_do(self, action):
        def work(stage, part):
            try:
                action(stage, part)
            except BaseException:
                for inbox in self.inboxes:
                    inbox.stop()
                raise

        with ThreadPoolExecutor(len(self.parts)) as threads:
            working = [
                threads.submit(work, *working_thread) for working_thread in zip(self.stages, self.parts, strict=True)
            ]
        errors = [working_thread.exception() for working_thread in working if working_thread.exception() is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error

    def weights(self):
        pieces = {}
        for part, me in zip(self.parts, self.plan.parts, strict=True):
            for index, value in zip(me.weights, part.read(), strict=True):
                pieces.setdefault(index, []).append(value)
        return [self.plan.joined(index, pieces[index]) for index in range(len(pieces))]

    def metrics(self, samples):
        metrics = {name: float(value) for name, value in self.models[-1].get_metrics_result().items()}
        metrics["loss"] += sum(part.losses for part in self.parts) / samples
        return metrics


def leaves(tree):
    import keras

    return keras.tree.flatten(tree)


def trained_replicas(build, steps, micro_batches):
    """Return the weights of one process that adds up the gradients of the micro-batches of all replicas.

    ``steps`` contains for each step the batches and the seeds of the replicas.
    """
    import keras

    model = build_model(build)
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=steps[0][0][0])
    for batches, seeds in steps:
        counts = [len(leaves(batch[0])[0]) for batch in batches]
        total, before = None, [variable.numpy() for variable in model.non_trainable_variables]
        moved = [0 * variable for variable in before]
        for batch, seed, samples in zip(batches, seeds, counts, strict=True):
            for variable, value in zip(model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            begin = 0
            for micro, count in enumerate(sizes(samples, micro_batches) if samples else ()):
                seed_layers(model, (*seed, micro))
                piece = keras.tree.map_structure(lambda a, b=begin, n=count: a[b : b + n], batch)
                gradients = gradients_of(model, piece, count, count / sum(counts))
                total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
                begin += count
            share = samples / sum(counts)
            moved = [
                a + share * variable.numpy() for a, variable in zip(moved, model.non_trainable_variables, strict=True)
            ]
        for variable, value in zip(model.non_trainable_variables, moved, strict=True):
            variable.assign(value)
        model.optimizer.apply(total, model.trainable_variables)
    return model.get_weights()


def trained_plain(build, batches, micro_batches, *, first=3, seeds=(), epoch=0):
    """Return weights and metrics of one process that adds up the gradients of micro-batches, written with Keras only.

    ``first`` is the seed of the first weights. Metrics are reset every ``epoch`` batches.
    """
    import keras

    model = build_model(build, first)
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=batches[0])
    model.reset_metrics()
    for number, batch in enumerate(batches):
        if epoch and number % epoch == 0:
            model.reset_metrics()
        samples = len(leaves(batch[0])[0])
        total, begin = None, 0
        for micro, count in enumerate(sizes(samples, micro_batches)):
            seed_layers(model, (*(seeds[number] if seeds else (0, number)), micro))
            piece = keras.tree.map_structure(lambda a, b=begin, n=count: a[b : b + n], batch)
            gradients = gradients_of(model, piece, count, count / samples)
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
            begin += count
        model.optimizer.apply(total, model.trainable_variables)
    return model.get_weights(), {name: float(value) for name, value in model.get_metrics_result().items()}


def seed_layers(model, seed):
    states = [variable for variable in model.non_trainable_variables if variable.path.endswith("seed_generator_state")]
    for number, state in enumerate(states):
        state.assign(
            (np.random.SeedSequence([*seed, number]).generate_state(2) >> np.uint32(1)).astype(str(state.dtype))
        )


def gradients_of(model, batch, samples, share):
    """Return the gradients of a micro-batch times its share, compiled like the steps of ``fit``."""
    import keras

    if "gradients" not in vars(model):
        object.__setattr__(model, "gradients", KINDS_OF_GRADIENTS[keras.backend.backend()](model))
    return model.gradients((*batch, None, None)[:3], samples, share)


def tensorflow_gradients(model):
    import tensorflow as tf

    def gradients(x, y, w, samples):
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, w)
        model._loss_tracker.update_state(loss, sample_weight=samples)
        model.compute_metrics(x, y, y_pred, w)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    compiled = []

    def scaled(batch, samples, share):
        arrays = tf.nest.map_structure(tf.convert_to_tensor, [part for part in batch if part is not None])
        if not compiled:
            # Once for any number of samples. Keras needs this number to weigh the losses of several outputs.
            spec = tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), arrays)
            signature = [spec, tf.TensorSpec([])] if len(model.outputs) == 1 else None
            run = lambda arrays, samples: gradients(*[*arrays, None][:3], samples)  # noqa: E731
            compiled.append(tf.function(run, signature, autograph=False))
        return [tf.convert_to_tensor(gradient) * share for gradient in compiled[0](arrays, float(samples))]

    return scaled


def jax_gradients(model):
    import jax
    import keras

    @jax.jit
    def gradients(trained, before, batch, samples):
        states = [*model.non_trainable_variables, *model.metrics_variables]

        def of(trained):
            mapping = [*zip(model.trainable_variables, trained, strict=True), *zip(states, before, strict=True)]
            x, y, w = batch
            with keras.StatelessScope(state_mapping=mapping) as scope:
                y_pred = model(x, training=True)
                loss = model.compute_loss(x, y, y_pred, w)
                model._loss_tracker.update_state(loss, sample_weight=samples)
                model.compute_metrics(x, y, y_pred, w)
            current = [scope.get_current_value(state) for state in states]
            return loss, [old if new is None else new for old, new in zip(before, current, strict=True)]

        (_, after), gradients_of_trained = jax.value_and_grad(of, has_aux=True)(trained)
        return gradients_of_trained, after

    def added(batch, samples, share):
        states = [*model.non_trainable_variables, *model.metrics_variables]
        trained, before = (
            [variable.value for variable in variables] for variables in (model.trainable_variables, states)
        )
        unscaled, after = gradients(trained, before, batch, samples)
        for variable, value in zip(states, after, strict=True):
            variable.assign(value)
        return [gradient * share for gradient in unscaled]

    return added


KINDS_OF_GRADIENTS = {"tensorflow": tensorflow_gradients, "jax": jax_gradients}
