"""A healthy program: features have very different scales, and the model normalizes them itself."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_wine

import ddlf


class App(ddlf.IApp):
    """A table."""

    master_epochs = 40
    batch_size = 32

    def load_dataset(self):
        x, y = load_wine(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order].astype("float32"), y[order]
        self.x_train, self.y_train = x[:140], y[:140]
        self.x_test, self.y_test = x[140:], y[140:]

    def create_model(self):
        scale = layers.Normalization()
        scale.adapt(self.x_train)
        self.model = keras.Sequential(
            [keras.Input((13,)), scale, layers.Dense(16, activation="relu"), layers.Dense(3, activation="softmax")]
        )
        self.model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
