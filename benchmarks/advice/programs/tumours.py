"""A program that classifies tumours as benign or not, by thirty measurements of different scales, with one output unit."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer

import ddlf


class App(ddlf.IApp):
    """Two classes, as 0 and 1."""

    master_epochs = 15
    batch_size = 16

    def load_dataset(self):
        x, y = load_breast_cancer(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order].astype("float32"), y[order].astype("float32")
        mean, spread = x[:400].mean(axis=0), x[:400].std(axis=0)
        x = (x - mean) / spread
        self.x_train, self.x_test = x[:400], x[400:]
        self.y_train, self.y_test = y[:400], y[400:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((30,)),
                layers.Dense(16, activation="relu", name="hidden"),
                layers.Dense(1, activation="sigmoid", name="benign"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["accuracy"])


if __name__ == "__main__":
    ddlf.main(App)
