"""A program with two inputs, the halves of a digit, and two outputs: the digit and its amount of ink."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """Several inputs and several tasks."""

    master_epochs = 12
    batch_size = 32

    def load_dataset(self):
        x, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, digits = (x[order] / 16).astype("float32"), digits[order]
        ink = x.sum(axis=1, keepdims=True)
        ink = (ink - ink.mean()) / ink.std()
        parts = x.reshape(-1, 8, 2, 4).transpose(2, 0, 1, 3).reshape(2, -1, 32)
        inputs = {"left": parts[0], "right": parts[1]}
        targets = {"digit": digits, "ink": ink}
        self.x_train = {name: array[:1400] for name, array in inputs.items()}
        self.y_train = {name: array[:1400] for name, array in targets.items()}
        self.x_test = {name: array[1400:] for name, array in inputs.items()}
        self.y_test = {name: array[1400:] for name, array in targets.items()}

    def create_model(self):
        left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
        both = layers.Concatenate()([left, right])
        h = layers.Dense(64, activation="relu")(both)
        digit = layers.Dense(10, activation="softmax", name="digit")(h)
        ink = layers.Dense(1, name="ink")(h)
        self.model = keras.Model({"left": left, "right": right}, {"digit": digit, "ink": ink})
        self.model.compile(
            keras.optimizers.Adam(0.003),
            loss={"digit": "sparse_categorical_crossentropy", "ink": "mse"},
            metrics={"digit": ["accuracy"]},
        )


if __name__ == "__main__":
    ddlf.main(App)
