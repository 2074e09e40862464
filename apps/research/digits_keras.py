"""A CNN with augmentation, BatchNorm, a schedule of the learning rate and validation.

``digits_keras.py`` is plain Keras, ``digits.py`` the same on workers: compare them.
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

EPOCHS = 4
BATCH_SIZE = 32


def load():
    """1,797 handwritten digits of 8 x 8 pixels, every fifth one for validation."""
    digits = load_digits()
    x = (digits.images / 16 - 0.5).astype("float32")[..., None]
    y = digits.target
    held_out = np.arange(len(x)) % 5 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


def build(steps):
    inputs = keras.Input((8, 8, 1))
    x = layers.RandomTranslation(0.1, 0.1)(inputs)
    x = layers.RandomRotation(0.05)(x)
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.Activation("relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.1)(x)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x), name="digits")
    rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    x, y, x_val, y_val = load()
    model = build(EPOCHS * len(x) // BATCH_SIZE)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, validation_data=(x_val, y_val))
