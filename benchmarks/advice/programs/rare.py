"""A program with a rare class: one of twenty-five samples has it, and gets a larger weight."""

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """Classes of very different size."""

    master_epochs = 12
    batch_size = 32
    class_weight = {0: 1.0, 1: 8.0}  # noqa: RUF012

    def load_dataset(self):
        random = np.random.default_rng(5)
        x = random.normal(size=(3000, 12)).astype("float32")
        score = 1.5 * x[:, 0] * x[:, 1] + x[:, 2] - x[:, 3]
        y = (score > np.quantile(score, 0.96)).astype("int64")
        self.x_train, self.y_train = x[:2000], y[:2000]
        self.x_test, self.y_test = x[2000:], y[2000:]

    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input((12,)),
                layers.Dense(32, activation="relu"),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        self.model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=[keras.metrics.AUC()])


if __name__ == "__main__":
    ddlf.main(App)
