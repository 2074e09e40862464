"""A program that predicts the next value of a series: waves of two lengths and noise, in windows."""

import keras
import numpy as np
from keras import layers

import ddlf

WINDOW = 24


class App(ddlf.IApp):
    """A time series; the test comes later than training."""

    master_epochs = 5
    batch_size = 32

    def load_dataset(self):
        hours = np.arange(1800)
        noise = np.random.default_rng(3).normal(0, 0.05, len(hours))
        series = (np.sin(hours / 4) + 0.5 * np.sin(hours / 11) + noise).astype("float32")
        windows = np.lib.stride_tricks.sliding_window_view(series, WINDOW)[:-1]
        values = series[WINDOW:]
        self.x_train, self.y_train = windows[:1400, :, None], values[:1400]
        self.x_test, self.y_test = windows[1400:, :, None], values[1400:]

    def create_model(self):
        self.model = keras.Sequential([keras.Input((WINDOW, 1)), layers.GRU(16), layers.Dense(1)])
        self.model.compile(keras.optimizers.Adam(0.01), "mse")


if __name__ == "__main__":
    ddlf.main(App)
