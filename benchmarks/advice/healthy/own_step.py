"""A healthy program: a model with a custom train_step learns to remove noise from its inputs."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import ddlf


@keras.saving.register_keras_serializable()
class Denoiser(keras.Model):
    """A model that runs Keras's training step and adds its own metric."""

    def __init__(self, **more):
        super().__init__(**more)
        self.body = keras.Sequential([layers.Dense(48, activation="relu"), layers.Dense(64)])
        self.noise = layers.GaussianNoise(0.2)

    def build(self, shape):
        self.body.build(shape)

    def call(self, inputs, training=None):
        return self.body(self.noise(inputs, training=training))

    def train_step(self, data):
        x, y = data
        logs = super().train_step((x, y))
        return {**logs, "step_loss": logs["loss"]}


class App(ddlf.IApp):
    """An own train_step."""

    master_epochs = 8
    batch_size = 32

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = (x[order] / 16).astype("float32"), y[order]
        self.x_train, self.y_train = x[:1400], x[:1400]
        self.x_test, self.y_test = x[1400:], x[1400:]

    def create_model(self):
        self.model = Denoiser()
        self.model.build((None, 64))
        self.model.compile("adam", "mse")
