"""A healthy program: attention over positions decides which of two words comes first."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """A transformer encoder."""

    master_epochs = 6
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(7)
        x = random.integers(3, 40, (1600, 16))
        positions = np.argsort(random.random(x.shape), axis=1)[:, :2]
        x[np.arange(1600), positions[:, 0]], x[np.arange(1600), positions[:, 1]] = 1, 2
        y = (positions[:, 0] < positions[:, 1]).astype("int64")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        inputs = keras.Input((16,), dtype="int32")
        positions = layers.Embedding(16, 24)(keras.ops.arange(16))
        h = layers.Embedding(40, 24)(inputs) + positions
        h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 12)(h, h))
        h = layers.LayerNormalization()(h + layers.Dense(24)(layers.Dense(48, activation="gelu")(h)))
        h = layers.GlobalAveragePooling1D()(h)
        self.model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(h))
        self.model.compile(keras.optimizers.AdamW(0.003), "binary_crossentropy", metrics=["accuracy"])
