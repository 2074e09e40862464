"""A program that decides whether two digits are equal. One encoder reads both, and the distance of its outputs decides."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """A siamese network."""

    master_epochs = 12
    batch_size = 32

    def load_dataset(self):
        x, digits = load_digits(return_X_y=True)
        random = np.random.default_rng(0)
        order = random.permutation(len(x))
        x, digits = (x[order] / 16).astype("float32"), digits[order]
        for part, low, high, count in (("train", 0, 1400, 2400), ("test", 1400, len(x), 600)):
            left = random.integers(low, high, count)
            right = random.integers(low, high, count)
            for number in range(0, count, 2):  # every second pair is one of equal digits
                same = np.flatnonzero(digits[low:high] == digits[left[number]]) + low
                right[number] = random.choice(same)
            setattr(self, f"x_{part}", [x[left], x[right]])
            setattr(self, f"y_{part}", (digits[left] == digits[right]).astype("float32"))

    def create_model(self):
        encoder = keras.Sequential([keras.Input((64,)), layers.Dense(48, activation="relu"), layers.Dense(16)])
        left, right = keras.Input((64,)), keras.Input((64,))
        distance = layers.Subtract()([encoder(left), encoder(right)])
        distance = keras.ops.square(distance)
        h = layers.Dense(16, activation="relu")(distance)
        self.model = keras.Model([left, right], layers.Dense(1, activation="sigmoid")(h))
        self.model.compile(keras.optimizers.Adam(0.003), "binary_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
