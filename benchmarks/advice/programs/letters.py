"""A program that predicts the next letter of a text at each position, with a small causal network."""

import keras
import numpy as np
from keras import layers

import ddlf

WHICH, WHO = (
    ("the", "a", "my", "every", "no", "that", "one"),
    ("cat", "dog", "neighbour", "clock", "river", "child", "king"),
)
HOW, DOES = (
    ("small", "old", "quiet", "red", "tired", "proud", "other"),
    ("sees", "hears", "follows", "forgets", "paints"),
)
LETTERS = " abcdefghijklmnopqrstuvwxyz."


def text(sentences):
    """Sentences of a small grammar, as numbers of letters."""
    random = np.random.default_rng(2)
    words = [[random.choice(kind) for kind in (WHICH, HOW, WHO, DOES, WHICH, HOW, WHO)] for _ in range(sentences)]
    return np.array([LETTERS.index(letter) for row in words for letter in " ".join(row) + ". "])


class App(ddlf.IApp):
    """A language model."""

    master_epochs = 6
    batch_size = 32

    def load_dataset(self):
        letters = text(1000)
        rows = letters[: len(letters) // 33 * 33].reshape(-1, 33)
        x, y = rows[:, :-1], rows[:, 1:]
        self.x_train, self.y_train = x[:-150], y[:-150]
        self.x_test, self.y_test = x[-150:], y[-150:]

    def create_model(self):
        inputs = keras.Input((32,), dtype="int32")
        h = layers.Embedding(len(LETTERS), 16)(inputs)
        h = layers.Conv1D(48, 4, padding="causal", activation="relu")(h)
        h = layers.Conv1D(48, 4, padding="causal", activation="relu")(h)
        outputs = layers.Dense(len(LETTERS))(h)
        self.model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
