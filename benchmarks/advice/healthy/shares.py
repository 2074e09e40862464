"""A healthy program: it predicts shares of votes, which sum to one, with the Kullback-Leibler divergence."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """Distributions as labels."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(9)
        x = random.normal(size=(1800, 8)).astype("float32")
        values = np.exp(x @ np.random.default_rng(10).normal(size=(8, 4)) / 2)
        y = (values / values.sum(axis=1, keepdims=True)).astype("float32")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(24, activation="relu"), layers.Dense(4, activation="softmax")]
        )
        self.model.compile(keras.optimizers.Adam(0.003), "kl_divergence")
