"""A healthy program: with its custom loss, the model predicts the 90 % quantile."""

import keras
import numpy as np
from keras import layers

import ddlf


def pinball(y, forecast):
    """Loss of the 0.9 quantile."""
    over = y - forecast
    return keras.ops.mean(keras.ops.maximum(0.9 * over, -0.1 * over), axis=-1)


class App(ddlf.IApp):
    """Quantile regression."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(6)
        x = random.normal(size=(1800, 6)).astype("float32")
        y = x[:, :1] + np.abs(x[:, 1:2]) * random.normal(size=(1800, 1)).astype("float32")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential([keras.Input((6,)), layers.Dense(24, activation="relu"), layers.Dense(1)])
        self.model.compile(keras.optimizers.Adam(0.003), pinball)
