"""A program with a convolutional network and a falling learning rate, whose step count is for two slots."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """A schedule; batches are normalized."""

    master_epochs = 8
    batch_size = 32
    slots = 2

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = (x[order] / 16).astype("float32").reshape(-1, 8, 8, 1), y[order]
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        steps = self.master_epochs * len(self.x_train) // (self.slots * self.batch_size)
        rate = keras.optimizers.schedules.CosineDecay(0.1, steps)
        self.model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dense(10, activation="softmax"),
            ]
        )
        self.model.compile(
            keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )


if __name__ == "__main__":
    ddlf.main(App)
