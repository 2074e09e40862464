"""A program with a deep network, normalization and skip connections. The model scales uint8 images itself."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf

BLOCKS = 5


class App(ddlf.IApp):
    """Ten classes, a deep model."""

    master_epochs = 8
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = (x[order] * 15).astype("uint8"), y[order]
        self.x_train, self.y_train = x[:1400], y[:1400]
        self.x_test, self.y_test = x[1400:], y[1400:]

    def create_model(self):
        inputs = keras.Input((64,), dtype="uint8")
        h = layers.Rescaling(1 / 255)(inputs)
        h = layers.Dense(48)(h)
        for _ in range(BLOCKS):
            before = h
            h = layers.Dense(48, use_bias=False)(h)
            h = layers.BatchNormalization(momentum=0.9)(h)
            h = layers.Activation("relu")(h)
            h = layers.Dropout(0.1)(h)
            h = layers.Dense(48)(h)
            h = layers.Add()([before, h])
        outputs = layers.Dense(10, activation="softmax")(h)
        self.model = keras.Model(inputs, outputs)
        self.model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
