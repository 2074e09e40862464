"""Small apps and models for the training tests. They travel to the workers by value, like any user's."""

from __future__ import annotations

import numpy as np

import ddlf

WIDE = 64
"""Number of hidden units. It makes both kernels large enough for codecs."""


def blobs(samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points of 4 classes in 8 dimensions, one-hot labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, samples)
    centres = np.random.default_rng(99).normal(size=(4, 8)) * 2
    x = (centres[labels] + random.normal(size=(samples, 8))).astype("float32")
    return x, np.eye(4, dtype="float32")[labels]


def small_model(learning_rate=0.05, *, width=16, norm=False, dropout=0.0, optimizer="sgd"):
    """Return a compiled classifier of the blobs with ``width`` hidden units.

    Codecs leave tensors below 1,024 bytes alone. With the default width, all tensors are smaller. With ``WIDE`` the kernels are encoded.
    """
    import keras

    layers = [keras.Input((8,)), keras.layers.Dense(width, activation="tanh")]
    if norm:
        layers.append(keras.layers.BatchNormalization())
    if dropout:
        layers.append(keras.layers.Dropout(dropout))
    layers.append(keras.layers.Dense(4, activation="softmax"))
    model = keras.Sequential(layers)
    kind = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer]
    model.compile(kind(learning_rate), "categorical_crossentropy", metrics=["accuracy"])
    return model


class Blobs(ddlf.IApp):
    """Trains on the blobs. Its attributes choose the variant of the model."""

    verbose = False
    master_epochs = 2
    worker_epochs = 1
    batch_size = 16
    samples = 203
    learning_rate = 0.05
    width = 16
    norm = False
    dropout = 0.0
    optimizer = "sgd"

    async def load_dataset(self):
        self.x_train, self.y_train = blobs(self.samples)
        self.x_test, self.y_test = blobs(100, seed=1)

    async def create_model(self):
        self.model = small_model(
            self.learning_rate, width=self.width, norm=self.norm, dropout=self.dropout, optimizer=self.optimizer
        )


class Quick(Blobs):
    """Trains by hand to the weights of ``fit``, because Keras compiles for half a second on every node before its first step.

    It is for tests of rounds, slots and workers, which hold for any computation. Its model must be ``small_model()`` of any ``width``.
    """

    def train(self, weights, worker_epochs, batch_size):
        kernel, bias, kernel2, bias2 = after = [array.copy() for array in weights]
        for epoch in range(worker_epochs):
            order = self.replica.order(self.indices, epoch)
            losses = []
            for begin in range(0, len(order), batch_size):
                rows = order[begin : begin + batch_size]
                x, y = self.x_train[rows], self.y_train[rows]
                hidden = np.tanh(x @ kernel + bias)
                e = np.exp(hidden @ kernel2 + bias2)
                p = e / e.sum(1, keepdims=True)
                losses.append(-float(np.mean(np.log((p * y).sum(1)))))
                slope2 = (p - y) / len(rows)
                slope = (slope2 @ kernel2.T) * (1 - hidden**2)
                for array, gradient in zip(
                    after, (x.T @ slope, slope.sum(0), hidden.T @ slope2, slope2.sum(0)), strict=True
                ):
                    array -= self.learning_rate * gradient
        return [old - new for old, new in zip(weights, after, strict=True)], {"loss": float(np.mean(losses))}


def compiled(model=None, *, optimizer="sgd", **options):
    """A model, by default the small one, with this optimizer and these options of ``compile``."""
    model = model or small_model()
    model.compile(optimizer, "categorical_crossentropy", **options)
    return model


def with_model(build, app_class=Blobs):
    """A class of apps whose model is ``build(app)``."""

    class WithModel(app_class):
        async def create_model(self):
            self.model = build(self)

    return WithModel


def app(cluster, app_class=Blobs, **attributes) -> Blobs:
    """A new app with these attributes."""
    new_app = app_class(cluster)
    for name, value in attributes.items():
        setattr(new_app, name, value)
    return new_app


def distance(first, second) -> float:
    """The largest difference between two lists of weights."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(first, second, strict=True))


def equal(first, second) -> bool:
    """Whether two lists of weights are the same bits."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
