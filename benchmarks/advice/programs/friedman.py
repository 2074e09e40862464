"""A program that predicts a number from ten others: a function with a sine, a square and noise (Friedman, 1991)."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import make_friedman1

import ddlf

RATE = 0.01


class App(ddlf.IApp):
    """Regression."""

    master_epochs = 15
    batch_size = 32

    def load_dataset(self):
        x, y = make_friedman1(1500, noise=0.5, random_state=0)
        x = ((x - 0.5) / 0.29).astype("float32")
        y = ((y - y.mean()) / y.std()).astype("float32")
        self.x_train, self.x_test = np.split(x, [1200])
        self.y_train, self.y_test = np.split(y, [1200])

    def create_model(self):
        inputs = keras.Input((10,))
        h = layers.Dense(32, activation="relu")(inputs)
        h = layers.Dense(16, activation="relu")(h)
        outputs = layers.Dense(1)(h)
        self.model = keras.Model(inputs, outputs)
        self.model.compile(keras.optimizers.Adam(RATE), loss="mse", metrics=["mae"])


if __name__ == "__main__":
    ddlf.main(App)
