"""The program of ``converted_keras.py``, on all workers: what loads and what builds stayed as it was.

python apps/converted.py --local 2 --save model.keras
"""

import keras
from keras import layers

import ddlf

EPOCHS = 6
BATCH_SIZE = 32


def load():
    """Your data; here, digits that come with DDLF."""
    return ddlf.load_digits()


def build():
    """Your model."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.002), "categorical_crossentropy", metrics=["accuracy"])
    return model


class Converted(ddlf.IApp):
    """The arguments of ``fit`` are attributes here. ``batch_size`` counts for each worker: a step of two workers has 64 samples."""

    master_epochs, batch_size = EPOCHS, BATCH_SIZE

    def load_dataset(self):
        (self.x_train, self.y_train), (self.x_test, self.y_test) = load()

    def create_model(self):
        self.model = build()


if __name__ == "__main__":
    ddlf.main(Converted)
