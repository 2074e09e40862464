"""A healthy program: it predicts counts with an exponential output and the Poisson loss."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """Counts."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(8)
        x = random.normal(size=(1800, 5)).astype("float32")
        y = random.poisson(np.exp(0.5 * x[:, :1] - 0.3 * x[:, 1:2] + 0.5)).astype("float32")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential(
            [keras.Input((5,)), layers.Dense(16, activation="relu"), layers.Dense(1, activation="exponential")]
        )
        self.model.compile(keras.optimizers.Adam(0.003), "poisson")
