"""A healthy program: a PyDataset generates each batch when it is read."""

import keras
import numpy as np
from keras import layers

import ddlf


class Waves(keras.utils.PyDataset):
    """Sines of two lengths, and which it is."""

    def __init__(self, batches, seed, **more):
        super().__init__(**more)
        self.batches, self.seed = batches, seed

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        random = np.random.default_rng((self.seed, number))
        y = random.integers(0, 2, 32)
        phases = np.arange(30) * np.where(y, 0.4, 0.7)[:, None] + random.uniform(0, 6, (32, 1))
        return (np.sin(phases) + random.normal(0, 0.1, phases.shape)).astype("float32"), y


class App(ddlf.IApp):
    """A PyDataset."""

    master_epochs = 3
    batch_size = 32

    def load_dataset(self):
        self.train_data, self.test_data = Waves(40, 0), Waves(10, 1)

    def create_model(self):
        self.model = keras.Sequential(
            [keras.Input((30,)), layers.Dense(16, activation="relu"), layers.Dense(2, activation="softmax")]
        )
        self.model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
