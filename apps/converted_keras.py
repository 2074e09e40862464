"""A program in plain Keras, as it may be before it is converted.

python apps/converted_keras.py
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


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    (x, y), (x_test, y_test) = load()
    model = build()
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
    print("test", model.evaluate(x_test, y_test, verbose=0, return_dict=True))
    model.save("model.keras")
