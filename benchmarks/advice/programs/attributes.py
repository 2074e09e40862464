"""A program that predicts several labels of a digit: whether it is even, above four, prime, and has a loop."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf

TRUE_OF = ({0, 2, 4, 6, 8}, {5, 6, 7, 8, 9}, {2, 3, 5, 7}, {0, 6, 8, 9})


class App(ddlf.IApp):
    """Several labels a sample."""

    master_epochs = 12
    batch_size = 32

    def load_dataset(self):
        x, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x = (x[order] / 16).astype("float32")
        y = np.stack([np.isin(digits[order], list(numbers)) for numbers in TRUE_OF], axis=1).astype("float32")
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(48, activation="relu"),
                layers.Dense(4, activation="sigmoid"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["binary_accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
