"""A healthy program: two classes with the labels -1 and 1, and the hinge loss."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """A hinge loss."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(11)
        x = random.normal(size=(1800, 8)).astype("float32")
        y = np.where(x[:, 0] * x[:, 1] > 0.1, 1.0, -1.0).astype("float32")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential([keras.Input((8,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
        self.model.compile(keras.optimizers.Adam(0.005), "hinge")
