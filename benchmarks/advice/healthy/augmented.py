"""A healthy program: training shifts and rotates uint8 images at random."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """Augmentation."""

    master_epochs = 6
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = np.kron(x[order].reshape(-1, 8, 8, 1) * 15, np.ones((1, 2, 2, 1))).astype("uint8"), y[order]
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((16, 16, 1)),
                layers.Rescaling(1 / 127.5, offset=-1),
                layers.RandomTranslation(0.1, 0.1),
                layers.RandomRotation(0.05),
                layers.SeparableConv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(32, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10, activation="softmax"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
