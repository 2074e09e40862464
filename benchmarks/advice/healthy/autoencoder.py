"""A healthy program: an autoencoder compresses digits into sixteen numbers. Its targets are its inputs."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """An autoencoder."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = (x[order] / 16).astype("float32"), y[order]
        self.x_train, self.y_train = x[:1400], x[:1400]
        self.x_test, self.y_test = x[1400:], x[1400:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(16, activation="relu"),
                layers.Dense(64, activation="sigmoid"),
            ]
        )
        self.model.compile("adam", "mse")
