"""A program that classifies digits of 8 x 8 pixels, as rows of 64 numbers, with a small dense network."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """Ten classes, as numbers."""

    master_epochs = 12
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order], y[order]
        x = (x / 16).astype("float32")
        train, test = slice(0, 1400), slice(1400, None)
        self.x_train, self.y_train = x[train], y[train]
        self.x_test, self.y_test = x[test], y[test]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, activation="relu"),
                layers.Dense(32, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
