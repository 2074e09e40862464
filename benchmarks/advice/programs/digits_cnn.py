"""A program that classifies images of digits: one-hot labels, a small convolutional network, and SGD."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


class App(ddlf.IApp):
    """Ten classes, as one-hot rows."""

    master_epochs = 10
    batch_size = 32

    def load_dataset(self):
        data = load_digits()
        order = np.random.default_rng(0).permutation(len(data.images))
        images = (data.images / 16).astype("float32")[order, :, :, None]
        labels = keras.utils.to_categorical(data.target[order], 10)
        self.x_train, self.y_train = images[:1400], labels[:1400]
        self.x_test, self.y_test = images[1400:], labels[1400:]

    def create_model(self):
        model = keras.Sequential()
        model.add(keras.Input((8, 8, 1)))
        model.add(layers.Conv2D(16, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D(2))
        model.add(layers.Conv2D(32, 3, activation="relu"))
        model.add(layers.Flatten())
        model.add(layers.Dropout(0.2))
        model.add(layers.Dense(32, activation="relu"))
        model.add(layers.Dense(10, activation="softmax"))
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="categorical_crossentropy", metrics=["accuracy"]
        )
        self.model = model


if __name__ == "__main__":
    ddlf.main(App)
