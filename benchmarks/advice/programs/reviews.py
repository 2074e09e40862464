"""A program that decides whether a generated review is kind. Rows of words are padded with zeros."""

import keras
import numpy as np
from keras import layers

import ddlf

WORDS, LENGTH = 200, 24


def reviews(count):
    """Words below 40 are kind, those below 80 are not, all others say nothing."""
    random = np.random.default_rng(1)
    words = random.integers(80, WORDS, (count, LENGTH))
    kind = random.random(count) < 0.5
    says = random.random((count, LENGTH)) < 0.3
    words = np.where(says, random.integers(1, 40, words.shape) + np.where(kind, 0, 40)[:, None], words)
    wrong = random.random((count, LENGTH)) < 0.05
    words = np.where(wrong, random.integers(1, 80, words.shape), words)
    long = random.integers(6, LENGTH + 1, count)
    return words * (np.arange(LENGTH) < long[:, None]), kind.astype("int64")


class App(ddlf.IApp):
    """Two classes of sequences."""

    master_epochs = 5
    batch_size = 32

    def load_dataset(self):
        x, y = reviews(1600)
        self.x_train, self.y_train = x[:1200], y[:1200]
        self.x_test, self.y_test = x[1200:], y[1200:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((LENGTH,)),
                layers.Embedding(WORDS, 8, mask_zero=True),
                layers.LSTM(16),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
