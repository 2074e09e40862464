"""A healthy program: three tasks share one trunk: a class, a number, and several labels."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """Several tasks."""

    master_epochs = 8
    batch_size = 32

    def load_dataset(self):
        random = np.random.default_rng(12)
        x = random.normal(size=(1800, 12)).astype("float32")
        targets = [
            (x[:, :3].sum(axis=1) > 0).astype("int64"),
            x[:, 3:4] * x[:, 4:5],
            (x[:, 5:9] > 0.5).astype("float32"),
        ]
        self.x_train, self.y_train = x[:1400], [array[:1400] for array in targets]
        self.x_test, self.y_test = x[1400:], [array[1400:] for array in targets]

    def create_model(self):
        inputs = keras.Input((12,))
        trunk = layers.Dense(48, activation="relu")(inputs)
        kind = layers.Dense(2, activation="softmax", name="kind")(trunk)
        number = layers.Dense(1, name="number")(layers.Dense(16, activation="relu")(trunk))
        several = layers.Dense(4, activation="sigmoid", name="several")(trunk)
        self.model = keras.Model(inputs, [kind, number, several])
        losses = ["sparse_categorical_crossentropy", "mse", "binary_crossentropy"]
        self.model.compile(keras.optimizers.Adam(0.003), losses, loss_weights=[1.0, 0.5, 1.0])
