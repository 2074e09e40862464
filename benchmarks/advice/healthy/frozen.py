"""A healthy program: a new head on a frozen backbone."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """Transfer."""

    master_epochs = 12
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = (x[order] / 16).astype("float32").reshape(-1, 8, 8, 1), y[order]
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        backbone = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.Conv2D(32, 3, activation="relu"),
                layers.GlobalMaxPooling2D(),
            ],
            name="backbone",
        )
        backbone.trainable = False
        inputs = keras.Input((8, 8, 1))
        h = layers.Dense(64, activation="relu")(backbone(inputs, training=False))
        self.model = keras.Model(inputs, layers.Dense(10, activation="softmax")(h))
        self.model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
