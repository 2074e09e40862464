"""A program that finds a disc in a noisy image: a small U-Net predicts a mask for each image."""

import keras
import numpy as np
from keras import layers

import ddlf

SIDE = 16


def discs(count):
    """Pictures with one disc each, and masks that are 1 there."""
    random = np.random.default_rng(4)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    middle, radius = random.uniform(4, 12, (count, 2, 1, 1)), random.uniform(2, 4, (count, 1, 1))
    masks = (rows - middle[:, 0]) ** 2 + (columns - middle[:, 1]) ** 2 < radius**2
    pictures = masks * 0.6 + random.normal(0.2, 0.25, masks.shape)
    return pictures[..., None].astype("float32"), masks[..., None].astype("float32")


class App(ddlf.IApp):
    """Segmentation."""

    master_epochs = 5
    batch_size = 16

    def load_dataset(self):
        x, y = discs(700)
        self.x_train, self.y_train = x[:500], y[:500]
        self.x_test, self.y_test = x[500:], y[500:]

    def create_model(self):
        inputs = keras.Input((SIDE, SIDE, 1))
        fine = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
        h = layers.MaxPooling2D(2)(fine)
        h = layers.Conv2D(16, 3, padding="same", activation="relu")(h)
        h = layers.UpSampling2D(2)(h)
        h = layers.Concatenate()([fine, h])
        h = layers.Conv2D(8, 3, padding="same", activation="relu")(h)
        mask = layers.Conv2D(1, 1, activation="sigmoid")(h)
        self.model = keras.Model(inputs, mask)
        self.model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["binary_accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
