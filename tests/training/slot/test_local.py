"""Tests of local rules: they correct the gradients that the optimizer receives, in every training step and backend."""

import dataclasses

import numpy as np
import pytest

from ddlf.algorithms.encoding import decode_update
from ddlf.errors import AppError
from ddlf.training.slot.optimizers import read_optimizer
from ddlf.training.slot.task import CONTROL
from tests.training.models import Blobs, distance, equal
from tests.training.slot.replicas import arrays, replica_of, task, traces

RATE, BATCH = 0.05, 16
BEGIN = [np.full((8, 4), 0.1, "float32"), np.zeros(4, "float32")]


def linear(optimizer):
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(optimizer, "mse")
    return model


class Linear(Blobs):
    """Least squares, whose gradients are known."""

    make_optimizer = staticmethod(lambda keras: keras.optimizers.SGD(RATE))

    async def create_model(self):
        import keras

        self.model = linear(self.make_optimizer(keras))


def carried(replica, local, *, number=0, weights=BEGIN, **more):
    """Carry a round. Return its update and the reply."""
    keep = ("optimizer", CONTROL) if local == "scaffold" else ("optimizer",)
    round_task = task(replica, weights=weights, round=number)
    reply = replica.carry(dataclasses.replace(round_task, local=local, keep=keep, back=keep, **more))
    return arrays(reply, weights), reply


def by_hand(replica, correction, weights=BEGIN):
    """Return the update of a round of gradient descent. ``correction`` takes weights and returns a summand for each gradient."""
    x, y = (a.astype("float64") for a in (replica.app.x_train, replica.app.y_train))
    now = [w.astype("float64") for w in weights]
    for begin in range(0, len(x), BATCH):
        rows = slice(begin, begin + BATCH)
        error = 2 * (x[rows] @ now[0] + now[1] - y[rows]) / y[rows].size
        gradients = [x[rows].T @ error, error.sum(0)]
        now = [w - RATE * (g + c) for w, g, c in zip(now, gradients, correction(now), strict=True)]
    return [w - n for w, n in zip(weights, now, strict=True)]


def pull(mu, anchor=BEGIN):
    return lambda now: [mu * (w - a) for w, a in zip(now, anchor, strict=True)]


def test_fedprox_pulls_towards_the_weights_of_its_round():
    replica = replica_of(Linear)
    plain, _ = carried(replica, "plain")
    update, _ = carried(replica_of(Linear), "fedprox:2")
    assert distance(update, by_hand(replica, pull(2.0))) < 1e-6
    assert np.linalg.norm(update[0]) < 0.9 * np.linalg.norm(plain[0])
    assert equal(carried(replica_of(Linear), "fedprox:0")[0], plain)


def test_fedprox_of_the_next_round_compiles_nothing_again():
    import keras

    replica, weights = replica_of(Linear), [BEGIN[0] + 1, BEGIN[1] - 1]
    carried(replica, "fedprox:2")
    traced = traces(replica.app.model) if keras.backend.backend() == "tensorflow" else None
    update, _ = carried(replica, "fedprox:2", number=1, weights=weights)
    assert distance(update, by_hand(replica, pull(2.0, weights), weights)) < 1e-5
    assert traced is None or traces(replica.app.model) == traced


def test_scaffold_steps_along_its_control_and_leaves_the_next_one():
    """13 steps of plain SGD: the control is the mean gradient of the round."""
    replica = replica_of(Linear)
    plain, reply = carried(replica, "scaffold")
    control = reply.state[CONTROL]
    assert distance(plain, by_hand(replica, lambda now: [0.0, 0.0])) < 1e-6
    assert distance(control, [u / (13 * RATE) for u in plain]) < 1e-6
    mean = [np.full_like(c, 0.25) for c in control]
    update, reply = carried(replica, "scaffold", number=1, control=mean)
    steered = [m - c for m, c in zip(mean, control, strict=True)]
    assert distance(update, by_hand(replica, lambda now: steered)) < 1e-6
    expected = [c - m + u / (13 * RATE) for c, m, u in zip(control, mean, update, strict=True)]
    assert distance(reply.state[CONTROL], expected) < 1e-5


def test_scaffold_counts_each_step_by_the_rate_that_it_was_taken_with():
    """Callbacks on the master set two rates for 26 steps. The control is the mean of the gradients, weighted by rate."""
    replica = replica_of(Linear)
    _, reply = carried(replica, "scaffold", epochs=2, first_epoch=0, rates=((RATE,), (RATE / 10,)))
    update = decode_update(reply.update, BEGIN)
    assert distance(reply.state[CONTROL], [u / (13 * RATE + 13 * RATE / 10) for u in update]) < 1e-5


KINDS = [
    "momentum and clipnorm",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("by a number", "as it needs")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_treats_the_corrected_gradient_like_any_other(kind):
    """A loss with the pull added by hand gives the same result."""
    import keras

    mu = 0.5

    def make_optimizer(keras):
        options = {
            "momentum and clipnorm": dict(momentum=0.9, clipnorm=0.1),
            "by a number": dict(loss_scale_factor=64.0),
        }.get(kind, {})
        optimizer = keras.optimizers.SGD(RATE, **options)
        return keras.optimizers.LossScaleOptimizer(optimizer) if kind == "as it needs" else optimizer

    update, reply = carried(replica_of(Linear, make_optimizer=make_optimizer), f"fedprox:{mu}")
    model = linear(make_optimizer(keras))
    model.set_weights(BEGIN)
    anchors = [keras.ops.convert_to_tensor(w) for w in BEGIN]

    def loss(y, p):
        pulls = [keras.ops.sum((v - a) ** 2) for v, a in zip(model.trainable_variables, anchors, strict=True)]
        return keras.ops.mean((y - p) ** 2, axis=-1) + 0.5 * mu * sum(pulls)

    model.compile(model.optimizer, loss)
    x, y = replica_of(Linear).app.x_train, replica_of(Linear).app.y_train
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert distance(update, [b - a for b, a in zip(BEGIN, model.get_weights(), strict=True)]) < 1e-5
    assert equal([a.shape for a in reply.state["optimizer"]], [v.shape for v in read_optimizer(model)])


def test_local_rule_without_an_optimizer_step_is_refused():
    class ByHand(Linear):
        def train(self, weights, worker_epochs, batch_size):
            return [0.1 * w for w in weights]

    with pytest.raises(AppError, match=r"had no effect: train made no step with self\.model\.optimizer; train with"):
        carried(replica_of(ByHand), "fedprox:1")
    carried(replica_of(ByHand), "plain")


def test_an_own_step_and_an_own_loop_of_tensorflow_are_corrected_too():
    import keras
    import tensorflow as tf

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    class WithStep(Linear):
        async def create_model(self):
            x = keras.Input((8,))
            self.model = OwnStep(x, keras.layers.Dense(4)(x))
            self.model.compile(keras.optimizers.SGD(RATE))

    class WithLoop(Linear):
        def train(self, weights, worker_epochs, batch_size):
            self.model.set_weights(weights)
            variables = self.model.trainable_variables
            for begin in range(0, len(self.indices), batch_size):
                rows = self.indices[begin : begin + batch_size]
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self.model(self.x_train[rows]) - self.y_train[rows]) ** 2)
                self.model.optimizer.apply(tape.gradient(loss, variables), variables)
            return [b - a for b, a in zip(weights, self.model.get_weights(), strict=True)]

    expected = by_hand(replica_of(Linear), pull(2.0))
    for app_class in (WithStep, WithLoop):
        assert distance(carried(replica_of(app_class), "fedprox:2")[0], expected) < 1e-6


@pytest.mark.slow
def test_gradients_of_some_rows_only_are_corrected_in_tensorflow():
    import keras

    class Words(Linear):
        async def load_dataset(self):
            self.x_train = np.arange(64, dtype="int32").reshape(16, 4) % 5
            self.y_train = np.ones((16, 1), "float32")

        async def create_model(self):
            layers = [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(7, 2),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
            self.model = keras.Sequential(layers)
            self.model.compile(keras.optimizers.SGD(RATE), "mse")

    replica = replica_of(Words)
    weights = replica.app.model.get_weights()
    indices = np.arange(16)
    plain, strong = (
        decode_update(
            replica_of(Words)
            .carry(dataclasses.replace(task(replica, weights=weights, indices=indices, epochs=20), local=local))
            .update,
            weights,
        )
        for local in ("plain", "fedprox:5")
    )
    assert 0 < np.linalg.norm(strong[0]) < 0.8 * np.linalg.norm(plain[0])
